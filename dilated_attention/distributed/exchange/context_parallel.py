"""Runs a call on a sharded sequence, from its tensors to its results: agreement of the ranks, sharding plan, backend, and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.distributed.comm.call_consistency import RingCall, agreed_length, begin_backward, keep
from dilated_attention.distributed.comm.group import Members, members_named
from dilated_attention.distributed.comm.p2p import Wire, wire_of
from dilated_attention.distributed.exchange import run
from dilated_attention.distributed.exchange.parts import Branches, Masks
from dilated_attention.distributed.exchange.setup import RingSetup, make_room, make_setup
from dilated_attention.distributed.sharding.reshard import ShardSpec, reshard
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import document_ranges, kernel_ready, new_like, new_lse, prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]


def ring_forward(
    inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call on its group)).

    Args:
        inputs: see ``ResolvedCall``.
        known: what calls of the same record have found: what the ranks agreed on, and setups.
    """
    members, tensors, (padding, cu_seqlens, *_) = members_named(ring.group_name), inputs[:3], inputs[3:]
    unavailable: list[BackendUnavailable] = []

    def kernels() -> str:
        # raising here would leave the other ranks waiting
        try:
            return _kernels(members, tensors, padding, settings, ring)
        except BackendUnavailable as error:
            unavailable.append(error)
            return f"unavailable: {str(error).splitlines()[0]}"

    seq_len, number = agreed_length(members, tensors, padding, cu_seqlens, settings, ring, kernels, known)
    if unavailable:
        raise unavailable[0]
    if not tensors[0].shape[0]:
        return new_like(tensors[0]), new_lse(tensors[0]), (seq_len, number)
    ring = ring if ring.seq_len == seq_len else replace(ring, seq_len=seq_len)
    out, lse = _RingPass(members, inputs, settings, ring, known).forward()
    return out, lse, (seq_len, number)


def ring_backward(
    inputs: tuple[Any, ...], gradients: tuple[Any, ...], settings: CallSettings, ring: RingCall, number: int, known: dict[Any, Any]
) -> Tensors:
    """Returns (dq, dk, dv).

    Args:
        inputs, known: see ``ring_forward``.
        gradients: dout, out, lse (B, H, n), and dlse or None.
        number: the number of the call on its group.
    """
    (q, k, v), (dout, out, lse, dlse) = inputs[:3], gradients
    members, pattern = members_named(ring.group_name), settings.pattern
    begin_backward(members, number, ring.timeout)
    if not q.shape[0]:
        return tuple(new_like(x) for x in (q, k, v))
    work = _RingPass(members, inputs, settings, ring, known)
    # a head that runs one branch has no mixing weights, and where all keys are at hand the engine takes care of them
    by_branch = settings.detached and pattern.num_branches > 1 and pattern.branch_heads == "all" and work.sharding.exchange == "ring"
    if not by_branch:
        return work.backward(dout, out, lse, dlse)
    # the mixing weights are constants, so each branch's δ is computed from its own output; weights stay exp(s − merged lse)
    total: list[torch.Tensor] = []
    for branch in range(pattern.num_branches):
        work.restrict(pattern.with_branches([branch], q.shape[2]))
        branch_out, _ = work.forward()
        shares = work.backward(dout, branch_out, lse, None)
        total = [x.to(lse.dtype) for x in shares] if not total else [a.add_(b) for a, b in zip(total, shares, strict=True)]
    return tuple(x.to(q.dtype) for x in total)


# the maximum bytes of the tables of all cached setups
MAX_CACHED_BYTES = 2**29
MOST_SETUPS = 512

_setups: dict[object, RingSetup] = {}


