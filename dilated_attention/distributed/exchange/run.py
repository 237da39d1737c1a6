"""The one exchange: each rank gets the key rows that its queries see, computes, and sends the rows' gradients back, some heads at a time.

Which rows these are, every rank works out for all ranks (``plan.py``), so nobody is asked for anything. A step brings the rows of some
key/value heads into a *memory* (rows, heads, B, 2·D), in order of position: K and V of a row and head are adjacent, so what one rank sends
another is one message. The next step's rows are in flight while one is computed. Gradients travel in the inputs' dtype; the rank that holds
a row sums what it gets in float32 (float64) and rounds once. Short calls wait for the CPU, so each copy of a step is one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.backends.hardware import has_kernels, on_device
from dilated_attention.distributed.comm.p2p import Exchange, Wire
from dilated_attention.distributed.exchange import copies_torch
from dilated_attention.distributed.exchange.step import Pair, Step

# steps whose keys are in memory at once: of one that is computed, and of the next one
AHEAD = 2


def _copies(x: torch.Tensor) -> Any:
    """Returns the functions that copy lines: kernels where they can."""
    if not has_kernels(x):
        return copies_torch
    from dilated_attention.distributed.exchange import copies_triton

    return copies_triton


def _wide(lines: torch.Tensor) -> torch.Tensor:
    """Returns lines as wider numbers, since a library carries at most 2³¹ of them, where they can be read so."""
    return lines.view(torch.int64) if lines.shape[1] * lines.itemsize % 8 == 0 else lines


def views_of(memory: torch.Tensor) -> Pair:
    """Returns K and V (B, rows, heads, D) of a memory (rows, heads, B, 2·D)."""
    keys, D = memory.permute(2, 0, 1, 3), memory.shape[3] // 2
    return keys[..., :D], keys[..., D:]


class AtHand:
    """Keys that need no exchange; ``Arrival``: those that do. ``own``: the rank's K and V (B, n, heads, D); ``keys``: K and V (B, rows,
    heads, D) of the memory, once they are waited for."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.own = self.keys = k, v

    def wait(self) -> None:
        """Waits until all keys have come. A later call does nothing."""


class Arrival(AtHand):
    """A step whose keys are in flight."""

    def __init__(self, step: Step, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        super().__init__(step.of_heads(k), step.of_heads(v))
        self._step: Step | None = None if step.is_own else step
        self._transfer: Exchange | None = None
        k = self.own[0]
        width = step.width * k.shape[0] * 2 * k.shape[3]
        self._came: torch.Tensor | None = k.new_empty((step.place.total, width))
        if step.send.total or step.place.total:
            assert wire is not None, "one process has nobody to exchange with"
            sent = k.new_empty((step.send.total, width))
            _copies(k).gather(sent, self.own, None, step.send.numbers, step)
            what = f"{what}, {step.what}: K and V"
            self._transfer = wire.start(_wide(sent), step.send.counts, _wide(self._came), step.place.counts, what)

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        step, k = self._step, self.own[0]
        if step is not None:
            B, _, heads, D = k.shape
            memory = k.new_empty((step.rows, heads, B, 2 * D))
            _copies(k).gather(memory, self.own, self._came, step.sources, step)
            self.keys = views_of(memory)
        # what came is copied: its memory is free for the step's results
        self._step = self._transfer = self._came = None


class Returning:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: Step, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Sends back the gradients of the keys that came: ``grads`` of the step's memory, (B, rows, heads, D), None for zeros."""
        B, _, _, D = k.shape
        if grads is None:
            grads = (k.new_zeros((1, 1, 1, D)).expand(B, step.rows, step.num_kv_heads, D),) * 2
        width = step.width * B * 2 * D
        self._step, self._grads, self._transfer = step, grads, None
        self._came = k.new_empty((step.send.total, width))
        if step.place.total or step.send.total:
            assert wire is not None, "one process has nobody to exchange with"
            sent = k.new_empty((step.place.total, width))
            _copies(k).gather(sent, grads, None, step.place.numbers, step, are_own=False)
            what = f"backward, {step.what}: dK and dV"
            self._transfer = wire.start(_wide(sent), step.place.counts, _wide(self._came), step.send.counts, what)

    def add_to(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Writes the sums of all contributions, once they have come, into the step's heads of dk and dv (B, n, Hk, D); adds them where the
        step has only some of the rank's rows, as every step beside a layer on its own keys has."""
        if self._transfer is not None:
            self._transfer.wait()
        to = self._step.of_heads(dk), self._step.of_heads(dv)
        _copies(dk).add(to, self._grads, self._came, self._step)


def compile_ahead(step: Step, k: torch.Tensor, v: torch.Tensor, *, needs_grad: bool) -> None:
    """Starts compiling the kernels that copy for steps like this one, if kernels do."""
    if has_kernels(k):
        with on_device(k.device):
            _copies(k).compile_ahead(step, k, v, needs_grad=needs_grad)


def forward(work: Any, steps: Sequence[Step], k: torch.Tensor, v: torch.Tensor, wire: Wire | None) -> None:
    """Runs all steps of a ``Work``; what needs the rank's own keys alone while the first keys are in flight."""
    arrivals = deque(Arrival(step, k, v, wire, "forward") for step in steps[:AHEAD])
    work.home(AtHand(k, v), is_backward=False)
    for index in range(len(steps)):
        work.forward(index, arrivals[0])
        arrivals.popleft().wait()
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "forward"))


def backward(work: Any, steps: Sequence[Step], k: torch.Tensor, v: torch.Tensor, wire: Wire | None) -> Pair:
    """Runs all steps and returns (dk, dv) of this rank's keys, in their dtype."""
    arrivals = deque(Arrival(step, k, v, wire, "backward") for step in steps[:AHEAD])
    to = work.home(AtHand(k, v), is_backward=True)
    last: Returning | None = None
    for index, step in enumerate(steps):
        grads = work.backward(index, arrivals[0])
        arrivals.popleft().wait()
        if grads is not None and len(steps) == 1 and step.is_own and not step.send.total:
            # no other rank has a share of these gradients
            return grads[0].to(k.dtype), grads[1].to(v.dtype)
        to = to or (torch.empty_like(k, memory_format=torch.contiguous_format), torch.empty_like(v, memory_format=torch.contiguous_format))
        back = Returning(step, grads, k, wire)
        # add what came back during this step before memory for the next step is allocated
        if last is not None:
            last.add_to(*to)
        last = back
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "backward"))
    assert last is not None and to is not None
    last.add_to(*to)
    return to
