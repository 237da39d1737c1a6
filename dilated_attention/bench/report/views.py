"""Rows of results as tables: chosen and labelled by what their cases hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure


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


def listing(rows: Iterable[Row], columns: Mapping[str, tuple[str, float]], *, title: str, caption: str = "") -> list[Table]:
    """Returns a table with a line for each row, and its note; [] without rows.

    Args:
        columns: heading → (key of the row's figures, errors or case; factor).
    """
    body = []
    for row in rows:
        known = {**row.case, **row.errors, **row.values}
        cells = [figure(scale * known[key]) if key in known else "–" for key, scale in columns.values()]
        body.append([row.name, *cells, row.note])
    return [Table(title, ("", *columns, ""), body, caption)] if body else []


def failures(results: Results) -> list[Table]:
    """Returns a table of the groups of which not even the inputs fitted; [] if there are none."""
    body = [(row.case["group"], row.note) for row in results.rows if "group" in row.case]
    return [Table("Groups that failed", ("group", "why"), body)] if body else []
