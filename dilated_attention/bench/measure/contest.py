"""Measures attention contenders on one problem: correctness first, then the time of each pass in turns, memory, and rates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.accuracy.contender_check import check, forget
from dilated_attention.bench.measure.forward_backward import FLOPS, HEAVY, PASSES, allocated, call_of, share
from dilated_attention.bench.measure.skip import Refused, attempt, release
from dilated_attention.bench.measure.timing import Timing, call_figures, interleaved, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import Contender, Costs
from dilated_attention.bench.workloads.problem import Problem

# FLOP/s of the best kernels on a Hopper GPU, and of a CPU's thread: what takes too long at this rate is not begun
_GPU_RATE, _THREAD_RATE = 6e14, 5e10


@dataclass
class _Able:
    """A contender that can run a problem, or a ``note`` on why not. ``expected``: seconds of a forward, as measured once it is."""

    contender: Contender
    problem: Problem
    attend: correctness.Attend | None = None
    costs: Costs | None = None
    errors: dict[str, float] = field(default_factory=dict)
    expected: float = 0.0
    note: str = ""
    # why it cannot run passes with gradients
    no_gradient: str = ""

    def why_not(self, which: str, longest: float | None) -> str:
        """Returns why a pass is not run: no memory for gradients, or longer than ``longest`` seconds per call; "" where it is."""
        seconds = self.expected * FLOPS[which] / FLOPS["forward"]
        too_long = f"longer than {longest:g} s a call" if longest is not None and seconds > longest else ""
        return (which != "forward" and self.no_gradient) or too_long

    def has(self, which: str) -> bool:
        return which in self.costs[0] if self.costs is not None else which == "forward" or self.contender.trains

    def first(
        self, which: str, shared: dict[Any, list[Any]], memory: bool, ways: Sequence[str], seconds: float
    ) -> tuple[Callable[[], Any], dict[str, float]]:
        """Runs a call twice and returns (call, its peak beyond what was allocated before, and how it is seen in each of ``ways``)."""
        if self.costs is not None:
            call = self.costs[0][which]
            call()
            return call, {}
        assert self.attend is not None
        call = call_of(self.contender, self.attend, self.problem, which, shared)
        call()
        # measured on a second call: memory for compiling or tuning in the first one does not count
        peak = peak_extra(call, self.problem.device) if memory else None
        values: dict[str, float] = {} if peak is None else {"peak_bytes": peak}
        return call, values | (call_figures(call, self.problem.device, seconds=seconds, ways=ways) if ways else {})

    def values(self, which: str, timing: Timing) -> dict[str, float]:
        """Returns the time, and ``tflops`` from the pairs that it computes, where the data does not decide them."""
        factor = 1.0 if self.costs is None else self.costs[1]
        found = {key: value if key == "samples" else factor * value for key, value in timing.values().items()}
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
        found = attempt(functools.partial(_checked, contender, problem, passes, longest), foreign=True)
        one = found.value
        if one is not None and passes and not one.note:
            able.append(one)
        else:
            rows.append(Row(name=contender.name, case=case, errors=one.errors if one else {}, note=one.note if one else found.note))
    forget()
    release(workspaces=True)
    for which in passes:
        timed = {row.name: row for row in _timed([one for one in able if one.has(which)], which, case, seconds, memory, longest, ways)}
        rows += [timed[one.contender.name] for one in able if one.contender.name in timed]
        release(workspaces=True)
    return rows


def _checked(contender: Contender, problem: Problem, passes: Sequence[str], longest: float | None) -> _Able:
    problem = problem if contender.of is None else contender.of(problem)
    able = _Able(contender, problem)
    if contender.costs is not None:
        able.costs = contender.costs(problem)
        return able
    able.attend = contender.make(problem)
    rate = _GPU_RATE if problem.device.type == "cuda" else _THREAD_RATE * torch.get_num_threads()
    able.expected = FLOPS["forward"] * (contender.pairs(problem) or 0) * problem.head_dim / rate
    if too_long := able.why_not("forward", longest):
        raise Refused(too_long)
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


def _timed(
    able: list[_Able], which: str, case: dict[str, Any], seconds: float, memory: bool, longest: float | None, ways: Sequence[str]
) -> list[Row]:
    """Times contenders in turns; each alone, after them, whose graph would leave no memory for the others, or all where they do not fit."""
    # contenders share the sets of inputs, and each cycles through them independently
    shared: dict[Any, list[Any]] = {}
    notes = {one.contender.name: one.why_not(which, longest) for one in able}
    # before any call: allocated later, they would fragment memory that a larger call needs in one piece
    for one in able:
        if not notes[one.contender.name] and one.costs is None:
            attempt(functools.partial(share, one.contender, one.problem, shared))
    calls: dict[str, Callable[[], Any]] = {}
    values: dict[str, dict[str, float]] = {}
    alone: list[_Able] = []
    for one in able:
        name, device = one.contender.name, one.problem.device
        if notes[name]:
            continue
        before = allocated(device)
        # what does not fit is excluded before the turns begin
        first = attempt(functools.partial(one.first, which, shared, memory, ways, seconds), foreign=True)
        is_heavy = first.note == "out of memory" or allocated(device) - before > HEAVY
        if which == "backward" and is_heavy and len(able) > 1:
            alone.append(one)
            del first
            release()
            continue
        notes[name] = first.note
        if first.value is not None:
            calls[name], values[name] = first.value
        del first
    timings: dict[str, Timing] = {}
    if calls:
        together = attempt(functools.partial(interleaved, calls, device, seconds=seconds, warm=True))
        timings = together.value or {}
        if not timings and len(able) > 1:
            alone += [one for one in able if one.contender.name in calls]
        elif not timings:
            notes[name] = together.note
    calls.clear()
    shared.clear()
    case_of_pass = case | {"pass": which}
    rows = [Row(name=name, case=case_of_pass, note=note) for name, note in notes.items() if note]
    for one in able:
        if timing := timings.get(one.contender.name):
            if which == "forward":
                one.expected = timing.ms / 1000
            figures = one.values(which, timing) | values[one.contender.name]
            rows.append(Row(name=one.contender.name, case=case_of_pass, values=figures, errors=one.errors))
    for one in alone:
        release(workspaces=True)
        rows += _timed([one], which, case, seconds, memory, longest, ways)
    return rows
