"""How far one device goes: seconds and bytes a token by length, doubled until memory or time runs out, every length checked.

python -m benchmarks extreme --kinds dilated --heads 1 --lengths 256M
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.case import Case, geometric, our_call
from benchmarks.case import dense_pattern as dense
from benchmarks.report import Row
from benchmarks.session import Group, Session
from benchmarks.timing import attempt, counted, release, synchronise
from benchmarks.truth import BOUNDS, Truth, wrong
from dilated_attention.parsing import size
from dilated_attention.pattern import LocalWindow

ABOUT = "the longest sequence that fits: tokens, bytes a token, time, by doubling until memory runs out"
KINDS, PASSES = ("dilated", "blocks", "dense"), ("forward", "both")
# rows compared with float64 at every length
_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add("--heads", type=size, default=8, help="default: 8")
    add("--head-dim", type=size, default=64, help="default: 64")
    add("--causal", action="store_true")
    add("--lengths", type=size, nargs="+", help="only these, without a search")
    add("--first", type=size, help="length to begin with; default: 256k, small 1k")
    add("--memory-gib", type=float, help="that a call may take; default: the GPU's, small 0.125")
    add("--limit", type=float, help="seconds of one call beyond which a search ends; default: 10, small 3")


def groups(session: Session) -> list[Group]:
    made = list[Group]()
    for kind, which in itertools.product(session.options.kinds, session.options.passes):
        made.append((f"{kind} {which}", functools.partial(lambda *how: list(search(*how)), kind, which, session)))
    return made


def search(kind: str, which: str, session: Session) -> Iterator[Row]:
    """Yields a row for each length, up to the first that does not fit, takes too long or is wrong."""
    options, small, on_gpu = session.options, session.is_small, session.device.type == "cuda"
    limit = options.limit or (3.0 if small else 10.0)
    gib = options.memory_gib or (0.125 if not on_gpu else None)
    first = options.first or (2**10 if small else 2**18)
    lengths, took = options.lengths or (first << i for i in itertools.count()), 0.0
    for length in lengths:
        window = LocalWindow(256 if small else 1024, block_size=64 if small else 128)
        pattern = {"dilated": geometric(length, 512 if small else 2048), "blocks": window, "dense": None}[kind]
        case = Case(name=kind, num_positions=length, num_heads=options.heads, head_dim=options.head_dim, dtype=session.dtype,
                    device=session.device, is_causal=options.causal, pattern=pattern)  # fmt: skip
        row = Row(name=kind, case=case.row() | {"pass": which})
        if not options.lengths and took * (4 if kind == "dense" else 2) > limit:
            yield replace(row, note="time, not memory")
            return
        release()
        if on_gpu and gib:
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / torch.cuda.get_device_properties(0).total_memory))
        try:
            result, note = attempt(_one, case, which == "both", None if gib is None else int(gib * 2**30))
        finally:
            if on_gpu:
                torch.cuda.set_per_process_memory_fraction(1.0)
        values, errors = result or ({}, {})
        note = note or wrong(errors, BOUNDS[case.dtype])
        took = values.get("called", 0.0) / 1000
        yield replace(row, values={} if note else values, errors=errors, note=note)
        if note and not options.lengths:
            return


def _one(case: Case, backward: bool, memory: int | None) -> tuple[dict[str, float], dict[str, float]]:
    """Returns figures and errors of one call. Raises torch.OutOfMemoryError where it takes more than ``memory``, also on a CPU."""
    if case.device.type == "cuda":
        # the first call of a length compiles, and builds the plans and tables that calls share
        _once(case, backward)
    with counted(case.device) as peak:
        seconds, inputs, results = _once(case, backward)
    if memory is not None and peak.bytes > memory:
        raise torch.OutOfMemoryError(f"a call took {peak.bytes} bytes, more than {memory}")
    out, lse, *grads = results
    dout = inputs[3] if backward else None
    true = Truth(case, case.pattern or dense(case), inputs[:3], dout, [(out, lse)], count=_ROWS)
    figures = {"called": 1000 * seconds, "tokens_per_s": case.num_positions / seconds, "peak_bytes": peak.bytes}
    # the largest error is of the rows, dk and dv among them
    return figures | {"ms": 1000 * seconds, "bytes_per_token": peak.bytes / case.num_positions}, true.errors(out, grads, lse)


def _once(case: Case, backward: bool) -> tuple[float, list[Any], list[Any]]:
    """Returns the seconds of a call, its inputs, and out, lse and gradients."""
    gc.collect()
    # dout exists before the forward, so that it does not split up blocks that the forward frees
    leaves, dout = case.qkv(), [case.dout()] if backward else []
    synchronise(case.device)
    begun = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out, lse = our_call(case, case.pattern, *leaves, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout[0]) if backward else ()
    synchronise(case.device)
    return time.perf_counter() - begun, [*leaves, *dout], [out.detach(), lse.detach(), *grads]
