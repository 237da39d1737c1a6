"""Attention over a sequence that several processes share, as contenders: timed on each process's part, checked as functions of the whole.

On one process they hold the whole sequence and exchange nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import dilated_attention as da
from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.workloads.contenders import Contender, dilated_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.distributed import Layout, shard_sequence, unshard_sequence
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.pattern import BlockPattern, DilatedPattern

AnyLayout = str | Layout


@dataclass(frozen=True)
class OnShards:
    """A function of this process's part of a sequence, on which ``context`` is entered once around all calls."""

    part: Attend
    layout: AnyLayout
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, *x: torch.Tensor) -> torch.Tensor:
        return self.part(*x)

    def local(self, problem: Problem) -> Problem:
        """Returns the part of the problem that this process holds."""
        members = members_of(None)
        return replace(problem, num_positions=local_length(problem.num_positions, members.rank, members.size, self.layout))

    def whole(self, group: Any, *x: torch.Tensor) -> torch.Tensor:
        """Attends on whole tensors, which are equal on all processes.

        ``group`` gathers the parts; a process that waits there for one that failed waits as long as the group's time limit.
        """
        if (size := members_of(group).size) == 1:
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

    def __init__(self, x: torch.Tensor, dim: int = 1) -> None:
        self.x, self.dim = x, dim
        self.first = members_of(None).rank * x.shape[dim]

    def detach(self) -> Sharded:
        return self

    def __getitem__(self, index: tuple[Any, ...]) -> torch.Tensor:
        local = index[self.dim] - self.first
        mine = (local >= 0) & (local < self.x.shape[self.dim])
        rows = self.x[(*index[: self.dim], torch.where(mine, local, 0), *index[self.dim + 1 :])].detach().double()
        rows = torch.where(mine.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0.0)
        if members_of(None).size > 1:
            dist.all_reduce(rows)
        return rows


def pattern_of(problem: Problem) -> DilatedPattern | BlockPattern | None:
    """Returns what the problem states: its blocks, its branches, or None for dense attention."""
    return problem.blocks or (None if problem.given_branches is None else dilated_pattern(problem))


@functools.lru_cache(maxsize=64)
def layout_of(name: str, problem: Problem) -> AnyLayout:
    """Returns the layout of that name; ``"balanced"`` is made for the problem's pattern and documents."""
    if name != "balanced":
        return name
    options: dict[str, Any] = {"is_causal": problem.is_causal, "cu_seqlens": problem.bounds, "device": problem.device}
    return da.balanced_layout(pattern_of(problem), problem.num_positions, members_of(None).size, problem.num_heads, **options)


def ring_call(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Calls this library's function of the problem's pattern on this process's part of it."""
    pattern = pattern_of(problem)
    options = problem.arguments | {"seq_len": problem.num_positions} | options
    if pattern is None:
        return da.ring_attention(q, k, v, **options)
    if isinstance(pattern, BlockPattern):
        return da.ring_block_sparse_attention(q, k, v, pattern, **options)
    return da.ring_dilated_attention(q, k, v, pattern.segment_lengths, pattern.dilation_rates, **options)


def ring(alone: Contender, name: str, layout: str, **options: Any) -> Contender:
    """This library's function over processes, of the same pattern as ``alone`` on one."""

    def make(problem: Problem) -> Attend:
        held = layout_of(layout, problem)
        return OnShards(functools.partial(ring_call, problem, layout=held, **options), held)

    return replace(alone, name=name, make=make)
