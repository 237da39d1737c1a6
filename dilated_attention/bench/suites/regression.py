"""Finds what got slower since a stored baseline of the same hardware.

Short cases are measured relative to yardsticks, and repeated before a slowdown is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench.accuracy.contender_check import check, forget
from dilated_attention.bench.accuracy.correctness import wrong
from dilated_attention.bench.measure.forward_backward import call_of
from dilated_attention.bench.measure.reference_timing import Figures, change, sampled, verdict
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.report.rows import Results, Row, machine
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.report.views import labelled, listing
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, MULTIHEAD, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import UsageError

BASELINES = Path("benchmarks") / "baselines"
# from the catalogue: this library's contenders, and dense kernels to compare them with
CONTENDERS = tuple(
    x for x in (*DENSE, *MODULES, *MULTIHEAD) if x.name not in ("standard", "flash3_fp8", "flash2", "flex", "BlockSparseAttention BigBird")
)
# a row that looks slower is measured this many more times, and reported only if it is slower each time
REPEATS = 3
# states of rows, with which their notes begin
SLOWER, MISSING, FASTER, NEW, SAME = STATES = ("slower", "missing", "faster", "new", "same")


class Regression(Suite):
    """Compares with a stored baseline. The exit code is 1 where a row got slower or is missing."""

    name = "regression"
    about = "compares with a stored baseline of the same hardware: exit code 1 with the rows that got slower"
    resumes = False
    in_all = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", metavar="REGEX", help="only rows whose name or case it matches; default: all")
        parser.add_argument("--baseline", type=Path, help=f"default: {BASELINES}/<hardware>.json")
        parser.add_argument("--save-baseline", action="store_true", help="measure several times and store that as the baseline")
        parser.add_argument("--threshold", type=float, default=0.2, help="slowdown that is allowed, as a share of the time; default: 0.2")
        parser.add_argument("--rounds", type=int, help="of every measurement; default: 1, for a baseline 3")

    def settings(self, session: Session) -> dict[str, Any]:
        return super().settings(session) | {"dtypes": [str(x).removeprefix("torch.") for x in session.dtypes]}

    def groups(self, session: Session) -> Sequence[Group]:
        how = self._check(session)
        groups = []
        for problem in core_problems(session):
            for which in ("forward", "both"):
                label = f"core {problem.label} {which}"
                groups.append(Group(label, functools.partial(_core, label, problem, which, session, how)))
        labels = {group.label for group in groups}
        gone = [label for label in (how.baseline.groups if how.baseline else ()) if label not in labels]
        return [*groups, *(Group(label, functools.partial(judged, [], label, how)) for label in gone)]

    def _check(self, session: Session) -> Check:
        """Raises ValueError where there is no baseline to compare with, and UsageError for invalid options."""
        options = session.options
        if options.threshold <= 0:
            raise UsageError(f"--threshold is {options.threshold:g}; expected a share above 0, such as 0.2")
        try:
            only = re.compile(options.rows or "")
        except re.error as error:
            raise UsageError(f"--rows is {options.rows!r}, which is not a regular expression: {error}") from error
        if options.save_baseline:
            if options.rows is not None:
                raise UsageError("--rows and --save-baseline are given; a baseline has all rows: leave --rows out")
            return Check(None, options.threshold, options.rounds or 3, only)
        path = self.baseline_path(session)
        if not path.exists():
            raise ValueError(
                f"{path} does not exist, so there is nothing to compare with; make a baseline of this hardware with --save-baseline"
            )
        baseline = Results.load(path)
        for what, theirs, here in (
            ("suite", baseline.suite, self.name),
            ("hardware", hardware_of(baseline.machine), hardware_of(machine(session.device))),
            ("settings", baseline.settings, self.settings(session)),
        ):
            if theirs != here:
                raise ValueError(f"{path} differs in its {what}, {theirs!r}; expected {here!r}: make a baseline here with --save-baseline")
        return Check(baseline, options.threshold, options.rounds or 1, only)

    def baseline_path(self, session: Session) -> Path:
        if session.options.baseline is not None:
            return Path(session.options.baseline)
        return BASELINES / f"{slug(hardware_of(machine(session.device)))}.json"

    def finish(self, results: Results, session: Session) -> list[Path]:
        if not session.options.save_baseline:
            return []
        path = self.baseline_path(session)
        Results(results.suite, results.machine, results.settings, results.groups, path).save()
        return [path]

    def verdict(self, results: Results) -> int:
        return int(any(row.note.startswith((SLOWER, MISSING)) for row in results.rows))

    def tables(self, results: Results) -> list[Table]:
        rows = [replace(row, values=row.values | _noise(row)) for row in labelled(results.rows, "{name}, B={B} N={N}, {pass}")]
        by_state = {state: [row for row in rows if row.note.startswith(state)] for state in STATES}
        if not any(by_state.values()):
            caption = "Noise: half the spread of the figures over blocks of turns, by the yardstick that shows more."
            return listing([row for row in rows if row.values], _FIGURES, title="baseline", caption=caption)
        counts = [[state, str(len(mine))] for state, mine in by_state.items()]
        tables = [Table("rows", ("", "rows"), counts, "Slower or missing: exit code 1.")]
        for state, mine in by_state.items():
            mine.sort(key=lambda row: -row.values.get("change", 0.0))
            tables += listing(mine, _CHANGES, title=state, caption=_CAPTION)
        return tables


_FIGURES = {"ms": ("ms", 1.0), "noise, %": ("noise", 100.0)}
_CHANGES = {"ms then": ("then_ms", 1.0), "ms now": ("ms", 1.0), "change, %": ("change", 100.0), "noise, %": ("noise", 100.0)}
_CAPTION = "Change and noise are of times relative to the yardsticks', not of milliseconds, which are longer on a busy machine."


def _noise(row: Row) -> dict[str, float]:
    return {"noise": max(value for key, value in row.values.items() if key.startswith("noise_"))} if row.values else {}


@dataclass(frozen=True)
class Check:
    """How rows are compared. ``baseline`` is None while one is being created."""

    baseline: Results | None
    threshold: float
    rounds: int
    only: re.Pattern[str]

    def rows(self, label: str) -> dict[str, Row]:
        """Returns the baseline's rows that have figures and were requested, by their keys."""
        rows = [] if self.baseline is None else self.baseline.groups.get(label, [])
        return {row.key: row for row in rows if row.values and self.only.search(row.key)}


