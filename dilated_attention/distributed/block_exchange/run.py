"""Runs a block-sparse call on one rank, step by step, while the next steps' keys are transferred; nothing is merged.

Gradients of rows are returned, unsummed, to the rank that holds the rows, in one message each for dK and dV. It sums them in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dilated_attention.backends import Backend, Dropout, Mask, Options
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.block_exchange.comm_schedule import BlockLaunch, BlockSchedule, BlockStep
from dilated_attention.distributed.block_exchange.row_copies import add_rows, gather_rows
from dilated_attention.distributed.comm.p2p import Transfer, Wire
from dilated_attention.engine.blocks.launch import backward_lists, forward_lists

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class BlockCall:
    """What launches need in addition to tensors and lists.

    Args:
        backends: the backend of each launch of each step; None if a launch has no keys.
        prefetch_depth: the number of steps whose keys may be in memory at once.
        padding: (B, N) bool of the whole sequence, True = padding.
        seed: the dropout seed; dropout depends on positions in the whole sequence.
    """

    backends: tuple[tuple[Backend | None, ...], ...]
    scale: float
    prefetch_depth: int
    deterministic: bool = False
    padding: torch.Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0

    def options(self, step: BlockStep, launch: BlockLaunch, batch: int) -> Options:
        padding = None if self.padding is None else self.padding[:, launch.key_positions]
        dropout = None
        if self.dropout_p:
            device = launch.key_positions.device
            queries, keys = (x.expand(batch, -1) for x in (launch.queries.positions, launch.key_positions))
            entries, heads = torch.arange(batch, device=device), torch.arange(*step.heads, device=device)
            dropout = Dropout(self.dropout_p, self.seed, entries, heads, queries, keys)
        return Options(scale=self.scale, mask=Mask(padding), dropout=dropout, deterministic=self.deterministic)


@dataclass
class _BlockArrival:
    """A step whose keys are in flight. For ``memory`` see ``comm_schedule.py``."""

    step: BlockStep
    memory: torch.Tensor
    transfer: Transfer | None

    def keys(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the buffer's keys and values, (B, rows, heads, D)."""
        step = self.step
        if step.in_place:
            return _of_heads(k, v, step)
        keys, values = self.memory[: step.buffer_rows].unbind(1)
        return keys.transpose(0, 1), values.transpose(0, 1)


def forward(schedule: BlockSchedule, tensors: Tensors, call: BlockCall, wire: Wire | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, n, H, D) in q's dtype, lse (B, H, n)) for this rank's q, k, v."""
    q, k, v = tensors
    arrivals = _arrivals(schedule, k, v, call, wire, "forward")
    queries = [part.of(q, 1) for part in schedule.queries]
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    for arrival, backends in zip(arrivals, call.backends, strict=True):
        step = arrival.step
        keys, values = arrival.keys(k, v)
        heads = slice(*step.heads)
        for launch, backend, rows in zip(step.launches, backends, queries, strict=True):
            inside = rows[:, :, heads], keys[:, launch.keys], values[:, launch.keys]
            part, part_lse = forward_lists(_given(backend), launch.lists, *inside, call.options(step, launch, q.shape[0]))
            if schedule.is_one_launch:
                return part, part_lse
            if out is None or lse is None:
                out, lse = _new_results(q)
            launch.queries.put(out[:, :, heads], 1, part)
            launch.queries.put(lse[:, heads], 2, part_lse)
    return (out, lse) if out is not None and lse is not None else _new_results(q)


def backward(
    schedule: BlockSchedule, tensors: Tensors, call: BlockCall, wires: tuple[Wire, Wire] | None, dlse: torch.Tensor | None
) -> Tensors:
    """Returns (dq, dk, dv) in the inputs' dtype.

    Args:
        tensors: dout, q, k, v, out (B, n, H, D), and lse (B, H, n).
        wires: the wire for keys and values, and the wire for their gradients.
        dlse: the gradient of lse, (B, H, n).
    """
    dout, q, k, v, out, lse = tensors
    arrivals = _arrivals(schedule, k, v, call, None if wires is None else wires[0], "backward")
    # for rows that the rank does not hold, weights and gradients are 0
    queries = [(*(part.of(x, 1) for x in (dout, q, out)), part.of(lse, 2, torch.inf)) for part in schedule.queries]
    dlses = [None if dlse is None else part.of(dlse, 2) for part in schedule.queries]
    # if one launch computes all of dq, its result becomes dq, so no memory is allocated in advance
    dq = torch.empty(0 if schedule.is_one_launch else q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    returning: deque[_BlockReturn] = deque()
    for arrival, backends in zip(arrivals, call.backends, strict=True):
        step = arrival.step
        keys, values = arrival.keys(k, v)
        heads = slice(*step.heads)
        shares: list[tuple[torch.Tensor, torch.Tensor]] = []
        for launch, backend, (*rows, lse_), dlse_ in zip(step.launches, backends, queries, dlses, strict=True):
            dout_, q_, out_ = (x[:, :, heads] for x in rows)
            inside = dout_, q_, keys[:, launch.keys], values[:, launch.keys], out_, lse_[:, heads]
            some_dlse = None if dlse_ is None else dlse_[:, heads]
            dq_, dk_, dv_ = backward_lists(_given(backend), launch.lists, inside, call.options(step, launch, q.shape[0]), some_dlse)
            if schedule.is_one_launch:
                dq = dq_.to(q.dtype)
            else:
                launch.queries.put(dq[:, :, heads], 1, dq_)
            shares.append((dk_, dv_))
        returning.append(_send_back(step, _side_by_side(shares, keys, q), _of_heads(dk, dv, step), None if wires is None else wires[1]))
        # add what came back during this step before memory for the next step is allocated
        while len(returning) > 1:
            returning.popleft().add()
    for back in returning:
        back.add()
    return dq, dk, dv


def _given(backend: Backend | None) -> Backend:
    """Casts away None: a launch without keys never uses its backend."""
    return backend  # type: ignore[return-value]


def _new_results(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    B, n, H, _ = q.shape
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((B, H, n), dtype=accumulation_dtype(q.dtype))


def _of_heads(k: torch.Tensor, v: torch.Tensor, step: BlockStep) -> tuple[torch.Tensor, torch.Tensor]:
    heads = slice(*step.kv_heads)
    return k[:, :, heads], v[:, :, heads]


def _arrivals(
    schedule: BlockSchedule, k: torch.Tensor, v: torch.Tensor, call: BlockCall, wire: Wire | None, what: str
) -> Iterator[_BlockArrival]:
    """Yields the steps in order, each once its keys have arrived, while the next ones' are in flight. Transfers begin with this call."""
    steps = schedule.steps
    waiting = deque(_start(schedule, index, k, v, wire, what) for index in range(min(call.prefetch_depth, len(steps))))

    def arrive() -> Iterator[_BlockArrival]:
        for index in range(len(steps)):
            arrival = waiting.popleft()
            if arrival.transfer is not None:
                arrival.transfer.wait()
            step = arrival.step
            if len(step.put):
                arrival.memory[: step.buffer_rows].index_copy_(0, step.put, arrival.memory[step.put_from])
            yield arrival
            if index + call.prefetch_depth < len(steps):
                waiting.append(_start(schedule, index + call.prefetch_depth, k, v, wire, what))

    return arrive()


