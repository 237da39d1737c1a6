"""Runs the steps of a call on a sharded sequence, forward and backward, while the keys of the next steps are in flight: keys move to the
ranks that need them, and their gradients back to the ranks that hold them. A ``Computation`` says what the steps compute.

Gradients are sent in the inputs' dtype. The rank that holds a row sums its contributions in float32 (float64) and rounds once. Kernels
pack, fill and sum (``rows_triton.py``); torch's operations do on a CPU and in float64 (``copies_torch.py``), and sum what several steps
contribute to the same heads.

What calls alike have in common is made once for the kernels: the memory of a step, what it sends and receives, and the views of both. Small
ones are kept for the next call, since making them takes the host as long as the exchange itself. A later call on the same stream writes to
them only after the earlier one has read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilated_attention.backends.hardware import has_kernels
from dilated_attention.distributed.comm.p2p import Transfer, Wire
from dilated_attention.distributed.exchange import copies_torch
from dilated_attention.distributed.exchange.messages import BufferPlan, StepPlan, arrival_plan, own_places, return_plan, returned_units

Pair = tuple[torch.Tensor, torch.Tensor]
# the most bytes that are kept, over all kinds of calls; at this many, all of them are dropped
KEPT_BYTES = 2**27


def _copies(step: StepPlan, k: torch.Tensor) -> Any:
    """Returns the functions that copy the rows of a step: kernels where they can."""
    if not (has_kernels(k) and step.is_numbered):
        return copies_torch
    from dilated_attention.distributed.exchange import rows_triton

    return rows_triton


class Buffers:
    """What a step sends, receives and fills in one direction, as its plan says."""

    def __init__(self, plan: BufferPlan, k: torch.Tensor) -> None:
        B, heads, D = k.shape[0], plan.heads, k.shape[3]
        self.sent, self.came = k.new_empty((len(plan.numbers), B, 2 * D)), k.new_empty((plan.came, B, 2 * D))
        self.memory = k.new_empty((plan.rows, heads, B, 2 * D))
        self.views: Pair | None = None
        if plan.sources is not None:
            keys, values = self.memory.permute(2, 0, 1, 3).chunk(2, -1)
            self.views = keys, values
        by_number = self.sent, self.came, self.memory
        self.outgoing, self.incoming = (
            [(peer, by_number[number][first:last]) for peer, number, first, last in some] for some in (plan.outgoing, plan.incoming)
        )

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes + self.came.nbytes + self.memory.nbytes


_kept: dict[Any, Any] = {}
_kept_bytes = 0


def _begin(step: StepPlan, make_plan: Callable[[StepPlan, torch.Tensor], BufferPlan], k: torch.Tensor) -> tuple[BufferPlan, Any, Buffers]:
    """Returns the plan of a step in one direction, the functions that copy its rows, and buffers: kept or new ones."""
    global _kept_bytes
    found = step.remembered.get(make_plan)
    if found is None:
        found = step.remembered[make_plan] = make_plan(step, k), _copies(step, k)
    plan, copies = found
    if copies is copies_torch:
        # another thread's call may be using those of the last one
        return plan, copies, Buffers(plan, k)
    stream = 0
    if k.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # a graph has memory of its own
            return plan, copies, Buffers(plan, k)
        stream = torch._C._cuda_getCurrentRawStream(k.device.index)
    key = make_plan, step, stream, k.shape, k.dtype
    buffers = _kept.get(key)
    if buffers is None:
        # a tensor made in inference mode cannot be written to outside it
        with torch.inference_mode(False):
            buffers = Buffers(plan, k)
        if buffers.nbytes <= KEPT_BYTES // 4:
            if _kept_bytes + buffers.nbytes > KEPT_BYTES:
                _kept.clear()
                _kept_bytes = 0
            _kept[key] = buffers
            _kept_bytes += buffers.nbytes
    return plan, copies, buffers


class Arrival:
    """A step whose keys are in flight. On a step of sparse rows, k and v are the rank's whole tensors."""

    def __init__(self, step: StepPlan, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        if step.num_kv_heads < k.shape[2]:
            heads = slice(*step.kv_heads)
            k, v = k[:, :, heads], v[:, :, heads]
        self.step, self._own = step, (k, v)
        self._plan, self._copies, self._buffers = plan, copies, buffers = _begin(step, arrival_plan, k)
        self._transfer: Transfer | None = None
        if len(plan.numbers):
            copies.gather(step, buffers.sent, k, v, plan.numbers)
        if plan.fills_first:
            copies.assemble(step, buffers.memory, k, v, buffers.came, plan.sources)
        if buffers.outgoing or buffers.incoming:
            assert wire is not None, "one process has nobody to exchange with"
            self._transfer = wire.start(buffers.outgoing, buffers.incoming, f"{what}, {step.what}: K and V")

    def keys(self) -> Pair:
        """Returns the step's K and V (B, rows, heads, D), once they have arrived."""
        if self._transfer is not None:
            self._transfer.wait()
        buffers = self._buffers
        if self._plan.fills_late:
            self._copies.assemble(self.step, buffers.memory, *self._own, buffers.came, self._plan.sources)
        return self._own if buffers.views is None else buffers.views


class Returning:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: StepPlan, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Sends back the gradients of the keys that arrived: ``grads`` of the step's memory, (B, rows, heads, D), None for zeros."""
        plan, self._copies, buffers = _begin(step, return_plan, k)
        self._step, self._own, self._came = step, grads, buffers.came
        self._transfer: Transfer | None = None
        if not buffers.outgoing and not buffers.incoming:
            return
        assert wire is not None, "one process has nobody to exchange with"
        if grads is None:
            buffers.sent.zero_()
        elif len(plan.numbers):
            self._copies.gather(step, buffers.sent, *grads, plan.numbers)
        self._transfer = wire.start(buffers.outgoing, buffers.incoming, f"backward, {step.what}: dK and dV")

    def add_to(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Sums all contributions once they have come, in float32 (float64), and writes them to the step's heads of dk and dv (B, n, Hk, D);
        a step on sparse rows adds them to what these hold."""
        if self._transfer is not None:
            self._transfer.wait()
        step, device = self._step, self._came.device
        if step.num_kv_heads < dk.shape[2]:
            dk, dv = (x[:, :, slice(*step.kv_heads)] for x in (dk, dv))
        rows = dk.shape[1] // (1 if step.sparse is None else step.sparse[0])
        places, returned = own_places(step, rows, device), returned_units(step, rows, device)
        # kernels read gradients of the step's own queries, which a rank without rows does not have
        copies = copies_torch if self._own is None else self._copies
        copies.add(step, (dk, dv), self._own, self._came, places, returned)


# steps whose keys are in memory at once: of one that is computed, and of the next one
AHEAD = 2


def forward(
    computation: Any,
    steps: Sequence[StepPlan],
    k: torch.Tensor,
    v: torch.Tensor,
    wire: Wire | None,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Runs all steps, and ``meanwhile`` what else there is to compute, while the first keys are in flight."""
    arrivals = deque([Arrival(step, k, v, wire, "forward") for step in steps[:AHEAD]])
    if meanwhile is not None:
        meanwhile()
    for index in range(len(steps)):
        computation.forward(index, *arrivals.popleft().keys())
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "forward"))


