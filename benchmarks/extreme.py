"""How far one device goes: seconds and bytes a token by length, doubled until memory or time runs out, every length checked.

python -m benchmarks extreme --kinds dilated --heads 1 --lengths 256M
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.case import Case, geometric, our_call
from benchmarks.contenders import contender
from benchmarks.report import Group, Row
from benchmarks.timing import attempt, counted, release, synchronise
from benchmarks.truth import BOUNDS, wrong
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


def groups(options: argparse.Namespace) -> list[Group]:
    which = itertools.product(options.kinds, options.passes)
    return [(f"{kind} {one}", functools.partial(lambda *how: list(search(*how)), kind, one, options)) for kind, one in which]


def search(kind: str, which: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each length, up to the first that does not fit, takes too long or is wrong."""
    small, on_gpu = options.is_small, options.device.type == "cuda"
    limit = options.limit or (3.0 if small else 10.0)
    memory = options.memory_gib or (0.125 if not on_gpu else None)
    memory = None if memory is None else int(memory * 2**30)
    start, took = options.first or (2**10 if small else 2**18), 0.0
    for length in options.lengths or (start << i for i in itertools.count()):
        window = LocalWindow(256 if small else 1024, block_size=64 if small else 128)
        pattern = {"dilated": geometric(length, 512 if small else 2048), "blocks": window, "dense": None}[kind]
        case = Case(name=kind, num_positions=length, num_heads=options.heads, head_dim=options.head_dim, dtype=options.dtypes[0],
                    device=options.device, is_causal=options.causal, pattern=pattern)  # fmt: skip
        row = Row(name=kind, case=case.row() | {"pass": which})
        if not options.lengths and took * (4 if kind == "dense" else 2) > limit:
            yield replace(row, note="time, not memory")
            return
        release()
        if on_gpu and memory:
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.get_device_properties(0).total_memory))
        try:
            result, note = attempt(_one, case, which == "both", memory)
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
    # this call also compiles, and builds the plans and tables that calls share
    one = contender("ours")
    errors = one.errors(case, one.make(case), gradients=backward, rows=_ROWS)
    release()
    with counted(case.device) as peak:
        # dout exists before the forward, so that it does not split up blocks that the forward frees
        leaves, dout = case.qkv(), case.dout() if backward else None
        synchronise(case.device)
        begun = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = our_call(case, case.pattern, *leaves)
        grads = torch.autograd.grad(out, leaves, dout) if backward else ()
        synchronise(case.device)
        seconds = time.perf_counter() - begun
        del out, grads
    if memory is not None and peak.bytes > memory:
        raise torch.OutOfMemoryError(f"a call took {peak.bytes} bytes, more than {memory}")
    figures = {"called": 1000 * seconds, "tokens_per_s": case.num_positions / seconds, "peak_bytes": peak.bytes}
    return figures | {"ms": 1000 * seconds, "bytes_per_token": peak.bytes / case.num_positions}, errors
