"""Runs a call on a sharded sequence, from its tensors to its results: agreement of the ranks, sharding plan, backend, and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.distributed.comm.call_consistency import RingCall, agreed_length, begin_backward
from dilated_attention.distributed.comm.group import Members, members_named
from dilated_attention.distributed.comm.p2p import Wire, wire_of
from dilated_attention.distributed.exchange import cost, run
from dilated_attention.distributed.exchange.comm_schedule import CommSchedule, make_schedule
from dilated_attention.distributed.exchange.plan import RingProblem
from dilated_attention.distributed.exchange.sharding_plan import ShardingPlan, make_sharding_plan
from dilated_attention.distributed.sharding.reshard import ShardSpec, reshard
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import document_ranges, kernel_ready, new_like, new_lse, prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]


def ring_forward(
    inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call on its group)). ``inputs``: see ``ResolvedCall``."""
    members, tensors, (padding, cu_seqlens, *_) = members_named(ring.group_name), inputs[:3], inputs[3:]
    unavailable: list[BackendUnavailable] = []

    def kernels() -> str:
        # raising here would leave the other ranks waiting
        try:
            return _kernels(members, tensors, padding, settings, ring)
        except BackendUnavailable as error:
            unavailable.append(error)
            return f"unavailable: {str(error).splitlines()[0]}"

    seq_len, number = agreed_length(members, tensors, padding, cu_seqlens, settings, ring, kernels)
    if unavailable:
        raise unavailable[0]
    if not tensors[0].shape[0]:
        return new_like(tensors[0]), new_lse(tensors[0]), (seq_len, number)
    work = _RingPass(members, inputs, settings, replace(ring, seq_len=seq_len), is_backward=False)
    out, lse = work.forward()
    return out, lse.transpose(1, 2).contiguous(), (seq_len, number)


def ring_backward(
    inputs: tuple[Any, ...], gradients: tuple[Any, ...], settings: CallSettings, ring: RingCall, number: int
) -> Tensors:
    """Returns (dq, dk, dv).

    Args:
        inputs: see ``ResolvedCall``.
        gradients: dout, out, lse (B, H, n), and dlse or None.
        number: the number of the call on its group.
    """
    (q, k, v), (dout, out, lse, dlse) = inputs[:3], gradients
    members, pattern = members_named(ring.group_name), settings.pattern
    begin_backward(members, number, ring.timeout)
    if not q.shape[0]:
        return tuple(new_like(x) for x in (q, k, v))
    work = _RingPass(members, inputs, settings, ring, is_backward=True)
    lse = lse.transpose(1, 2)
    dlse = None if dlse is None else dlse.transpose(1, 2)
    # a head that runs one branch has no mixing weights
    if not settings.detached or pattern.num_branches == 1 or pattern.branch_heads == "split":
        return work.backward(dout, out, lse, dlse)
    # the mixing weights are constants, so each branch's δ is computed from its own output; weights stay exp(s − merged lse)
    total: list[torch.Tensor] = []
    for branch in range(pattern.num_branches):
        work.pattern = pattern.with_branches([branch], q.shape[2])
        branch_out, _ = work.forward()
        shares = work.backward(dout, branch_out, lse, None)
        total = [x.to(lse.dtype) for x in shares] if not total else [a.add_(b) for a, b in zip(total, shares, strict=True)]
    return tuple(x.to(q.dtype) for x in total)


@dataclass(frozen=True)
class _RingSetup:
    """What calls of the same kind have in common. It is computed once, because the CPU time delays short calls.

    Args:
        pattern: the pattern of the heads that this rank computes.
        call: the call without masks and seed, which differ from call to call.
        team: the ranks that exchange keys.
        prefetch_depth: the number of steps whose keys are in memory at once.
    """

    pattern: DilatedPattern
    schedule: CommSchedule
    call: Call
    team: Members
    prefetch_depth: int


_setups: dict[object, _RingSetup] = {}


