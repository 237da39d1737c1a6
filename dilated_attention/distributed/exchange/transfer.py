"""Moves keys to the ranks that need them and the gradients of keys back to the ranks that hold them, as the plan of a step says.

Gradients are sent in the inputs' dtype. The rank that holds a row sums its contributions in float32 (float64) and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.p2p import Transfer, Wire
from dilated_attention.distributed.exchange.messages import RowMessage, StepPlan

Tensors = tuple[torch.Tensor, ...]


class Arrival:
    """A step whose keys are in flight."""

    def __init__(self, step: StepPlan, members: Members, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        self.step = step
        heads = slice(*step.kv_heads)
        self._keys = (k[:, :, heads], v[:, :, heads])
        self._memory: torch.Tensor | None = None
        self._units: list[tuple[RowMessage, torch.Tensor]] = []
        self._transfer: Transfer | None = None
        shape = (step.rows, step.num_kv_heads, k.shape[0], 2 * k.shape[3])
        if not step.in_place:
            # a kernel may load a row that it then ignores, and 0 · NaN is NaN
            self._memory = (torch.empty if step.is_full else torch.zeros)(shape, dtype=k.dtype, device=k.device)
            for row, place, count in step.fills:
                _pack(self._memory[place : place + count], *(x[:, row : row + count] for x in self._keys))
        if not step.sends and not step.receives:
            return
        assert wire is not None, "one process has nobody to exchange with"
        outgoing: list[tuple[int, torch.Tensor]] = []
        if step.sends:
            source = self._memory
            if step.from_own:
                source = k.new_empty((k.shape[1], *shape[1:]))
                _pack(source, *self._keys)
            assert source is not None
            outgoing = _messages(step.sends, source, members)
        incoming = []
        for message in step.receives:
            assert self._memory is not None
            if message.units is None:
                incoming += [(members.peer(message.peer), self._memory[start:end]) for start, end in message.runs]
                continue
            came = _new_units(message, self._memory)
            incoming.append((members.peer(message.peer), came))
            self._units.append((message, came))
        self._transfer = wire.start(outgoing, incoming, f"{what}, {step.what}: K and V")

    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the step's K and V (B, rows, heads, D), once they have arrived."""
        if self._transfer is not None:
            self._transfer.wait()
        if self._memory is None:
            return self._keys
        for message, came in self._units:
            assert message.units is not None
            message.flat(self._memory).index_copy_(0, message.units, came)
        keys, values = self._memory.permute(2, 0, 1, 3).chunk(2, -1)
        return keys, values


class KeyGradients:
    """The gradients of the rank's own keys of some heads, summed over all steps that have these heads."""

    def __init__(self, k: torch.Tensor, kv_heads: int) -> None:
        shape = (k.shape[1], kv_heads, k.shape[0], 2 * k.shape[3])
        self._total = torch.empty(shape, dtype=accumulation_dtype(k.dtype), device=k.device)
        self._is_empty = True

    def add_own(self, step: StepPlan, grads: tuple[torch.Tensor, torch.Tensor] | None) -> None:
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

    def add(self, messages: Sequence[RowMessage], came: Sequence[torch.Tensor]) -> None:
        """Adds what other ranks contribute, in the order of ``messages``, which name this rank's rows."""
        incoming = iter(came)
        for message in messages:
            if message.units is None:
                for start, end in message.runs:
                    self._total[start:end] += next(incoming)
            else:
                message.flat(self._total).index_add_(0, message.units, next(incoming).to(self._total.dtype))

    def write(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Rounds the sums into dk and dv (B, n, heads, D)."""
        for grad, total in zip((dk, dv), self._total.chunk(2, -1), strict=True):
            grad.copy_(total.permute(2, 0, 1, 3))


@dataclass
class Returning:
    """Contributions of other ranks to the gradients of this rank's keys, in flight."""

    step: StepPlan
    came: list[torch.Tensor]
    kept: list[torch.Tensor]
    transfer: Transfer | None

    @staticmethod
    def start(
        step: StepPlan, members: Members, grads: tuple[torch.Tensor, torch.Tensor] | None, like: torch.Tensor, wire: Wire | None
    ) -> Returning:
        """Sends back the gradients of the keys that arrived. ``grads``: those of the step's memory, (B, rows, heads, D); None for zeros.

        Args:
            like: this rank's keys (B, n, Hk, D).
        """
        if not step.sends and not step.receives:
            return Returning(step, [], [], None)
        assert wire is not None
        outgoing: list[tuple[int, torch.Tensor]] = []
        shape = (step.rows, step.num_kv_heads, like.shape[0], 2 * like.shape[3])
        packed = None
        if step.receives:
            packed = torch.zeros(shape, dtype=like.dtype, device=like.device) if grads is None else like.new_empty(shape)
            if grads is not None:
                _pack(packed, *grads)
            outgoing = _messages(step.receives, packed, members)
        incoming = []
        for message in step.sends:
            if message.units is not None:
                incoming.append((members.peer(message.peer), _new_units(message, like.new_empty((0, *shape[1:])))))
                continue
            incoming += [(members.peer(message.peer), like.new_empty((end - start, *shape[1:]))) for start, end in message.runs]
        transfer = wire.start(outgoing, incoming, f"backward, {step.what}: dK and dV")
        return Returning(step, [x for _, x in incoming], [x for _, x in outgoing], transfer)

    def add_to(self, sums: KeyGradients) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        sums.add(self.step.owed, self.came)
        self.came, self.kept = [], []


def _pack(memory: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Writes K and V (B, rows, heads, D) to memory (rows, heads, B, 2·D)."""
    for part, x in zip(memory.chunk(2, -1), (keys, values), strict=True):
        part.copy_(x.permute(1, 2, 0, 3))


def _messages(messages: Sequence[RowMessage], memory: torch.Tensor, members: Members) -> list[tuple[int, torch.Tensor]]:
    found = []
    for message in messages:
        peer = members.peer(message.peer)
        if message.units is None:
            found += [(peer, memory[start:end]) for start, end in message.runs]
        else:
            found.append((peer, message.flat(memory).index_select(0, message.units)))
    return found


def _new_units(message: RowMessage, memory: torch.Tensor) -> torch.Tensor:
    """Returns room for the message's units of a memory (rows, heads, B, 2·D)."""
    assert message.units is not None
    return memory.new_empty((message.units.shape[0], *message.flat(memory).shape[1:]))
