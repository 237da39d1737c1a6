"""The copies, merges and sums of ``sparse_rows.SparseRows`` as one kernel each. Row i of head h is row every · i + offsets[h]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dilated_attention.backends.merge_inplace_triton import merged_weights
from dilated_attention.distributed.exchange.rows.copies_triton import launch


class Rows(NamedTuple):
    """Which rows: ``every`` and ``offsets`` (heads,) int32. ``launches``: those of earlier calls."""

    every: int
    offsets: torch.Tensor
    launches: dict[Any, Any]


@triton.jit
def _unit(offsets, rows, heads, every, total, U: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (number of the unit (batch entry, row, head), whether there is one, batch entry, row, row of the whole tensor, head)."""
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    inside = at < total
    head, row, entry = at % heads, at // heads % rows, at // (heads * rows)
    return at, inside, entry, row, row * every + tl.load(offsets + head, mask=inside, other=0), head


@triton.jit(do_not_specialize=["rows", "every", "whole", "total"])
def _take_kernel(  # type: ignore[no-untyped-def]
    to0, to1, to2, to_stat0, to_stat1, x0, x1, x2, stat0, stat1, offsets, batch0, row0, head0, batch1, row1, head1, batch2, row2, head2,
    rows, heads, every, whole, total, D: tl.constexpr, D_BLOCK: tl.constexpr, U: tl.constexpr, TENSORS: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """to = x at the rows, for up to three tensors (B, n, heads, D) and two statistics (B, heads, n)."""
    at, inside, entry, row, there, head = _unit(offsets, rows, heads, every, total, U)
    column = tl.arange(0, D_BLOCK)
    mask = inside[:, None] & (column < D)[None]
    place = at[:, None] * D + column[None]
    tl.store(to0 + place, tl.load(x0 + (entry * batch0 + there * row0 + head * head0)[:, None] + column[None], mask=mask), mask=mask)
    if TENSORS > 1:
        tl.store(to1 + place, tl.load(x1 + (entry * batch1 + there * row1 + head * head1)[:, None] + column[None], mask=mask), mask=mask)
    if TENSORS > 2:
        tl.store(to2 + place, tl.load(x2 + (entry * batch2 + there * row2 + head * head2)[:, None] + column[None], mask=mask), mask=mask)
    line = entry * heads + head
    if STATS > 0:
        tl.store(to_stat0 + line * rows + row, tl.load(stat0 + line * whole + there, mask=inside), mask=inside)
    if STATS > 1:
        tl.store(to_stat1 + line * rows + row, tl.load(stat1 + line * whole + there, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows", "every", "whole", "total"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    out, lse, part, part_lse, offsets, rows, heads, every, whole, total, D: tl.constexpr, D_BLOCK: tl.constexpr, U: tl.constexpr
):  # fmt: skip
    """Merges part (B, rows, heads, D) and part_lse (B, heads, rows) into out (B, n, heads, D) and lse (B, heads, n), all contiguous."""
    at, inside, entry, row, there, head = _unit(offsets, rows, heads, every, total, U)
    column = tl.arange(0, D_BLOCK)
    mask = inside[:, None] & (column < D)[None]
    line = entry * heads + head
    own_lse = tl.load(lse + line * whole + there, mask=inside, other=-float("inf"))
    other_lse = tl.load(part_lse + line * rows + row, mask=inside, other=-float("inf"))
    merged, own, other = merged_weights(own_lse, other_lse)
    to = out + ((entry * whole + there) * heads + head)[:, None] * D + column[None]
    x = tl.load(to, mask=mask, other=0.0).to(tl.float32) * own[:, None]
    x += tl.load(part + at[:, None] * D + column[None], mask=mask, other=0.0).to(tl.float32) * other[:, None]
    tl.store(to, x.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + line * whole + there, merged, mask=inside)


@triton.jit(do_not_specialize=["rows", "every", "whole", "total"])
def _add_kernel(  # type: ignore[no-untyped-def]
    x, part, offsets, rows, heads, every, whole, total, D: tl.constexpr, D_BLOCK: tl.constexpr, U: tl.constexpr
):  # fmt: skip
    """Adds part (B, rows, heads, D) to x (B, n, heads, D), both contiguous, in float32."""
    at, inside, entry, _, there, head = _unit(offsets, rows, heads, every, total, U)
    column = tl.arange(0, D_BLOCK)
    mask = inside[:, None] & (column < D)[None]
    to = x + ((entry * whole + there) * heads + head)[:, None] * D + column[None]
    total_ = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    total_ += tl.load(part + at[:, None] * D + column[None], mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total_.to(x.dtype.element_ty), mask=mask)


def take(rows: Rows, tensors: Sequence[torch.Tensor], stats: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns copies of the rows: of one to three tensors (B, n, heads, D), and of up to two statistics (B, heads, n)."""
    B, n, heads, D = tensors[0].shape
    count = n // rows.every
    found = [torch.empty((B, count, heads, D), dtype=x.dtype, device=x.device) for x in tensors]
    stats = [x.contiguous() for x in stats]
    found_stats = [torch.empty((B, heads, count), dtype=x.dtype, device=x.device) for x in stats]
    strides = [stride for x in _padded(tensors, 3, tensors[0]) for stride in x.stride()[:3]]
    given = (
        *_padded(found, 3, found[0]), *_padded(found_stats, 2, found[0]), *_padded(tensors, 3, tensors[0]), *_padded(stats, 2, found[0]),
        rows.offsets,
    )  # fmt: skip
    numbers = (*strides, count, heads, rows.every, n, B * count * heads)
    launch(rows.launches, _take_kernel, given, numbers, B * count * heads, D, TENSORS=len(tensors), STATS=len(stats))
    return found, found_stats


def merge(rows: Rows, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges results of the rows into out and lse. part (B, n/g, heads, D), part_lse (B, heads, n/g); all are contiguous."""
    launch(rows.launches, _merge_kernel, (out, lse, part, part_lse, rows.offsets), *_numbers(rows, part, out))


def add(rows: Rows, x: torch.Tensor, part: torch.Tensor) -> None:
    """Adds part (B, n/g, heads, D) to the rows of x; both are contiguous."""
    launch(rows.launches, _add_kernel, (x, part, rows.offsets), *_numbers(rows, part, x))


def _numbers(rows: Rows, part: torch.Tensor, whole: torch.Tensor) -> tuple[tuple[int, ...], int, int]:
    B, count, heads, D = part.shape
    assert part.is_contiguous() and whole.is_contiguous()
    return (count, heads, rows.every, whole.shape[1], B * count * heads), B * count * heads, D


def _padded(tensors: Sequence[torch.Tensor], count: int, filler: torch.Tensor) -> list[torch.Tensor]:
    return [*tensors, *[filler] * (count - len(tensors))]
