"""Tables and plots of ``scaling``, created from its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dilated_attention.bench.report.plots import Plot, lines_of
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot

PASSES = {"forward": "forward", "both": "forward + backward"}
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


def tables(results: Results) -> list[Table]:
    rows = _compared(results)
    found = []
    for which, title in PASSES.items():
        if rings := _rings(rows, which):
            found.append(pivot(rings, "efficiency", across="W", title=f"{title}: efficiency by processes, %", scale=100.0))
    for name in dict.fromkeys(_family(row) for row in rows):
        mine = [row for row in rows if _family(row) == name]
        shown = {key: place for key, place in _COLUMNS.items() if any(key in row.values for row in mine)}
        caption = "; ".join(f"{title}: {what}" for title, _, what in shown.values())
        missing = dict.fromkeys(f"{row.case['case']} {row.case['mask']} W={row.case['W']} {row.name}: {row.note}" for row in mine if row.note)
        timed = sorted((row for row in mine if row.values), key=lambda row: (row.case["pass"] != "forward", row.case["N"], row.case["W"]))
        table = _wide(name, timed, {row.key: row.values for row in timed}, {key: place[:2] for key, place in shown.items()})
        found.append(replace(table, caption="\n".join([caption, *missing])))
        errors = {(_name(row), row.case["W"]): row for row in mine if row.errors}
        kinds = {key: (key, 1.0) for row in errors.values() for key in row.errors}
        found.append(_wide(f"{name}: errors", list(errors.values()), {row.key: row.errors for row in errors.values()}, kinds))
    failed = [[row.case["group"], row.note] for row in results.rows if "W" not in row.case]
    about = "relative, against float64; (whole): against one process's result"
    found = [replace(table, caption=about) if table.title.endswith(": errors") else table for table in found if table.rows]
    return [*found, *([Table("not measured", ["group", "why"], failed)] if failed else [])]


def plots(results: Results) -> list[Plot]:
    rows, found = _compared(results), []
    for which, title in PASSES.items():
        if lines := lines_of(_rings(rows, which), "efficiency", across="W", scale=100.0):
            unit = "% of one process"
            found.append(
                Plot(name=f"efficiency-{which}", title=f"{unit}, {title}", x_label="processes", y_label=unit, lines=lines, log_x=True)
            )
    return found


def _wide(title: str, rows: Sequence[Row], values: Mapping[str, Mapping[str, float]], columns: Mapping[str, tuple[str, float]]) -> Table:
    """Builds a table with a line for each row: what it is, and its figures."""
    body = []
    for row in rows:
        what = [_name(row), str(row.case["W"]), f"{row.case['N']:,}", PASSES.get(row.case.get("pass", ""), "–")]
        found = values[row.key]
        body.append([*what, *(figure(found[key] * scale) if key in found else "–" for key, (_, scale) in columns.items())])
    return Table(title, ["contender", "W", "positions", "pass", *(column for column, _ in columns.values())], body)


def _compared(results: Results) -> list[Row]:
    """Returns the rows of contenders, with figures that compare them with others of the same run."""
    rows = [row for row in results.rows if "W" in row.case]
    same = ("case", "mask", "W", "H", "Hk", "D", "pass")
    known = {(tuple(row.case.get(key) for key in same), row.case["kind"], row.case["kernel"]): row.values for row in rows if row.values}
    found = []
    for row in rows:
        values, key = dict(row.values), tuple(row.case.get(key) for key in same)
        # third-party code runs on kernels that may not have been timed alone
        of = ((key, kind, name) for kind in ("one process", "kernel") for name in (row.case["kernel"], "auto"))
        own, auto, kernel, other = (known.get(each) for each in of)
        whole, kernel = own or auto, kernel or other
        if values and row.case["kind"] in ("ring", "foreign"):
            values |= {"efficiency": whole["ms"] / row.case["W"] / values["ms"]} if whole else {}
            values |= {"kernel_share": values["tflops"] / kernel["tflops"]} if kernel and "tflops" in values and "tflops" in kernel else {}
        found.append(replace(row, values=values))
    return found


def _rings(rows: Iterable[Row], which: str) -> list[Row]:
    """Returns the rings' rows of a pass, where several numbers of processes were measured."""
    found = [replace(row, name=_name(row)) for row in rows if row.case.get("pass") == which and row.case["kind"] == "ring"]
    return found if len({row.case["W"] for row in found}) > 1 else []


def _name(row: Row) -> str:
    return f"{row.case['case']} {row.case['mask']} {row.name}"


def _family(row: Row) -> str:
    case = str(row.case["case"])
    return case.rsplit("-of-" if "-of-" in case else "-", 1)[0]
