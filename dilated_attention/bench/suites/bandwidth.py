"""Measures how close each pass comes to the machine's two limits: memory bandwidth and the rate of matrix products (the roofline)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.measure.forward_backward import FLOPS, PASSES
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.measure.timing import interleaved
from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, absent, figure
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads import kernels
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.planning import detected_gpu

# excluded: 8-bit products, which have a different limit, and pairs chosen by the data, whose number is not known beforehand
CONTENDERS = {
    x.name: x for x in (*DENSE, *MODULES) if x.name not in ("flash3_fp8", "BlockSparseAttention chosen", "BlockSparseDilatedAttention")
}
COPY, PRODUCT = "copy", "matrix product"


class Bandwidth(Suite):
    """Achieved FLOP/s and bytes/s, compared with what is possible."""

    name = "bandwidth"
    about = "achieved against possible bandwidth and FLOP/s of every pass (roofline)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all except the 8-bit ones")
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))

    def problems(self, session: Session) -> list[Problem]:
        """Returns one problem bound by matrix products, and one of many short sequences."""
        shapes = ((1, 16384, 16, 128), (128, 256, 16, 64)) if session.full else ((1, 1024, 4, 64), (16, 128, 4, 64))
        return [
            Problem(batch_size=b, num_positions=n, num_heads=h, head_dim=d, dtype=session.dtype, device=session.device)
            for b, n, h, d in shapes
        ]

    def groups(self, session: Session) -> Sequence[Group]:
        chosen = [CONTENDERS[name] for name in session.options.contenders or CONTENDERS]
        attending = [
            Group(f"attention {problem.label}", functools.partial(_attention, chosen, problem, session.options.passes, session.seconds))
            for problem in self.problems(session)
        ]
        return [
            Group("ceilings", functools.partial(_ceilings, session)),
            *attending,
            Group("kernels", functools.partial(_kernels, session)),
        ]

    def tables(self, results: Results) -> list[Table]:
        tables = [_ceilings_table(results)]
        for label, rows in results.groups.items():
            if label.startswith("attention "):
                tables.append(_attention_table(label, rows, Roof.of(results)))
        kernels = [row for row in results.rows if row.case.get("part") == "kernels"]
        return [*tables, _kernels_table(kernels, Roof.of(results))] if kernels else tables

    def plots(self, results: Results) -> list[Plot]:
        roof = Roof.of(results)
        plots = [plot for which in PASSES for plot in _roofline(results, which, roof)]
        timed = [row for row in results.rows if row.case.get("part") == "kernels" and row.values]
        if timed and roof.copy:
            names = [COPY, *(row.name for row in timed)]
            bars = [Line("measured", range(len(names)), [roof.copy, *(row.values["gb_s"] for row in timed)])]
            if roof.datasheet_copy:
                bars.append(Line("data sheet", range(len(names)), [roof.datasheet_copy] * len(names)))
            plots.append(
                Plot(name="kernels", title="Bandwidth of kernels that only move memory", x_label="", y_label="GB/s", lines=bars, bars=names)
            )
        return plots


class Roof:
    """The limits among the stored rows: GB/s, and TFLOP/s by dtype; measured, and from the data sheet where the GPU is known."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.copy = self.datasheet_copy = 0.0
        self.products: dict[str, float] = {}
        self.datasheet_products: dict[str, float] = {}
        for row in rows:
            if row.name == COPY:
                self.copy = row.values.get("gb_s", 0.0)
                self.datasheet_copy = row.values.get("datasheet_gb_s", 0.0)
            elif row.values:
                self.products[row.case["dtype"]] = row.values["tflops"]
                self.datasheet_products[row.case["dtype"]] = row.values.get("datasheet_tflops", 0.0)

    @classmethod
    def of(cls, results: Results) -> Roof:
        return cls([row for row in results.rows if row.case.get("part") == "ceilings"])

    def at(self, intensity: float, dtype: str) -> float:
        """Returns the TFLOP/s that the machine allows a kernel with this many FLOPs per byte; 0 where a limit is not known."""
        return min(self.products.get(dtype, 0.0), intensity * self.copy / 1000)


