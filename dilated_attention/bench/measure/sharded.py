"""Processes that measure together, and a contender on a sequence that they share: correctness first, then time.

All learn of a failure on one of them before any continues; times are those of the slowest. A contender is held to float64 as a function of
the whole sequence, or, where no process can hold that, in sampled rows. What is wrong has no time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dilated_attention.bench.accuracy import check, forget, sampled_errors, wrong
from dilated_attention.bench.measure.contest import FLOPS, call_of
from dilated_attention.bench.measure.limits import Refused, attempt, release, synchronise
from dilated_attention.bench.measure.timing import captured, loop, peak_extra, summary
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import Contender, Costs, dense_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import OnShards, Sharded, pattern_of, ring_call
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.fork import cached_property

T = TypeVar("T")
Errors = dict[str, float]
# seconds until a missing verdict of one process ends the others; longer than kernels take to compile
_PATIENCE = 300.0
# loops that a median is of, and the largest number of calls in one
_LOOPS, _MOST_CALLS = 3, 20


class Broken(RuntimeError):
    """A process failed during an exchange, or because of a bug, so the group is unusable. Raised on all processes with the same text."""


def start_group(device: torch.device) -> None:
    """Starts the process group of torchrun's processes, unless it is there already."""
    if dist.is_initialized():
        return
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives its processes: after a restart their old addresses are still in it
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, device_id=device if on_gpu else None)


def of_first_process(value: float, device: torch.device) -> float:
    """Returns the first process's ``value`` on all of them, which must call this; their decisions then agree."""
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared.item())


class RankSync:
    """The processes that measure together, one or several. All of them make the same calls in the same order.

    Args:
        timeout: seconds that an exchange of ``group`` may take, in which contenders without a limit of their own exchange.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1, *, timeout: float = 60.0) -> None:
        self.device, self.rank, self.size = device, rank, size
        if "MASTER_ADDR" in os.environ:
            # of one process, too, if torchrun started it
            start_group(self.device)
        self.group: Any = None
        if dist.is_initialized():
            limit, patience = (datetime.timedelta(seconds=each) for each in (timeout, max(_PATIENCE, 2 * timeout)))
            # verdicts travel over CPUs: a process whose GPU hangs in an exchange can still be waited for
            self.group, self._control = dist.new_group(timeout=limit), dist.new_group(backend="gloo", timeout=patience)

    def everywhere(self, function: Callable[[], T], *, ranks: int | None = None, foreign: bool = False) -> list[T]:
        """Returns ``function()`` of every process, by rank.

        Args:
            function: its results are sent between processes, so they must be plain figures.
            ranks: only the first ``ranks`` processes call it, while the others wait; None for all.
            foreign: whether third-party code runs inside, all of whose errors are refusals.

        Raises:
            Refused: on all processes, if one refused or ran out of memory; names the first that did.
            Broken: on all processes, if there are several and one raised another error.
        """
        mine: Any = (None, "", "")
        cause: Exception | None = None
        if self.rank < (ranks or self.size):
            try:
                mine = (*attempt(self._done, function, foreign=foreign), "")
            except Exception as error:
                if self.size == 1:
                    raise
                mine, cause = (None, "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"), error
        answers: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(answers, mine, group=self._control)
        failed = [f"process {rank}: {bug or note}" for rank, (_, note, bug) in enumerate(answers) if bug or note]
        if any(bug for _, _, bug in answers):
            raise Broken("; ".join(failed)) from cause
        if failed:
            raise Refused(failed[0] if self.size > 1 else mine[1])
        return [value for value, _, _ in answers[: ranks or self.size]]

    def _done(self, function: Callable[[], T]) -> T:
        value = function()
        synchronise(self.device)
        return value

    def called(self, call: Callable[[], Any], *, seconds: float, **who: Any) -> dict[str, float]:
        """Times ``call`` as people call it: in a loop that does not synchronise, until the device is done with the last call.

        Returns figures of one call of the slowest process: ``ms``, the median of the loops, ``low_ms``, ``high_ms``, and ``host_ms``, the
        time until the loop's calls have returned. ``who``: see ``everywhere``, as for what is raised.
        """

        def first() -> float:
            # the first call may compile, and the second may still have to allocate its blocks
            return [loop(call, self.device) for _ in range(3)][-1]

        def loops() -> list[list[float]]:
            times = []
            for _ in range(_LOOPS):
                # processes start at slightly different times, and an exchange synchronizes them
                call()
                synchronise(self.device)
                if self.size > 1 and who.get("ranks") is None:
                    dist.barrier()
                    synchronise(self.device)
                begun = time.perf_counter()
                for _ in range(count):
                    call()
                issued = time.perf_counter()
                synchronise(self.device)
                times.append([1000 * (moment - begun) / count for moment in (time.perf_counter(), issued)])
            return [list(column) for column in zip(*times, strict=True)]

        longest = max(self.everywhere(first, **who))
        count = max(1, min(_MOST_CALLS, int(1000 * seconds / _LOOPS / max(longest, 1e-6))))
        found = self.everywhere(loops, **who)
        slowest = max((summary(times) for times, _ in found), key=lambda figures: figures["ms"])
        return slowest | {"host_ms": max(statistics.median(issued) for _, issued in found), "samples": _LOOPS * count}


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
