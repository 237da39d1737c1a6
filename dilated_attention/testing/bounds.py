"""Errors and their bounds: fixed for float64 and float32, derived from plain softmax attention for half precision."""

from __future__ import annotations

import torch

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5


def max_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Returns the largest absolute difference, in float64. Equal infinities are equal; a NaN, or an infinity on one side, gives inf."""
    if x.shape != truth.shape:
        raise AssertionError(f"shapes differ: {tuple(x.shape)} and {tuple(truth.shape)}")
    x, truth = x.detach().double(), truth.detach().double().to(x.device)
    difference = torch.where(x == truth, 0.0, (x - truth).abs())
    return float(torch.where(difference.isnan(), torch.inf, difference).max()) if difference.numel() else 0.0


def largest(x: torch.Tensor) -> float:
    """Returns the largest absolute finite value."""
    finite = x.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def low_precision_bound(plain: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """Returns 2·E(plain) + band; the band is one rounding to ``dtype`` of the largest value, plus what float32 is allowed.

    The latter matters if everything cancels: with a single key, dq is 0 and plain softmax happens to give exactly that.
    """
    return 2 * max_error(plain, truth) + torch.finfo(dtype).eps * largest(truth) + relative_bound(truth, FLOAT32_TOLERANCE)


def relative_bound(truth: torch.Tensor, tolerance: float, dropout_p: float = 0.0) -> float:
    """Returns the bound for results of inputs of order 1: relative above 1, absolute below, where sums cancel. Dropout scales what it keeps
    by 1 / (1 − dropout_p)."""
    return tolerance * max(1 / (1 - dropout_p), largest(truth))
