"""Errors against float64 by dtype, backend and length: ``python -m benchmarks accuracy``."""

from __future__ import annotations

import argparse
import functools
import itertools

from benchmarks.case import Case, geometric
from benchmarks.contenders import contender
from benchmarks.report import Group, Row
from benchmarks.timing import attempt
from benchmarks.truth import wrong
from dilated_attention.backends import registry
from dilated_attention.parsing import size

ABOUT = "errors against float64 by dtype, backend and length"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=size, nargs="+", help="default: 256 1k 4k 16k 64k; small 64 256 1k")
    parser.add_argument("--backends", nargs="+", help="default: all, and the choice")
    parser.set_defaults(dtypes=["float32", "float16", "bfloat16"])


def groups(options: argparse.Namespace) -> list[Group]:
    lengths = options.lengths or ([64, 256, 1024] if options.is_small else [256, 1024, 4096, 16384, 65536])
    made = list[Group]()
    for n, kind, is_causal, dtype in itertools.product(lengths, ("attention", "ours"), (False, True), options.dtypes):
        name, pattern = (
            f"{kind} {n} {('full', 'causal')[is_causal]} {dtype}".replace("torch.", ""),
            geometric(n) if kind == "ours" else None,
        )
        shape = {"num_positions": n, "num_heads": 4, "head_dim": 64, "device": options.device}
        case = Case(name=name, dtype=dtype, is_causal=is_causal, pattern=pattern, **shape)
        made.append((name, functools.partial(measure, kind, case, options.backends or ["auto", *registry.names()])))
    return made


def measure(kind: str, case: Case, backends: list[str]) -> list[Row]:
    """Returns a row of errors for every backend, wrong ones included; ``auto`` is the library's own choice."""
    rows = []
    # plain torch materializes the scores
    for backend in [name for name in backends if name != "math" or case.num_positions <= 16384]:
        one = contender(kind if backend == "auto" else f"{kind} {backend}")
        errors, note = attempt(lambda one=one: one.errors(case, one.make(case), gradients=True), foreign=True)
        rows.append(
            Row(name=backend, case=case.row() | {"task": kind}, errors=errors or {}, note=note or wrong(errors or {}, one.allowed(case)))
        )
    return rows
