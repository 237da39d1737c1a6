"""Rows against a stored baseline of the same hardware: which are slower, faster, new or missing."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dilated_attention.bench.measure.reference_timing import Figures, change, verdict
from dilated_attention.bench.report.rows import Results, Row

# a row that looks slower is measured this many more times, and reported only if it is slower each time
REPEATS = 3
SLOWER, FASTER, SAME, MISSING, NEW = "slower", "faster", "same", "missing", "new"
# codes of the states in a row's values
_STATES = {SAME: 0, SLOWER: 1, FASTER: -1, NEW: 2}


@dataclass(frozen=True)
class Check:
    """How rows are compared. ``baseline`` is None while one is being created."""

    baseline: Results | None
    threshold: float
    rounds: int
    only: re.Pattern[str] | None

    def wants(self, key: str) -> bool:
        return self.only is None or self.only.search(key) is not None

    def rows(self, label: str) -> dict[str, Row]:
        """Returns the baseline's rows that have figures and were requested, by their keys."""
        rows = [] if self.baseline is None else self.baseline.groups.get(label, [])
        return {row.key: row for row in rows if row.values and self.wants(row.key)}


def hardware_of(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what two results must have in common. A CPU's thread count is not included: ``regression`` uses one thread."""
    return {key: value for key, value in whole["hardware"].items() if key != "threads"}


def slug(hardware: Mapping[str, Any]) -> str:
    """Returns a file name: ``nvidia-h200``, ``amd-epyc-2-cores``."""
    words = str(hardware["device"]) + (f" {hardware['cores']} cores" if "cores" in hardware else "")
    words += f" x{hardware['devices']}" if hardware["devices"] > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def measured(
    calls: Mapping[str, Callable[[], Any]],
    again: Callable[[Mapping[str, Callable[[], Any]]], dict[str, Figures]],
    how: Check,
    then: Mapping[str, Figures],
) -> dict[str, Figures]:
    """Returns the figures of each name; what looks slower than ``then`` is measured several times, and the best counts."""
    found = merged([again(calls) for _ in range(how.rounds)])
    for _ in range(REPEATS):
        suspects = [name for name in found if name in then and verdict(then[name], found[name], how.threshold) == SLOWER]
        if not suspects:
            break
        # measured together with the others again: their presence may affect caches and clocks
        for name, figures in again(calls).items():
            if name in suspects and change(then[name], figures) < change(then[name], found[name]):
                found[name] = figures
    return found


def merged(rounds: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """Returns the median of several rounds, with the differences between rounds as the noise where that is larger."""
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


def judged(rows: Sequence[Row], label: str, how: Check) -> list[Row]:
    """Returns the rows with ``change``, ``state`` and the baseline's ``then_ms``, and a row for each that only the baseline has."""
    if how.baseline is None:
        return list(rows)
    then = how.rows(label)
    result = []
    for row in rows:
        old = then.pop(row.key, None)
        if old is not None and row.values:
            a, b = Figures.of_values(old.values), Figures.of_values(row.values)
            state = _STATES[verdict(a, b, how.threshold)]
            row = replace(row, values=row.values | {"change": change(a, b), "then_ms": a.ms, "state": state})
        elif old is not None:
            row = replace(row, note=f"{MISSING}: {row.note or 'no figure'}")
        elif row.values:
            row = replace(row, values=row.values | {"state": _STATES[NEW]})
        result.append(row)
    return [*result, *(Row(name=old.name, case=old.case, note=f"{MISSING}: in the baseline only") for old in then.values())]


def state_of(row: Row) -> str:
    """Returns one of the five states; ``""`` for a row without figures in both, or of a baseline."""
    if row.note.startswith(MISSING):
        return MISSING
    return next(name for name, code in _STATES.items() if code == row.values["state"]) if "state" in row.values else ""
