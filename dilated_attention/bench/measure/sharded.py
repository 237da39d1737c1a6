"""Measures a contender on a sequence that processes share: correctness first, then time.

It is held to float64 as a function of the whole sequence, or, where no process can hold that, in sampled rows. What is wrong has no time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.correctness import check, forget, sampled_errors, wrong
from dilated_attention.bench.measure.contest import FLOPS, call_of
from dilated_attention.bench.measure.limits import Refused, release
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.measure.timing import captured, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import Contender, Costs, dense_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import OnShards, Sharded, pattern_of, ring_call
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.fork import cached_property

Errors = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender on one problem.

    Args:
        at: N → the problem of that length.
        case: what its rows have in common; its ``kind`` is ``"ring"``; ``"one process"`` on the whole sequence while the others wait;
            ``"kernel"``, alone on as many tokens as a process has, on all processes at once; or ``"foreign"``, other people's code.
        fits: whether one process can hold the whole sequence.
    """

    contender: Contender
    at: Callable[[int], Problem]
    num_positions: int
    case: dict[str, Any]
    passes: tuple[str, ...]
    fits: bool = True

    @property
    def who(self) -> dict[str, Any]:
        return {"ranks": 1 if self.case["kind"] == "one process" else None, "foreign": self.contender.is_external}

    @cached_property
    def problem(self) -> Problem:
        return self.at(self.num_positions)

    @cached_property
    def made(self) -> Any:
        return self.contender.make(self.problem)

    def errors(self, group: Any, most: int) -> Errors:
        """Returns the errors of this process's results, on at most this many positions unless no process can hold the whole."""
        trains = "both" in self.passes
        if isinstance(self.made, Costs):
            return {}
        if self.case["kind"] == "ring" and not self.fits:
            return row_errors(self.problem, trains)
        problem = self.at(min(self.num_positions, most))
        attend = self.contender.make(problem)
        attend = functools.partial(attend.whole, group) if isinstance(attend, OnShards) else attend
        try:
            return check(self.contender, problem, attend, gradients=trains)
        finally:
            forget()

    def call(self, which: str) -> tuple[Callable[[], Any], dict[str, float]]:
        """Returns a call on this process's part, and figures that need no measurement."""
        problem, attend = self.problem, self.made
        call = call_of(self.contender, attend, problem, which, {})
        if isinstance(attend, Costs):
            return call, {}
        pairs = self.contender.pairs(problem) or 0
        figures: dict[str, float] = {"pairs": pairs, "flops": FLOPS[which] * pairs * problem.head_dim}
        if isinstance(attend, OnShards):
            size = members_of(None).size
            figures["flops"] /= size
            if problem.bounds is not None:
                runs = [spans(problem.num_positions, rank, size, attend.layout) for rank in range(size)]
                held = [sum(problem.pairs(dense_pattern(problem), (start, stop)) for start, stop, _ in mine) for mine in runs]
                figures["imbalance"] = max(held) * size / sum(held)
            elif isinstance(attend.layout, Layout):
                figures["imbalance"] = attend.layout.imbalance
        return call, figures


def row_errors(problem: Problem, trains: bool) -> Errors:
    """Returns the errors in sampled rows of this library's function over processes; other rows and keys stay where they are."""
    members, N, pattern = members_of(None), problem.num_positions, pattern_of(problem) or dense_pattern(problem)
    if N % members.size:
        raise Refused(f"{N} positions on {members.size} processes; sampled rows need equal shards")
    local = replace(problem, num_positions=N // members.size)
    leaves, dout = [x.requires_grad_(trains) for x in local.qkv(members.rank)], local.dout(101 + members.rank)
    out, lse = ring_call(problem, *leaves, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout) if trains else ()
    results = [Sharded(out), Sharded(lse, 2), *map(Sharded, grads)]
    return sampled_errors(pattern, problem, [Sharded(x) for x in (*leaves, dout)], results, count=16)


def measure(entry: Entry, together: RankSync, *, seconds: float, check_tokens: int, graphs: bool) -> list[Row]:
    """Returns a row for each pass of a contender, or one with a note where it fails or is wrong.

    Values: those of ``RankSync.called``, ``graph_ms``, ``tflops`` of one process, ``tokens_per_s``, and of the process with the most
    ``sent_bytes``, ``received_bytes`` and, on a GPU, ``peak_bytes`` beyond the inputs.
    """
    rows: list[Row] = []
    errors: Errors = {}
    name, case = entry.contender.name, entry.case
    with contextlib.ExitStack() as stack:
        try:
            together.everywhere(lambda: bool(stack.enter_context(getattr(entry.made, "context", contextlib.nullcontext)())), **entry.who)
            found = together.everywhere(lambda: entry.errors(together.group, check_tokens), **entry.who)
            # NaN is the largest
            errors = {key: max((one[key] for one in found), key=lambda error: (error != error, error)) for key in found[0]}
            if note := wrong(errors, entry.contender.allowed(entry.problem)):
                raise Refused(note)
            for which in entry.passes:
                case = entry.case | {"pass": which}
                release()
                rows.append(Row(name=name, case=case, values=_timed(entry, together, which, seconds, graphs), errors=errors))
        except Refused as refused:
            rows.append(Row(name=name, case=case, errors=errors, note=str(refused)))
    release()
    return rows


def _timed(entry: Entry, together: RankSync, which: str, seconds: float, graphs: bool) -> dict[str, float]:
    calls: list[Callable[[], Any]] = []

    def prepare() -> dict[str, float]:
        call, figures = entry.call(which)
        calls.append(call)
        # opens communicators and compiles kernels
        call()
        with traffic() as counted:
            call()
        figures |= {"sent_bytes": counted.sent, "received_bytes": counted.received}
        peak = peak_extra(call, together.device)
        return figures | ({} if peak is None else {"peak_bytes": peak})

    prepared = together.everywhere(prepare, **entry.who)
    values = {name: max(found[name] for found in prepared) for name in prepared[0]}
    values |= together.called(lambda: calls[-1](), seconds=seconds, **entry.who)
    if graphs and together.device.type == "cuda" and not entry.contender.is_external:
        # a call that cannot be captured has the figures of plain calls alone
        with contextlib.suppress(Refused):
            together.everywhere(lambda: calls.append(_captured(calls[0])), **entry.who)
            values["graph_ms"] = together.called(lambda: calls[-1](), seconds=seconds, **entry.who)["ms"]
    flops, problem = values.pop("flops", 0.0), entry.problem
    values["tokens_per_s"] = 1000 * problem.batch_size * problem.num_positions / values["ms"]
    return values | ({"tflops": flops / values["ms"] / 1e9} if flops else {})


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call as one CUDA graph: what the GPU does, without the time of Python."""
    try:
        return captured(call)
    except RuntimeError as error:
        raise Refused(f"cannot be captured: {error}") from error
