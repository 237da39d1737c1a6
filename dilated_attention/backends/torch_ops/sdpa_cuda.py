"""torch's own CUDA attention kernels, through the aten ops that return lse and accept it in the backward.

Three backends: FlashAttention-2 as torch bundles it, cuDNN, and the memory-efficient kernel (float32 and old GPUs).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention.backends.base import FLASH, HALVES, AttentionRequest, Backend, Capabilities, Grads, Keys, Options, Result, Views
from dilated_attention.backends.mask_convert import additive_bias, clear_empty_rows, of_kv_heads, repeat_heads, window_sizes
from dilated_attention.backends.torch_ops.math import MathBackend

_MATH = MathBackend()
# the launch grids put the batch in a 16-bit dimension
_MAX_GRID = 65_535


class SdpaFlashBackend(Backend):
    """``aten::_flash_attention_forward`` / ``_backward``: takes (B, S, H, D) without a copy, windows and grouped heads.

    Its backward has no argument for determinism: only torch.use_deterministic_algorithms(True) makes it reproducible.
    """

    name = "sdpa_flash"
    capabilities = replace(
        FLASH, source="H200, torch 2.11: strided views bit-equal; 305/287 TFLOP/s forward/backward at D = 64, 346/311 at 128"
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.deterministic and request.needs_grad and not request.torch_deterministic:
            return ["its backward is deterministic only under torch.use_deterministic_algorithms(True)"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None
        left, right = window_sizes(options, q, k)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, options.causal, False, scale=options.scale, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        assert keys is None and dlse is None
        left, right = window_sizes(options, q, k)
        no_dropout = q.new_zeros(2, dtype=torch.uint64)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, options.causal, no_dropout, no_dropout,
            scale=options.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return dq, dk, dv


class SdpaCudnnBackend(Backend):
    """``aten::_scaled_dot_product_cudnn_attention`` and its backward.

    It is never given a mask (NaN gradients, pytorch #196678) and never chosen for deterministic gradients before cuDNN 9.25 (a workspace
    quadratic in N). It refuses a single key, for which no softmax is needed; that case is computed in plain torch.
    """

    name = "sdpa_cudnn"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        compute_capabilities=((8, 0), (12, 1)),
        head_dim_multiple=8,
        max_head_dim=128,
        max_batch=_MAX_GRID,
        # 64 ms forward, 76 backward (H100)
        plans_shapes=True,
        # it is not known whether it is safe on several streams at once
        concurrent=False,
        source="H200, torch 2.11, cuDNN 9.19: 460/440 TFLOP/s forward/backward at D = 64, 640/530 at 128",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        reasons = []
        version = request.hardware.cudnn_version
        if version is None and request.hardware.device_type == "cuda":
            reasons.append("torch finds no cuDNN")
        if request.deterministic and request.needs_grad and version is not None and version < 92500:
            reasons.append(f"its deterministic backward takes memory quadratic in N before cuDNN 9.25, this is {version}")
        if request.num_heads > _MAX_GRID:
            reasons.append(f"at most {_MAX_GRID} heads, not {request.num_heads}")
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None
        if k.shape[1] == 1:
            return _MATH.forward(q, k, v, options)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, options.causal, False, scale=options.scale
        )
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        assert keys is None and dlse is None
        if k.shape[1] == 1:
            return _MATH.backward(dout, q, k, v, out, lse, options)
        no_dropout = q.new_zeros((), dtype=torch.int64)
        # torch caches one plan for all calls with equal q, k and v layouts, whatever the strides of out and dout for which it was built:
        # another layout of either gave NaN and gradients of 1e19 on torch 2.11, or an illegal memory access. So both are made contiguous
        heads_first = (x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous()))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first, lse.contiguous()[..., None], no_dropout, no_dropout, None, None, None, q.shape[1], k.shape[1], 0.0,
            options.causal, scale=options.scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class SdpaEfficientBackend(Backend):
    """``aten::_scaled_dot_product_efficient_attention`` and its backward: for float32 on GPUs, masks, and GPUs before Ampere.

    It does not support grouped heads (keys and values are copied for each of their query heads here), pads lse to a multiple of 32
    rows, and is silently wrong where offsets exceed 2³¹ elements, so ``capabilities`` declares that limit.
    """

    name = "sdpa_efficient"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {torch.float32},
        compute_capabilities=((5, 0), (12, 1)),
        head_dim_multiple=4,
        key_mask=True,
        window=True,
        deterministic=False,
        max_batch=_MAX_GRID,
        max_extent=2**31,
        source="H200, torch 2.11",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if request.dtype is not torch.float32 and request.head_dim % 8:
            return [f"head_dim must be a multiple of 8 in half precision, not {request.head_dim}"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None
        bias, empty_PL = _aligned_bias(q, k, options)
        k, v = (repeat_heads(x, q.shape[2]) for x in (k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, True, 0.0, options.causal, scale=options.scale
        )
        return clear_empty_rows(out.transpose(1, 2), lse[..., : q.shape[1]], empty_PL)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        assert keys is None and dlse is None
        bias, _ = _aligned_bias(q, k, options)
        G, K = q.shape[2], k.shape[2]
        padded = -(-q.shape[1] // 32) * 32
        lse = torch.nn.functional.pad(lse, (0, padded - lse.shape[-1]), value=torch.inf).contiguous()
        no_dropout = q.new_zeros((), dtype=torch.int64)
        heads_first = (x.transpose(1, 2) for x in (dout, q, repeat_heads(k, G), repeat_heads(v, G)))
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *heads_first,
            bias,
            # the kernel derives the row stride of out from its shape: any other layout gives wrong dq and dk
            out.contiguous().transpose(1, 2),
            lse,
            no_dropout,
            no_dropout,
            0.0,
            [True, True, True, False],
            options.causal,
            scale=options.scale,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        return dq, of_kv_heads(dk, K), of_kv_heads(dv, K)


def _aligned_bias(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor | None, Tensor | None]:
    bias, empty_PL = additive_bias(q, k, options, pad_keys_to=16)
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return bias, empty_PL
