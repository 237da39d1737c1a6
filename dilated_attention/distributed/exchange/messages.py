"""Which rows each step of an exchange sends and brings, determined once for all calls alike: the CPU time would delay short calls.

A step's *memory* holds the keys that the rank's queries are computed on, as (rows, heads, B, 2·D): K and V of a row and head are adjacent,
so what one rank sends another is one message. A message is either some runs of rows with all heads, which arrive where they are read, or
scattered rows with all heads, or single units (row, key/value head); tables, made once, say to which places these are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from dilated_attention.engine.branches.problems import Range

# more runs than this are sent as units
MOST_RUNS = 8
# bool (heads or 1, N): the keys that a rank needs
Needed = Callable[[int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class RowMessage:
    """What one rank sends another (``peer``) in a step, by ascending row of the rank that holds it: ``runs`` of rows of the memory with all
    heads, or ``units``, int64: rows of the memory if ``whole_rows``, else row · heads + head."""

    peer: int
    runs: tuple[Range, ...]
    units: torch.Tensor | None
    whole_rows: bool = False

    def size(self, heads: int) -> int:
        """Returns the number of (row, head) units."""
        if self.units is None:
            return sum(end - start for start, end in self.runs) * heads
        return self.units.shape[0] * (heads if self.whole_rows else 1)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step on one rank, with a range of ``kv_heads`` and a memory of ``rows``.

    Args:
        fills: (first of the rank's own rows, first row of memory, count) of rows that it copies.
        sends: rows of memory, or of the rank's own rows if ``in_place``.
        owed: the same messages, always counted in the rank's own rows: their gradients come back.
        in_place: the memory would be the rank's own rows and nothing else, so they are read where they are.
        is_full: every row of memory is filled or arrives.
        sparse: (g, offset of each key/value head): the rank's own row i of head h is row g·i + offset of its tensors; None for row i.
    """

    what: str
    kv_heads: Range
    rows: int
    fills: tuple[tuple[int, int, int], ...]
    sends: tuple[RowMessage, ...]
    receives: tuple[RowMessage, ...]
    owed: tuple[RowMessage, ...]
    in_place: bool
    is_full: bool
    sparse: tuple[int, tuple[int, ...]] | None = None

    @cached_property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @cached_property
    def is_numbered(self) -> bool:
        """Whether 32 bits number all units, as the kernels of ``rows_triton.py`` need it."""
        return 2 * self.rows * self.num_kv_heads * (1 if self.sparse is None else self.sparse[0]) < 2**31

    def on_sparse_rows(self, step: int, offsets: tuple[int, ...]) -> StepPlan:
        """Returns the step for tensors of which its own rows are every ``step``-th. They are copied to the memory in any case."""
        fills = ((0, 0, self.rows),) if self.in_place else self.fills
        sparse = step, offsets[slice(*self.kv_heads)]
        return replace(self, fills=fills, in_place=False, sparse=sparse)

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """Tables and launches of the kernels that copy this step's rows (``rows_triton.py``), which are made once."""
        return {}


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
    return StepPlan(what, kv_heads, rows, tuple(fills), tuple(sends), tuple(receives), tuple(owed), in_place, full)


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
    """Adds to ``lists`` the message of the rows that ``needed`` (heads or 1, N) names among the ranges that their holder has; beside each
    list is at which rows of it the holder's ranges are. Sender and receiver call this alike, so that they come to the same form."""
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


T = TypeVar("T")


def _number(step: StepPlan) -> torch.dtype:
    """Returns the type of units' numbers."""
    return torch.int32 if step.is_numbered else torch.int64


def once(step: StepPlan, name: Hashable, make: Callable[[], T]) -> T:
    """Returns what ``make`` made for this step and name when it was first asked for."""
    found: dict[Any, Any] = step.remembered
    if name not in found:
        found[name] = make()
    return found[name]  # type: ignore[no-any-return]


def _units(step: StepPlan, messages: tuple[RowMessage, ...], device: torch.device) -> torch.Tensor:
    """Returns int64 row · heads + head of all units of some messages, one message after the other."""
    heads, found = step.num_kv_heads, [torch.zeros(0, dtype=torch.int64, device=device)]
    for message in messages:
        if message.units is not None and not message.whole_rows:
            found.append(message.units)
            continue
        rows = message.units if message.units is not None else torch.cat([torch.arange(*run, device=device) for run in message.runs])
        found.append((rows[:, None] * heads + torch.arange(heads, device=device)).flatten())
    return torch.cat(found)


