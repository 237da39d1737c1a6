"""The custom op that combines dilated branches and a block pattern in one softmax: schema, fake implementation, autograd.

The forward merges both parts' (out, lse). The backward runs each part's backward with the merged out and lse, which yields exactly its
share of dq, dk, dv, and adds the shares. No gradient flows through the merge.
"""

from __future__ import annotations

import torch

from dilated_attention.backends import NESTED
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.blocks.run import BlockMasks, BlockSettings, blocks_backward, blocks_forward
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.merge import merge_onto
from dilated_attention.engine.oom.requirements import blocks_requirement
from dilated_attention.engine.ops.block_sparse import as_new, new_gradients, new_like, new_lse, new_results
from dilated_attention.engine.ops.gradients import register_gradients
from dilated_attention.engine.ops.op_hooks import op_hook
from dilated_attention.engine.ops.prepare import CallSettings, document_ranges, kernel_ready, pattern_of, prepare, without_autocast
from dilated_attention.pattern import pattern_from_spec


@torch.library.custom_op("dilated_attention::block_sparse_dilated_attention", mutates_args=())
@op_hook(blocks_requirement)
def block_sparse_dilated_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    kept: torch.Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    head_offsets: str,
    offset_list: list[int],
    branch_heads: str,
    tail: str,
    spec: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, Nq, H, D), lse (B, H, Nq)). The caller checks the arguments."""
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, k.shape[1])
    if not q.numel():
        return new_like(q), new_lse(q).fill_(-torch.inf)
    q, k, v = (kernel_ready(x) for x in (q, k, v))
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = CallSettings([], is_causal, scale, dropout_p, False, deterministic, needs_grad, backend, "native")
    shape, call = prepare(False, (q, k, v), pattern, settings, key_padding_mask, documents, seed, query_offset)
    masks = BlockMasks(key_padding_mask, documents, seed, query_offset, kept)
    with without_autocast(q):
        # the blocks run first, since they raise BackendUnavailable before anything is allocated
        part_out, part_lse = blocks_forward(q, k, v, pattern_from_spec(spec), _block_settings(settings), masks)
        out, lse = strategy.forward(pattern, shape, q, k, v, call)
        merge_onto(out, lse.transpose(1, 2), part_out, part_lse.transpose(1, 2))
    return out, lse


@torch.library.custom_op("dilated_attention::block_sparse_dilated_attention_backward", mutates_args=())
@op_hook(blocks_requirement)
def block_sparse_dilated_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    kept: torch.Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    head_offsets: str,
    offset_list: list[int],
    branch_heads: str,
    tail: str,
    spec: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv), contiguous, in the inputs' dtype."""
    if not q.numel():
        return new_like(q).zero_(), new_like(k).zero_(), new_like(v).zero_()
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, k.shape[1])
    dout, q, k, v, out = (kernel_ready(x) for x in (dout, q, k, v, out))
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = CallSettings([], is_causal, scale, dropout_p, False, deterministic, needs_grad, backend, "native")
    shape, call = prepare(True, (q, k, v, dout), pattern, settings, key_padding_mask, documents, seed, query_offset)
    masks = BlockMasks(key_padding_mask, documents, seed, query_offset, kept)
    tensors = (dout, q, k, v, out, lse)
    acc = accumulation_dtype(q.dtype)
    with without_autocast(q):
        shares = strategy.backward(pattern, shape, tensors, call, dlse)
        more = blocks_backward(tensors, pattern_from_spec(spec), _block_settings(settings), masks, dlse)
        dq, dk, dv = (as_new((a.to(acc) + b).to(q.dtype)) for a, b in zip(shares, more, strict=True))
    return dq, dk, dv


def _block_settings(settings: CallSettings) -> BlockSettings:
    """Returns the blocks' settings. ``backend="nested"`` concerns only pairs that branches share, so the blocks then use "auto"."""
    backend = "auto" if settings.backend == NESTED else settings.backend
    return BlockSettings(settings.is_causal, settings.scale, settings.dropout_p, settings.deterministic, settings.needs_grad, backend)


block_sparse_dilated_attention_op.register_fake(new_results)
block_sparse_dilated_attention_backward_op.register_fake(new_gradients)
BLOCK_DILATED_OPS = block_sparse_dilated_attention_op, block_sparse_dilated_attention_backward_op
register_gradients(
    *BLOCK_DILATED_OPS,
    "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities",
)
