"""Tables and the plot of ``regression``, created from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from dilated_attention.bench.report.baseline import FASTER, SAME, SLOWER, state_of
from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure


def tables(results: Results) -> list[Table]:
    rows = results.rows
    if not any(state_of(row) for row in rows):
        cells = [[_described(row), figure(row.values["ms"]), _noise(row)] for row in rows if row.values]
        return [
            Table(
                "baseline",
                ("", "ms", "noise"),
                cells,
                "Noise: half the spread of the figures over blocks of turns, by the yardstick that shows more.",
            )
        ]
    tables = [_counts(rows)]
    for state, title in ((SLOWER, "slower"), ("missing", "missing"), (FASTER, "faster"), ("new", "new"), (SAME, "the same")):
        mine = [row for row in rows if state_of(row) == state]
        if mine:
            tables.append(_state_table(title, sorted(mine, key=lambda row: -row.values.get("change", 0.0))))
    return tables


def plots(results: Results) -> list[Plot]:
    known = [row for row in results.rows if "change" in row.values]
    if not known:
        return []
    lines = []
    for name in dict.fromkeys(row.name for row in known):
        mine = [row for row in known if row.name == name]
        lines.append(Line(name, [row.values["then_ms"] for row in mine], [1 + row.values["change"] for row in mine], joined=False))
    ends = [min(x for line in lines for x in line.x), max(x for line in lines for x in line.x)]
    lines.append(Line("as the baseline", ends, [1, 1], dashed=True, marked=False))
    note = "By the yardstick that shows the smallest change; one point per case."
    return [Plot(name="change", title="Time against the baseline", x_label="milliseconds in the baseline", y_label="time / baseline's time",
                 lines=lines, log_x=True, note=note)]  # fmt: skip


def _described(row: Row) -> str:
    case = row.case
    shape = f"B={case['B']} N={case['N']}" if "B" in case and "N" in case else ""
    return ", ".join(filter(None, [row.name, shape, "causal" if case.get("causal") else "", str(case.get("pass", ""))]))


def _noise(row: Row) -> str:
    return f"{max(value for key, value in row.values.items() if key.startswith('noise_')):.0%}"


def _counts(rows: Sequence[Row]) -> Table:
    states = [state for row in rows if (state := state_of(row))]
    names = (SLOWER, "missing", FASTER, "new", SAME)
    return Table("rows", ("", "rows"), [[name, str(states.count(name))] for name in names], "Slower or missing: exit code 1.")


def _state_table(title: str, rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        v = row.values
        shown = [figure(v["then_ms"]) if "then_ms" in v else "–", figure(v["ms"]) if "ms" in v else "–"]
        cells.append([_described(row), *shown, f"{v['change']:+.0%}" if "change" in v else "–", _noise(row) if v else "–", row.note])
    caption = "Change and noise are of times relative to the yardsticks', not of milliseconds, which are longer on a busy machine."
    return Table(title, ("", "ms then", "ms now", "change", "noise", ""), cells, caption)
