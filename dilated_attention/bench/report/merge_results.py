"""Combines results of runs with one, two and more processes, stored in one file each."""

from __future__ import annotations

import re
from pathlib import Path

from dilated_attention.bench.report.rows import Results


def stem(results: Results) -> str:
    """Returns the stem of the file name: ``scaling`` for one process, ``scaling-4`` for four."""
    processes = results.machine["hardware"]["devices"]
    return results.suite if processes == 1 else f"{results.suite}-{processes}"


def joined(results: Results, folder: Path | None) -> tuple[Results, list[str]]:
    """Returns ``results`` with the groups that other numbers of processes stored in ``folder``, and sentences on what is left out.

    Only results with the same hardware, versions and settings are combined. Labels include the number of processes if there are several
    files.
    """
    found = {results.machine["hardware"]["devices"]: results}
    left_out = []
    for path in sorted(folder.glob(f"{results.suite}*.json")) if folder is not None else []:
        if not re.fullmatch(re.escape(results.suite) + r"(-\d+)?\.json", path.name):
            continue
        try:
            other = Results.load(path)
        except ValueError as error:
            left_out.append(f"{path.name} is left out: {error}.")
            continue
        processes = other.machine["hardware"]["devices"]
        if processes == results.machine["hardware"]["devices"]:
            continue
        differs = [what for what, theirs, ours in _compared(other, results) if theirs != ours]
        if differs:
            left_out.append(f"{path.name} is left out: made with other {' and '.join(differs)}.")
        else:
            found[processes] = other
    if len(found) == 1:
        return results, left_out
    groups = {f"{label} ({processes})": rows for processes, one in sorted(found.items()) for label, rows in one.groups.items()}
    hardware = results.machine["hardware"] | {"devices": ", ".join(str(processes) for processes in sorted(found))}
    return Results(results.suite, results.machine | {"hardware": hardware}, results.settings, groups), left_out


def _compared(a: Results, b: Results) -> list[tuple[str, object, object]]:
    mine, theirs = ({key: value for key, value in one.machine["hardware"].items() if key != "devices"} for one in (a, b))
    return [("hardware", mine, theirs), ("versions", a.machine["versions"], b.machine["versions"]), ("settings", a.settings, b.settings)]
