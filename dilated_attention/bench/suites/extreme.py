"""How far one device goes: seconds and bytes per token by length, every length checked on sampled rows against float64.

Lengths are given, or doubled until memory or time runs out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.accuracy import sampled_errors, wrong
from dilated_attention.bench.measure.limits import called, planned, within
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, by, failures, labelled, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import Contender, of_backend
from dilated_attention.bench.workloads.problem import BOUNDS, Problem, geometric
from dilated_attention.parsing import UsageError, size
from dilated_attention.pattern import LocalWindow

PASSES = {"forward": "forward", "both": "forward and backward"}
TIME = "time, not memory"
# kind → this library's function, and the power of the length that its time grows with
KINDS = {"dilated": (of_backend("auto", return_lse=True), 1), "block-sparse": (of_backend("auto", "blocks", return_lse=True), 1),
         "dense": (of_backend("auto", "dense", return_lse=True), 2)}  # fmt: skip


class Extreme(Suite):
    """Finds the longest sequence that one device can handle, by kind of attention."""

    name = "extreme"
    about = "the longest sequence that fits: tokens, bytes per token, throughput, by doubling until memory runs out"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
        parser.add_argument("--passes", nargs="+", choices=list(PASSES), default=list(PASSES), help="both: forward and backward")
        parser.add_argument("--heads", type=size, default=8, help="default: 8")
        parser.add_argument("--head-dim", type=size, default=64, help="default: 64")
        parser.add_argument("--causal", action="store_true")
        parser.add_argument("--lengths", type=size, nargs="+", help="only these, without a search")
        parser.add_argument("--first", type=size, help="length to begin with; default: 256k on a GPU, 1k on a CPU")
        parser.add_argument("--memory-gib", type=float, help="memory to fill; default: the GPU's, 0.125 on a CPU")
        parser.add_argument("--limit", type=float, help="seconds of one call beyond which a search ends; default: 10 on a GPU, 3 on a CPU")

    def settings(self, session: Session) -> dict[str, Any]:
        options, (_, seconds) = session.options, self.limits(session)
        shape = {"heads": options.heads, "head_dim": options.head_dim, "causal": options.causal}
        ends = {"first": self._problem(session).num_positions, "memory_gib": options.memory_gib}
        dtype = {"dtype": str(session.dtype).removeprefix("torch.")}
        return super().settings(session) | shape | dtype | ends | {"limit": seconds}

    def limits(self, session: Session) -> tuple[int | None, float]:
        """Returns the bytes that a call may take, None for the device's, and its seconds."""
        options, on_gpu = session.options, session.device.type == "cuda"
        gib = options.memory_gib if options.memory_gib is not None else None if on_gpu else 0.125
        if gib is not None and gib <= 0:
            raise UsageError(f"--memory-gib is {gib:g}; expected more than 0")
        seconds = options.limit if options.limit is not None else 10.0 if on_gpu else 3.0
        return None if gib is None else int(gib * 2**30), seconds

    def groups(self, session: Session) -> Sequence[Group]:
        options, (memory, seconds), problem = session.options, self.limits(session), self._problem(session)
        first, lengths = 2048 if session.full else 512, options.lengths or ()
        given, how = "".join(f" {length}" for length in lengths), (problem, first, memory, seconds, lengths)
        what = itertools.product(options.kinds, options.passes)
        return [Group(f"{kind} {which}{given}", functools.partial(search, kind, which, *how)) for kind, which in what]

    def _problem(self, session: Session) -> Problem:
        options = session.options
        length = options.first or (2**18 if session.full else 2**10)
        return Problem(num_positions=length, num_heads=options.heads, head_dim=options.head_dim, dtype=session.dtype,
                       device=session.device, is_causal=options.causal)  # fmt: skip

    def tables(self, results: Results) -> list[Table]:
        held = results.settings
        caption = (
            f"One sequence, {held['heads']} × {held['head_dim']}, {held['dtype']}, {'causal' if held['causal'] else 'full'}. Bytes are the "
            "peak of the call, inputs and results included. Planned: what fits nine tenths of the memory, by the plan. Sampled rows of "
            "every length are checked against float64."
        )
        longest = []
        for label, tried in by(_searches(results), "search"):
            fits = [row for row in tried if row.values]
            last = max(fits, key=lambda row: row.case["N"], default=tried[-1])
            beyond = min((row for row in tried if row.case["N"] > last.case["N"]), key=lambda row: row.case["N"], default=None)
            ended = f"{beyond.note} at {beyond.case['N']:,}" if beyond is not None else "longest tried"
            longest.append(replace(last, name=label, note=ended if fits else tried[-1].note))
        columns = {"tokens": ("N", 1.0), **_FIGURES}
        every = listing(_searches(results), columns | {"largest error": ("largest", 1.0)}, title="lengths tried")
        planned_too = columns | {"tokens planned": ("planned_longest", 1.0)}
        return [*listing(longest, planned_too, title="longest sequence", caption=caption), *every, *failures(results)]


