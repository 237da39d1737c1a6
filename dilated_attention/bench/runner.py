"""Suites: groups of rows and tables made from them. They run group by group, resuming, within a time limit, and write JSON and Markdown."""

from __future__ import annotations

import argparse
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dilated_attention.bench.measure.limits import attempt, release
from dilated_attention.bench.measure.sharded import Broken, of_first_process
from dilated_attention.bench.report.rows import UNDER_WAY, Results, Row, machine
from dilated_attention.bench.report.tables import Table
from dilated_attention.files import write_text


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and how a suite measures.

    Args:
        device: of all tensors.
        full: whether to use sizes for a GPU; otherwise those that two CPU cores can handle.
        dtypes: dtypes to measure, for suites that measure several; the first is the default.
        seconds: of timing for each contender and pass.
        options: the suite's own arguments.
        rank, world_size: of this process, where several measure together.
    """

    device: torch.device
    full: bool
    dtypes: tuple[torch.dtype, ...]
    seconds: float
    options: argparse.Namespace
    rank: int = 0
    world_size: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]


@dataclass(frozen=True)
class Group:
    """Rows that are measured together, in turns, and written together. ``label`` describes them and is unique in its suite."""

    label: str
    run: Callable[[], Iterable[Row]]


class Suite(ABC):
    """A kind of benchmark. An instance may run several times; it stores no results."""

    name: ClassVar[str]
    # a line for --help
    about: ClassVar[str]
    # whether several processes can measure it together; their groups then differ from those of one process
    over_processes: ClassVar[bool] = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - most suites have their own, none must
        """Adds options in addition to those of all suites. Options that change figures must be included in ``settings``."""

    def settings(self, session: Session) -> dict[str, Any]:
        """Returns the settings with which a file of results must have been made to be continued."""
        return {"size": "full" if session.full else "small"}

    @abstractmethod
    def groups(self, session: Session) -> Sequence[Group]:
        """Returns the groups in order of measurement; labels do not depend on what is measured. Called on every run: must be cheap."""

    @abstractmethod
    def tables(self, results: Results) -> list[Table]: ...

    def verdict(self, results: Results) -> tuple[bool, list[Table]]:
        """Returns whether the figures themselves are a failure, so that the exit code is 1, and tables on why."""
        return False, []


@dataclass
class Outcome:
    """The outcome of a run: results, files written, and groups that the time limit cut off.

    Args:
        together: the results with those of other runs in the file, from which tables are made.
        broken: why the processes could not continue together; "" if they could.
    """

    results: Results
    together: Results
    broken: str = ""
    written: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    measured: int = 0


def run(
    suite: Suite,
    session: Session,
    *,
    output: Path,
    minutes: float | None = None,
    fresh: bool = False,
    started: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Outcome:
    """Measures what ``output`` does not contain yet.

    Args:
        output: folder for ``<suite>.json`` and ``<suite>.md``.
        minutes: no group is started after this time. The remaining groups are named; the next run measures them.
        fresh: start over, whatever ``output`` contains.
        started: called with (groups done, total groups, label) before each group.

    Raises:
        ValueError: ``output`` holds results of other hardware, versions or settings; or several processes run a suite for one.
    """
    if session.world_size > 1 and not suite.over_processes:
        raise ValueError(f"{session.world_size} processes were started and suite {suite.name} runs on one; start it without torchrun")
    # what torchrun starts again goes on
    fresh = fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    # other processes write nothing, and read what the first one has
    path = None if fresh and session.rank else output / f"{suite.name}.json"
    results = Results.open(path, suite.name, machine(session.device), suite.settings(session), fresh=fresh)
    if session.rank:
        results.path = None
    groups = suite.groups(session)
    assert len({group.label for group in groups}) == len(groups), "labels of groups are unique"
    outcome = Outcome(results, results)
    begun = time.monotonic()
    for i, group in enumerate(groups):
        # where processes can no longer communicate, the rest is left
        if not outcome.broken and _agreed(group.label in results.groups, session):
            continue
        late = minutes is not None and time.monotonic() - begun > 60 * minutes
        if outcome.broken or _agreed(late, session):
            outcome.left_out += [group.label] if group.label not in results.groups else []
            continue
        started(i, len(groups), group.label)
        failed = Row(name="all", case={"group": group.label})
        if suite.over_processes and "MASTER_ADDR" in os.environ:
            results.add(group.label, [replace(failed, note=UNDER_WAY)])
        try:
            # a note where not even the inputs fit
            found, note = attempt(lambda group: list(group.run()), group)
        except Broken as broken:
            # recorded in the file, so that the next run continues after it
            found, note = None, str(broken)
            outcome.broken = note
        results.add(group.label, [replace(failed, note=note)] if found is None else found)
        outcome.measured += 1
        release()
    outcome.together = results.stored()
    if not session.rank:
        outcome.written = write(suite, results, output)
    return outcome


def _agreed(mine: bool, session: Session) -> bool:
    """Returns the first process's answer, which all processes follow: a group's exchanges need every process."""
    return mine if session.world_size == 1 else bool(of_first_process(mine, session.device))


def write(suite: Suite, results: Results, output: Path) -> list[Path]:
    """Writes ``<suite>.md``, and ``<suite>.json`` if no group has; returns their paths."""
    results.path = path = output / f"{suite.name}.json"
    if (stored := results.stored()) is results:
        results.save()
    results = stored
    lines = [f"## {suite.name}: {suite.about}", "", headline(results), "", f"`python -m dilated_attention bench {suite.name}`", ""]
    lines += [table.markdown() for table in suite.tables(results)]
    markdown = output / f"{suite.name}.md"
    write_text(markdown, "\n".join(lines))
    return [path, markdown]


def headline(results: Results) -> str:
    """Returns hardware, versions and date in one line."""
    hardware, versions = results.machine["hardware"], results.machine["versions"]
    threads = f", {hardware['threads']} threads" if "threads" in hardware else ""
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "dilated_attention")
    return f"{hardware['device']}{threads} · {known} · {results.machine['date']}"
