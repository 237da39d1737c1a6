"""Time of every pass by length and by shape: dense attention kernel by kernel, and this library's modules."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dilated_attention.bench.measure.contest import duration, measure
from dilated_attention.bench.measure.forward_backward import FLOPS, PASSES
from dilated_attention.bench.measure.utilization import explained, gpu_of, utilisation
from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, pivot
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, MULTIHEAD, STANDARD, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import size

CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES, *MULTIHEAD)}
OURS = tuple(contender.name for contender in (*MODULES, *MULTIHEAD))
# dense kernels that round in the inputs' dtype; 8-bit products are not comparable
KERNELS = tuple(contender.name for contender in DENSE if contender is not STANDARD and "fp8" not in contender.name)
# batch x positions x heads x head dim
GRID = ((1, 32, 4, 16), (1, 128, 8, 32), (4, 256, 8, 64), (8, 512, 16, 64), (16, 512, 32, 64), (32, 1024, 32, 128), (64, 1024, 64, 128))
SMALL_GRID = GRID[:3]


class Speed(Suite):
    """Measures the times that attention libraries usually publish, on this machine."""

    name = "speed"
    about = "time and TFLOP/s of forward, backward and both, by length and by shape"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 512 … 8k at batch 8, then to 1M; on a CPU 512 … 2k")
        parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), help="default: full, and causal at every other length")
        parser.add_argument("--parts", nargs="+", choices=("length", "grid"), default=["length", "grid"], help="default: both")
        parser.add_argument("--longest", type=float, help="seconds that one call may take; default 0.4 in full size, 1 in small")

    def settings(self, session: Session) -> dict[str, Any]:
        chosen = session.options.contenders
        return super().settings(session) | {"longest": self.longest(session), "contenders": sorted(chosen) if chosen else "all"}

    def longest(self, session: Session) -> float:
        if session.options.longest is None:
            return 0.4 if session.full else 1.0
        return float(session.options.longest)

    def problems(self, session: Session) -> list[tuple[str, Problem]]:
        """Returns (part, problem): "length" fixes heads and head dim, "grid" contains shapes of every size."""
        options = session.options
        lengths = options.lengths or ([2**i for i in range(9, 21)] if session.full else [512, 1024, 2048])
        heads, head_dim, most = (32, 64, 8) if session.full else (4, 32, 1)
        masks = [(n, mask == "causal") for mask in options.masks or ["full"] for n in lengths]
        if options.masks is None:
            masks += [(n, True) for n in lengths[1::2]]
        found = []
        for dtype in session.dtypes:
            if "length" in options.parts:
                for n, is_causal in masks:
                    batch = most if n <= 8192 else 1
                    problem = Problem(num_positions=n, num_heads=heads, head_dim=head_dim, batch_size=batch, dtype=dtype,
                                      device=session.device, is_causal=is_causal)  # fmt: skip
                    found.append(("length", problem))
            if "grid" in options.parts:
                for batch, n, h, d in GRID if session.full else SMALL_GRID:
                    problem = Problem(batch_size=batch, num_positions=n, num_heads=h, head_dim=d, dtype=dtype, device=session.device)
                    found.append(("grid", problem))
        return found

    def groups(self, session: Session) -> Sequence[Group]:
        chosen = [CONTENDERS[name] for name in session.options.contenders or CONTENDERS]
        # twenty contenders with three passes per problem: less than the usual time for each, unless a time was given
        asked = getattr(session.options, "seconds", None)
        seconds = session.seconds / (2 if session.full else 4) if asked is None else session.seconds
        return [
            Group(f"{part} {problem.label}", functools.partial(_measure, chosen, problem, part, seconds, self.longest(session)))
            for part, problem in self.problems(session)
        ]

    def tables(self, results: Results) -> list[Table]:
        tables: list[Table] = []
        for dtype, part, causal in itertools.product(_dtypes(results), ("length", "grid"), (False, True)):
            rows = [row for row in results.rows if _is(row, dtype, part, causal)]
            for which in PASSES:
                mine = _of_pass(rows, which)
                if any(row.values for row in mine):
                    tables += _tables(results, mine, which, dtype, part, causal)
        return tables or [pivot(results.rows, "ms", across="N", title="time, ms")]

    def plots(self, results: Results) -> list[Plot]:
        plots = []
        dtypes = _dtypes(results)
        for dtype, which in itertools.product(dtypes, PASSES):
            rows = _of_pass([row for row in results.rows if _is(row, dtype, "length", False)], which)
            suffix = which if len(dtypes) == 1 else f"{which}-{dtype}"
            shape = _shape(rows)
            kernels = _lines(rows, [contender.name for contender in DENSE], "tflops")
            if kernels:
                plots.append(
                    Plot(name=f"dense-{suffix}", title=f"Dense attention, {_TOLD[which]}, {dtype}", x_label="positions",
                         y_label="TFLOP/s", lines=kernels, log_x=True, note=shape)
                )  # fmt: skip
            best = _fastest(rows, "N")
            ours = _lines(rows, [STANDARD.name, *OURS], "ms")
            if best:
                # per sequence, as the batch size changes with the length
                batches = {row.case["N"]: row.case["B"] for row in rows}
                line = Line("fastest dense kernel", list(best), [ms / batches[n] for n, (ms, _) in best.items()], dashed=True)
                plots.append(
                    Plot(name=f"time-{suffix}", title=f"Time, {_TOLD[which]}, {dtype}", x_label="positions",
                         y_label="milliseconds per sequence", lines=[line, *ours], log_x=True, log_y=True, note=shape)
                )  # fmt: skip
            faster = _speedups(rows, best)
            if which == "both" and faster:
                lines = _lines(faster, OURS, "speedup")
                even = sorted({row.case["N"] for row in faster})
                lines.insert(0, Line("as fast", even, [1.0] * len(even), dashed=True, marked=False))
                plots.append(
                    Plot(name=f"speedup-{suffix}", title=f"Against the fastest dense kernel, {_TOLD[which]}, {dtype}",
                         x_label="positions", y_label="times as fast", lines=lines, log_x=True, log_y=True,
                         note=f"{shape}; where a dense kernel was run")
                )  # fmt: skip
        return plots


_TOLD = {"forward": "forward", "backward": "backward", "both": "forward + backward"}


def _measure(contenders: Sequence[Contender], problem: Problem, part: str, seconds: float, longest: float) -> list[Row]:
    shape = f"{problem.batch_size}x{problem.num_positions}x{problem.num_heads}x{problem.head_dim}"
    return measure(contenders, problem, seconds=seconds, longest=longest, extra={"part": part, "shape": shape})


def _dtypes(results: Results) -> list[str]:
    return list(dict.fromkeys(row.case["dtype"] for row in results.rows if "dtype" in row.case))


def _is(row: Row, dtype: str, part: str, causal: bool) -> bool:
    return (row.case.get("dtype"), row.case.get("part"), row.case.get("causal")) == (dtype, part, causal)


def _of_pass(rows: Iterable[Row], which: str) -> list[Row]:
    """Returns rows of a pass. What could not run at all is reported with the forward, elsewhere only where it leaves a gap in a line."""
    rows = list(rows)
    present = {row.name for row in rows if row.case.get("pass") == which and row.values}
    return [row for row in rows if row.case.get("pass", which if which == "forward" or row.name in present else "") == which]


def _fastest(rows: Iterable[Row], across: str) -> dict[Any, tuple[float, str]]:
    """Returns the fastest dense kernel in each case: (ms, name)."""
    best: dict[Any, tuple[float, str]] = {}
    for row in rows:
        if row.name in KERNELS and row.values:
            head = row.case[across]
            best[head] = min(best.get(head, (float("inf"), "")), (row.values["ms"], row.name))
    return dict(sorted(best.items())) if across == "N" else best


def _speedups(rows: Iterable[Row], best: dict[Any, tuple[float, str]]) -> list[Row]:
    return [
        replace(row, values={"speedup": best[row.case["N"]][0] / row.values["ms"]})
        for row in rows
        if row.values and row.name in OURS and row.case["N"] in best
    ]


def _tables(results: Results, rows: list[Row], which: str, dtype: str, part: str, causal: bool) -> list[Table]:
    across = "N" if part == "length" else "shape"
    what = f"{_TOLD[which]}, {dtype}, {'causal' if causal else 'full'}, by {'positions' if part == 'length' else 'shape'}"
    best = _fastest(rows, across)
    names = ", ".join(
        f"{', '.join(f'{head:,}' if isinstance(head, int) else head for head, _ in group)} {name}"
        for name, group in itertools.groupby(best.items(), key=lambda item: item[1][1])
    )
    told = f"{_shape(rows)}. " if part == "length" else "B x N x H x D. "
    told += f"Median of a call; one may take {duration(results.settings['longest'])}. " if "longest" in results.settings else ""
    against = {head: ms for head, (ms, _) in best.items()}
    faster = f"In brackets: times as fast as the fastest dense kernel ({names})." if best else "No dense kernel was run."
    tables = [pivot(rows, "ms", across=across, title=f"ms, {what}", caption=told + faster, baseline=against)]
    standard = {row.case[across]: row.values["ms"] for row in rows if row.name == STANDARD.name and row.values}
    if standard:
        derived = [
            replace(row, values={"speedup": standard[row.case[across]] / row.values["ms"]})
            for row in rows
            if row.values and row.case[across] in standard
        ]
        tables.append(pivot(derived, "speedup", across=across, title=f"times as fast as standard attention, {what}"))
    if any("tflops" in row.values for row in rows):
        gpu = gpu_of(results)
        caption = (
            f"FLOPs: {FLOPS[which]} D per (query, key) pair of the pattern, with multiplicity; "
            f"projections are not counted. {explained(results, dtype)}"
        )
        counted = [row for row in rows if "tflops" in row.values]
        tables.append(
            pivot(counted, "tflops", across=across, title=f"TFLOP/s, {what}", caption=caption, share=functools.partial(utilisation, gpu))
        )
    return tables


def _shape(rows: Iterable[Row]) -> str:
    """Describes heads, head dim and batch sizes of rows that share the first two."""
    rows = [row for row in rows if "H" in row.case]
    if not rows:
        return ""
    batches: dict[int, int] = {}
    for row in rows:
        batches[row.case["B"]] = max(batches.get(row.case["B"], 0), row.case["N"])
    sizes = ", then ".join(
        f"{b} up to N = {n:,}" if i + 1 < len(batches) else str(b)
        for i, (b, n) in enumerate(sorted(batches.items(), key=lambda item: item[1]))
    )
    return f"{rows[0].case['H']} heads of {rows[0].case['D']}, batch {sizes}"


def _lines(rows: Iterable[Row], names: Iterable[str], value: str) -> list[Line]:
    """Returns a line for each of the names that has figures: times per sequence, with their spread, and rates unchanged."""
    rows = list(rows)
    lines = []
    for name in names:
        mine = sorted((row for row in rows if row.name == name and value in row.values), key=lambda row: row.case["N"])
        if mine:
            at = [row.case["N"] for row in mine]
            if value == "ms":
                ms, low, high = ([row.values[key] / row.case["B"] for row in mine] for key in ("ms", "low_ms", "high_ms"))
                lines.append(Line(name, at, ms, low, high))
            else:
                lines.append(Line(name, at, [row.values[value] for row in mine]))
    return lines
