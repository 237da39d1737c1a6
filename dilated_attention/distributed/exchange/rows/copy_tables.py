"""Which unit goes where in the copies of a step, as tables that are made once. A unit is one (row, key/value head)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dilated_attention.distributed.exchange.rows.messages import RowMessage, StepPlan


def _number(step: StepPlan) -> torch.dtype:
    """Returns the type of units' numbers."""
    return torch.int32 if step.is_numbered else torch.int64


def _once(step: StepPlan, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    tables: dict[Any, Any] = step.remembered
    if name not in tables:
        tables[name] = make()
    return tables[name]  # type: ignore[no-any-return]


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
    return _once(step, "sent", lambda: _own(step, _units(step, owed, device)).to(_number(step)))


def received_units(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns all units of the memory that arrive."""
    return _once(step, "received", lambda: _units(step, step.receives, device).to(_number(step)))


def offsets(step: StepPlan, device: torch.device) -> torch.Tensor:
    """Returns int32 (heads,): the offset of each head's own rows in the rank's tensors."""
    found = (0,) * step.num_kv_heads if step.sparse is None else step.sparse[1]
    return _once(step, "offsets", lambda: torch.tensor(found, dtype=torch.int32, device=device))


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

    return _once(step, "sources", make)


def own_places(step: StepPlan, own_rows: int, device: torch.device) -> torch.Tensor:
    """Returns int32 (own rows,): the row of memory of each of the rank's own rows."""

    def make() -> torch.Tensor:
        found = torch.arange(own_rows, dtype=torch.int32, device=device)
        for row, place, count in step.fills:
            found[row : row + count] = torch.arange(place, place + count, device=device).to(_number(step))
        return found

    return _once(step, "places", make)


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

    return _once(step, "returned", make)
