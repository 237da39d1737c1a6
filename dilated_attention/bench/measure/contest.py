"""Measures attention contenders on one problem: correctness first, then the time of each pass in turns, memory, and rates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.accuracy.contender_check import check, forget
from dilated_attention.bench.measure.forward_backward import FLOPS, HEAVY, PASSES, allocated, call_of, inputs_of, part_of, share
from dilated_attention.bench.measure.skip import attempt, release
from dilated_attention.bench.measure.timing import Timing, call_figures, interleaved, one_call, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.report.tables import ESTIMATED
from dilated_attention.bench.workloads.contenders import Contender, Costs
from dilated_attention.bench.workloads.problem import Problem

# FLOPs of a dense forward (about 0.1 s) from which a shorter sequence is timed first
_WORTH_A_PROBE = {"cuda": 3e13, "cpu": 1e10}
# maximum length of that sequence: kernels have reached their full rate there
_LONGEST_PROBE = 2**15
Agree = Callable[[float], float] | None


@dataclass
class _Able:
    """A contender that can run a problem, or a ``note`` on why not. ``expected``: seconds of a forward; None where it is short."""

    contender: Contender
    problem: Problem
    attend: correctness.Attend | None = None
    costs: Costs | None = None
    errors: dict[str, float] = field(default_factory=dict)
    expected: float | None = None
    note: str = ""
    # why it cannot run passes with gradients
    no_gradient: str = ""

    def why_not(self, which: str, longest: float | None) -> str:
        """Returns why a pass is not run: no memory for gradients, or longer than ``longest`` seconds per call; "" where it is."""
        if which != "forward" and self.no_gradient:
            return self.no_gradient
        seconds = (self.expected or 0.0) * FLOPS[which] / FLOPS["forward"]
        return f"{ESTIMATED}{duration(seconds)}" if longest is not None and seconds > longest else ""

    def has(self, which: str) -> bool:
        return which in self.costs[0] if self.costs is not None else which == "forward" or self.contender.trains

    def call(self, which: str, shared: dict[Any, list[Any]]) -> Callable[[], Any]:
        if self.costs is not None:
            return self.costs[0][which]
        assert self.attend is not None
        return call_of(self.contender, self.attend, self.problem, which, shared)


def measure(
    contenders: Iterable[Contender],
    problem: Problem,
    *,
    passes: Sequence[str] = PASSES,
    seconds: float = 0.5,
    memory: bool = False,
    longest: float | None = None,
    agree: Agree = None,
    ways: Sequence[str] = (),
    extra: dict[str, Any] | None = None,
) -> list[Row]:
    """Returns a row for each contender and pass: ``ms``, its percentiles, ``tflops``; with ``memory`` also ``peak_bytes`` without inputs.

    A contender that refuses, raises, runs out of memory or is wrong gets one row without figures, and a note. Without ``passes`` there is a
    row of errors for each.

    Args:
        longest: seconds that a call may take; a call that is expected to take longer, judging by a shorter sequence, is not run, and its
            note gives the expected time. None for no limit.
        agree: see ``interleaved``: where several processes measure together, all of them call this.
        ways: see ``call_figures``.
    """
    rows: list[Row] = []
    able: list[_Able] = []
    case = problem.case | (extra or {})
    for contender in contenders:
        found = attempt(functools.partial(_checked, contender, problem, passes, longest, agree), foreign=True)
        one = found.value
        if one is None or (one.note and not one.note.startswith(ESTIMATED)):
            rows.append(Row(name=contender.name, case=case, errors={} if one is None else one.errors, note=one.note if one else found.note))
        elif one.note or not passes:
            those = [case | {"pass": which} for which in passes if one.has(which)] or [case]
            rows += [Row(name=contender.name, case=each, errors=one.errors, note=one.why_not(each.get("pass", "forward"), 0.0)
                         if one.note else "") for each in those]  # fmt: skip
        else:
            able.append(one)
    forget()
    release(workspaces=True)
    for which in passes:
        rows += _timed(able, which, case, seconds, memory, longest, agree, ways)
        release(workspaces=True)
    return rows


def _checked(contender: Contender, problem: Problem, passes: Sequence[str], longest: float | None, agree: Agree) -> _Able:
    problem = problem if contender.of is None else contender.of(problem)
    able = _Able(contender, problem)
    if contender.costs is not None:
        able.costs = contender.costs(problem)
        return able
    able.attend = contender.make(problem)
    if longest is not None:
        able.expected = expected_seconds(contender, problem)
        if able.expected is not None and agree is not None:
            able.expected = agree(able.expected)
        able.note = able.why_not("forward", longest)
    if able.note:
        return able
    trains = contender.trains and (not passes or any(which != "forward" and not able.why_not(which, longest) for which in passes))
    verify = functools.partial(check, contender, problem, able.attend)
    checked = attempt(functools.partial(verify, gradients=trains), foreign=True)
    if checked.value is None and trains:
        # the forward alone may fit, or be all that it can
        able.no_gradient = checked.note
        checked = attempt(functools.partial(verify, gradients=False), foreign=True)
    able.errors = checked.value or {}
    able.note = checked.note or correctness.wrong(able.errors, contender.allowed(problem))
    return able


def expected_seconds(contender: Contender, problem: Problem) -> float | None:
    """Estimates the seconds of a forward, from one at an eighth of the positions or less, and the pairs of both.

    Returns None where both are short, as that says nothing.
    """
    problem = problem.plain()
    short = replace(problem, num_positions=min(problem.num_positions // 8, _LONGEST_PROBE))
    if 4 * problem.dense_pairs * problem.head_dim < _WORTH_A_PROBE.get(problem.device.type, 0.0) or short.num_positions < correctness.WHOLE:
        return None
    attend = contender.make(short)
    leaves = inputs_of(contender, part_of(contender, short))
    with torch.no_grad():
        attend(*leaves)
        seconds = min(one_call(lambda: attend(*leaves), problem.device) for _ in range(2))
    pairs, few = contender.pairs(problem), contender.pairs(short)
    return seconds * (pairs / few if pairs and few else (problem.num_positions / short.num_positions) ** 2)


def duration(seconds: float) -> str:
    """Formats two digits and a unit."""
    for most, unit, length in ((1.0, "ms", 1e-3), (100.0, "s", 1.0), (6000.0, "min", 60.0)):
        if seconds < most:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return f"{float(f'{seconds / 3600:.2g}'):g} h"


def _timed(
    able: list[_Able],
    which: str,
    case: dict[str, Any],
    seconds: float,
    memory: bool,
    longest: float | None,
    agree: Agree,
    ways: Sequence[str],
) -> list[Row]:
    rows: list[Row] = []
    case = case | {"pass": which}
    # contenders share the sets of inputs, and each cycles through them independently
    shared: dict[Any, list[Any]] = {}
    # contenders that take turns: first all of them, then one for each whose graph would leave no memory for the others
    rounds = [[one for one in able if one.has(which)]]
    for together in rounds:
        calls: dict[str, Callable[[], Any]] = {}
        values: dict[str, dict[str, float]] = {}
        notes = {one.contender.name: one.why_not(which, longest) for one in together}
        # before any call: allocated later, they would fragment memory that a larger call needs in one piece
        for one in together:
            if not notes[one.contender.name] and one.costs is None:
                attempt(functools.partial(share, one.contender, one.problem, shared))
        for one in together:
            name, device = one.contender.name, one.problem.device
            if not notes[name]:
                before = allocated(device)
                # what does not fit is excluded before the turns begin
                first = attempt(functools.partial(_first, one, which, shared, memory, ways, seconds), foreign=True)
                is_heavy = first.note == "out of memory" or allocated(device) - before > HEAVY
                if which == "backward" and is_heavy and len(together) > 1:
                    rounds.append([one])
                    del first
                    release()
                    continue
                notes[name] = first.note
                if first.value is not None:
                    calls[name], values[name] = first.value
                    del first
        by_name = {one.contender.name: one for one in together}
        timings, failed = _in_turns(calls, together[0].problem.device if together else torch.device("cpu"), seconds, agree)
        rows += [Row(name=name, case=case, note=note) for name, note in (notes | failed).items() if note]
        for name, timing in timings.items():
            one = by_name[name]
            timing = timing.scaled(1.0 if one.costs is None else one.costs[1])
            rate_of = rate(one.contender.pairs(one.problem), one.problem.head_dim, which, timing)
            if which == "forward" and one.expected is not None:
                one.expected = timing.ms / 1000 if agree is None else agree(timing.ms / 1000)
            rows.append(Row(name=name, case=case, values=timing.values() | values[name] | rate_of, errors=one.errors))
    order = [one.contender.name for one in able]
    return sorted(rows, key=lambda row: order.index(row.name))


def _in_turns(
    calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float, agree: Agree
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Returns (timings, notes of failures). Calls that fit alone may not fit together; they are then timed one by one."""
    if agree is not None:
        # processes call in lockstep: none can repeat a call that others have passed
        return interleaved(calls, device, seconds=seconds, warm=True, agree=agree), {}
    together = attempt(functools.partial(interleaved, calls, device, seconds=seconds, warm=True))
    if together.value is not None:
        return together.value, {}
    timings: dict[str, Timing] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        alone = attempt(functools.partial(interleaved, {name: call}, device, seconds=seconds, warm=True))
        timings |= alone.value or {}
        failed |= {name: alone.note} if alone.note else {}
        release(workspaces=True)
    return timings, failed


def _first(
    one: _Able, which: str, shared: dict[Any, list[Any]], memory: bool, ways: Sequence[str], seconds: float
) -> tuple[Callable[[], Any], dict[str, float]]:
    """Runs a call twice and returns (call, its peak beyond what was allocated before, and how it is seen in each of ``ways``)."""
    call, device = one.call(which, shared), one.problem.device
    call()
    values: dict[str, float] = {}
    if memory and device.type == "cuda" and one.costs is None:
        # measured on a second call: memory for compiling or tuning in the first one does not count
        values["peak_bytes"] = peak_extra(call, device) or 0
    if ways and one.costs is None:
        values |= call_figures(call, device, seconds=seconds, ways=ways)
    return call, values


def rate(pairs: int | None, head_dim: int, which: str, timing: Timing) -> dict[str, float]:
    """Returns {"tflops": …} from the pairs that a contender computes; empty where the data decides them."""
    return {} if pairs is None else {"tflops": FLOPS[which] * pairs * head_dim / timing.ms / 1e9}
