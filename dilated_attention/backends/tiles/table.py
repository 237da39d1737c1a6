"""A pattern on documents as one flat table of tiles, built once per shape.

A segment of branch (w, r) is split into tiles of ``tile`` selected positions; one table row describes this tile for every head. The results
of a branch are stored at *places*: the selected positions of its segments in order, ceil(w/r) places per segment, one document after the
other.

A row holds: branch, rate, first position of the segment, its length, tile, place of the segment's first result, ceil(w'/r) with
w' = min(w, document), and place of the segment's first query (in the table of keys).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import expand

Range = tuple[int, int]
# positions and places are counted in 32 bits
MAX_PLACES = 2**31 - 2**20
_WIDTH = 8


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

    @functools.cached_property
    def document_starts(self) -> Tensor:
        return torch.tensor([start for start, _ in self.documents])

    @functools.cached_property
    def document_ends(self) -> Tensor:
        return torch.tensor([end for _, end in self.documents])

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


@dataclass(frozen=True, eq=False)
class Spans:
    """Where the results of each document and branch are stored.

    Args:
        lengths, places, bases, first, counts: (documents, branches) int64: segment length, places per segment, place of segment 0,
            index of the first segment with positions in the range, and the number of such segments.
        num_places, all_places: number of places in all branches except the direct one, and in all branches.
    """

    lengths: Tensor
    places: Tensor
    bases: Tensor
    first: Tensor
    counts: Tensor
    num_places: int
    all_places: int

    def flat(self, device: torch.device) -> Tensor:
        """Returns (documents, branches, 4) int32, the form that kernels read."""
        return torch.stack([self.lengths, self.places, self.bases, self.bases], -1).int().to(device)


@functools.lru_cache(maxsize=16)
def make_spans(walk: Walk, of_keys: bool) -> Spans:
    """Returns the spans of the results at the queries' positions, or at the positions of all keys."""
    positions, direct = (walk.keys, walk.key_direct) if of_keys else (walk.queries, walk.direct)
    starts, ends = walk.document_starts[:, None], walk.document_ends[:, None]
    w = torch.tensor([min(w, 2**31 - 1) for w, _ in walk.branches])
    r = torch.tensor([r for _, r in walk.branches])
    lengths = torch.minimum(w[None], ends - starts)
    places = (lengths + r - 1) // r
    low, high = starts.clamp(min=positions[0]), ends.clamp(max=positions[1])
    first = (low - starts) // lengths
    counts = torch.where(low < high, (high - 1 - starts) // lengths - first + 1, 0)
    sizes = counts * places
    order = [b for b in range(walk.num_branches) if b != direct] + [direct] * (direct >= 0)
    # ordered by branch, then by document
    flat = sizes[:, order].T.flatten()
    before = (flat.cumsum(0) - flat).view(len(order), -1).T
    bases = torch.empty_like(sizes)
    bases[:, order] = before
    total = int(flat.sum())
    apart = int(sizes[:, direct].sum()) if direct >= 0 else 0
    return Spans(lengths, places, bases - first * places, first, counts, total - apart, total)


def make_table(walk: Walk, of_keys: bool, tile: int, is_causal: bool) -> Tensor:
    """Returns tiles of queries, or of keys, as (tiles, 8) int32 on the CPU; tiles with the most pairs come first."""
    positions = walk.keys if of_keys else walk.queries
    spans, by_query = make_spans(walk, of_keys), make_spans(walk, False)
    tables, costs = [], []
    for branch, (_, rate) in enumerate(walk.branches):
        document, segment = expand(spans.first[:, branch], spans.first[:, branch] + spans.counts[:, branch])
        length = spans.lengths[document, branch]
        start = walk.document_starts[document] + segment * length
        size = torch.minimum(length, walk.document_ends[document] - start)
        low = start.clamp(min=positions[0])
        rows = ((start + size).clamp(max=positions[1]) - low + rate - 1) // rate
        tiles = (rows + tile - 1) // tile
        owner, index = expand(torch.zeros_like(tiles), tiles)
        place = spans.bases[document, branch] + segment * spans.places[document, branch]
        query_place = by_query.bases[document, branch] + segment * by_query.places[document, branch]
        columns = (torch.full_like(size, branch), torch.full_like(size, rate), start, size)
        owned = (place, spans.places[document, branch], query_place)
        tables.append(torch.stack([*(x[owner] for x in columns), index, *(x[owner] for x in owned)], -1))
        keys = (size + rate - 1) // rate
        seen = keys[owner]
        if is_causal:
            before = (low - start)[owner] // rate + index * tile
            seen = (seen - before).clamp(min=1) if of_keys else torch.minimum(seen, before + tile)
        costs.append(torch.minimum(rows[owner] - index * tile, torch.tensor(tile)) * seen)
    order = torch.cat(costs).argsort(descending=True, stable=True)
    return torch.cat(tables)[order].int().contiguous()


def spans_on(device: torch.device, walk: Walk, of_keys: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (spans, document starts padded to a power of two, rates), int32, on ``device``."""
    starts = torch.full((2**walk.steps,), 2**31 - 1)
    starts[: len(walk.documents)] = walk.document_starts
    rates = torch.tensor([rate for _, rate in walk.branches], dtype=torch.int32)
    return make_spans(walk, of_keys).flat(device), starts.int().to(device), rates.to(device)
