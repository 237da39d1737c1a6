"""Repeated runs of the same inputs, and changes to the inputs that must not change the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import registry
from dilated_attention.bench.accuracy.correctness import RESULTS, Attend, relative
from dilated_attention.bench.measure.skip import attempt, release
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import of_backend
from dilated_attention.bench.workloads.problem import Problem

KINDS = ("dense", "dilated")


def backends(chosen: Sequence[str] | None = None) -> list[str]:
    """Returns every backend, or those ``chosen``, the library's own choice first. 8-bit products are measured separately."""
    if chosen is not None:
        return list(chosen)
    return ["auto", *(name for name in registry.names() if "fp8" not in registry.get(name).capabilities.precisions)]


def repeats(kind: str, problem: Problem, runs: int, *, chosen: Sequence[str] | None = None) -> list[Row]:
    """Runs the same inputs ``runs`` times, with and without ``deterministic``.

    Values: ``<result>_equal_runs``, the number of runs that are equal bit for bit, and ``<result>_spread``, the largest relative
    difference of a run from the first.
    """
    rows = []
    for name in backends(chosen):
        for deterministic in (False, True):
            attend = of_backend(name, kind, deterministic=deterministic).make
            case = problem.case | {"part": "repeat", "kind": kind, "deterministic": deterministic}
            found = attempt(functools.partial(_repeated, attend, problem, runs), foreign=True)
            rows.append(Row(name=name, case=case, values=found.value or {}, note=found.note))
            release()
    return rows


def _repeated(make: Callable[[Problem], Attend], problem: Problem, runs: int) -> dict[str, float]:
    attend, leaves, dout = make(problem), problem.qkv(), problem.dout()

    def once() -> dict[str, torch.Tensor]:
        out = attend(*leaves)
        return dict(zip(RESULTS, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))

    first = once()
    equal, spread = dict.fromkeys(first, 1), dict.fromkeys(first, 0.0)
    for _ in range(runs - 1):
        for key, x in once().items():
            equal[key] += int(torch.equal(x, first[key]))
            spread[key] = max(spread[key], relative(x, first[key].double()))
    values: dict[str, float] = {"runs": runs}
    return values | {f"{key}_equal_runs": count for key, count in equal.items()} | {f"{key}_spread": most for key, most in spread.items()}


def invariances(kind: str, problem: Problem, *, chosen: Sequence[str] | None = None) -> list[Row]:
    """Applies changes that must change nothing but the order of operations: the largest absolute ``difference`` of out, and ``equal``."""
    rows = []
    for name in backends(chosen):
        for what, (compare, options) in INVARIANCES.items():
            case = problem.case | {"part": "invariance", "kind": kind, "change": what}
            options = {} if kind == "dense" else options
            found = attempt(functools.partial(_compared, compare, of_backend(name, kind, **options).make, problem), foreign=True)
            rows.append(Row(name=name, case=case, values=found.value or {}, note=found.note))
    return rows


def _compared(compare: Any, make: Callable[[Problem], Attend], problem: Problem) -> dict[str, float]:
    leaves = [x.detach() for x in problem.qkv()]
    with torch.no_grad():
        before, after = compare(make, problem, leaves)
    return {"difference": float((before.double() - after.double()).abs().max()), "equal": int(torch.equal(before, after))}


Pair = tuple[torch.Tensor, torch.Tensor]


def _alone(make: Any, problem: Problem, leaves: list[torch.Tensor]) -> Pair:
    attend = make(problem)
    return attend(*leaves)[:1], attend(*(x[:1] for x in leaves))


def _shuffled(make: Any, problem: Problem, leaves: list[torch.Tensor]) -> Pair:
    attend = make(problem)
    return attend(*leaves).flip(0), attend(*(x.flip(0) for x in leaves))


def _heads(make: Any, problem: Problem, leaves: list[torch.Tensor]) -> Pair:
    attend = make(problem)
    return attend(*leaves).roll(1, 2), attend(*(x.roll(1, 2) for x in leaves))


def _later(make: Any, problem: Problem, leaves: list[torch.Tensor]) -> Pair:
    """Causal attention: replaces the tokens of the second half."""
    attend = make(replace(problem, is_causal=True))
    middle = problem.num_positions // 2
    others = [torch.cat((x[:, :middle], x[:, middle:].flip(1)), 1) for x in leaves]
    return attend(*leaves)[:, :middle], attend(*others)[:, :middle]


# the function, and options of dilated attention: heads can change places where all have the same offsets
INVARIANCES: dict[str, tuple[Callable[..., Pair], dict[str, Any]]] = {
    "a sequence alone or in a batch": (_alone, {}),
    "order of sequences": (_shuffled, {}),
    "order of heads": (_heads, {"head_offsets": "zero"}),
    "later tokens (causal)": (_later, {}),
}
