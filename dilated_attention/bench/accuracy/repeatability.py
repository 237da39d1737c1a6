"""Accuracy and repeatability of results.

Errors against float64 within data-derived bounds, repeated runs, and changes to the inputs that must not change the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import registry
from dilated_attention.bench.accuracy.dense_float64 import RESULTS, Result, softmax_attention
from dilated_attention.bench.measure.skip import Refused, attempt, release
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import dense_pattern, dilated_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.functional import attention, dilated_attention
from dilated_attention.pattern import HeadOffsets
from dilated_attention.testing import FLOAT64_TOLERANCE, largest, low_precision_bound, max_error, relative_bound

KINDS = {"dense": dense_pattern, "dilated": dilated_pattern}
PLAIN = "plain softmax"
# limit for the backend that materializes the scores
_MOST_PLAIN_POSITIONS = 16384


@dataclass(frozen=True)
class Call:
    """One backend's attention of one kind: q, k, v → (out, lse)."""

    kind: str
    backend: str
    problem: Problem
    deterministic: bool = False
    precision: str = "native"
    head_offsets: HeadOffsets = "cyclic"

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.backend == "math" and self.problem.num_positions > _MOST_PLAIN_POSITIONS:
            raise Refused(f"materialises scores: measured to {_MOST_PLAIN_POSITIONS:,} positions")
        options: dict[str, Any] = {"is_causal": self.problem.is_causal, "return_lse": True, "backend": self.backend}
        options |= {"deterministic": self.deterministic, "precision": self.precision}
        if self.kind == "dense":
            found: tuple[torch.Tensor, torch.Tensor] = attention(q, k, v, **options)
        else:
            found = dilated_attention(q, k, v, *self.problem.branches, head_offsets=self.head_offsets, **options)
        return found

    def results(self, seed: int = 0) -> Result:
        """Returns all results on the problem's random inputs."""
        leaves, dout = self.problem.qkv(seed), self.problem.draw(self.problem.num_heads, seed + 500)
        out, lse = self(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        return {name: x.detach() for name, x in zip(RESULTS, (out, lse, *grads), strict=True)}

    def forward(self, seed: int = 0) -> Result:
        with torch.no_grad():
            out, lse = self(*self.problem.qkv(seed))
        return {"out": out, "lse": lse}


def backends(chosen: Sequence[str] | None = None) -> list[str]:
    """Returns every backend, or those ``chosen``, the library's own choice first. 8-bit products are measured separately."""
    if chosen is not None:
        return list(chosen)
    return ["auto", *(name for name in registry.names() if "fp8" not in registry.get(name).capabilities.precisions)]


def errors(kind: str, problem: Problem, extra: dict[str, Any], *, chosen: Sequence[str] | None = None) -> list[Row]:
    """Returns a row for plain softmax attention in the same dtype, and one for every backend.

    ``<result>_max`` = E, the largest absolute error; ``<result>_share`` is E as a share of the bound 2·E(plain) + one rounding. The
    relative errors ‖found − true‖ / ‖true‖ are in ``errors``.
    """
    pattern = KINDS[kind](problem)
    with torch.no_grad():
        q, k, v = (x.detach() for x in problem.qkv())
        dout = problem.draw(problem.num_heads, 500)
        half = problem.dtype if problem.dtype.itemsize == 2 else None
        exact = functools.partial(softmax_attention, pattern, q, k, v, dout, is_causal=problem.is_causal)
        truth = exact(dtype=torch.float64, rounds_out=half)
        plain = exact(dtype=problem.dtype)
        float32_lse = plain["lse"] if half is None else exact(dtype=torch.float32)["lse"]
    bounds = _bounds(problem.dtype, plain, truth, float32_lse)
    case = problem.case | extra | {"part": "error", "kind": kind}
    rows = [_compared(PLAIN, case, plain, truth, {})]
    del plain
    for name in backends(chosen):
        found = attempt(Call(kind, name, problem).results, foreign=True)
        rows.append(
            Row(name=name, case=case, note=found.note) if found.value is None else _compared(name, case, found.value, truth, bounds)
        )
        del found
        release()
    return rows


def errors_in_8_bits(kind: str, problem: Problem, extra: dict[str, Any]) -> list[Row]:
    """Returns forward errors of plain softmax attention on inputs rounded to e4m3, and of the backends that compute such products."""
    pattern = KINDS[kind](problem)
    with torch.no_grad():
        q, k, v = (x.detach() for x in problem.qkv())
        dout = problem.draw(problem.num_heads, 500)
        truth = softmax_attention(pattern, q, k, v, dout, is_causal=problem.is_causal, dtype=torch.float64)
        q, k, v = (_in_8_bits(x) for x in (q, k, v))
        plain = softmax_attention(pattern, q, k, v, dout, is_causal=problem.is_causal, dtype=torch.float32)
    truth, plain = ({name: result[name] for name in ("out", "lse")} for result in (truth, plain))
    case = problem.case | extra | {"part": "error", "kind": kind, "dtype": "fp8"}
    rows = [_compared(PLAIN, case, plain, truth, {})]
    for name in (name for name in registry.names() if "fp8" in registry.get(name).capabilities.precisions):
        found = attempt(Call(kind, name, problem, precision="fp8").forward, foreign=True)
        rows.append(Row(name=name, case=case, note=found.note) if found.value is None else _compared(name, case, found.value, truth, {}))
        release()
    return rows


def _in_8_bits(x: torch.Tensor) -> torch.Tensor:
    scale = 448.0 / x.abs().max().float().clamp(min=1e-30)
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


def _bounds(dtype: torch.dtype, plain: Result, truth: Result, float32_lse: torch.Tensor) -> dict[str, float]:
    """Returns the bounds that ``dilated_attention.testing.measure`` defines."""
    if dtype is torch.float64:
        return {name: relative_bound(truth[name], FLOAT64_TOLERANCE) for name in RESULTS}
    bounds = {name: low_precision_bound(plain[name], truth[name], dtype) for name in RESULTS}
    if dtype is not torch.float32:
        for name in ("dq", "dk"):
            bounds[name] += 2 * largest(truth[f"{name} of rounding"])
        bounds["lse"] = low_precision_bound(float32_lse, truth["lse"], torch.float32) + torch.finfo(dtype).eps / 8
    return bounds


def _compared(name: str, case: dict[str, Any], found: Result, truth: Result, bounds: dict[str, float]) -> Row:
    worst = {key: max_error(x, truth[key]) for key, x in found.items()}
    values = {f"{key}_max": error for key, error in worst.items()}
    values |= {f"{key}_share": worst[key] / bound for key, bound in bounds.items()}
    return Row(name=name, case=case, values=values, errors={key: relative(x, truth[key]) for key, x in found.items()})


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    """Returns ‖found − true‖ / ‖true‖ over finite elements; infinite where only one of the two is finite."""
    found, true = found.double(), true.double()
    if not torch.equal(found.isfinite(), true.isfinite()):
        return torch.inf
    kept = true.isfinite()
    return float((found[kept] - true[kept]).norm() / true[kept].norm().clamp(min=1e-300))


def repeats(kind: str, problem: Problem, runs: int, extra: dict[str, Any], *, chosen: Sequence[str] | None = None) -> list[Row]:
    """Runs the same inputs ``runs`` times, with and without ``deterministic``.

    Values: ``<result>_equal_runs``, the number of runs that are equal bit for bit, and ``<result>_spread``, the largest relative
    difference of a run from the first.
    """
    rows = []
    for name in backends(chosen):
        for deterministic in (False, True):
            call = Call(kind, name, problem, deterministic=deterministic)
            case = problem.case | extra | {"part": "repeat", "kind": kind, "deterministic": deterministic}
            found = attempt(functools.partial(_repeated, call, runs), foreign=True)
            rows.append(Row(name=name, case=case, values=found.value or {}, note=found.note))
            release()
    return rows


def _repeated(call: Call, runs: int) -> dict[str, float]:
    first = call.results()
    equal, spread = dict.fromkeys(first, 1), dict.fromkeys(first, 0.0)
    for _ in range(runs - 1):
        again = call.results()
        for key, x in again.items():
            equal[key] += int(torch.equal(x, first[key]))
            spread[key] = max(spread[key], relative(x, first[key]))
    values: dict[str, float] = {"runs": runs}
    return values | {f"{key}_equal_runs": count for key, count in equal.items()} | {f"{key}_spread": most for key, most in spread.items()}


def invariances(kind: str, problem: Problem, extra: dict[str, Any], *, chosen: Sequence[str] | None = None) -> list[Row]:
    """Applies changes that must change nothing but the order of operations.

    Values: the largest absolute ``difference`` of out, and whether it is ``equal`` bit for bit.
    """
    rows = []
    for name in backends(chosen):
        for what, compare in INVARIANCES.items():
            case = problem.case | extra | {"part": "invariance", "kind": kind, "change": what}
            found = attempt(functools.partial(compare, kind, name, problem), foreign=True)
            if found.value is not None:
                before, after = found.value
                values = {"difference": max_error(before, after), "equal": int(torch.equal(before, after))}
                rows.append(Row(name=name, case=case, values=values))
            else:
                rows.append(Row(name=name, case=case, note=found.note))
    return rows


Pair = tuple[torch.Tensor, torch.Tensor]


def _alone(kind: str, backend: str, problem: Problem) -> Pair:
    """Compares a sequence in a batch with the same sequence alone."""
    call, leaves = _of(kind, backend, problem)
    return call(*leaves)[0][:1], call(*(x[:1] for x in leaves))[0]


def _shuffled(kind: str, backend: str, problem: Problem) -> Pair:
    call, leaves = _of(kind, backend, problem)
    order = torch.arange(problem.batch_size - 1, -1, -1, device=problem.device)
    return call(*leaves)[0][order], call(*(x[order] for x in leaves))[0]


def _heads(kind: str, backend: str, problem: Problem) -> Pair:
    """Compares the heads with the same heads in another order, all with the same offsets."""
    call, leaves = _of(kind, backend, problem, head_offsets="zero")
    return call(*leaves)[0].roll(1, 2), call(*(x.roll(1, 2) for x in leaves))[0]


def _later(kind: str, backend: str, problem: Problem) -> Pair:
    """Causal attention: replaces the tokens of the second half."""
    call, leaves = _of(kind, backend, replace(problem, is_causal=True))
    middle = problem.num_positions // 2
    others = [torch.cat((x[:, :middle], x[:, middle:].flip(1)), 1) for x in leaves]
    return call(*leaves)[0][:, :middle], call(*others)[0][:, :middle]


INVARIANCES: dict[str, Callable[[str, str, Problem], Pair]] = {
    "a sequence alone or in a batch": _alone,
    "order of sequences": _shuffled,
    "order of heads": _heads,
    "later tokens (causal)": _later,
}


def _of(kind: str, backend: str, problem: Problem, **settings: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    return torch.no_grad()(Call(kind, backend, problem, **settings)), [x.detach() for x in problem.qkv()]
