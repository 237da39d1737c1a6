"""Dilated attention as one operation: its forward and backward, and the custom op around them, which is opaque to torch.compile.

A selective-checkpointing policy should list ``torch.ops.dilated_attention.dilated_attention`` as must-save.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.oom.requirements import dilated_need
from dilated_attention.engine.ops.gradients import Outside, register_gradients
from dilated_attention.engine.ops.op_hooks import watched
from dilated_attention.engine.ops.prepare import Settings, kept_elements, pattern_of, without_autocast
from dilated_attention.engine.ops.resolve import Resolved, resolve

Optional = torch.Tensor | None


def _forward_arguments(resolved: Resolved, *tensors: Optional) -> dict[str, Any]:
    return dict(zip(_names(dilated_attention_op), (*tensors, *resolved.arguments), strict=True))


def _backward_arguments(
    resolved: Resolved, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> dict[str, Any]:
    values = (dout, dlse, *inputs[:3], *outputs, *inputs[3:], *resolved.arguments)
    return dict(zip(_names(dilated_attention_backward_op), values, strict=True))


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op._opoverload._schema.arguments]


@watched(dilated_need, _forward_arguments)
def forward(
    resolved: Resolved, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Optional, cu_seqlens: Optional, seed: Optional
) -> tuple[torch.Tensor, torch.Tensor, Optional]:
    """Returns (out (B, Nq, H, D), lse (B, H, Nq), the per-branch outputs kept for the backward (``prepare.kept_elements``) or None)."""
    if not q.numel():
        return _new_like(q), _new_lse(q, -torch.inf), None
    settings = resolved.settings
    elements = 0
    if settings.detached and settings.needs_grad:
        elements = kept_elements(q, k, resolved.pattern, settings, cu_seqlens, resolved.query_offset)
    (q, k, v), found = resolved.ready((q, k, v), padding, seed)
    if resolved.outside and settings.detached and settings.needs_grad:
        elements = strategy.kept_of_documents(resolved.pattern, found.shape, q, found.call)
    kept = q.new_empty(elements) if elements else None
    with without_autocast(q):
        out, lse = strategy.forward(resolved.pattern, found.shape, q, k, v, found.call, kept, found.tables)
    return out, lse, kept


@watched(dilated_need, _backward_arguments)
def backward(
    resolved: Resolved, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    """Returns (dq, dk, dv), contiguous, in the inputs' dtype. ``inputs`` and ``outputs`` are those of ``forward``."""
    (q, k, v, padding, _, seed), (out, lse, kept) = inputs, outputs
    if not q.numel():
        return _new_like(q), *(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    (q, k, v, dout, out), found = resolved.ready((q, k, v, dout, out), padding, seed)
    kept = None if kept is None or not kept.numel() else kept
    with without_autocast(q):
        return strategy.backward(resolved.pattern, found.shape, (dout, q, k, v, out, lse), found.call, dlse, kept, found.tables)


class DilatedCall(Outside):
    """A call that runs outside the dispatcher."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        return forward(self.resolved, *tensors)

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        return backward(self.resolved, dout, dlse, inputs, outputs)

    def backward_op(self, dout: Any, dlse: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
        outputs = (*outputs[:2], dout.new_empty(0) if outputs[2] is None else outputs[2])
        return dilated_attention_backward_op(*_backward_arguments(self.resolved, dout, dlse, inputs, outputs).values())


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
    """Returns (out (B, Nq, H, D), lse (B, H, Nq), the per-branch outputs kept for the backward (``prepare.kept_elements``), maybe empty).

    ``window`` is [] or [left, right], with −1 for unbounded. The caller checks the arguments.
    """
    arguments = (
        segment_lengths, dilation_rates, head_offsets, offset_list, branch_heads, tail, window, is_causal, scale, query_offset,
        dropout_p, detached, deterministic, needs_grad, backend, precision,
    )  # fmt: skip
    resolved = resolve(q, k, key_padding_mask, arguments)
    resolved = resolved if cu_seqlens is None else resolved.with_documents(cu_seqlens, k.shape[1])
    out, lse, kept = forward(resolved, q, k, v, key_padding_mask, cu_seqlens, seed)
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
    dq, dk, dv = backward(resolved, dout, dlse, (q, k, v, key_padding_mask, cu_seqlens, seed), (out, lse, kept))
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
