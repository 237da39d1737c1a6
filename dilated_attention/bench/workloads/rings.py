"""Modules for sequences shared by several processes, as contenders: timed on each process's part, checked as functions of the whole.

On one process they hold the whole sequence and exchange nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.bench.accuracy.correctness import Attend
from dilated_attention.bench.workloads.contenders import MODULES, MULTIHEAD, Contender, branches_and_window, dense, multihead
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.distributed import shard_sequence, unshard_sequence
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.factory import create_attention


@dataclass(frozen=True)
class OnShards:
    """``part`` attends on this process's part of a sequence; ``whole`` does so on whole tensors, which are equal on all processes."""

    part: Attend
    layout: str

    def __call__(self, *x: torch.Tensor) -> torch.Tensor:
        return self.part(*x)

    def whole(self, *x: torch.Tensor) -> torch.Tensor:
        if (size := members_of(None).size) == 1:
            return self.part(*x)

        def summed(grad: torch.Tensor) -> torch.Tensor:
            """Adds the processes' parts; each is as often too large as there are processes that pass in the gradient of the whole."""
            grad = grad.contiguous()
            dist.all_reduce(grad)
            return grad / size

        x = tuple(y.view_as(y) for y in x)
        for y in x:
            if y.requires_grad:
                y.register_hook(summed)
        shards = shard_sequence(None, x, [1] * len(x), layout=self.layout)
        return unshard_sequence(None, [self.part(*shards)], [1], layout=self.layout)[0]


def _local(layout: str, problem: Problem) -> Problem:
    members = members_of(None)
    return replace(problem, num_positions=local_length(problem.num_positions, members.rank, members.size, layout))


def _make(kind: str, layout: str, projects: bool, config: Callable[[Problem], dict[str, Any]], problem: Problem) -> Attend:
    if projects:
        return OnShards(multihead(kind, problem, layout=layout, **config(problem)), layout)
    return OnShards(functools.partial(create_attention(kind, layout=layout, **config(problem)), is_causal=problem.is_causal), layout)


def _sharded(base: Contender, kind: str, config: Callable[[Problem], dict[str, Any]], layout: str = "contiguous") -> Contender:
    """Returns the ring of a contender of one process, to which it is compared where no pattern describes it."""
    return replace(
        base,
        name="Ring" + base.name.removesuffix(" 10%"),
        what=f"{base.what}, sharded over processes",
        make=functools.partial(_make, kind, layout, base.inputs == "x", config),
        reference=base.make,
        local=functools.partial(_local, layout),
    )


def _branches(problem: Problem) -> dict[str, Any]:
    return dict(zip(("segment_lengths", "dilation_rates"), problem.branches, strict=True))


_BASES = {contender.name: contender for contender in (*MODULES, *MULTIHEAD)}
_TENTH = _BASES["BlockSparseAttention 10%"].pattern
_DENSE = replace(dense("auto", "dense attention"), name="Attention")
RINGS: tuple[Contender, ...] = (
    _sharded(_DENSE, "ring", lambda problem: {}, "zigzag"),
    _sharded(_BASES["DilatedAttention"], "ring_dilated", _branches),
    _sharded(_BASES["BlockSparseAttention 10%"], "ring_block_sparse", lambda problem: {"pattern": _TENTH(problem)}),
    _sharded(_BASES["BlockSparseDilatedAttention"], "ring_block_sparse_dilated", branches_and_window),
    _sharded(_BASES["MultiheadDilatedAttention"], "ring_multihead_dilated", _branches),
    _sharded(_BASES["MultiheadBlockSparseAttention"], "ring_multihead_block_sparse", lambda problem: {"pattern": _TENTH(problem)}),
    _sharded(_BASES["MultiheadBlockSparseDilatedAttention"], "ring_multihead_block_sparse_dilated", branches_and_window),
)
