"""The ops of block-sparse attention over a sequence sharded across processes, alone and with dilated branches."""

from __future__ import annotations

import torch

from dilated_attention.distributed.block_exchange.context_parallel import BlockPass
from dilated_attention.distributed.exchange.op import ResolvedRing, new_whole
from dilated_attention.distributed.exchange.requirements import ring_blocks_requirement
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.resolve import Optional, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


class ResolvedRingBlocks(ResolvedRing):
    """Calls of block-sparse attention on a sharded sequence."""

    name = "ring_block_sparse_attention"
    requirement = staticmethod(ring_blocks_requirement)
    pass_kind = BlockPass


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
    new_saved=new_whole,
)
ring_block_sparse_dilated_attention_op = define_attention(
    ResolvedRingUnion.name,
    resolve_ring_blocks,
    "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities, on one process",
    new_saved=new_whole,
)
