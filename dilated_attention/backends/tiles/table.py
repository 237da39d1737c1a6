"""A pattern on documents as one flat table of tiles, which a kernel writes on the device from a few integers a branch.

A segment of branch (w, r) is split into tiles of ``tile`` selected positions; one table row describes this tile for every head. The results
of a branch are stored at *places*: the selected positions of its segments in order, ceil(w/r) places per segment, one document after the
other.

A row holds: branch, rate, first position of the segment, its length, tile, place of the segment's first result, ceil(w'/r) with
w' = min(w, document), and place of the segment's first query (in the table of keys).

The host names *runs*: equal tiles of equal segments. One document has at most six a branch, so a new length costs no tensor operation on
the host and one small copy, for which nothing waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]
# positions and places are counted in 32 bits
MAX_PLACES = 2**31 - 2**20
_LAST = 2**31 - 1
# rows that a program writes
_ROWS = 128


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
        first, count: index of the first segment with positions in the range, and the number of such segments.
    """

    length: int
    places: int
    base: int
    first: int
    count: int


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


class Run(NamedTuple):
    """``tiles`` tiles from ``tile`` on of each of ``segments`` segments, which begin ``stride`` positions and ``places`` places apart."""

    segments: int
    tiles: int
    tile: int
    branch: int
    rate: int
    start: int
    stride: int
    length: int
    place: int
    places: int
    query_place: int
    # tiles of all segments in turn, the last ones first, in place of one segment after the other
    backwards: int


def _runs(walk: Walk, of_keys: bool, tile: int, is_causal: bool) -> Iterator[tuple[int, Run]]:
    """Yields (pairs of the run's largest tile, run)."""
    first_position, last_position = walk.keys if of_keys else walk.queries
    spans, by_query = make_spans(walk, of_keys), make_spans(walk, False)
    for branch, (_, rate) in enumerate(walk.branches):
        for (start, end), span, of_queries in zip(walk.documents, spans.of_branch[branch], by_query.of_branch[branch], strict=True):
            length, last = span.length, span.first + span.count - 1
            # segments between the first and the last one are whole
            edges = {span.first, last} if span.count else set()
            groups = [(segment, 1) for segment in sorted(edges)]
            if last - span.first > 1:
                groups.append((span.first + 1, last - span.first - 1))
            for segment, count in groups:
                begin = start + segment * length
                size = min(length, end - begin)
                rows = -(-(min(begin + size, last_position) - max(begin, first_position)) // rate)
                keys = -(-size // rate)
                whole, rest = divmod(rows, tile)
                # causality makes each tile of a segment another one; otherwise a last part is apart
                parts = [(whole + (rest > 0), 0)] if is_causal else [(whole, 0), (min(rest, 1), whole)]
                for tiles, index in parts:
                    places = span.base + segment * span.places, span.places, of_queries.base + segment * of_queries.places
                    run = Run(count, tiles, index, branch, rate, begin, length, size, *places, is_causal and not of_keys)
                    if tiles:
                        yield min(rows - index * tile, tile) * keys, run


def runs_of(walk: Walk, of_keys: bool, tile: int, is_causal: bool) -> list[Run]:
    """Returns the runs of tiles of ``tile`` queries, or keys; those with the most pairs a tile come first."""
    return [run for _, run in sorted(_runs(walk, of_keys, tile, is_causal), key=lambda costed: -costed[0])]


def num_rows(runs: list[Run]) -> int:
    return sum([run.segments * run.tiles for run in runs])


def constants_of(walk: Walk, offsets: tuple[tuple[int, ...], ...]) -> tuple[list[int], ...]:
    """Returns what kernels read of a walk and its heads.

    These are offsets (branches, H) of each branch and head; rates (branches,); starts of the documents, padded to a power of two; and spans
    of queries and of keys, (documents, branches, 4): segment length, places per segment, place of segment 0, unused.
    """
    starts = [start for start, _ in walk.documents]
    starts += [_LAST] * (2**walk.steps - len(starts))
    spans = []
    for of_keys in (False, True):
        of_documents = zip(*make_spans(walk, of_keys).of_branch, strict=True)
        spans.append([x for document in of_documents for span in document for x in (span.length, span.places, span.base, 0)])
    return [x for row in offsets for x in row], [rate for _, rate in walk.branches], starts, *spans


def to_device(
    parts: Sequence[list[int]], tables: Sequence[list[Run]], device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns integers as int32 on ``device``, and tables of runs as (tiles, 8) int32.

    One copy brings all of it, from pinned memory, so that nothing waits for it; then one kernel writes the tables.
    """
    flat: list[int] = []
    places = []
    for part in parts:
        # each begins at 16 bytes
        flat += [0] * (-len(flat) % 4)
        places.append((len(flat), len(flat) + len(part)))
        flat += part
    flat += [0] * (-len(flat) % 4)
    at, first, ends = len(flat), 0, [0]
    runs = [run for table in tables for run in table]
    for run in runs:
        flat += first, *run
        first += run.segments * run.tiles
    for table in tables:
        ends.append(ends[-1] + num_rows(table))
    steps = max(0, len(runs) - 1).bit_length()
    flat += [_LAST] * ((2**steps - len(runs)) * 13)
    memory = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    rows = torch.empty((first, 8), dtype=torch.int32, device=device)
    if first:
        # the kernel needs Triton; spans and runs alone are also for plans
        from dilated_attention.backends.tiles.launch import KernelLaunch
        from dilated_attention.backends.tiles.rows import table_kernel

        launch = KernelLaunch(table_kernel, -(-first // _ROWS), (first, steps), {"ROWS": _ROWS}, dtypes=())
        launch([rows.data_ptr(), memory.data_ptr() + 4 * at], lambda: (rows, memory[at:]), device.index or 0)
    return tuple([memory[a:b] for a, b in places]), tuple([rows[a:b] for a, b in itertools.pairwise(ends)])
