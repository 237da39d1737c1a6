"""Finds what got slower since a stored baseline of the same hardware.

Short cases are measured relative to yardsticks, and repeated before a slowdown is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench.accuracy.contender_check import check
from dilated_attention.bench.accuracy.correctness import wrong
from dilated_attention.bench.measure.forward_backward import call_of
from dilated_attention.bench.measure.reference_timing import Figures, change, sampled, verdict
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.report.baseline import REPEATS, SLOWER, Check, hardware_of, judged, measured, slug, state_of
from dilated_attention.bench.report.plots import Plot
from dilated_attention.bench.report.rows import Results, Row, machine
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.suites import regression_report as report
from dilated_attention.bench.suites.accuracy import Accuracy
from dilated_attention.bench.suites.bandwidth import Bandwidth
from dilated_attention.bench.suites.extreme import Extreme
from dilated_attention.bench.suites.implementations import Implementations
from dilated_attention.bench.suites.memory import Memory
from dilated_attention.bench.suites.scaling import Scaling
from dilated_attention.bench.suites.speed import Speed
from dilated_attention.bench.suites.train_infer import TrainInfer
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, MULTIHEAD, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import UsageError

CORE = "core"
BASELINES = Path("benchmarks") / "baselines"
# from the catalogue: this library's contenders, and dense kernels to compare them with
CONTENDERS = tuple(
    x for x in (*DENSE, *MODULES, *MULTIHEAD) if x.name not in ("standard", "flash3_fp8", "flash2", "flex", "BlockSparseAttention BigBird")
)
# the other suites by name, whose rows can be compared, too
COMPARED: dict[str, type[Suite]] = {
    suite.name: suite for suite in (Speed, Implementations, Accuracy, Memory, Bandwidth, Extreme, Scaling, TrainInfer)
}


class Regression(Suite):
    """Compares with a stored baseline. The exit code is 1 where a row got slower or is missing."""

    name = "regression"
    about = "compares with a stored baseline of the same hardware: exit code 1 with the rows that got slower"
    resumes = False
    in_all = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--suites", nargs="+", choices=(CORE, *COMPARED), default=[CORE], help=f"default: {CORE}, short cases of every module"
        )
        parser.add_argument("--rows", metavar="REGEX", help="only rows whose name or case it matches; default: all")
        parser.add_argument("--baseline", type=Path, help=f"default: {BASELINES}/<hardware>.json")
        parser.add_argument("--save-baseline", action="store_true", help="measure several times and store that as the baseline")
        parser.add_argument("--threshold", type=float, default=0.2, help="slowdown that is allowed, as a share of the time; default: 0.2")
        parser.add_argument("--rounds", type=int, help="of every measurement; default: 1, for a baseline 3")

    def settings(self, session: Session) -> dict[str, Any]:
        return super().settings(session) | {
            "suites": session.options.suites,
            "dtypes": [str(x).removeprefix("torch.") for x in session.dtypes],
        }

    def groups(self, session: Session) -> Sequence[Group]:
        how = self._check(session)
        groups = []
        for name in session.options.suites:
            groups += _core_groups(session, how) if name == CORE else _suite_groups(name, session, how)
        labels = {group.label for group in groups}
        gone = [label for label in (how.baseline.groups if how.baseline else ()) if label not in labels]
        return [*groups, *([Group("no longer measured", functools.partial(_gone, how, gone))] if gone else [])]

    def _check(self, session: Session) -> Check:
        """Raises ValueError where there is no baseline to compare with, and UsageError for invalid options."""
        options = session.options
        if options.threshold <= 0:
            raise UsageError(f"--threshold is {options.threshold:g}; expected a share above 0, such as 0.2")
        only = None
        if options.rows is not None:
            try:
                only = re.compile(options.rows)
            except re.error as error:
                raise UsageError(f"--rows is {options.rows!r}, which is not a regular expression: {error}") from error
        if options.save_baseline:
            if only is not None:
                raise UsageError("--rows and --save-baseline are given; a baseline has all rows: leave --rows out")
            return Check(None, options.threshold, options.rounds or 3, None)
        path = self.baseline_path(session)
        if not path.exists():
            raise ValueError(
                f"{path} does not exist, so there is nothing to compare with; make a baseline of this hardware with --save-baseline"
            )
        baseline = Results.load(path)
        here = hardware_of(machine(session.device))
        if baseline.suite != self.name:
            raise ValueError(f"{path} is a result of {baseline.suite!r}; expected one that {self.name} --save-baseline wrote")
        there = hardware_of(baseline.machine)
        if there != here:
            raise ValueError(
                f"{path} is of other hardware, {there}; this is {here}: their times cannot be compared. Make one here with --save-baseline"
            )
        if baseline.settings != self.settings(session):
            raise ValueError(
                f"{path} was made with {baseline.settings}, and this run has {self.settings(session)}; "
                "use the same --suites, --size and --dtypes"
            )
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
        return int(any(state_of(row) in (SLOWER, "missing") for row in results.rows))

    def tables(self, results: Results) -> list[Table]:
        return report.tables(results)

    def plots(self, results: Results) -> list[Plot]:
        return report.plots(results)


def core_problems(session: Session) -> list[Problem]:
    shapes = (
        ((1, 8192, 16, 128, False), (1, 16384, 16, 128, True), (8, 1024, 16, 64, True))
        if session.full
        else ((1, 512, 2, 64, False), (2, 256, 2, 64, True))
    )
    return [
        Problem(batch_size=b, num_positions=n, num_heads=h, head_dim=d, dtype=session.dtype, device=session.device, is_causal=causal)
        for b, n, h, d, causal in shapes
    ]


def _core_groups(session: Session, how: Check) -> list[Group]:
    groups = []
    for problem in core_problems(session):
        for which in ("forward", "both"):
            label = f"{CORE} {problem.label} {which}"
            groups.append(Group(label, functools.partial(_core, label, problem, which, session, how)))
    return groups


def _core(label: str, problem: Problem, which: str, session: Session, how: Check) -> list[Row]:
    """Returns rows of the catalogue on one problem: checked first, then timed in turns, then compared."""
    case = problem.case | {"pass": which}
    rows, calls = [], {}
    shared: dict[str, list[Any]] = {}
    with one_thread(session.device):
        for contender in CONTENDERS:
            row = Row(name=contender.name, case=case)
            if not how.wants(row.key) or (which != "forward" and not contender.trains):
                continue
            made = attempt(functools.partial(_prepared, contender, problem, which, shared))
            note = made.note
            if made.value is not None:
                call, errors = made.value
                note = wrong(errors, contender.allowed(problem))
                if not note:
                    calls[contender.name] = call
            if note:
                rows.append(replace(row, note=note))
        # a short case needs many turns, and five times a suite's usual seconds are still short
        again = functools.partial(sampled, device=session.device, full=session.full, seconds=5 * session.seconds)
        found = measured(calls, again, how, label, case)
    rows += [Row(name=name, case=case, values=x.values()) for name, x in found.items()]
    return judged(rows, label, how)


def _prepared(
    contender: Contender, problem: Problem, which: str, shared: dict[str, list[Any]]
) -> tuple[Callable[[], Any], dict[str, float]]:
    attend = contender.make(problem)
    errors = check(contender, problem, attend)
    call = call_of(contender, attend, problem, which, shared)
    call()
    return call, errors


def _suite_groups(name: str, session: Session, how: Check) -> list[Group]:
    """Returns groups of another suite with its default settings; its rows with a time are compared."""
    suite = COMPARED[name]()
    own = argparse.ArgumentParser(add_help=False)
    suite.add_arguments(own)
    inner = replace(session, options=own.parse_args([]))
    return [Group(f"{name}: {group.label}", functools.partial(_of_suite, name, group, session, how)) for group in suite.groups(inner)]


def _of_suite(name: str, group: Group, session: Session, how: Check) -> list[Row]:
    label = f"{name}: {group.label}"
    then = {key: Figures.of_values(row.values) for key, row in how.rows(label).items()}
    rows: dict[str, Row] = {}
    found: dict[str, Figures] = {}
    for turn in range(how.rounds + REPEATS):
        if turn >= how.rounds and not any(key in then and verdict(then[key], x, how.threshold) == SLOWER for key, x in found.items()):
            break
        with one_thread(session.device):
            # yardsticks before and after, the faster of both
            before = _reference_timings(session)
            fresh = [row for row in group.run() if how.wants(row.key)]
            reference_timings = {
                reference: min(x, y) for (reference, x), y in zip(before.items(), _reference_timings(session).values(), strict=True)
            }
        for row in fresh:
            rows.setdefault(row.key, row)
            if row.values.get("low_ms"):
                x = _of_row(row, reference_timings)
                if row.key not in found or (row.key in then and change(then[row.key], x) < change(then[row.key], found[row.key])):
                    found[row.key] = x
    return judged([replace(row, values=found[key].values() if key in found else {}) for key, row in rows.items()], label, how)


def _reference_timings(session: Session) -> dict[str, float]:
    """Returns the milliseconds of each yardstick, the fastest of several turns."""
    figures = sampled({"nothing": lambda: None}, session.device, full=session.full, seconds=0.1)["nothing"]
    return {reference: figures.low_ms / ratio for reference, ratio in figures.per.items()}


def _of_row(row: Row, reference_timings: Mapping[str, float]) -> Figures:
    ms, low, high = (row.values[key] for key in ("ms", "low_ms", "high_ms"))
    per = {reference: low / x for reference, x in reference_timings.items()}
    return Figures(
        ms=ms,
        low_ms=low,
        samples=int(row.values.get("samples", 1)),
        per=per,
        noise=dict.fromkeys(reference_timings, (high - low) / (2 * ms)),
    )


def _gone(how: Check, labels: Sequence[str]) -> list[Row]:
    return [row for label in labels for row in judged([], label, how)]


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
