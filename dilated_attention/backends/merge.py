"""The exact merge of two partial softmax results (out, lse) over disjoint or repeated keys. lse: log of the sum of e^score.

    lse = log(e^lse₁ + e^lse₂),   out = out₁·e^(lse₁ − lse) + out₂·e^(lse₂ − lse)

Weights are computed relative to the larger lse and are 0 where both are −inf. So an empty part changes nothing and two empty parts
stay empty, where the sigmoid form used by ring-attention libraries gives NaN.

Learned sinks: each head has one more key, of value 0, whose score is a parameter. They join a finished result (out, lse) exactly.

    lse' = log(e^lse + e^sink),   out' = out · e^(lse − lse')

A backward that is given out' and lse' in place of out and lse returns exact dq, dk and dv, as for any part of a larger softmax. Of the
sink itself, whose weight in row i is e^(sink − lse'_i) and whose value is 0, it leaves

    dsink = Σ_i e^(sink − lse'_i) · (dlse'_i − δ_i),   δ_i = dout_i · out'_i

So every backend, sharded or not, has sinks without knowing of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilated_attention.backends.hardware import has_kernels


def merge_weights(lse_1: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (lse, weight of part 1, weight of part 2), all with lse's shape and dtype."""
    high = torch.maximum(lse_1, lse_2)
    high.masked_fill_(high == -torch.inf, 0.0)
    weight_1, weight_2 = (lse_1 - high).exp_(), (lse_2 - high).exp_()
    total = weight_1 + weight_2
    lse = high + total.log()
    # dividing by the sum instead of using exp(lse_i − lse): float32 holds an lse of 1e4 to only 5e-4, so the weights would not sum to 1. A
    # sum of 0 (both parts empty) is replaced after its log, −inf, was taken
    total.masked_fill_(total == 0, 1.0)
    return lse, weight_1.div_(total), weight_2.div_(total)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a part into (out, lse) in place. out (…, D) is in the accumulation dtype, lse is (…); any strides."""
    merged, weight, part_weight = merge_weights(lse, part_lse)
    out.mul_(weight[..., None])
    out.addcmul_(part_out.to(out.dtype), part_weight[..., None])
    lse.copy_(merged)


def add_zero_keys(out: Tensor, lse: Tensor, num_zero_keys: int) -> tuple[Tensor, Tensor]:
    """Returns the part (out, lse) with added keys of score 0 and value 0: the closed form of TorchScale's padding."""
    lse_of_zeros = lse.new_full((), math.log(num_zero_keys))
    return out * zero_key_share(lse, num_zero_keys)[..., None].to(out.dtype), torch.logaddexp(lse, lse_of_zeros)


def zero_key_share(lse: Tensor, num_zero_keys: int) -> Tensor:
    """Returns e^lse / (e^lse + z), the factor by which z ≥ 1 zero keys scale a part's out; 0 where the part is empty."""
    return (lse - math.log(num_zero_keys)).sigmoid_()


def merge_onto(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Like ``merge_``, but for an out of any dtype, rounded once. Takes views (P, L, G, D) and (P, L, G) of any strides: P problems, L
    rows, G heads."""
    if lse.is_cuda and has_kernels(lse):
        from dilated_attention.backends import merge_triton

        merge_triton.merge_onto(out, lse, part_out, part_lse)
        return
    if out.dtype is lse.dtype:
        merge_(out, lse, part_out, part_lse)
        return
    merged, weight, part_weight = merge_weights(lse, part_lse)
    out.copy_(out * weight[..., None] + part_out * part_weight[..., None])
    lse.copy_(merged)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds sinks (H,) to a result in place: out (B, N, H, D) and lse (B, H, N) are contiguous. A row without keys stays 0."""
    if not lse.numel():
        return
    if has_kernels(out):
        from dilated_attention.backends import merge_triton

        merge_triton.add_sinks_(out, lse, sinks)
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
        from dilated_attention.backends import merge_triton

        return merge_triton.sinks_gradient(dout, dlse, out, lse, sinks)
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp_().masked_fill_(lse == -torch.inf, 0.0)
    return (weight * (-delta if dlse is None else dlse - delta)).sum((0, 2)).to(sinks.dtype)
