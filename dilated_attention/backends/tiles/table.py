"""A pattern on documents as one flat table of tiles.

A segment of branch (w, r) is split into tiles of ``tile`` selected positions; one table row describes this tile for every head. The results
of a branch are stored at *places*: the selected positions of its segments in order, ceil(w/r) places per segment, one document after the
other.

A row holds: branch, rate, first position of the segment, its length, tile, place of the segment's first result, ceil(w'/r) with
w' = min(w, document), and place of the segment's first query (in the table of keys).

Kernels write tables on the device (``table_kernels.py``). This module counts their rows and places in closed form, without Triton, so a
new length costs no tensor operation on the host and no copy. It also has the sizes of the kernels' tiles, measured beforehand, and the
scratch memory of each pass, for the launches that allocate it and for plans.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dilated_attention.backends.hardware import capability

Range = tuple[int, int]
# positions and places are counted in 32 bits
MAX_PLACES = 2**31 - 2**20
_TILE = 128
# (elements, dtype) of each part of an allocation
Parts = tuple[tuple[int, torch.dtype], ...]
_ALIGNMENT = 128
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

    @functools.cached_property
    def longest_document(self) -> int:
        return max([end - start for start, end in self.documents])

    @property
    def longest(self) -> int:
        """The most positions that a segment takes."""
        return max([-(-min(w, self.longest_document) // rate) for w, rate in self.branches])

    @property
    def tile(self) -> int:
        """Positions of a tile: as many as any kernel computes at a time; a segment of fewer is one tile."""
        return min(_TILE, max(16, 1 << (self.longest - 1).bit_length()))

    @property
    def steps(self) -> int:
        """The number of bisection steps that find a position's document."""
        return (len(self.documents) - 1).bit_length()


class Counts(NamedTuple):
    """The number of places in all branches except the direct one, and in all branches, and of tiles of a table."""

    num_places: int
    all_places: int
    num_tiles: int


def share_keys(offsets: tuple[tuple[int, ...], ...], group: int) -> bool:
    """Whether the ``group`` query heads of each key head read the same keys."""
    return group == 1 or all(len(set(row[h : h + group])) == 1 for row in offsets for h in range(0, len(row), group))


def step_of(walk: Walk, offsets: tuple[tuple[int, ...], ...]) -> int:
    """Returns a power of 2: branches other than the direct one take only every ``step``-th row of a head, or any row if it is 1.

    The step divides the rates of those branches, and a head's offsets agree modulo it. It depends on lengths only in whether it is 1.
    """
    if walk.direct < 0 or walk.direct != walk.key_direct:
        return 1
    step, lengths = _step_of(walk.branches, offsets, walk.direct)
    begins = walk.queries[0], *[start for start, _ in walk.documents], *[w for w in lengths if w < walk.longest_document]
    return 1 if any([begin % step for begin in begins]) else step  # noqa: C419 - a generator takes longer


@functools.lru_cache(maxsize=256)
def _step_of(branches: tuple[tuple[int, int], ...], offsets: tuple[tuple[int, ...], ...], direct: int) -> tuple[int, tuple[int, ...]]:
    """Returns the step wherever every segment begins at a multiple of it, and the segment lengths of the other branches."""
    others = [b for b in range(len(branches)) if b != direct]
    if not others:
        return 1, ()
    step = math.gcd(*(branches[b][1] for b in others))
    step &= -step
    while any(len({offsets[b][head] % step for b in others}) > 1 for head in range(len(offsets[0]))):
        step //= 2
    return step, tuple(branches[b][0] for b in others)


def counts_of(walk: Walk, of_keys: bool, tile: int | None = None) -> Counts:
    """Returns the counts of the results at the queries' positions, or at the positions of all keys. ``tile``: positions of a tile."""
    positions, direct = (walk.keys, walk.key_direct) if of_keys else (walk.queries, walk.direct)
    return _counts_of(walk.branches, walk.documents, positions, direct, tile or walk.tile)


