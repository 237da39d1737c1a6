"""Learned sinks: each head has one more key, of value 0, whose score is a parameter. They join a finished result (out, lse) exactly.

    lse' = log(e^lse + e^sink),   out' = out · e^(lse − lse')

A backward that is given out' and lse' in place of out and lse returns exact dq, dk and dv, as for any part of a larger softmax. Of the
sink itself, whose weight in row i is e^(sink − lse'_i) and whose value is 0, it leaves

    dsink = Σ_i e^(sink − lse'_i) · (dlse'_i − δ_i),   δ_i = dout_i · out'_i

So every backend, sharded or not, has sinks without knowing of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.backends.hardware import has_kernels


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds sinks (H,) to a result in place: out (B, N, H, D) and lse (B, H, N) are contiguous. A row without keys stays 0."""
    if not lse.numel():
        return
    if has_kernels(out):
        from dilated_attention.engine import sinks_triton

        sinks_triton.add_sinks_(out, lse, sinks)
        return
    scores = sinks.to(lse.dtype)[:, None]
    # two empty parts, a row without keys and a sink of −inf, would give NaN
    share = (lse - scores).sigmoid_().masked_fill_(lse == -torch.inf, 0.0)
    # computed in lse's dtype and rounded once
    out.mul_(share.transpose(1, 2)[..., None])
    torch.logaddexp(lse, scores, out=lse)


def sinks_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns dsinks (H,) for results (out, lse) that have the sinks in them. dout may have any strides."""
    if not lse.numel():
        return torch.zeros_like(sinks)
    if has_kernels(out):
        from dilated_attention.engine import sinks_triton

        return sinks_triton.sinks_gradient(dout, dlse, out, lse, sinks)
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp_().masked_fill_(lse == -torch.inf, 0.0)
    return (weight * (-delta if dlse is None else dlse - delta)).sum((0, 2)).to(sinks.dtype)
