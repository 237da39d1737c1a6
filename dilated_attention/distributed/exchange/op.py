"""The custom op of attention over a sequence sharded across processes: schema, fake, autograd.

A selective-checkpointing policy should list ``torch.ops.dilated_attention.ring_attention`` as must-save: then nothing is exchanged a
second time in the recomputation. Its backward needs only its own out and lse.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.call_consistency import RingCall
from dilated_attention.distributed.exchange.context_parallel import ring_backward, ring_forward
from dilated_attention.distributed.exchange.requirements import over_gpus, ring_requirement
from dilated_attention.engine.oom.requirements import more_suggestions
from dilated_attention.engine.ops.gradients import register_gradients
from dilated_attention.engine.ops.op_hooks import op_hook
from dilated_attention.engine.ops.prepare import CallSettings, pattern_of

more_suggestions.append(over_gpus)


@torch.library.custom_op("dilated_attention::ring_attention", mutates_args=())
@op_hook(ring_requirement)
def ring_attention_op(
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
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    group_name: str,
    layout: str,
    exchange: str,
    seq_len: int,
    ranks_per_node: int,
    timeout: float,
    lse_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out (B, n, H, D), lse (B, H, n), (N, number of the call)).

    ``seq_len`` is −1 if the ranks have to ask each other. The caller checks the arguments.
    """
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = CallSettings(window, is_causal, scale, dropout_p, detached, deterministic, needs_grad, backend, "native")
    ring = RingCall(group_name, layout, exchange, seq_len, ranks_per_node, timeout, lse_grad)
    out, lse, whole = ring_forward((q, k, v), key_padding_mask, cu_seqlens, seed, pattern, settings, ring)
    return out, lse, torch.tensor(whole, dtype=torch.int64)


@torch.library.custom_op("dilated_attention::ring_attention_backward", mutates_args=())
@op_hook(ring_requirement)
def ring_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    whole: torch.Tensor,
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
    dropout_p: float,
    detached: bool,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    group_name: str,
    layout: str,
    exchange: str,
    seq_len: int,
    ranks_per_node: int,
    timeout: float,
    lse_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv) of this rank's rows, contiguous, in the inputs' dtype."""
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    settings = CallSettings(window, is_causal, scale, dropout_p, detached, deterministic, needs_grad, backend, "native")
    N, number = whole.tolist()
    ring = RingCall(group_name, layout, exchange, N, ranks_per_node, timeout, lse_grad)
    tensors = (dout, q, k, v, out, lse)
    dq, dk, dv = ring_backward(tensors, dlse, key_padding_mask, cu_seqlens, seed, pattern, settings, ring, number)
    return dq, dk, dv


@ring_attention_op.register_fake
def _(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    return out, lse, torch.empty((2,), dtype=torch.int64, device="cpu")


@ring_attention_backward_op.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


register_gradients(
    ring_attention_op,
    ring_attention_backward_op,
    "dilated_attention.engine.reference.reference_attention on one process, which is plain autograd",
)
