"""Checks of results against float64, and the relative errors ‖found − true‖ / ‖true‖ that decide whether there is a figure."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dilated_attention.bench.accuracy.truth import BOUNDS, RESULTS, Pattern, Truth, pairs_of
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.reference_rows import partners
from dilated_attention.pattern import DilatedPattern

__all__ = ["BOUNDS", "FP8_BOUND", "RESULTS", "WHOLE", "Attend", "Pattern"]
Attend = Callable[..., torch.Tensor]
FP8_BOUND = 0.15
# positions of the short problems on which every row and every gradient of a module is compared
WHOLE = 512


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = {name: error for name, error in errors.items() if not error <= bound}
    return f"wrong: {', '.join(f'{name} off by {error:.1e}' for name, error in beyond.items())}, allowed {bound:.0e}" if beyond else ""


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))


def whole_errors(attend: Attend, pattern: Pattern, problem: Problem, *, gradients: bool = True) -> dict[str, float]:
    """Returns errors of out and, with ``gradients``, of dq, dk, dv over all rows of ``problem``. It takes N² work, so N must be small."""
    leaves, dout = problem.qkv(7), problem.dout(101)
    with torch.set_grad_enabled(gradients):
        out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout) if gradients else ()
    return Truth(problem, pattern, leaves=leaves, dout=dout, whole=True, everywhere=True).errors(out, grads)


def true_results(pattern: Pattern, problem: Problem, leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    """Returns [out, dq, dk, dv] of ``leaves`` q, k, v in float64."""
    return Truth(problem, pattern, leaves=leaves, dout=dout, whole=True, everywhere=True).results()


def keys_of(pattern: Pattern, problem: Problem, position: int, head: int) -> torch.Tensor:
    """Returns the positions that (position, head) attends to, with multiplicity, on the problem's device."""
    if isinstance(pattern, DilatedPattern):
        keys = partners(pattern, position, head, problem.num_heads, problem.num_positions)
        return (keys[keys <= position] if problem.is_causal else keys).to(problem.device)
    lists = block_lists(pattern, problem.num_positions, problem.num_heads, is_causal=problem.is_causal, device=problem.device)
    row = torch.tensor([position], device=problem.device)
    return pairs_of(lists, head, row, torch.arange(problem.num_positions, device=problem.device))[0].nonzero()[:, 0]
