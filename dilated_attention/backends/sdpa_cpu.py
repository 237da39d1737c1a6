"""torch's own CPU flash attention, through the aten op that returns lse and takes it back."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import ALL_FLOATS, Backend, Facts, Options
from dilated_attention.backends.math import band_mask


class SdpaCpuBackend(Backend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward, on strided views without a copy.

    The op's traps, each guarded here and tested: no keys at all kills the process; a last stride ≠ 1 is silently wrong; a row
    without keys gets lse 0; masks must be additive and of q's dtype.
    """

    name = "sdpa_cpu"
    facts = Facts(
        devices=frozenset({"cpu"}),
        dtypes=ALL_FLOATS,
        key_mask=True,
        window=True,
        source="measured on torch 2.13, CPU: strided views as fast as contiguous ones",
    )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        assert k.shape[1] > 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        bias, empty_PL = _bias(q, k, options)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, options.causal, attn_mask=bias, scale=options.scale
        )
        if empty_PL is not None:
            lse = lse.masked_fill(empty_PL[:, None, :], -torch.inf)
            out = out.masked_fill(empty_PL[:, None, :, None], 0.0)
        return out.transpose(1, 2), lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: Options,
        dlse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert dlse is None
        bias, _ = _bias(q, k, options)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse,
            0.0,
            options.causal,
            attn_mask=bias,
            scale=options.scale,
        )
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


def _bias(q: torch.Tensor, k: torch.Tensor, options: Options) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The additive mask that the op wants, and which (problem, row) pairs it leaves without keys."""
    padding, band = options.mask.padding, options.mask.band
    if padding is None and band is None:
        return None, None
    P, L, S = q.shape[0], q.shape[1], k.shape[1]
    if band is not None:
        assert not options.causal, "a band says by itself where it ends"
        blocked = ~band_mask(band, L, S, q.device)[None]
        if padding is not None:
            blocked = blocked | padding[:, None, :]
        empty_PL = blocked.all(-1)
    else:
        assert padding is not None
        blocked = padding[:, None, :]
        # causal: row i sees the keys up to i, so it is empty as long as all of those are padding
        empty_PL = padding.to(torch.uint8).cummin(-1).values.bool() if options.causal else blocked.all(-1)
    bias = torch.zeros(blocked.shape, dtype=q.dtype, device=q.device).masked_fill_(blocked, -torch.inf)
    return bias[:, None].expand(P, 1, -1, -1), empty_PL.expand(P, L)
