"""Rows of results as tables, chosen and labelled by what their cases hold; as Markdown for documents and plain text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dilated_attention.bench.report.rows import Results, Row


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


def having(results: Results, **case: Any) -> list[Row]:
    """Returns the rows whose case holds these entries."""
    return [row for row in results.rows if case.items() <= row.case.items()]


def by(rows: Iterable[Row], key: str) -> Iterator[tuple[Any, list[Row]]]:
    """Yields each value that the cases have under ``key``, in order of appearance, with its rows."""
    rows = [row for row in rows if key in row.case]
    for value in dict.fromkeys(row.case[key] for row in rows):
        yield value, [row for row in rows if row.case[key] == value]


def labelled(rows: Iterable[Row], name: str = "{name}", **case: str) -> list[Row]:
    """Formats names, and entries to add to the cases, from ``name`` and the case: ``labelled(rows, "{name}, {work}", at="{B} × {N:,}")``.

    A row whose case lacks an entry, such as that of a group that failed, keeps its own.
    """
    made = []
    for row in rows:
        known = {"name": row.name, **row.case}
        try:
            added = {key: text.format(**known) for key, text in case.items()}
            made.append(replace(row, name=name.format(**known), case=row.case | added))
        except KeyError:
            made.append(row)
    return made


def compared(rows: Iterable[Row], value: str, base: str, same: str, *, more_is_better: bool = False) -> list[Row]:
    """Adds ``times`` to the rows: how much better ``value`` is than that of contender ``base`` whose case has an equal ``same``."""
    rows = list(rows)
    bases = {row.case[same]: row.values[value] for row in rows if row.name == base and value in row.values}
    found = []
    for row in rows:
        ratio = bases[row.case[same]] / row.values[value] if row.case.get(same) in bases and row.values.get(value) else None
        times = {} if ratio is None else {"times": 1 / ratio if more_is_better else ratio}
        found.append(replace(row, values=row.values | times))
    return found


def listing(rows: Iterable[Row], columns: Mapping[str, tuple[str, float]], *, title: str, caption: str = "") -> list[Table]:
    """Returns a table with a line for each row, and its note; [] without rows.

    Args:
        columns: heading → (key of the row's figures, errors or case; factor). Those that no row has are left out.
    """
    rows = list(rows)
    known: list[dict[str, Any]] = [{**row.case, **row.errors, **row.values} for row in rows]
    columns = {head: place for head, place in columns.items() if any(place[0] in held for held in known)}

    def cell(held: Any, scale: float) -> str:
        return held if isinstance(held, str) else figure(scale * held)

    cells = [[cell(held.get(key, "–"), scale) for key, scale in columns.values()] for held in known]
    body = [[row.name, *mine, row.note] for row, mine in zip(rows, cells, strict=True)]
    return [Table(title, ("", *columns, ""), body, caption)] if body else []


def across(rows: Iterable[Row], key: str, value: str, *, title: str, caption: str = "", scale: float = 1.0) -> list[Table]:
    """Returns a table with a line for each name and a column for each value of the cases' ``key``; [] without figures."""
    rows = [row for row in rows if key in row.case]
    heads = dict.fromkeys(row.case[key] for row in rows)
    cells = {(row.name, row.case[key]): figure(scale * row.values[value]) if value in row.values else row.note for row in rows}
    names = dict.fromkeys(row.name for row in rows if value in row.values)
    body = [[name, *(cells.get((name, head), "–") for head in heads)] for name in names]
    return [Table(title, (key, *map(str, heads)), body, caption)] if body else []


def failures(results: Results) -> list[Table]:
    """Returns a table of the groups of which not even the inputs fitted; [] if there are none."""
    body = [(row.case["group"], row.note) for row in results.rows if "group" in row.case]
    return [Table("Groups that failed", ("group", "why"), body)] if body else []


def figure(value: float) -> str:
    """Formats three digits, with thousands separators."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
