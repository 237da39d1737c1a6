"""The longest sequence that fits: doubled until memory or time is out, then bisected, every length checked on sampled rows."""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.arguments import size
from dilated_attention.bench.attempt import Attempt, attempt, release
from dilated_attention.bench.children import Peak, in_child, why_no_children
from dilated_attention.bench.contenders import dense_pattern
from dilated_attention.bench.correct import BOUNDS, WHOLE, Pattern, whole_errors, wrong
from dilated_attention.bench.plots import Line, Plot
from dilated_attention.bench.problem import Problem, geometric
from dilated_attention.bench.rows import Results, Row
from dilated_attention.bench.sampled import sampled_errors
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.tables import Table, figure
from dilated_attention.bench.timing import synchronise
from dilated_attention.engine.block_lists import clear_block_lists
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import DilatedPattern, LocalWindow

PASSES = ("forward", "both")
TIME, MEMORY = "time, not memory", "out of memory"
# lengths between the last that fits and the first that does not are multiples of this
_STEP = 1024
# an lse is a sum of exponents: its error is absolute, and that of sums in float32
_LSE_BOUND = 0.02


@dataclass(frozen=True)
class Kind:
    """What is searched for its longest sequence. ``growth``: of its time, the power of the length."""

    name: str
    what: str
    pattern: Callable[[Problem, int], Pattern]
    growth: int

    def attend(self, problem: Problem, first: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """q, k, v → (out, lse)."""
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
    """``memory`` in bytes, None for the device's; ``seconds`` of one call; ``most`` positions; ``steps`` of bisection."""

    memory: int | None
    seconds: float
    most: int
    steps: int


class Extreme(Suite):
    """How far one device goes, by what it computes."""

    name = "extreme"
    about = "the longest sequence that fits: tokens, bytes per token, throughput, by doubling until memory is out"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="both: forward and backward")
        parser.add_argument("--heads", type=size, default=8, help="default: 8")
        parser.add_argument("--head-dim", type=size, default=64, help="default: 64")
        parser.add_argument("--causal", action="store_true")
        parser.add_argument("--first", type=size, help="length to begin with; default: 256k on a GPU, 1k on a CPU")
        parser.add_argument("--most", type=size, default=2**30, help="length to end at; default: 1G")
        parser.add_argument(
            "--memory-gib", type=float, help="to be filled; default: the GPU's, 0.125 on a CPU, each length in a process of its own"
        )
        parser.add_argument("--limit", type=float, help="seconds of one call beyond which a search ends; default: 10 on a GPU, 3 on a CPU")
        parser.add_argument("--steps", type=int, help="of bisection, once memory is out; default: 4 on a GPU, 2 on a CPU")

    def settings(self, session: Session) -> dict[str, Any]:
        options, limits = session.options, self.limits(session)
        shape = {
            "heads": options.heads,
            "head_dim": options.head_dim,
            "causal": options.causal,
            "dtype": str(session.dtype).removeprefix("torch."),
        }
        ends = {
            "first": self.first(session),
            "most": options.most,
            "memory_gib": options.memory_gib,
            "limit": limits.seconds,
            "steps": limits.steps,
        }
        return super().settings(session) | shape | ends

    def first(self, session: Session) -> int:
        return session.options.first or (2**18 if session.full else 2**10)

    def limits(self, session: Session) -> Limits:
        options = session.options
        on_gpu = session.device.type == "cuda"
        gib = options.memory_gib if options.memory_gib is not None else None if on_gpu else 0.125
        if gib is not None and gib <= 0:
            raise ValueError(f"--memory-gib is {gib:g}; expected more than 0")
        seconds = options.limit if options.limit is not None else 10.0 if on_gpu else 3.0
        steps = options.steps if options.steps is not None else 4 if session.full else 2
        return Limits(None if gib is None else int(gib * 2**30), seconds, options.most, steps)

    def groups(self, session: Session) -> Sequence[Group]:
        options, limits = session.options, self.limits(session)
        segment = 2048 if session.full else 512
        return [
            Group(f"{name} {which}", functools.partial(_search, KINDS[name], which, self._problem(session), segment, limits))
            for name in options.kinds
            for which in options.passes
        ]

    def _problem(self, session: Session) -> Problem:
        options = session.options
        return Problem(num_positions=self.first(session), num_heads=options.heads, head_dim=options.head_dim, dtype=session.dtype,
                       device=session.device, is_causal=options.causal)  # fmt: skip

    def tables(self, results: Results) -> list[Table]:
        columns = ("", "pass", "tokens", "bytes per token", "GiB", "seconds", "M tokens/s", "ended by")
        rows = []
        for (name, which), tried in _searches(results).items():
            fits = [row for row in tried if row.values.get("ms")]
            if not fits:
                rows.append([name, which, "–", "–", "–", "–", "–", tried[-1].note])
                continue
            longest = max(fits, key=lambda row: row.case["N"])
            v = longest.values
            cells = [f"{longest.case['N']:,}", figure(v["bytes_per_token"]), figure(v["peak_bytes"] / 2**30), figure(v["ms"] / 1000)]
            rows.append([name, which, *cells, figure(v["tokens_per_s"] / 1e6), _ending(tried, longest)])
        held = results.settings
        shape = f"{held['heads']} head{'s' * (held['heads'] > 1)} of {held['head_dim']}, {held['dtype']}, {'causal' if held['causal'] else 'full'}"
        caption = f"Of one sequence of {shape}. Bytes are the peak of the call, inputs and results included. Sampled rows of every length are checked against float64."
        longest_table = Table("longest sequence", columns, rows, caption)
        return [longest_table, *self._tried(results)]

    def _tried(self, results: Results) -> list[Table]:
        """Every length of every search, in the order tried."""
        rows = []
        for (name, which), tried in _searches(results).items():
            for row in tried:
                v = row.values
                worst = max(row.errors.values(), default=None)
                cells = [
                    figure(v[key] / by) if key in v else "–" for key, by in (("ms", 1000), ("bytes_per_token", 1), ("tokens_per_s", 1e6))
                ]
                cells += ["–" if worst is None else figure(worst), row.note or "fits"]
                rows.append([f"{name} {which}", f"{row.case['N']:,}", *cells])
        columns = ("", "tokens", "seconds", "bytes per token", "M tokens/s", "largest error", "")
        return [Table("lengths tried", columns, rows, "Errors: relative of out and gradients, absolute of lse.")]

    def plots(self, results: Results) -> list[Plot]:
        memory, speed = [], []
        for (name, which), tried in _searches(results).items():
            fits = sorted((row for row in tried if row.values.get("ms")), key=lambda row: row.case["N"])
            if fits:
                label, lengths = f"{name}, {_PASS[which]}", [row.case["N"] for row in fits]
                memory.append(Line(label, lengths, [row.values["bytes_per_token"] for row in fits]))
                speed.append(Line(label, lengths, [row.values["tokens_per_s"] for row in fits]))
        if not memory:
            return []
        return [
            Plot(name="memory", title="Peak memory of one call, to the longest that fits", x_label="tokens", y_label="bytes per token",
                 lines=memory, log_x=True),
            Plot(name="throughput", title="Throughput, to the longest that fits", x_label="tokens", y_label="tokens per second",
                 lines=speed, log_x=True, log_y=True),
        ]  # fmt: skip


