"""Accuracy by dtype, backend and length.

Errors against float64, a tiny model's loss by dtype, repeated runs, and changes to the inputs that must not change the results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.dense_float64 import RESULTS
from dilated_attention.bench.accuracy.repeatability import (
    INVARIANCES,
    KINDS,
    PLAIN,
    backends,
    errors,
    errors_in_8_bits,
    invariances,
    repeats,
)
from dilated_attention.bench.report.plots import Line, Plot, short
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, absent, figure, pivot
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.tiny_loss import losses
from dilated_attention.parsing import size

PARTS = ("error", "loss", "repeat", "invariance")
GRADIENTS = ("dq", "dk", "dv")
RUNS = 20


class Accuracy(Suite):
    """Measures how rounding affects results, and whether they are repeatable."""

    name = "accuracy"
    about = "errors against float64 by dtype, backend and length, loss by dtype, repeated runs, invariance"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 256 1k 4k 16k 64k; on a CPU 64 256 1k")
        parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: both")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"], help="default: both")
        parser.add_argument("--head-dim", type=size, default=64, help="default 64")
        parser.add_argument("--steps", type=size, help="of training in each dtype; default 30, on a CPU 8")
        parser.add_argument("--backends", nargs="+", choices=backends(), help=("default: all; each is recompiled for every dtype and mask"))
        parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        chosen = {"backends": options.backends} if options.backends else {}
        return super().settings(session) | {"head_dim": options.head_dim, "masks": options.masks, "steps": self.steps(session)} | chosen

    def steps(self, session: Session) -> int:
        return int(session.options.steps or (30 if session.full else 8))

    def dtypes(self, session: Session) -> tuple[torch.dtype, ...]:
        """Returns the requested dtypes; by default those that models are trained in, whatever the device's default dtype is."""
        if getattr(session.options, "dtypes", None):
            return session.dtypes
        return torch.float32, torch.float16, torch.bfloat16

    def groups(self, session: Session) -> Sequence[Group]:
        options, dtypes = session.options, self.dtypes(session)
        lengths = options.lengths or ([256, 1024, 4096, 16384, 65536] if session.full else [64, 256, 1024])
        # a dtype that models are trained in, if it is among them
        usual = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), dtypes[0])
        groups: list[Group] = []

        def add(label: str, function: Callable[..., Iterable[Row]], *arguments: Any, **settings: Any) -> None:
            groups.append(Group(label, functools.partial(function, *arguments, {}, **settings)))

        def problem(n: int, dtype: torch.dtype, **changes: Any) -> Problem:
            shape: dict[str, Any] = {"num_heads": 4, "head_dim": options.head_dim} | changes
            return Problem(num_positions=n, dtype=dtype, device=session.device, **shape)

        if "error" in options.parts:
            for n, kind, mask in itertools.product(lengths, options.kinds, options.masks):
                for dtype in dtypes:
                    mine = problem(n, dtype, is_causal=mask == "causal")
                    add(f"error {kind} {mine.label}", errors, kind, mine, chosen=options.backends)
                mine = problem(n, usual, is_causal=mask == "causal")
                add(f"error {kind} {mine.label} in fp8", errors_in_8_bits, kind, mine)
        if "loss" in options.parts:
            n = 4096 if session.full else 256
            add(f"loss of {n} tokens, {self.steps(session)} steps", losses, n, self.steps(session), session.device)
        for part, kind in itertools.product(("repeat", "invariance"), options.kinds):
            if part in options.parts:
                # enough to fill a GPU, where the order of summation may differ from run to run
                n, heads = (4096, 8) if session.full else (256, 4)
                mine = problem(n, usual, batch_size=2, num_heads=heads)
                if part == "repeat":
                    add(f"repeat {kind} {mine.label}", repeats, kind, mine, RUNS, chosen=options.backends)
                else:
                    add(f"invariance {kind} {mine.label}", invariances, kind, mine, chosen=options.backends)
        return groups

    def tables(self, results: Results) -> list[Table]:
        tables: list[Table] = []
        of_errors = [row for row in results.rows if row.case.get("part") == "error"]
        for kind, dtype in dict.fromkeys((row.case["kind"], row.case["dtype"]) for row in of_errors):
            tables += _error_tables(kind, dtype, [row for row in of_errors if (row.case["kind"], row.case["dtype"]) == (kind, dtype)])
        for part, table in (("loss", _loss_table), ("repeat", _repeat_table), ("invariance", _invariance_table)):
            rows = [row for row in results.rows if row.case.get("part") == part]
            for kind in dict.fromkeys(row.case.get("kind", "") for row in rows):
                tables.append(table(kind, [row for row in rows if row.case.get("kind", "") == kind]))
        return tables

    def plots(self, results: Results) -> list[Plot]:
        plots: list[Plot] = []
        rows = [row for row in results.rows if row.case.get("part") == "error" and row.values]
        dtypes = list(dict.fromkeys(row.case["dtype"] for row in rows))
        usual = next((dtype for dtype in ("bfloat16", "float16") if dtype in dtypes), next(iter(dtypes), ""))
        for kind in dict.fromkeys(row.case["kind"] for row in rows):
            full = [row for row in rows if row.case["kind"] == kind and not row.case["causal"]] or [
                row for row in rows if row.case["kind"] == kind
            ]
            mine = [row for row in full if row.case["dtype"] == usual]
            for what in ("out", "dk"):
                lines = _growth(mine, what, lambda row: row.name)
                if lines:
                    plots.append(_plot(f"growth-{kind}-{what}", f"Error of {what} by length, {kind}, {usual}", lines))
            ours = [row for row in full if row.name in ("auto", PLAIN) or row.case["dtype"] == "fp8"]
            lines = _growth(ours, "out", lambda row: f"{row.case['dtype']}, {'chosen here' if row.name == 'auto' else row.name}")
            if lines:
                plots.append(_plot(f"dtypes-{kind}", f"Error of out by dtype, {kind}", lines))
            bars = _bars(kind, usual, mine)
            plots += [bars] if bars is not None else []
        lines = []
        steps = [row for row in results.rows if row.case.get("part") == "loss" and row.values]
        for name in dict.fromkeys(row.name for row in steps if row.name != "float32"):
            those = [row for row in steps if row.name == name]
            lines.append(Line(name, [row.case["step"] for row in those], [abs(row.values["difference"]) for row in those]))
        if lines:
            plots.append(
                Plot(name="loss", title="A tiny model's loss against float32's", x_label="step", y_label="|difference|, nats per token",
                     lines=lines, log_y=True, note="autocast with float32 weights; fp8: the forward of the float32 run's weights")
            )  # fmt: skip
        return plots


