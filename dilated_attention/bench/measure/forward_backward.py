"""Forward, backward or both of a contender, called on several sets of inputs in turn, so that caches do not distort the times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.workloads.contenders import Contender, Costs
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import OnShards

PASSES = ("forward", "backward", "both")
# FLOPs per pair and head dimension: two matrix products forward, five backward
FLOPS = {"forward": 4, "backward": 10, "both": 14}
Call = Callable[[], Any]
# bytes of a graph from which a backward has one
_HEAVY = 2**30


def inputs_of(contender: Contender, problem: Problem, seed: int = 0) -> list[torch.Tensor]:
    """Returns x, or q, k and v."""
    return [problem.embedded(seed)] if contender.inputs == "x" else problem.qkv(seed)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def call_of(contender: Contender, made: Attend | Costs, problem: Problem, which: str, shared: dict[Any, list[Any]]) -> Call:
    """Returns a call of one pass on the next set of inputs; results are dropped at once.

    The backward runs on graphs that are made here, and freed with the call.

    Args:
        made: what the contender makes of the problem.
        shared: the sets of inputs that the calls of one problem share; {} at first.
    """
    if isinstance(made, Costs):
        return made.calls[which]
    *sets, dout = share(contender, made, problem, shared)
    following = itertools.cycle(sets).__next__
    if which == "forward":

        def forward() -> None:
            with torch.no_grad():
                made(*following())

        return forward
    if which == "both":

        def both() -> None:
            leaves = following()
            torch.autograd.grad(made(*leaves), leaves, dout)

        return both
    before = _allocated(problem.device)
    graphs = [(made(*sets[0]), sets[0])]
    if _allocated(problem.device) - before < _HEAVY:
        graphs += [(made(*leaves), leaves) for leaves in sets[1:]]
    next_graph = itertools.cycle(graphs).__next__

    def backward() -> None:
        out, leaves = next_graph()
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return backward


def share(contender: Contender, made: Attend, problem: Problem, shared: dict[Any, list[Any]]) -> list[Any]:
    """Returns the sets of inputs that contenders of this kind cycle through, then dout, of the part that this process holds; created once.

    There are eight small sets, two where one exceeds any cache, and one where memory is scarce (from 4 GiB on).
    """
    kind = (contender.inputs, problem.queries, problem.kv_heads, problem.data)
    if kind not in shared:
        part = made.local(problem) if isinstance(made, OnShards) else problem
        dout = part.dout()
        count = 1 if problem.bytes >= 4 * 2**30 else max(2, min(8, 2**28 // max(problem.bytes, 1)))
        sets = [inputs_of(contender, part, i) for i in range(count)]
        shared[kind] = [*sets, dout.flatten(2) if contender.inputs == "x" else dout]
    return shared[kind]