_PASS = {"forward": "forward", "both": "forward and backward"}


def _searches(results: Results) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if "pass" in row.case:
            found.setdefault((row.name, row.case["pass"]), []).append(row)
    return found


def _ending(tried: Sequence[Row], longest: Row) -> str:
    beyond = [row for row in tried if row.case["N"] > longest.case["N"]]
    if not beyond:
        return "--most"
    nearest = min(beyond, key=lambda row: row.case["N"])
    return f"{nearest.note} at {nearest.case['N']:,}"


def _search(kind: Kind, which: str, problem: Problem, segment: int, limits: Limits) -> list[Row]:
    """A row for every length tried, in that order."""
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
    """Seconds of a call, from those of a shorter one."""
    return float(row.values["ms"] / 1000 * (length / row.case["N"]) ** kind.growth)


def _checked(kind: Kind, which: str, problem: Problem, segment: int) -> str:
    """A note where the kind is wrong on a short sequence, every row and gradient of it looked at."""
    small = problem.reduced(WHOLE)
    attend = kind.attend(small, segment)
    errors = whole_errors(lambda *leaves: attend(*leaves)[0], kind.pattern(small, segment), small, gradients=which == "both")
    return wrong(errors, BOUNDS[problem.dtype])


def _limited(limits: Limits, problem: Problem, function: Callable[[], dict[str, Any]]) -> Attempt[dict[str, Any]]:
    if problem.device.type != "cuda":
        # beside the call itself: its inputs are drawn, its rows are checked
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
        return Attempt(None, f"{found.note}, {left / 2**20:.0f} MiB not given back" if left > 2**24 else found.note)
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
    """{"seconds", "peak", "errors"} of one call, in the process at hand."""
    kind = KINDS[name]
    attend = kind.attend(problem, segment)
    on_gpu = problem.device.type == "cuda"
    if not on_gpu:
        # code is loaded where it is first needed: not within the peak
        small = problem.reduced(1024)
        _call(kind.attend(small, segment), small.qkv(), small.draw(small.num_heads, 9) if which == "both" else None)
    gc.collect()
    peak = Peak(problem.device)
    leaves = problem.qkv()
    dout = problem.draw(problem.num_heads, 9) if which == "both" else None
    results: list[torch.Tensor] = []
    seconds = 0.0
    # a GPU's first call of a length makes plans and compiles
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
    """[out, lse] or, with ``dout``, [out, lse, dq, dk, dv]."""
    if dout is None:
        with torch.no_grad():
            return list(attend(*leaves))
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]
