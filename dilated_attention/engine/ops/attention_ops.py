"""The attention ops of one process, which are opaque to torch.compile. Those of a ring are in ``distributed/``."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends import detect
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.prepare import fuses, saved_elements
from dilated_attention.engine.ops.resolve import ResolvedDilated, resolve
from dilated_attention.engine.ops.resolve_blocks import ResolvedBlocks, ResolvedUnion, resolve_blocks
from dilated_attention.engine.ops.settings import CallSettings


def _new_saved(inputs: tuple[Any, ...], settings: CallSettings) -> torch.Tensor:
    """Returns a tensor like the third output: over packed documents, whose number is not known without values, nothing is saved."""
    q, k, *_, cu_seqlens = inputs[:5]
    may_save = cu_seqlens is None and settings.saves_outputs and fuses(detect(q.device), q.dtype)
    return q.new_empty(saved_elements(settings.pattern, q.shape, k.shape, q.element_size()) if may_save else 0)


dilated_attention_op = define_attention(
    ResolvedDilated.name,
    resolve,
    "dilated_attention.engine.reference.reference_attention, which is plain autograd",
    new_saved=_new_saved,
)
block_sparse_attention_op = define_attention(
    ResolvedBlocks.name, resolve_blocks, "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H)"
)
block_sparse_dilated_attention_op = define_attention(
    ResolvedUnion.name,
    resolve_blocks,
    "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities",
)
