"""Accuracy by dtype, backend and length.

Errors against float64, a tiny model's loss by dtype, repeated runs, and changes to the inputs that must not change the results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.repeatability import KINDS, backends, invariances, repeats
from dilated_attention.bench.accuracy.tiny_loss import losses
from dilated_attention.bench.accuracy.truth import RESULTS
from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.report.plots import Plot, lines_of
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, figure, pivot
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, FUNCTIONS, Contender, of_backend
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import size

PARTS = ("error", "loss", "repeat", "invariance")
RUNS = 20
# plain softmax attention, every operation rounded to the inputs' dtype: what others are compared with
PLAIN = "math"
# the backend that materializes the scores is measured up to here
_MOST_PLAIN_POSITIONS = 16384


class Accuracy(Suite):
    """Measures how rounding affects results, and whether they are repeatable."""

    name = "accuracy"
    about = "errors against float64 by dtype, backend and length, loss by dtype, repeated runs, invariance"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 256 1k 4k 16k 64k; on a CPU 64 256 1k")
        parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: both")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"], help="default: both")
        parser.add_argument("--head-dim", type=size, default=64, help="default 64")
        parser.add_argument("--steps", type=size, help="of training in each dtype; default 30, on a CPU 8")
        parser.add_argument("--backends", nargs="+", choices=backends(), help="default: all; each is recompiled for every dtype and mask")
        parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        chosen = {"backends": options.backends} if options.backends else {}
        return super().settings(session) | {"head_dim": options.head_dim, "masks": options.masks, "steps": self.steps(session)} | chosen

    def steps(self, session: Session) -> int:
        return int(session.options.steps or (30 if session.full else 8))

    def groups(self, session: Session) -> Sequence[Group]:
        options = session.options
        # by default those that models are trained in, whatever the device's default dtype is
        dtypes = session.dtypes if getattr(options, "dtypes", None) else (torch.float32, torch.float16, torch.bfloat16)
        lengths = options.lengths or ([256, 1024, 4096, 16384, 65536] if session.full else [64, 256, 1024])
        usual = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), dtypes[0])
        make = functools.partial(Problem, device=session.device, head_dim=options.head_dim)
        groups: list[Group] = []
        if "error" in options.parts:
            for n, kind, mask, dtype in itertools.product(lengths, options.kinds, options.masks, dtypes):
                problem = make(num_positions=n, dtype=dtype, num_heads=4, is_causal=mask == "causal")
                groups.append(Group(f"error {kind} {problem.label}", functools.partial(errors, kind, problem, options.backends)))
        if "loss" in options.parts:
            n, steps = 4096 if session.full else 256, self.steps(session)
            groups.append(Group(f"loss of {n} tokens, {steps} steps", functools.partial(losses, n, steps, session.device, {})))
        # enough to fill a GPU, where the order of summation may differ from run to run
        n, heads = (4096, 8) if session.full else (256, 4)
        problem = make(num_positions=n, dtype=usual, batch_size=2, num_heads=heads)
        for kind in options.kinds:
            if "repeat" in options.parts:
                groups.append(
                    Group(f"repeat {kind} {problem.label}", functools.partial(repeats, kind, problem, RUNS, chosen=options.backends))
                )
            if "invariance" in options.parts:
                groups.append(
                    Group(f"invariance {kind} {problem.label}", functools.partial(invariances, kind, problem, chosen=options.backends))
                )
        return groups

    def tables(self, results: Results) -> list[Table]:
        tables: list[Table] = []
        for (part, kind, dtype, mask), rows in _parts(results).items():
            what = f"{kind}, {dtype}, {mask}"
            if part == "error":
                plain = {(row.case["N"], key): row.values[key] for row in rows if row.name == PLAIN for key in row.values}
                for key in RESULTS:
                    base = {n: value for (n, name), value in plain.items() if name == key}
                    tables.append(
                        pivot(
                            rows,
                            key,
                            across="N",
                            title=f"relative error of {key} against float64, {what}",
                            baseline=base,
                            caption=f"In brackets: that of {PLAIN}, plain softmax in the same dtype, ÷ this one.",
                        )
                    )
            elif part == "repeat":
                runs = next((int(row.values["runs"]) for row in rows if row.values), RUNS)
                each = [(row, key, f"{key}, deterministic" if row.case["deterministic"] else key) for row in rows for key in RESULTS]
                for value, title in (("equal_runs", f"of {runs} runs, equal to the first bit by bit"), ("spread", "largest difference")):
                    mine = [
                        replace(row, case={"of": of}, values={value: row.values[f"{key}_{value}"]} if row.values else {})
                        for row, key, of in each
                    ]
                    tables.append(pivot(mine, value, across="of", title=f"{title}, {what}"))
            elif part == "invariance":
                tables.append(
                    pivot(
                        rows,
                        "difference",
                        across="change",
                        title=f"largest difference of out where there should be none, {what}",
                        caption="0: equal bit by bit.",
                    )
                )
            else:
                tables.append(_loss_table(rows))
        return tables

    def plots(self, results: Results) -> list[Plot]:
        plots: list[Plot] = []
        for (part, kind, dtype, mask), rows in _parts(results).items():
            for key in ("out", "dk") if part == "error" else ():
                lines = lines_of(rows, key)
                if lines:
                    plots.append(
                        Plot(
                            name=f"growth-{kind}-{dtype}-{mask}-{key}",
                            title=f"Error of {key}, {kind}, {dtype}, {mask}",
                            x_label="positions",
                            y_label="relative error against float64",
                            lines=lines,
                            log_x=True,
                            log_y=True,
                        )
                    )
        steps = [
            replace(row, values={"off": abs(row.values["difference"])})
            for row in results.rows
            if row.case.get("part") == "loss" and row.values and row.name != "float32"
        ]
        if steps:
            note = "autocast with float32 weights; fp8: the forward of the float32 run's weights"
            plots.append(
                Plot(
                    name="loss",
                    title="A tiny model's loss against float32's",
                    x_label="step",
                    y_label="|difference|, nats per token",
                    lines=lines_of(steps, "off", across="step"),
                    log_y=True,
                    note=note,
                )
            )
        return plots


def errors(kind: str, problem: Problem, chosen: Sequence[str] | None) -> list[Row]:
    """Returns a row of errors for every backend, wrong ones included, and for those that compute in 8 bits."""
    asked = [name for name in backends(chosen) if name != PLAIN or problem.num_positions <= _MOST_PLAIN_POSITIONS]
    contenders: list[Contender] = [of_backend(name, kind, name=name) for name in asked]
    if chosen is None and problem.dtype.itemsize == 2:
        contenders += [x for x in (*DENSE, *FUNCTIONS) if x.name == {"dense": "flash3_fp8", "dilated": "ours fp8"}[kind]]
    rows = measure(contenders, problem, passes=(), extra={"part": "error", "kind": kind})
    return [replace(row, values=dict(row.errors)) for row in rows]


def _parts(results: Results) -> dict[tuple[str, str, str, str], list[Row]]:
    parts: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in results.rows:
        if "part" in row.case:
            is_loss = row.case["part"] == "loss"
            key = ("loss", "", "", "") if is_loss else (row.case["part"], row.case["kind"], row.case["dtype"], _mask(row))
            parts.setdefault(key, []).append(row)
    return parts


def _mask(row: Row) -> str:
    return "causal" if row.case["causal"] else "full"


def _loss_table(rows: list[Row]) -> Table:
    body = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name and row.values), key=lambda row: row.case["step"])
        if mine:
            off = [abs(row.values["difference"]) for row in mine]
            body.append(
                [name, *(f"{row.values['loss']:.5f}" for row in (mine[0], mine[-1])), figure(sum(off) / len(off)), figure(max(off))]
            )
        else:
            body.append([name, *(next(row.note for row in rows if row.name == name), "–", "–", "–")])
    caption = (
        "nats per token. The model of preset longnet-tiny from the same weights on the same data. float16 and bfloat16: by autocast with "
        "float32 weights. fp8: no training, the forward of the float32 run's weights. Differences grow as the trainings diverge."
    )
    columns = ["dtype", "first loss", "last loss", "mean difference", "largest difference"]
    return Table(f"loss by dtype, {rows[0].case['N']:,} tokens", columns, body, caption)
