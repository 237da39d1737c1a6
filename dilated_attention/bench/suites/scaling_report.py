"""Tables and plots of ``scaling``, created from its rows alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot

PASSES = {"forward": "forward", "both": "forward + backward"}
# number of lengths, from the longest, that a law is fitted to: at short ones the times are those of launches
_FITTED = 3
# figure → (column, scale, what it is)
_COLUMNS = {
    "ms": ("called, ms", 1.0, "a call of a loop that does not synchronise, of the slowest process"),
    "host_ms": ("host, ms", 1.0, "until the loop's calls return"),
    "graph_ms": ("graph, ms", 1.0, "the same as a CUDA graph, where it can be captured"),
    "tflops": ("TFLOP/s", 1.0, "of one process"),
    "kernel_share": (
        "of the kernel, %",
        100.0,
        "rate over that of the kernel alone on a process's number of tokens, all processes at once",
    ),
    "efficiency": ("efficiency, %", 100.0, "time of one process on the whole sequence, the others waiting, over W times this time"),
    "tokens_per_s": ("tokens/s", 1.0, "of all processes"),
    "imbalance": ("imbalance", 1.0, "most pairs of a process over the mean"),
    "received_bytes": ("receives, MiB", 2.0**-20, "by the process with the most"),
    "sent_bytes": ("sends, MiB", 2.0**-20, "likewise"),
    "peak_bytes": ("peak, GiB", 2.0**-30, "beyond the inputs, likewise"),
}
# plot → (across, figure, scale, title, label of x)
_PLOTS = {
    "time": ("N", "ns_per_token", 1.0, "nanoseconds per token", "positions"),
    "memory": ("N", "bytes_per_token", 1.0, "bytes per token beyond the inputs", "positions"),
    "batch": ("B", "tokens_per_s", 1.0, "tokens per second", "sequences"),
    "efficiency": ("W", "efficiency", 100.0, "% of one process", "processes"),
}


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Fits x of y ∝ N^x, by least squares of log y over log N for the longest lengths; None for fewer than two."""
    last = sorted(points)[-_FITTED:]
    if len(last) < 2:
        return None
    return statistics.linear_regression([math.log(x) for x, _ in last], [math.log(y) for _, y in last]).slope


def tables(results: Results) -> list[Table]:
    rows = _compared(results)
    found = []
    for which, title in PASSES.items():
        lengths = _across(rows, "N", which)
        found += [_law(lengths, value, f"{title}: {_PLOTS[plot][3]}") for plot, value in (("time", "ms"), ("memory", "peak_bytes"))]
        found.append(pivot(_across(rows, "B", which), "tokens_per_s", across="B", title=f"{title}: tokens per second by batch"))
        found.append(pivot(_across(rows, "W", which), "efficiency", across="W", title=f"{title}: efficiency by processes, %", scale=100.0))
    found = [table for table in found if table.rows]
    for name in dict.fromkeys(_family(row) for row in rows):
        mine = [row for row in rows if _family(row) == name]
        shown = {key: place for key, place in _COLUMNS.items() if any(key in row.values for row in mine)}
        caption = "; ".join(f"{title}: {what}" for title, _, what in shown.values())
        missing = dict.fromkeys(f"{_name(row, 'case', 'mask', 'W')}: {row.note}" for row in mine if row.note)
        timed = sorted((row for row in mine if row.values), key=lambda row: (row.case["pass"] != "forward", row.case["N"], row.case["W"]))
        found.append(_wide(name, timed, {row.key: row.values for row in timed}, {key: place[:2] for key, place in shown.items()}))
        found[-1] = replace(found[-1], caption="\n".join([caption, *missing]))
        errors = {_name(row, "case", "mask", "W"): row for row in mine if row.errors}
        kinds = {key: (key, 1.0) for row in errors.values() for key in row.errors}
        found.append(_wide(f"{name}: errors", list(errors.values()), {row.key: row.errors for row in errors.values()}, kinds))
    failed = [[row.case["group"], row.note] for row in results.rows if "W" not in row.case]
    about = "relative: against float64 on a short sequence; (whole): against one process's result; (rows): of sampled rows, against float64"
    found = [replace(table, caption=about) if table.title.endswith(": errors") else table for table in found]
    return [*found, *([Table("not measured", ["group", "why"], failed)] if failed else [])]


