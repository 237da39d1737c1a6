"""Processes that measure together: all learn of a failure on one of them before any continues; times are those of the slowest."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.case import Case, our_call
from benchmarks.timing import Call, Refused, attempt, loop, synchronise
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

    def times(self, call: Call, *, seconds: float, alone: bool = False, foreign: bool = False) -> dict[str, float]:
        """Returns ``called``, a call of a loop that does not synchronise, and ``host``, until the loop's calls return; of the slowest."""
        who: dict[str, Any] = {"alone": alone, "foreign": foreign}
        longest = max(self.everywhere(lambda: loop(call, self.device), **who))
        count = max(1, min(_MOST_CALLS, int(1000 * seconds / _LOOPS / max(longest, 1e-3))))

        def loops() -> tuple[float, float]:
            samples = []
            for _ in range(_LOOPS):
                if self.size > 1 and not alone:
                    dist.barrier(self._control)
                synchronise(self.device)
                begun = time.perf_counter()
                for _ in range(count):
                    call()
                issued = time.perf_counter()
                synchronise(self.device)
                samples.append((1000 * (time.perf_counter() - begun) / count, 1000 * (issued - begun) / count))
            return statistics.median(x for x, _ in samples), statistics.median(x for _, x in samples)

        answers = self.everywhere(loops, **who)
        return {"called": max(called for called, _ in answers), "host": max(host for _, host in answers)}


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


class Sharded:
    """A tensor in contiguous shards of equal length, indexed by positions of the whole along ``dim``: every process gets the rows."""

    def __init__(self, x: torch.Tensor, ranks: Ranks, dim: int = 1) -> None:
        self.x, self.ranks, self.dim = x, ranks, dim

    def detach(self) -> Sharded:
        return self

    def __getitem__(self, index: tuple[Any, ...]) -> torch.Tensor:
        local = index[self.dim] - self.ranks.rank * self.x.shape[self.dim]
        is_here = (local >= 0) & (local < self.x.shape[self.dim])
        rows = self.x[(*index[: self.dim], torch.where(is_here, local, 0), *index[self.dim + 1 :])].detach().double()
        rows = torch.where(is_here.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0.0)
        if self.ranks.size > 1:
            dist.all_reduce(rows)
        return rows


def ring_call(case: Case, *qkv: torch.Tensor, **options: Any) -> Any:
    """Calls this library's function of the case's pattern on this process's part of it."""
    return our_call(case, case.pattern, *qkv, over="ring_", seq_len=case.num_positions, **options)


def ring(case: Case, ranks: Ranks, layout: str | Layout, **options: Any) -> OnShards:
    return OnShards(functools.partial(ring_call, case, layout=layout, **options), layout, ranks)
