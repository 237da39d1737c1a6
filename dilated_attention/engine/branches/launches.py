"""The launches of problems: strided views of the rows that a kernel reads and writes, cut to the kernel's limits.

Segments and dilation become strides, and nothing is gathered. Views are computed as integers, from the shapes and strides of a call's
tensors, and kept: with short launches a GPU waits for the CPU.

Shape letters: B batch, S segments, L rows per segment, G heads of the group, D head dim, P = B·S problems of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import Bias, Capabilities, Mask, Options
from dilated_attention.backends.dropout import Dropout
from dilated_attention.engine.branches.problems import Problem, Range

# limit on one launch's results, which briefly exist twice (the kernel's own and merged); longer branches run in chunks of segments
PART_BYTES = {"cpu": 32 * 2**20, "cuda": 64 * 2**20}
# a view without its tensor: index of the tensor, strides of B and S, sizes and strides (L, G, …), offset
View = tuple[int, int, int, tuple[int, ...], tuple[int, ...], int]
_MOST_GEOMETRIES = 8192
_ALL = slice(None)
_geometries: dict[Hashable, object] = {}


class Masks(NamedTuple):
    """What differs between calls that are alike: padding (B, Nk) bool, True = the key is ignored, or None, the seed of dropout, and a bias
    of the whole call, whose ``keys`` are all coordinates (B, Nk, 2), and ``queries`` those of the queries among them."""

    padding: Tensor | None = None
    seed: int = 0
    bias: Bias | None = None


class Rows(NamedTuple):
    """Which rows of a tensor, given by its index, a problem takes.

    Args:
        keys: those of its keys, else of its queries.
        position: position of the tensor's first row.
        shared: the tensor has one row for all heads (H = 1), and so has the view.
        place: returns the view of another tensor instead, or None.
    """

    tensor: int
    keys: bool
    shape: torch.Size
    stride: tuple[int, ...]
    position: int = 0
    shared: bool = False
    place: Callable[[Problem], View | None] | None = None


class Launch(NamedTuple):
    """A launch without its tensors: the problem, views as (index of the tensor, size, stride, offset), and the options but for masks."""

    problem: Problem
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]
    options: Options

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the views (P, L, G, …)."""
        return [tensors[i].as_strided(size, stride, tensors[i].storage_offset() + at) for i, size, stride, at in self.views]


