"""Measures attention contenders on one problem: correctness first, then the time of each pass in turns, memory, and rates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.accuracy.contender_check import check
from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.measure.forward_backward import FLOPS, HEAVY, PASSES, allocated, call_of, inputs_of, part_of, share
from dilated_attention.bench.measure.skip import attempt, release
from dilated_attention.bench.measure.timing import Timing, interleaved, one_call, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.report.tables import ESTIMATED
from dilated_attention.bench.workloads.contenders import Contender
from dilated_attention.bench.workloads.problem import Problem

# FLOPs of a dense forward (about 0.1 s) from which a shorter sequence is timed first
_WORTH_A_PROBE = {"cuda": 3e13, "cpu": 1e10}
# maximum length of that sequence: kernels have reached their full rate there
_LONGEST_PROBE = 2**15


def measure(
    contenders: Iterable[Contender],
    problem: Problem,
    *,
    passes: Sequence[str] = PASSES,
    seconds: float = 0.5,
    memory: bool = False,
    longest: float | None = None,
    agree: Callable[[float], float] | None = None,
    extra: dict[str, Any] | None = None,
) -> list[Row]:
    """Returns a row for each contender and pass: ``ms``, its percentiles, ``tflops``; with ``memory`` also ``peak_bytes`` without inputs.

    A contender that refuses, raises, runs out of memory or is wrong gets one row without figures, and a note.

    Args:
        longest: seconds that a call may take; a call that is expected to take longer, judging by a shorter sequence, is not run, and its
            note gives the expected time. None for no limit.
        agree: see ``interleaved``: where several processes measure together, all of them call this.
    """
    rows: list[Row] = []
    able: dict[str, _Able] = {}
    case = problem.case | (extra or {})
    for contender in contenders:
        found = attempt(functools.partial(_checked, contender, problem, longest, agree), foreign=True)
        one = found.value
        if one is None:
            rows.append(Row(name=contender.name, case=case, note=found.note))
        elif one.note.startswith(ESTIMATED):
            those = [which for which in passes if which == "forward" or contender.trains]
            rows += [Row(name=contender.name, case=case | {"pass": which}, note=_too_long(one, which, 0.0)) for which in those]
        elif one.note:
            rows.append(Row(name=contender.name, case=case, errors=one.errors, note=one.note))
        else:
            able[contender.name] = one
    release(workspaces=True)
    for which in passes:
        rows += _timed(able, problem, which, case, seconds, memory, longest, agree)
        release(workspaces=True)
    return rows


@dataclass
class _Able:
    """A contender that can run a problem, or a ``note`` on why not. ``expected``: seconds of a forward; None where it is short."""

    contender: Contender
    attend: Attend
    errors: dict[str, float] = field(default_factory=dict)
    expected: float | None = None
    note: str = ""


def _checked(contender: Contender, problem: Problem, longest: float | None, agree: Callable[[float], float] | None) -> _Able:
    attend = contender.make(problem)
    able = _Able(contender, attend)
    if longest is not None:
        able.expected = expected_seconds(contender, problem)
        if able.expected is not None and agree is not None:
            able.expected = agree(able.expected)
        able.note = _too_long(able, "forward", longest)
    if not able.note:
        able.errors = check(contender, problem, attend)
        able.note = correctness.wrong(able.errors, contender.allowed(problem))
    return able


def expected_seconds(contender: Contender, problem: Problem) -> float | None:
    """Estimates the seconds of a forward, from one at an eighth of the positions or less, and the pairs of both.

    Returns None where both are short, as that says nothing.
    """
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


def _too_long(able: _Able, which: str, longest: float | None) -> str:
    """Returns the note of a pass that would take longer than ``longest`` seconds per call; "" where it would not."""
    if longest is None or able.expected is None:
        return ""
    seconds = able.expected * FLOPS[which] / FLOPS["forward"]
    return f"{ESTIMATED}{duration(seconds)}" if seconds > longest else ""


def duration(seconds: float) -> str:
    """Formats two digits and a unit."""
    for most, unit, length in ((1.0, "ms", 1e-3), (100.0, "s", 1.0), (6000.0, "min", 60.0)):
        if seconds < most:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return f"{float(f'{seconds / 3600:.2g}'):g} h"


def _timed(
    able: dict[str, _Able],
    problem: Problem,
    which: str,
    case: dict[str, Any],
    seconds: float,
    memory: bool,
    longest: float | None,
    agree: Callable[[float], float] | None,
) -> list[Row]:
    rows: list[Row] = []
    # contenders share the sets of inputs, and each cycles through them independently
    shared: dict[str, list[Any]] = {}
    # one round for all, and one for each whose graph would leave no memory for the others
    rounds = [[one for one in able.values() if which == "forward" or one.contender.trains]]
    for together in rounds:
        calls: dict[str, Callable[[], Any]] = {}
        peaks: dict[str, int] = {}
        notes = [_too_long(one, which, longest) for one in together]
        # before any call: allocated later, they would fragment memory that a larger call needs in one piece
        for one, note in zip(together, notes, strict=True):
            if not note:
                attempt(functools.partial(share, one.contender, problem, shared))
        for one, note in zip(together, notes, strict=True):
            if not note:
                before = allocated(problem.device)
                # what does not fit is excluded before the turns begin
                first = attempt(functools.partial(_first, one, problem, which, shared, memory), foreign=True)
                is_heavy = first.note == "out of memory" or allocated(problem.device) - before > HEAVY
                if which == "backward" and is_heavy and len(together) > 1:
                    rounds.append([one])
                    del first
                    release()
                    continue
                note = first.note
                if first.value is not None:
                    calls[one.contender.name], peaks[one.contender.name] = first.value
                    del first
                    continue
            rows.append(Row(name=one.contender.name, case=case | {"pass": which}, note=note))
        timings, failed = _in_turns(calls, problem.device, seconds, agree)
        rows += [Row(name=name, case=case | {"pass": which}, note=note) for name, note in failed.items()]
        for name, timing in timings.items():
            contender = able[name].contender
            values = timing.values() | rate(contender.pairs(problem), problem.head_dim, which, timing)
            if memory and problem.device.type == "cuda":
                values["peak_bytes"] = peaks[name]
            if which == "forward" and able[name].expected is not None:
                able[name].expected = timing.ms / 1000 if agree is None else agree(timing.ms / 1000)
            rows.append(Row(name=name, case=case | {"pass": which}, values=values, errors=able[name].errors))
    return rows


def _in_turns(
    calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float, agree: Callable[[float], float] | None
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
        if alone.value is None:
            failed[name] = alone.note
        else:
            timings |= alone.value
        release(workspaces=True)
    return timings, failed


def _first(one: _Able, problem: Problem, which: str, shared: dict[str, list[Any]], memory: bool) -> tuple[Callable[[], Any], int]:
    """Runs a call once and returns (call, its peak beyond what was allocated before; 0 unless ``memory`` is requested and counted)."""
    call = call_of(one.contender, one.attend, problem, which, shared)
    call()
    # measured on a second call: memory for compiling or tuning in the first one does not count
    return call, (peak_extra(call, problem.device) or 0) if memory and problem.device.type == "cuda" else 0


def rate(pairs: int | None, head_dim: int, which: str, timing: Timing) -> dict[str, float]:
    """Returns {"tflops": …} from the pairs that a contender computes; empty where the data decides them."""
    return {} if pairs is None else {"tflops": FLOPS[which] * pairs * head_dim / timing.ms / 1e9}
