"""Runs a job on one rank, forward and backward: home by the engine, then step by step while the next step's keys travel.

A buffer in memory is (rows, 2, B, heads, D): K and V of a row side by side, so that what one rank sends of it is one message and
lands where kernels read it. Gradients of its rows lie alike, in the accumulation dtype, and go back to who holds the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.group import Members
from dilated_attention.distributed.home import home_backward, home_forward
from dilated_attention.distributed.plan import Buffer, Job, Launch, Source, Step, rank_plan
from dilated_attention.distributed.wire import Transfer, Wire
from dilated_attention.engine.merge import add_zero_keys, merge_onto
from dilated_attention.engine.run import Call, launches_of, shares

Tensors = tuple[torch.Tensor, ...]


@dataclass
class _Arriving:
    """A step whose keys are on their way. ``kv`` are its buffers; None where the rank's own rows are read as they lie."""

    step: Step
    kv: list[torch.Tensor | None]
    transfer: Transfer | None


def forward(job: Job, members: Members, tensors: Tensors, call: Call, wire: Wire) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, n, H, D) in q's dtype, lse (B, n, H)) of this rank's queries. ``tensors`` are its q, k, v."""
    q, k, v = tensors
    plan = rank_plan(job, members.rank)
    acc = accumulation_dtype(q.dtype)
    arriving = _arrivals(job, members, k, v, wire, "forward")
    if plan.home:
        out, lse = home_forward(job, plan.home, tensors, call)
        # a ring adds a part for every hop to a row, and each would round it
        out = out.to(acc) if job.exchange == "ring" else out
    else:
        out = torch.empty(q.shape, dtype=q.dtype if plan.single else acc, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=acc, device=q.device)
        if not plan.covered:
            out.zero_()
            lse.fill_(-torch.inf)
    for step in arriving:
        for launch in step.step.launches:
            keys, values = _key_views(step, launch, k, v)
            views = [launch.queries.of(q), keys, values, launch.queries.of(out), launch.queries.of(lse)]
            fresh = not plan.home and launch.problem.first
            direct = fresh and out.dtype is q.dtype and not launch.problem.zero_keys
            for (q_, k_, v_, out_, lse_), options in launches_of(
                launch.problem, views, call, torch.Size((q.shape[0], job.shape.keys[1])), whole=direct and call.backend.facts.writes_views
            ):
                if direct:
                    call.backend.forward_into(q_, k_, v_, options, out_, lse_.transpose(1, 2))
                    continue
                part, part_lse = call.backend.forward(q_, k_, v_, options)
                part_lse = part_lse.transpose(1, 2)
                if launch.problem.zero_keys:
                    part, part_lse = add_zero_keys(part, part_lse, launch.problem.zero_keys)
                if fresh:
                    out_.copy_(part)
                    lse_.copy_(part_lse)
                else:
                    merge_onto(out_, lse_, part, part_lse)
    return out.to(q.dtype), lse


def backward(job: Job, members: Members, tensors: Tensors, call: Call, wires: tuple[Wire, Wire], dlse: torch.Tensor | None) -> Tensors:
    """(dq, dk, dv) in the inputs' dtype. ``tensors``: dout, q, k, v, out (B, n, H, D) and lse (B, n, H), as ``dlse``.

    Args:
        wires: for keys and values, and for their gradients.
    """
    dout, q, k, v, out, lse = tensors
    plan = rank_plan(job, members.rank)
    acc = accumulation_dtype(q.dtype)
    arriving = _arrivals(job, members, k, v, wires[0], "backward")
    if plan.home:
        dq, dk, dv = home_backward(job, plan.home, tensors, call, dlse)
        if job.exchange == "ring":
            dq, dk, dv = (x.to(acc) for x in (dq, dk, dv))
    else:
        make = torch.empty if plan.covered else torch.zeros
        dq = make(q.shape, dtype=q.dtype if plan.single else acc, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    # a row without keys must weigh its (masked) scores with 0, and exp(s − (+inf)) does that in every kernel
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    returning: deque[_Returning] = deque()
    for index, step in enumerate(arriving):
        grads: list[torch.Tensor | None] = [None] * len(step.kv)
        for launch in step.step.launches:
            _launch_backward(job, step, launch, grads, (dout, q, k, v, out, lse), (dq, dk, dv), call, dlse, bool(plan.home))
        returning.append(_send_back(job, members, index, step, grads, (dk, dv), wires[1]))
        # what came back while this step was computed is added before the next one's memory is asked for
        while len(returning) > 1:
            returning.popleft().add(dk, dv)
    for back in returning:
        back.add(dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _launch_backward(
    job: Job,
    step: _Arriving,
    launch: Launch,
    grads: list[torch.Tensor | None],
    tensors: Tensors,
    sums: Tensors,
    call: Call,
    dlse: torch.Tensor | None,
    onto: bool,
) -> None:
    dout, q, k, v, out, lse = tensors
    dq, dk, dv = sums
    keys, values = _key_views(step, launch, k, v)
    rows = launch.queries
    opens = False
    kv = step.kv[launch.buffer]
    if kv is None:
        dkeys, dvalues = launch.keys.of(dk), launch.keys.of(dv)
    else:
        grad = grads[launch.buffer]
        if grad is None:
            opens = launch.problem.k_len == kv.shape[0]
            make = torch.empty if opens else torch.zeros
            grad = grads[launch.buffer] = make(kv.shape, dtype=dq.dtype if dq.dtype is torch.float64 else torch.float32, device=kv.device)
        dkeys, dvalues = (launch.keys.of(x) for x in _as_rows(grad))
    views = [rows.of(dout), rows.of(q), keys, values, rows.of(out), rows.of(lse), rows.of(dq), dkeys, dvalues]
    if dlse is not None:
        views.append(rows.of(dlse))
    first = not onto and launch.problem.first
    for group, options in launches_of(launch.problem, views, call, torch.Size((q.shape[0], job.shape.keys[1]))):
        dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest = group
        part_dq, part_dk, part_dv = shares(call.backend, (dout_, q_, k_, v_, out_, lse_), options, rest[0] if rest else None)
        (dq_.copy_ if first else dq_.add_)(part_dq)
        (dk_.copy_ if opens else dk_.add_)(part_dk)
        (dv_.copy_ if opens else dv_.add_)(part_dv)


def _arrivals(job: Job, members: Members, k: torch.Tensor, v: torch.Tensor, wire: Wire, what: str) -> Iterator[_Arriving]:
    """The steps in order, each with its keys at hand and the next one's on their way."""
    steps = rank_plan(job, members.rank).steps
    waiting: deque[_Arriving] = deque()
    for index in range(min(2, len(steps))):
        waiting.append(_start(job, members, index, k, v, wire, what))

    def arrive() -> Iterator[_Arriving]:
        for index in range(len(steps)):
            step = waiting.popleft()
            if step.transfer is not None:
                step.transfer.wait()
            yield step
            if index + 2 < len(steps):
                waiting.append(_start(job, members, index + 2, k, v, wire, what))

    return arrive()