def _ceilings(session: Session) -> list[Row]:
    """Measures a copy far larger than any cache, and a square matrix product of each dtype."""
    device = session.device
    gpu = detected_gpu(device) if device.type == "cuda" else None
    size = 2**30 if session.full else 2**27
    edge = 8192 if session.full else 1024
    dtypes = dict.fromkeys((*session.dtypes, torch.float32))
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls[COPY, "bytes"] = lambda: target.copy_(source)
    for dtype in dtypes:
        a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        calls[PRODUCT, str(dtype).removeprefix("torch.")] = functools.partial(torch.mm, a, b)
    rows = []
    # not in turns: a product heats the chip, and a copy right after it would run at a reduced clock rate
    for (name, dtype_name), call in calls.items():
        timing = interleaved({name: call}, device, seconds=max(session.seconds, 0.2) if session.seconds >= 0.1 else session.seconds)[name]
        # the fastest, as it is an upper limit
        ms = timing.low_ms
        if name == COPY:
            values = timing.values() | {"gb_s": 2 * size / ms / 1e6}
            values |= {} if gpu is None or gpu.bandwidth is None else {"datasheet_gb_s": gpu.bandwidth / 1e9}
        else:
            values = timing.values() | {"tflops": 2 * edge**3 / ms / 1e9}
            peak = None if gpu is None else gpu.peak(dtype_name)
            values |= {} if peak is None else {"datasheet_tflops": peak / 1e12}
        rows.append(Row(name=name, case={"part": "ceilings", "dtype": dtype_name}, values=values))
    return rows


def least_bytes(problem: Problem, which: str) -> int:
    """Returns what a pass must read and write once: q, k, v → out, lse; these and dout → dq, dk, dv."""
    rows = problem.batch_size * problem.num_positions
    element = problem.head_dim * problem.dtype.itemsize
    q, k, lse = rows * problem.num_heads * element, rows * problem.kv_heads * element, rows * problem.num_heads * 4
    passes = {"forward": 2 * q + 2 * k + lse, "backward": 4 * q + 4 * k + lse}
    return passes[which] if which in passes else sum(passes.values())


def _attention(contenders: Sequence[Contender], problem: Problem, passes: Sequence[str], seconds: float) -> list[Row]:
    pairs = {contender.name: contender.pairs(problem) for contender in contenders}
    case = problem.case | {"part": "attention"}
    empty = [Row(name=name, case=case, note="keeps no pair of so few blocks") for name, count in pairs.items() if not count]
    able = [contender for contender in contenders if pairs[contender.name]]
    rows = measure(able, problem, passes=passes, seconds=seconds, extra={"part": "attention"})
    return [*(_placed(row, problem, pairs[row.name]) if row.values else row for row in rows), *empty]


def _placed(row: Row, problem: Problem, pairs: int | None) -> Row:
    """Adds ``flops``, ``least_bytes``, ``intensity`` (FLOPs per byte) and ``gb_s``."""
    assert pairs is not None
    which = row.case["pass"]
    flops, moved = FLOPS[which] * pairs * problem.head_dim, least_bytes(problem, which)
    added = {"flops": flops, "least_bytes": moved, "intensity": flops / moved, "gb_s": moved / row.values["ms"] / 1e6}
    return replace(row, values=row.values | added)


def _kernels(session: Session) -> list[Row]:
    """Measures this library's kernels that only move memory, each checked on a small problem first."""
    rows, calls, known = [], {}, {}
    for kernel in kernels.KERNELS:
        case: dict[str, Any] = {"part": "kernels", "dtype": str(session.dtype).removeprefix("torch.")}
        made = attempt(functools.partial(kernel.prepare, session.device, session.dtype, session.full))
        note = made.note
        if made.value is not None:
            call, moved, errors = made.value
            note = kernels.wrong(errors, session.dtype)
            if not note:
                calls[kernel.name], known[kernel.name] = call, (case | {"bytes": moved}, moved, errors)
                continue
        rows.append(Row(name=kernel.name, case=case, note=note))
    for name, timing in interleaved(calls, session.device, seconds=session.seconds).items():
        case, moved, errors = known[name]
        values = timing.values() | {"least_bytes": moved, "gb_s": moved / timing.ms / 1e6}
        rows.append(Row(name=name, case=case, values=values, errors=errors))
    return rows