def hardware_of(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what two results must have in common. A CPU's thread count is not included: ``regression`` uses one thread."""
    return {key: value for key, value in whole["hardware"].items() if key != "threads"}


def slug(hardware: Mapping[str, Any]) -> str:
    """Returns a file name: ``nvidia-h200``, ``amd-epyc-2-cores``."""
    words = str(hardware["device"]) + (f" {hardware['cores']} cores" if "cores" in hardware else "")
    words += f" x{hardware['devices']}" if hardware["devices"] > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def core_problems(session: Session) -> list[Problem]:
    if session.full:
        shapes = ((1, 8192, 16, 128, False), (1, 16384, 16, 128, True), (8, 1024, 16, 64, True))
    else:
        shapes = ((1, 512, 2, 64, False), (2, 256, 2, 64, True))  # type: ignore[assignment]
    make = functools.partial(Problem, dtype=session.dtype, device=session.device)
    return [make(batch_size=b, num_positions=n, num_heads=h, head_dim=d, is_causal=causal) for b, n, h, d, causal in shapes]


def _core(label: str, problem: Problem, which: str, session: Session, how: Check) -> list[Row]:
    """Returns rows of the catalogue on one problem: checked first, then timed in turns, then compared."""
    case = problem.case | {"pass": which}
    rows, calls = [], {}
    shared: dict[Any, list[Any]] = {}

    def prepared(contender: Contender) -> tuple[Callable[[], Any], str]:
        attend = contender.make(problem)
        note = wrong(check(contender, problem, attend), contender.allowed(problem))
        call = call_of(contender, attend, problem, which, shared)
        call()
        return call, note

    with one_thread(session.device):
        for contender in CONTENDERS:
            row = Row(name=contender.name, case=case)
            if not how.only.search(row.key) or (which != "forward" and not contender.trains):
                continue
            made = attempt(functools.partial(prepared, contender))
            call, note = made.value or (None, made.note)
            if call is None or note:
                rows.append(replace(row, note=note))
            else:
                calls[contender.name] = call
        forget()
        # a short case needs many turns, and five times a suite's usual seconds are still short
        again = functools.partial(sampled, device=session.device, full=session.full, seconds=5 * session.seconds)
        then = {row.name: Figures.of_values(row.values) for row in how.rows(label).values() if row.case == case}
        found = _measured(calls, again, how, then)
    rows += [Row(name=name, case=case, values=x.values()) for name, x in found.items()]
    return judged(rows, label, how)


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Uses one thread on a CPU: threads that wait for each other also wait for other processes' work."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measured(
    calls: Mapping[str, Callable[[], Any]],
    again: Callable[[Mapping[str, Callable[[], Any]]], dict[str, Figures]],
    how: Check,
    then: Mapping[str, Figures],
) -> dict[str, Figures]:
    """Returns the figures of each name; what looks slower than ``then`` is measured several times, and the best counts."""
    rounds = [again(calls) for _ in range(how.rounds)]
    found = {name: _median([figures[name] for figures in rounds]) for name in calls}
    for _ in range(REPEATS):
        suspects = [name for name in found if name in then and verdict(then[name], found[name], how.threshold) == SLOWER]
        if not suspects:
            break
        # measured together with the others again: their presence may affect caches and clocks
        for name, figures in again(calls).items():
            if name in suspects and change(then[name], figures) < change(then[name], found[name]):
                found[name] = figures
    return found


def _median(rounds: Sequence[Figures]) -> Figures:
    """Returns the median of several rounds, with the differences between rounds as the noise where that is larger."""
    per, noise = {}, {}
    for rod in rounds[0].per:
        ratios = [x.per[rod] for x in rounds]
        per[rod] = statistics.median(ratios)
        noise[rod] = max((max(ratios) - min(ratios)) / (2 * per[rod]), statistics.median(x.noise[rod] for x in rounds))
    return Figures(ms=statistics.median(x.ms for x in rounds), low_ms=min(x.low_ms for x in rounds),
                   samples=sum(x.samples for x in rounds), per=per, noise=noise)  # fmt: skip


def judged(rows: Sequence[Row], label: str, how: Check) -> list[Row]:
    """Returns the rows with ``change``, the baseline's ``then_ms`` and a state, and a row for each that only the baseline has."""
    if how.baseline is None:
        return list(rows)
    then = how.rows(label)
    result = []
    for row in rows:
        old = then.pop(row.key, None)
        if old is not None and row.values:
            a, b = Figures.of_values(old.values), Figures.of_values(row.values)
            row = replace(row, values=row.values | {"change": change(a, b), "then_ms": a.ms}, note=verdict(a, b, how.threshold))
        elif old is not None:
            row = replace(row, note=f"{MISSING}: {row.note or 'no figure'}")
        elif row.values:
            row = replace(row, note=NEW)
        result.append(row)
    return [*result, *(Row(name=old.name, case=old.case, note=f"{MISSING}: in the baseline only") for old in then.values())]
