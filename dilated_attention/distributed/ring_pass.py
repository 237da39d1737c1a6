"""The ops of attention on a sharded sequence, and how a call runs: agreement of the ranks, setup, padding, exchange, computation. All kinds
of attention run here; they differ in their setup, and in when the ranks can tell whether they have kernels.

A backward needs only its own out and lse, so with such an op as must-save in a selective-checkpointing policy nothing is exchanged a second
time in the recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.backends.base import new_lse
from dilated_attention.backends.hardware import keep_for_graph
from dilated_attention.distributed.comm.call_consistency import RingCall, agreed_call, op_name, ring_call
from dilated_attention.distributed.comm.group import Members, members_named
from dilated_attention.distributed.comm.p2p import Wire, wire_of
from dilated_attention.distributed.comm.session import session_of, sessions
from dilated_attention.distributed.exchange import run
from dilated_attention.distributed.exchange.run import Pair, Tensors
from dilated_attention.distributed.exchange.setup import RingSetup, cached_setup, check_branches, make_setup
from dilated_attention.distributed.sharding.layout import ShardSpec, spans
from dilated_attention.distributed.sharding.reshard import reshard
from dilated_attention.engine.branches.launches import Masks, without_padding
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.prepare import kernel_ready, new_like
from dilated_attention.engine.ops.resolve import MaybeTensor, ResolvedCall, positions_as_places, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


class ResolvedRing(ResolvedCall):
    """Calls on a sharded sequence. The third output is (N, number of the call), int64 on the CPU."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return op_name(self.settings)

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, MaybeTensor]:
        ring = ring_call(self.settings)
        members, bounds = members_named(ring.group_name), None if inputs[4] is None else bounds_of(inputs[4])

        def check_kernels(seq_len: int) -> str:
            """Raises BackendUnavailable if this rank has no kernels for some pass; else returns the digest of a setup."""
            if self.settings.branches is not None:
                check_branches(self.settings, inputs[:3], seq_len, has_padding=inputs[3] is not None)
            return RingPass(self, members, ring._replace(seq_len=seq_len), bounds, inputs).setup.digest if self.settings.blocks else ""

        seq_len, number = agreed_call(members, inputs, self.settings, ring, bounds, self.alive, check_kernels)
        if inputs[0].shape[0]:
            out, lse = RingPass(self, members, ring._replace(seq_len=seq_len), bounds, inputs).forward()
        else:
            out, lse = new_like(inputs[0]), new_lse(inputs[0])
        return out, lse, torch.tensor((seq_len, number), dtype=torch.int64)

    def backward(self, dout: torch.Tensor, dlse: MaybeTensor, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        out, lse, whole = outputs
        (N, number), ring = whole.tolist(), ring_call(self.settings)
        members = members_named(ring.group_name)
        if members.group is not None:
            session = session_of(members, ring.timeout)
            session.raise_if_failed()
            # for comparison with the other ranks
            session.enter(f"the backward of call {number}")
        if not inputs[0].shape[0]:
            return tuple(new_like(x) for x in inputs[:3])
        bounds = None if inputs[4] is None else bounds_of(inputs[4])
        return RingPass(self, members, ring._replace(seq_len=N), bounds, inputs, dout, out).backward(lse, dlse)


class RingPass:
    """One pass on one rank. ``bounds``: of packed documents, or None; ``inputs``: see ``ResolvedCall``; ``of_backward``: dout and out."""

    def __init__(
        self,
        call: ResolvedRing,
        members: Members,
        ring: RingCall,
        bounds: tuple[int, ...] | None,
        inputs: tuple[Any, ...],
        *of_backward: torch.Tensor,
    ) -> None:
        self.call, self.members, self.ring, self.num_kv_heads = call, members, ring, inputs[1].shape[2]
        self.padding, _, seed, _, self.bias = inputs[3:8]
        self.bounds = bounds
        tensors = tuple([kernel_ready(x) for x in (*inputs[:3], *of_backward)])
        self.tensors, self.of_backward = tensors[:3], tensors[3:]
        place = (call.alive, members.rank, members.size, ring, bounds)
        options = (call.settings, self.padding is None, torch.are_deterministic_algorithms_enabled())
        q, k, _ = self.tensors
        # a pattern that holds a function is a part of the kind, since its name may be given again once it is gone
        self.setup = cached_setup((*place, *options, q.dtype, q.device, q.shape, k.shape), self._make_setup)
        keep_for_graph(self.setup, q.device.type)
        self.masks = Masks(None, 0 if seed is None else int(seed.item()))

    def _make_setup(self) -> RingSetup:
        whole = ((0, self.ring.seq_len),) if self.ring.seq_len else ()
        documents = whole if self.bounds is None else document_ranges(self.bounds, self.ring.seq_len)
        setup = make_setup(self.members, self.tensors, documents, self.call.settings, self.ring, self.padding)
        tensors, rank = self.tensors, self.members.rank
        session = None if self.members.group is None else sessions.get(self.members.group)
        if session is not None and tensors[0].device.type not in session.wires and (setup.exchanges or setup.moves):
            # the ranks have yet to connect, which takes a while
            if setup.moves:
                queries, keys = (side[rank] for side in setup.moves[1])
                holdings = zip(tensors, (queries, keys, keys), strict=True)
                tensors = tuple([x.new_empty((len(x), of.rows, of.heads[1] - of.heads[0], x.shape[3])) for x, of in holdings])
            needs_grad = self.call.settings.needs_grad
            run.compile_ahead(setup.terms, setup.steps, tensors, self.padding, exchanges=setup.exchanges, needs_grad=needs_grad)
        return setup

    def _move(self, what: str) -> None:
        """Gathers padding and places of all ranks' keys, and moves q, k and v to where they are computed on."""
        (q, k, v), bias = self.tensors, self.bias
        if bias is not None:
            by_position = self.call.settings.bias == "position"
            places = positions_as_places(self.ring.seq_len, k, bias.keys.dtype) if by_position else self._whole(bias.keys, "places of keys")
            self.masks = self.masks._replace(bias=bias._replace(keys=places))
        if self.padding is not None:
            self.masks = self.masks._replace(padding=self._whole(self.padding, "padding masks"))
            # padding could spread NaN through sums
            self.tensors = (q, *without_padding(k, v, self.padding))
        self.tensors = self._reshard(self.tensors, "qkk", f"{what}: q, k and v")

    def _whole(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Returns numbers (B, N, …) of all positions from this rank's (B, n, …)."""
        ring, size = self.ring, self.members.size
        rows = [ShardSpec(spans(ring.seq_len, rank, size, ring.layout), (0, 1)) for rank in range(size)]
        whole = [ShardSpec(((0, ring.seq_len, 1),), (0, 1))] * size
        return reshard([x[:, :, None]], [rows], [whole], self.members.rank, self._wire(), what)[0][:, :, 0]

    def _wire(self) -> Wire | None:
        """Returns the wire. Every rank opens it, even one that has nothing to exchange."""
        return wire_of(self.members, self.ring.timeout, self.tensors[0].device)

    def _reshard(self, tensors: Sequence[torch.Tensor], which: str, what: str, *, back: bool = False, add: bool = False) -> Tensors:
        """Regroups tensors of queries (``q``) and keys (``k``), named by the letters of ``which``, for the computation or back as given."""
        if self.setup.moves is None:
            return tuple(tensors)
        old, new = ([side["qk".index(letter)] for letter in which] for side in self.setup.moves[:: -1 if back else 1])
        return tuple(reshard(tensors, old, new, self.members.rank, self._wire(), what, add=add))

    def forward(self) -> Pair:
        """Returns (out (B, n, H, D), lse (B, H, n)), contiguous, in the caller's layout."""
        self._move("forward")
        setup = self.setup
        out, lse = run.forward(setup.terms, setup.steps, self.masks, self.tensors, self._wire() if setup.exchanges else None)
        if setup.moves:
            out, lse = self._reshard((out, lse.transpose(1, 2)), "qq", "forward: out and lse", back=True)
            lse = lse.transpose(1, 2)
        return out.contiguous(), lse.contiguous()

    def backward(self, lse: torch.Tensor, dlse: MaybeTensor) -> Tensors:
        """Returns (dq, dk, dv), contiguous, in the caller's layout. lse and dlse are (B, H, n)."""
        dout, out = self.of_backward
        self._move("backward")
        setup = self.setup
        if setup.moves:
            if dlse is None and self.ring.lse_grad:
                # other ranks may have a gradient of lse, and all must send the same
                dlse = torch.zeros_like(lse)
            rows = (lse, *(() if dlse is None else (dlse,)))
            more = (dout, out, *(x.transpose(1, 2) for x in rows))
            dout, out, *moved = self._reshard(more, "q" * len(more), "backward: dout, out and lse")
            lse, dlse = moved[0].transpose(1, 2), moved[1].transpose(1, 2) if dlse is not None else None
        wire, rest = self._wire() if setup.exchanges else None, (dout, out, lse, dlse)
        dq, dk, dv = run.backward(setup.terms, setup.steps, self.masks, self.tensors, rest, wire)
        if setup.moves:
            # ranks that share a key/value head each have a contribution to its gradient
            shared = setup.by_heads and self.num_kv_heads < self.members.size
            (dq,) = self._reshard((dq,), "q", "backward: dq", back=True)
            dk, dv = self._reshard((dk, dv), "kk", "backward: dk and dv", back=True, add=shared)
        return tuple(x.to(like.dtype).contiguous() for x, like in zip((dq, dk, dv), self.tensors, strict=True))


def resolve_ring(q: torch.Tensor, k: torch.Tensor, padding: MaybeTensor, settings: CallSettings) -> ResolvedRing:
    # a record would keep the function or tensor of such a pattern alive
    if settings.blocks and (pattern := pattern_from_spec(settings.blocks)).lives_here:
        return ResolvedRing(settings, q.device.type, alive=pattern)
    return record_of(ResolvedRing, q, k, padding, settings)


def _new_whole(inputs: tuple[Any, ...], settings: CallSettings) -> torch.Tensor:
    """Returns a tensor like the third output."""
    return torch.empty((2,), dtype=torch.int64, device="cpu")


# what to use for second derivatives and forward mode
_ALTERNATIVES = {
    "ring_attention": "dilated_attention.engine.reference.reference_attention on one process, which is plain autograd",
    "ring_block_sparse_attention": "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H), on one process",
    "ring_block_sparse_dilated_attention": "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as "
    "multiplicities, on one process",
}
ring_attention_op, ring_block_sparse_attention_op, ring_block_sparse_dilated_attention_op = (
    define_attention(name, resolve_ring, alternative, new_saved=_new_whole) for name, alternative in _ALTERNATIVES.items()
)
