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
    found, left_out = {results.machine["hardware"]["devices"]: results}, []
    for path in sorted(folder.glob(f"{results.suite}*.json")) if folder is not None else []:
        if re.fullmatch(rf"{re.escape(results.suite)}(-\d+)?\.json", path.name) and path.stem != stem(results):
            try:
                other = Results.load(path)
                why_not = results.differs(other, but=("devices",))
            except ValueError as error:
                why_not = str(error)
            if why_not:
                left_out.append(f"{path.name} is left out: {why_not}.")
            else:
                found[other.machine["hardware"]["devices"]] = other
    if len(found) == 1:
        return results, left_out
    groups = {f"{label} ({processes})": rows for processes, one in sorted(found.items()) for label, rows in one.groups.items()}
    hardware = results.machine["hardware"] | {"devices": ", ".join(str(processes) for processes in sorted(found))}
    return Results(results.suite, results.machine | {"hardware": hardware}, results.settings, groups), left_out