def _ceilings_table(results: Results) -> Table:
    roof = Roof.of(results)
    cells = [[COPY, f"{figure(roof.copy)} GB/s", _datasheet(roof.copy, roof.datasheet_copy, "GB/s")]]
    for dtype, tflops in roof.products.items():
        cells.append([f"{PRODUCT}, {dtype}", f"{figure(tflops)} TFLOP/s", _datasheet(tflops, roof.datasheet_products[dtype], "TFLOP/s")])
    caption = "Measured: the 10th percentile of a copy far larger than any cache, read and write counted, and of a square matrix product."
    return Table("ceilings", ("", "measured", "data sheet"), cells, caption)


def _datasheet(measured: float, stated: float, unit: str) -> str:
    return f"{figure(stated)} {unit} (reached {measured / stated:.0%})" if stated else "–"


def _attention_table(label: str, rows: Sequence[Row], roof: Roof) -> Table:
    cells = []
    for row in rows:
        if not row.values:
            continue
        v = row.values
        allowed = roof.at(v["intensity"], row.case["dtype"])
        share = f"{v['tflops'] / allowed:.0%}" if allowed else "–"
        bound = "products" if allowed == roof.products.get(row.case["dtype"]) else "memory"
        figures = [figure(v[key]) for key in ("ms", "intensity", "tflops", "gb_s")]
        cells.append([f"{row.name}, {row.case['pass']}", figure(v["flops"] / 1e9), figure(v["least_bytes"] / 1e6), *figures, bound, share])
    columns = ("", "GFLOP", "least MB", "ms", "FLOP/byte", "TFLOP/s", "GB/s", "roof", "share of roof")
    caption = (
        "FLOP: 4·D per pair forward, 10·D backward, over the pairs that the pattern keeps. "
        "Least MB: what any implementation must read and write once. "
        "Roof: the lower of the measured product rate and of FLOP/byte times the measured copy."
    )
    return Table(label, columns, cells, "\n".join(filter(None, [caption, absent(rows, "ms")])))


def _kernels_table(rows: Sequence[Row], roof: Roof) -> Table:
    cells = []
    for row in rows:
        if row.values:
            v = row.values
            share = f"{v['gb_s'] / roof.copy:.0%}" if roof.copy else "–"
            stated = f"{v['gb_s'] / roof.datasheet_copy:.0%}" if roof.datasheet_copy else "–"
            what = next((kernel.what for kernel in kernels.KERNELS if kernel.name == row.name), "")
            cells.append([row.name, what, figure(v["ms"]), figure(v["least_bytes"] / 1e6), figure(v["gb_s"]), share, stated])
    columns = ("", "what", "ms", "least MB", "GB/s", "of a copy", "of the data sheet")
    return Table("kernels that only move memory", columns, cells, absent(rows, "ms"))


def _roofline(results: Results, which: str, roof: Roof) -> list[Plot]:
    rows = [row for row in results.rows if row.case.get("part") == "attention" and row.case.get("pass") == which and row.values]
    if not rows or not roof.copy:
        return []
    dtype = rows[0].case["dtype"]
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.values["intensity"])
        lines.append(Line(name, [row.values["intensity"] for row in mine], [row.values["tflops"] for row in mine], joined=False))
    peak = roof.products.get(dtype, 0.0)
    places = [x for line in lines for x in line.x]
    first, last = min(places) / 4, max(places) * 4
    lines.append(_roof_line(f"measured: {figure(roof.copy)} GB/s, {figure(peak)} TFLOP/s", roof.copy, peak, first, last))
    stated = roof.datasheet_products.get(dtype, 0.0)
    if roof.datasheet_copy and stated:
        label = f"data sheet: {figure(roof.datasheet_copy)} GB/s, {figure(stated)} TFLOP/s"
        lines.append(_roof_line(label, roof.datasheet_copy, stated, first, last))
    note = "The limit is matrix products to the right of the bend, and memory to the left of it. A contender has a point for each shape."
    return [Plot(name=f"roofline-{which}", title=f"Roofline, {which}, {dtype}", x_label="FLOPs for each byte that must be moved",
                 y_label="TFLOP/s", lines=lines, log_x=True, log_y=True, note=note)]  # fmt: skip


def _roof_line(label: str, gb_s: float, tflops: float, first: float, last: float) -> Line:
    bend = 1000 * tflops / gb_s
    first, last = min(first, bend / 4), max(last, bend * 4)
    x = [first, bend, last]
    return Line(label, x, [min(tflops, at * gb_s / 1000) for at in x], dashed=True, marked=False)