def _own(step: StepPlan, units: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of own units in the rank's tensors."""
    if step.sparse is None:
        return units
    every, offsets = step.sparse
    row, head = units // step.num_kv_heads, units % step.num_kv_heads
    return (row * every + torch.tensor(offsets, device=units.device)[head]) * step.num_kv_heads + head


def sent_units(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns the rank's own units that are copied to be sent: all if the memory does not hold them, else the single ones."""
    owed = tuple(message for message in step.owed if step.in_place or message.units is not None)
    return _own(step, _units(step, owed, device)).to(_number(step))


def received_units(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns all units of the memory that arrive."""
    return _units(step, step.receives, device).to(_number(step))


def offsets(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns int32 (heads,): the offset of each head's own rows in the rank's tensors."""
    found = (0,) * step.num_kv_heads if step.sparse is None else step.sparse[1]
    return once(step, "offsets", lambda: torch.tensor(found, dtype=torch.int32, device=device))


def sources(step: StepPlan, own_rows: int, device: torch.device) -> torch.Tensor:
    """Returns (rows · heads,): where each unit of the memory comes from: an own unit (of ``own_rows``); own rows · heads + the number of a
    unit that arrives by itself; −1 for none; −2 for one that arrives in place."""

    heads = step.num_kv_heads
    found = torch.full((step.rows * heads,), -1, dtype=_number(step), device=device)
    for row, place, count in step.fills:
        found[place * heads : (place + count) * heads] = _own(step, torch.arange(row * heads, (row + count) * heads, device=device)).to(
            _number(step)
        )
    end = own_rows * heads
    for message in step.receives:
        units = _units(step, (message,), device)
        if message.units is None:
            found[units] = -2
            continue
        found[units] = torch.arange(end, end + len(units), device=device).to(_number(step))
        end += len(units)
    return found


def own_places(step: StepPlan, own_rows: int, device: torch.device) -> torch.Tensor:
    """Returns int32 (own rows,): the row of memory of each of the rank's own rows."""

    def make() -> torch.Tensor:
        found = torch.arange(own_rows, dtype=torch.int32, device=device)
        for row, place, count in step.fills:
            found[row : row + count] = torch.arange(place, place + count, device=device).to(_number(step))
        return found

    return once(step, "places", make)


def returned_units(step: StepPlan, own_rows: int, device: torch.device) -> torch.Tensor:
    """Returns int32 (peers, own rows · heads): which of the units that come back is a gradient of each own unit; −1 for none."""

    def make() -> torch.Tensor:
        found = torch.full((len(step.owed), own_rows * step.num_kv_heads), -1, dtype=torch.int32, device=device)
        end = 0
        for row, message in zip(found, step.owed, strict=True):
            units = _units(step, (message,), device)
            row[units] = torch.arange(end, end + len(units), device=device).to(_number(step))
            end += len(units)
        return found

    return once(step, "returned", make)


# the buffers of a step: what is sent, what arrives by itself, and the memory
SENT, CAME, MEMORY = range(3)
# (peer, buffer, first row, last row) of each message
Slots = list[tuple[int, int, int, int]]


class BufferPlan(NamedTuple):
    """The buffers of a step in one direction, for ``heads`` key/value heads, and its messages.

    Args:
        numbers: the units that are copied to be sent.
        came: the number of units that arrive by themselves.
        rows, sources: of the memory, and where each of its units comes from; 0 and None if there is none.
        fills_first, fills_late: whether the memory is filled before the exchange, and after it.
    """

    heads: int
    numbers: torch.Tensor
    came: int
    outgoing: Slots
    incoming: Slots
    rows: int = 0
    sources: torch.Tensor | None = None
    fills_first: bool = False
    fills_late: bool = False


def arrival_plan(step: StepPlan, k: torch.Tensor) -> BufferPlan:
    """Plans how the keys of a step arrive. ``k``: the rank's keys of the step's heads, (B, n, heads, D)."""
    heads, numbers = step.num_kv_heads, sent_units(step, k.device)
    outgoing, _ = _slots(step.sends, heads, SENT, None if step.in_place else MEMORY, apart=True)
    incoming, singles = _slots(step.receives, heads, CAME, MEMORY)
    if step.in_place:
        return BufferPlan(heads, numbers, singles, outgoing, incoming)
    # a kernel may load a row that it then ignores, and 0 · NaN is NaN, so a row that nobody needs is filled with zeros
    fills = bool(step.fills) or not step.is_full
    first = fills and any(message.units is None for message in step.sends)
    late = singles > 0 or (fills and not first)
    return BufferPlan(heads, numbers, singles, outgoing, incoming, step.rows, sources(step, k.shape[1], k.device), first, late)


def return_plan(step: StepPlan, k: torch.Tensor) -> BufferPlan:
    """Plans how the gradients of a step's keys go back."""
    heads = step.num_kv_heads
    outgoing, _ = _slots(step.receives, heads, SENT, None)
    incoming, came = _slots(step.owed, heads, CAME, None)
    return BufferPlan(heads, received_units(step, k.device), came, outgoing, incoming)


def _slots(messages: tuple[RowMessage, ...], heads: int, units: int, runs: int | None, *, apart: bool = False) -> tuple[Slots, int]:
    """Returns where each message is, and the number of units outside the memory. ``units, runs``: the buffers of units, and of runs of rows
    (None for that of units); ``apart``: whether each run is a message, also among units."""
    found, start = [], 0
    for message in messages:
        if message.units is None and runs is not None:
            found += [(message.peer, runs, *run) for run in message.runs]
            continue
        one_by_one = apart and message.units is None
        for size in [(end - first) * heads for first, end in message.runs] if one_by_one else [message.size(heads)]:
            found.append((message.peer, units, start, start + size))
            start += size
    return found, start
