"""What compare_attention.py trains on: text that Python packages ship, or strains of a genome, two behind one another in a sequence."""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from _genome import UNKNOWN, read_genome

from dilated_attention.models import BASES, kmers, other_strand

SUFFIXES = (".py", ".md", ".rst", ".txt")
# of bytes: longer files are tables; of all text: a package of more than that share is not held out
LONGEST_FILE, LARGEST_HELD_OUT, HOLD_OUT = 2**20, 0.02, 12
# bases (or bytes) that must be equal before one that counts as copied
ANCHOR = 24


class Text:
    """Files of Python packages, sorted by path, each content once and each behind a line with its path; one package in 12 is held out.

    Args:
        folder: of packages; None for this Python's site-packages and standard library.
        cache: a file that keeps what was read of this Python, for the runs after this one.
        device: that keeps the bytes.
    """

    unit, vocab_size, kmer = "byte", 256, 1

    def __init__(self, folder: Path | None, cache: Path, device: torch.device) -> None:
        if folder is None and not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            part = cache.with_name(f"{cache.name}.{os.getpid()}")
            torch.save(self._read(None), part)
            part.replace(cache)
        self.source: str
        self.source, parts = torch.load(cache) if folder is None else self._read(folder)
        self.parts = [part.to(device) for part in parts]
        self.data = hashlib.sha256(parts[0].numpy().tobytes()).hexdigest()[:16]

    @staticmethod
    def _read(folder: Path | None) -> tuple[str, list[torch.Tensor]]:
        folders = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "stdlib")] if folder is None else [folder]
        packages: dict[str, bytearray] = {}
        seen: set[bytes] = set()
        for root in folders:
            for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
                name = path.relative_to(root)
                if "site-packages" in name.parts or not 0 < path.stat().st_size <= LONGEST_FILE:
                    continue
                content = path.read_bytes()
                digest = hashlib.sha256(content).digest()
                if digest not in seen:
                    seen.add(digest)
                    # a package, and the folder of what is known of it
                    package = packages.setdefault(name.parts[0].partition("-")[0].removesuffix(".py").lower(), bytearray())
                    package += f"\n# {name}\n".encode() + content
        total = sum(map(len, packages.values()))
        parts = [bytearray(), bytearray()]
        for package_name, text in packages.items():
            is_small = len(text) <= max(LARGEST_HELD_OUT * total, 2**16)
            parts[is_small and hashlib.sha256(package_name.encode()).digest()[0] % HOLD_OUT == 0] += text
        if not all(parts):
            raise ValueError(f"{folders[0]} has {len(packages)} packages of text; expected so many that one in {HOLD_OUT} can be held out")
        source = f"{len(seen):,} files of {len(packages):,} Python packages"
        return source, [torch.frombuffer(part, dtype=torch.uint8).clone() for part in parts]

    def _check(self, part: torch.Tensor, length: int) -> None:
        if len(part) <= length:
            raise ValueError(f"{self.source} have {len(part):,} bytes in a part and --context is {length:,}; choose a smaller one")

    def random_window(self, length: int, generator: torch.Generator) -> torch.Tensor:
        """(length + 1,) bytes."""
        text = self.parts[0]
        self._check(text, length)
        start = int(torch.randint(len(text) - length, (), generator=generator))
        return text[start : start + length + 1].long()

    def held_out(self, length: int, count: int) -> Iterator[torch.Tensor]:
        """The same, ``count`` times evenly over the held-out packages."""
        text = self.parts[1]
        self._check(text, length)
        for start in torch.linspace(0, len(text) - length - 1, count).long().tolist():
            yield text[start : start + length + 1].long()

    def inputs(self, window: torch.Tensor) -> torch.Tensor:
        return window[..., :-1]

    def targets(self, window: torch.Tensor) -> torch.Tensor:
        return window[..., 1:]


