"""The launches of a problem: views of the rows that a kernel reads and writes, cut to the kernel's limits.

Their geometry is cached, since with short launches a GPU waits for the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dilated_attention.backends.base import AttentionRequest, Backend, Mask, Options
from dilated_attention.backends.dropout import Dropout
from dilated_attention.engine.branches.plan import Plan, Problem
from dilated_attention.engine.branches.views import Rows, key_rows, launches, query_rows

# limit on one launch's results, which briefly exist twice (the kernel's own and merged); longer branches run in chunks of segments
PART_BYTES = {"cpu": 32 * 2**20, "cuda": 64 * 2**20}
Limits = tuple[int | None, int | None, int | None]


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
        nested: the forward visits the pairs of nested branches once.
        request: what the backend was chosen for; ``named``: the caller named the backend.
        needs_grad: a backward will follow, or this is one.
        position_offset, first_head: what to add to positions and heads to get those of the whole sequence and model, which decide dropout.
        key_offset: position of the first key row.
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
    nested: bool = False
    request: AttentionRequest | None = None
    named: bool = False
    needs_grad: bool = False
    strategy: str = "auto"
    position_offset: int = 0
    first_head: int = 0
    key_offset: int = 0
    host_ms: float = 0.0

    def positions(self, q: Tensor, k: Tensor) -> torch.Size:
        """Returns (B, N): the positions that masks are indexed by, up to the last query or key."""
        return torch.Size((k.shape[0], max(self.query_offset + q.shape[1], self.key_offset + k.shape[1])))

    def padding_of(self, k: Tensor) -> Tensor | None:
        """Returns the padding mask of the rows of k."""
        return None if self.padding is None else self.padding[:, self.key_offset : self.key_offset + k.shape[1]]


class View(Protocol):
    """Which rows of a tensor a launch takes: ``Rows`` of a (B, N, H, …) tensor, or those of a branch's buffer. Hashable."""

    def of(self, x: Tensor) -> Tensor:
        """Returns the view (B, S, L, G, …)."""


@dataclass(frozen=True, eq=False, slots=True)
class LaunchViews:
    """The views of one launch as (size, stride, offset), and a key that is unique to these shapes and strides."""

    views: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    key: Hashable

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.as_strided(size, stride, x.storage_offset() + at) for x, (size, stride, at) in zip(tensors, self.views, strict=True)]


def launches_of(
    problem: Problem, tensors: Sequence[tuple[View, Tensor]], call: Call, batch_and_keys: torch.Size, *, whole: bool = False
) -> list[tuple[list[Tensor], Options]]:
    """Returns the problem's launches: a view (P, L, G, …) of every tensor, and the options with the launch's slice of the masks.

    Args:
        batch_and_keys: (B, N) of the whole sequence, whose positions the masks are indexed by.
        whole: a launch allocates nothing in addition to its results, so only the kernel limits its length.
    """
    capabilities, options = call.backend.capabilities, call.options
    limits = (capabilities.max_batch, capabilities.max_extent, None if whole else max_rows(problem, tensors[0][1]))
    if call.padding is None and not call.dropout_p:
        plain = [x for _, x in tensors]
        mask = Mask(None, problem.band)
        # the views' alignment follows from that of the tensors, which kernel_ready and the allocator ensure
        fixed = (options.scale, problem.causal, mask, None, options.deterministic, options.softcap)
        return [
            (launch_views.of(plain), Options(*fixed, launch_views.key))
            for launch_views in _launch_views(tuple((view, x.shape, x.stride()) for view, x in tensors), limits)
        ]
    return _masked_launches(problem, tensors, call, batch_and_keys, limits)


def _masked_launches(
    problem: Problem, tensors: Sequence[tuple[View, Tensor]], call: Call, batch_and_keys: torch.Size, limits: Limits
) -> list[tuple[list[Tensor], Options]]:
    """Returns launches with a padding mask or dropout, whose slices are views of further tensors (B, N)."""
    num_views, device = len(tensors), tensors[0][1].device
    query_view, key_view = (replace(rows, head_start=0, head_step=1, heads=1) for rows in rows_of(problem, 0, 0))
    more: list[tuple[View, Tensor]] = [] if call.padding is None else [(key_view, call.padding)]
    if call.dropout_p:
        B, num_keys = batch_and_keys
        # positions in the whole sequence, so that a cut does not change the position of a query row
        positions = torch.arange(call.position_offset, call.position_offset + num_keys, device=device).repeat(B, 1)
        batch = torch.arange(B, device=device)[:, None].repeat(1, num_keys)
        more += [(query_view, positions), (key_view, positions), (key_view, batch)]
        heads = torch.arange(problem.heads.count, device=device) * problem.heads.step + problem.heads.start + call.first_head
    given = [*tensors, *((view, x[..., None]) for view, x in more)]
    base = replace(call.options, causal=problem.causal)
    found = []
    for launch_views in _launch_views(tuple((view, x.shape, x.stride()) for view, x in given), limits):
        views = launch_views.of([x for _, x in given])
        extra = [x.squeeze(-1) for x in views[num_views:]]
        padding = extra.pop(0) if call.padding is not None else None
        options = replace(base, mask=Mask(padding, problem.band))
        if call.dropout_p:
            options = replace(options, dropout=Dropout(call.dropout_p, call.seed, extra[2][:, 0], heads, extra[0], extra[1]))
        found.append((views[:num_views], options))
    return found


