"""Attention over a sequence that several processes share: cases, and this library's functions as contenders.

They are timed on each process's part, and checked as functions of the whole. One process holds the whole sequence and exchanges nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import dilated_attention as da
from dilated_attention.bench.workloads.cases import FAMILIES
from dilated_attention.bench.workloads.contenders import Attend, Contender, dense_pattern, dilated_pattern
from dilated_attention.bench.workloads.problem import Branches, Problem, our_call
from dilated_attention.distributed import Layout, shard_sequence, unshard_sequence
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.pattern import BlockPattern, DilatedPattern, LocalWindow, RandomBlocks, with_sparsity

AnyLayout = str | Layout
# the shortest segment of dilated cases, and what lengths are divided by on a CPU
UNIT, SHRINK = 2048, 128


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


@functools.lru_cache(maxsize=64)
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


def ring_call(problem: Problem, *qkv: torch.Tensor, **options: Any) -> Any:
    """Calls this library's function of the problem's pattern on this process's part of it."""
    return our_call(problem, pattern_of(problem) or dense_pattern(problem), *qkv, over="ring_", seq_len=problem.num_positions, **options)


def ring(alone: Contender, name: str, layout: str, **options: Any) -> Contender:
    """This library's function over processes, of the same pattern as ``alone`` on one."""

    def make(problem: Problem) -> Attend:
        held = layout_of(layout, problem)
        return OnShards(functools.partial(ring_call, problem, layout=held, **options), held)

    return replace(alone, name=name, make=make)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of attention, and the lengths that it is measured at.

    Args:
        heads: query heads, key/value heads, head dim.
        tokens, totals: lengths of one process's part (``dense-16384``), and of whole sequences (``dense-of-65536``).
        pattern: (N, unit) → branches with ``unit`` as shortest segment, or the pattern of blocks; None for dense attention.
        packed: whether the sequence is one of packed documents, most short and a few long.
        fits: whether one process can compute the whole sequence, for comparison.
    """

    name: str
    heads: tuple[int, int, int]
    tokens: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()
    pattern: Callable[[int, int], Branches | BlockPattern | None] = lambda N, unit: None
    causal: bool = False
    layouts: tuple[str, ...] = ("contiguous",)
    passes: tuple[str, ...] = ("forward", "both")
    packed: bool = False
    fits: bool = True

    def problem(self, N: int, *, unit: int = UNIT, heads: Iterable[int] | None = None, **place: Any) -> Problem:
        """Returns the case at one length; ``place``: mask, dtype and device of the problem."""
        H, Hk, D = heads or self.heads
        place = {"num_positions": N, "num_heads": H, "num_kv_heads": Hk, "head_dim": D, "is_causal": self.causal} | place
        pattern = self.pattern(N, unit)
        place["blocks" if isinstance(pattern, BlockPattern) else "given_branches"] = pattern
        return Problem(bounds=_documents(N, unit) if self.packed else None, **place)


def _documents(N: int, unit: int) -> tuple[int, ...]:
    """Returns where documents begin, and N; their lengths are log-normal, none above a quarter of the whole."""
    generator, bounds = torch.Generator().manual_seed(0), [0]
    while bounds[-1] < N:
        length = int(torch.empty(()).log_normal_(mean=6.5 if unit >= UNIT else 3.0, std=1.4, generator=generator))
        bounds.append(min(N, bounds[-1] + max(1, min(length, N // 4))))
    return tuple(bounds)


def _branches(growth: int, rates: tuple[int, ...], N: int, unit: int) -> Branches:
    """Returns branches w = unit · growth^i as far as they are no longer than the sequence."""
    lengths = tuple(unit * growth**i for i in range(len(rates)) if i == 0 or unit * growth**i <= N)
    return lengths, rates[: len(lengths)]


def _to_the_whole(N: int, unit: int) -> Branches:
    """Returns branches of ``unit`` keys each, the last one as long as the sequence."""
    lengths = (*(unit * 4**i for i in range(30) if unit * 4**i < N), N)
    return lengths, tuple(-(-length // unit) for length in lengths)


def _gigapath(N: int, unit: int) -> Branches:
    lengths, rates = FAMILIES["gigapath"].branches
    return tuple(max(rate, length * unit // UNIT) for length, rate in zip(lengths, rates, strict=True)), rates


def _blocks(make: Callable[..., BlockPattern], N: int, unit: int) -> BlockPattern:
    """Returns a pattern that keeps a tenth of the blocks, of short sequences two in each row."""
    block = 128 if N >= 2**14 else 64
    return make(max(0.1, min(1.0, 2 * block / N)), block_size=block).at(N)


_longnet = functools.partial(_branches, 4, tuple(4**i for i in range(6)))
_dense = functools.partial(Case, causal=True, layouts=("zigzag",))
_tenth = functools.partial(Case, heads=(16, 16, 64), tokens=(32768,), layouts=("contiguous", "balanced"))
_long = functools.partial(Case, heads=(1, 1, 64), pattern=_to_the_whole, fits=False)
CASES = (
    _dense(name="dense", heads=(32, 8, 128), tokens=(16384, 4096), totals=(65536,)),
    _dense(name="dense64", heads=(64, 8, 128), tokens=(32768,)),
    Case(name="longnet", heads=(12, 12, 64), tokens=(131072, 32768), totals=(524288,), pattern=_longnet, causal=True),
    Case(name="geometric", heads=(16, 16, 64), tokens=(131072, 32768), pattern=_longnet),
    Case(name="12x64", heads=(12, 12, 64), tokens=(131072,), pattern=functools.partial(_branches, 2, (1, 2, 4, 6, 12))),
    Case(name="16x128", heads=(16, 16, 128), tokens=(131072,), pattern=functools.partial(_branches, 2, (1, 2, 4, 8, 16))),
    Case(name="gigapath", heads=(16, 16, 48), tokens=(25000, 100000), pattern=_gigapath),
    _tenth(name="random", pattern=functools.partial(_blocks, RandomBlocks)),
    _tenth(name="window", pattern=functools.partial(_blocks, functools.partial(with_sparsity, kind="local"))),
    _tenth(name="bigbird", pattern=functools.partial(_blocks, functools.partial(with_sparsity, kind="big_bird"))),
    _tenth(name="local", pattern=lambda N, unit: LocalWindow(max(16, unit // 2), block_size=64), totals=(524288,)),
    Case(name="packed", heads=(64, 8, 128), tokens=(32768,), causal=True, layouts=("balanced", "zigzag", "contiguous"), packed=True),
    Case(name="slide", heads=(16, 16, 48), totals=(100_000,), pattern=_gigapath, passes=("both",)),
    _long(name="extreme", totals=(2**30,), passes=("forward",)),
    _long(name="extreme-training", totals=(2**28,)),
)
