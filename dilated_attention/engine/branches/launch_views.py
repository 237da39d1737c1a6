"""The launches of a problem: views of the rows that a kernel reads and writes, cut to the kernel's limits.

Their geometry is cached, since with short launches a GPU waits for the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import AttentionRequest, Backend, Mask, Options
from dilated_attention.backends.dropout import Dropout
from dilated_attention.engine.branches.branch_buffers import BranchBuffers, of_problem
from dilated_attention.engine.branches.plan import Plan, Problem
from dilated_attention.engine.branches.views import key_rows, launches, query_rows

# limit on one launch's results, which briefly exist twice (the kernel's own and merged); longer branches run in chunks of segments
PART_BYTES = {"cpu": 32 * 2**20, "cuda": 64 * 2**20}
# plans of more problems, such as those of many documents, are not kept whole
_MOST_PROBLEMS = 64
Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
# where a pass writes out, or dq, dk and dv: views of any strides whose last one is 1. Where there is None, it makes a tensor
Into = tuple[Tensor | None, ...]


class Limits(NamedTuple):
    """Most problems and elements of a launch, and most bytes of what it returns or accumulates in float32."""

    max_batch: int | None
    max_extent: int | None
    part_bytes: int | None


def results_like(tensors: tuple[Tensor, ...], into: Into | None) -> tuple[Tensor, ...]:
    """Returns where results of these tensors' shapes and dtypes go: their places, or new tensors."""
    places = (None,) * len(tensors) if into is None else into
    return tuple(
        [torch.empty(x.shape, dtype=x.dtype, device=x.device) if to is None else to for x, to in zip(tensors, places, strict=True)]
    )


def copied_into(results: tuple[Tensor, ...], into: Into) -> tuple[Tensor, ...]:
    """Returns results, those with a place in ``into`` copied there. Calls that ask for no place do without it."""
    return tuple([x if place is None else place.copy_(x) for x, place in zip(results, into, strict=True)])


@dataclass(frozen=True)
class Call:
    """What a run needs in addition to the plan and the tensors.

    Args:
        backend: runs every problem.
        options: scale and determinism; causality and masks are set for each problem.
        query_offset: position of the first query row.
        padding: (B, Nk) bool, True = the key is ignored.
        dropout_p, seed: probability and seed of position-based dropout.
        detached: whether to use TorchScale's gradient, which does not flow through the mixing weights of the branches.
        is_causal: causality of the whole call; that of a problem is in its ``options``.
        request: what the backend was chosen for; ``named``: the caller named the backend.
        needs_grad: a backward will follow, or this is one.
        position_offset, first_head: what to add to positions and heads to get those of the whole sequence and model, which decide dropout.
        host_ms: host time in ms that what surrounds the pass takes, for the choice of how it runs.
    """

    backend: Backend
    options: Options
    query_offset: int = 0
    padding: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    detached: bool = False
    is_causal: bool = False
    request: AttentionRequest | None = None
    named: bool = False
    needs_grad: bool = False
    strategy: str = "auto"
    position_offset: int = 0
    first_head: int = 0
    host_ms: float = 0.0

    def positions(self, q: Tensor, k: Tensor) -> torch.Size:
        """Returns (B, N): the positions that masks are indexed by, up to the last query or key."""
        return torch.Size((k.shape[0], max(self.query_offset + q.shape[1], k.shape[1])))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows of a call's tensors a problem's launch takes.

    Args:
        rows: a letter for each tensor: "q" rows of queries · "k" rows of keys · "Q" and "K" results that go to the branch's buffer, if it
            has one · "p" rows of the branch's own output. After these tensors come the flat buffers of results with a capital letter, the
            own outputs of the branches, if there is a "p", and what ``masks_of`` returns.
        query_offset: position of the first query row.
        padding, dropout: whether there are such masks.
        buffers, first: the branches' buffers, and which of them is that of the plan's first branch.
    """

    rows: str
    query_offset: int = 0
    padding: bool = False
    dropout: bool = False
    buffers: BranchBuffers | None = None
    first: int = 0

    def views(self, problem: Problem, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Returns views (B, S, L, G, …), each with the index of the tensor that it is of."""
        found: list[tuple[int, Tensor]] = []
        buffer = len(self.rows)
        own = buffer + sum(map(str.isupper, self.rows))
        for index, letter in enumerate(self.rows):
            x, part = tensors[index], None
            if letter == "p":
                index = own + problem.branch
                part = tensors[index]
            elif letter.isupper():
                assert self.buffers is not None
                parts = self.buffers.split(tensors[buffer], len(x), head_dim=x.shape[3] if x.dim() == 4 else 0, with_direct=x.dim() == 3)
                part = parts[self.first + problem.branch]
                index, buffer = index if part is None else buffer, buffer + 1
            if part is not None:
                found.append((index, of_problem(problem, part)))
            else:
                is_key = letter in "kK"
                found.append((index, key_rows(problem, 0, x) if is_key else query_rows(problem, self.query_offset, x)))
        return found + mask_views(problem, tensors, self.padding, self.dropout)


