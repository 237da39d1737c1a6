"""Checks of results against float64, and the relative errors ‖found − true‖ / ‖true‖ that decide whether there is a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilated_attention.bench.accuracy.truth import BOUNDS, RESULTS, Pattern, Truth
from dilated_attention.bench.workloads.problem import Problem

__all__ = ["BOUNDS", "FP8_BOUND", "RESULTS", "WHOLE", "Attend", "Pattern"]
Attend = Callable[..., torch.Tensor]
FP8_BOUND = 0.15
# an lse is a logarithm of a sum of exponentials: its error is absolute, that of sums in float32
_LSE_BOUND = 0.02
# positions of the short problems on which every row and every gradient of a module is compared
WHOLE = 512


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = {name: error for name, error in errors.items() if not error <= (_LSE_BOUND if name == "lse" else bound)}
    return f"wrong: {', '.join(f'{name} off by {error:.1e}' for name, error in beyond.items())}, allowed {bound:.0e}" if beyond else ""


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))


def sampled_errors(
    pattern: Pattern, problem: Problem, inputs: Sequence[Any], results: Sequence[Any], *, count: int = 8
) -> dict[str, float]:
    """Returns the relative errors of an extremely long call over ``count`` rows of two heads, and the largest absolute error of lse.

    Args:
        inputs: q, k, v and, with gradients, dout; as tensors or ``Sharded``, of which all processes look at the same rows.
        results: out, lse and, with gradients, dq, dk, dv. dk and dv of a key are computed from the given out and lse of all rows that see
            it; those are compared in the sampled rows.
    """
    out, lse, *grads = results
    dout = inputs[3] if grads else None
    truth = Truth(problem, pattern, leaves=inputs[:3], dout=dout, given=[(out, lse)], whole=False, count=count, gradients=bool(grads))
    return truth.errors(out, grads, lse=lse)
