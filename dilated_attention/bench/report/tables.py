"""Tables of results, as Markdown for documents and as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention.bench.report.rows import Row

# notes that start with this are estimates for calls that were not run
ESTIMATED = "would take about "


@dataclass(frozen=True)
class Table:
    """Cells are ready to print; ``caption`` is printed below: units, what is compared, what a sign means."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _piped(self.columns), _piped(["---", *["---:"] * (len(self.columns) - 1)])]
        lines += [_piped(row) for row in self.rows]
        return "\n".join([*lines, *(["", self.caption] if self.caption else [])]) + "\n"

    def text(self) -> str:
        widths = [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]
        lines = [self.title, *(_aligned(row, widths) for row in (self.columns, *self.rows))]
        return "\n".join([*lines, *([self.caption] if self.caption else [])]) + "\n"


@dataclass(frozen=True)
class Value:
    """A figure of rows: its key, its title with the unit, the factor between them, and whether more is better."""

    key: str
    title: str
    scale: float = 1.0
    is_rate: bool = False


def _piped(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True)))
    return "  " + "  ".join([first, *others]).rstrip()


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
    share: Callable[[Row], float | None] = lambda row: None,
) -> Table:
    """Builds a table: names as rows, the case's ``across`` as columns, and in the cells ``values[value] · scale``, or a note if missing.

    Args:
        baseline: name of a contender, or one figure per column; "(x ×)" is appended to cells: the baseline's figure divided by the cell's,
            so that above 1 is faster.
        more_is_better: figures are rates, so the ratio is inverted.
        share: of a row, from 0 to 1; "(x %)" is appended to cells that have one.
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
        if row is None:
            return "–"
        if value not in row.values and row.note.startswith(ESTIMATED):
            return "≈ " + row.note.removeprefix(ESTIMATED)
        if value not in row.values:
            return f"[{notes.setdefault(row.note, len(notes) + 1)}]" if row.note else "–"
        text = figure(row.values[value] * scale)
        if bases.get(head) and name != baseline and row.values[value]:
            ratio = bases[head] / row.values[value]
            text += f" ({figure(1 / ratio if more_is_better else ratio)} ×)"
        part = share(row)
        return text if part is None else f"{text} ({figure(100 * part)} %)"

    body = [[name, *(cell(name, head) for head in heads)] for name in names]
    legend = " · ".join(f"[{number}] {note}" for note, number in notes.items())
    if any(text.startswith("≈ ") for line in body for text in line[1:]):
        legend = " ".join(filter(None, ["≈: estimated from a shorter length, and not run.", legend]))
    columns = [across, *(f"{head:,}" if isinstance(head, int) else str(head) for head in heads)]
    return Table(title, columns, body, "\n".join(filter(None, [caption, legend, absent(rows, value), *failed])))


def absent(rows: Iterable[Row], value: str) -> str:
    """Returns a sentence on contenders without a single figure, by their reason."""
    rows = list(rows)
    present = {row.name for row in rows if value in row.values}
    first = {row.name: row.note or "no figure" for row in reversed(rows) if row.name not in present}
    reasons: dict[str, list[str]] = {}
    for name in dict.fromkeys(row.name for row in rows if row.name in first):
        reasons.setdefault(first[name], []).append(name)
    return "Without figures: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()) + "." if reasons else ""


def figure(value: float) -> str:
    """Formats three digits, with thousands separators."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
