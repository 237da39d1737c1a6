"""Cases of attention over a sequence that processes share: what is computed, at which lengths, and how the sequence is cut."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

import dilated_attention as da
from dilated_attention.bench.accuracy.correctness import Attend, Pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.distributed import Layout
from dilated_attention.fork import cached_property
from dilated_attention.pattern import BlockPattern, DilatedPattern, LocalWindow, RandomBlocks, with_sparsity
from dilated_attention.pattern.blocks.kept_blocks import count_pairs

# FLOPs per pair and head dimension
FLOPS = {"forward": 4, "both": 14}
# the shortest segment of dilated cases, and what lengths are divided by on a CPU
UNIT, SHRINK = 2048, 128
# cases whose growth one process measures, at other lengths and batches
LENGTHS = tuple(2**i for i in range(11, 18, 2))
BATCHES = (4096, (1, 4, 16))
_GIGAPATH = ((1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of attention, and the lengths that it is measured at.

    Args:
        heads: query heads, key/value heads, head dim.
        tokens, totals: lengths of one process's part (``dense-16384``), and of whole sequences (``dense-of-65536``).
        pattern: (N, unit) → the pattern, dilated ones with ``unit`` as shortest segment; None for dense attention.
        packed: whether the sequence is one of packed documents, most short and a few long.
        fits: whether one process can compute the whole sequence, for comparison.
        grows: whether one process measures it at ``LENGTHS`` and ``BATCHES``, too.
    """

    name: str
    heads: tuple[int, int, int]
    tokens: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()
    pattern: Callable[[int, int], Pattern | None] = lambda N, unit: None
    causal: bool = False
    layouts: tuple[str, ...] = ("contiguous",)
    passes: tuple[str, ...] = tuple(FLOPS)
    packed: bool = False
    fits: bool = True
    grows: bool = False


def _pattern(branches: Iterable[tuple[int, int]]) -> DilatedPattern:
    lengths, rates = zip(*branches, strict=True)
    return DilatedPattern(lengths, rates)


def _branches(growth: int, rates: tuple[int, ...], N: int, unit: int) -> DilatedPattern:
    """Returns branches w = unit · growth^i as far as they are no longer than the sequence."""
    return _pattern((unit * growth**i, rate) for i, rate in enumerate(rates) if i == 0 or unit * growth**i <= N)


