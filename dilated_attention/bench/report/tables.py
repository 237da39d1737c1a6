"""Tables of results, as Markdown for documents and as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention.bench.report.rows import Row


@dataclass(frozen=True)
class Table:
    """Cells are ready to print; ``caption`` is printed below: units, what is compared, what a sign means."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        body = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]
        return "\n".join([f"### {self.title}", "", *lines, *(["", self.caption] if self.caption else [])]) + "\n"

    def text(self) -> str:
        widths = [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]
        body = [
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in (self.columns, *self.rows)
        ]
        return "\n".join([self.title, *("  " + "  ".join(row).rstrip() for row in body), *([self.caption] if self.caption else [])]) + "\n"


def pivot(
    rows: Iterable[Row],
    value: str,
    *,
    across: str,
    title: str,
    scale: float = 1.0,
    caption: str = "",
    baseline: str | Mapping[Any, float] | None = None,
    more_is_better: bool = False,
) -> Table:
    """Builds a table: names as rows, the case's ``across`` as columns, and in the cells ``values[value] · scale``, or a note if missing.

    Args:
        baseline: name of a contender, or one figure per column; "(x ×)" is appended to cells: the baseline's figure divided by the cell's,
            so that above 1 is faster.
        more_is_better: figures are rates, so the ratio is inverted.
    """
    rows = list(rows)
    # if a whole group failed, it has a note and no place in the table
    failed = [f"{row.case.get('group', row.name)}: {row.note}." for row in rows if across not in row.case]
    rows = [row for row in rows if across in row.case]
    heads = list(dict.fromkeys(row.case[across] for row in rows))
    if all(isinstance(head, int) and not isinstance(head, bool) for head in heads):
        heads.sort()
    names = list(dict.fromkeys(row.name for row in rows if value in row.values))
    found = {(row.name, row.case[across]): row for row in rows}
    notes: dict[str, int] = {}
    if isinstance(baseline, str):
        bases = {row.case[across]: row.values[value] for row in rows if row.name == baseline and value in row.values}
    else:
        bases = dict(baseline or {})

    def cell(name: str, head: Any) -> str:
        row = found.get((name, head))
        if row is None or value not in row.values:
            return f"[{notes.setdefault(row.note, len(notes) + 1)}]" if row is not None and row.note else "–"
        text = figure(row.values[value] * scale)
        if bases.get(head) and name != baseline and row.values[value]:
            ratio = bases[head] / row.values[value]
            text += f" ({figure(1 / ratio if more_is_better else ratio)} ×)"
        return text

    body = [[name, *(cell(name, head) for head in heads)] for name in names]
    legend = " · ".join(f"[{number}] {note}" for note, number in notes.items())
    columns = [across, *(f"{head:,}" if isinstance(head, int) else str(head) for head in heads)]
    return Table(title, columns, body, "\n".join(filter(None, [caption, legend, absent(rows, value), *failed])))


def absent(rows: Iterable[Row], value: str) -> str:
    """Returns a sentence on contenders without a single figure, by their reason."""
    rows = list(rows)
    present = {row.name for row in rows if value in row.values}
    reasons: dict[str, list[str]] = {}
    for name in dict.fromkeys(row.name for row in rows if row.name not in present):
        # the first reason of several
        note = next(row.note for row in rows if row.name == name)
        reasons.setdefault(note or "no figure", []).append(name)
    return "Without figures: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()) + "." if reasons else ""


def figure(value: float) -> str:
    """Formats three digits, with thousands separators."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
