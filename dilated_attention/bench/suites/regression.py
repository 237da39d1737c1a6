"""What got slower since a stored baseline of the same hardware: short cases by yardsticks, looked at again before they are blamed."""

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

from dilated_attention.bench.attempt import attempt
from dilated_attention.bench.checked import check
from dilated_attention.bench.contenders import DENSE, MODULES, MULTIHEAD, Contender
from dilated_attention.bench.correct import wrong
from dilated_attention.bench.passes import call_of
from dilated_attention.bench.plots import Line, Plot
from dilated_attention.bench.problem import Problem
from dilated_attention.bench.rows import Results, Row, machine
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.tables import Table, figure
from dilated_attention.bench.yardstick import Figures, change, sampled, verdict

CORE = "core"
BASELINES = Path("benchmarks") / "baselines"
# a row that looks slower is measured so many times more, and believed only if it does each time
_REPEATS = 3
# of the catalogue: dense kernels beside which ours are judged, and what is ours
CONTENDERS = tuple(
    x for x in (*DENSE, *MODULES, *MULTIHEAD) if x.name not in ("standard", "flash3_fp8", "flash2", "flex", "BlockSparseAttention BigBird")
)
_SLOWER, _FASTER, _SAME = "slower", "faster", "same"
# as a row's values have it
_STATES = {_SAME: 0, _SLOWER: 1, _FASTER: -1, "new": 2}
_NEW = _STATES["new"]


@dataclass(frozen=True)
class Check:
    """How rows are compared. ``baseline`` is None where one is being made."""

    baseline: Results | None
    threshold: float
    rounds: int
    only: re.Pattern[str] | None

    def wants(self, key: str) -> bool:
        return self.only is None or self.only.search(key) is not None

    def rows(self, label: str) -> dict[str, Row]:
        """Of the baseline, those with figures and asked for, by their keys."""
        rows = [] if self.baseline is None else self.baseline.groups.get(label, [])
        return {row.key: row for row in rows if row.values and self.wants(row.key)}


