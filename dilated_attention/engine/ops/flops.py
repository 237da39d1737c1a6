"""FLOP formulas of the custom ops, for torch.utils.flop_counter; importing this registers them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.engine.ops import dilated  # noqa: F401  declares what is counted here
from dilated_attention.engine.ops.prepare import WINDOW_BLOCK, pattern_of


def dilated_flops(q_shape: tuple[int, ...], k_shape: tuple[int, ...], arguments: tuple[Any, ...], per_pair: int) -> int:
    segment_lengths, dilation_rates, head_offsets, offset_list, branch_heads, tail, window, is_causal, _, query_offset = arguments[:10]
    pattern = pattern_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets, tuple(offset_list), branch_heads, tail)
    B, Nq, H, D = q_shape
    Nk, Hk = k_shape[1:3]
    bounds = tuple(None if x < 0 else x for x in window) if window else None
    shape = Shape(H, Hk, (query_offset, query_offset + Nq), (0, Nk), ((0, Nk),), is_causal, bounds, WINDOW_BLOCK)  # type: ignore[arg-type]
    return per_pair * D * B * make_plan(pattern, shape).pairs


@register_flop_formula(torch.ops.dilated_attention.dilated_attention)
def _forward_flops(
    q_shape: Any, k_shape: Any, v_shape: Any, mask: Any, cu_seqlens: Any, seed: Any, *arguments: Any, out_shape: Any = None, **_: Any
) -> int:
    """Counts 4·D per pair. Packed documents count as one sequence, since their bounds are data, which a formula does not see."""
    return dilated_flops(q_shape, k_shape, arguments, 4)


@register_flop_formula(torch.ops.dilated_attention.dilated_attention_backward)
def _backward_flops(
    dout: Any,
    dlse: Any,
    q_shape: Any,
    k_shape: Any,
    v_shape: Any,
    out: Any,
    lse: Any,
    kept: Any,
    mask: Any,
    cu: Any,
    seed: Any,
    *arguments: Any,
    out_shape: Any = None,
    **_: Any,
) -> int:
    """Counts 10·D per pair: five matrix products, one of which recomputes the forward's scores."""
    return dilated_flops(q_shape, k_shape, arguments, 10)
