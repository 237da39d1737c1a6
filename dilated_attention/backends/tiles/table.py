"""A pattern on documents as one flat table of tiles.

A segment of branch (w, r) is split into tiles of ``tile`` selected positions; one table row describes this tile for every head. The results
of a branch are stored at *places*: the selected positions of its segments in order, ceil(w/r) places per segment, one document after the
other.

A row holds: branch, rate, first position of the segment, its length, tile, place of the segment's first result, ceil(w'/r) with
w' = min(w, document), and place of the segment's first query (in the table of keys).

Kernels write tables on the device (``table_kernels.py``). This module counts their rows and places in closed form, without Triton, so a
new length costs no tensor operation on the host and no copy.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

Range = tuple[int, int]
# positions and places are counted in 32 bits
MAX_PLACES = 2**31 - 2**20
_TILE = 128


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


@functools.lru_cache(maxsize=256)
def share_keys(offsets: tuple[tuple[int, ...], ...], group: int) -> bool:
    """Whether the ``group`` query heads of each key head read the same keys."""
    return all(len(set(row[h : h + group])) == 1 for row in offsets for h in range(0, len(row), group))


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
