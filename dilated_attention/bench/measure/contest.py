"""Measures attention contenders on one problem: correctness first, then the time of each pass in turns, memory, and rates.

Each is called on several sets of inputs in turn, so that caches do not distort the times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.bench import accuracy
from dilated_attention.bench.accuracy import check, forget
from dilated_attention.bench.measure.limits import Refused, attempt, release
from dilated_attention.bench.measure.timing import Timing, call_figures, interleaved, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import Attend, Contender, Costs
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import OnShards

PASSES = ("forward", "backward", "both")
# FLOPs per pair and head dimension: two matrix products forward, five backward
FLOPS = {"forward": 4, "backward": 10, "both": 14}
Call = Callable[[], Any]
# bytes of a graph from which a backward has one
_HEAVY = 2**30
# FLOP/s of the best kernels on a Hopper GPU, and of a CPU's thread: what takes too long at this rate is not begun
_GPU_RATE, _THREAD_RATE = 6e14, 5e10


@dataclass
class _Able:
    """A contender that can run a problem. ``expected``: seconds of a forward, as measured once it is."""

    contender: Contender
    problem: Problem
    made: Attend | Costs
    errors: dict[str, float] = field(default_factory=dict)
    expected: float = 0.0
    # why it cannot run passes with gradients
    no_gradient: str = ""

    def why_not(self, which: str, longest: float | None) -> str:
        """Returns why a pass is not run: no memory for gradients, or longer than ``longest`` seconds per call; "" where it is."""
        seconds = self.expected * FLOPS[which] / FLOPS["forward"]
        too_long = f"longer than {longest:g} s a call" if longest is not None and seconds > longest else ""
        return (which != "forward" and self.no_gradient) or too_long

    def has(self, which: str) -> bool:
        return which in self.made.calls if isinstance(self.made, Costs) else which == "forward" or self.contender.trains

    def values(self, which: str, timing: Timing) -> dict[str, float]:
        """Returns the time, and ``tflops`` from the pairs that it computes, where the data does not decide them."""
        factor = self.made.factor if isinstance(self.made, Costs) else 1.0
        found = {key: value if key == "samples" else factor * value for key, value in timing.items()}
        pairs = self.contender.pairs(self.problem)
        return found | ({} if pairs is None else {"tflops": FLOPS[which] * pairs * self.problem.head_dim / found["ms"] / 1e9})


def measure(
    contenders: Iterable[Contender],
    problem: Problem,
    *,
    passes: Sequence[str] = PASSES,
    seconds: float = 0.5,
    memory: bool = False,
    longest: float | None = None,
    ways: Sequence[str] = (),
    extra: dict[str, Any] | None = None,
) -> list[Row]:
    """Returns a row for each contender and pass: ``ms``, its percentiles, ``tflops``; with ``memory`` also ``peak_bytes`` without inputs.

    A contender that refuses, raises, runs out of memory or is wrong gets one row without figures, and a note. Without ``passes`` there is a
    row of errors for each.

    Args:
        longest: seconds that a call may take; a call that is expected to take longer, by its FLOPs or its forward, is not run. None for
            no limit.
        ways: see ``call_figures``.
    """
    rows: list[Row] = []
    able: list[_Able] = []
    case = problem.case | (extra or {})
    for contender in contenders:
        one, note = attempt(_checked, contender, problem, passes, longest, foreign=True)
        errors = one.errors if one else {}
        note = note or accuracy.wrong(errors, contender.allowed(problem))
        if one is not None and passes and not note:
            able.append(one)
        else:
            rows.append(Row(name=contender.name, case=case, errors=errors, note=note))
    forget()
    for which in passes:
        release(workspaces=True)
        rows += _timed([one for one in able if one.has(which)], which, case, seconds, memory, longest, ways)
    release(workspaces=True)
    return rows


def _checked(contender: Contender, problem: Problem, passes: Sequence[str], longest: float | None) -> _Able:
    problem = problem if contender.of is None else contender.of(problem)
    able = _Able(contender, problem, contender.make(problem))
    if isinstance(able.made, Costs):
        return able
    rate = _GPU_RATE if problem.device.type == "cuda" else _THREAD_RATE * torch.get_num_threads()
    able.expected = FLOPS["forward"] * (contender.pairs(problem) or 0) * problem.head_dim / rate
    if too_long := able.why_not("forward", longest):
        raise Refused(too_long)
    trains = contender.trains and (not passes or any(which != "forward" and not able.why_not(which, longest) for which in passes))
    verify = functools.partial(check, contender, problem, able.made)
    if trains:
        errors, able.no_gradient = attempt(functools.partial(verify, gradients=True), foreign=True)
        able.errors = errors or {}
    if not able.errors:
        # the forward alone may fit, or be all that it can
        able.errors = verify(gradients=False)
    return able


def _timed(
    able: list[_Able], which: str, case: dict[str, Any], seconds: float, memory: bool, longest: float | None, ways: Sequence[str]
) -> list[Row]:
    """Times contenders in turns; each alone where they do not fit together."""
    # contenders share the sets of inputs, and each cycles through them independently
    shared: dict[Any, list[Any]] = {}
    rows = {one.contender.name: Row(name=one.contender.name, case=case | {"pass": which}, note=one.why_not(which, longest)) for one in able}
    able = [one for one in able if not rows[one.contender.name].note]
    # before any call: allocated later, they would fragment memory that a larger call needs in one piece
    for one in able:
        if not isinstance(one.made, Costs):
            attempt(share, one.contender, one.made, one.problem, shared)
    calls: dict[str, Callable[[], Call]] = {}
    values: dict[str, dict[str, float]] = {}
    for one in able:
        name, device = one.contender.name, one.problem.device
        make = functools.partial(call_of, one.contender, one.made, one.problem, which, shared)
        is_cost = isinstance(one.made, Costs)
        # what does not fit is excluded before the turns begin
        first, note = attempt(_first, make, device, memory and not is_cost, seconds, () if is_cost else ways, foreign=True)
        rows[name] = replace(rows[name], note=note)
        if first is not None:
            calls[name], values[name] = make, first
    timings: dict[str, Timing] = {}
    for names in (list(calls), *([name] for name in calls)):
        if names and names[0] not in timings:
            timed, note = attempt(functools.partial(interleaved, {name: calls[name] for name in names}, device, seconds=seconds))
            timings |= timed or {}
            rows |= {name: replace(rows[name], note=note) for name in names}
    for one in able:
        if timing := timings.get(name := one.contender.name):
            if which == "forward":
                one.expected = timing["ms"] / 1000
            rows[name] = replace(rows[name], values=one.values(which, timing) | values[name], errors=one.errors)
    return list(rows.values())


def _first(make: Callable[[], Call], device: torch.device, memory: bool, seconds: float, ways: Sequence[str]) -> dict[str, float]:
    """Runs a call twice and returns its peak beyond what was allocated before, and how it is seen in each of ``ways``."""
    call = make()
    call()
    # measured on a second call: memory for compiling or tuning in the first one does not count
    peak = peak_extra(call, device) if memory else None
    return ({} if peak is None else {"peak_bytes": peak}) | (call_figures(call, device, seconds=seconds, ways=ways) if ways else {})


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
    if which == "backward":
        allocated = torch.cuda.memory_allocated if problem.device.type == "cuda" else lambda device: 0
        before = allocated(problem.device)
        graphs = [(made(*sets[0]), sets[0])]
        if allocated(problem.device) - before < _HEAVY:
            graphs += [(made(*leaves), leaves) for leaves in sets[1:]]
    following = itertools.cycle(graphs if which == "backward" else sets).__next__

    def call() -> None:
        if which == "forward":
            with torch.no_grad():
                made(*following())
        elif which == "both":
            leaves = following()
            torch.autograd.grad(made(*leaves), leaves, dout)
        else:
            out, leaves = following()
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return call


def share(contender: Contender, made: Attend, problem: Problem, shared: dict[Any, list[Any]]) -> list[Any]:
    """Returns the sets of inputs that contenders of this kind cycle through, then dout, of the part that this process holds; created once.

    There are eight small sets, two where one exceeds any cache, and one where memory is scarce (from 4 GiB on).
    """
    kind = (contender.inputs, problem.queries, problem.kv_heads, problem.data)
    if kind not in shared:
        part = made.local(problem) if isinstance(made, OnShards) else problem
        dout = part.dout()
        count = 1 if problem.bytes >= 4 * 2**30 else max(2, min(8, 2**28 // max(problem.bytes, 1)))
        sets = [contender.inputs_of(part, i) for i in range(count)]
        shared[kind] = [*sets, dout.flatten(2) if contender.inputs == "x" else dout]
    return shared[kind]
