"""Errors against float64 by dtype, backend and length. Tests hold repeated runs and invariances bit for bit."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import registry
from dilated_attention.bench.accuracy import RESULTS
from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, by, compared, failures, labelled, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, FUNCTIONS, Contender, of_backend
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import size

KINDS = ("dense", "dilated")
# plain softmax attention, every operation rounded to the inputs' dtype: what others are compared with
PLAIN = "math"
# the backend that materializes the scores is measured up to here
_MOST_PLAIN_POSITIONS = 16384


class Accuracy(Suite):
    """Measures how rounding affects results."""

    name = "accuracy"
    about = "errors against float64 by dtype, backend and length"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 256 1k 4k 16k 64k; on a CPU 64 256 1k")
        parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: both")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"], help="default: both")
        parser.add_argument("--head-dim", type=size, default=64, help="default 64")
        parser.add_argument("--backends", nargs="+", choices=backends(), help="default: all; each is recompiled for every dtype and mask")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        chosen = {"backends": options.backends} if options.backends else {}
        return super().settings(session) | {"head_dim": options.head_dim, "masks": options.masks} | chosen

    def groups(self, session: Session) -> Sequence[Group]:
        options = session.options
        # by default those that models are trained in, whatever the device's default dtype is
        dtypes = session.dtypes if getattr(options, "dtypes", None) else (torch.float32, torch.float16, torch.bfloat16)
        lengths = options.lengths or ([256, 1024, 4096, 16384, 65536] if session.full else [64, 256, 1024])
        make = functools.partial(Problem, device=session.device, head_dim=options.head_dim)
        groups: list[Group] = []
        for n, kind, mask, dtype in itertools.product(lengths, options.kinds, options.masks, dtypes):
            problem = make(num_positions=n, dtype=dtype, num_heads=4, is_causal=mask == "causal")
            groups.append(Group(f"error {kind} {problem.label}", functools.partial(errors, kind, problem, options.backends)))
        return groups

    def tables(self, results: Results) -> list[Table]:
        tables, columns = list[Table](), {"positions": ("N", 1.0), **{key: (key, 1.0) for key in RESULTS}, "×": ("times", 1.0)}
        for what, rows in by(labelled(results.rows, what="{kind}, {dtype}, causal={causal}"), "what"):
            caption = f"×: error of out of {PLAIN}, plain softmax in the same dtype, ÷ this one."
            title = f"relative errors against float64, {what}"
            tables += listing(compared(rows, "out", PLAIN, "N"), columns, title=title, caption=caption)
        return [*tables, *failures(results)]


def backends(chosen: Sequence[str] | None = None) -> list[str]:
    """Returns every backend, or those ``chosen``, the library's own choice first. 8-bit products are measured separately."""
    if chosen is not None:
        return list(chosen)
    return ["auto", *(name for name in registry.names() if "fp8" not in registry.get(name).capabilities.precisions)]


def errors(kind: str, problem: Problem, chosen: Sequence[str] | None) -> list[Row]:
    """Returns a row of errors for every backend, wrong ones included, and for those that compute in 8 bits."""
    asked = [name for name in backends(chosen) if name != PLAIN or problem.num_positions <= _MOST_PLAIN_POSITIONS]
    contenders: list[Contender] = [of_backend(name, kind, name=name) for name in asked]
    if chosen is None and problem.dtype.itemsize == 2:
        contenders += [x for x in (*DENSE, *FUNCTIONS) if x.name == {"dense": "flash3_fp8", "dilated": "ours fp8"}[kind]]
    rows = measure(contenders, problem, passes=(), extra={"kind": kind})
    return [replace(row, values=dict(row.errors)) for row in rows]
