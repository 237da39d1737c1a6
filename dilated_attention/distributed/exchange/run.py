"""Runs a communication schedule on one rank, forward and backward.

The engine computes the local part; then the steps follow, each while the keys of the next steps are in flight.

A buffer in memory is (rows, 2, B, heads, D). K and V of a row are adjacent, so that what one rank sends for it is one message. It arrives
where kernels read it. A launch's gradients of its key rows have the same layout and go back, unsummed, to the rank that holds the rows;
it sums them in float32 and rounds once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.p2p import Transfer, Wire
from dilated_attention.distributed.exchange.comm_schedule import BufferSlice, ByHeads, CommSchedule, StepSchedule
from dilated_attention.distributed.exchange.local_attention import local_backward, local_forward
from dilated_attention.distributed.exchange.plan import RingLaunch
from dilated_attention.engine.branches.launch_views import Call, launches_of
from dilated_attention.engine.branches.merge import add_up, add_zero_keys, merge_onto
from dilated_attention.engine.branches.sequential import shares
from dilated_attention.engine.branches.views import Rows

Tensors = tuple[torch.Tensor, ...]


@dataclass
class _RingArrival:
    """A step whose keys are in flight. ``kv`` are its buffers; None for a buffer that is the rank's own rows, read in place."""

    schedule: StepSchedule
    kv: list[torch.Tensor | None]
    transfer: Transfer | None

    def keys_of(self, launch: RingLaunch, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tensors (B, rows, heads, D) of which the launch reads ``launch.keys``."""
        memory = self.kv[launch.buffer]
        return (k, v) if memory is None else _halves(memory)


def forward(
    schedule: CommSchedule, members: Members, tensors: Tensors, call: Call, wire: Wire, *, prefetch_depth: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, n, H, D) in q's dtype, lse (B, n, H)) of this rank's queries. ``tensors`` are its q, k, v.

    Args:
        prefetch_depth: the number of steps whose keys are in memory at once.
    """
    q, k, v = tensors
    ring_problem = schedule.ring_problem
    acc = accumulation_dtype(q.dtype)
    arrivals = _arrivals(schedule, members, k, v, wire, prefetch_depth, "forward")
    if schedule.local_ranges:
        out, lse = local_forward(ring_problem, schedule.local_ranges, tensors, call)
        # a ring merges a part into a row at every hop, and each merge would round it
        out = out.to(acc) if ring_problem.exchange == "ring" else out
    else:
        B, n, H, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype if schedule.single else acc, device=q.device)
        lse = torch.empty((B, H, n), dtype=acc, device=q.device).transpose(1, 2)
        if not schedule.covered:
            out.zero_()
            lse.fill_(-torch.inf)
    shape = torch.Size((q.shape[0], ring_problem.shape.keys[1]))
    for arrival in arrivals:
        for launch in arrival.schedule.step.launches:
            problem = launch.problem
            fresh = not schedule.local_ranges and problem.first
            direct = fresh and out.dtype is q.dtype and call.backend.capabilities.writes_views and not problem.zero_keys
            keys, values = arrival.keys_of(launch, k, v)
            tensors_ = [(launch.queries, q), (launch.keys, keys), (launch.keys, values), (launch.queries, out), (launch.queries, lse)]
            for (q_, k_, v_, out_, lse_), options in launches_of(problem, tensors_, _call_of(call, launch), shape, whole=direct):
                if direct:
                    call.backend.forward_into(q_, k_, v_, options, out_, lse_.transpose(1, 2))
                    continue
                part, part_lse = call.backend.forward(q_, k_, v_, options)
                part_lse = part_lse.transpose(1, 2)
                if problem.zero_keys:
                    part, part_lse = add_zero_keys(part, part_lse, problem.zero_keys)
                if fresh:
                    out_.copy_(part)
                    lse_.copy_(part_lse)
                else:
                    merge_onto(out_, lse_, part, part_lse)
    return out.to(q.dtype), lse


