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
from dilated_attention.bench.suites import bandwidth_kernels as kernels
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.planning import detected_gpu

# excluded: 8-bit products, which have a different limit, and pairs chosen by the data, whose number is not known beforehand
CONTENDERS = {
    x.name: x for x in (*DENSE, *MODULES) if x.name not in ("flash3_fp8", "BlockSparseAttention chosen", "BlockSparseDilatedAttention")
}
COPY, PRODUCT = "copy", "matrix product"
# columns of the tables: (title, key, scale)
_COLUMNS = (("ms", "ms", 1.0), ("GFLOP", "flops", 1e-9), ("least MB", "least_bytes", 1e-6), ("FLOP/byte", "intensity", 1.0),
            ("TFLOP/s", "tflops", 1.0), ("GB/s", "gb_s", 1.0))  # fmt: skip


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
        place: dict[str, Any] = {"dtype": session.dtype, "device": session.device}
        return [Problem(batch_size=b, num_positions=n, num_heads=h, head_dim=d, **place) for b, n, h, d in shapes]

    def groups(self, session: Session) -> Sequence[Group]:
        chosen = [CONTENDERS[name] for name in session.options.contenders or CONTENDERS]
        attending = [Group(f"attention {x.label}", functools.partial(_attention, chosen, x, session)) for x in self.problems(session)]
        return [
            Group("ceilings", functools.partial(_ceilings, session)),
            *attending,
            Group("kernels", functools.partial(_kernels, session)),
        ]

    def tables(self, results: Results) -> list[Table]:
        roof = Roof.of(results)
        cells = []
        for name, found, stated, unit in roof.limits():
            datasheet = f"{figure(stated)} {unit} (reached {found / stated:.0%})" if stated else "–"
            cells.append([name, f"{figure(found)} {unit}", datasheet])
        caption = "The 10th percentile of a copy far larger than any cache, read and write counted, and of a square matrix product."
        tables = [Table("ceilings", ("", "measured", "data sheet"), cells, caption)]
        return tables + [_table(label, rows, roof) for label, rows in results.groups.items() if label != "ceilings"]

    def plots(self, results: Results) -> list[Plot]:
        roof = Roof.of(results)
        plots = [plot for which in PASSES for plot in _roofline(results, which, roof)]
        timed = [row for row in results.groups.get("kernels", []) if row.values]
        if timed and roof.copy:
            names = [COPY, *(row.name for row in timed)]
            bars = [Line("measured", range(len(names)), [roof.copy, *(row.values["gb_s"] for row in timed)])]
            plots.append(Plot(name="kernels", title="Bandwidth of kernels that only move memory", x_label="", y_label="GB/s", lines=bars,
                              bars=names))  # fmt: skip
        return plots


