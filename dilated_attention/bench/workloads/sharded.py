"""Attention on a sequence shared by several processes, compared with the same kernel on one process.

    strong   N positions, whatever the number W of processes; compared with one process on all N
    weak     n positions per process, N = W · n; compared with one process on its n

Each process checks its own rows, and all are timed together. In both modes, all processes run the single-process work at the same time, in
turns with the shared work, so at the same clock rates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.accuracy.correctness import Attend, Pattern
from dilated_attention.bench.measure.forward_backward import FLOPS
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.measure.skip import Attempt, release
from dilated_attention.bench.measure.timing import Timing, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.problem import Problem, geometric
from dilated_attention.distributed import local_positions, shard_sequence
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.functional import (
    attention,
    block_sparse_attention,
    dilated_attention,
    ring_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
)
from dilated_attention.pattern import DilatedPattern, LocalWindow

PASSES = ("forward", "both")
# positions per process in the check of all rows and gradients
_CHECKED = 128


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One function over processes.

    Args:
        name: of the function.
        pattern: problem → the pattern that it computes.
        shared: (problem, layout, timeout) → function of this process's q, k, v.
        alone: problem → function of the whole q, k, v on one process.
        zigzag: whether causal sequences use the zigzag layout, which balances them.
    """

    name: str
    pattern: Callable[[Problem], Pattern]
    shared: Callable[[Problem, str, float], Attend]
    alone: Callable[[Problem], Attend]
    zigzag: bool = False

    def layout(self, problem: Problem) -> str:
        return "zigzag" if self.zigzag and problem.is_causal else "contiguous"

    def flops(self, problem: Problem, which: str) -> float:
        pairs = self.pattern(problem).pairs(problem.num_positions, problem.num_heads, is_causal=problem.is_causal)
        return float(FLOPS[which] * problem.batch_size * pairs * problem.head_dim)