def backward(
    schedule: CommSchedule,
    members: Members,
    tensors: Tensors,
    call: Call,
    wires: tuple[Wire, Wire],
    dlse: torch.Tensor | None,
    *,
    prefetch_depth: int = 2,
) -> Tensors:
    """Returns (dq, dk, dv) in the inputs' dtype.

    Args:
        tensors: dout, q, k, v, out (B, n, H, D), and lse (B, n, H).
        wires: the wire for keys and values, and the wire for their gradients.
        dlse: the gradient of lse, (B, n, H).
    """
    dout, q, k, v, out, lse = tensors
    ring_problem = schedule.ring_problem
    acc = accumulation_dtype(q.dtype)
    arrivals = _arrivals(schedule, members, k, v, wires[0], prefetch_depth, "backward")
    if schedule.local_ranges:
        dq, dk, dv = local_backward(ring_problem, schedule.local_ranges, tensors, call, dlse)
        if ring_problem.exchange == "ring":
            dq, dk, dv = (x.to(acc) for x in (dq, dk, dv))
    else:
        make = torch.empty if schedule.covered else torch.zeros
        dq = make(q.shape, dtype=q.dtype if schedule.single else acc, device=q.device)
        if schedule.writes_once:
            dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        else:
            dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    # a row without keys must get weight 0 for its (masked) scores, and exp(s − (+inf)) gives that in every kernel
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    shape = torch.Size((q.shape[0], ring_problem.shape.keys[1]))
    returning: deque[_RingReturn] = deque()
    for arrival in arrivals:
        parts = []
        for launch in arrival.schedule.step.launches:
            keys, values = arrival.keys_of(launch, k, v)
            part = torch.empty((launch.problem.k_len, 2, k.shape[0], launch.keys.heads, k.shape[3]), dtype=_share_dtype(q), device=k.device)
            parts.append(part)
            dkeys, dvalues = _halves(part)
            rows, every = launch.queries, Rows(0, 1, 1, launch.problem.k_len, 1, 0, 1, launch.keys.heads)
            views = [(rows, dout), (rows, q), (launch.keys, keys), (launch.keys, values), (rows, out), (rows, lse)]
            views += [(rows, dq), (every, dkeys), (every, dvalues)]
            if dlse is not None:
                views.append((rows, dlse))
            direct = (
                not schedule.local_ranges
                and launch.problem.first
                and dq.dtype is q.dtype
                and (dlse is None or call.backend.capabilities.lse_grad)
            )
            for (dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest), options in launches_of(
                launch.problem, views, _call_of(call, launch), shape
            ):
                inputs = (dout_, q_, k_, v_, out_, lse_)
                if direct:
                    dlse_ = rest[0].transpose(1, 2) if rest else None
                    call.backend.backward_into(*inputs[:5], lse_.transpose(1, 2), options, (dq_, dk_, dv_), dlse_)
                    continue
                part_dq, part_dk, part_dv = shares(call.backend, inputs, options, rest[0] if rest else None)
                (dq_.add_ if schedule.local_ranges or not launch.problem.first else dq_.copy_)(part_dq)
                dk_.copy_(part_dk)
                dv_.copy_(part_dv)
        returning.append(_send_back(arrival.schedule, members, parts, _share_dtype(q), (dk, dv), wires[1], schedule.writes_once))
        # add what came back during this step before memory for the next step is allocated
        while len(returning) > 1:
            returning.popleft().add()
    for back in returning:
        back.add()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _call_of(call: Call, launch: RingLaunch) -> Call:
    """Shifts ``first_head``: dropout depends on heads counted over the whole model, while a problem counts those of its step."""
    if not call.dropout_p:
        return call
    return replace(call, first_head=call.first_head + launch.queries.head_start - launch.problem.heads.start)


