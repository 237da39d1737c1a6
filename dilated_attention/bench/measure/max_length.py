"""Searches for the longest sequence that fits.

The length is doubled until memory or time runs out, then bisected; every length is checked on sampled rows.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.correctness import BOUNDS, WHOLE, Pattern, whole_errors, wrong
from dilated_attention.bench.accuracy.sampled_rows import sampled_errors
from dilated_attention.bench.measure.skip import Attempt, attempt, release
from dilated_attention.bench.measure.subprocess_runner import Peak, in_child, why_no_children
from dilated_attention.bench.measure.timing import synchronise
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import dense_pattern
from dilated_attention.bench.workloads.problem import Problem, geometric
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import DilatedPattern, LocalWindow

TIME, MEMORY = "time, not memory", "out of memory"
# the bisected lengths are multiples of this
_STEP = 1024
# an lse is a logarithm of a sum of exponentials: its error is absolute, that of sums in float32
_LSE_BOUND = 0.02


@dataclass(frozen=True)
class Kind:
    """What the search runs. Its time grows with the length to the power ``growth``."""

    name: str
    what: str
    pattern: Callable[[Problem, int], Pattern]
    growth: int

    def attend(self, problem: Problem, first: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Returns the function q, k, v → (out, lse)."""
        causal: dict[str, Any] = {"is_causal": problem.is_causal, "return_lse": True}
        if self.growth == 2:
            return functools.partial(attention, **causal)
        pattern = self.pattern(problem, first)
        if isinstance(pattern, DilatedPattern):
            return functools.partial(
                dilated_attention, segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates, **causal
            )
        return functools.partial(block_sparse_attention, pattern=pattern, **causal)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "dilated",
            "LongNet's branches to the whole sequence",
            lambda x, first: DilatedPattern(*geometric(x.num_positions, first=first)),
            1,
        ),
        Kind("block-sparse", "a sliding window, half a first segment on either side", lambda x, first: _window(first), 1),
        Kind("dense", "every key", lambda x, first: dense_pattern(x), 2),
    )
}


def _window(first: int) -> LocalWindow:
    return LocalWindow(first // 2, block_size=128 if first >= 1024 else 64)


@dataclass(frozen=True)
class Limits:
    """``memory`` in bytes, None for the device's; ``seconds`` per call; the ``most`` positions; ``steps`` of bisection."""

    memory: int | None
    seconds: float
    most: int
    steps: int


def search(kind: Kind, which: str, problem: Problem, segment: int, limits: Limits) -> list[Row]:
    """Returns a row for every length tried, in that order."""
    on_gpu = problem.device.type == "cuda"
    if not on_gpu and why_no_children():
        return [Row(name=kind.name, case={"pass": which, **problem.case}, note=why_no_children())]
    note = _checked(kind, which, problem, segment)
    if note:
        return [Row(name=kind.name, case={"pass": which, **problem.case}, note=note)]
    rows: list[Row] = []

    def fits(length: int) -> Row:
        at = replace(problem, num_positions=length)
        found = _limited(limits, at, functools.partial(_one, kind.name, which, at, segment))
        row = _row(kind, which, at, found, limits)
        rows.append(row)
        return row

    length, last = problem.num_positions, None
    while length <= limits.most:
        if last is not None and _expected(kind, last, length) > limits.seconds:
            rows.append(Row(name=kind.name, case={"pass": which, **replace(problem, num_positions=length).case}, note=TIME))
            return rows
        row = fits(length)
        if row.note:
            break
        last, length = row, 2 * length
    else:
        return rows
    if not rows[-1].note.startswith(MEMORY) or last is None:
        return rows
    low, high = last.case["N"], length
    for _ in range(limits.steps):
        middle = (low + high) // 2 // _STEP * _STEP
        if middle <= low or _expected(kind, last, middle) > limits.seconds:
            break
        row = fits(middle)
        if row.note and not row.note.startswith(MEMORY):
            break
        low, high = (low, middle) if row.note else (middle, high)
    return rows


def _expected(kind: Kind, row: Row, length: int) -> float:
    """Estimates the seconds of a call from those of a shorter one."""
    return float(row.values["ms"] / 1000 * (length / row.case["N"]) ** kind.growth)


def _checked(kind: Kind, which: str, problem: Problem, segment: int) -> str:
    """Returns a note if the kind is wrong on a short sequence; every row and gradient is checked."""
    small = problem.reduced(WHOLE)
    attend = kind.attend(small, segment)
    errors = whole_errors(lambda *leaves: attend(*leaves)[0], kind.pattern(small, segment), small, gradients=which == "both")
    return wrong(errors, BOUNDS[problem.dtype])


def _limited(limits: Limits, problem: Problem, function: Callable[[], dict[str, Any]]) -> Attempt[dict[str, Any]]:
    if problem.device.type != "cuda":
        # time for drawing inputs and checking rows in addition to the call itself
        return in_child(function, memory=limits.memory, seconds=10 * limits.seconds + 20)
    clear_block_lists()
    release(workspaces=True)
    before = torch.cuda.memory_allocated(problem.device)
    total = torch.cuda.get_device_properties(problem.device).total_memory
    if limits.memory is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limits.memory / total), problem.device)
    try:
        found = attempt(function)
    finally:
        if limits.memory is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, problem.device)
    clear_block_lists()
    release(workspaces=True)
    left = torch.cuda.memory_allocated(problem.device) - before
    if found.value is None:
        return Attempt(None, f"{found.note}, {left / 2**20:.0f} MiB not released" if left > 2**24 else found.note)
    return found


