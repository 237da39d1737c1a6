"""Which rows each step of an exchange sends and brings, determined once for all calls alike: the CPU time would delay short calls.

A step's *memory* holds the keys that the rank's queries are computed on, as (rows, heads, B, 2·D): K and V of a row and head are
adjacent, so what one rank sends another is one message. A message is either some runs of rows with all heads, which arrive where they
are read, or scattered rows with all heads, or single (row, head) units; these are copied to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.engine.branches.plan import Range
from dilated_attention.fork import cached_property

# more runs than this are sent as units
MOST_RUNS = 8
# bool (heads or 1, N): the keys that a rank needs
Needed = Callable[[int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class RowMessage:
    """What one rank sends another in a step, by ascending row of the rank that holds it.

    Args:
        peer: the other rank, among those that exchange keys; in a call's steps, its rank in the group.
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

    def among(self, ranks: tuple[int, ...]) -> StepPlan:
        """Returns the step with every peer's rank in the group, ``ranks[peer]``."""
        sends, receives, owed = (tuple(replace(m, peer=ranks[m.peer]) for m in some) for some in (self.sends, self.receives, self.owed))
        return replace(self, sends=sends, receives=receives, owed=owed)

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
        _add(receives, peer, _held(wanted, theirs), places, kv_heads)
        theirs_of_mine = _held(_of_heads(needed(peer), kv_heads), mine)
        _add(sends, peer, theirs_of_mine, own, kv_heads)
        _add(owed, peer, theirs_of_mine, stacked, kv_heads)
    arriving = int(wanted.sum()) // wanted.shape[0] if receives else 0
    rows = span[1] - span[0]
    whole = fills == [(0, 0, rows)] or rows == 0
    full = held + arriving == rows and (wanted.shape[0] == 1 or bool((wanted == wanted[:1]).all()))
    in_place = whole and not receives
    return StepPlan(what, kv_heads, (span,), tuple(fills), tuple(sends), tuple(receives), tuple(owed), in_place, in_place, full)


def hop(shards: Sequence[tuple[Range, ...]], rank: int, needed: Needed, kv_heads: Range, distance: int) -> StepPlan:
    """Plans a ring's step: memory rows are those of the rank ``distance`` places before; for 0, the rank's own."""
    size, mine = len(shards), shards[rank]
    if not distance:
        return StepPlan("own keys", kv_heads, mine, (), (), (), (), True, True, True)
    source, reader = (rank - distance) % size, (rank + distance) % size
    receives: list[RowMessage] = []
    sends: list[RowMessage] = []
    wanted = _held(_of_heads(needed(rank), kv_heads), shards[source])
    _add(receives, source, wanted, _stacked(shards[source]), kv_heads)
    _add(sends, reader, _held(_of_heads(needed(reader), kv_heads), mine), _stacked(mine), kv_heads)
    full = all(bool(mask.all()) for mask in wanted)
    return StepPlan(f"hop {distance}", kv_heads, shards[source], (), tuple(sends), tuple(receives), tuple(sends), True, False, full)


def _of_heads(mask: torch.Tensor, kv_heads: Range) -> torch.Tensor:
    return mask if mask.shape[0] == 1 else mask[slice(*kv_heads)]


def _stacked(spans: Sequence[Range]) -> list[Range]:
    """Returns the rows of ranges that are stored one after the other."""
    found, row = [], 0
    for start, end in spans:
        found.append((row, row + end - start))
        row += end - start
    return found


def _held(mask: torch.Tensor, spans: Sequence[Range]) -> list[torch.Tensor]:
    return [mask[:, start:end] for start, end in spans]


def _add(messages: list[RowMessage], peer: int, masks: list[torch.Tensor], places: Sequence[Range], kv_heads: Range) -> None:
    """Adds the message of the rows that ``masks`` name, one mask for each run of the holder, stored at the rows ``places``.

    Sender and receiver both call this with the same masks, so that they come to the same form.
    """
    if not any(bool(mask.any()) for mask in masks):
        return
    alike = all(bool((mask == mask[:1]).all()) for mask in masks)
    if alike:
        runs = [(place[0] + start, place[0] + end) for mask, place in zip(masks, places, strict=True) for start, end in _runs(mask[0])]
        if len(runs) <= MOST_RUNS:
            messages.append(RowMessage(peer, tuple(runs), None))
            return
        rows = [mask[0].nonzero()[:, 0] + place[0] for mask, place in zip(masks, places, strict=True)]
        messages.append(RowMessage(peer, (), torch.cat(rows), whole_rows=True))
        return
    heads = kv_heads[1] - kv_heads[0]
    units = []
    for mask, place in zip(masks, places, strict=True):
        row, head = mask.expand(heads, -1).T.nonzero(as_tuple=True)
        units.append((row + place[0]) * heads + head)
    messages.append(RowMessage(peer, (), torch.cat(units)))


def _runs(mask: torch.Tensor) -> list[Range]:
    """Returns the runs of True."""
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff().nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
