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
        segments: the number of segments with positions in the range.
        first_rows, last_rows: the most rows that the first of them and the last of several have in the range; 0 without one.
    """

    length: int
    places: int
    base: int
    segments: int
    first_rows: int
    last_rows: int


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of each branch, one a document, and the number of places in all branches except the direct one, and in all branches."""

    of_branch: tuple[tuple[Span, ...], ...]
    num_places: int
    all_places: int


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
    longest = max([end - start for start, end in walk.documents])
    begins = walk.queries[0], *[start for start, _ in walk.documents], *[w for w in lengths if w < longest]
    return 1 if any([begin % step for begin in begins]) else step  # noqa: C419 - a generator takes longer


@functools.lru_cache(maxsize=256)
def _step_of(branches: tuple[tuple[int, int], ...], offsets: tuple[tuple[int, ...], ...], direct: int) -> tuple[int, tuple[int, ...]]:
    """Returns the step wherever every segment begins at a multiple of it, and the segment lengths of the other branches."""
    others = [b for b in range(len(branches)) if b != direct]
    step = math.gcd(*(branches[b][1] for b in others))
    step &= -step
    while any(len({offsets[b][head] % step for b in others}) > 1 for head in range(len(offsets[0])) if step):
        step //= 2
    return max(step, 1), tuple(branches[b][0] for b in others)


def make_spans(walk: Walk, of_keys: bool) -> Spans:
    """Returns the spans of the results at the queries' positions, or at the positions of all keys."""
    positions, direct = (walk.keys, walk.key_direct) if of_keys else (walk.queries, walk.direct)
    return _spans(walk.branches, walk.documents, positions, direct)


# of self-attention, those of queries and of keys are the same
@functools.lru_cache(maxsize=16)
def _spans(branches: tuple[tuple[int, int], ...], documents: tuple[Range, ...], positions: Range, direct: int) -> Spans:
    first_position, last_position = positions
    spans: dict[int, tuple[Span, ...]] = {}
    base = apart = 0
    for branch in sorted(range(len(branches)), key=lambda b: b == direct):
        w, rate = branches[branch]
        apart = base if branch == direct else apart
        of_documents = []
        for start, end in documents:
            length = min(w, end - start)
            places = -(-length // rate)
            low, high = max(start, first_position), min(end, last_position)
            count = first = first_rows = last_rows = 0
            if low < high:
                first, last = (low - start) // length, (high - 1 - start) // length
                count = last - first + 1
                first_rows = -(-(min(start + (first + 1) * length, high) - low) // rate)
                last_rows = -(-(high - start - last * length) // rate) if count > 1 else 0
            of_documents.append(Span(length, places, base - first * places, count, first_rows, last_rows))
            base += count * places
        spans[branch] = tuple(of_documents)
    return Spans(tuple([spans[b] for b in range(len(branches))]), apart if direct >= 0 else base, base)


def num_tiles(spans: Spans, tile: int) -> int:
    """Returns the number of tiles of ``tile`` positions. Segments between the first and the last one of a document are whole."""
    return sum(
        [
            -(-span.first_rows // tile) - (-span.last_rows // tile) + max(0, span.segments - 2) * -(-span.places // tile)
            for of_documents in spans.of_branch
            for span in of_documents
        ]
    )
