"""Finds what got slower since a stored baseline of the same hardware.

Short cases are measured relative to yardsticks, and repeated before a slowdown is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench.accuracy.contender_check import check, forget
from dilated_attention.bench.accuracy.correctness import wrong
from dilated_attention.bench.measure.forward_backward import call_of
from dilated_attention.bench.measure.reference_timing import Figures, sampled
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.report import baseline as stored
from dilated_attention.bench.report.baseline import FASTER, MISSING, NEW, SAME, SLOWER, Check, hardware_of, judged, slug, state_of
from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row, machine
from dilated_attention.bench.report.tables import Table, figure
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, MULTIHEAD, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import UsageError

BASELINES = Path("benchmarks") / "baselines"
# from the catalogue: this library's contenders, and dense kernels to compare them with
CONTENDERS = tuple(
    x for x in (*DENSE, *MODULES, *MULTIHEAD) if x.name not in ("standard", "flash3_fp8", "flash2", "flex", "BlockSparseAttention BigBird")
)


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
        lost = Group("no longer measured", lambda: [row for label in gone for row in judged([], label, how)])
        return [*groups, *([lost] if gone else [])]

    def _check(self, session: Session) -> Check:
        """Raises ValueError where there is no baseline to compare with, and UsageError for invalid options."""
        options = session.options
        if options.threshold <= 0:
            raise UsageError(f"--threshold is {options.threshold:g}; expected a share above 0, such as 0.2")
        try:
            only = None if options.rows is None else re.compile(options.rows)
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
        here, there = (hardware_of(whole) for whole in (machine(session.device), baseline.machine))
        if baseline.suite != self.name:
            raise ValueError(f"{path} is a result of {baseline.suite!r}; expected one that {self.name} --save-baseline wrote")
        if there != here:
            raise ValueError(
                f"{path} is of other hardware, {there}; this is {here}: their times cannot be compared. Make one here with --save-baseline"
            )
        if baseline.settings != self.settings(session):
            raise ValueError(
                f"{path} was made with {baseline.settings}, and this run has {self.settings(session)}; use the same --size and --dtypes"
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
        return int(any(state_of(row) in (SLOWER, MISSING) for row in results.rows))

    def tables(self, results: Results) -> list[Table]:
        rows = results.rows
        if not any(state_of(row) for row in rows):
            caption = "Noise: half the spread of the figures over blocks of turns, by the yardstick that shows more."
            cells = [[_described(row), figure(row.values["ms"]), _noise(row)] for row in rows if row.values]
            return [Table("baseline", ("", "ms", "noise"), cells, caption)]
        titles = (SLOWER, MISSING, FASTER, NEW, SAME)
        counts = [[title, str(sum(state_of(row) == title for row in rows))] for title in titles]
        tables = [Table("rows", ("", "rows"), counts, "Slower or missing: exit code 1.")]
        for title in titles:
            mine = sorted((row for row in rows if state_of(row) == title), key=lambda row: -row.values.get("change", 0.0))
            if mine:
                tables.append(Table(title, ("", "ms then", "ms now", "change", "noise", ""), [_cells(row) for row in mine], _CAPTION))
        return tables

    def plots(self, results: Results) -> list[Plot]:
        known = [row for row in results.rows if "change" in row.values]
        lines = []
        for name in dict.fromkeys(row.name for row in known):
            mine = [row.values for row in known if row.name == name]
            lines.append(Line(name, [v["then_ms"] for v in mine], [1 + v["change"] for v in mine], joined=False))
        if not lines:
            return []
        ends = [min(x for line in lines for x in line.x), max(x for line in lines for x in line.x)]
        lines.append(Line("as the baseline", ends, [1, 1], dashed=True, marked=False))
        note = "By the yardstick that shows the smallest change; one point per case."
        return [Plot(name="change", title="Time against the baseline", x_label="milliseconds in the baseline",
                     y_label="time / baseline's time", lines=lines, log_x=True, note=note)]  # fmt: skip


_CAPTION = "Change and noise are of times relative to the yardsticks', not of milliseconds, which are longer on a busy machine."


def _described(row: Row) -> str:
    case = row.case
    shape = f"B={case['B']} N={case['N']}" if "B" in case and "N" in case else ""
    return ", ".join(filter(None, [row.name, shape, "causal" if case.get("causal") else "", str(case.get("pass", ""))]))


def _noise(row: Row) -> str:
    return f"{max(value for key, value in row.values.items() if key.startswith('noise_')):.0%}"


def _cells(row: Row) -> list[str]:
    v = row.values
    times = [figure(v[key]) if key in v else "–" for key in ("then_ms", "ms")]
    return [_described(row), *times, f"{v['change']:+.0%}" if "change" in v else "–", _noise(row) if v else "–", row.note]


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
        forget()
        # a short case needs many turns, and five times a suite's usual seconds are still short
        again = functools.partial(sampled, device=session.device, full=session.full, seconds=5 * session.seconds)
        then = {row.name: Figures.of_values(row.values) for row in how.rows(label).values() if row.case == case}
        found = stored.measured(calls, again, how, then)
    rows += [Row(name=name, case=case, values=x.values()) for name, x in found.items()]
    return judged(rows, label, how)


def _prepared(
    contender: Contender, problem: Problem, which: str, shared: dict[Any, list[Any]]
) -> tuple[Callable[[], Any], dict[str, float]]:
    attend = contender.make(problem)
    errors = check(contender, problem, attend)
    call = call_of(contender, attend, problem, which, shared)
    call()
    return call, errors


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