def backward(
    computation: Any,
    steps: Sequence[StepPlan],
    k: torch.Tensor,
    v: torch.Tensor,
    wires: tuple[Wire | None, Wire | None],
    meanwhile: Callable[[], Pair] | None = None,
) -> Pair:
    """Runs all steps and returns (dk, dv) of this rank's keys, in their dtype. ``wires``: for keys and for their gradients. ``meanwhile``:
    as in ``forward``, where the steps are on sparse rows; it returns gradients of k and v, to which theirs are added."""
    arrivals = deque([Arrival(step, k, v, wires[0], "backward") for step in steps[:AHEAD]])
    total: Pair | None = None if meanwhile is None else meanwhile()
    last: Returning | None = None
    for index, step in enumerate(steps):
        grads = computation.backward(index, *arrivals.popleft().keys())
        if len(steps) == 1 and step.in_place and not step.sends and grads is not None:
            # nothing is anyone else's
            return grads  # type: ignore[no-any-return]
        back = Returning(step, grads, k, wires[1])
        total = total or tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))  # type: ignore[assignment]
        assert total is not None
        # add what came back during this step before memory for the next step is allocated
        if last is not None:
            last.add_to(*total)
        last = back
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wires[0], "backward"))
    assert last is not None and total is not None
    last.add_to(*total)
    return total
