"""Tables and plots of ``scaling``, created from its rows alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot

PASSES = {"forward": "forward", "both": "forward + backward"}
MODES = {
    "strong": "strong scaling over processes: the same sequence, shared by more processes",
    "weak": "weak scaling over processes: as many positions for each, so a longer sequence",
}
# number of lengths, from the longest, that a law is fitted to: at short ones the times are those of launches
_FITTED = 3


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Fits x of y ∝ N^x, by least squares of log y over log N for the longest lengths; None for fewer than two."""
    last = sorted(points)[-_FITTED:]
    if len(last) < 2:
        return None
    xs, ys = ([math.log(value) for value in column] for column in zip(*last, strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def tables(results: Results) -> list[Table]:
    found = []
    for which, title in PASSES.items():
        rows = _of(results, "length", which)
        for value, name, unit, scale in (
            ("ns_per_token", "ms", "time per token, ns", 1.0),
            ("bytes_per_token", "peak_bytes", "memory per token, bytes", 1.0),
        ):
            if any(value in row.values for row in rows):
                found.append(_by_length(rows, value, name, f"{title}: {unit}, by positions", scale))
    for which, title in PASSES.items():
        for mode, what in (("weak", "sequences of equal length"), ("strong", "equally many tokens in more, shorter sequences")):
            rows = [row for row in _of(results, "batch", which) if row.case.get("mode", mode) == mode]
            if any("ms" in row.values for row in rows):
                caption = f"thousand tokens per second by batch; {what}: {_positions(rows)}"
                found.append(
                    pivot(rows, "tokens_per_s", across="B", title=f"{title}: {mode} scaling over batch", scale=1e-3, caption=caption)
                )
    return [*found, *(table for mode in MODES if (table := _over_processes(results, mode)) is not None)]


def _of(results: Results, part: str, which: str) -> list[Row]:
    """Returns the rows of a part and pass.

    Rows of its contenders and groups without figures are included only once, with the forward.
    """
    starts = {"length": ("length",), "batch": ("weak", "strong")}[part]
    found = []
    for row in results.rows:
        failed = "group" in row.case and row.case["group"].startswith(starts)
        if (row.case.get("part") == part or failed) and row.case.get("pass", "forward") == which:
            found.append(row)
    return found


def _positions(rows: Sequence[Row]) -> str:
    lengths = sorted({row.case["N"] for row in rows if "N" in row.case})
    return f"{lengths[0]:,} positions" if len(lengths) == 1 else f"{lengths[-1]:,} to {lengths[0]:,} positions"


def _by_length(rows: list[Row], value: str, whole: str, title: str, scale: float) -> Table:
    caption = (
        f"∝ N^: the exponent of a call by N, fitted to the {_FITTED} longest lengths; pairs: that of (query, key) pairs, so of arithmetic"
    )
    table = pivot(rows, value, across="N", title=title, scale=scale, caption=caption)
    laws = [(_law(rows, name, whole), _law(rows, name, "pairs")) for name, *_ in table.rows]
    body = [[*row, *("–" if law is None else f"{law:.2f}" for law in pair)] for row, pair in zip(table.rows, laws, strict=True)]
    return Table(table.title, [*table.columns, "∝ N^", "pairs ∝ N^"], body, table.caption)


def _law(rows: Iterable[Row], name: str, value: str) -> float | None:
    return exponent((row.case["N"], row.values[value]) for row in rows if row.name == name and row.values.get(value))


def _over_processes(results: Results, mode: str) -> Table | None:
    rows = [row for row in results.rows if row.case.get("part") == "processes" and row.case["mode"] == mode]
    failed = [row for row in results.rows if f" {mode} W=" in row.case.get("group", "")]
    if not rows and not failed:
        return None
    kinds = _kinds(rows)
    rows.sort(key=lambda row: (kinds.index(row.name), row.case["causal"], row.case.get("pass", "") != "forward", row.case["W"]))
    one = {_same(row): row for row in rows if row.case["W"] == 1 and "ms" in row.values}
    columns = [
        "function",
        "mask",
        "pass",
        "processes",
        "positions",
        "ms",
        "TFLOP/s each",
        "TFLOP/s alone",
        "efficiency",
        "against one",
        "receives, MiB",
        "sends, MiB",
    ]
    with_memory = any("peak_bytes" in row.values for row in rows)
    body = []
    for row in rows:
        if "ms" not in row.values:
            continue
        values, base = row.values, one.get(_same(row))
        cells = [row.name, "causal" if row.case["causal"] else "full", PASSES[row.case["pass"]], str(row.case["W"]), f"{row.case['N']:,}"]
        cells += [figure(values[key]) for key in ("ms", "tflops", "alone_tflops")]
        cells += [
            f"{100 * values['efficiency']:.0f} %",
            "–" if base is None else f"{values['tokens_per_s'] / base.values['tokens_per_s']:.2f} ×",
        ]
        cells += [figure(values[key] / 2**20) for key in ("received_bytes", "sent_bytes")]
        body.append([*cells, *([figure(values.get("peak_bytes", 0) / 2**30)] if with_memory else [])])
    caption = [
        "ms: the median of the slowest process; alone: TFLOP/s of the same kernel on one process, "
        + ("on the whole sequence" if mode == "strong" else "on as many positions as each has")
        + ", in the same run; efficiency: TFLOP/s of each process over that; "
        "against one: tokens per second over those of one process's run; received and sent by the process with the most"
    ]
    missing = [f"{row.name}, W={row.case['W']}, {'causal' if row.case['causal'] else 'full'}: {row.note}" for row in rows if row.note]
    caption.append("`torchrun --nproc-per-node W -m dilated_attention bench scaling` with the same --output adds the rows of W processes")
    caption += [*dict.fromkeys(missing), *(f"{row.case['group']}: {row.note}" for row in failed)]
    return Table(MODES[mode], [*columns, *(["peak, GiB"] if with_memory else [])], body, "\n".join(caption))


def _kinds(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def _same(row: Row) -> tuple[object, ...]:
    """Returns what rows of one process and of several have in common, except for the length, which grows in the weak part."""
    return (row.name, *(row.case[key] for key in ("mode", "B", "H", "D", "dtype", "causal")), row.case.get("pass"))


def plots(results: Results) -> list[Plot]:
    found = []
    for which, title in PASSES.items():
        rows = _of(results, "length", which)
        for value, whole, name, what, unit in (
            ("ns_per_token", "ms", "time", "Time", "nanoseconds per token"),
            ("bytes_per_token", "peak_bytes", "memory", "Memory beyond the inputs", "bytes per token"),
        ):
            lines = []
            for contender in _kinds(rows):
                law = _law(rows, contender, whole)
                label = contender if law is None else f"{contender}: a call ∝ N^{law:.2f}"
                lines += _line(rows, contender, "N", value, label)
            if any(len(line.x) > 1 for line in lines):
                found.append(
                    Plot(
                        name=f"{name}-{which}",
                        title=f"{what} per token, {title}",
                        x_label="positions",
                        y_label=unit,
                        lines=lines,
                        log_x=True,
                        log_y=True,
                        note=f"exponents fitted to the {_FITTED} longest lengths",
                    )
                )
        found += _of_batch(results, which, title)
    return [*found, *_of_processes(results)]


def _line(rows: Iterable[Row], name: str, across: str, value: str, label: str, scale: float = 1.0, *, dashed: bool = False) -> list[Line]:
    mine = sorted((row for row in rows if row.name == name and value in row.values), key=lambda row: row.case[across])
    if not mine:
        return []
    return [Line(label, [row.case[across] for row in mine], [scale * row.values[value] for row in mine], dashed=dashed)]


def _of_batch(results: Results, which: str, title: str) -> list[Plot]:
    rows = [row for row in _of(results, "batch", which) if "ms" in row.values]
    lines = [
        line
        for mode in ("weak", "strong")
        for name in _kinds(rows)
        for line in _line(
            [row for row in rows if row.case["mode"] == mode], name, "B", "tokens_per_s", f"{name}, {mode}", 1e-3, dashed=mode == "strong"
        )
    ]
    if not any(len(line.x) > 1 for line in lines):
        return []
    note = " · ".join(
        f"{mode}: {_positions([row for row in rows if row.case['mode'] == mode])}"
        for mode in ("weak", "strong")
        if any(row.case["mode"] == mode for row in rows)
    )
    return [
        Plot(
            name=f"batch-{which}",
            title=f"Throughput by batch, {title}",
            x_label="sequences",
            y_label="thousand tokens per second",
            lines=lines,
            log_x=True,
            log_y=True,
            note=note,
        )
    ]


def _of_processes(results: Results) -> list[Plot]:
    """Returns plots only if several numbers of processes were measured."""
    rows = [row for row in results.rows if row.case.get("part") == "processes" and "ms" in row.values]
    if len({row.case["W"] for row in rows}) < 2:
        return []
    found = []
    for mode in MODES:
        for which, title in PASSES.items():
            for value, scale, name, what, unit in (
                ("efficiency", 100.0, "efficiency", "Efficiency", "% of the kernel alone"),
                ("received_bytes", 2.0**-20, "wire", "Bytes on the wire", "MiB received by the process with the most"),
            ):
                lines = []
                for kind in _kinds(rows):
                    for causal in (False, True):
                        mine = [row for row in rows if (row.case["mode"], row.case["pass"], row.case["causal"]) == (mode, which, causal)]
                        lines += _line(mine, kind, "W", value, f"{kind}, {'causal' if causal else 'full'}", scale, dashed=causal)
                # the keys are exchanged once more in the backward: this plot is for both passes
                if name == "efficiency" and lines:
                    lines.append(
                        Line(
                            "the kernel alone",
                            sorted({row.case["W"] for row in rows}),
                            [100.0] * len({row.case["W"] for row in rows}),
                            dashed=True,
                            marked=False,
                        )
                    )
                if lines and (name, which) != ("wire", "forward"):
                    found.append(
                        Plot(
                            name=f"{name}-{mode}-{which}",
                            title=f"{what}, {mode} scaling, {title}",
                            x_label="processes",
                            y_label=unit,
                            lines=lines,
                            log_x=True,
                        )
                    )
    return found
