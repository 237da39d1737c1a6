"""The ops of attention over a sharded sequence. Their backward needs only their own out and lse, so with such an op as must-save in a
selective-checkpointing policy nothing is exchanged a second time in the recomputation."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.distributed.ring_pass import ResolvedRing, ResolvedRingBlocks
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.resolve import Optional, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


class ResolvedRingUnion(ResolvedRingBlocks):
    """Calls of dilated branches and a block pattern together."""

    name = "ring_block_sparse_dilated_attention"


def resolve_ring(q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> ResolvedRing:
    if not settings.blocks:
        return record_of(ResolvedRing, q, k, padding, settings)
    kind = ResolvedRingBlocks if settings.branches is None else ResolvedRingUnion
    # a record would keep the function or tensor of such a pattern alive
    if (pattern := pattern_from_spec(settings.blocks)).lives_here:
        return kind(settings, q.device.type, alive=pattern)
    return record_of(kind, q, k, padding, settings)


def _new_whole(inputs: tuple[Any, ...], settings: CallSettings) -> torch.Tensor:
    """Returns a tensor like the third output."""
    return torch.empty((2,), dtype=torch.int64, device="cpu")


# what to use for second derivatives and forward mode
_ALTERNATIVES = {
    ResolvedRing: "dilated_attention.engine.reference.reference_attention on one process, which is plain autograd",
    ResolvedRingBlocks: "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H), on one process",
    ResolvedRingUnion: "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities, "
    "on one process",
}
ring_attention_op, ring_block_sparse_attention_op, ring_block_sparse_dilated_attention_op = (
    define_attention(kind.name, resolve_ring, alternative, new_saved=_new_whole) for kind, alternative in _ALTERNATIVES.items()
)
