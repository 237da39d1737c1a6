"""The custom op of dilated attention: schema, fake, autograd. Opaque to torch.compile, so nothing breaks a graph.

``torch.ops.dilated_attention.dilated_attention`` is what a selective-checkpointing policy lists as must-save.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine import schedule
from dilated_attention.engine.gradients import register_gradients
from dilated_attention.engine.needs import dilated_need
from dilated_attention.engine.prepare import Settings, document_ranges, kept_elements, kernel_ready, pattern_of, prepare, without_autocast
from dilated_attention.engine.watched import watched


@torch.library.custom_op("dilated_attention::dilated_attention", mutates_args=())
@watched(dilated_need)
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
    """(out (B, Nq, H, D), lse (B, H, Nq), what ``prepare.kept_elements`` says is kept for the backward).

    ``window`` is [] or [left, right], −1 for unbounded. Arguments are checked by the caller.
    """
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = Settings(window, is_causal, scale, dropout_p, detached, deterministic, needs_grad, backend, precision)
    if not q.numel():
        if cu_seqlens is not None:
            document_ranges(cu_seqlens, k.shape[1])
        return _new_like(q), _new_lse(q, -torch.inf), q.new_empty(0)
    kept = q.new_empty(kept_elements(q, k, pattern, settings, cu_seqlens, query_offset))
    q, k, v = (kernel_ready(x) for x in (q, k, v))
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, k.shape[1])
    shape, call = prepare(False, (q, k, v), pattern, settings, key_padding_mask, documents, seed, query_offset)
    with without_autocast(q):
        out, lse = schedule.forward(pattern, shape, q, k, v, call, kept if kept.numel() else None)
    return out, lse, kept


@torch.library.custom_op("dilated_attention::dilated_attention_backward", mutates_args=())
@watched(dilated_need)
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
    """(dq, dk, dv), contiguous, in the inputs' dtype."""
    if not q.numel():
        return (
            _new_like(q),
            torch.zeros_like(k, memory_format=torch.contiguous_format),
            torch.zeros_like(v, memory_format=torch.contiguous_format),
        )
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = Settings(window, is_causal, scale, dropout_p, detached, deterministic, needs_grad, backend, precision)
    dout, q, k, v, out = (kernel_ready(x) for x in (dout, q, k, v, out))
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, k.shape[1])
    shape, call = prepare(True, (q, k, v, dout), pattern, settings, key_padding_mask, documents, seed, query_offset)
    with without_autocast(q):
        dq, dk, dv = schedule.backward(pattern, shape, (dout, q, k, v, out, lse), call, dlse, kept if kept.numel() else None)
    return dq, dk, dv


def _new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _new_lse(q: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((q.shape[0], q.shape[2], q.shape[1]), value, dtype=accumulation_dtype(q.dtype), device=q.device)


@dilated_attention_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_seqlens: torch.Tensor | None, seed: Any, lengths: Any, rates: Any,
    head_offsets: str, offset_list: Any, branch_heads: str, tail: str, window: Any, is_causal: bool, scale: float, query_offset: int,
    dropout_p: float, detached: bool, deterministic: bool, needs_grad: bool, backend: str, precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    kept = 0
    if detached and needs_grad:
        pattern = pattern_of(tuple(lengths), tuple(rates), head_offsets, tuple(offset_list), branch_heads, tail)
        settings = Settings(window, is_causal, scale, dropout_p, detached, deterministic, needs_grad, backend, precision)
        kept = kept_elements(q, k, pattern, settings, cu_seqlens, query_offset)
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
