"""Measures how time and memory grow: with the length, with the batch, and over processes that share a sequence.

    python -m dilated_attention bench scaling
    torchrun --nproc-per-node 4 -m dilated_attention bench scaling

Each number of processes has a separate file, and all files in one folder are reported together.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.measure import contest, forward_backward
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.report.plots import Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.suites import scaling_report as report
from dilated_attention.bench.workloads import sharded
from dilated_attention.bench.workloads.contenders import Contender, block_sparse, dense
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.factory import create_attention
from dilated_attention.parsing import size
from dilated_attention.pattern import DilatedPattern
from dilated_attention.profiling import profile_memory

PASSES = ("forward", "both")
# maximum seconds of one call
_LONGEST = 4.0
_MASKS = {"full": False, "causal": True}


_AUTO = dense("auto", "dense attention, on the backend that this library chooses")


def contenders(unit: int) -> tuple[Contender, ...]:
    """Returns dense attention, and two kinds whose work grows with N: their shortest segment and their window are fixed."""

    def dilated(problem: Problem) -> Attend:
        lengths, rates = sharded.branches(problem, unit)
        module = create_attention("dilated", segment_lengths=lengths, dilation_rates=rates)
        return functools.partial(module, is_causal=problem.is_causal)

    return (
        replace(_AUTO, name="dense"),
        Contender(
            name="DilatedAttention",
            what=f"LongNet's branches: w = {unit:,} · 4^i, r = 4^i",
            make=dilated,
            pattern=lambda problem: DilatedPattern(*sharded.branches(problem, unit)),
        ),
        block_sparse(
            "BlockSparseAttention window",
            f"keys within {unit // 2:,} positions on either side",
            lambda problem: sharded.window(problem, unit),
        ),
    )


class Scaling(Suite):
    """Fits growth laws, and measures efficiency over processes."""

    name = "scaling"
    about = "time and memory per token by length, by batch, and over processes (torchrun)"
    over_processes = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 4k … 1M; on a CPU 256 … 4k")
        parser.add_argument("--batches", type=size, nargs="+", help="default: 1 … 32; on a CPU 1 … 4")
        parser.add_argument("--positions", type=size, help="of each sequence in the weak part over batch; default 4k, on a CPU 512")
        parser.add_argument(
            "--strong", type=size, help="positions that processes share; default 64k, dilated and window 512k; on a CPU 2k, 4k"
        )
        parser.add_argument("--weak", type=size, help="positions for each process; default 16k, dilated and window 128k; on a CPU 1k, 2k")
        parser.add_argument("--masks", nargs="+", choices=list(_MASKS), help="over processes; default: both; on a CPU causal")
        parser.add_argument("--timeout", type=float, default=60.0, help="seconds that an exchange may take; default 60")

    def settings(self, session: Session) -> dict[str, Any]:
        return super().settings(session) | {"unit": _unit(session), "dtype": str(session.dtype).removeprefix("torch.")}

    def groups(self, session: Session) -> Sequence[Group]:
        mine = _of_processes(session)
        return mine if session.world_size > 1 else [*_of_lengths(session), *_of_batches(session), *mine]

    def tables(self, results: Results) -> list[Table]:
        return report.tables(results)

    def plots(self, results: Results) -> list[Plot]:
        return report.plots(results)


def _unit(session: Session) -> int:
    """Returns the unit of segments and windows, in positions."""
    return 2048 if session.full else 128


def _problem(session: Session, positions: int, batch: int = 1) -> Problem:
    heads, head_dim = (16, 128) if session.full else (2, 64)
    return Problem(
        num_positions=positions,
        num_heads=heads,
        head_dim=head_dim,
        batch_size=batch,
        dtype=session.dtype,
        device=session.device,
    )


def _of_lengths(session: Session) -> list[Group]:
    lengths = session.options.lengths or ([2**i for i in range(12, 21, 2)] if session.full else [2**i for i in range(8, 13)])
    return [_group(session, "length", _problem(session, n)) for n in lengths]


def _of_batches(session: Session) -> list[Group]:
    """weak: sequences of equal length, so work grows with the batch; strong: the same number of tokens in more and shorter sequences."""
    batches = session.options.batches or ([1, 2, 4, 8, 16, 32] if session.full else [1, 2, 4])
    positions = session.options.positions or (4096 if session.full else 512)
    total = positions * max(batches)
    groups = [_group(session, "weak", _problem(session, positions, batch)) for batch in batches]
    return [*groups, *(_group(session, "strong", _problem(session, total // batch, batch)) for batch in batches)]


def _group(session: Session, part: str, problem: Problem) -> Group:
    return Group(f"{part} {problem.label}", functools.partial(_measured, problem, part, _unit(session), session.seconds))


def _measured(problem: Problem, part: str, unit: int, seconds: float) -> list[Row]:
    extra = {"part": "length"} if part == "length" else {"part": "batch", "mode": part}
    compared = {contender.name: contender for contender in contenders(unit)}
    rows = contest.measure(compared.values(), problem, passes=PASSES, seconds=seconds, memory=True, longest=_LONGEST, extra=extra)
    if part == "length" and problem.device.type == "cpu":
        rows = [_with_memory(row, compared[row.name], problem) for row in rows]
    pairs = {name: contender.pairs(problem) for name, contender in compared.items()}
    return [_per_token(row, problem, pairs[row.name]) for row in rows]


def _with_memory(row: Row, contender: Contender, problem: Problem) -> Row:
    """Adds the peak memory that a GPU's allocator counts, measured here by PyTorch's profiler."""
    if "ms" not in row.values:
        return row

    def peak() -> int | None:
        call = forward_backward.call_of(contender, contender.make(problem), problem, row.case["pass"], {})
        # a first call, so that what is created only once does not count
        call()
        # silences its start and stop messages on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        return profile_memory(call, device=problem.device).peak_allocated

    found = attempt(peak)
    return replace(row, values=row.values | ({} if found.value is None else {"peak_bytes": found.value}), note=found.note)


def _per_token(row: Row, problem: Problem, pairs: int | None) -> Row:
    """Adds figures per token, and the pairs that the arithmetic includes."""
    if "ms" not in row.values:
        return row
    tokens = problem.batch_size * problem.num_positions
    values = row.values | {"ns_per_token": 1e6 * row.values["ms"] / tokens, "tokens_per_s": 1000 * tokens / row.values["ms"]}
    if pairs is not None:
        values["pairs"] = pairs
    if "peak_bytes" in values:
        values["bytes_per_token"] = values["peak_bytes"] / tokens
    return replace(row, values=values)


def _of_processes(session: Session) -> list[Group]:
    groups = []
    for kind in sharded.kinds(_unit(session)):
        is_dense = kind.name == "ring_attention"
        if session.full:
            total, each = (2**16, 2**14) if is_dense else (2**19, 2**17)
        else:
            total, each = (2048, 1024) if is_dense else (4096, 2048)
        total, each = session.options.strong or total, session.options.weak or each
        for mode, positions, alone in (("strong", total, total), ("weak", each * session.world_size, each)):
            for mask in session.options.masks or (_MASKS if session.full else ("causal",)):
                whole, own = (replace(_problem(session, n), is_causal=_MASKS[mask]) for n in (positions, alone))
                run = functools.partial(_spread, session, kind, whole, own, mode)
                groups.append(Group(f"{kind.name} {mode} W={session.world_size} {whole.label}", run))
    return groups


def _spread(session: Session, kind: sharded.Kind, whole: Problem, own: Problem, mode: str) -> list[Row]:
    return sharded.measure(kind, whole, own, mode, RankSync(session), seconds=session.seconds, timeout=session.options.timeout)