def _start(schedule: BlockSchedule, index: int, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> _BlockArrival:
    step = schedule.steps[index]
    B, _, _, D = k.shape
    memory = torch.empty((step.memory_rows, 2, B, step.kv_heads[1] - step.kv_heads[0], D), dtype=k.dtype, device=k.device)
    gather_rows(memory, step.filled, *_of_heads(k, v, step), step.filled_from)
    transfer = None
    if step.exchanges:
        assert wire is not None
        sends, receives = ([(message.peer, memory[message.rows]) for message in messages] for messages in (step.sends, step.receives))
        # also if this rank has nothing to exchange, because exchanges are numbered in the same way on all ranks
        transfer = wire.start(sends, receives, f"{what}, heads {index + 1} of {len(schedule.steps)}: K and V")
    return _BlockArrival(step, memory, transfer)


def _side_by_side(
    shares: list[tuple[torch.Tensor, torch.Tensor]], keys: torch.Tensor, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenates the documents' gradients of the buffer's rows."""
    if len(shares) == 1:
        return shares[0]
    if not shares:
        none = torch.empty(keys.shape, dtype=q.dtype, device=q.device)
        return none, none
    dk, dv = zip(*shares, strict=True)
    return torch.cat(dk, 1), torch.cat(dv, 1)


@dataclass
class _BlockReturn:
    """Gradients of this rank's keys that are to be summed: its own contributions and those in flight from other ranks."""

    step: BlockStep
    own: tuple[torch.Tensor, torch.Tensor]
    came: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor]
    transfer: Transfer | None

    def add(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        add_rows(self.grads, self.own, self.step.own_at, self.came, self.step.came_at)


def _send_back(
    step: BlockStep, own: tuple[torch.Tensor, torch.Tensor], grads: tuple[torch.Tensor, torch.Tensor], wire: Wire | None
) -> _BlockReturn:
    dk = grads[0]
    B, _, heads, D = dk.shape
    # send them in the dtype that GPU kernels return; only the rank that holds the rows sums them, in float32
    dtype = dk.dtype if dk.device.type == "cuda" else accumulation_dtype(dk.dtype)
    came = torch.empty((2, step.came_rows, B, heads, D), dtype=dtype, device=dk.device)
    transfer = None
    if step.exchanges:
        assert wire is not None
        sends, receives = [], []
        for which, share in enumerate(own):
            for message in step.returns:
                sends.append((message.peer, share[:, message.rows].transpose(0, 1).to(dtype).contiguous()))
            receives += [(message.peer, came[which, message.rows]) for message in step.arrivals]
        transfer = wire.start(sends, receives, f"backward, heads {step.kv_heads[0]} to {step.kv_heads[1] - 1}: dK and dV")
    return _BlockReturn(step, own, came, grads, transfer)
