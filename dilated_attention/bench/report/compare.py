"""Times of a run against those of an earlier one of the same hardware and settings: what got slower by more than others did."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure

# times that a group with a slower row is measured again before it is reported
REPEATS = 2
# near the fastest call: what else a machine does only adds time
_MS = "low_ms"


@dataclass(frozen=True)
class Earlier:
    """An earlier run.

    Args:
        then: its results.
        others: names of other people's implementations. A row is slower only if it is so relative to each: a busy machine slows both.
        passes: that are measured now.
        threshold: slowdown that is allowed, as a share of the time.
    """

    then: Results
    others: Collection[str]
    passes: Collection[str]
    threshold: float

    @classmethod
    def open(cls, folder: Path, now: Results, **how: Any) -> Earlier:
        """Reads the results of ``now``'s suite in a folder. Raises ValueError where there are none of the same hardware and settings."""
        path = folder / f"{now.suite}.json"
        if not path.is_file():
            there = ", ".join(str(found.parent) for found in sorted(folder.rglob(path.name)))
            raise ValueError(f"{path} does not exist; expected a folder with results of suite {now.suite}{there and f', such as {there}'}")
        then = Results.load(path)
        if differs := now.differs(then, but=("versions",)):
            raise ValueError(f"{path} was {differs}; expected results of this hardware and these settings, to compare times with")
        return cls(then, **how)

    def changes(self, label: str, rows: Iterable[Row]) -> tuple[bool, list[list[str]]]:
        """Returns whether a row of this library got slower or has no time any more, and lines of what changed by more than the threshold.

        By the time itself and relative to other people's of that group and pass, of which that nearest to no change counts; where there
        are none, relative to the first contender, the baseline of the case.
        """
        rows, is_worse, lines = list(rows), False, []
        now, notes = _timed(rows), {row.name: row.note for row in rows}
        then = {key: ms for key, ms in _timed(self.then.groups.get(label, [])).items() if key[1] in self.passes}
        factors = {key: now.get(key, math.inf) / ms for key, ms in then.items()}
        for (name, which), factor in factors.items():
            same = {other: factor / x for (other, at), x in factors.items() if at == which and other != name and x < math.inf}
            relative = [x for other, x in same.items() if other in self.others] or list(same.values())[:1] or [factor]
            both = factor, min(relative) if factor > 1 else max(relative)
            if not (slower := min(both) > 1 + self.threshold) and max(both) * (1 + self.threshold) >= 1:
                continue
            is_worse |= slower and name not in self.others
            cells, state = ["–"] * 3, f"missing: {notes.get(name) or 'not measured'}"
            if factor < math.inf:
                cells = [figure(now[name, which]), *(f"{100 * (x - 1):+.0f}" for x in both)]
                state = "slower" if slower else "faster"
            lines.append([f"{label}: {name}, {which}", figure(then[name, which]), *cells, state])
        return is_worse, lines

    def measured(self, label: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Measures a group, again while one of its rows looks worse, and returns each row as it was fastest."""
        rows = measure()
        for _ in range(REPEATS):
            if self.changes(label, rows)[0]:
                best = {(row.name, row.case.get("pass")): row for row in rows}
                for row in measure():
                    key = row.name, row.case.get("pass")
                    best[key] = min(best.get(key, row), row, key=lambda one: one.values.get(_MS, math.inf))
                rows = list(best.values())
        return rows

    def verdict(self, now: Results) -> tuple[bool, list[Table]]:
        """Returns whether a row of this library got worse, and a table of what changed by more than the threshold or is missing."""
        found = [self.changes(label, rows) for label, rows in now.groups.items()]
        caption = f"Changes above {100 * self.threshold:g} %, in time (10th percentile) and relative to other people's on the same case."
        body = [line for _, lines in found for line in lines]
        table = Table("changes", ("", "ms then", "ms now", "change, %", "relative, %", ""), body, caption)
        return any(is_worse for is_worse, _ in found), [table]


def _timed(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Returns the times by contender and pass, which are unique in a group."""
    return {(row.name, row.case["pass"]): row.values[_MS] for row in rows if _MS in row.values}
