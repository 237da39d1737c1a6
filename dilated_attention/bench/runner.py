"""Runs a suite group by group, resuming, within a time limit; then writes JSON and Markdown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dilated_attention.bench.measure.rank_sync import Broken, of_first_process
from dilated_attention.bench.measure.skip import is_out_of_memory, release
from dilated_attention.bench.report.rows import UNDER_WAY, Results, Row, machine
from dilated_attention.bench.suite import Session, Suite
from dilated_attention.files import write_text


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
    output: Path | None,
    minutes: float | None = None,
    fresh: bool = False,
    started: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Outcome:
    """Measures what ``output`` does not contain yet.

    Args:
        output: folder for ``<suite>.json`` and ``<suite>.md``; None writes nothing.
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
    path = None if output is None or (fresh and session.rank) else output / f"{suite.name}.json"
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
        rows: list[Row] = []
        note = ""
        failed = Row(name="all", case={"group": group.label})
        if suite.over_processes and "MASTER_ADDR" in os.environ:
            results.add(group.label, [replace(failed, note=UNDER_WAY)])
        try:
            rows = list(group.run())
        except Broken as broken:
            # recorded in the file, so that the next run continues after it
            note = outcome.broken = str(broken)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # even the inputs did not fit
            note = "out of memory"
        results.add(group.label, [replace(failed, note=note)] if note else rows)
        outcome.measured += 1
        release()
    outcome.together = results.stored()
    if output is not None and not session.rank:
        outcome.written = write(suite, results, output)
    return outcome


def _agreed(mine: bool, session: Session) -> bool:
    """Returns the first process's answer, which all processes follow: a group's exchanges need every process."""
    return mine if session.world_size == 1 else bool(of_first_process(mine, session.device))


def write(suite: Suite, results: Results, output: Path) -> list[Path]:
    """Writes ``<suite>.md``, and ``<suite>.json`` if no group has; returns their paths."""
    results.path = path = output / f"{suite.name}.json"
    stored = results.stored()
    if stored is results:
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
