"""The exchanges of ``transfer.py`` on a GPU: one kernel each packs, fills and sums, and what calls alike have in common is made once.

That is the memory of a step, what it sends and receives, and the views of both. Small ones are kept for the next call, since making them
takes the host as long as the exchange itself. A later call on the same stream writes to them only after the earlier one has read them.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.distributed.comm.p2p import Message, Transfer, Wire
from dilated_attention.distributed.exchange.rows import copies_triton, copy_tables
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.distributed.exchange.rows.transfer import Pair

# the most bytes that are kept, over all kinds of calls; at this many, all of them are dropped
KEPT_BYTES = 2**27


class _ArrivalBuffers:
    """What an arrival sends, receives and fills.

    Args:
        k: the rank's keys of the step's heads, (B, n, heads, D).
    """

    def __init__(self, step: StepPlan, k: torch.Tensor) -> None:
        B, n, heads, D = k.shape
        self.numbers = copy_tables.sent_units(step, k.device)
        self.sent = k.new_empty((len(self.numbers), B, 2 * D))
        singles = sum(message.size(heads) for message in step.receives if message.units is not None)
        self.came = k.new_empty((singles, B, 2 * D))
        self.memory: torch.Tensor | None = None
        self.views: Pair | None = None
        self.sources = self.numbers
        self.fills_first = self.fills_late = False
        if not step.in_place:
            self.memory = k.new_empty((step.rows, heads, B, 2 * D))
            keys, values = self.memory.permute(2, 0, 1, 3).chunk(2, -1)
            self.views = keys, values
            self.sources = copy_tables.sources(step, n, k.device)
            # a kernel may load a row that it then ignores, and 0 · NaN is NaN, so a row that nobody needs is filled with zeros
            fills = bool(step.fills) or not step.is_full
            self.fills_first = fills and not step.from_own and any(message.units is None for message in step.sends)
            self.fills_late = singles > 0 or (fills and not self.fills_first)
        self.outgoing, self.incoming = self._outgoing(step, heads), self._incoming(step, heads)

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes + self.came.nbytes + (0 if self.memory is None else self.memory.nbytes)

    def _outgoing(self, step: StepPlan, heads: int) -> list[Message]:
        found: list[Message] = []
        start = 0
        for message in step.sends:
            if message.units is None and not step.from_own:
                assert self.memory is not None
                found += [(message.peer, self.memory[first:last]) for first, last in message.runs]
                continue
            sizes = [message.size(heads)] if message.units is not None else [(last - first) * heads for first, last in message.runs]
            for size in sizes:
                found.append((message.peer, self.sent[start : start + size]))
                start += size
        return found

    def _incoming(self, step: StepPlan, heads: int) -> list[Message]:
        found: list[Message] = []
        start = 0
        for message in step.receives:
            if message.units is None:
                assert self.memory is not None
                found += [(message.peer, self.memory[first:last]) for first, last in message.runs]
                continue
            end = start + message.size(heads)
            found.append((message.peer, self.came[start:end]))
            start = end
        return found


class FusedArrival:
    """``transfer.Arrival`` by kernels. On a step of sparse rows, k and v are the rank's whole tensors."""

    def __init__(self, step: StepPlan, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        if step.num_kv_heads < k.shape[2]:
            heads = slice(*step.kv_heads)
            k, v = k[:, :, heads], v[:, :, heads]
        self.step, self._own = step, (k, v)
        self._buffers = buffers = _buffers_of(_ArrivalBuffers, step, k)
        self._transfer: Transfer | None = None
        if len(buffers.numbers):
            copies_triton.gather(step, buffers.sent, k, v, buffers.numbers)
        if buffers.fills_first:
            copies_triton.assemble(step, buffers.memory, k, v, buffers.came, buffers.sources)
        if buffers.outgoing or buffers.incoming:
            assert wire is not None, "one process has nobody to exchange with"
            self._transfer = wire.start(buffers.outgoing, buffers.incoming, f"{what}, {step.what}: K and V")

    def keys(self) -> Pair:
        """Returns the step's K and V (B, rows, heads, D), once they have arrived."""
        if self._transfer is not None:
            self._transfer.wait()
        buffers = self._buffers
        if buffers.fills_late:
            copies_triton.assemble(self.step, buffers.memory, *self._own, buffers.came, buffers.sources)
        return self._own if buffers.views is None else buffers.views


class _ReturnBuffers:
    """What a returning step sends and receives."""

    def __init__(self, step: StepPlan, k: torch.Tensor) -> None:
        B, heads, D = k.shape[0], step.num_kv_heads, k.shape[3]
        self.numbers = copy_tables.received_units(step, k.device)
        self.sent = k.new_empty((len(self.numbers), B, 2 * D))
        self.came = k.new_empty((sum(message.size(heads) for message in step.owed), B, 2 * D))
        sent, came = (x.split([m.size(heads) for m in some]) for x, some in ((self.sent, step.receives), (self.came, step.owed)))
        self.outgoing = [(message.peer, part) for message, part in zip(step.receives, sent, strict=True)]
        self.incoming = [(message.peer, part) for message, part in zip(step.owed, came, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes + self.came.nbytes


class FusedReturning:
    """``transfer.Returning`` by kernels."""

    def __init__(self, step: StepPlan, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        self.step = step
        self._buffers = buffers = _buffers_of(_ReturnBuffers, step, k)
        self._transfer: Transfer | None = None
        self.came = buffers.came
        if not buffers.outgoing and not buffers.incoming:
            return
        assert wire is not None
        if grads is None:
            buffers.sent.zero_()
        elif len(buffers.numbers):
            copies_triton.gather(step, buffers.sent, *grads, buffers.numbers)
        self._transfer = wire.start(buffers.outgoing, buffers.incoming, f"backward, {step.what}: dK and dV")

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()

    def write(self, grads: Pair, own: Pair) -> None:
        """Writes the sum of all contributions, once they have come, to ``grads`` (B, n, heads, D). ``own``: of the step's memory.

        On a step of sparse rows it is added to what ``grads`` hold.
        """
        step, device = self.step, self.came.device
        rows = sum(count for _, _, count in step.fills) or step.rows
        places, returned = copy_tables.own_places(step, rows, device), copy_tables.returned_units(step, rows, device)
        copies_triton.add(step, grads, own, self.came, places, returned)


_kept: dict[Any, Any] = {}
_kept_bytes = 0


def _buffers_of(kind: Any, step: StepPlan, k: torch.Tensor) -> Any:
    """Returns the buffers of a step: those of the last call alike on this stream, or new ones."""
    global _kept_bytes
    stream = 0
    if k.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # a graph has memory of its own
            return kind(step, k)
        stream = torch._C._cuda_getCurrentRawStream(k.device.index)
    key = kind, step, stream, k.shape, k.dtype
    found = _kept.get(key)
    if found is None:
        # a tensor made in inference mode cannot be written to outside it
        with torch.inference_mode(False):
            found = kind(step, k)
        if found.nbytes > KEPT_BYTES // 4:
            return found
        if _kept_bytes + found.nbytes > KEPT_BYTES:
            _kept.clear()
            _kept_bytes = 0
        _kept[key] = found
        _kept_bytes += found.nbytes
    return found
