"""The custom op of block-sparse attention: schema, fake implementation, autograd.

The op builds its lists inside, so torch.compile sees only the name of the pattern. A selective-checkpointing policy should list
``torch.ops.dilated_attention.block_sparse_attention`` as must-save.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.blocks.run import BlockMasks, BlockSettings, blocks_backward, blocks_forward
from dilated_attention.engine.oom.requirements import blocks_requirement
from dilated_attention.engine.ops.gradients import register_gradients
from dilated_attention.engine.ops.op_hooks import op_hook
from dilated_attention.engine.ops.prepare import document_ranges, kernel_ready, without_autocast
from dilated_attention.pattern import pattern_from_spec


@torch.library.custom_op("dilated_attention::block_sparse_attention", mutates_args=())
@op_hook(blocks_requirement)
def block_sparse_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    kept: torch.Tensor | None,
    spec: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, Nq, H, D), lse (B, H, Nq)). The caller checks the arguments.

    ``spec`` is ``BlockPattern.spec()``; ``kept`` holds the blocks that a content-chosen pattern chose.
    """
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, k.shape[1])
    if not q.numel():
        return new_like(q), new_lse(q).fill_(-torch.inf)
    q, k, v = (kernel_ready(x) for x in (q, k, v))
    settings = BlockSettings(is_causal, scale, dropout_p, deterministic, needs_grad, backend)
    masks = BlockMasks(key_padding_mask, documents, seed, query_offset, kept)
    with without_autocast(q):
        out, lse = blocks_forward(q, k, v, pattern_from_spec(spec), settings, masks)
    return as_new(out), as_new(lse)


@torch.library.custom_op("dilated_attention::block_sparse_attention_backward", mutates_args=())
@op_hook(blocks_requirement)
def block_sparse_attention_backward_op(
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
    spec: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the shares (dq, dk, dv), contiguous, in the inputs' dtype. ``out`` and ``lse`` may be those of a larger softmax."""
    if not q.numel():
        return new_like(q).zero_(), new_like(k).zero_(), new_like(v).zero_()
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, k.shape[1])
    dout, q, k, v, out = (kernel_ready(x) for x in (dout, q, k, v, out))
    settings = BlockSettings(is_causal, scale, dropout_p, deterministic, needs_grad, backend)
    masks = BlockMasks(key_padding_mask, documents, seed, query_offset, kept)
    with without_autocast(q):
        grads = blocks_backward((dout, q, k, v, out, lse), pattern_from_spec(spec), settings, masks, dlse)
    dq, dk, dv = (as_new(grad.to(q.dtype)) for grad in grads)
    return dq, dk, dv


def as_new(x: torch.Tensor) -> torch.Tensor:
    """Returns x with default strides and no storage offset, as the fake implementations promise, or a copy of x if it has others.

    Strides of dimensions of size 1 must be the default ones, too.
    """
    strides = itertools.accumulate((max(size, 1) for size in reversed(x.shape[1:])), operator.mul, initial=1)
    if x.storage_offset() == 0 and x.stride() == tuple(strides)[::-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def new_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))


def new_results(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_like(q), new_lse(q)


def new_gradients(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return new_like(q), new_like(k), new_like(v)


block_sparse_attention_op.register_fake(new_results)
block_sparse_attention_backward_op.register_fake(new_gradients)
BLOCK_OPS = block_sparse_attention_op, block_sparse_attention_backward_op
register_gradients(
    *BLOCK_OPS,
    "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H)",
)
