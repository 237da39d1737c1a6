"""Processes that measure together: all learn of a failure on one of them before any continues; times are those of the slowest."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.case import Case, our_call
from benchmarks.timing import Call, Refused, attempt, host_time, loop, synchronise
from dilated_attention.distributed import Layout, shard_sequence, unshard_sequence
from dilated_attention.distributed.sharding.layout import local_length

T = TypeVar("T")
# seconds until a missing verdict of one process ends the others; longer than kernels take to compile
_PATIENCE = 300.0
_LOOPS, _MOST_CALLS = 3, 20


class Ranks:
    """The processes that measure together, one or several. All of them make the same calls in the same order.

    Args:
        timeout: seconds that an exchange of ``group`` may take, in which contenders without a limit of their own exchange.
    """

    def __init__(self, device: torch.device, timeout: float = 60.0) -> None:
        self.device, self.group, self._control = device, None, None
        if "MASTER_ADDR" in os.environ and not dist.is_initialized():
            on_gpu = device.type == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if dist.is_initialized():
            limit, patience = (datetime.timedelta(seconds=each) for each in (timeout, max(_PATIENCE, 2 * timeout)))
            # verdicts travel over CPUs: a process whose GPU hangs in an exchange can still be waited for
            self.group, self._control = dist.new_group(timeout=limit), dist.new_group(backend="gloo", timeout=patience)

    def everywhere(self, function: Callable[[], T], *, alone: bool = False, foreign: bool = False) -> list[T]:
        """Returns ``function()`` of every process, by rank.

        Args:
            function: its results are sent between processes, so they must be plain figures.
            alone: only the first process calls it, while the others wait.
            foreign: whether third-party code runs inside, all of whose errors are refusals.

        Raises:
            Refused: on all processes, if one refused or ran out of memory; names the first that did.
            RuntimeError: on all processes, if there are several and one raised another error.
        """
        mine: tuple[Any, str, str] = (None, "", "")
        if self.rank == 0 or not alone:
            try:
                mine = (*attempt(function, foreign=foreign), "")
                synchronise(self.device)
            except Exception as error:
                if self.size == 1:
                    raise
                mine = (None, "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        answers = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(answers, mine, group=self._control)
        for rank, (_, note, bug) in enumerate(answers):
            if bug:
                raise RuntimeError(f"process {rank}: {bug}")
            if note:
                raise Refused(f"process {rank}: {note}" if self.size > 1 else note)
        return [result for result, _, _ in (answers[:1] if alone else answers)]

    def slowest(self, measure: Callable[[], float], **who: bool) -> float:
        return max(self.everywhere(measure, **who))

    def times(self, call: Call, *, seconds: float, **who: bool) -> dict[str, float]:
        """Returns ``called``, a call of a loop that does not synchronise, and ``host``, until a call returns; of the slowest process."""
        once = self.slowest(lambda: loop(call, self.device), **who)
        count = max(1, min(_MOST_CALLS, int(1000 * seconds / _LOOPS / max(once, 1e-3))))
        loops = [self.slowest(lambda: loop(call, self.device, count), **who) for _ in range(_LOOPS)]
        return {"called": statistics.median(loops), "host": self.slowest(lambda: host_time(call, self.device, count), **who)}


@dataclass(frozen=True)
class OnShards:
    """A function of this process's part of a sequence, on which ``context`` is entered once around all calls."""

    part: Callable[..., torch.Tensor]
    layout: str | Layout
    ranks: Ranks
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, *x: torch.Tensor) -> torch.Tensor:
        return self.part(*x)

    def local(self, case: Case) -> Case:
        """Returns the part of the case that this process holds."""
        return replace(case, num_positions=local_length(case.num_positions, self.ranks.rank, self.ranks.size, self.layout))

    def whole(self, *x: torch.Tensor) -> torch.Tensor:
        """Attends on whole tensors, which are equal on all processes."""
        group, size = self.ranks.group, self.ranks.size
        if size == 1:
            return self.part(*x)

        def summed(grad: torch.Tensor) -> torch.Tensor:
            """Adds the processes' parts; each is as often too large as there are processes that pass in the gradient of the whole."""
            grad = grad.contiguous()
            dist.all_reduce(grad, group=group)
            return grad / size

        x = tuple(y.view_as(y) for y in x)
        for y in x:
            if y.requires_grad:
                y.register_hook(summed)
        shards = shard_sequence(group, x, [1] * len(x), layout=self.layout)
        return unshard_sequence(group, [self.part(*shards)], [1], layout=self.layout)[0]


def ring(case: Case, ranks: Ranks, layout: str | Layout = "contiguous", **options: Any) -> OnShards:
    """This library's function of the case's pattern on this process's part of it."""
    part = functools.partial(our_call, case, case.pattern, over="ring_", seq_len=case.num_positions, layout=layout, **options)
    return OnShards(part, layout, ranks)
