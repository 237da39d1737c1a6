"""Strided views of the rows that a problem takes from a tensor: segments and dilation become strides, and nothing is gathered.

Shape letters: B batch, S segments, L rows per segment, G heads of the group, D head dim, P = B·S problems of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from dilated_attention.engine.branches.plan import Problem


def query_rows(problem: Problem, position: int, x: Tensor, *, shared: bool = False) -> Tensor:
    """Returns a view (B, S, L, G, …) of the problem's queries in x (B, N, H, …), whose row 0 is at ``position``.

    ``shared``: x has one row for all heads (H = 1), and so has the view.
    """
    heads = problem.heads
    of_heads = (0, 1, 1) if shared else (heads.start, heads.step, heads.count)
    return _rows(problem, x, problem.q_start - position, problem.q_len, *of_heads)


def key_rows(problem: Problem, position: int, x: Tensor, *, shared: bool = False) -> Tensor:
    heads = problem.heads
    of_heads = (0, 1, 1) if shared else (heads.kv_start, heads.kv_step, heads.kv_count)
    return _rows(problem, x, problem.k_start - position, problem.k_len, *of_heads)


def _rows(problem: Problem, x: Tensor, start: int, length: int, first: int, head_step: int, heads: int) -> Tensor:
    B, _, _, *rest = x.shape
    s_B, s_N, s_H, *s_rest = x.stride()
    stride = (s_B, problem.stride * s_N, problem.step * s_N, head_step * s_H + problem.heads.shift * s_N, *s_rest)
    return x.as_strided((B, problem.segments, length, heads, *rest), stride, x.storage_offset() + start * s_N + first * s_H)


def extent(view: Tensor) -> int:
    """Returns the number of elements from the first to the last one of a view, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) if view.numel() else 0


def launches(views: Sequence[Tensor], *, max_batch: int | None, max_extent: int | None, max_rows: int | None) -> Iterator[list[Tensor]]:
    """Folds (B, S, L, …) views into (P, L, …), cut so that each launch stays within a kernel's limits.

    Batch and segments fold into one dimension if the strides of *all* views allow it. Otherwise each batch element or each segment is
    a separate launch, whichever are fewer.

    Args:
        max_batch: most problems per launch.
        max_extent: most elements between the first and the last element of any view of a launch.
        max_rows: most rows (P·L) per launch, which bounds the memory of its results. At least one problem always runs.
    """
    B, S = views[0].shape[:2]
    if B == 1:
        folded = [[view[0] for view in views]]
    elif S == 1:
        folded = [[view[:, 0] for view in views]]
    elif all(view.stride(0) == S * view.stride(1) for view in views):
        folded = [[view.flatten(0, 1) for view in views]]
    elif B <= S:
        folded = [[view[b] for view in views] for b in range(B)]
    else:
        folded = [[view[:, s] for view in views] for s in range(S)]
    for group in folded:
        P = group[0].shape[0]
        size = P
        if max_batch is not None:
            size = min(size, max_batch)
        if max_rows is not None:
            size = min(size, max(1, max_rows // max(1, max(view.shape[1] for view in group))))
        if max_extent is not None:
            for view in group:
                if view.stride(0) > 0:
                    room = max_extent - extent(view[:1])
                    size = min(size, max(1, 1 + max(0, room) // view.stride(0)))
        for start in range(0, P, size):
            yield [view[start : start + size] for view in group]
