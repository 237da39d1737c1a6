"""Moves keys to the ranks that need them and the gradients of keys back to the ranks that hold them, as the plan of a step says.

Gradients are sent in the inputs' dtype. The rank that holds a row sums its contributions in float32 (float64) and rounds once. These are
torch's operations, for a CPU and for float64; ``fused_transfer.py`` has kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.p2p import Transfer, Wire
from dilated_attention.distributed.exchange.rows import copy_tables as tables
from dilated_attention.distributed.exchange.rows.messages import RowMessage, StepPlan

Pair = tuple[torch.Tensor, torch.Tensor]


class Arrival:
    """A step whose keys are in flight."""

    def __init__(self, step: StepPlan, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        self.step = step
        heads = slice(*step.kv_heads)
        k, v = k[:, :, heads], v[:, :, heads]
        self._own = k, v
        self._shape = (step.num_kv_heads, k.shape[0], 2 * k.shape[3])
        self._memory: torch.Tensor | None = None
        self._came = k.new_empty(0)
        self._transfer: Transfer | None = None
        if not step.in_place:
            # a kernel may load a row that it then ignores, and 0 · NaN is NaN
            make = torch.empty if step.is_full else torch.zeros
            self._memory = make((step.rows, *self._shape), dtype=k.dtype, device=k.device)
            for row, place, count in step.fills:
                _pack(self._memory[place : place + count], k[:, row : row + count], v[:, row : row + count])
        if step.sends or step.receives:
            assert wire is not None, "one process has nobody to exchange with"
            self._transfer = wire.start(self._outgoing(), self._incoming(), f"{what}, {step.what}: K and V")

    def _outgoing(self) -> list[tuple[int, torch.Tensor]]:
        step, (k, v) = self.step, self._own
        if not step.sends:
            return []
        source = self._memory
        if step.from_own:
            source = k.new_empty((k.shape[1], *self._shape))
            _pack(source, k, v)
        return _messages(step.sends, source, step.num_kv_heads)

    def _incoming(self) -> list[tuple[int, torch.Tensor]]:
        step = self.step
        singles = sum(message.size(step.num_kv_heads) for message in step.receives if message.units is not None)
        self._came = self._own[0].new_empty((singles, *self._shape[1:]))
        return _messages(step.receives, self._memory, step.num_kv_heads, self._came)

    def keys(self) -> Pair:
        """Returns the step's K and V (B, rows, heads, D), once they have arrived."""
        if self._transfer is not None:
            self._transfer.wait()
        if self._memory is None:
            return self._own
        step, memory, start = self.step, self._memory, 0
        for message in step.receives:
            if message.units is not None:
                end = start + message.size(step.num_kv_heads)
                message.flat(memory).index_copy_(0, message.units, _as_units(message, self._came[start:end], memory))
                start = end
        keys, values = memory.permute(2, 0, 1, 3).chunk(2, -1)
        return keys, values


class KeyGradients:
    """The gradients of the rank's own keys of some heads, summed over all steps that have these heads."""

    def __init__(self, k: torch.Tensor, kv_heads: int) -> None:
        shape = (k.shape[1], kv_heads, k.shape[0], 2 * k.shape[3])
        self._total = torch.empty(shape, dtype=accumulation_dtype(k.dtype), device=k.device)
        self._is_empty = True

    def add_own(self, step: StepPlan, grads: Pair | None) -> None:
        """Adds what this rank's queries contribute to its own rows. ``grads``: of the step's memory, dk and dv (B, rows, heads, D)."""
        first, self._is_empty = self._is_empty, False
        fills = ((0, 0, self._total.shape[0]),) if step.in_place else step.fills
        if first and (grads is None or not fills):
            self._total.zero_()
        if grads is None:
            return
        for row, place, count in fills:
            for part, share in zip(self._total[row : row + count].chunk(2, -1), grads, strict=True):
                own = share[:, place : place + count].permute(1, 2, 0, 3)
                # the fills of a step are all of the rank's rows
                (part.copy_ if first else part.add_)(own)

    def add(self, step: StepPlan, came: torch.Tensor) -> None:
        """Adds what other ranks contribute: ``came`` (units, B, 2·D) are the units of ``step.owed``, one message after the other."""
        start = 0
        for message in step.owed:
            end = start + message.size(step.num_kv_heads)
            part, start = came[start:end], end
            if message.units is not None:
                part = _as_units(message, part, self._total).to(self._total.dtype)
                message.flat(self._total).index_add_(0, message.units, part)
                continue
            rows = part.view(-1, *self._total.shape[1:])
            for first, last in message.runs:
                self._total[first:last] += rows[: last - first]
                rows = rows[last - first :]

    def write(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Rounds the sums into dk and dv (B, n, heads, D)."""
        for grad, total in zip((dk, dv), self._total.chunk(2, -1), strict=True):
            grad.copy_(total.permute(2, 0, 1, 3))


class Returning:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: StepPlan, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Sends back the gradients of the keys that arrived.

        Args:
            grads: of the step's memory, (B, rows, heads, D); None for zeros.
            k: this rank's keys (B, n, Hk, D).
        """
        self.step = step
        heads = step.num_kv_heads
        unit = (k.shape[0], 2 * k.shape[3])
        self.came = k.new_empty((sum(message.size(heads) for message in step.owed), *unit))
        self._kept = k.new_empty(0)
        self._transfer: Transfer | None = None
        if not step.sends and not step.receives:
            return
        assert wire is not None
        units = sum(message.size(heads) for message in step.receives)
        self._kept = k.new_zeros((units, *unit))
        if grads is not None and units:
            dk, dv = grads
            packed = self._kept.new_empty((dk.shape[1], dk.shape[2], *unit))
            _pack(packed, dk, dv)
            torch.index_select(packed.view(-1, *unit), 0, tables.received_units(step, dk.device, torch.int64), out=self._kept)
        outgoing = _messages(step.receives, None, heads, self._kept)
        incoming = _messages(step.owed, None, heads, self.came)
        self._transfer = wire.start(outgoing, incoming, f"backward, {step.what}: dK and dV")

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        self._kept = self.came[:0]


def _pack(memory: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Writes K and V (B, rows, heads, D) to memory (rows, heads, B, 2·D)."""
    for part, x in zip(memory.chunk(2, -1), (keys, values), strict=True):
        part.copy_(x.permute(1, 2, 0, 3))


def _as_units(message: RowMessage, units: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns units (count, B, 2·D) in the form in which ``message.flat(memory)`` is indexed."""
    assert message.units is not None
    return units.view(message.units.shape[0], *message.flat(memory).shape[1:])


def _messages(
    messages: Sequence[RowMessage], memory: torch.Tensor | None, heads: int, units: torch.Tensor | None = None
) -> list[tuple[int, torch.Tensor]]:
    """Returns (rank in the group, tensor) of each message.

    Args:
        memory: where runs of rows are; without it, they are among the units.
        units: room for the messages that are not runs of the memory, one after the other; without it, they are copied from the memory.
    """
    found, start = [], 0
    for message in messages:
        if message.units is None and memory is not None:
            found += [(message.peer, memory[first:last]) for first, last in message.runs]
        elif units is not None:
            end = start + message.size(heads)
            found.append((message.peer, units[start:end]))
            start = end
        else:
            assert memory is not None and message.units is not None
            found.append((message.peer, message.flat(memory).index_select(0, message.units)))
    return found
