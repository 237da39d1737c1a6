"""Time of every pass by length and by shape: dense attention kernel by kernel, and this library's modules."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from dilated_attention.bench.arguments import size
from dilated_attention.bench.contenders import DENSE, MODULES, MULTIHEAD, Contender
from dilated_attention.bench.measure import PASSES, measure
from dilated_attention.bench.plots import Line, Plot
from dilated_attention.bench.problem import Problem
from dilated_attention.bench.rows import Results, Row
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.tables import Table, pivot

CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES, *MULTIHEAD)}
# batch x positions x heads x head dim
GRID = ((1, 32, 4, 16), (1, 128, 8, 32), (4, 256, 8, 64), (8, 512, 16, 64), (16, 512, 32, 64), (32, 1024, 32, 128), (64, 1024, 64, 128))
SMALL_GRID = GRID[:3]


class Speed(Suite):
    """The times that attention libraries publish, on the machine at hand."""

    name = "speed"
    about = "time and TFLOP/s of forward, backward and both, by length and by shape"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 512 … 8k at batch 8, then to 1M; on a CPU 512 … 2k")
        parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])

    def problems(self, session: Session) -> list[tuple[str, Problem]]:
        """(part, problem): "length" holds heads and head dim, "grid" is shapes of every size."""
        lengths = session.options.lengths or ([2**i for i in range(9, 21)] if session.full else [512, 1024, 2048])
        heads, most = (32, 8) if session.full else (4, 1)
        found = [
            ("length", Problem(num_positions=n, num_heads=heads, head_dim=64, batch_size=most if n <= 8192 else 1, dtype=session.dtype,
                               device=session.device, is_causal=mask == "causal"))
            for n in lengths for mask in session.options.masks
        ]  # fmt: skip
        for batch, n, h, d in GRID if session.full else SMALL_GRID:
            problem = Problem(batch_size=batch, num_positions=n, num_heads=h, head_dim=d, dtype=session.dtype, device=session.device)
            found.append(("grid", problem))
        return found

    def groups(self, session: Session) -> Sequence[Group]:
        chosen = [CONTENDERS[name] for name in session.options.contenders or CONTENDERS]
        return [
            Group(f"{part} {problem.label}", functools.partial(_measure, chosen, problem, part, session.seconds))
            for part, problem in self.problems(session)
        ]

    def tables(self, results: Results) -> list[Table]:
        tables = []
        for which in PASSES:
            for causal in (False, True):
                rows = [
                    row for row in results.rows if row.case.get("part") == "length" and _of(row, which) and row.case["causal"] == causal
                ]
                if rows:
                    title = f"{which}, {'causal' if causal else 'full'}, ms by positions"
                    tables.append(pivot(rows, "ms", across="N", title=title, caption="median"))
        return tables

    def plots(self, results: Results) -> list[Plot]:
        plots = []
        for which in PASSES:
            rows = [
                row for row in results.rows if row.case.get("part") == "length" and row.case.get("pass") == which and not row.case["causal"]
            ]
            lines = []
            for name in dict.fromkeys(row.name for row in rows):
                mine = sorted((row for row in rows if row.name == name and row.values), key=lambda row: row.case["N"])
                if mine:
                    lines.append(
                        Line(
                            name,
                            [row.case["N"] for row in mine],
                            [row.values["ms"] for row in mine],
                            [row.values["low_ms"] for row in mine],
                            [row.values["high_ms"] for row in mine],
                        )
                    )
            if lines:
                plots.append(
                    Plot(name=f"time-{which}", title=f"Time of {which}, full attention", x_label="positions", y_label="milliseconds",
                         lines=lines, log_x=True, log_y=True)
                )  # fmt: skip
        return plots


def _of(row: Row, which: str) -> bool:
    # a contender without any figure is told of once, with the forward
    return row.case.get("pass", "forward") == which


def _measure(contenders: Sequence[Contender], problem: Problem, part: str, seconds: float) -> list[Row]:
    return measure(contenders, problem, seconds=seconds, extra={"part": part})
