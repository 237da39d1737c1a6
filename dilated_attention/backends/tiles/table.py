"""A pattern on documents as one flat table of tiles.

A segment of branch (w, r) is split into tiles of ``tile`` selected positions; one table row describes this tile for every head. The results
of a branch are stored at *places*: the selected positions of its segments in order, ceil(w/r) places per segment, one document after the
other.

A row holds: branch, rate, first position of the segment, its length, tile, place of the segment's first result, ceil(w'/r) with
w' = min(w, document), and place of the segment's first query (in the table of keys).

Kernels write tables on the device (``table_kernels.py``). This module counts their rows and places in closed form, without Triton, so a
new length costs no tensor operation on the host and no copy. So it does with the scratch memory of each pass, for launches and plans.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Range = tuple[int, int]
# positions and places are counted in 32 bits
MAX_PLACES = 2**31 - 2**20
# (elements, dtype) of each part of an allocation
Parts = tuple[tuple[int, torch.dtype], ...]
# compute capabilities with 163 KiB of shared memory per program, or more; others have 99
LARGE_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True)
class Walk:
    """The arguments that determine a table.

    Args:
        branches: (w, r) of each branch.
        documents: non-empty (start, end) pairs that partition the positions.
        queries: the range of positions that have a query.
        direct: the branch, of rate 1, whose results for queries are written directly to the output, or −1; its places come last.
        key_direct: the same for the gradients of keys and values.
        num_keys: positions [0, num_keys) have a key; None for all.
    """

    branches: tuple[tuple[int, int], ...]
    documents: tuple[Range, ...]
    queries: Range
    direct: int = -1
    key_direct: int = -1
    num_keys: int | None = None

    @property
    def num_branches(self) -> int:
        return len(self.branches)

    @property
    def keys(self) -> Range:
        return 0, self.documents[-1][1] if self.num_keys is None else self.num_keys

    @property
    def is_cut(self) -> bool:
        """Whether some position has no query or no key."""
        whole = 0, self.documents[-1][1]
        return self.queries != whole or self.keys != whole

    @property
    def steps(self) -> int:
        """The number of bisection steps that find a position's document."""
        return (len(self.documents) - 1).bit_length()


class Span(NamedTuple):
    """Where the results of one document and branch are stored.

    Args:
        length, places: segment length, and places per segment.
        base: place of segment 0.
        first, segments: index of the first segment with positions in the range, and the number of such segments.
    """

    length: int
    places: int
    base: int
    first: int
    segments: int


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of each branch, one a document, and the number of places in all branches except the direct one, and in all branches."""

    of_branch: tuple[tuple[Span, ...], ...]
    num_places: int
    all_places: int


@functools.lru_cache(maxsize=16)
def make_spans(walk: Walk, of_keys: bool) -> Spans:
    """Returns the spans of the results at the queries' positions, or at the positions of all keys."""
    (first_position, last_position), direct = (walk.keys, walk.key_direct) if of_keys else (walk.queries, walk.direct)
    spans: dict[int, tuple[Span, ...]] = {}
    base = apart = 0
    for branch in sorted(range(walk.num_branches), key=lambda b: b == direct):
        w, rate = walk.branches[branch]
        apart = base if branch == direct else apart
        of_documents = []
        for start, end in walk.documents:
            length = min(w, end - start)
            places = -(-length // rate)
            low, high = max(start, first_position), min(end, last_position)
            first = (low - start) // length
            count = (high - 1 - start) // length - first + 1 if low < high else 0
            of_documents.append(Span(length, places, base - first * places, first, count))
            base += count * places
        spans[branch] = tuple(of_documents)
    return Spans(tuple(spans[b] for b in range(walk.num_branches)), apart if direct >= 0 else base, base)


def num_tiles(walk: Walk, of_keys: bool, tile: int) -> int:
    """Returns the number of tiles of ``tile`` queries, or keys."""
    low, high = walk.keys if of_keys else walk.queries
    total = 0
    for (_, rate), of_documents in zip(walk.branches, make_spans(walk, of_keys).of_branch, strict=True):
        for (start, end), (length, places, _, first, count) in zip(walk.documents, of_documents, strict=True):
            # segments between the first and the last one are whole
            total += max(0, count - 2) * -(-places // tile)
            for segment in {first, first + count - 1} if count else ():
                begin = start + segment * length
                rows = -(-(min(begin + length, end, high) - max(begin, low)) // rate)
                total += -(-rows // tile)
    return total


class Extent(NamedTuple):
    """The numbers of intermediate rows, which the merge or the sum reads.

    Args:
        batch, heads, key_heads: B, H, and the number of heads for which gradients of keys are summed.
        part_rows, delta_rows: number of query places in all branches except the direct one, and in all branches.
        key_part_rows: number of key places in all branches except the direct one.
    """

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    part_rows: int
    delta_rows: int
    key_part_rows: int

    def own_outputs(self) -> int:
        """Returns the number of elements of the branches' own outputs."""
        return self.batch * self.heads * self.part_rows * self.head_dim

    def forward(self, dtype: torch.dtype, *, is_saved: bool) -> Parts:
        """Returns the parts of the forward: the branches' outputs, unless they are stored elsewhere, and their lse."""
        return (0 if is_saved else self.own_outputs(), dtype), (self.batch * self.heads * self.part_rows, torch.float32)

    def backward(self, dtype: torch.dtype, *, dropout: bool) -> Parts:
        """Returns the parts of the backward: per query row δ, lse · log2(e) and with dropout two words; dq, dk and dv of the branches."""
        keys = self.batch * self.key_heads * self.key_part_rows * self.head_dim
        stats = (4 if dropout else 2) * self.batch * self.heads * self.delta_rows
        return (stats, torch.float32), (self.own_outputs(), dtype), (keys, dtype), (keys, dtype)


def shares_keys(offsets: tuple[tuple[int, ...], ...], group: int) -> bool:
    """Whether the query heads of each key head, ``group`` of them, read the same keys."""
    return all(len(set(row[h : h + group])) == 1 for row in offsets for h in range(0, len(row), group))


def extent_of(walk: Walk, offsets: tuple[tuple[int, ...], ...], batch: int, kv_heads: int, head_dim: int) -> Extent:
    num_heads, queries, keys = len(offsets[0]), make_spans(walk, False), make_spans(walk, True)
    key_heads = kv_heads if shares_keys(offsets, num_heads // kv_heads) else num_heads
    return Extent(batch, num_heads, key_heads, head_dim, queries.num_places, queries.all_places, keys.num_places)


def all_aligned(pointers: Sequence[int]) -> bool:
    """Whether all pointers are aligned to 16 bytes, as a kernel compiled for aligned pointers assumes."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits % 16 == 0


def scratch(device: torch.device, parts: Parts) -> list[torch.Tensor]:
    """Returns the scratch memory of a pass, uninitialised and flat."""
    return [torch.empty(elements, dtype=dtype, device=device) for elements, dtype in parts]


def scratch_bytes(parts: Parts) -> int:
    return sum(elements * dtype.itemsize for elements, dtype in parts)