def _to_the_whole(N: int, unit: int) -> DilatedPattern:
    """Returns branches of ``unit`` keys each, the last one as long as the sequence."""
    return _pattern((length, -(-length // unit)) for length in [*(unit * 4**i for i in range(30) if unit * 4**i < N), N])


def _gigapath(N: int, unit: int) -> DilatedPattern:
    return _pattern((max(rate, length * unit // UNIT), rate) for length, rate in _GIGAPATH)


def _blocks(make: Callable[..., BlockPattern], N: int, unit: int) -> BlockPattern:
    """Returns a pattern that keeps a tenth of the blocks, of short sequences two in each row."""
    block = 128 if N >= 2**14 else 64
    return make(max(0.1, min(1.0, 2 * block / N)), block_size=block).at(N)


longnet = functools.partial(_branches, 4, tuple(4**i for i in range(6)))
_dense = functools.partial(Case, causal=True, layouts=("zigzag",))
_tenth = functools.partial(Case, heads=(16, 16, 64), tokens=(32768,), layouts=("contiguous", "balanced"))
_long = functools.partial(Case, heads=(1, 1, 64), pattern=_to_the_whole, fits=False)
CASES = (
    _dense(name="dense", heads=(32, 8, 128), tokens=(16384, 4096), totals=(65536,), grows=True),
    _dense(name="dense64", heads=(64, 8, 128), tokens=(32768,)),
    Case(name="longnet", heads=(12, 12, 64), tokens=(131072, 32768), totals=(524288,), pattern=longnet, causal=True, grows=True),
    Case(name="geometric", heads=(16, 16, 64), tokens=(131072, 32768), pattern=longnet),
    Case(name="12x64", heads=(12, 12, 64), tokens=(131072,), pattern=functools.partial(_branches, 2, (1, 2, 4, 6, 12))),
    Case(name="16x128", heads=(16, 16, 128), tokens=(131072,), pattern=functools.partial(_branches, 2, (1, 2, 4, 8, 16))),
    Case(name="gigapath", heads=(16, 16, 48), tokens=(25000, 100000), pattern=_gigapath),
    _tenth(name="random", pattern=functools.partial(_blocks, RandomBlocks)),
    _tenth(name="shared-random", pattern=functools.partial(_blocks, functools.partial(RandomBlocks, per_head=False))),
    _tenth(name="window", pattern=functools.partial(_blocks, functools.partial(with_sparsity, kind="local"))),
    _tenth(name="bigbird", pattern=functools.partial(_blocks, functools.partial(with_sparsity, kind="big_bird"))),
    _tenth(name="local", pattern=lambda N, unit: LocalWindow(max(16, unit // 2), block_size=64), totals=(524288,), grows=True),
    Case(name="packed", heads=(64, 8, 128), tokens=(32768,), causal=True, layouts=("balanced", "zigzag", "contiguous"), packed=True),
    Case(name="slide", heads=(16, 16, 48), totals=(100_000,), pattern=_gigapath, passes=("both",)),
    _long(name="extreme", totals=(2**30,), passes=("forward",)),
    _long(name="extreme-training", totals=(2**28,)),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A case at one length, on ``size`` processes."""

    case: Case
    problem: Problem
    size: int
    unit: int = UNIT

    def of_length(self, N: int, *, scaled: bool = False) -> Setting:
        """Returns the same at another length; ``scaled``: with segments that are shorter or longer in proportion."""
        # with fewer keys in the shortest, rows of the longer ones would have one key each, and no gradient
        unit = max(min(self.unit, 16), self.unit * N // self.problem.num_positions) if scaled else self.unit
        return replace(self, problem=replace(self.problem, num_positions=N), unit=unit)

    @cached_property
    def pattern(self) -> Pattern | None:
        return self.case.pattern(self.problem.num_positions, self.unit)

    @cached_property
    def bounds(self) -> list[int]:
        """Returns where documents begin, and N; their lengths are log-normal, none above a quarter of the whole."""
        N, generator, bounds = self.problem.num_positions, torch.Generator().manual_seed(0), [0]
        while self.case.packed and bounds[-1] < N:
            length = int(torch.empty(()).log_normal_(mean=6.5 if self.unit >= UNIT else 3.0, std=1.4, generator=generator))
            bounds.append(min(N, bounds[-1] + max(1, min(length, N // 4))))
        return bounds if self.case.packed else [0, N]

    def pairs(self, first: int = 0, last: int | None = None) -> int:
        """Counts the pairs of all sequences and heads; of documents and dense attention also those of the queries [first, last)."""
        problem, pattern, total = self.problem, self.pattern, 0
        N, heads, causal = problem.num_positions, problem.num_heads, problem.is_causal
        if isinstance(pattern, BlockPattern):
            return problem.batch_size * count_pairs(pattern, N, heads, is_causal=causal, device=problem.device)
        if pattern is not None:
            return problem.batch_size * pattern.pairs(N, heads, is_causal=causal)
        for start, end in itertools.pairwise(self.bounds):
            a, b = max(first, start) - start, min(N if last is None else last, end) - start
            total += 0 if a >= b else (b * (b + 1) - a * (a + 1)) // 2 if causal else (b - a) * (end - start)
        return problem.batch_size * total * heads

    def layout(self, name: str) -> str | Layout:
        """Returns the layout of that name; ``"balanced"`` is made for the pattern and the documents."""
        problem, pattern = self.problem, self.pattern
        if name != "balanced":
            return name
        options: dict[str, Any] = {"is_causal": problem.is_causal, "cu_seqlens": self.bounds if self.case.packed else None}
        return da.balanced_layout(pattern, problem.num_positions, self.size, problem.num_heads, device=problem.device, **options)

    def attend(self, *, shared: bool, **options: Any) -> Attend:
        """Returns a function of this process's q, k, v (``shared``), or of the whole sequence's."""
        pattern, kind = self.pattern, ""
        arguments: tuple[Any, ...] = ()
        if isinstance(pattern, DilatedPattern):
            arguments, kind = (pattern.segment_lengths, pattern.dilation_rates), "dilated_"
        elif pattern is not None:
            arguments, kind = (pattern,), "block_sparse_"
        function = getattr(da, f"{'ring_' if shared else ''}{kind}attention")
        options |= {"is_causal": self.problem.is_causal} | ({"seq_len": self.problem.num_positions} if shared else {})
        if self.case.packed:
            options["cu_seqlens"] = torch.tensor(self.bounds, dtype=torch.int32, device=self.problem.device)
        return lambda q, k, v: function(q, k, v, *arguments, **options)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a contender computes a setting.

    Args:
        attend: q, k, v (B, n, H, D) of this process → out.
        layout: which positions a process holds; None for all.
        context: entered once around all calls.
    """

    attend: Attend
    layout: str | Layout | None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
