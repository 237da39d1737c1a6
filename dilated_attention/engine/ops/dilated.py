"""The custom op of dilated attention, which is opaque to torch.compile: schema, fake implementation, autograd.

A selective-checkpointing policy should list ``torch.ops.dilated_attention.dilated_attention`` as must-save.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.ops.gradients import register_gradients
from dilated_attention.engine.ops.prepare import CallSettings, pattern_of, saved_elements
from dilated_attention.engine.ops.resolve import resolve


@torch.library.custom_op("dilated_attention::dilated_attention", mutates_args=())
def dilated_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    head_offsets: str,
    offset_list: list[int],
    branch_heads: str,
    tail: str,
    window: list[int],
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out (B, Nq, H, D), lse (B, H, Nq), the per-branch outputs kept for the backward (``prepare.saved_elements``), maybe empty).

    ``window`` is [] or [left, right], with −1 for unbounded. The caller checks the arguments.
    """
    arguments = (
        segment_lengths, dilation_rates, head_offsets, offset_list, branch_heads, tail, window, is_causal, scale, query_offset,
        dropout_p, detached, deterministic, needs_grad, backend, precision,
    )  # fmt: skip
    resolved = resolve(q, k, key_padding_mask, arguments)
    resolved = resolved if cu_seqlens is None else resolved.with_documents(cu_seqlens, k.shape[1])
    out, lse, kept = resolved.forward(q, k, v, key_padding_mask, cu_seqlens, seed)
    return out, lse, q.new_empty(0) if kept is None else kept


@torch.library.custom_op("dilated_attention::dilated_attention_backward", mutates_args=())
def dilated_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    head_offsets: str,
    offset_list: list[int],
    branch_heads: str,
    tail: str,
    window: list[int],
    is_causal: bool,
    scale: float,
    query_offset: int,
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv), contiguous, in the inputs' dtype."""
    arguments = (
        segment_lengths, dilation_rates, head_offsets, offset_list, branch_heads, tail, window, is_causal, scale, query_offset,
        dropout_p, detached, deterministic, needs_grad, backend, precision,
    )  # fmt: skip
    resolved = resolve(q, k, key_padding_mask, arguments)
    resolved = resolved if cu_seqlens is None else resolved.with_documents(cu_seqlens, k.shape[1])
    dq, dk, dv = resolved.backward(dout, dlse, (q, k, v, key_padding_mask, cu_seqlens, seed), (out, lse, kept))
    return dq, dk, dv


def _new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@dilated_attention_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_seqlens: torch.Tensor | None, seed: Any, lengths: Any, rates: Any,
    head_offsets: str, offset_list: Any, branch_heads: str, tail: str, window: Any, is_causal: bool, scale: float, query_offset: int,
    dropout_p: float, detached: bool, deterministic: bool, needs_grad: bool, backend: str, precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    kept = 0
    if detached and needs_grad:
        pattern = pattern_of(tuple(lengths), tuple(rates), head_offsets, tuple(offset_list), branch_heads, tail)
        settings = CallSettings(window, is_causal, scale, dropout_p, detached, deterministic, needs_grad, backend, precision)
        kept = saved_elements(q, k, pattern, settings, cu_seqlens, query_offset)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    return _new_like(q), lse, q.new_empty(kept)


@dilated_attention_backward_op.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return _new_like(q), _new_like(k), _new_like(v)


register_gradients(
    dilated_attention_op,
    dilated_attention_backward_op,
    "dilated_attention.engine.reference.reference_attention, which is plain autograd",
)
