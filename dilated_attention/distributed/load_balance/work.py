"""Counts the work of runs of positions: their query-key pairs, and the key rows that a process must receive to compute them.

Pairs are counted between positions, by a function P(x), the pairs of all queries before position x, so those of a run [a, b) are
P(b) − P(a). Of a causal dense document, x positions have x(x + 1)/2 pairs; a branch (w, r) of a dilated pattern has

    P(x) = Σ_h ⌊x/w⌋ · f(t(w)) + f(t(x mod w)),    f(t) = t(t + 1)/2,    t(n) = ⌊n/r⌋ + [o_h < n mod r], positions taken among n

so that the sum over heads needs but the number of heads with o_h < m, for each m. Where not causal, x positions of L have x · L pairs, and
f is t(x mod w) times the positions taken in the segment. Block patterns are counted block by block, since kernels compute blocks whole.
All counts are means over heads.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dilated_attention.distributed.block_exchange.plan import entries_of
from dilated_attention.distributed.exchange.plan import RingBlockProblem, RingProblem, keys_beyond
from dilated_attention.engine.branches.plan import Range
from dilated_attention.pattern import MAX_LENGTH, NOT_IN_BRANCH, BlockPattern, DilatedPattern
from dilated_attention.pattern.blocks.base import Entries

DENSE = DilatedPattern((MAX_LENGTH,), (1,), "zero")
# every process's runs [start, end), ascending
Shards = Sequence[Sequence[Range]]


class Work(Protocol):
    """The work of one kind of layer on packed documents."""

    # runs begin at multiples of it, counted in their document
    unit: int

    def pairs_before(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the pairs, float64, of all queries before each of the positions."""

    def rows_received(self, shards: Shards) -> list[float]:
        """Returns how many key rows of other processes each process needs."""


class Documents:
    """Packed documents [start, end), which partition a sequence."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self.ranges = ranges
        self.bounds = {0, *(end for _, end in ranges)}
        self.starts, self.ends = (torch.tensor([x[i] for x in ranges], dtype=torch.int64) for i in (0, 1))

    def place(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (index of the document, position in it); the last document's end counts as its own."""
        index = (torch.bucketize(positions, self.starts, right=True) - 1).clamp(min=0)
        return index, positions - self.starts[index]


