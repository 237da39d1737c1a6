"""What all suites share: a session's device and options, and the loop over groups that continues, compares and reports."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import Results, Row, slower
from benchmarks.timing import attempt, release


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and how a suite measures.

    Args:
        is_small: lengths that two CPU cores can handle.
        seconds: of timing for each contender and pass.
        options: the suite's own arguments.
        rank, world_size: of this process, where several measure together.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    is_small: bool
    seconds: float
    options: argparse.Namespace
    rank: int = 0
    world_size: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]


# rows that are measured together, in turns, under a label
Group = tuple[str, Callable[[], Sequence[Row]]]


def run(suite: str, session: Session, groups: Sequence[Group], *, foreign: Sequence[str] = ()) -> int:
    """Measures the groups that the output folder does not hold yet, prints the tables, and returns the exit code.

    It is 1 where a result is wrong, or, with ``--against``, where something of this library got slower.

    Args:
        foreign: names of other people's contenders.
    """
    options = session.options
    skipped = ("output", "fresh", "against", "threshold", "suite", "cases", "contenders", "tasks", "kinds", "seconds", "run")
    settings = {name: _plain(value) for name, value in vars(options).items() if name not in skipped and value not in (None, False, [])}
    results = Results.open(options.output, suite, session.device, settings, fresh=options.fresh)
    if session.rank:
        results.path = None
    then = None
    if against := getattr(options, "against", None):
        then = Results.load(against / f"{suite}.json")
        if then.machine["hardware"] != results.machine["hardware"]:
            raise ValueError(
                f"{then.path} is of {then.machine['hardware']}; expected a run on this hardware, {results.machine['hardware']}"
            )
    begun = time.monotonic()
    for i, (label, measure) in enumerate(groups):
        if label in results.groups and session.world_size == 1:
            continue
        if session.rank == 0:
            print(f"{suite} {i + 1}/{len(groups)}, {time.monotonic() - begun:.0f} s: {label}", file=sys.stderr, flush=True)
        # a note where not even the inputs fit
        rows, note = attempt(lambda measure: list(measure()), measure)
        rows = [Row(name="all", case={"group": label}, note=note)] if rows is None else rows
        results.add(label, rows)
        release()
    if session.rank:
        return 0
    # results are committed: no path of a machine
    words = ["PATH" if "/" in word else word for word in (sys.argv[1:] if sys.argv[0].endswith("__main__.py") else [suite])]
    command = f"python -m benchmarks {' '.join(words)}"
    print(results.report(command))
    worse = [] if then is None else [line for label, _ in groups for line in
                                     slower(label, results.groups[label], then, foreign, options.threshold).values()]  # fmt: skip
    print(*worse, sep="\n")
    wrong = [row for label, _ in groups for row in results.groups[label] if row.note.startswith("wrong")]
    return int(bool(worse or wrong))


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return Path(value).name if isinstance(value, Path) or "/" in str(value) else value