class Strains:
    """Strains of a genome: a sequence is a stretch of one and, behind an N, the same place of another, so that a base and its copy are
    about half a context apart.

    Args:
        files: FASTA files, each of a strain, of either strand; strains of several species may be among them.
        length: of the longest sequence.
        device: that keeps the bases.

    Training shuffles the four letters of each sequence and takes either strand, so that 48 texts come of each place: a small genome is
    read a hundred times in some minutes, and what a model knows by heart it need not look up. The last quarter of each is held out.
    """

    unit, vocab_size, kmer, share = "base", len(BASES), 6, 0.75

    def __init__(self, files: list[Path], length: int, device: torch.device) -> None:
        if len(files) < 2:
            raise ValueError(f"--data genomes has {len(files)} files; expected FASTA files of at least two strains")
        genomes = [read_genome(path) for path in files]
        for i, genome in enumerate(genomes):
            if any(genome.symbols.equal(earlier.symbols) for earlier in genomes[:i]):
                raise ValueError(f"{files[i]} holds the bases of another file; expected strains that differ: leave it out")
        strains: list[torch.Tensor] = []
        coded: list[torch.Tensor] = []
        for genome in genomes:
            strand = genome.symbols.to(device=device, dtype=torch.uint8)
            # files hold either strand: the one that has more places in common with those before
            ways = [(way, codes_of(way, 5)) for way in (strand, other_strand(strand))]
            way, code = max(ways, key=lambda x: sum(len(anchors(x[1], earlier)) for earlier in coded))
            strains.append(way)
            coded.append(code)
        cuts = [int(len(strain) * self.share) for strain in strains]
        self.source = f"{len(strains)} strains, the first {genomes[0].name}"
        self.half, self.strains = length // 2, strains
        # (begin, end) of the training part and of the held-out part, of each
        self.bounds = [[(0, cut), (cut, len(strain))] for cut, strain in zip(cuts, strains, strict=True)]
        # (strain, place, other strain, its place)
        common = [(i, a, j, b) for i, one in enumerate(coded) for j, x in enumerate(coded) if i != j for a, b in anchors(one, x)]
        self.places = [[x for x in common if self._fits(part, *x[:2]) and self._fits(part, *x[2:])] for part in (0, 1)]
        if not all(self.places):
            raise ValueError(
                f"{self.source}: {', '.join(f'{len(x):,}' for x in strains)} bases have {len(common):,} common places; of these "
                f"{len(self.places[0]):,} and {len(self.places[1]):,} (held out) are followed by {self.half:,} bases; choose a smaller "
                "--context, or strains that are more alike"
            )
        self.data = hashlib.sha256(torch.cat(strains).cpu().numpy().tobytes()).hexdigest()[:16]

    def _fits(self, part: int, strain: int, start: int) -> bool:
        begin, end = self.bounds[strain][part]
        return begin <= start and start + self.half <= end

    def _window(self, part: int, index: int, earlier: int, half: int) -> torch.Tensor:
        i, a, j, b = self.places[part][index]
        b = max(b - earlier, self.bounds[j][part][0])
        one, other = (self.strains[strain][start : start + half] for strain, start in ((i, a), (j, b)))
        return torch.cat([one, one.new_full((1,), UNKNOWN), other]).long()

    def random_window(self, length: int, generator: torch.Generator) -> torch.Tensor:
        """(length + 1,) bases. The second strain begins up to a 16th of them earlier than the first, so that no distance is that of all
        copies."""
        half = length // 2
        assert half <= self.half
        draw = functools.partial(torch.randint, size=(), generator=generator)
        window = self._window(0, int(draw(len(self.places[0]))), int(draw(max(1, length // 16))), half)
        window = other_strand(window) if draw(2) else window
        letters = torch.cat([torch.randperm(4, generator=generator), torch.tensor([UNKNOWN])])
        return letters.to(window.device)[window]

    def held_out(self, length: int, count: int) -> Iterator[torch.Tensor]:
        """The same in the held-out parts, with their own letters, at most ``count`` times."""
        last = len(self.places[1]) - 1
        for i in sorted(set(torch.linspace(0, last, min(count, last + 1)).long().tolist())):
            yield self._window(1, i, length // 64, length // 2)

    def inputs(self, window: torch.Tensor) -> torch.Tensor:
        return kmers(window[..., :-1], self.kmer, both_sides=False)

    def targets(self, window: torch.Tensor) -> torch.Tensor:
        return window[..., 1:].where(window[..., 1:] != UNKNOWN, -100)


def codes_of(symbols: torch.Tensor, base: int) -> torch.Tensor:
    """(N − ANCHOR + 1,) int64: a number for the ANCHOR symbols from each place, equal where they are (of bytes almost surely)."""
    n = max(0, len(symbols) - ANCHOR + 1)
    # beyond 2^63 it wraps around
    factor = base if base < 8 else 6364136223846793005
    codes = torch.zeros(n, dtype=torch.int64, device=symbols.device)
    for i in range(ANCHOR):
        codes = codes * factor + symbols[i : i + n] + 1
    return codes


def anchors(one: torch.Tensor, other: torch.Tensor, step: int = 512) -> list[tuple[int, int]]:
    """Every ``step`` places of the codes ``one``, each with the place where ``other`` has the same code, if that is exactly one."""
    ordered, order = other.sort()
    wanted = one[::step].contiguous()
    low, high = (torch.searchsorted(ordered, wanted, right=is_right) for is_right in (False, True))
    is_one = high == low + 1
    return list(zip((is_one.nonzero()[:, 0] * step).tolist(), order[low[is_one]].tolist(), strict=True))


def copy_distance(window: torch.Tensor, base: int) -> torch.Tensor:
    """For each target of a window (N + 1,): how far back the ANCHOR symbols before it stand last, (N,) int64; 0 where they never did."""
    codes = codes_of(window[:-1], base)
    ordered, order = codes.sort(stable=True)
    same = ordered[1:] == ordered[:-1]
    distance = torch.zeros_like(codes)
    distance[order[1:]] = torch.where(same, order[1:] - order[:-1], 0)
    return torch.nn.functional.pad(distance, (ANCHOR - 1, 0))


def binned(at: torch.Tensor, bits: torch.Tensor) -> list[list[float]]:
    """[from, below, tokens, mean bits] of the positive places ``at``, by powers of 2; 0 to 1 are those at none."""
    which = torch.where(at > 0, at.clamp(min=1).log2().floor().long() + 1, 0)[~bits.isnan()]
    counts = torch.bincount(which).tolist()
    sums = torch.bincount(which, weights=bits[~bits.isnan()].double()).tolist()
    rows = enumerate(zip(counts, sums, strict=True))
    return [[2 ** (i - 1) if i else 0, 2**i, count, total / count] for i, (count, total) in rows if count]
