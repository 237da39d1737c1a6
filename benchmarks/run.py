"""The loop over a suite's groups, which continues, compares and reports."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import Results, Row, slower
from benchmarks.timing import attempt, release

# rows that are measured together, in turns, under a label
Group = tuple[str, Callable[[], Sequence[Row]]]
# options that do not change what a row says
_NOT_SETTINGS = ("output", "fresh", "against", "threshold", "suite", "cases", "contenders", "tasks", "kinds", "seconds", "device", "dtypes",
                 "is_small", "rank", "world_size")  # fmt: skip


def run(options: argparse.Namespace, groups: Sequence[Group]) -> int:
    """Measures the groups that the output folder does not hold yet, prints the tables, and returns the exit code.

    It is 1 where a result is wrong, or, with ``--against``, where something of this library got slower.
    """
    settings = {
        name: _plain(value) for name, value in vars(options).items() if name not in _NOT_SETTINGS and value not in (None, False, [])
    }
    results = Results.open(options.output, options.suite, options.device, settings, fresh=options.fresh)
    if options.rank:
        results.path = None
    then = None
    if against := getattr(options, "against", None):
        then = Results.load(against / f"{options.suite}.json")
        there, here = then.machine["hardware"], results.machine["hardware"]
        if there != here:
            raise ValueError(f"{then.path} is of {there}; expected a run on this hardware, {here}")
    begun = time.monotonic()
    for i, (label, measure) in enumerate(groups):
        if label in results.groups and options.world_size == 1:
            continue
        if options.rank == 0:
            print(f"{options.suite} {i + 1}/{len(groups)}, {time.monotonic() - begun:.0f} s: {label}", file=sys.stderr, flush=True)
        # a note where not even the inputs fit
        rows, note = attempt(lambda measure: list(measure()), measure)
        results.add(label, [Row(name="all", case={"group": label}, note=note)] if rows is None else rows)
        release()
    if options.rank:
        return 0
    # results are committed: no path of a machine
    words = ["PATH" if "/" in word else word for word in (sys.argv[1:] if sys.argv[0].endswith("__main__.py") else [options.suite])]
    print(results.report(f"python -m benchmarks {' '.join(words)}"))
    rows = [(label, row) for label, _ in groups for row in results.groups[label]]
    worse = [line for label, _ in groups if then for line in slower(label, results.groups[label], then, options.threshold)]
    print(*worse, sep="\n")
    return int(bool(worse) or any(row.note.startswith("wrong") for _, row in rows))


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return Path(value).name if isinstance(value, Path) or "/" in str(value) else value
