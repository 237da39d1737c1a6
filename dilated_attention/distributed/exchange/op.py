"""What the ops of attention over a sharded sequence have in common, and that of dilated and dense attention.

With such an op as must-save in a selective-checkpointing policy, nothing is exchanged a second time in the recomputation. Its backward
needs only its own out and lse.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from dilated_attention.distributed.comm.call_consistency import RingCall, ring_call
from dilated_attention.distributed.exchange.context_parallel import DilatedPass
from dilated_attention.distributed.exchange.requirements import ring_requirement
from dilated_attention.distributed.exchange.ring_pass import RingPass, of_length, ring_backward, ring_forward
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.resolve import Optional, ResolvedCall, Tensors, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.fork import cached_property


class ResolvedRing(ResolvedCall):
    """Calls of dilated or dense attention on a sharded sequence. The third output is (N, number of the call), int64 on the CPU."""

    name = "ring_attention"
    requirement = staticmethod(ring_requirement)
    pass_kind: ClassVar[type[RingPass]] = DilatedPass

    @cached_property
    def ring(self) -> RingCall:
        return ring_call(self.settings)

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What calls of this record have found (``ring_forward``)."""
        return {}

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        out, lse, whole = ring_forward(self.pass_kind, inputs, self.settings, self.ring, self.known)
        return out, lse, torch.tensor(whole, dtype=torch.int64)

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        out, lse, whole = outputs
        N, number = whole.tolist()
        ring = of_length(self.ring, N)
        return ring_backward(self.pass_kind, inputs, (dout, out, lse, dlse), self.settings, ring, number, self.known)


def resolve_ring(q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> ResolvedRing:
    return record_of(ResolvedRing, q, k, padding, settings)


def new_whole(inputs: tuple[Any, ...], settings: CallSettings) -> torch.Tensor:
    """Returns a tensor like the third output."""
    return torch.empty((2,), dtype=torch.int64, device="cpu")


ring_attention_op = define_attention(
    ResolvedRing.name,
    resolve_ring,
    "dilated_attention.engine.reference.reference_attention on one process, which is plain autograd",
    new_saved=new_whole,
)
