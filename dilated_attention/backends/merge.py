"""The exact merge of two partial softmax results (out, lse) over disjoint or repeated keys.

    lse = log(e^lse₁ + e^lse₂),   out = out₁·e^(lse₁ − lse) + out₂·e^(lse₂ − lse)

Weights are computed relative to the larger lse and are 0 where both are −inf. So an empty part changes nothing and two empty parts
stay empty, where the sigmoid form used by ring-attention libraries gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_weights(lse_1: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (lse, weight of part 1, weight of part 2), all with lse's shape and dtype."""
    high = torch.maximum(lse_1, lse_2)
    high.masked_fill_(high == -torch.inf, 0.0)
    weight_1, weight_2 = (lse_1 - high).exp_(), (lse_2 - high).exp_()
    total = weight_1 + weight_2
    lse = high + total.log()
    # dividing by the sum instead of using exp(lse_i − lse): float32 holds an lse of 1e4 to only 5e-4, so the weights would not sum to 1
    total.masked_fill_(total == 0, 1.0)
    return lse, weight_1.div_(total), weight_2.div_(total)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a part into (out, lse) in place. out (…, D) is in the accumulation dtype, lse is (…); any strides."""
    merged, weight, part_weight = merge_weights(lse, part_lse)
    out.mul_(weight[..., None])
    out.addcmul_(part_out.to(out.dtype), part_weight[..., None])
    lse.copy_(merged)