class _RingPass:
    """One pass on one rank: its tensors as the sharding plan needs them, and its part of the results."""

    def __init__(self, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]) -> None:
        self.members, self.pattern, self.settings, self.ring = members, settings.pattern, settings, ring
        self.tensors, (padding, cu_seqlens, seed, _) = inputs[:3], inputs[3:]
        q, k, v = self.tensors
        self.documents = ((0, ring.seq_len),) if cu_seqlens is None else document_ranges(cu_seqlens, ring.seq_len)
        self.used: Tensors | None = None
        self.padding = None
        self.seed = 0 if seed is None else int(seed.item())
        self.has_padding = padding is not None
        kind = "setup", members.rank, members.size, self.documents
        setup = known.get(kind)
        if setup is None:
            setup = self._setup()
            keep(known, kind, setup)
        self.setup: RingSetup = setup
        self.sharding = self.setup.sharding
        if padding is not None:
            rows = [ShardSpec(shard.spans, (0, 1)) for shard in self.sharding.given[0]]
            whole = [ShardSpec(((0, ring.seq_len, 1),), (0, 1))] * members.size
            (mask,) = reshard([padding.to(torch.uint8)[..., None]], [rows], [whole], members.rank, self._wire(), "padding masks")
            self.padding = mask[..., 0].bool()
            # padding must not spread NaN through the exchange's sums
            self.tensors = (q, *without_padding(k, v, padding))

    def restrict(self, pattern: DilatedPattern) -> None:
        """Goes on with another pattern of the same heads."""
        self.pattern = pattern
        self.setup = self._setup()

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

    def _setup(self) -> RingSetup:
        q, k, _ = self.tensors
        kind = (
            *(self.members.rank, self.members.size, self.ring, self.pattern, self.documents, q.dtype, q.device, q.shape, k.shape),
            *(self.settings, self.has_padding, torch.are_deterministic_algorithms_enabled()),
        )
        setup = _setups.get(kind)
        if setup is None:
            setup = make_setup(self.members, q, k, self.pattern, self.documents, self.settings, self.ring, self.has_padding)
            make_room(_setups, setup, MOST_SETUPS, MAX_CACHED_BYTES)
            _setups[kind] = setup
        return setup

    def _wires(self) -> tuple[Wire | None, Wire | None]:
        """Returns the wires for keys and for their gradients."""
        if self.setup.size == 1:
            return None, None
        names, ctas = self.setup.lanes
        keys = wire_of(self.members, self.ring.timeout, names[0], ctas)
        # a forward does not need the gradients' wire, but in a training step it is the moment when no exchange is in flight
        gradients = wire_of(self.members, self.ring.timeout, names[1], ctas) if self.settings.needs_grad else keys
        for wire in (keys, gradients):
            wire.open(self.tensors[0].device)
        return keys, gradients

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out (B, n, H, D), lse (B, H, n)) in the caller's layout."""
        (q, k, v), setup = self._inputs("forward"), self.setup
        masks = Masks(self.padding, self.seed, setup.first_head)
        sparse = setup.query_rows
        if sparse is None:
            work = Branches(setup.parts, setup.merges, masks, q)
            run.forward(work, setup.steps, k, v, self._wires()[0], setup.depth)
            out, lse = work.results()
        else:
            own = Branches((setup.home,), False, masks, q)
            work = Branches(setup.parts, False, masks, sparse.of([q])[0][0])
            keys, values = (k, v) if setup.key_rows is None else setup.key_rows.of([k, v])[0]
            run.forward(work, setup.steps, keys, values, self._wires()[0], setup.depth, lambda: own.forward(0, k, v))
            out, lse = own.results()
            lse = sparse.merge(out, lse, *work.results())
        if not self.sharding.stays:
            out, lse = self._reshard((out, lse.transpose(1, 2)), "qq", "forward: out and lse", back=True)
            lse = lse.transpose(1, 2)
        return out.contiguous(), lse.contiguous()

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        """Returns (dq, dk, dv) in the caller's layout. lse and dlse are (B, H, n)."""
        q, k, v = self._inputs("backward")
        if not self.sharding.stays:
            if dlse is None and self.ring.lse_grad:
                # other ranks may have a gradient of lse, and all must send the same
                dlse = torch.zeros_like(lse)
            rows = (lse, *(() if dlse is None else (dlse,)))
            more = (dout, out, *(x.transpose(1, 2) for x in rows))
            dout, out, *moved = self._reshard(more, "q" * len(more), "backward: dout, out and lse")
            lse, dlse = moved[0].transpose(1, 2), moved[1].transpose(1, 2) if dlse is not None else None
        setup, masks = self.setup, Masks(self.padding, self.seed, self.setup.first_head)
        rest = kernel_ready(dout), kernel_ready(out), lse, dlse
        sparse = setup.query_rows
        if sparse is None:
            work = Branches(setup.parts, setup.merges, masks, q, rest)
            dk, dv = run.backward(work, setup.steps, k, v, self._wires(), setup.depth)
            dq = work.dq()
        else:
            own = Branches((setup.home,), False, masks, q, rest)
            (some_q, some_dout, some_out), stats = sparse.of([q, *rest[:2]], [x for x in rest[2:] if x is not None])
            some_lse, some_dlse = [*stats, None][:2]
            assert some_lse is not None
            work = Branches(setup.parts, False, masks, some_q, (some_dout, some_out, some_lse, some_dlse))
            keys, values = (k, v) if setup.key_rows is None else setup.key_rows.of([k, v])[0]
            of_home: list[tuple[torch.Tensor, torch.Tensor]] = []

            def at_home() -> tuple[torch.Tensor, torch.Tensor]:
                # a rank without rows has no parts
                of_home.append(own.backward(0, k, v) or (torch.zeros_like(k), torch.zeros_like(v)))
                return of_home[0]

            dk, dv = run.backward(work, setup.steps, keys, values, self._wires(), setup.depth, at_home)
            dq = own.dq()
            sparse.add(dq, work.dq())
            if setup.key_rows is not None:
                shares, (dk, dv) = (dk, dv), of_home[0]
                for grad, share in zip((dk, dv), shares, strict=True):
                    setup.key_rows.add(grad, share)
        # ranks that share a key/value head each have a contribution to its gradient
        shared = self.tensors[1].shape[2] < self.sharding.inner
        (dq,) = self._reshard((dq,), "q", "backward: dq", back=True)
        dk, dv = self._reshard((dk, dv), "kk", "backward: dk and dv", back=True, add=shared)
        return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


def _kernels(members: Members, tensors: Tensors, padding: torch.Tensor | None, settings: CallSettings, ring: RingCall) -> str:
    """Checks that this rank has kernels, before any rank sends anything. Raises BackendUnavailable if it has none."""
    q, k, v = tensors
    num_keys = ring.seq_len if ring.seq_len >= 0 else q.shape[1] * members.size
    for is_backward in (False, True) if settings.needs_grad else (False,):
        views = (q, k, v, q) if is_backward else (q, k, v)
        prepare(is_backward, views, settings.pattern, settings, padding, num_keys=num_keys)
    return "available"
