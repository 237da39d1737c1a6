"""FlashAttention-2 of the compiled package ``flash-attn``: as bundled in torch (``sdpa_flash``), but with a determinism argument."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import FLASH, Backend, Grads, Keys, Options, Result, Views
from dilated_attention.backends.mask_convert import flash_sides


class Flash2Backend(Backend):
    """``flash_attn.flash_attn_interface._flash_attn_forward`` and ``_flash_attn_backward`` of flash-attn 2.7 and later.

    Its own dropout draws per launch, not by position, so two branches would drop different elements; it is not used.
    """

    name = "flash2"
    capabilities = replace(
        FLASH,
        package="flash-attn-2",
        install='pip install "dilated-attention[flash2]" (compiles flash-attn)',
        softcap=True,
        # of a build for head dims up to 128; others up to 256 are not measured
        source="H200, torch 2.11, flash-attn 2.8.3 built for head dims to 128: 326/301 TFLOP/s forward/backward at D = 64, 391/320 at 128",
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, **__: Views) -> Result:
        assert keys is None, "takes neither documents nor lists of blocks"
        left, right = flash_sides(options, q, k)
        out, lse, *_ = _interface()._flash_attn_forward(
            q, k, v, 0.0, options.scale, causal=options.causal, window_size_left=left, window_size_right=right, softcap=options.softcap,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        # flash-attn gives +inf in rows without keys
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, **__: Views,
    ) -> Grads:  # fmt: skip
        assert keys is None and dlse is None
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        _interface()._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, 0.0, options.scale, options.causal, *flash_sides(options, q, k),
            options.softcap, None, options.deterministic,
        )  # fmt: skip
        return dq, dk, dv


def _interface() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface
