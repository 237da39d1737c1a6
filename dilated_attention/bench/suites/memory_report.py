"""Tables and plots of the suite ``memory``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, absent, figure, pivot
from dilated_attention.bench.workloads import model_memory
from dilated_attention.bench.workloads.contenders import DENSE, STANDARD
from dilated_attention.planning.estimate.plan import MOST_POSITIONS

_DENSE_KERNELS = {contender.name for contender in DENSE if contender is not STANDARD}
PASSES = ("forward", "training")


def tables(results: Results) -> list[Table]:
    return [*_attention_tables(results), *_fits_tables(results), *_model_tables(results)]


def plots(results: Results) -> list[Plot]:
    return [*_attention_plots(results), *_fits_plots(results), *_model_plots(results)]


def _part(results: Results, part: str, **case: Any) -> list[Row]:
    return [row for row in results.rows if row.case.get("part") == part and all(row.case.get(key) == value for key, value in case.items())]


def _attention_tables(results: Results) -> list[Table]:
    tables = []
    for which in PASSES:
        rows = _part(results, "attention", **{"pass": which})
        if not rows:
            continue
        tables.append(pivot(rows, "peak_bytes", across="N", scale=2**-20, title=f"peak memory of {which}, MiB by positions",
                            caption="Inputs, results and everything in between; causal, one sequence."))  # fmt: skip
        tables.append(_reductions(rows, which))
        if any("off" in row.values for row in rows):
            tables.append(pivot(rows, "off", across="N", scale=100, title=f"measured against predicted, {which}, percent",
                                caption="Above 0: more than predicted."))  # fmt: skip
    return tables


def _reductions(rows: Sequence[Row], which: str) -> Table:
    """Compares at the longest sequence for which the standard attention has figures, and at each implementation's longest."""
    peaks = {(row.name, row.case["N"]): row.values["peak_bytes"] for row in rows if row.values}
    cells = []
    for name in dict.fromkeys(name for name, _ in peaks):
        longest = max(n for other, n in peaks if other == name)
        peak = peaks[name, longest]
        standard = peaks.get((STANDARD.name, longest))
        best = min((peaks[other, n] for other, n in peaks if n == longest and other in _DENSE_KERNELS), default=None)
        batch = next(row.case["B"] for row in rows)
        against = [f"{figure(x / peak)} ×" if x else "–" for x in (standard, best)]
        cells.append([name, f"{longest:,}", figure(peak / 2**20), figure(peak / longest / batch / 2**20), *against])
    columns = ("", "positions", "MiB", "MiB per token", "less than standard", "less than best dense kernel")
    return Table(f"memory of {which} per token, and the reduction", columns, cells, absent(rows, "peak_bytes"))


def _fits_tables(results: Results) -> list[Table]:
    tables = []
    for which in PASSES:
        rows = _part(results, "fits", **{"pass": which})
        if not rows:
            continue
        checked = sum("peak_bytes" in row.values for row in rows)
        failed = [f"{row.name}, {row.case['GB']} GB: {row.note}" for row in rows if row.note and not row.note.startswith("not tried")]
        caption = (
            "By formula: one layer's attention of Llama-7B's shape, 32 heads of 128, causal, bfloat16, inputs and results included, "
            f"nine tenths of the memory in use. {checked} of {len(rows)} were run under that memory limit on this GPU"
        )
        caption += f"; {'; '.join(failed)}." if failed else "."
        tables.append(
            pivot(
                [replace(row, note="") for row in rows],
                "longest",
                across="GB",
                title=f"longest sequence that fits, {which}, by GB",
                caption=caption,
            )
        )
        if checked:
            tables.append(pivot(rows, "off", across="GB", scale=100, title=f"of these, measured against predicted, {which}, percent"))
    return tables


