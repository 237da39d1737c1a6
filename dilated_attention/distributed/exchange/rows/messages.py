"""Which rows each step of an exchange sends and brings, determined once for all calls alike: the CPU time would delay short calls.

A step's *memory* holds the keys that the rank's queries are computed on, as (rows, heads, B, 2·D): K and V of a row and head are
adjacent, so what one rank sends another is one message. A message is either some runs of rows with all heads, which arrive where they
are read, or scattered rows with all heads, or single (row, head) units; these are copied to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dilated_attention.engine.branches.plan import Range

# more runs than this are sent as units
MOST_RUNS = 8
# bool (heads or 1, N): the keys that a rank needs
Needed = Callable[[int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class RowMessage:
    """What one rank sends another in a step, by ascending row of the rank that holds it.

    Args:
        peer: the other rank.
        runs: runs of rows of the memory, all heads; empty if ``units`` is given.
        units: int64, the rows of the memory, or row · heads + head of each unit; None if ``runs`` is given.
        whole_rows: units are rows with all heads.
    """

    peer: int
    runs: tuple[Range, ...]
    units: torch.Tensor | None
    whole_rows: bool = False

    def size(self, heads: int) -> int:
        """Returns the number of (row, head) units."""
        if self.units is None:
            return sum(end - start for start, end in self.runs) * heads
        return self.units.shape[0] * (heads if self.whole_rows else 1)

    def flat(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a view of the memory (rows, heads, B, 2·D) that ``units`` index along its first dimension."""
        return memory if self.whole_rows else memory.view(-1, *memory.shape[2:])


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step on one rank.

    Args:
        kv_heads: the range of key/value heads.
        keys: the position ranges that the memory's rows have, in order.
        fills: (first of the rank's own rows, first row of memory, count) of rows that it copies.
        sends: rows of memory, or of the rank's own rows if ``from_own``.
        owed: the same messages, always counted in the rank's own rows: their gradients come back.
        in_place: the memory would be the rank's own rows and nothing else, so they are read where they are.
        is_full: every row of memory is filled or arrives.
        sparse: (g, offset of each key/value head): the rank's own row i of head h is row g·i + offset of its tensors; None for row i.
    """

    what: str
    kv_heads: Range
    keys: tuple[Range, ...]
    fills: tuple[tuple[int, int, int], ...]
    sends: tuple[RowMessage, ...]
    receives: tuple[RowMessage, ...]
    owed: tuple[RowMessage, ...]
    from_own: bool
    in_place: bool
    is_full: bool
    sparse: tuple[int, tuple[int, ...]] | None = None

    @cached_property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @cached_property
    def is_numbered(self) -> bool:
        """Whether 32 bits number all units, as the kernels of ``copies_triton.py`` need it."""
        return 2 * self.rows * self.num_kv_heads * (1 if self.sparse is None else self.sparse[0]) < 2**31

    def on_sparse_rows(self, step: int, offsets: tuple[int, ...]) -> StepPlan:
        """Returns the step for tensors of which its own rows are every ``step``-th. They are copied to the memory in any case."""
        fills = ((0, 0, self.rows),) if self.in_place else self.fills
        sparse = step, offsets[slice(*self.kv_heads)]
        return replace(self, fills=fills, from_own=False, in_place=False, sparse=sparse)

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """Tables and launches of the kernels that copy this step's rows (``copies_triton.py``), which are made once."""
        return {}

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.keys)