def _start(job: Job, members: Members, index: int, k: torch.Tensor, v: torch.Tensor, wire: Wire, what: str) -> _Arriving:
    me = members.rank
    step = rank_plan(job, me).steps[index]
    B, _, _, D = k.shape
    kv: list[torch.Tensor | None] = []
    packed: list[tuple[Buffer, Source, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    for buffer in step.buffers:
        if buffer.owner == me:
            kv.append(None)
            continue
        memory = torch.empty((buffer.count, 2, B, buffer.heads[2], D), dtype=k.dtype, device=k.device)
        kv.append(memory)
        for source in buffer.sources:
            rows = memory[source.at : source.at + source.count]
            if source.rank == me:
                _pack(buffer, source, k, v, rows)
                packed.append((buffer, source, rows))
            else:
                receives.append((members.peer(source.rank), rows))
    sends = []
    for peer in range(job.size):
        if peer == me:
            continue
        for buffer in rank_plan(job, peer).steps[index].buffers if index < len(rank_plan(job, peer).steps) else ():
            for source in buffer.sources:
                if source.rank == me and buffer.owner != peer:
                    sends.append((members.peer(peer), _rows_to_send(buffer, source, k, v, packed)))
    transfer = wire.start(sends, receives, f"{what}, {step.what}: K and V") if sends or receives else None
    return _Arriving(step, kv, transfer)


def _pack(buffer: Buffer, source: Source, k: torch.Tensor, v: torch.Tensor, into: torch.Tensor) -> None:
    """Copy the rank's own rows into (rows, 2, B, heads, D)."""
    rows = buffer.local_rows(source)
    for which, x in enumerate((k, v)):
        into[:, which].copy_(rows.of(x).squeeze(1).transpose(0, 1))


def _rows_to_send(
    buffer: Buffer, source: Source, k: torch.Tensor, v: torch.Tensor, packed: list[tuple[Buffer, Source, torch.Tensor]]
) -> torch.Tensor:
    """The rows as one piece of memory: part of what is packed already, where it is."""
    for other, have, rows in packed:
        if (other.heads, other.shift, other.step) != (buffer.heads, buffer.shift, buffer.step):
            continue
        ahead, rest = divmod(source.start - have.start, buffer.step)
        if rest == 0 and ahead >= 0 and ahead + source.count <= have.count:
            return rows[ahead : ahead + source.count]
    B, _, _, D = k.shape
    rows = torch.empty((source.count, 2, B, buffer.heads[2], D), dtype=k.dtype, device=k.device)
    _pack(buffer, source, k, v, rows)
    packed.append((buffer, source, rows))
    return rows


def _as_rows(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, rows, heads, D) views of a buffer's two halves."""
    return memory[:, 0].transpose(0, 1), memory[:, 1].transpose(0, 1)


def _key_views(step: _Arriving, launch: Launch, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    memory = step.kv[launch.buffer]
    keys, values = (k, v) if memory is None else _as_rows(memory)
    return launch.keys.of(keys), launch.keys.of(values)


@dataclass
class _Returning:
    """Gradients of this rank's keys on their way back from those who used them."""

    parts: list[tuple[Buffer, Source, torch.Tensor]]
    transfer: Transfer | None

    def add(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        for buffer, source, part in self.parts:
            rows = buffer.local_rows(source)
            for which, total in enumerate((dk, dv)):
                rows.of(total).add_(part[:, which].transpose(0, 1).unsqueeze(1))


def _send_back(
    job: Job, members: Members, index: int, step: _Arriving, grads: list[torch.Tensor | None], sums: Tensors, wire: Wire
) -> _Returning:
    me = members.rank
    dk, _ = sums
    sends, receives, parts = [], [], []
    for buffer, grad, kv in zip(step.step.buffers, grads, step.kv, strict=True):
        if kv is None:
            continue
        assert grad is not None, "every buffer has a launch"
        for source in buffer.sources:
            rows = grad[source.at : source.at + source.count]
            if source.rank == me:
                parts.append((buffer, source, rows))
            else:
                sends.append((members.peer(source.rank), rows))
    for peer in range(job.size):
        if peer == me:
            continue
        for buffer in rank_plan(job, peer).steps[index].buffers:
            for source in buffer.sources:
                if source.rank == me and buffer.owner != peer:
                    shape = (source.count, 2, dk.shape[0], buffer.heads[2], dk.shape[3])
                    acc = accumulation_dtype(dk.dtype)
                    part = torch.empty(shape, dtype=acc, device=dk.device)
                    receives.append((members.peer(peer), part))
                    parts.append((buffer, source, part))
    transfer = wire.start(sends, receives, f"backward, {step.step.what}: dK and dV") if sends or receives else None
    return _Returning(parts, transfer)