def branches(problem: Problem, unit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns segment lengths and rates w = unit · 4^i, r = 4^i, like ``geometric``."""
    return geometric(problem.num_positions, first=unit)


def window(problem: Problem, unit: int) -> LocalWindow:
    """Returns a window of half a unit on either side, or a quarter of a shorter sequence: work that grows with N, not with N²."""
    return LocalWindow(min(unit // 2, max(16, problem.num_positions // 4)), block_size=min(128, unit // 2))


def kinds(unit: int) -> tuple[Kind, ...]:
    """Returns dense, dilated and block-sparse attention, the last two with the branches and the window of ``unit``."""

    def options(problem: Problem, layout: str, timeout: float) -> dict[str, Any]:
        return {"layout": layout, "seq_len": problem.num_positions, "is_causal": problem.is_causal, "timeout": timeout}

    def of_branches(function: Callable[..., Any], problem: Problem, **others: Any) -> Attend:
        lengths, rates = branches(problem, unit)
        return functools.partial(function, segment_lengths=lengths, dilation_rates=rates, **others)

    return (
        Kind(
            name="ring_attention",
            pattern=lambda problem: DilatedPattern((problem.num_positions,), (1,), "zero"),
            shared=lambda problem, layout, timeout: functools.partial(ring_attention, **options(problem, layout, timeout)),
            alone=lambda problem: functools.partial(attention, is_causal=problem.is_causal),
            zigzag=True,
        ),
        Kind(
            name="ring_dilated_attention",
            pattern=lambda problem: DilatedPattern(*branches(problem, unit)),
            shared=lambda problem, layout, timeout: of_branches(ring_dilated_attention, problem, **options(problem, layout, timeout)),
            alone=lambda problem: of_branches(dilated_attention, problem, is_causal=problem.is_causal),
        ),
        Kind(
            name="ring_block_sparse_attention",
            pattern=lambda problem: window(problem, unit),
            shared=lambda problem, layout, timeout: functools.partial(
                ring_block_sparse_attention, pattern=window(problem, unit), **options(problem, layout, timeout)
            ),
            alone=lambda problem: functools.partial(block_sparse_attention, pattern=window(problem, unit), is_causal=problem.is_causal),
        ),
    )


def check(kind: Kind, problem: Problem, size: int, timeout: float) -> dict[str, float]:
    """Returns this process's errors against float64: out and gradients of a short sequence, and out of sampled rows of ``problem``."""
    small = problem.reduced(max(correctness.WHOLE, size * _CHECKED))
    layout = kind.layout(small)
    whole = [*small.qkv(7), small.draw(small.num_heads, 101)]
    held = local_positions(None, small.num_positions, layout=layout, device=small.device)
    *leaves, dout = (x.detach() for x in shard_sequence(None, whole, [1] * 4, layout=layout))
    leaves = [x.requires_grad_() for x in leaves]
    out = kind.shared(small, layout, timeout)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    true = correctness.true_results(kind.pattern(small), small, whole[:3], whole[3])
    errors = {name: correctness.relative(a, b[:, held]) for name, a, b in zip(correctness.RESULTS, found, true, strict=True)}
    del whole, leaves, found, true, out
    if problem.num_positions > small.num_positions:
        layout = kind.layout(problem)
        held = local_positions(None, problem.num_positions, layout=layout)
        inputs = [x.detach() for x in problem.qkv(7)]
        mine = shard_sequence(None, inputs, [1] * 3, layout=layout)
        with torch.no_grad():
            out = kind.shared(problem, layout, timeout)(*mine)
        errors["sampled out"] = correctness.sampled_error(kind.pattern(problem), problem, inputs, out, held=held)
    return errors


@dataclass
class _Prepared:
    """Calls of one pass on this process, and the bytes exchanged by one of them."""

    calls: dict[str, Callable[[], Any]]
    figures: dict[str, int]


def measure(kind: Kind, problem: Problem, own: Problem, mode: str, together: RankSync, *, seconds: float, timeout: float) -> list[Row]:
    """Returns a row for each pass.

    Values: ``ms`` of the slowest process, with percentiles; ``tflops`` of one process; ``alone_ms`` and ``alone_tflops`` of the kernel on
    one process; ``efficiency``, the ratio of ``tflops`` to ``alone_tflops``; ``sent_bytes`` and ``received_bytes`` of the process with the
    most, and on a GPU ``peak_bytes`` beyond the inputs.

    Args:
        problem: of the whole sequence.
        own: the problem that one process computes for comparison.
    """
    case = problem.case | {"part": "processes", "mode": mode, "W": together.size}
    checked = together.everywhere(lambda: check(kind, problem, together.size, timeout))
    errors = {} if checked.value is None else {name: max(found[name] for found in checked.value) for name in checked.value[0]}
    note = checked.note or correctness.wrong(errors, correctness.BOUNDS[problem.dtype])
    release()
    if note:
        return [Row(name=kind.name, case=case, errors=errors, note=note)]
    rows = []
    for which in PASSES:
        timed, figures = _timed(kind, problem, own, which, together, seconds, timeout)
        release()
        if timed.value is None:
            rows.append(Row(name=kind.name, case=case | {"pass": which}, note=timed.note))
            continue
        shared, alone = timed.value["shared"], timed.value["alone"]
        rate = kind.flops(problem, which) / together.size / shared.ms / 1e9
        alone_rate = kind.flops(own, which) / alone.ms / 1e9
        values = shared.values() | {
            "tflops": rate,
            "alone_ms": alone.ms,
            "alone_tflops": alone_rate,
            "efficiency": rate / alone_rate,
            "tokens_per_s": 1000 * problem.batch_size * problem.num_positions / shared.ms,
        }
        rows.append(Row(name=kind.name, case=case | {"pass": which}, values=values | figures, errors=errors))
    return rows


def _timed(
    kind: Kind, problem: Problem, own: Problem, which: str, together: RankSync, seconds: float, timeout: float
) -> tuple[Attempt[dict[str, Timing]], dict[str, int]]:
    """Returns the times of both, and the largest figures of any process. Tensors are released on return."""
    made: list[_Prepared] = []

    def prepare() -> dict[str, int]:
        made.append(_prepare(kind, problem, own, which, timeout))
        return made[-1].figures

    prepared = together.everywhere(prepare)
    if prepared.value is None:
        return Attempt(None, prepared.note), {}
    figures = {name: max(found[name] for found in prepared.value) for name in prepared.value[0]}
    return together.timed(made[-1].calls, seconds=seconds), figures


def _prepare(kind: Kind, problem: Problem, own: Problem, which: str, timeout: float) -> _Prepared:
    layout = kind.layout(problem)
    held = len(local_positions(None, problem.num_positions, layout=layout))
    # two sets of inputs in turns, with only this process's rows
    shared = _calls(kind.shared(problem, layout, timeout), replace(problem, num_positions=held), which)
    alone = _calls(kind.alone(own), own, which)
    # opens communicators and compiles kernels
    shared()
    with traffic() as counted:
        shared()
    figures = {"sent_bytes": counted.sent, "received_bytes": counted.received}
    peak = peak_extra(shared, problem.device)
    if peak is not None:
        figures["peak_bytes"] = peak
    return _Prepared({"shared": shared, "alone": alone}, figures)


def _calls(attend: Attend, problem: Problem, which: str) -> Callable[[], Any]:
    """Returns a call of the forward, or both passes, on one set of inputs and then the other."""
    sets = [problem.qkv(i) for i in range(2)]
    dout = problem.draw(problem.num_heads, 1000)
    number = 0

    def call() -> None:
        nonlocal number
        number = 1 - number
        leaves = sets[number]
        if which == "forward":
            with torch.no_grad():
                attend(*leaves)
        else:
            torch.autograd.grad(attend(*leaves), leaves, dout)

    return call