# of self-attention, those of queries and of keys are the same
@functools.lru_cache(maxsize=16)
def _counts_of(branches: tuple[tuple[int, int], ...], documents: tuple[Range, ...], positions: Range, direct: int, tile: int) -> Counts:
    first_position, last_position = positions
    all_places = apart = tiles = 0
    for branch, (w, rate) in enumerate(branches):
        places = 0
        for start, end in documents:
            length = min(w, end - start)
            low, high = max(start, first_position) - start, min(end, last_position) - start
            if low < high:
                of_segment, first, last = -(-length // rate), low // length, (high - 1) // length
                places += (last - first + 1) * of_segment
                rows = -(-(high - max(low, last * length)) // rate)
                tiles += -(-rows // tile)
                if first < last:
                    # segments between the first and the last one are whole
                    rows = -(-((first + 1) * length - low) // rate)
                    tiles += -(-rows // tile) + (last - first - 1) * -(-of_segment // tile)
        all_places += places
        apart = places if branch == direct else apart
    return Counts(all_places - apart, all_places, tiles)


def place_of(walk: Walk, branch: int) -> tuple[int, int, int]:
    """Returns the place of a branch's first result, places per segment and segments per document, of documents of equal length."""
    start, end = walk.documents[0]
    lengths = [(min(w, end - start), rate) for w, rate in walk.branches[: branch + 1]]
    sizes = [(-(-length // rate), -(-(end - start) // length)) for length, rate in lengths]
    before = sum([places * segments for b, (places, segments) in enumerate(sizes[:-1]) if b != walk.direct])
    return len(walk.documents) * before, *sizes[-1]


class TileSizes(NamedTuple):
    """ROWS of a program (queries, or keys for dk and dv), the size of the BLOCK that it visits at a time, warps, and pipeline stages."""

    rows: int
    block: int
    warps: int
    stages: int


def head_blocks(head_dim: int) -> tuple[int, int]:
    """Returns (D0, D1) with D0 + D1 ≥ head dim, both powers of two ≥ 16, or D1 = 0: 48 is 32 + 16, not 64.

    A second block that is not full is avoided where the head dim is no multiple of 16: of 40 as 32 + 16 in float16, Triton 3.6 compiles a
    forward with zero keys that reads outside shared memory.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    if head_dim <= 16 or whole == 32 or head_dim % 16:
        return whole, 0
    rest = max(16, 1 << (head_dim - half - 1).bit_length())
    return (half, rest) if rest < half else (whole, 0)


# ``TileSizes`` by kernel ("forward", "query" for dq, "key" for dk and dv), dtype class and head dim rounded up. These are the fastest of a
# sweep on an H200 with Triton 3.6 (benchmarks/results/2026-11-22-h200/tiles.md)
_SIZES = {
    ("forward", "half", 64): (128, 64, 4, 3),
    ("query", "half", 64): (64, 64, 4, 3),
    ("key", "half", 48): (128, 32, 4, 2),
    ("key", "half", 64): (64, 32, 4, 3),
    ("forward", "half", 128): (64, 64, 4, 3),
    ("query", "half", 128): (64, 64, 4, 2),
    ("key", "half", 128): (64, 32, 4, 2),
    ("forward", "half", 256): (64, 64, 8, 2),
    ("query", "half", 256): (64, 32, 8, 2),
    ("key", "half", 256): (64, 32, 8, 1),
    # blocks of 16 with 8 warps read out of bounds with Triton 3.6
    ("forward", "float32", 64): (128, 64, 8, 2),
    ("query", "float32", 64): (128, 32, 8, 2),
    ("key", "float32", 64): (128, 32, 8, 2),
    ("forward", "float32", 128): (128, 32, 8, 1),
    ("query", "float32", 128): (32, 32, 4, 1),
    ("key", "float32", 128): (32, 32, 4, 1),
}
# Replacements for lists of blocks. Of half precision: the fastest on an H200 with random blocks of 128x128 at 10 %. Of float32, whose
# products are exact here and take more registers: chosen by the output of ptxas, not timed
_LIST_SIZES = {
    ("key", "half", 64): (64, 64, 4, 3),
    ("query", "half", 128): (128, 64, 8, 3),
    ("key", "half", 128): (128, 64, 8, 3),
    ("forward", "float32", 64): (64, 64, 8, 2),
    ("query", "float32", 64): (64, 32, 8, 2),
    ("key", "float32", 64): (64, 32, 8, 2),
    ("forward", "float32", 128): (64, 32, 8, 2),
    ("query", "float32", 128): (64, 32, 8, 2),
    ("key", "float32", 128): (32, 64, 8, 2),
    ("forward", "float32", 256): (16, 32, 8, 2),
    ("query", "float32", 256): (32, 32, 8, 2),
    ("key", "float32", 256): (32, 16, 8, 2),
}
# replacements for sizes that do not fit where a program has 99 KiB of shared memory (sm_86, sm_89, sm_120); chosen by the output of ptxas,
# not timed
_SMALL_SIZES = {
    ("forward", "half", 256): (64, 32, 8, 2),
    ("query", "half", 256): (32, 32, 4, 2),
    ("key", "half", 256): (32, 32, 8, 1),
    ("forward", "float32", 64): (64, 32, 4, 2),
    ("query", "float32", 64): (64, 32, 8, 1),
    ("key", "float32", 64): (64, 32, 8, 1),
    ("forward", "float32", 128): (64, 32, 8, 1),
}


@functools.lru_cache(maxsize=256)
def sizes(
    which: str, head_dim: int, dtype: torch.dtype, longest: int, device: torch.device, dropout: bool = False, lists: bool = False
) -> TileSizes:
    """Returns the sizes of a kernel.

    Args:
        which: "forward", "query" (dq) or "key" (dk, dv).
        longest: the number of selected positions in the longest segment; of lists, the positions of a block.
    """
    kind, width = "float32" if dtype is torch.float32 else "half", sum(head_blocks(head_dim))
    of_gpu = capability(device)
    small = of_gpu is not None and of_gpu not in LARGE_MEMORY
    table = _SIZES | (_LIST_SIZES if lists else {}) | (_SMALL_SIZES if small else {})
    size = TileSizes(*table[min((key for key in table if key[:2] == (which, kind) and key[2] >= width), key=lambda key: key[2])])
    if dropout and which == "query":
        # the dropout decisions are held in registers, so smaller blocks take 11 % less time on an H200
        size = size._replace(block=32)
    rows = min(size.rows, max(16, 1 << (longest - 1).bit_length()))
    return size if rows == size.rows else size._replace(rows=rows, warps=4)


@dataclass(frozen=True, slots=True)
class Extent:
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

    @classmethod
    def of(cls, walk: Walk, shared: bool, batch: int, heads: int, kv_heads: int, head_dim: int) -> Extent:
        """Returns those of a walk; ``shared``: see ``share_keys``."""
        queries, keys = counts_of(walk, False), counts_of(walk, True)
        rows = queries.num_places, queries.all_places, keys.num_places
        return cls(batch, heads, kv_heads if shared else heads, head_dim, *rows)

    def own_outputs(self) -> int:
        """Returns the number of elements of the branches' own outputs."""
        return self.batch * self.heads * self.part_rows * self.head_dim

    def forward(self, dtype: torch.dtype, *, is_saved: bool) -> Parts:
        """Returns the parts of the forward: the branches' outputs, unless they are stored elsewhere, and their lse."""
        return (0 if is_saved else self.own_outputs(), dtype), (self.batch * self.heads * self.part_rows, torch.float32)

    def backward(self, dtype: torch.dtype, *, dropout: bool, bias: bool = False) -> Parts:
        """Returns the parts of the backward: per query row δ, lse · log2(e), with dropout two words, with a bias a part of its
        gradient; dq, dk and dv of the branches."""
        keys = self.batch * self.key_heads * self.key_part_rows * self.head_dim
        stats = ((4 if dropout else 2) + bias) * self.batch * self.heads * self.delta_rows
        return (stats, torch.float32), (self.own_outputs(), dtype), (keys, dtype), (keys, dtype)


def all_aligned(pointers: Sequence[int]) -> bool:
    """Whether all pointers are aligned to 16 bytes, as a kernel compiled for aligned pointers assumes."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits % 16 == 0


def aligned_bytes(elements: int, dtype: torch.dtype) -> int:
    return -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def scratch_bytes(parts: Iterable[tuple[int, torch.dtype]]) -> int:
    return sum(aligned_bytes(*part) for part in parts)


def strides_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of batch, token and head of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])
