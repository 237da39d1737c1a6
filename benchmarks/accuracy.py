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
# the backend that materializes the scores is measured up to here
_MOST_PLAIN_POSITIONS = 16384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=size, nargs="+", help="default: 256 1k 4k 16k 64k; small 64 256 1k")
    add("--backends", nargs="+", help="default: all, and the choice")
    parser.set_defaults(dtypes=["float32", "float16", "bfloat16"])


def groups(options: argparse.Namespace) -> list[Group]:
    lengths = options.lengths or ([64, 256, 1024] if options.is_small else [256, 1024, 4096, 16384, 65536])
    made = list[Group]()
    for n, kind, mask, dtype in itertools.product(lengths, ("attention", "ours"), ("full", "causal"), options.dtypes):
        pattern = geometric(n) if kind == "ours" else None
        name = f"{kind} {n} {mask} {str(dtype).removeprefix('torch.')}"
        case = Case(name=name, num_positions=n, num_heads=4, head_dim=64, dtype=dtype, device=options.device,
                    is_causal=mask == "causal", pattern=pattern)  # fmt: skip
        made.append((name, functools.partial(measure, kind, case, options.backends)))
    return made


def measure(kind: str, case: Case, backends: list[str] | None) -> list[Row]:
    """Returns a row of errors for every backend, wrong ones included; ``auto`` is the library's own choice."""
    rows = []
    for backend in backends or ["auto", *registry.names()]:
        if backend == "math" and case.num_positions > _MOST_PLAIN_POSITIONS:
            continue
        one = contender(kind if backend == "auto" else f"{kind} {backend}")
        errors, note = attempt(lambda one=one: one.errors(case, one.make(case), gradients=True), foreign=True)
        note = note or wrong(errors or {}, one.allowed(case))
        rows.append(Row(name=backend, case=case.row() | {"task": kind}, errors=errors or {}, note=note))
    return rows
