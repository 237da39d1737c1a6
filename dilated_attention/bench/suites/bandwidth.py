"""Measures how close each pass comes to the machine's two limits: memory bandwidth and the rate of matrix products (the roofline)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.measure.forward_backward import FLOPS, PASSES
from dilated_attention.bench.measure.timing import interleaved
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.report.views import failures, having, labelled, listing
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.planning import detected_gpu

# excluded: 8-bit products, which have a different limit, and pairs chosen by the data, whose number is not known beforehand
CONTENDERS = {
    x.name: x for x in (*DENSE, *MODULES) if x.name not in ("flash3_fp8", "BlockSparseAttention chosen", "BlockSparseDilatedAttention")
}
COPY, PRODUCT = "copy", "matrix product"


class Bandwidth(Suite):
    """Achieved FLOP/s and bytes/s, compared with what is possible."""

    name = "bandwidth"
    about = "achieved against possible bandwidth and FLOP/s of every pass (roofline)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all except the 8-bit ones")
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))

    def problems(self, session: Session) -> list[Problem]:
        """Returns one problem bound by matrix products, and one of many short sequences."""
        shapes = ((1, 16384, 16, 128), (128, 256, 16, 64)) if session.full else ((1, 1024, 4, 64), (16, 128, 4, 64))
        place: dict[str, Any] = {"dtype": session.dtype, "device": session.device}
        return [Problem(batch_size=b, num_positions=n, num_heads=h, head_dim=d, **place) for b, n, h, d in shapes]

    def groups(self, session: Session) -> Sequence[Group]:
        chosen = [CONTENDERS[name] for name in session.options.contenders or CONTENDERS]
        attending = [Group(f"attention {x.label}", functools.partial(_attention, chosen, x, session)) for x in self.problems(session)]
        return [Group("ceilings", functools.partial(_ceilings, session)), *attending]

    def tables(self, results: Results) -> list[Table]:
        ceilings = labelled(having(results, part="ceilings"), "{name}, {dtype}")
        caption = "The fastest copy far larger than any cache, read and write counted, and the fastest square matrix product."
        tables = listing(ceilings, _CEILINGS, title="ceilings", caption=caption)
        for label, rows in results.groups.items():
            mine = [row for row in rows if row.case.get("part") == "attention"]
            tables += listing(labelled(_with_roof(results, mine), "{name}, {pass}"), _PLACES, title=label, caption=_CAPTION)
        return [*tables, *failures(results)]



_CEILINGS = {"GB/s": ("gb_s", 1.0), "TFLOP/s": ("tflops", 1.0), "data sheet": ("datasheet", 1.0), "reached, %": ("reached", 100.0)}
_PLACES = {"ms": ("ms", 1.0), "GFLOP": ("flops", 1e-9), "least MB": ("least_bytes", 1e-6), "FLOP/byte": ("intensity", 1.0)}
_PLACES |= {"TFLOP/s": ("tflops", 1.0), "GB/s": ("gb_s", 1.0), "roof, TFLOP/s": ("roof", 1.0), "share of roof, %": ("share", 100.0)}
_CAPTION = (
    "FLOP: 4·D per pair forward, 10·D backward, over the pairs that the pattern keeps. Least MB: what any implementation must read and "
    "write once. Roof: the lower of the measured product rate and of FLOP/byte times the measured copy."
)


def _ceilings(session: Session) -> list[Row]:
    """Measures a copy far larger than any cache, and a square matrix product of each dtype."""
    device = session.device
    gpu = detected_gpu(device) if device.type == "cuda" else None
    size, edge = (2**30, 8192) if session.full else (2**27, 1024)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls: dict[tuple[str, str], Callable[[], object]] = {(COPY, "bytes"): lambda: target.copy_(source)}
    for dtype in dict.fromkeys((*session.dtypes, torch.float32)):
        a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        calls[PRODUCT, str(dtype).removeprefix("torch.")] = functools.partial(torch.mm, a, b)
    rows = []
    # not in turns: a product heats the chip, and a copy right after it would run at a reduced clock rate
    for (name, dtype_name), call in calls.items():
        timing = interleaved({name: call}, device, seconds=max(session.seconds, 0.2) if session.seconds >= 0.1 else session.seconds)[name]
        # the fastest, as it is an upper limit
        key, rate = ("gb_s", 2 * size / 1e6 / timing.low_ms) if name == COPY else ("tflops", 2 * edge**3 / 1e9 / timing.low_ms)
        values = timing.values() | {key: rate}
        stated = None if gpu is None else gpu.bandwidth if name == COPY else gpu.peak(dtype_name)
        if stated is not None:
            values["datasheet"] = stated / (1e9 if name == COPY else 1e12)
            values["reached"] = rate / values["datasheet"]
        rows.append(Row(name=name, case={"part": "ceilings", "dtype": dtype_name}, values=values))
    return rows


def least_bytes(problem: Problem, which: str) -> int:
    """Returns what a pass must read and write once: q, k, v → out, lse; these and dout → dq, dk, dv."""
    rows = problem.batch_size * problem.num_positions
    element = problem.head_dim * problem.dtype.itemsize
    q, k, lse = rows * problem.num_heads * element, rows * problem.kv_heads * element, rows * problem.num_heads * 4
    passes = {"forward": 2 * q + 2 * k + lse, "backward": 4 * q + 4 * k + lse}
    return passes[which] if which in passes else sum(passes.values())


def _attention(contenders: Sequence[Contender], problem: Problem, session: Session) -> list[Row]:
    pairs = {contender.name: contender.pairs(problem) for contender in contenders}
    extra = {"part": "attention"}
    empty = [Row(name=name, case=problem.case | extra, note="keeps no pair of so few blocks") for name, count in pairs.items() if not count]
    able = [contender for contender in contenders if pairs[contender.name]]
    rows = measure(able, problem, passes=session.options.passes, seconds=session.seconds, extra=extra)
    return [*(_placed(row, problem, pairs[row.name] or 0) if row.values else row for row in rows), *empty]


def _placed(row: Row, problem: Problem, pairs: int) -> Row:
    """Adds ``flops``, ``least_bytes``, ``intensity`` (FLOPs per byte) and ``gb_s``."""
    which = row.case["pass"]
    flops, moved = FLOPS[which] * pairs * problem.head_dim, least_bytes(problem, which)
    added = {"flops": flops, "least_bytes": moved, "intensity": flops / moved, "gb_s": moved / row.values["ms"] / 1e6}
    return replace(row, values=row.values | added)


def _with_roof(results: Results, rows: Sequence[Row]) -> list[Row]:
    """Adds ``roof``, the TFLOP/s that the measured ceilings allow, and ``share``; the note says which ceiling is the limit."""
    ceilings = having(results, part="ceilings")
    copy = next((row.values["gb_s"] for row in ceilings if row.name == COPY), 0.0)
    products = {row.case["dtype"]: row.values["tflops"] for row in ceilings if row.name == PRODUCT}
    found = []
    for row in rows:
        product, memory = products.get(row.case["dtype"], 0.0), row.values.get("intensity", 0.0) * copy / 1000
        if product and memory:
            roof = min(product, memory)
            row = replace(row, values=row.values | {"roof": roof, "share": row.values["tflops"] / roof})
            row = replace(row, note="products" if product < memory else "memory")
        found.append(row)
    return found
