"""Checks of results against float64, and the relative errors ‖found − true‖ / ‖true‖ that decide whether there is a figure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.truth import BOUNDS, SEED, Pattern, Truth
from dilated_attention.bench.workloads.contenders import Attend, Contender, OfEmbedded
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.pattern import TopBlocks

__all__ = ["BOUNDS", "WHOLE", "check", "forget", "relative", "sampled_errors", "wrong"]
# an lse is a logarithm of a sum of exponentials: its error is absolute, that of sums in float32
_LSE_BOUND = 0.02
# positions of the short problems on which every row and every gradient of a module is compared
WHOLE = 512
# the last problem's results, which contenders of the same function share
_truths: dict[tuple[object, ...], Truth] = {}


def wrong(errors: dict[str, float], bound: float) -> str:
    """Returns a note that names what exceeds ``bound``, NaN included; empty if nothing does."""
    beyond = {name: error for name, error in errors.items() if not error <= (_LSE_BOUND if name == "lse" else bound)}
    return f"wrong: {', '.join(f'{name} off by {error:.1e}' for name, error in beyond.items())}, allowed {bound:.0e}" if beyond else ""


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float64).tiny))


def forget() -> None:
    """Frees the tensors of the last problem."""
    _truths.clear()


def check(contender: Contender, problem: Problem, attend: Attend, *, gradients: bool | None = None) -> dict[str, float]:
    """Returns relative errors against float64 of out and, with ``gradients``, of dq, dk and dv; by default where the contender has them.

    Blocks chosen by content are those that the pattern chooses for the same q and k. A function of x, or one whose pairs no single pattern
    describes, is compared with itself on plain PyTorch in float64 instead, on at most ``WHOLE`` positions.
    """
    gradients = contender.trains if gradients is None else gradients
    pattern = contender.pattern(problem)
    if isinstance(pattern, TopBlocks):
        problem = replace(problem, batch_size=1)
        q, k, _ = (x.detach() for x in problem.qkv(7))
        pattern = pattern.choose(q, k, is_causal=problem.is_causal)
    elif contender.inputs == "x" or pattern is None:
        return dict(_against_itself(contender, problem.reduced(WHOLE)))
    key = (problem, contender.pattern(problem), contender.mixture_grad)
    if key not in _truths:
        # those of one function follow one another, and tensors of two long sequences may not fit
        forget()
        _truths[key] = Truth(problem, pattern, contender.mixture_grad)
    truth = _truths[key]
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(gradients):
        out = attend(*truth.leaves)
    grads = torch.autograd.grad(out, truth.leaves, truth.dout) if gradients else ()
    return truth.errors(out, grads, contender.until(problem))


@functools.lru_cache(maxsize=256)
def _against_itself(contender: Contender, problem: Problem) -> tuple[tuple[str, float], ...]:
    """Returns the errors of out and of the input gradients against the same module in float64; computed once per process."""
    attend = contender.make(problem)
    leaves = contender.inputs_of(problem, 7)
    copies = [x.detach().cpu().double().requires_grad_() for x in leaves]
    dout = torch.randn_like(leaves[0]).detach()
    reference = contender.make(replace(problem, dtype=torch.float64, device=torch.device("cpu")))
    if isinstance(attend, OfEmbedded) and isinstance(reference, OfEmbedded):
        reference.module.load_state_dict({name: x.detach().cpu().double() for name, x in attend.module.state_dict().items()})
    found, true = attend(*leaves), reference(*copies)
    grads, true_grads = torch.autograd.grad(found, leaves, dout), torch.autograd.grad(true, copies, dout.cpu().double())
    names = ("out", "dx") if contender.inputs == "x" else ("out", "dq", "dk", "dv")
    pairs = zip(names, (found, *grads), (true, *true_grads), strict=True)
    return tuple((name, relative(a.detach().cpu(), b.detach())) for name, a, b in pairs)


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
