"""The op of block-sparse attention over a sequence sharded across processes, ``torch.ops.dilated_attention.ring_block_sparse_attention``.

With it as must-save in a selective-checkpointing policy, nothing is exchanged a second time in the recomputation. Its backward needs only
its own out and lse.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.distributed.block_exchange.context_parallel import (
    BlockArguments,
    RingBlockMasks,
    ring_blocks_backward,
    ring_blocks_forward,
)
from dilated_attention.distributed.comm.call_consistency import ring_call
from dilated_attention.distributed.exchange.requirements import ring_blocks_requirement
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.resolve import Optional, ResolvedCall, Tensors, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


class ResolvedRingBlocks(ResolvedCall):
    """Calls of block-sparse attention on a sharded sequence. The third output is (N, number of the call), int64 on the CPU."""

    name = "ring_block_sparse_attention"
    requirement = staticmethod(ring_blocks_requirement)

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        out, lse, whole = ring_blocks_forward(inputs[:3], RingBlockMasks(*inputs[3:6]), self._of_ring())
        return out, lse, torch.tensor(whole, dtype=torch.int64)

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        out, lse, whole = outputs
        N, number = whole.tolist()
        tensors = (dout, *inputs[:3], out, lse)
        return ring_blocks_backward(tensors, dlse, RingBlockMasks(*inputs[3:6]), self._of_ring(N), number)

    def _of_ring(self, seq_len: int | None = None) -> BlockArguments:
        ring = ring_call(self.settings, seq_len)
        return BlockArguments(pattern_from_spec(self.settings.blocks), self.settings, ring, self.settings.sharding[-1])


class ResolvedRingUnion(ResolvedRingBlocks):
    """Calls of dilated branches and a block pattern together."""

    name = "ring_block_sparse_dilated_attention"


def resolve_ring_blocks(q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> ResolvedRingBlocks:
    kind = ResolvedRingBlocks if settings.branches is None else ResolvedRingUnion
    # a record would keep the function or tensor of such a pattern alive
    if (pattern := pattern_from_spec(settings.blocks)).lives_here:
        return kind(settings, q.device.type, alive=pattern)
    return record_of(kind, q, k, padding, settings)


ring_block_sparse_attention_op = define_attention(
    ResolvedRingBlocks.name,
    resolve_ring_blocks,
    "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H), on one process",
    new_saved=lambda inputs, settings: torch.empty((2,), dtype=torch.int64, device="cpu"),
)
ring_block_sparse_dilated_attention_op = define_attention(
    ResolvedRingUnion.name,
    resolve_ring_blocks,
    "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities, on one process",
    new_saved=lambda inputs, settings: torch.empty((2,), dtype=torch.int64, device="cpu"),
)