def _model_tables(results: Results) -> list[Table]:
    tables = []
    for n in sorted({row.case["N"] for row in _part(results, "model")}):
        rows = [row for row in _part(results, "model", N=n) if row.values]
        cells = []
        for row in rows:
            v = row.values
            shown = [figure(v[key] / 2**20) if key in v else "–" for key in ("few_bytes", "predicted_few_bytes")]
            shown.append(f"{v['off']:+.1%}" if "off" in v else "–")
            shown += [figure(v[key] / 2**20) if key in v else "–" for key in ("layer_bytes", "all_bytes", "predicted_bytes")]
            shown.append(f"{v['off_all']:+.1%}" if "off_all" in v else "–")
            cells.append([f"{row.name}, {row.case['work']}", *shown])
        some = model_memory.DEPTHS[1]
        columns = ("", f"{some} layers", "predicted", "off", "each layer", f"{model_memory.LAYERS} layers", "predicted", "off")
        full = bool(rows) and bool(rows[0].case["full"])
        what = "Llama-7B's shape" if full else "Llama-7B's proportions at a sixteenth of its width"
        caption = (
            f"A model of {what}, one sequence. {some} layers are measured. Figures of {model_memory.LAYERS} layers are these plus what "
            f"each further layer takes, from {model_memory.DEPTHS[0]} and {some} layers. Training: AdamW in float32, its moments included."
        )
        tables.append(
            Table(
                f"memory of a model at {n:,} positions, MiB",
                columns,
                cells,
                "\n".join(filter(None, [caption, absent(_part(results, "model", N=n), "few_bytes")])),
            )
        )
    rows = _part(results, "model fits")
    if rows:
        named = [replace(row, name=f"{row.name}, {row.case['work']}") for row in rows]
        caption = (
            "By formula and fake tensors: all 32 layers, one sequence, nine tenths of the memory in use. Training: "
            "float32 weights and AdamW, bfloat16 autocast. Generating: bfloat16, keys and values cached. 0: not even the weights fit; "
            f"{figure(MOST_POSITIONS)} is the upper limit of the search."
        )
        tables.append(pivot(named, "longest", across="GB", title="longest sequence of a 7B model on one GPU, by GB", caption=caption))
    return tables


def _attention_plots(results: Results) -> list[Plot]:
    plots = []
    for which in PASSES:
        lines = []
        rows = [row for row in _part(results, "attention", **{"pass": which}) if row.values]
        least, label = _least_dense(rows)
        for name in dict.fromkeys(row.name for row in rows):
            if name in _DENSE_KERNELS and name != least:
                continue
            mine = sorted((row for row in rows if row.name == name), key=lambda row: row.case["N"])
            shown = label if name == least else name
            lines.append(Line(shown, [row.case["N"] for row in mine], [row.values["peak_bytes"] / 2**20 for row in mine]))
        if lines:
            plots.append(Plot(name=f"peak-{which}", title=f"Peak memory of {which}, causal attention", x_label="positions", y_label="MiB",
                              lines=lines, log_x=True, log_y=True))  # fmt: skip
    return plots


def _least_dense(rows: Sequence[Row]) -> tuple[str, str]:
    """Returns (name, label) of the dense kernel with the least memory at the longest sequence; most kernels take about the same."""
    dense = [row for row in rows if row.name in _DENSE_KERNELS]
    if not dense:
        return "", ""
    longest = max(row.case["N"] for row in dense)
    name = min((row for row in dense if row.case["N"] == longest), key=lambda row: row.values["peak_bytes"]).name
    count = len({row.name for row in dense})
    return name, f"{name} (least of {count} dense kernels)" if count > 1 else name


def _fits_plots(results: Results) -> list[Plot]:
    plots = []
    for which in PASSES:
        rows = _part(results, "fits", **{"pass": which})
        sizes = sorted({row.case["GB"] for row in rows})
        lines = []
        for name in dict.fromkeys(row.name for row in rows):
            mine = {row.case["GB"]: row.values["longest"] for row in rows if row.name == name}
            lines.append(Line(name, range(len(sizes)), [mine.get(gib, 0) for gib in sizes]))
        if lines:
            plots.append(Plot(name=f"fits-{which}", title=f"Longest sequence that fits, {which}, one layer's attention",
                x_label="memory of the GPU",
                              y_label="positions", lines=lines, bars=[f"{gib} GB" for gib in sizes], log_y=True))  # fmt: skip
    return plots


def _model_plots(results: Results) -> list[Plot]:
    some, every = model_memory.DEPTHS[1], model_memory.LAYERS
    pairs = ((f"{some}", "few_bytes", "measured", "predicted_few_bytes"), (f"{every}", "all_bytes", f"by {some} layers", "predicted_bytes"))
    plots = []
    for n in sorted({row.case["N"] for row in _part(results, "model")}):
        rows = [row for row in _part(results, "model", N=n) if row.values]
        works = list(dict.fromkeys(row.case["work"] for row in rows))
        for layers, found, how, predicted in pairs:
            lines = []
            for kind in dict.fromkeys(row.name for row in rows):
                mine = {row.case["work"]: row.values for row in rows if row.name == kind}
                for key, label in ((found, how), (predicted, "predicted")):
                    if all(key in mine.get(work, {}) for work in works):
                        lines.append(Line(f"{kind}, {label}", range(len(works)), [mine[work][key] / 2**30 for work in works]))
            if lines:
                title = f"{layers} layers of Llama-7B's {'shape' if rows[0].case['full'] else 'proportions, small'}, {n:,} positions"
                plots.append(Plot(name=f"model-{n}-{layers}", title=title, x_label="", y_label="peak memory, GiB", lines=lines, bars=works))
    return plots
