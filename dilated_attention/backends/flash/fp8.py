"""Quantisation to 8-bit floats (e4m3: 4 exponent and 3 mantissa bits, largest number 448), one scale per problem and group of heads.

    y = round((x − c) · 448 / amax),    descale = amax / 448,    mean = avg(x − y · descale),    x ≈ mean + y · descale

c is each channel's average over the rows, or 0. Removing a constant does not change the attention: softmax is invariant to one in its
scores, and one in the values passes through. So ``restore_`` adds scale·q·mean(k) to lse and mean(v) to out, in float32. The
returned mean is that of y *as rounded*: after a shift, rounding may be biased to one side, and an error common to all rows adds up.

Only finite elements enter c and amax. A NaN or an infinity becomes e4m3's NaN, so it is not lost and does not affect a scale.

Shape letters: P problems, L rows, G heads, K scales per problem (groups of G/K neighbouring heads), D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# the reciprocal of a smaller amax is not representable in float32; such values become zeros
SMALLEST_AMAX = 1e-30


class Quantised(NamedTuple):
    """y (P, L, G, D) e4m3, contiguous · descale (P, K) float32 · mean (P, K, D) float32, None where c is 0."""

    y: Tensor
    descale: Tensor
    mean: Tensor | None


def quantise_torch(x: Tensor, num_scales: int, *, centre: bool = False, dtype: torch.dtype = E4M3) -> Quantised:
    """Quantises as ``flash3_fp8.quantise`` does; the definition, in plain torch.

    ``dtype=torch.float32`` omits the rounding, for tests of the kernels in Triton's interpreter, which rounds to e4m3 wrongly where a
    mantissa carries.
    """
    P, L, G, D = x.shape
    groups = x.reshape(P, L, num_scales, G // num_scales, D).float()
    finite = groups.abs() < torch.inf
    average = torch.where(finite, groups, 0.0).mean(dim=(1, 3)) if centre else groups.new_zeros(P, num_scales, D)
    groups = groups - average[:, None, :, None, :]
    amax = torch.where(finite, groups.abs(), 0.0).amax(dim=(1, 3, 4)).clamp_min(SMALLEST_AMAX)
    # E4M3_MAX / amax with a Python number would round twice: torch computes 448 · (1 / amax)
    factor = torch.full_like(amax, E4M3_MAX) / amax
    descale = amax / E4M3_MAX
    # rounding may carry the largest element past 448, and torch's cast turns values too far beyond it into NaN
    scaled = (groups * factor[:, None, :, None, None]).clamp(-E4M3_MAX, E4M3_MAX)
    y = torch.where(finite, scaled, torch.nan).to(dtype)
    left = torch.where(finite, y.float(), 0.0).mean(dim=(1, 3)) * descale[:, :, None]
    return Quantised(y.reshape(P, L, G, D), descale, average - left if centre else None)


def restore_torch_(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, scale: float) -> None:
    """Restores as ``flash3_fp8.restore_`` does; the definition, in plain torch."""
    P, L, G, D = q.shape
    K = k_mean.shape[1]
    q = q.reshape(P, L, K, G // K, D)
    lse += scale * torch.einsum("plkgd,pkd->pkgl", q.float(), k_mean).reshape(P, G, L)
    out.copy_((out.view(q.shape).float() + v_mean[:, None, :, None, :]).view(P, L, G, D))
