"""Launches on rows of any tensors, with cached geometry, since with short launches the GPU waits for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dilated_attention.backends.base import Mask, Options
from dilated_attention.engine.branches.plan import Problem
from dilated_attention.engine.branches.sequential import Call, launches_of, max_rows
from dilated_attention.engine.branches.views import Rows, launches

Limits = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """The views of one launch as (size, stride, offset), and a key that is unique to these shapes and strides."""

    views: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    key: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.as_strided(size, stride, x.storage_offset() + at) for x, (size, stride, at) in zip(tensors, self.views, strict=True)]


def launches_of_rows(
    problem: Problem, tensors: Sequence[tuple[Rows, torch.Tensor]], call: Call, batch_and_keys: torch.Size, *, whole: bool = False
) -> Iterator[tuple[list[torch.Tensor], Options]]:
    """Yields the problem's launches on the given rows of each of ``tensors`` (B, N, H, …), as ``sequential.launches_of`` does on views.

    Args:
        batch_and_keys: (B, N) of the whole sequence, whose positions the masks are indexed by.
    """
    if call.padding is not None or call.dropout_p:
        # every launch needs its own slice of the masks
        yield from launches_of(problem, [rows.of(x) for rows, x in tensors], call, batch_and_keys, whole=whole)
        return
    facts, options = call.backend.facts, call.options
    limits = (facts.max_batch, facts.max_extent, None if whole else max_rows(problem, tensors[0][1]))
    shapes = tuple((rows, x.shape, x.stride()) for rows, x in tensors)
    mask = Mask(None, problem.band)
    for geometry in _geometry(shapes, limits):
        # the views' alignment follows from that of the tensors, which kernel_ready and the allocator ensure
        made = Options(options.scale, problem.causal, mask, None, options.deterministic, geometry.key)
        yield geometry.of([x for _, x in tensors]), made


@functools.lru_cache(maxsize=4096)
def _geometry(shapes: tuple[tuple[Rows, torch.Size, tuple[int, ...]], ...], limits: Limits) -> tuple[Geometry, ...]:
    return make_geometry([rows.of(torch.empty_strided(shape, stride, device="meta")) for rows, shape, stride in shapes], limits)


def make_geometry(views: Sequence[torch.Tensor], limits: Limits) -> tuple[Geometry, ...]:
    """Returns the geometry of every launch on views (B, S, L, …). The tensors may be on the meta device."""
    max_batch, max_extent, rows = limits
    made = []
    for group in launches(views, max_batch=max_batch, max_extent=max_extent, max_rows=rows):
        key = tuple((tuple(x.shape), x.stride()) for x in group)
        made.append(Geometry(tuple((x.shape, x.stride(), int(x.storage_offset())) for x in group), key))
    return tuple(made)