def _error_tables(kind: str, dtype: str, rows: list[Row]) -> list[Table]:
    """Returns tables of every result at the longest length, and of out and the worst gradient by length."""
    longest = max(row.case["N"] for row in rows)
    body = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name and row.values and row.case["N"] == longest]
        if mine:
            worst = {key: max(row.errors.get(key, -1.0) for row in mine) for key in RESULTS}
            shares = [value for row in mine for key, value in row.values.items() if key.endswith("_share")]
            told = "–" if not shares else f"{figure(max(shares))}{' !' if not max(shares) <= 1 else ''}"
            body.append([name, *("–" if worst[key] < 0 else figure(worst[key]) for key in RESULTS), told])
    what = f"{kind}, {dtype}"
    caption = (
        f"‖found − float64's‖ / ‖float64's‖, the worst of {' and '.join(_masks(rows))}. Last column: "
        f"largest absolute error, as a share of the bound 2 · that of {PLAIN} in the same dtype + one rounding; ! is beyond it."
    )
    if dtype == "fp8":
        caption += f" {PLAIN}: only q, k and v are rounded to 8 bits. No bound is set, and there are no gradients."
    table = Table(
        f"relative error at {longest:,} positions, {what}",
        ["backend", *RESULTS, "of the bound"],
        body,
        "\n".join(filter(None, [caption, absent(rows, "out_max")])),
    )
    full = [row for row in rows if not row.case["causal"]] or rows
    tables = [table]
    if len({row.case["N"] for row in full}) > 1:
        present = {row.name for row in full if row.values}
        gaps = [row for row in full if not row.values and row.name in present]
        by_length = gaps + [replace(row, values={"out": row.errors["out"]}) for row in full if row.values]
        tables.append(pivot(by_length, "out", across="N", title=f"relative error of out by positions, {what}"))
        worst_of = [replace(row, values={"gradient": max(row.errors[key] for key in GRADIENTS)}) for row in full if "dq" in row.errors]
        if worst_of:
            title = f"relative error of the worst of dq, dk, dv by positions, {what}"
            tables.append(pivot(gaps + worst_of, "gradient", across="N", title=title))
    return tables


def _masks(rows: Iterable[Row]) -> list[str]:
    return ["causal" if causal else "full" for causal in sorted({row.case["causal"] for row in rows})]


def _loss_table(kind: str, rows: list[Row]) -> Table:
    body = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name and row.values), key=lambda row: row.case["step"])
        if mine:
            differences = [abs(row.values["difference"]) for row in mine]
            body.append([name, f"{mine[0].values['loss']:.5f}", f"{mine[-1].values['loss']:.5f}",
                         *(figure(x) for x in (sum(differences) / len(differences), max(differences)))])  # fmt: skip
    caption = (
        "nats per token. The model of preset longnet-tiny from the same weights on the same data. "
        "float16 and bfloat16: by autocast with float32 weights. fp8: no training, the forward of the float32 run's weights with attention "
        "in 8 bits. Differences from float32 grow as the trainings diverge."
    )
    positions = f"{rows[0].case['N']:,} tokens" if rows else ""
    columns = ["dtype", "first loss", "last loss", "mean difference", "largest difference"]
    return Table(f"loss by dtype, {positions}", columns, body, "\n".join(filter(None, [caption, absent(rows, "loss")])))


