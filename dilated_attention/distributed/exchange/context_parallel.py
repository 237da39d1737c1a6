"""Dilated and dense attention over a sharded sequence: what moves before and after the computation, the exchange, and the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.distributed.comm.call_consistency import Agreement, RingCall, agreed_call, keep
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.exchange import run
from dilated_attention.distributed.exchange.parts import Branches, Masks
from dilated_attention.distributed.exchange.ring_pass import RingPass, Tensors, of_length
from dilated_attention.distributed.exchange.setup import RingSetup, make_setup
from dilated_attention.distributed.sharding.reshard import reshard
from dilated_attention.engine.ops.prepare import kernel_ready, prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern


class DilatedPass(RingPass):
    """A pass of dilated or dense attention. The sharding plan says which rows and heads each rank has while it computes."""

    def __init__(self, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]) -> None:
        super().__init__(members, inputs, settings, ring, known)
        self.pattern = settings.pattern
        self.used: Tensors | None = None
        kind = "setup", members.rank, members.size, self.documents
        setup = known.get(kind)
        if setup is None:
            setup = self._find_setup()
            keep(known, kind, setup)
        self.setup: RingSetup = setup
        self.sharding = self.setup.sharding

    @classmethod
    def agree(
        cls, members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall, known: dict[Any, Any]
    ) -> tuple[Agreement, RingPass | None]:
        unavailable: list[BackendUnavailable] = []

        def kernels() -> str:
            # raising here would leave the other ranks waiting
            try:
                return _kernels(members, inputs, settings, ring)
            except BackendUnavailable as error:
                unavailable.append(error)
                return f"unavailable: {str(error).splitlines()[0]}"

        agreement = agreed_call(members, inputs, settings, ring, known, kernels)
        if unavailable:
            raise unavailable[0]
        if not inputs[0].shape[0]:
            return agreement, None
        return agreement, cls(members, inputs, settings, of_length(ring, agreement.seq_len), known)

    def make_setup(self) -> RingSetup:
        q, k, _ = self.tensors
        has_padding = self.own_padding is not None
        return make_setup(self.members, q, k, self.pattern, self.documents, self.settings, self.ring, has_padding)

    def _find_setup(self) -> RingSetup:
        q, k, _ = self.tensors
        return self.find_setup(self.pattern, q.dtype, q.device, q.shape, k.shape)  # type: ignore[no-any-return]

    def _restrict(self, pattern: DilatedPattern) -> None:
        """Goes on with another pattern of the same heads."""
        self.pattern = pattern
        self.setup = self._find_setup()

    def _reshard(
        self, tensors: Sequence[torch.Tensor], which: str, what: str, *, back: bool = False, add: bool = False
    ) -> Sequence[torch.Tensor]:
        """Regroups tensors of queries (``q``) and keys (``k``), named by the letters of ``which``, for the computation or back as given."""
        if self.sharding.stays:
            return tensors
        given, used = ([sides["qk".index(letter)] for letter in which] for sides in (self.sharding.given, self.sharding.used))
        old, new = (used, given) if back else (given, used)
        return reshard(tensors, old, new, self.members.rank, self.wire(), what, add=add)

    def _inputs(self, what: str) -> Tensors:
        if self.used is None:
            self.used = tuple(kernel_ready(x) for x in self._reshard(self.tensors, "qkk", f"{what}: q, k and v"))
        return self.used

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        (q, k, v), setup = self._inputs("forward"), self.setup
        masks = Masks(self.padding, self.seed, setup.first_head)
        sparse = setup.query_rows
        if sparse is None:
            work = Branches(setup.parts, setup.merges, masks, q)
            run.forward(work, setup.steps, k, v, self.wires(setup)[0], setup.depth)
            out, lse = work.results()
        else:
            own = Branches((setup.home,), False, masks, q)
            work = Branches(setup.parts, False, masks, sparse.of([q])[0][0])
            keys, values = (k, v) if setup.key_rows is None else setup.key_rows.of([k, v])[0]
            run.forward(work, setup.steps, keys, values, self.wires(setup)[0], setup.depth, lambda: own.forward(0, k, v))
            out, lse = own.results()
            lse = sparse.merge(out, lse, *work.results())
        if not self.sharding.stays:
            out, lse = self._reshard((out, lse.transpose(1, 2)), "qq", "forward: out and lse", back=True)
            lse = lse.transpose(1, 2)
        return out.contiguous(), lse.contiguous()

    def backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
        pattern, H = self.pattern, self.tensors[0].shape[2]
        # a head that runs one branch has no mixing weights, and where all keys are at hand the engine takes care of them
        mixes = pattern.num_branches > 1 and pattern.branch_heads == "all"
        if not (self.settings.detached and mixes and self.sharding.exchange == "ring"):
            return self._backward(dout, out, lse, dlse)
        # the mixing weights are constants, so each branch's δ is computed from its own output; weights stay exp(s − merged lse)
        total: list[torch.Tensor] = []
        for branch in range(pattern.num_branches):
            self._restrict(pattern.with_branches([branch], H))
            branch_out, _ = self.forward()
            shares = self._backward(dout, branch_out, lse, None)
            total = [x.to(lse.dtype) for x in shares] if not total else [a.add_(b) for a, b in zip(total, shares, strict=True)]
        return tuple(x.to(self.tensors[0].dtype) for x in total)

    def _backward(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Tensors:
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
            dk, dv = run.backward(work, setup.steps, k, v, self.wires(setup), setup.depth)
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

            dk, dv = run.backward(work, setup.steps, keys, values, self.wires(setup), setup.depth, at_home)
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


def _kernels(members: Members, inputs: tuple[Any, ...], settings: CallSettings, ring: RingCall) -> str:
    """Checks that this rank has kernels, before any rank sends anything. Raises BackendUnavailable if it has none."""
    q, k, v, padding = inputs[:4]
    num_keys = ring.seq_len if ring.seq_len >= 0 else q.shape[1] * members.size
    for is_backward in (False, True) if settings.needs_grad else (False,):
        views = (q, k, v, q) if is_backward else (q, k, v)
        prepare(is_backward, views, settings.pattern, settings, padding, num_keys=num_keys)
    return "available"