class _RingPass:
    """One pass on one rank: its tensors as the sharding plan needs them, its backend, and its part of the results."""

    def __init__(self, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, *, is_backward: bool) -> None:
        self.members, self.pattern, self.settings, self.ring = members, settings.pattern, settings, ring
        self.tensors, (padding, cu_seqlens, self.seed, _) = inputs[:3], inputs[3:]
        self.is_backward = is_backward
        q, k, v = self.tensors
        self.documents = ((0, ring.seq_len),) if cu_seqlens is None else document_ranges(cu_seqlens, ring.seq_len)
        self.sharding = _route_of(members, q, k, settings.pattern, settings, ring)
        self.padding = None
        if padding is not None:
            rows = [ShardSpec(shard.spans, (0, 1)) for shard in self.sharding.given[0]]
            whole = [ShardSpec(((0, ring.seq_len, 1),), (0, 1))] * members.size
            (mask,) = reshard([padding.to(torch.uint8)[..., None]], [rows], [whole], members.rank, self._wire(), "padding masks")
            self.padding = mask[..., 0].bool()
            self.tensors = (q, *without_padding(k, v, padding))
        self.used: Tensors | None = None

    def _wire(self) -> Wire | None:
        if self.members.size == 1:
            return None
        wire = wire_of(self.members, self.ring.timeout)
        # every rank opens it, even one that has nothing to exchange
        wire.open(self.tensors[0].device)
        return wire

    def _reshard(
        self, tensors: Sequence[torch.Tensor], which: str, what: str, *, back: bool = False, add: bool = False
    ) -> Sequence[torch.Tensor]:
        """Regroups tensors of queries (``q``) and keys (``k``), named by the letters of ``which``, for the computation or back as given."""
        if self.sharding.stays:
            return tensors
        given, used = ([sides["qk".index(letter)] for letter in which] for sides in (self.sharding.given, self.sharding.used))
        old, new = (used, given) if back else (given, used)
        return reshard(tensors, old, new, self.members.rank, self._wire(), what, add=add)

    def _inputs(self, what: str) -> Tensors:
        if self.used is None:
            self.used = tuple(kernel_ready(x) for x in self._reshard(self.tensors, "qkk", f"{what}: q, k and v"))
        return self.used

    def _prepared(self, views: Tensors) -> tuple[_RingSetup, Call]:
        q = views[0]
        kind = (
            *(self.members.rank, self.members.size, self.ring, self.pattern, self.documents, self.is_backward, q.dtype, q.device),
            *(self.settings, self.padding is None, torch.are_deterministic_algorithms_enabled()),
            *((x.shape, x.stride()) for x in views),
        )
        setup = _setups.get(kind)
        if setup is None:
            if len(_setups) >= 512:
                _setups.clear()
            setup = _setups[kind] = self._make_setup(views)
        if self.padding is None and self.seed is None:
            return setup, setup.call
        return setup, replace(setup.call, padding=self.padding, seed=0 if self.seed is None else int(self.seed.item()))

    def _make_setup(self, views: Tensors) -> _RingSetup:
        me, (_, k) = self.members.rank, views[:2]
        first, last = self.sharding.used[0][me].heads
        num_heads = self.tensors[0].shape[2]
        pattern = self.pattern.with_heads(first, last, num_heads) if self.pattern.branch_heads == "all" else self.pattern
        whole = (0, self.ring.seq_len)
        ranks = self.sharding.team(me)
        question = _question(len(ranks), views[0], k, pattern, self.settings, self.ring)
        steps = cost.head_steps(question)
        extent = cost.buffer_extent(question, pattern, steps, self.sharding.exchange) if len(ranks) > 1 else 0
        documents, num_keys = self.documents, self.ring.seq_len
        shape, call = prepare(
            self.is_backward, views, pattern, self.settings, self.padding, documents, None, num_keys=num_keys, least_extent=extent
        )
        ring_problem = RingProblem(
            pattern,
            replace(shape, queries=whole, keys=whole),
            tuple(self.sharding.ranges(rank) for rank in ranks),
            self.sharding.exchange,
            steps,
        )
        # without the group: the setup outlives groups, and another group may get the same name
        team = Members(None, ranks.index(me), len(ranks), ranks)
        prefetch_depth = cost.choose_prefetch_depth(ring_problem, k.shape[0], k.shape[3], k.element_size())
        return _RingSetup(
            pattern, make_schedule(ring_problem, team.rank), replace(call, first_head=first, padding=None), team, prefetch_depth
        )

    def _wires(self, setup: _RingSetup) -> tuple[Wire, Wire]:
        """Returns the wires for keys and for their gradients, with few multiprocessors if the exchange is small next to the computation."""
        # all ranks must choose the same wire, so the choice may not depend on this rank: one without rows has no local part either
        small = not setup.schedule.ring_problem.is_fresh and setup.schedule.ring_problem.exchange != "ring"
        names, ctas = (("few keys", "few gradients"), cost.FEW_CTAS) if small else (("keys", "gradients"), None)
        keys = wire_of(self.members, self.ring.timeout, names[0], ctas)
        # a forward does not need the gradients' wire, but in a training step it is the moment when no exchange is in flight
        gradients = wire_of(self.members, self.ring.timeout, names[1], ctas) if self.settings.needs_grad else keys
        for wire in (keys, gradients):
            wire.open(self.tensors[0].device)
        return keys, gradients

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out (B, n, H, D), lse (B, n, H)) in the caller's layout."""
        q, k, v = self._inputs("forward")
        setup, call = self._prepared((q, k, v))
        if setup.team.size == 1:
            out, lse = strategy.forward(setup.pattern, setup.schedule.ring_problem.shape, q, k, v, call)
            lse = lse.transpose(1, 2)
        else:
            out, lse = run.forward(setup.schedule, setup.team, (q, k, v), call, self._wires(setup)[0], prefetch_depth=setup.prefetch_depth)
        out, lse = self._reshard((out, lse), "qq", "forward: out and lse", back=True)
        return out, lse

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        """Returns (dq, dk, dv) in the caller's layout."""
        q, k, v = self._inputs("backward")
        if dlse is None and self.ring.lse_grad and not self.sharding.stays:
            # other ranks may have a gradient of lse, and all must send the same
            dlse = torch.zeros_like(lse)
        more = (dout, out, lse) if dlse is None else (dout, out, lse, dlse)
        dout, out, lse, *rest = self._reshard(more, "q" * len(more), "backward: dout, out and lse")
        dout, out = kernel_ready(dout), kernel_ready(out)
        dlse = rest[0] if rest else None
        setup, call = self._prepared((q, k, v, dout))
        grads: Tensors
        if setup.team.size == 1:
            lse = lse.transpose(1, 2).contiguous()
            dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
            grads = strategy.backward(setup.pattern, setup.schedule.ring_problem.shape, (dout, q, k, v, out, lse), call, dlse)
        else:
            wires = self._wires(setup)
            grads = run.backward(
                setup.schedule, setup.team, (dout, q, k, v, out, lse), call, wires, dlse, prefetch_depth=setup.prefetch_depth
            )
        # ranks that share a key/value head each have a contribution to its gradient
        shared = self.tensors[1].shape[2] < self.sharding.inner
        (dq,) = self._reshard(grads[:1], "q", "backward: dq", back=True)
        dk, dv = self._reshard(grads[1:], "kk", "backward: dk and dv", back=True, add=shared)
        return dq.contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