def _row(kind: Kind, which: str, problem: Problem, found: Attempt[dict[str, Any]], limits: Limits) -> Row:
    case = {"pass": which, **problem.case}
    if found.value is None:
        return Row(name=kind.name, case=case, note=found.note)
    errors = dict(found.value["errors"])
    note = wrong({key: error for key, error in errors.items() if key != "lse"}, BOUNDS[problem.dtype]) or wrong(
        {"lse": errors["lse"]}, _LSE_BOUND
    )
    if note:
        return Row(name=kind.name, case=case, errors=errors, note=note)
    seconds, peak, tokens = found.value["seconds"], found.value["peak"], problem.num_positions
    values = {"ms": 1000 * seconds, "tokens_per_s": tokens / seconds, "peak_bytes": peak, "bytes_per_token": peak / tokens}
    return Row(name=kind.name, case=case, values=values, errors=errors)


def _one(name: str, which: str, problem: Problem, segment: int) -> dict[str, Any]:
    """Returns {"seconds", "peak", "errors"} of one call in the current process."""
    kind = KINDS[name]
    attend = kind.attend(problem, segment)
    on_gpu = problem.device.type == "cuda"
    if not on_gpu:
        # code is loaded on first use, which must not count towards the peak
        small = problem.reduced(1024)
        _call(kind.attend(small, segment), small.qkv(), small.draw(small.num_heads, 9) if which == "both" else None)
    gc.collect()
    peak = Peak(problem.device)
    leaves = problem.qkv()
    dout = problem.draw(problem.num_heads, 9) if which == "both" else None
    results: list[torch.Tensor] = []
    seconds = 0.0
    # on a GPU, the first call of a length builds plans and compiles
    for _ in range(2 if on_gpu else 1):
        results = []
        synchronise(problem.device)
        begun = time.perf_counter()
        results = _call(attend, leaves, dout)
        synchronise(problem.device)
        seconds = time.perf_counter() - begun
    most = peak.bytes()
    with torch.no_grad():
        inputs = [*leaves, *(() if dout is None else (dout,))]
        errors = sampled_errors(kind.pattern(problem, segment), problem, inputs, results)
    return {"seconds": seconds, "peak": most, "errors": errors}


def _call(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]], leaves: Sequence[torch.Tensor], dout: torch.Tensor | None
) -> list[torch.Tensor]:
    """Returns [out, lse] or, with ``dout``, [out, lse, dq, dk, dv]."""
    if dout is None:
        with torch.no_grad():
            return list(attend(*leaves))
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]
