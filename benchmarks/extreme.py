"""How far one device goes: seconds and bytes a token by length, doubled until memory or time runs out, every length checked.

python -m benchmarks extreme --kinds dilated --heads 1 --lengths 256M
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.case import Case, geometric, our_call
from benchmarks.contenders import contender
from benchmarks.report import Group, Row
from benchmarks.timing import attempt, loop, peak_bytes, positive, release
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
    add("--lengths", type=size, nargs="+", help="only these, without a search")
    add("--memory-gib", type=positive, help="that a call may take; default: the GPU's, small 0.125")


def groups(options: argparse.Namespace) -> list[Group]:
    which = itertools.product(options.kinds, options.passes)
    return [(f"{kind} {one}", functools.partial(lambda *how: list(search(*how)), kind, one, options)) for kind, one in which]


def search(kind: str, which: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each length, up to the first that does not fit, takes too long or is wrong."""
    small, on_gpu = options.is_small, options.device.type == "cuda"
    # seconds of one call beyond which a search ends; where it starts
    limit, start, took = (3.0, 2**10, 0.0) if small else (10.0, 2**18, 0.0)
    memory = int(2**30 * (options.memory_gib or (0 if on_gpu else 0.125)))
    for length in options.lengths or (start << i for i in itertools.count()):
        window = LocalWindow(256 if small else 1024, block_size=64 if small else 128)
        pattern = {"dilated": geometric(length, 512 if small else 2048), "blocks": window, "dense": None}[kind]
        case = Case(name=kind, num_positions=length, num_heads=options.heads, head_dim=64, dtype=options.dtype, device=options.device,
                    pattern=pattern)  # fmt: skip
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


def _one(case: Case, backward: bool, memory: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns figures and errors of one call. Raises torch.OutOfMemoryError where it takes more than ``memory``, also on a CPU."""
    # this call also compiles, and builds the plans and tables that calls share
    one = contender("ours")
    errors = one.errors(case, one.make(case), gradients=backward, rows=_ROWS)
    release()
    took = 0.0

    def call() -> None:
        nonlocal took
        # dout exists before the forward, so that it does not split up blocks that the forward frees
        leaves, dout = case.qkv(), case.dout() if backward else None

        def timed() -> None:
            with torch.set_grad_enabled(backward):
                out = our_call(case, case.pattern, *leaves)
            if backward:
                torch.autograd.grad(out, leaves, dout)

        took = loop(timed, case.device)

    taken = peak_bytes(call, case.device)
    if 0 < memory < taken:
        raise torch.OutOfMemoryError(f"a call took {taken} bytes, more than {memory}")
    figures = {"called": took, "tokens_per_s": 1000 * case.num_positions / took, "peak_bytes": taken, "ms": took}
    return figures | {"bytes_per_token": taken / case.num_positions}, errors
