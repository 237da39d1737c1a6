"""Times of a run against those of an earlier one of the same hardware and settings: what got slower by more than others did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure

# times that a group with a slower row is measured again before it is reported
REPEATS = 2
# near the fastest call: what else a machine does only adds time
_MS = "low_ms"
# contender and pass, which are unique in a group
Key = tuple[str, str]


@dataclass(frozen=True)
class Earlier:
    """An earlier run.

    Args:
        then: its results.
        others: names of other people's implementations. A row is slower only if it is so relative to each: a busy machine slows both.
        threshold: slowdown that is allowed, as a share of the time.
    """

    then: Results
    others: Collection[str]
    threshold: float

    @classmethod
    def open(cls, folder: Path, now: Results, others: Collection[str], threshold: float) -> Earlier:
        """Reads the results of ``now``'s suite in a folder. Raises ValueError where there are none of the same hardware and settings."""
        path = folder / f"{now.suite}.json"
        if not path.is_file():
            there = ", ".join(str(found.parent) for found in sorted(folder.rglob(path.name)))
            raise ValueError(f"{path} does not exist; expected a folder with results of suite {now.suite}{there and f', such as {there}'}")
        then = Results.load(path)
        if differs := now.differs(then, but=("versions",)):
            raise ValueError(f"{path} was {differs}; expected results of this hardware and these settings, to compare times with")
        return cls(then, others, threshold)

    def changes(self, label: str, rows: Iterable[Row]) -> dict[Key, tuple[float, float]]:
        """Returns by what factor each row of a group takes longer, and by what factor relative to other people's of that group and pass.

        Of several the factor nearest to 1 counts; where there are none, that relative to the first contender, the baseline of the case.
        """
        then, now = self._then(label), _timed(rows)
        factors = {key: now[key] / then[key] for key in then if key in now}
        found = {}
        for (name, which), factor in factors.items():
            same = {other: factor / x for (other, at), x in factors.items() if at == which and other != name}
            relative = [x for other, x in same.items() if other in self.others] or list(same.values())[:1] or [factor]
            found[name, which] = factor, min(relative) if factor > 1 else max(relative)
        return found

    def slower(self, label: str, rows: Iterable[Row]) -> set[Key]:
        """Returns this library's rows that got slower."""
        return {key for key, x in self.changes(label, rows).items() if key[0] not in self.others and min(x) > 1 + self.threshold}

    def measured(self, label: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Measures a group, again while one of its rows looks slower, and returns each row as it was fastest."""
        rows = measure()
        for _ in range(REPEATS):
            if not self.slower(label, rows):
                break
            again = {key: row for row in measure() for key in _timed([row])}
            rows = [min([row, *(again.get(key, row) for key in _timed([row]))], key=lambda one: one.values.get(_MS, 0.0)) for row in rows]
        return rows

    def verdict(self, now: Results, passes: Collection[str]) -> tuple[bool, list[Table]]:
        """Returns whether a row of this library got slower or is missing, and a table of what changed by more than the threshold."""
        body, failed = [], False
        for label, rows in now.groups.items():
            slower, changes, timed = self.slower(label, rows), self.changes(label, rows), _timed(rows)
            notes = {row.name: row.note for row in rows}
            for key, then in self._then(label).items():
                state, cells = "", ["–"] * 3
                if key in changes:
                    state = "slower" if key in slower else "faster" if max(changes[key]) * (1 + self.threshold) < 1 else ""
                    cells = [figure(timed[key]), *(f"{100 * (x - 1):+.0f}" for x in changes[key])]
                elif key[1] in passes:
                    state = f"missing: {notes.get(key[0], '') or 'not measured'}"
                failed |= state not in ("", "faster") and key[0] not in self.others
                body += [[f"{label}: {key[0]}, {key[1]}", figure(then), *cells, state]] if state else []
        caption = f"Changes above {100 * self.threshold:g} %, in time (10th percentile) and relative to other people's on the same case."
        return failed, [Table("changes", ("", "ms then", "ms now", "change, %", "relative, %", ""), body, caption)]

    def _then(self, label: str) -> dict[Key, float]:
        return _timed(self.then.groups.get(label, []))


def _timed(rows: Iterable[Row]) -> dict[Key, float]:
    return {(row.name, row.case["pass"]): row.values[_MS] for row in rows if _MS in row.values}
