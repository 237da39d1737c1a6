"""Checks a contender against float64 on the problem itself: whole or sampled rows of out and of every gradient."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dilated_attention.bench.accuracy.correctness import WHOLE, Attend, relative
from dilated_attention.bench.accuracy.truth import SEED, Truth
from dilated_attention.bench.measure.forward_backward import inputs_of
from dilated_attention.bench.workloads.contenders import Contender, OfEmbedded
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.pattern import TopBlocks

# the last problem's results, which contenders of the same function share
_truths: dict[tuple[object, ...], Truth] = {}


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
    leaves = inputs_of(contender, problem, 7)
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
