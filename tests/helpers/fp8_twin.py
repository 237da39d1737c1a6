"""``backends/flash/fp8.py`` in plain torch: its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.backends.flash.fp8 import E4M3, E4M3_MAX, SMALLEST_AMAX, Quantised


def quantise_torch(x: Tensor, num_scales: int, *, centre: bool = False, dtype: torch.dtype = E4M3) -> Quantised:
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
    P, L, G, D = q.shape
    K = k_mean.shape[1]
    q = q.reshape(P, L, K, G // K, D)
    lse += scale * torch.einsum("plkgd,pkd->pkgl", q.float(), k_mean).reshape(P, G, L)
    out.copy_((out.view(q.shape).float() + v_mean[:, None, :, None, :]).view(P, L, G, D))
