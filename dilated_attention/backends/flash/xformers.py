"""xformers: ``memory_efficient_attention_forward_requires_grad`` and its backward, which run FlashAttention-2 or CUTLASS kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import FLASH, HALVES, AttentionRequest, Backend, Grads, Keys, Options, Result, Views
from dilated_attention.backends.mask_convert import of_kv_heads, repeat_heads, window_sizes


class XformersBackend(Backend):
    """``xformers.ops.fmha`` 0.0.34 and later: its operator ``flash`` in half precision, ``cutlass`` in float32.

    The operators are named, as xformers' own choice depends on what else is installed. Keys and values are copied for each query head
    of a group: xformers' backward takes no groups of heads.
    """

    name = "xformers"
    capabilities = replace(
        FLASH,
        dtypes=HALVES | {torch.float32},
        package="xformers",
        install='pip install "dilated-attention[xformers]"',
        compute_capabilities=((8, 0), (9, 0)),
        deterministic=False,
        # offsets of CUTLASS are of 32 bits
        max_extent=2**31,
        source="H200, torch 2.11, xformers 0.0.35: 307/286 TFLOP/s forward/backward at D = 64, 361/310 at 128; float32 35/35, 44/37",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.window and request.dtype is torch.float32:
            return ["takes windows in half precision only, not in float32"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None
        fmha, kernels = _fmha(q.dtype)
        q, k, v = (_aligned(repeat_heads(x, q.shape[2])) for x in (q, k, v))
        attend = fmha.memory_efficient_attention_forward_requires_grad
        out, lse = attend(q, k, v, _bias(fmha, options, q, k), scale=options.scale, op=kernels.FwOp)
        # CUTLASS pads the rows of lse; FlashAttention-2 writes +inf for rows without keys
        lse = lse[..., : q.shape[1]]
        return out, lse if options.mask.band is None else lse.masked_fill(lse == torch.inf, -torch.inf)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        assert keys is None and dlse is None
        (fmha, kernels), G, K = _fmha(q.dtype), q.shape[2], k.shape[2]
        q, k, v = (_aligned(repeat_heads(x, G)) for x in (q, k, v))
        dq, dk, dv = fmha.memory_efficient_attention_backward(
            # CUTLASS derives the row stride of out from its shape
            dout.contiguous(), out.contiguous(), lse.contiguous(), q, k, v, _bias(fmha, options, q, k), scale=options.scale,
            op=kernels.BwOp,
        )  # fmt: skip
        return dq, of_kv_heads(dk, K), of_kv_heads(dv, K)


def _fmha(dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the module ``xformers.ops.fmha`` and the kernels that compute in ``dtype``."""
    from xformers.ops import fmha

    return fmha, fmha.cutlass if dtype is torch.float32 else fmha.flash


def _bias(fmha: Any, options: Options, q: Tensor, k: Tensor) -> Any:
    left, right = window_sizes(options, q, k)
    if left is None and right is None:
        return fmha.attn_bias.LowerTriangularFromBottomRightMask() if options.causal else None
    assert not options.causal, "a band already includes causality"
    # as wide as both together: no limit on that side
    everything = q.shape[1] + k.shape[1]
    return fmha.attn_bias.LocalAttentionFromBottomRightMask(everything if left is None else left, everything if right is None else right)


def _aligned(x: Tensor) -> Tensor:
    """Returns ``x``, copied where a head does not begin at a multiple of 16 bytes."""
    return x if x.stride(2) % 8 == 0 else x.contiguous()