def _repeat_table(kind: str, rows: list[Row]) -> Table:
    shown = ("out", *GRADIENTS)
    found = {(row.name, row.case["deterministic"]): row for row in rows}
    notes: dict[str, int] = {}
    body = []
    for name in dict.fromkeys(row.name for row in rows):
        if not any(found[name, mode].values for mode in (False, True)):
            continue
        cells = []
        for mode, key in itertools.product((False, True), shown):
            row = found[name, mode]
            if not row.values:
                cells.append(f"[{notes.setdefault(row.note, len(notes) + 1)}]")
                continue
            equal, runs = int(row.values[f"{key}_equal_runs"]), int(row.values["runs"])
            cells.append("equal" if equal == runs else f"{equal} of {runs}, {figure(row.values[f'{key}_spread'])}")
        body.append([name, *cells])
    case = rows[0].case
    caption = (
        "equal: all runs bit for bit. Otherwise the number of runs equal to the first one, and the largest relative difference from it. "
        "det.: with deterministic=True."
    )
    legend = " · ".join(f"[{number}] {note}" for note, number in notes.items())
    runs = next((int(row.values["runs"]) for row in rows if row.values), RUNS)
    title = f"{runs} runs of the same inputs, {kind}, {_shape(case)}"
    columns = ["backend", *shown, *(f"det. {key}" for key in shown)]
    return Table(title, columns, body, "\n".join(filter(None, [caption, legend, absent(rows, "runs")])))


def _invariance_table(kind: str, rows: list[Row]) -> Table:
    found = {(row.name, row.case["change"]): row for row in rows}
    notes: dict[str, int] = {}
    body = []
    for name in dict.fromkeys(row.name for row in rows if row.values):
        cells = []
        for change in INVARIANCES:
            row = found.get((name, change))
            if row is None or not row.values:
                cells.append("–" if row is None else f"[{notes.setdefault(row.note, len(notes) + 1)}]")
            else:
                cells.append("equal" if row.values["equal"] else figure(row.values["difference"]))
        body.append([name, *cells])
    caption = "equal: out bit for bit, except for its order; otherwise the largest absolute difference, where values are of order 1."
    legend = " · ".join(f"[{number}] {note}" for note, number in notes.items())
    title = f"changes that must not change results, {kind}, {_shape(rows[0].case)}"
    return Table(title, ["backend", *INVARIANCES], body, "\n".join(filter(None, [caption, legend, absent(rows, "equal")])))


def _shape(case: dict[str, Any]) -> str:
    return f"{case['dtype']}, batch {case['B']}, {case['N']:,} positions, {case['H']} heads of {case['D']}"


def _growth(rows: Iterable[Row], what: str, label: Callable[[Row], str]) -> list[Line]:
    """Returns lines of the relative error by length; plain softmax is dashed."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        # non-finite errors cannot be plotted; they are in the table
        if math.isfinite(row.errors.get(what, math.nan)):
            lines.setdefault(label(row), []).append(row)
    found = []
    for name, mine in lines.items():
        mine = sorted(mine, key=lambda row: row.case["N"])
        found.append(Line(name, [row.case["N"] for row in mine], [row.errors[what] for row in mine], dashed=mine[0].name == PLAIN))
    return found


def _plot(name: str, title: str, lines: Sequence[Line]) -> Plot:
    return Plot(name=name, title=title, x_label="positions", y_label="relative error against float64", lines=lines, log_x=True, log_y=True)


def _bars(kind: str, dtype: str, rows: list[Row]) -> Plot | None:
    """Plots each result's error by backend, at the longest length that all of them have."""
    rows = [row for row in rows if "dq" in row.errors]
    if not rows:
        return None
    names = list(dict.fromkeys(row.name for row in rows))
    common = set.intersection(*({row.case["N"] for row in rows if row.name == name} for name in names))
    if not common:
        return None
    n = max(common)
    at = {row.name: row.errors for row in rows if row.case["N"] == n}
    lines = [Line(key, range(len(names)), [at[name][key] for name in names]) for key in ("out", *GRADIENTS)]
    return Plot(name=f"backends-{kind}", title=f"Error by backend, {kind}, {dtype}, {short(n)} positions", x_label="backend",
                y_label="relative error against float64", lines=lines, bars=names)  # fmt: skip
