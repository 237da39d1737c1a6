"""Modules for sequences shared by several processes, as contenders: timed on each process's part, checked as functions of the whole.

On one process they hold the whole sequence and exchange nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.workloads.contenders import (
    Contender,
    OfEmbedded,
    both,
    branches_and_window,
    dense_pattern,
    dilated_pattern,
    multihead,
    multihead_both,
    multihead_dilated,
    tenth,
)
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.distributed import shard_sequence, unshard_sequence
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.factory import create_attention


class _Shard(torch.autograd.Function):
    """Returns this process's part of a tensor that every process holds whole. The gradient is again whole on every process."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: str) -> torch.Tensor:
        ctx.layout = layout
        return shard_sequence(None, [x], [1], layout=layout)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return unshard_sequence(None, [grads[0].contiguous()], [1], layout=ctx.layout)[0], None


class _Unshard(torch.autograd.Function):
    """The inverse of ``_Shard``. Its gradient is the inverse, too, since all processes pass in the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: str) -> torch.Tensor:
        ctx.layout = layout
        return unshard_sequence(None, [x], [1], layout=layout)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return shard_sequence(None, [grads[0]], [1], layout=ctx.layout)[0], None


@dataclass(frozen=True)
class OnShards:
    """``part`` attends on this process's part of a sequence; ``whole`` does so on whole tensors, which are equal on all processes."""

    part: Attend
    layout: str

    def __call__(self, *x: torch.Tensor) -> torch.Tensor:
        return self.part(*x)

    def whole(self, *x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Unshard.apply(self.part(*(_Shard.apply(y, self.layout) for y in x)), self.layout)
        return out


def _local(layout: str, problem: Problem) -> Problem:
    members = members_of(None)
    return replace(problem, num_positions=local_length(problem.num_positions, members.rank, members.size, layout))


def _ring(kind: str, layout: str, config: Callable[[Problem], dict[str, Any]], problem: Problem) -> Attend:
    module = create_attention(kind, layout=layout, **config(problem))
    return OnShards(functools.partial(module, is_causal=problem.is_causal), layout)


def _ring_multihead(kind: str, layout: str, config: Callable[[Problem], dict[str, Any]], problem: Problem) -> Attend:
    embedded = multihead(kind, problem, layout=layout, **config(problem))
    assert isinstance(embedded, OfEmbedded)
    return OnShards(embedded, layout)


def _branches(problem: Problem) -> dict[str, Any]:
    lengths, rates = problem.branches
    return {"segment_lengths": lengths, "dilation_rates": rates}


def _blocks(problem: Problem) -> dict[str, Any]:
    return {"pattern": tenth(problem)}


def _contender(name: str, what: str, kind: str, layout: str, config: Callable[[Problem], dict[str, Any]], **settings: Any) -> Contender:
    make = _ring_multihead if settings.get("inputs") == "x" else _ring
    return Contender(
        name=name,
        what=what,
        make=functools.partial(make, kind, layout, config),
        local=functools.partial(_local, layout),
        **settings,
    )


RINGS: tuple[Contender, ...] = (
    _contender("RingAttention", "dense, sharded over processes", "ring", "zigzag", lambda problem: {}, pattern=dense_pattern),
    _contender(
        "RingDilatedAttention",
        "LongNet's branches, sharded over processes",
        "ring_dilated",
        "contiguous",
        _branches,
        pattern=dilated_pattern,
    ),
    _contender("RingBlockSparseAttention", "a tenth of the blocks, sharded", "ring_block_sparse", "contiguous", _blocks, pattern=tenth),
    _contender(
        "RingBlockSparseDilatedAttention",
        "branches and window in one softmax, sharded",
        "ring_block_sparse_dilated",
        "contiguous",
        branches_and_window,
        pattern=lambda problem: None,
        reference=both,
    ),
    _contender(
        "RingMultiheadDilatedAttention",
        "with projections and norm, sharded",
        "ring_multihead_dilated",
        "contiguous",
        _branches,
        pattern=dilated_pattern,
        inputs="x",
        reference=multihead_dilated,
    ),
    _contender(
        "RingMultiheadBlockSparseAttention",
        "a tenth of the blocks, with projections and norm, sharded",
        "ring_multihead_block_sparse",
        "contiguous",
        _blocks,
        pattern=tenth,
        inputs="x",
        reference=lambda problem: multihead("multihead_block_sparse", problem, pattern=tenth(problem)),
    ),
    _contender(
        "RingMultiheadBlockSparseDilatedAttention",
        "branches and window in one softmax, with projections and norm, sharded",
        "ring_multihead_block_sparse_dilated",
        "contiguous",
        branches_and_window,
        pattern=lambda problem: None,
        inputs="x",
        reference=multihead_both,
    ),
)