class Roof:
    """The limits among the stored rows: GB/s, and TFLOP/s by dtype; measured, and from the data sheet where the GPU is known."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._copy = next((row.values for row in rows if row.name == COPY and row.values), {})
        self._products = {row.case["dtype"]: row.values for row in rows if row.name == PRODUCT and row.values}
        self.copy = self._copy.get("gb_s", 0.0)

    @classmethod
    def of(cls, results: Results) -> Roof:
        return cls([row for row in results.rows if row.case.get("part") == "ceilings"])

    def limits(self) -> list[tuple[str, float, float, str]]:
        """Returns (name, measured, data sheet's or 0, unit)."""
        products = [(f"{PRODUCT}, {dtype}", v["tflops"], v.get("datasheet", 0.0), "TFLOP/s") for dtype, v in self._products.items()]
        return [(COPY, self.copy, self._copy.get("datasheet", 0.0), "GB/s"), *products]

    def product(self, dtype: str) -> float:
        return self._products.get(dtype, {}).get("tflops", 0.0)

    def at(self, intensity: float, dtype: str) -> float:
        """Returns the TFLOP/s that the machine allows a kernel with this many FLOPs per byte; 0 where a limit is not known."""
        return min(self.product(dtype), intensity * self.copy / 1000)


def _ceilings(session: Session) -> list[Row]:
    """Measures a copy far larger than any cache, and a square matrix product of each dtype."""
    device = session.device
    gpu = detected_gpu(device) if device.type == "cuda" else None
    size, edge = (2**30, 8192) if session.full else (2**27, 1024)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls: dict[tuple[str, str], Callable[[], object]] = {(COPY, "bytes"): lambda: target.copy_(source)}
    for dtype in dict.fromkeys((*session.dtypes, torch.float32)):
        a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        calls[PRODUCT, str(dtype).removeprefix("torch.")] = functools.partial(torch.mm, a, b)
    rows = []
    # not in turns: a product heats the chip, and a copy right after it would run at a reduced clock rate
    for (name, dtype_name), call in calls.items():
        timing = interleaved({name: call}, device, seconds=max(session.seconds, 0.2) if session.seconds >= 0.1 else session.seconds)[name]
        # the fastest, as it is an upper limit
        key, amount = ("gb_s", 2 * size / 1e6) if name == COPY else ("tflops", 2 * edge**3 / 1e9)
        values = timing.values() | {key: amount / timing.low_ms}
        stated = None if gpu is None else gpu.bandwidth if name == COPY else gpu.peak(dtype_name)
        values |= {} if stated is None else {"datasheet": stated / (1e9 if name == COPY else 1e12)}
        rows.append(Row(name=name, case={"part": "ceilings", "dtype": dtype_name}, values=values))
    return rows


def least_bytes(problem: Problem, which: str) -> int:
    """Returns what a pass must read and write once: q, k, v → out, lse; these and dout → dq, dk, dv."""
    rows = problem.batch_size * problem.num_positions
    element = problem.head_dim * problem.dtype.itemsize
    q, k, lse = rows * problem.num_heads * element, rows * problem.kv_heads * element, rows * problem.num_heads * 4
    passes = {"forward": 2 * q + 2 * k + lse, "backward": 4 * q + 4 * k + lse}
    return passes[which] if which in passes else sum(passes.values())


def _attention(contenders: Sequence[Contender], problem: Problem, session: Session) -> list[Row]:
    pairs = {contender.name: contender.pairs(problem) for contender in contenders}
    extra = {"part": "attention"}
    empty = [Row(name=name, case=problem.case | extra, note="keeps no pair of so few blocks") for name, count in pairs.items() if not count]
    able = [contender for contender in contenders if pairs[contender.name]]
    rows = measure(able, problem, passes=session.options.passes, seconds=session.seconds, extra=extra)
    return [*(_placed(row, problem, pairs[row.name] or 0) if row.values else row for row in rows), *empty]


def _placed(row: Row, problem: Problem, pairs: int) -> Row:
    """Adds ``flops``, ``least_bytes``, ``intensity`` (FLOPs per byte) and ``gb_s``."""
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


def _table(label: str, rows: Sequence[Row], roof: Roof) -> Table:
    """Builds the table of a problem's passes against the roof, or of the kernels that only move memory against a copy."""
    columns = [column for column in _COLUMNS if any(column[1] in row.values for row in rows)]
    cells = []
    for row in (row for row in rows if row.values):
        v = row.values
        allowed = roof.at(v["intensity"], row.case["dtype"]) if "intensity" in v else 0.0
        bound = "products" if allowed and allowed == roof.product(row.case["dtype"]) else "memory"
        reached = v["tflops"] / allowed if allowed else v["gb_s"] / roof.copy if roof.copy and "flops" not in v else None
        name = f"{row.name}, {row.case['pass']}" if "pass" in row.case else row.name
        cells.append([name, *(figure(v[key] * scale) for _, key, scale in columns), bound, "–" if reached is None else f"{reached:.0%}"])
    caption = (
        "FLOP: 4·D per pair forward, 10·D backward, over the pairs that the pattern keeps. Least MB: what any implementation must read and "
        "write once. Roof: the lower of the measured product rate and of FLOP/byte times the measured copy."
    )
    titles = ("", *(title for title, _, _ in columns), "roof", "share of roof")
    return Table(label, titles, cells, "\n".join(filter(None, [caption, absent(rows, "ms")])))


def _roofline(results: Results, which: str, roof: Roof) -> list[Plot]:
    rows = [row for row in results.rows if row.case.get("part") == "attention" and row.case.get("pass") == which and row.values]
    if not rows or not roof.copy:
        return []
    dtype = rows[0].case["dtype"]
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.values["intensity"])
        lines.append(Line(name, [row.values["intensity"] for row in mine], [row.values["tflops"] for row in mine], joined=False))
    peak = roof.product(dtype)
    places, bend = [x for line in lines for x in line.x], 1000 * peak / roof.copy
    x = [min(min(places) / 4, bend / 4), bend, max(max(places) * 4, bend * 4)]
    label = f"measured: {figure(roof.copy)} GB/s, {figure(peak)} TFLOP/s"
    lines.append(Line(label, x, [roof.at(each, dtype) for each in x], dashed=True, marked=False))
    note = "The limit is matrix products to the right of the bend, and memory to the left of it. A contender has a point for each shape."
    return [Plot(name=f"roofline-{which}", title=f"Roofline, {which}, {dtype}", x_label="FLOPs for each byte that must be moved",
                 y_label="TFLOP/s", lines=lines, log_x=True, log_y=True, note=note)]  # fmt: skip