class BranchWork:
    """The work of a dense or dilated pattern."""

    unit = 1

    def __init__(self, pattern: DilatedPattern, documents: Documents, num_heads: int, *, is_causal: bool) -> None:
        self.pattern, self.documents, self.num_heads, self.is_causal = pattern, documents, num_heads, is_causal
        self._branches = [
            _Branch.of(length, rate, row) for (length, rate), row in zip(pattern.branches, pattern.offsets(num_heads), strict=True)
        ]
        lengths = documents.ends - documents.starts
        whole = self._of_document(lengths, lengths)
        self._before = whole.cumsum(0) - whole

    def pairs_before(self, positions: torch.Tensor) -> torch.Tensor:
        index, x = self.documents.place(positions)
        length = (self.documents.ends - self.documents.starts)[index]
        return self._before[index] + self._of_document(x, length)

    def _of_document(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Returns the pairs of the first x queries of documents."""
        total = torch.zeros(x.shape, dtype=torch.float64)
        for branch in self._branches:
            full = torch.div(x, branch.length, rounding_mode="floor")
            rest = x - full * branch.length
            # an int64 tensor times a number is float32, in which the pairs of a dense pattern overflow
            if self.is_causal:
                total += full.double() * branch.causal_pairs + branch.causal(rest)
            else:
                last = (length - full * branch.length).clamp(max=branch.length)
                total += full.double() * branch.pairs + branch.product(rest, last)
        return total / self.num_heads

    def rows_received(self, shards: Shards) -> list[float]:
        """See ``Work``. A row that several branches take counts for each of them."""
        bounds, documents = self.documents.bounds, self.documents.ranges
        # runs of whole documents see nothing beyond them
        cut = tuple(tuple(run for run in mine if not bounds.issuperset(run)) for mine in shards)
        heads = self.num_heads
        if not any(cut):
            return [0.0] * len(shards)
        problem = RingProblem(self.pattern, documents, cut, heads, heads, self.is_causal)
        found = []
        for mine, of_cut in zip(shards, cut, strict=True):
            ends = list(itertools.accumulate((end - start for start, end in mine), initial=0))
            starts = [start for start, _ in mine]
            rows = 0.0
            for branch in self._branches:
                for _, low, high in keys_beyond(problem, branch.length, of_cut):
                    own = _held_before(mine, starts, ends, high) - _held_before(mine, starts, ends, low)
                    rows += (high - low - own) * float(branch.below[-1]) / (heads * branch.rate)
            found.append(rows)
        return found


@dataclass(frozen=True, eq=False)
class _Branch:
    """A branch (w, r), and for each m ≤ r how many heads take positions at an offset below m, (r + 1,) float64.

    Counts are float64, since squares of long sequences overflow int64.
    """

    length: int
    rate: int
    below: torch.Tensor

    @functools.cached_property
    def causal_pairs(self) -> float:
        """Returns the causal pairs of a whole segment, summed over heads."""
        return float(self.causal(torch.tensor(self.length)))

    @functools.cached_property
    def pairs(self) -> float:
        """Returns the pairs of a whole segment, summed over heads."""
        return float(self.product(torch.tensor(self.length), torch.tensor(self.length)))

    @classmethod
    def of(cls, length: int, rate: int, offsets: Sequence[int]) -> _Branch:
        count = Counter(offset for offset in offsets if offset != NOT_IN_BRANCH)
        return cls(length, rate, torch.tensor(list(itertools.accumulate((count[m] for m in range(rate)), initial=0)), dtype=torch.float64))

    def _parts(self, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.div(n, self.rate, rounding_mode="floor")
        return whole.double(), n - whole * self.rate

    def causal(self, n: torch.Tensor) -> torch.Tensor:
        """Returns Σ_h t(t + 1)/2 of the first n positions of a segment."""
        whole, rest = self._parts(n)
        # a head that takes one position more has t + 1 pairs more
        return self.below[-1] * whole * (whole + 1) / 2 + self.below[rest] * (whole + 1)

    def product(self, n: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Returns Σ_h t(n) t(of)."""
        (a, x), (b, y) = self._parts(n), self._parts(of)
        return self.below[-1] * a * b + a * self.below[y] + b * self.below[x] + self.below[torch.minimum(x, y)]


def _held_before(mine: Sequence[Range], starts: list[int], ends: list[int], position: int) -> int:
    """Returns how many positions of the runs are before a position; ``ends``: lengths of all runs before each, summed."""
    index = bisect.bisect_right(starts, position) - 1
    return 0 if index < 0 else ends[index] + min(position, mine[index][1]) - starts[index]


class BlockWork:
    """The work of a block pattern: of each ``unit`` = max(q_block, k_block) positions of a document, counted from its first.

    Attributes:
        first: (documents + 1,) the first unit of each document.
        before: (units + 1,) pairs of all units before each, of all list groups.
        groups: the number of different block lists: 1 or the number of heads.
        needs: (needs,) int64, (group · units + unit of queries) · units + unit of keys, each combination once.
    """

    def __init__(self, pattern: BlockPattern, documents: Documents, num_heads: int, *, is_causal: bool, device: torch.device) -> None:
        self.unit, self.documents = max(pattern.q_block, pattern.k_block), documents
        lengths = documents.ends - documents.starts
        self.first = torch.nn.functional.pad((-(-lengths // self.unit)).cumsum(0), (1, 0))
        units = int(self.first[-1])
        pairs, self.groups = torch.zeros(units, dtype=torch.float64, device=device), 1
        needs = [torch.zeros(0, dtype=torch.int64, device=device)]
        lengths, first = lengths.to(device), self.first.to(device)
        for document, x in _listed(pattern, lengths, num_heads, is_causal=is_causal):
            length = lengths[document]
            queries = (length - x.row * pattern.q_block).clamp(max=pattern.q_block)
            keys = (length - x.column * pattern.k_block).clamp(max=pattern.k_block)
            row = first[document] + x.row * pattern.q_block // self.unit
            column = first[document] + x.column * pattern.k_block // self.unit
            pairs.index_add_(0, row, (queries * keys).double())
            # a document of one unit is never cut
            needs.append(((x.group * units + row) * units + column)[length > self.unit].unique())
            self.groups = max(self.groups, x.num_groups)
        self.before = torch.nn.functional.pad(pairs.cpu().cumsum(0), (1, 0)) / self.groups
        self.needs = torch.cat(needs).cpu()

    def _units_before(self, positions: torch.Tensor) -> torch.Tensor:
        index, x = self.documents.place(positions)
        return self.first[index] - (-x // self.unit)

    def pairs_before(self, positions: torch.Tensor) -> torch.Tensor:
        return self.before[self._units_before(positions)]

    def rows_received(self, shards: Shards) -> list[float]:
        size, units = len(shards), int(self.first[-1])
        runs = sorted((*run, rank) for rank, mine in enumerate(shards) for run in mine)
        starts, ends, ranks = (torch.tensor(x, dtype=torch.int64) for x in zip(*runs, strict=True))
        owner = torch.repeat_interleave(ranks, self._units_before(ends) - self._units_before(starts))
        reader, column, group = owner[self.needs // units % units], self.needs % units, self.needs // units**2
        far = reader != owner[column]
        wanted = ((group * size + reader) * units + column)[far].unique()
        rows = torch.bincount(wanted // units % size, minlength=size) * (self.unit / self.groups)
        return rows.tolist()  # type: ignore[no-any-return]


def _listed(pattern: BlockPattern, lengths: torch.Tensor, num_heads: int, *, is_causal: bool) -> Iterator[tuple[torch.Tensor, Entries]]:
    """Yields the kept blocks of documents of these lengths, with the index of each block's document."""

    @functools.cache
    def of_length(length: int) -> list[Entries]:
        problem = RingBlockProblem(pattern, ((0, length),), (((0, length),),), num_heads, 1, is_causal)
        return [entries for _, entries in entries_of(problem, length, lengths.device)]

    longest = of_length(int(lengths.max()))
    # the rows of a causal pattern that is the same in every sequence are the first of the longest document's; a block of more queries than
    # keys may hold keys behind a document's last
    if is_causal and pattern.is_prefix_stable and pattern.q_block <= pattern.k_block and len(longest) == longest[0].num_groups == 1:
        (x,) = longest
        counts = torch.searchsorted(x.row, -(-lengths // pattern.q_block))
        document = torch.repeat_interleave(counts)
        index = torch.arange(len(document), device=lengths.device) - (counts.cumsum(0) - counts)[document]
        yield document, Entries(x.group[index], x.row[index], x.column[index], x.full[index], x.key[index], 1)
        return
    for i, length in enumerate(lengths.tolist()):
        for entries in of_length(length):
            yield torch.full_like(entries.row, i), entries


def works_of(
    patterns: Sequence[BlockPattern | DilatedPattern | None],
    documents: tuple[Range, ...],
    num_heads: int,
    *,
    is_causal: bool,
    device: torch.device,
) -> list[Work]:
    """Returns the work of each kind of layer; None stands for dense attention."""
    packed = Documents(documents)
    return [
        BlockWork(pattern, packed, num_heads, is_causal=is_causal, device=device)
        if isinstance(pattern, BlockPattern)
        else BranchWork(pattern or DENSE, packed, num_heads, is_causal=is_causal)
        for pattern in patterns
    ]