class Launch(NamedTuple):
    """A launch without its tensors: the problem, views as (index of the tensor, size, stride, offset), and the options but for masks."""

    problem: Problem
    views: tuple[tuple[int, torch.Size, tuple[int, ...], int], ...]
    options: Options

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the views (P, L, G, …)."""
        return [tensors[i].as_strided(size, stride, tensors[i].storage_offset() + at) for i, size, stride, at in self.views]


def launches_of(
    plan: Plan, layout: Layout, tensors: Sequence[Tensor], call: Call, *, whole: bool = False
) -> tuple[tuple[Launch, ...], ...]:
    """Returns the launches of each problem of a plan.

    Args:
        tensors: the first one has the head dim. What ``masks_of`` returns comes last.
        whole: a launch allocates nothing in addition to its results, so only the kernel limits its length.
    """
    capabilities = call.backend.capabilities
    part_bytes = None if whole else PART_BYTES.get(tensors[0].device.type, PART_BYTES["cuda"])
    shapes = tuple((x.shape, x.stride()) for x in tensors)
    how = layout, shapes, Limits(capabilities.max_batch, capabilities.max_extent, part_bytes), call.options
    return _of_plan(plan, *how) if len(plan.problems) <= _MOST_PROBLEMS else tuple(_of_problem(p, *how) for p in plan.problems)


@functools.lru_cache(maxsize=256)
def _of_plan(plan: Plan, *how: Any) -> tuple[tuple[Launch, ...], ...]:
    return tuple(_of_problem(problem, *how) for problem in plan.problems)


@functools.lru_cache(maxsize=4096)
def _of_problem(problem: Problem, layout: Layout, shapes: Shapes, limits: Limits, options: Options) -> tuple[Launch, ...]:
    tensors = [torch.empty_strided(shape, stride, device="meta") for shape, stride in shapes]
    sources, views = zip(*layout.views(problem, tensors), strict=True)
    rows = None if limits.part_bytes is None else limits.part_bytes // (4 * tensors[0].shape[-1] * problem.heads.count)
    options = replace(options, causal=problem.causal, mask=Mask(None, problem.band))
    made = []
    for group in launches(views, max_batch=limits.max_batch, max_extent=limits.max_extent, max_rows=rows):
        # the views' alignment follows from that of the tensors, which kernel_ready and the allocator ensure
        geometry = _geometry(tuple((tuple(x.shape), x.stride()) for x in group))
        at = tuple((i, x.shape, x.stride(), int(x.storage_offset())) for i, x in zip(sources, group, strict=True))
        made.append(Launch(problem, at, replace(options, geometry=geometry)))
    return tuple(made)


@functools.lru_cache(maxsize=8192)
def _geometry(shapes: Shapes) -> Hashable:
    """Returns one object for equal shapes and strides: a backend looks it up at every launch, and hashing the shapes takes longer."""
    return object()


def masks_of(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Returns what masks are cut from, by positions of the whole sequence: padding, positions and batch elements (B, N, 1)."""
    found = [] if call.padding is None else [call.padding]
    if call.dropout_p:
        (B, N), device = call.positions(q, k), q.device
        # positions in the whole sequence, so that a cut does not change the position of a query row
        found.append(torch.arange(call.position_offset, call.position_offset + N, device=device).repeat(B, 1))
        found.append(torch.arange(B, device=device)[:, None].repeat(1, N))
    return tuple(x[..., None] for x in found)


def mask_views(problem: Problem, tensors: Sequence[Tensor], padding: bool, dropout: bool) -> list[tuple[int, Tensor]]:
    """Returns the rows of ``masks_of``, the last tensors, which all heads have in common."""
    at = len(tensors)
    queries, keys = (functools.partial(rows, problem, 0, shared=True) for rows in (query_rows, key_rows))
    found = [(at - 2, queries(tensors[-2])), (at - 2, keys(tensors[-2])), (at - 1, keys(tensors[-1]))] if dropout else []
    first = at - 1 - 2 * dropout
    return [(first, keys(tensors[first])), *found] if padding else found


def masked(launch: Launch, masks: list[Tensor], call: Call) -> Options:
    """Returns the options of a launch with the masks that ``mask_views`` gave it, of which there are some."""
    problem, rest = launch.problem, [x.squeeze(-1) for x in masks]
    padding = rest.pop(0) if call.padding is not None else None
    options = replace(launch.options, mask=Mask(padding, problem.band), geometry=None)
    if not call.dropout_p:
        return options
    queries, keys, batch = rest
    heads = torch.arange(problem.heads.count, device=keys.device) * problem.heads.step + problem.heads.start + call.first_head
    return replace(options, dropout=Dropout(call.dropout_p, call.seed, batch[:, 0], heads, queries, keys))