def _share_dtype(q: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which contributions to dk and dv are sent: that of GPU kernels; only the receiver sums them in float32."""
    return q.dtype if q.device.type == "cuda" else accumulation_dtype(q.dtype)


def _arrivals(
    schedule: CommSchedule, members: Members, k: torch.Tensor, v: torch.Tensor, wire: Wire, prefetch_depth: int, what: str
) -> Iterator[_RingArrival]:
    """Yields the steps in order, each once its keys have arrived, while the next ones' are in flight. Transfers begin with this call."""
    steps = schedule.steps
    packed: Sequence[torch.Tensor | None] = [None] * len(steps)
    if schedule.by_heads is not None and len(steps) <= prefetch_depth:
        packed = _pack_heads(schedule.by_heads, len(steps), k, v)
    waiting = deque(_start(step, members, k, v, wire, what, memory) for step, memory in zip(steps[:prefetch_depth], packed, strict=False))

    def arrive() -> Iterator[_RingArrival]:
        for index in range(len(steps)):
            arrival = waiting.popleft()
            if arrival.transfer is not None:
                arrival.transfer.wait()
            yield arrival
            if index + prefetch_depth < len(steps):
                waiting.append(_start(steps[index + prefetch_depth], members, k, v, wire, what))

    return arrive()


def _pack_heads(by_heads: ByHeads, num_steps: int, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns every step's buffer with the rank's own rows filled in."""
    B, _, _, D = k.shape
    memory = torch.empty((num_steps, by_heads.rows, 2, B, by_heads.heads, D), dtype=k.dtype, device=k.device)
    for part, own in by_heads.own:
        into = memory[:, part.at : part.at + part.count]
        for which, x in enumerate((k, v)):
            # (B, rows, steps · heads, D) → (steps, rows, B, heads, D)
            into[:, :, which].copy_(x[:, own].unflatten(2, (num_steps, by_heads.heads)).permute(2, 1, 0, 3, 4))
    return memory.unbind(0)


def _start(
    schedule: StepSchedule, members: Members, k: torch.Tensor, v: torch.Tensor, wire: Wire, what: str, packed: torch.Tensor | None = None
) -> _RingArrival:
    """Begins a step's exchange.

    Args:
        packed: the step's only buffer, if the rank's own rows are already in it.
    """
    B, _, _, D = k.shape
    memory: list[torch.Tensor | None] = [packed]
    if packed is None:
        sizes = schedule.sizes
        memory = [None if size is None else torch.empty((size[0], 2, B, size[1], D), dtype=k.dtype, device=k.device) for size in sizes]
        for filled in schedule.fills:
            into = _of(memory, filled.part)
            into[:, 0].copy_(filled.rows.of(k).squeeze(1).transpose(0, 1))
            into[:, 1].copy_(filled.rows.of(v).squeeze(1).transpose(0, 1))
    transfer = None
    if schedule.sends or schedule.receives:
        sends = [(members.peer(peer), _of(memory, part)) for peer, part in schedule.sends]
        receives = [(members.peer(peer), _of(memory, part)) for peer, part in schedule.receives]
        transfer = wire.start(sends, receives, f"{what}, {schedule.step.what}: K and V")
    return _RingArrival(schedule, memory[: len(schedule.step.buffers)], transfer)


def _of(memory: list[torch.Tensor | None], part: BufferSlice) -> torch.Tensor:
    whole = memory[part.buffer]
    assert whole is not None
    return whole[part.at : part.at + part.count]


def _halves(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (B, rows, heads, D) views of a buffer's keys and values."""
    keys, values = memory.unbind(1)
    return keys.transpose(0, 1), values.transpose(0, 1)


@dataclass
class _RingReturn:
    """Gradients of this rank's keys that are to be summed: its own contributions and those in flight from other ranks."""

    schedule: StepSchedule
    parts: list[torch.Tensor]
    came: list[torch.Tensor | None]
    sums: tuple[torch.Tensor, torch.Tensor]
    transfer: Transfer | None
    writes: bool

    def add(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        for owed, came in zip(self.schedule.owed, self.came, strict=True):
            own = [self.parts[launch][at : at + owed.rows.length] for launch, at in owed.own]
            dk, dv = (owed.rows.of(total).squeeze(1) for total in self.sums)
            add_up(dk, dv, own, came, writes=self.writes)


def _send_back(
    schedule: StepSchedule,
    members: Members,
    parts: list[torch.Tensor],
    dtype: torch.dtype,
    sums: tuple[torch.Tensor, torch.Tensor],
    wire: Wire,
    writes: bool,
) -> _RingReturn:
    dk, _ = sums
    came: list[torch.Tensor | None] = []
    for owed in schedule.owed:
        shape = (len(owed.peers), owed.rows.length, 2, dk.shape[0], owed.rows.heads, dk.shape[3])
        # a rank that computed nothing itself must expect what the others send, not the dtype of its sums
        came.append(torch.empty(shape, dtype=dtype, device=dk.device) if owed.peers else None)
    receives = []
    for peer, index, place in schedule.arrivals:
        memory = came[index]
        assert memory is not None
        receives.append((members.peer(peer), memory[place]))
    transfer = None
    if schedule.returns or receives:
        sends = [(members.peer(peer), parts[launch][at : at + count]) for peer, launch, at, count in schedule.returns]
        transfer = wire.start(sends, receives, f"backward, {schedule.step.what}: dK and dV")
    return _RingReturn(schedule, parts, came, sums, transfer, writes)