def gathering(shards: Sequence[tuple[Range, ...]], rank: int, needed: Needed, kv_heads: Range, span: Range, what: str) -> StepPlan:
    """Plans a step that brings all keys of some heads: memory rows are the positions of ``span``, the rank's own among them."""
    mine = shards[rank]
    own = [(start - span[0], end - span[0]) for start, end in mine]
    stacked = _stacked(mine)
    fills = [(row, place, end - row) for (row, end), (place, _) in zip(stacked, own, strict=True)]
    held = stacked[-1][1] if stacked else 0
    wanted = _of_heads(needed(rank), kv_heads)
    receives: list[RowMessage] = []
    sends: list[RowMessage] = []
    owed: list[RowMessage] = []
    for peer, theirs in enumerate(shards):
        if peer == rank:
            continue
        places = [(start - span[0], end - span[0]) for start, end in theirs]
        _add(wanted, theirs, kv_heads, peer, (receives, places))
        _add(_of_heads(needed(peer), kv_heads), mine, kv_heads, peer, (sends, own), (owed, stacked))
    arriving = int(wanted.sum()) // wanted.shape[0] if receives else 0
    rows = span[1] - span[0]
    whole = fills == [(0, 0, rows)] or rows == 0
    full = held + arriving == rows and (wanted.shape[0] == 1 or bool((wanted == wanted[:1]).all()))
    in_place = whole and not receives
    return StepPlan(what, kv_heads, (span,), tuple(fills), tuple(sends), tuple(receives), tuple(owed), in_place, in_place, full)


def _of_heads(mask: torch.Tensor, kv_heads: Range) -> torch.Tensor:
    return mask if mask.shape[0] == 1 else mask[slice(*kv_heads)]


def _stacked(spans: Sequence[Range]) -> list[Range]:
    """Returns the rows of ranges that are stored one after the other."""
    found, row = [], 0
    for start, end in spans:
        found.append((row, row + end - start))
        row += end - start
    return found


def _held(mask: torch.Tensor, spans: Sequence[Range]) -> torch.Tensor:
    """Returns the part of a mask (heads, N) in ranges of positions, one after the other."""
    parts = [mask[:, start:end] for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat([mask[:, :0], *parts], 1)


def _add(needed: torch.Tensor, held: Sequence[Range], kv_heads: Range, peer: int, *lists: tuple[list[RowMessage], Sequence[Range]]) -> None:
    """Adds the message of the rows that ``needed`` (heads or 1, N) names among the ranges that their holder has.

    Sender and receiver both call this with the same mask and ranges, so that they come to the same form.

    Args:
        lists: what to add it to, and at which rows each of the holder's ranges is there.
    """
    mask = _held(needed, held)
    if not bool(mask.any()):
        return
    heads = kv_heads[1] - kv_heads[0]
    of_head: torch.Tensor | None = None
    if mask.shape[0] == 1 or bool((mask == mask[:1]).all()):
        runs = _runs(mask[0], _stacked(held))
        if len(runs) <= MOST_RUNS:
            for messages, places in lists:
                moved = [(places[index][0] + start, places[index][0] + end) for index, start, end in runs]
                messages.append(RowMessage(peer, tuple(moved), None))
            return
        row = mask[0].nonzero()[:, 0]
    else:
        row, of_head = mask.T.nonzero(as_tuple=True)
    for messages, places in lists:
        there = _moved(row, held, places)
        units = there if of_head is None else there * heads + of_head
        messages.append(RowMessage(peer, (), units, whole_rows=of_head is None))


def _moved(row: torch.Tensor, held: Sequence[Range], places: Sequence[Range]) -> torch.Tensor:
    """Returns the rows of ranges that are stored one after the other as rows of where those ranges are."""
    stacked = _stacked(held)
    shifts = [place[0] - start for place, (start, _) in zip(places, stacked, strict=True)]
    if len(set(shifts)) == 1:
        return row + shifts[0]
    ends, by = (torch.tensor(x, device=row.device) for x in ([end for _, end in stacked], shifts))
    return row + by[torch.bucketize(row, ends, right=True)]


def _runs(mask: torch.Tensor, ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Returns the runs of True as (index of the range, start, end), counted in the range; a run ends where its range does."""
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff().nonzero()[:, 0].tolist()
    found, index = [], 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        while start < end:
            while ranges[index][1] <= start:
                index += 1
            low, high = ranges[index]
            found.append((index, start - low, min(end, high) - low))
            start = high
    return found