def launches_of(
    problems: Iterable[Problem], rows: Sequence[Rows], capabilities: Capabilities, part_bytes: int | None, options: Options
) -> tuple[tuple[Launch, ...], ...]:
    """Returns the launches of each problem.

    Batch and segments fold into one dimension if the strides of *all* views allow it. Otherwise each batch element or each segment is a
    separate launch, whichever are fewer.

    Args:
        rows: of each tensor, the first of which has the head dim.
        part_bytes: limit on a launch's results, in float32; None where it allocates none, so that only the kernel limits its length.
    """
    made = []
    for problem in problems:
        heads, S = problem.heads, problem.segments
        B, width = rows[0].shape[0], rows[0].shape[-1]
        views: list[View] = []
        for row in rows:
            if row.place is not None and (view := row.place(problem)) is not None:
                views.append(view)
                continue
            s_B, s_N, s_H, *s_rest = row.stride
            if row.keys:
                start, length, first, step, count = problem.k_start, problem.k_len, heads.kv_start, heads.kv_step, heads.kv_count
            else:
                start, length, first, step, count = problem.q_start, problem.q_len, heads.start, heads.step, heads.size
            if row.shared:
                first, step, count = 0, 1, 1
            strides = problem.step * s_N, step * s_H + heads.shift * s_N, *s_rest
            at = (start - row.position) * s_N + first * s_H
            views.append((row.tensor, s_B, problem.stride * s_N, (length, count, *row.shape[3:]), strides, at))
        folds = B == 1 or all(s_B == S * s_S for _, s_B, s_S, *_ in views)
        # whether P counts batch elements
        by_batch = B > 1 and (S == 1 or (B > S and not folds))
        P, others = (B, S) if by_batch else (B * S, 1) if folds else (S, B)
        longest = max([size[0] for _, _, _, size, _, _ in views])
        max_rows = None if part_bytes is None else max(1, part_bytes // (4 * width * heads.size) // longest)
        count = P if P == 1 else problems_at_once(P, [(v[1] if by_batch else v[2], v[3], v[4]) for v in views], capabilities, max_rows)
        mask = Mask(None, problem.band)
        launches = []
        for other in range(others):
            for start in range(0, P, count):
                size_P = min(count, P - start)
                cut = []
                for index, s_B, s_S, size, stride, at in views:
                    s_P, s_other = (s_B, s_S) if by_batch else (s_S, s_B)
                    cut.append((index, (size_P, *size), (s_P, *stride), at + start * s_P + other * s_other))
                # one object for equal shapes and strides: a backend looks it up at every launch, and hashing the shapes takes longer. The
                # views' alignment follows from that of the tensors, which kernel_ready and the allocator ensure
                if len(_geometries) >= _MOST_GEOMETRIES:
                    _geometries.clear()
                geometry = _geometries.setdefault(tuple([view[1:3] for view in cut]), object())
                launches.append(Launch(problem, tuple(cut), replace(options, causal=problem.causal, mask=mask, geometry=geometry)))
        made.append(tuple(launches))
    return tuple(made)


def problems_at_once(
    count: int, views: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]], capabilities: Capabilities, most: int | None = None
) -> int:
    """Returns how many of ``count`` problems a launch takes, at least one.

    Args:
        views: of each tensor, the stride from problem to problem, and the sizes and strides of one problem.
        most: a limit in addition to the kernel's.
    """
    for limit in (most, capabilities.max_batch):
        count = count if limit is None else min(count, limit)
    if capabilities.max_extent is not None:
        for step, size, stride in views:
            if step > 0:
                # elements from the first to the last one of a problem
                extent = 1 + sum([(n - 1) * s for n, s in zip(size, stride, strict=True)])
                count = min(count, 1 + max(0, capabilities.max_extent - extent) // step)
    return max(1, count)


def entries_at_once(tensors: Sequence[Tensor], capabilities: Capabilities) -> int:
    """Returns how many batch entries of these tensors a launch takes, at least one."""
    return problems_at_once(tensors[0].shape[0], [(x.stride(0), x.shape[1:], x.stride()[1:]) for x in tensors], capabilities)


def narrowed(tensors: tuple[Tensor, ...], num_heads: int, heads: Range, batch: slice = _ALL, positions: slice = _ALL) -> tuple[Tensor, ...]:
    """Returns views of some batch entries, positions and heads, or of the corresponding key/value heads where a tensor has only those."""
    return tuple([x[batch, positions, slice(*[head * x.shape[2] // num_heads for head in heads])] for x in tensors])


def without_padding(k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns k and v with padded rows zeroed, so that a NaN in one of them cannot spread through 0 · NaN."""
    if padding is None:
        return k, v
    blocked = padding[:, :, None, None]
    return k.masked_fill(blocked, 0), v.masked_fill(blocked, 0)


def masks_of(masks: Masks, dropout_p: float, positions: tuple[int, int], batch: int, device: torch.device) -> list[Tensor]:
    """Returns what the masks of launches are cut from, by positions of the whole sequence: padding of keys, positions of queries and of
    keys, batch elements of keys (B, N, 1), and coordinates of queries and of keys (B, N, 1, 2).

    Args:
        positions: the first and the last one.
    """
    # of any strides, as a caller's mask has them, where launches are kept
    cut_from = [] if masks.padding is None else [masks.padding.contiguous()]
    if dropout_p:
        cut_from += [torch.arange(*positions, device=device).repeat(batch, 1)] * 2
        cut_from.append(torch.arange(batch, device=device)[:, None].repeat(1, positions[1] - positions[0]))
    return [x[..., None] for x in cut_from] + ([] if masks.bias is None else [masks.bias.keys.contiguous()[:, :, None]] * 2)


def rows_of(letters: str, tensors: Sequence[Tensor], position: int, masks: Masks, dropout_p: float) -> list[Rows]:
    """Returns the rows of tensors and of their masks.

    Args:
        letters: a letter for each of the first tensors, "q" for rows of queries, "k" for rows of keys; the last ones are ``masks_of``.
        position: position of the first query row.
    """
    of_masks = "k" * (masks.padding is not None) + "qkk" * (dropout_p > 0) + "qk" * (masks.bias is not None)
    numbers = [*range(len(letters)), *range(len(tensors) - len(of_masks), len(tensors))]
    return [
        Rows(i, x == "k", tensors[i].shape, tensors[i].stride(), position * (x == "q" and not shared), shared)
        for i, x, shared in zip(numbers, letters + of_masks, [False] * len(letters) + [True] * len(of_masks), strict=True)
    ]


def masked(launch: Launch, views: list[Tensor], masks: Masks, dropout_p: float, first_head: int) -> Options:
    """Returns the options of a launch with the views of its masks, if there are any."""
    if not views:
        return launch.options
    problem, bias, step = launch.problem, masks.bias, launch.problem.heads.step
    if bias is not None:
        *views, queries, keys = views
        some = slice(problem.heads.start, problem.heads.start + problem.heads.size * step, step)
        bias = bias._replace(queries=queries[:, :, 0], keys=keys[:, :, 0]).part(heads=some)
    rows = [x.squeeze(-1) for x in views]
    mask = Mask(None if masks.padding is None else rows.pop(0), problem.band)
    dropout = None
    if dropout_p:
        queries, keys, batch = rows
        heads = torch.arange(problem.heads.size, device=keys.device) * problem.heads.step + problem.heads.start + first_head
        dropout = Dropout(dropout_p, masks.seed, batch[:, 0], heads, queries, keys)
    return replace(launch.options, mask=mask, dropout=dropout, bias=bias, geometry=None)
