"""Processes that measure together. All learn of a failure on one of them before any continues; times are those of the slowest."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dilated_attention.bench.measure.limits import Refused, attempt, synchronise
from dilated_attention.bench.measure.timing import one_call, summary

T = TypeVar("T")
# seconds until a missing verdict of one process ends the others; longer than kernels take to compile
_PATIENCE = 300.0
# loops that a median is of, and the largest number of calls in one
_LOOPS, _MOST_CALLS = 3, 20


class Broken(RuntimeError):
    """A process failed during an exchange, or because of a bug, so the group is unusable. Raised on all processes with the same text."""


def start(device: torch.device) -> None:
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
            start(self.device)
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
            return [one_call(call, self.device) for _ in range(3)][-1]

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
        count = max(1, min(_MOST_CALLS, int(seconds / _LOOPS / max(longest, 1e-9))))
        found = self.everywhere(loops, **who)
        slowest = max((summary(times) for times, _ in found), key=lambda figures: figures["ms"])
        return slowest | {"host_ms": max(statistics.median(issued) for _, issued in found), "samples": _LOOPS * count}