class Regression(Suite):
    """Exit code 1 where a row got slower, or is gone."""

    name = "regression"
    about = "compares with a stored baseline of the same hardware: exit code 1 with the rows that got slower"
    resumes = False
    in_all = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from dilated_attention.bench.suites import SUITES

        others = [name for name, suite in SUITES.items() if suite.in_all]
        parser.add_argument(
            "--suites", nargs="+", choices=(CORE, *others), default=[CORE], help=f"default: {CORE}, short cases of every module"
        )
        parser.add_argument("--rows", metavar="REGEX", help="only rows whose name or case it finds; default: all")
        parser.add_argument("--baseline", type=Path, help=f"default: {BASELINES}/<hardware>.json")
        parser.add_argument("--save-baseline", action="store_true", help="measure several times and store that as the baseline")
        parser.add_argument("--threshold", type=float, default=0.2, help="share of time that a row may lose; default: 0.2")
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
        """Raises ValueError where there is no baseline to compare with."""
        options = session.options
        if options.threshold <= 0:
            raise ValueError(f"--threshold is {options.threshold:g}; expected a share above 0, such as 0.2")
        only = None
        if options.rows is not None:
            try:
                only = re.compile(options.rows)
            except re.error as error:
                raise ValueError(f"--rows is {options.rows!r}, which is no regular expression: {error}") from error
        if options.save_baseline:
            if only is not None:
                raise ValueError("--rows and --save-baseline are given; a baseline has all rows: leave --rows out")
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
                f"{path} is of other hardware, {there}; this is {here}: times of both say nothing about the code. Make one here with --save-baseline"
            )
        if baseline.settings != self.settings(session):
            raise ValueError(
                f"{path} was made with {baseline.settings}, and this run has {self.settings(session)}; use the same --suites, --size and --dtypes"
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
        return int(any(_state(row) in (_SLOWER, "missing") for row in results.rows))

    def tables(self, results: Results) -> list[Table]:
        rows = results.rows
        if not any(_state(row) for row in rows):
            cells = [[_described(row), figure(row.values["ms"]), _noise(row)] for row in rows if row.values]
            return [
                Table(
                    "baseline",
                    ("", "ms", "noise"),
                    cells,
                    "Noise: half of how far figures of blocks of turns lie apart, by the yardstick that shows more.",
                )
            ]
        tables = [_counts(rows)]
        for state, title in ((_SLOWER, "slower"), ("missing", "missing"), (_FASTER, "faster"), ("new", "new"), (_SAME, "the same")):
            mine = [row for row in rows if _state(row) == state]
            if mine:
                tables.append(_state_table(title, sorted(mine, key=lambda row: -row.values.get("change", 0.0))))
        return tables

    def plots(self, results: Results) -> list[Plot]:
        known = [row for row in results.rows if "change" in row.values]
        if not known:
            return []
        lines = []
        for name in dict.fromkeys(row.name for row in known):
            mine = [row for row in known if row.name == name]
            lines.append(Line(name, [row.values["then_ms"] for row in mine], [1 + row.values["change"] for row in mine], joined=False))
        ends = [min(x for line in lines for x in line.x), max(x for line in lines for x in line.x)]
        lines.append(Line("as the baseline", ends, [1, 1], dashed=True, marked=False))
        note = "By the yardstick that shows least; a point a case."
        return [Plot(name="change", title="Time against the baseline", x_label="milliseconds in the baseline", y_label="time / baseline's time",
                     lines=lines, log_x=True, note=note)]  # fmt: skip


def hardware_of(whole: Mapping[str, Any]) -> dict[str, Any]:
    """What two results must have in common. A CPU's threads are not among it: this suite takes one."""
    return {key: value for key, value in whole["hardware"].items() if key != "threads"}


def slug(hardware: Mapping[str, Any]) -> str:
    """A file's name: ``nvidia-h200``, ``amd-epyc-2-cores``."""
    words = str(hardware["device"]) + (f" {hardware['cores']} cores" if "cores" in hardware else "")
    words += f" x{hardware['devices']}" if hardware["devices"] > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


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
    """Rows of the catalogue on one problem: right first, then in turns, then compared."""
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
        # a short case needs many turns, and five times a suite's usual seconds are still few
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


def measured(
    calls: Mapping[str, Callable[[], Any]],
    again: Callable[[Mapping[str, Callable[[], Any]]], dict[str, Figures]],
    how: Check,
    label: str,
    case: Mapping[str, Any],
) -> dict[str, Figures]:
    """Figures of each name; what looks slower than the baseline several times, of which the best counts."""
    found = merged([again(calls) for _ in range(how.rounds)])
    then = {row.name: Figures.of_values(row.values) for row in how.rows(label).values() if row.case == dict(case)}
    for _ in range(_REPEATS):
        suspects = [name for name in found if name in then and verdict(then[name], found[name], how.threshold) == _SLOWER]
        if not suspects:
            break
        # beside the others again: whether they are there may matter, to caches and to clocks
        for name, figures in again(calls).items():
            if name in suspects and change(then[name], figures) < change(then[name], found[name]):
                found[name] = figures
    return found


def merged(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """The middle of several rounds, with what they differ by as noise where that is more."""
    if len(rounds) == 1:
        return rounds[0]
    found = {}
    for name in rounds[0]:
        mine = [x[name] for x in rounds]
        per = {rod: statistics.median(x.per[rod] for x in mine) for rod in mine[0].per}
        apart = {rod: (max(x.per[rod] for x in mine) - min(x.per[rod] for x in mine)) / (2 * per[rod]) for rod in per}
        noise = {rod: max(apart[rod], statistics.median(x.noise[rod] for x in mine)) for rod in per}
        found[name] = Figures(ms=statistics.median(x.ms for x in mine), low_ms=min(x.low_ms for x in mine),
                              samples=sum(x.samples for x in mine), per=per, noise=noise)  # fmt: skip
    return found


def _suite_groups(name: str, session: Session, how: Check) -> list[Group]:
    """Groups of another suite with its own defaults; its rows with a time are compared."""
    from dilated_attention.bench.suites import SUITES

    suite = SUITES[name]()
    own = argparse.ArgumentParser(add_help=False)
    suite.add_arguments(own)
    inner = replace(session, options=own.parse_args([]))
    return [Group(f"{name}: {group.label}", functools.partial(_of_suite, name, group, session, how)) for group in suite.groups(inner)]


def _of_suite(name: str, group: Group, session: Session, how: Check) -> list[Row]:
    label = f"{name}: {group.label}"
    then = {key: Figures.of_values(row.values) for key, row in how.rows(label).items()}
    rows: dict[str, Row] = {}
    found: dict[str, Figures] = {}
    for turn in range(how.rounds + _REPEATS):
        if turn >= how.rounds and not any(key in then and verdict(then[key], x, how.threshold) == _SLOWER for key, x in found.items()):
            break
        with one_thread(session.device):
            # the yardsticks before and behind, the faster of both
            before = _rods(session)
            fresh = [row for row in group.run() if how.wants(row.key)]
            rods = {rod: min(x, y) for (rod, x), y in zip(before.items(), _rods(session).values(), strict=True)}
        for row in fresh:
            rows.setdefault(row.key, row)
            if row.values.get("low_ms"):
                x = _of_row(row, rods)
                if row.key not in found or (row.key in then and change(then[row.key], x) < change(then[row.key], found[row.key])):
                    found[row.key] = x
    return judged([replace(row, values=found[key].values() if key in found else {}) for key, row in rows.items()], label, how)


def _rods(session: Session) -> dict[str, float]:
    """Milliseconds of each yardstick, the fastest of some turns."""
    figures = sampled({"nothing": lambda: None}, session.device, full=session.full, seconds=0.1)["nothing"]
    return {rod: figures.low_ms / ratio for rod, ratio in figures.per.items()}


def _of_row(row: Row, rods: Mapping[str, float]) -> Figures:
    ms, low, high = (row.values[key] for key in ("ms", "low_ms", "high_ms"))
    per = {rod: low / x for rod, x in rods.items()}
    return Figures(
        ms=ms, low_ms=low, samples=int(row.values.get("samples", 1)), per=per, noise=dict.fromkeys(rods, (high - low) / (2 * ms))
    )


def judged(rows: Sequence[Row], label: str, how: Check) -> list[Row]:
    """Rows with ``change``, ``threshold`` and the baseline's ``then_ms``, and one for each that the baseline has alone."""
    if how.baseline is None:
        return list(rows)
    then = how.rows(label)
    result = []
    for row in rows:
        old = then.pop(row.key, None)
        if old is None or not row.values:
            if old is not None:
                row = replace(row, note=f"missing: {row.note or 'no figure'}")
            elif row.values:
                row = replace(row, values=row.values | {"state": _NEW})
            result.append(row)
            continue
        a, b = Figures.of_values(old.values), Figures.of_values(row.values)
        state = _STATES[verdict(a, b, how.threshold)]
        result.append(replace(row, values=row.values | {"change": change(a, b), "then_ms": a.ms, "state": state}))
    return [*result, *(Row(name=old.name, case=old.case, note="missing: in the baseline only") for old in then.values())]


def _gone(how: Check, labels: Sequence[str]) -> list[Row]:
    return [row for label in labels for row in judged([], label, how)]


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU: threads that wait for one another wait for a neighbour's work, too."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _state(row: Row) -> str:
    """``"slower"``, ``"faster"``, ``"same"``, ``"missing"``, ``"new"``, or ``""`` of a row without figures here and there, or of a baseline."""
    if row.note.startswith("missing"):
        return "missing"
    names = {number: name for name, number in _STATES.items()}
    return names[int(row.values["state"])] if "state" in row.values else ""


def _described(row: Row) -> str:
    case = row.case
    shape = f"B={case['B']} N={case['N']}" if "B" in case and "N" in case else ""
    return ", ".join(filter(None, [row.name, shape, "causal" if case.get("causal") else "", str(case.get("pass", ""))]))


def _noise(row: Row) -> str:
    return f"{max(value for key, value in row.values.items() if key.startswith('noise_')):.0%}"


def _counts(rows: Sequence[Row]) -> Table:
    states = [state for row in rows if (state := _state(row))]
    names = (_SLOWER, "missing", _FASTER, "new", _SAME)
    return Table("rows", ("", "rows"), [[name, str(states.count(name))] for name in names], "Slower or missing: exit code 1.")


def _state_table(title: str, rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        v = row.values
        shown = [figure(v["then_ms"]) if "then_ms" in v else "–", figure(v["ms"]) if "ms" in v else "–"]
        cells.append([_described(row), *shown, f"{v['change']:+.0%}" if "change" in v else "–", _noise(row) if v else "–", row.note])
    caption = "Change and noise are of time by the yardsticks', not of milliseconds, which a busy machine stretches."
    return Table(title, ("", "ms then", "ms now", "change", "noise", ""), cells, caption)
