"""Checks a contender against float64: completely on a short sequence, and in sampled rows on the problem itself."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.measure.forward_backward import inputs_of
from dilated_attention.bench.workloads.contenders import Contender, OfEmbedded
from dilated_attention.bench.workloads.problem import Problem


def check(contender: Contender, problem: Problem, attend: Attend) -> dict[str, float]:
    """Returns relative errors against float64: of everything at ``correctness.WHOLE`` positions, and of sampled rows of ``problem`` itself.

    Blocks chosen by content are those that the pattern chooses for the same q and k. A function of x, or one whose pairs no single pattern
    describes, is compared with itself on plain PyTorch in float64 instead.
    """
    small = problem.reduced(correctness.WHOLE)
    errors = dict(_small_errors(contender, small))
    pattern = contender.pattern(problem)
    if contender.inputs == "qkv" and pattern is not None and problem.num_positions > small.num_positions:
        leaves = problem.qkv(7)
        with torch.no_grad():
            out = whole(attend)(*leaves)
        errors["sampled out"] = correctness.sampled_error(pattern, problem, leaves, out)
    return errors


@functools.lru_cache(maxsize=1024)
def _small_errors(contender: Contender, small: Problem) -> tuple[tuple[str, float], ...]:
    """Returns the errors of a full comparison; computed once per process, as it is the same for all longer sequences of a suite."""
    attend = whole(contender.make(small))
    if contender.chooses is not None:
        single = replace(small, batch_size=1)
        q, k, _ = (x.detach() for x in single.qkv(7))
        picked = contender.chooses(small).choose(q, k, is_causal=small.is_causal)
        errors = correctness.whole_errors(attend, picked, single, gradients=contender.trains)
    else:
        pattern = contender.pattern(small)
        if contender.inputs == "x" or pattern is None:
            errors = _against_itself(contender, small, attend)
        else:
            errors = correctness.whole_errors(attend, pattern, small, gradients=contender.trains)
    return tuple(errors.items())


def _against_itself(contender: Contender, problem: Problem, attend: Attend) -> dict[str, float]:
    """Returns the errors of out and of the input gradients against the same module in float64, which runs on plain PyTorch."""
    exact = replace(problem, dtype=torch.float64, device=torch.device("cpu"))
    leaves = inputs_of(contender, problem, 7)
    dout = torch.randn_like(leaves[0]).detach()
    copies = [x.detach().cpu().double().requires_grad_() for x in leaves]
    reference = (contender.reference or contender.make)(exact)
    module = module_of(attend)
    if module is not None and isinstance(reference, OfEmbedded):
        reference.module.load_state_dict({name: x.detach().cpu().double() for name, x in module.state_dict().items()})
    found = attend(*leaves)
    true = reference(*copies)
    grads = torch.autograd.grad(found, leaves, dout)
    true_grads = torch.autograd.grad(true, copies, dout.cpu().double())
    names = ("out", "dx") if contender.inputs == "x" else ("out", "dq", "dk", "dv")
    return {
        name: float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm())
        for name, a, b in zip(names, (found, *grads), (true, *true_grads), strict=True)
    }


def whole(attend: Attend) -> Attend:
    """Returns ``attend`` as a function of whole sequences, where it is one of this process's part."""
    found: Attend = getattr(attend, "whole", attend)
    return found


def module_of(attend: Attend) -> torch.nn.Module | None:
    """Returns the module with projections behind ``attend``, if there is one."""
    inner = getattr(attend, "__self__", attend)
    inner = getattr(inner, "part", inner)
    return inner.module if isinstance(inner, OfEmbedded) else None