def _wide(title: str, rows: Sequence[Row], values: Mapping[str, Mapping[str, float]], columns: Mapping[str, tuple[str, float]]) -> Table:
    """Builds a table with a line for each row: what it is, and its figures."""
    body = []
    for row in rows:
        what = [_name(row, "case", "mask"), str(row.case["W"]), f"{row.case['N']:,}", PASSES.get(row.case.get("pass", ""), "–")]
        found = values[row.key]
        body.append([*what, *(figure(found[key] * scale) if key in found else "–" for key, (_, scale) in columns.items())])
    return Table(title, ["contender", "W", "positions", "pass", *(column for column, _ in columns.values())], body)


def _compared(results: Results) -> list[Row]:
    """Returns the rows of contenders with figures per token, and with those that compare them with others of the same run."""
    rows = [row for row in results.rows if "W" in row.case]
    same = ("case", "mask", "W", "B", "H", "Hk", "D", "pass")
    known = {(tuple(row.case.get(key) for key in same), row.case["kind"], row.case["kernel"]): row.values for row in rows if row.values}
    found = []
    for row in rows:
        values, tokens = dict(row.values), row.case.get("B", 1) * row.case["N"]
        key = tuple(row.case.get(key) for key in same)
        # third-party code runs on kernels that may not have been timed alone
        of = ((key, kind, name) for kind in ("one process", "kernel") for name in (row.case["kernel"], "auto"))
        own, auto, kernel, other = (known.get(each) for each in of)
        whole, kernel = own or auto, kernel or other
        if values:
            values["ns_per_token"] = 1e6 * values["ms"] / tokens
            values |= {"bytes_per_token": values["peak_bytes"] / tokens} if "peak_bytes" in values else {}
        if values and row.case["kind"] in ("ring", "foreign"):
            values |= {"efficiency": whole["ms"] / row.case["W"] / values["ms"]} if whole else {}
            values |= {"kernel_share": values["tflops"] / kernel["tflops"]} if kernel and "tflops" in values and "tflops" in kernel else {}
        found.append(replace(row, values=values))
    return found


def _across(rows: Iterable[Row], across: str, which: str) -> list[Row]:
    """Returns the rows of a pass that show growth: of one process with the length N or the batch B, or of rings with the processes W."""
    found = []
    for row in rows:
        batched = "x" in str(row.case["case"]).rsplit("-", 1)[-1]
        alone = row.case["W"] == 1 and row.case["kind"] == "one process" and batched == (across == "B") and "B" in row.case
        if row.case.get("pass") == which and (row.case["kind"] == "ring" if across == "W" else alone):
            found.append(replace(row, name=_name(row, "case", "mask") if across == "W" else f"{_family(row)} {row.case['mask']}"))
    several = {row.case[across] for row in found}
    return found if len(several) > 1 else []


def _law(rows: Sequence[Row], value: str, title: str) -> Table:
    """Builds a table by length of a figure per token, with the exponents of the call and of its pairs."""
    table = pivot(rows, {"ms": "ns_per_token", "peak_bytes": "bytes_per_token"}[value], across="N", title=f"{title}, by positions")
    body = []
    for name, *cells in table.rows:
        mine = [row for row in rows if row.name == name]
        laws = [exponent((row.case["N"], row.values[key]) for row in mine if row.values.get(key)) for key in (value, "pairs")]
        body.append([name, *cells, *("–" if law is None else f"{law:.2f}" for law in laws)])
    caption = f"∝ N^: the exponent of a call, fitted to the {_FITTED} longest lengths; pairs: that of (query, key) pairs, so of arithmetic"
    return Table(table.title, [*table.columns, "∝ N^", "pairs ∝ N^"], body, f"{caption}\n{table.caption}")


def _name(row: Row, *keys: str) -> str:
    return " ".join([*(f"W={row.case['W']}" if key == "W" else str(row.case[key]) for key in keys), row.name])


def _family(row: Row) -> str:
    case = str(row.case["case"])
    return case.rsplit("-of-" if "-of-" in case else "-", 1)[0]


def plots(results: Results) -> list[Plot]:
    rows, found = _compared(results), []
    for which, title in PASSES.items():
        for name, (across, value, scale, unit, axis) in _PLOTS.items():
            points: dict[str, list[tuple[float, float]]] = {}
            for row in _across(rows, across, which):
                if value in row.values:
                    points.setdefault(row.name, []).append((row.case[across], scale * row.values[value]))
            lines = [Line(label, [x for x, _ in sorted(mine)], [y for _, y in sorted(mine)]) for label, mine in points.items()]
            if lines:
                found.append(Plot(name=f"{name}-{which}", title=f"{unit}, {title}", x_label=axis, y_label=unit, lines=lines, log_x=True))
    return found