def _question(
    size: int, q: torch.Tensor, k: torch.Tensor, pattern: DilatedPattern, settings: CallSettings, ring: RingCall
) -> cost.ExchangeRequest:
    return cost.exchange_request(
        q,
        k,
        pattern,
        size=size,
        layout=ring.layout,
        seq_len=ring.seq_len,
        is_causal=settings.is_causal,
        has_window=bool(settings.window),
        needs_grad=settings.needs_grad,
    )


def _kernels(members: Members, tensors: Tensors, padding: torch.Tensor | None, settings: CallSettings, ring: RingCall) -> str:
    """Returns, as text, what must be the same on all ranks because messages depend on it: whether kernels cut windows into blocks."""
    q, k, v = tensors
    num_keys = ring.seq_len if ring.seq_len >= 0 else q.shape[1] * members.size
    passes = (False, True) if settings.needs_grad else (False,)
    views = [(q, k, v, q) if back else (q, k, v) for back in passes]
    shapes = [prepare(len(x) > 3, x, settings.pattern, settings, padding, num_keys=num_keys)[0] for x in views]
    return f"windows in blocks of {[shape.window_block for shape in shapes]}" if settings.window else "available"


def _route_of(
    members: Members, q: torch.Tensor, k: torch.Tensor, pattern: DilatedPattern, settings: CallSettings, ring: RingCall
) -> ShardingPlan:
    exchange = ring.exchange
    if exchange == "auto":
        exchange = cost.choose(_question(members.size, q, k, pattern, settings, ring))
    heads = (q.shape[2], k.shape[2])
    return make_sharding_plan(ring.seq_len, members.size, ring.layout, exchange, *heads, ring.ranks_per_node, settings.is_causal)
