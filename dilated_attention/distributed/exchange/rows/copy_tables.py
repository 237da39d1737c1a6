"""Which unit goes where in the copies of a step, as tables that are made once. A unit is one (row, key/value head)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from dilated_attention.distributed.exchange.rows.messages import RowMessage, StepPlan

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
    owed = tuple(message for message in step.owed if step.from_own or message.units is not None)
    return once(step, "sent", lambda: _own(step, _units(step, owed, device)).to(_number(step)))


def received_units(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns all units of the memory that arrive."""
    return once(step, "received", lambda: _units(step, step.receives, device).to(_number(step)))


def offsets(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns int32 (heads,): the offset of each head's own rows in the rank's tensors."""
    found = (0,) * step.num_kv_heads if step.sparse is None else step.sparse[1]
    return once(step, "offsets", lambda: torch.tensor(found, dtype=torch.int32, device=device))


def sources(step: StepPlan, own_rows: int, device: torch.device) -> torch.Tensor:
    """Returns (rows · heads,): where each unit of the memory comes from. ``own_rows``: of the rank's tensors.

    An own unit; own rows · heads + the number of a unit that arrives by itself; −1 for none, and −2 for one that arrives in place.
    """

    def make() -> torch.Tensor:
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

    return once(step, "sources", make)


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
    """The buffers of a step in one direction, and its messages.

    Args:
        heads: the number of key/value heads.
        numbers: the units that are copied to be sent.
        came: the number of units that arrive by themselves.
        rows: of the memory; 0 if there is none.
        sources: where each unit of the memory comes from; None if there is none.
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
    outgoing, _ = _slots(step.sends, heads, SENT, None if step.from_own else MEMORY, apart=True)
    incoming, singles = _slots(step.receives, heads, CAME, MEMORY)
    if step.in_place:
        return BufferPlan(heads, numbers, singles, outgoing, incoming)
    # a kernel may load a row that it then ignores, and 0 · NaN is NaN, so a row that nobody needs is filled with zeros
    fills = bool(step.fills) or not step.is_full
    first = fills and not step.from_own and any(message.units is None for message in step.sends)
    late = singles > 0 or (fills and not first)
    return BufferPlan(heads, numbers, singles, outgoing, incoming, step.rows, sources(step, k.shape[1], k.device), first, late)


def return_plan(step: StepPlan, k: torch.Tensor) -> BufferPlan:
    """Plans how the gradients of a step's keys go back."""
    heads = step.num_kv_heads
    outgoing, _ = _slots(step.receives, heads, SENT, None)
    incoming, came = _slots(step.owed, heads, CAME, None)
    return BufferPlan(heads, received_units(step, k.device), came, outgoing, incoming)


def _slots(messages: tuple[RowMessage, ...], heads: int, units: int, runs: int | None, *, apart: bool = False) -> tuple[Slots, int]:
    """Returns where each message is, and the number of units outside the memory.

    Args:
        units, runs: the buffers of units, and of runs of rows; None for that of units.
        apart: whether each run is a message, also among units.
    """
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