_FIGURES = {"seconds": ("ms", 1e-3), "M tokens/s": ("tokens_per_s", 1e-6), "GiB": ("peak_bytes", 2.0**-30)}
_FIGURES |= {"bytes per token": ("bytes_per_token", 1.0), "off the plan, %": ("off", 100.0)}


def _searches(results: Results) -> list[Row]:
    """Returns the rows named after their search, with the largest of their errors."""
    rows = [row for row in results.rows if row.case.get("pass") in PASSES]
    named = labelled(rows, "{name}, {pass}", search="{name}, {pass}")
    return [replace(row, errors={"largest": max(row.errors.values())} if row.errors else {}) for row in named]


def search(
    kind: str, which: str, problem: Problem, first: int, memory: int | None, seconds: float, lengths: Sequence[int] = ()
) -> list[Row]:
    """Returns a row for every length tried, in that order: those of ``lengths``, or doubled until one does not fit or takes too long.

    Args:
        first: the shortest segment, and twice the window of blocks.
        memory, seconds: that one call may take; None for the memory of the device.
    """
    contender, power = KINDS[kind]
    backward, rows = which == "both", list[Row]()
    for length in lengths or (problem.num_positions << i for i in itertools.count()):
        # branches up to the whole sequence, blocks of a window of one first segment
        window = LocalWindow(first // 2, block_size=128 if first >= 1024 else 64)
        at = replace(problem, num_positions=length, given_branches=geometric(length, first=first), blocks=window)
        row = Row(name=kind, case={"pass": which, **at.case})
        if not lengths and rows and rows[-1].values["ms"] / 1000 * 2**power > seconds:
            return [*rows, replace(row, note=TIME)]
        found, note = within(functools.partial(_one, contender, at, backward, memory), at.device, memory=memory)
        values, errors = found or ({}, {})
        note = note or wrong(errors, BOUNDS[at.dtype])
        if not note:
            pattern = None if kind == "dense" else contender.pattern(at)
            most = memory or torch.cuda.get_device_properties(at.device).total_memory
            plan = planned(kind.replace("-", "_"), at, pattern, backward=backward, memory=most)
            values |= plan | {"off": values["peak_bytes"] / plan["predicted_bytes"] - 1}
        rows.append(replace(row, values={} if note else values, errors=errors, note=note))
        if note and not lengths:
            break
    return rows


def _one(contender: Contender, problem: Problem, backward: bool, memory: int | None) -> tuple[dict[str, float], dict[str, float]]:
    """Returns figures and errors of one call."""
    found, tokens = called(contender.make, problem, backward=backward, memory=memory), problem.num_positions
    pattern = contender.pattern(problem)
    assert pattern is not None
    errors = sampled_errors(pattern, problem, found.inputs, found.results)
    values = {"ms": 1000 * found.seconds, "tokens_per_s": tokens / found.seconds, "peak_bytes": found.peak}
    return values | {"bytes_per_token": found.peak / tokens}, errors