@functools.lru_cache(maxsize=4096)
def rows_of(problem: Problem, query_offset: int, key_offset: int) -> tuple[Rows, Rows]:
    """Returns the problem's rows of queries, whose row 0 is at ``query_offset``, and of keys, whose row 0 is at ``key_offset``."""
    return query_rows(problem, query_offset), key_rows(problem, key_offset)


def max_rows(problem: Problem, q: Tensor) -> int:
    """Returns the most rows that a launch may return or accumulate in float32."""
    return PART_BYTES.get(q.device.type, PART_BYTES["cuda"]) // (4 * q.shape[-1] * problem.heads.count)


@functools.lru_cache(maxsize=4096)
def _launch_views(shapes: tuple[tuple[View, torch.Size, tuple[int, ...]], ...], limits: Limits) -> tuple[LaunchViews, ...]:
    """Returns the geometry of every launch on views (B, S, L, …) of tensors with these shapes and strides."""
    return _cut([view.of(torch.empty_strided(shape, stride, device="meta")) for view, shape, stride in shapes], limits)


def _cut(views: Sequence[Tensor], limits: Limits) -> tuple[LaunchViews, ...]:
    max_batch, max_extent, rows = limits
    made = []
    for group in launches(views, max_batch=max_batch, max_extent=max_extent, max_rows=rows):
        key = _key(tuple((tuple(x.shape), x.stride()) for x in group))
        made.append(LaunchViews(tuple((x.shape, x.stride(), int(x.storage_offset())) for x in group), key))
    return tuple(made)


@functools.lru_cache(maxsize=8192)
def _key(shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> Hashable:
    """Returns one object for equal shapes and strides: a backend looks it up at every launch, and hashing the shapes takes longer."""
    return object()


class Layout(Hashable, Protocol):
    """Which views of a call's tensors a problem's launch takes."""

    def views(self, problem: Problem, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Returns views (B, S, L, G, …), each with the index of the tensor that it is of."""


class PlannedLaunch(NamedTuple):
    """A launch of a plan, before there are tensors: its views as (index of the tensor, size, stride, offset), and its options."""

    views: tuple[tuple[int, torch.Size, tuple[int, ...], int], ...]
    options: Options
    zero_keys: int

    def of(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
        """Returns the views. ``offsets`` are the tensors' storage offsets."""
        return [tensors[i].as_strided(size, stride, offsets[i] + at) for i, size, stride, at in self.views]


def planned_launches(
    plan: Plan, layout: Layout, tensors: Sequence[Tensor], call: Call, *, whole: bool = False
) -> tuple[tuple[PlannedLaunch, ...], ...]:
    """Returns the launches of every problem of a plan, the longest problem first. Masks are left to the caller; ``whole``: see above."""
    capabilities = call.backend.capabilities
    part_bytes = None if whole else PART_BYTES.get(tensors[0].device.type, PART_BYTES["cuda"])
    shapes = tuple((x.shape, x.stride()) for x in tensors)
    return _planned_launches(plan, layout, shapes, capabilities.max_batch, capabilities.max_extent, part_bytes, call.options)


@functools.lru_cache(maxsize=512)
def _planned_launches(
    plan: Plan, layout: Layout, shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...], max_batch: int | None, max_extent: int | None,
    part_bytes: int | None, options: Options,
) -> tuple[tuple[PlannedLaunch, ...], ...]:  # fmt: skip
    tensors = [torch.empty_strided(shape, stride, device="meta") for shape, stride in shapes]

    def of_problem(problem: Problem) -> tuple[PlannedLaunch, ...]:
        sources, views = zip(*layout.views(problem, tensors), strict=True)
        rows = None if part_bytes is None else part_bytes // (4 * tensors[0].shape[-1] * problem.heads.count)
        mine = replace(options, causal=problem.causal, mask=Mask(None, problem.band))
        return tuple(
            PlannedLaunch(
                tuple((source, *view) for source, view in zip(sources, cut.views, strict=True)),
                replace(mine, geometry=cut.key),
                problem.zero_keys,
            )
            for cut in _cut(views, (max_batch, max_extent, rows))
        )

    return tuple(of_problem(problem) for problem in sorted(plan.problems, key=lambda problem: -problem.pairs))
