"""Copies of the rows that an exchange moves, one launch each: into what is sent, into a step's memory, and the sums of gradients.

A unit is one (row, head): B times 2·D numbers, K and V or their gradients side by side. Rows are read from k and v (B, rows, heads, D)
with any strides whose last one is 1.

The copies, merges and sums of ``sparse_rows.SparseRows`` as one kernel each. Row i of head h is row every · i + offsets[h].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dilated_attention.backends.merge_inplace_triton import merged_weights
from dilated_attention.backends.tiles.launch import KernelLaunch
from dilated_attention.distributed.exchange.messages import StepPlan, offsets

# numbers of one program
_BLOCK = 4096
# integers that follow the length are not specialised: one compiled kernel serves all lengths
_VARYING = ["total", "own", "peers", "every", "rows", "whole"]


@triton.jit(do_not_specialize=_VARYING)
def _gather_kernel(  # type: ignore[no-untyped-def]
    to, k, v, units, k_batch, k_row, k_head, v_batch, v_row, v_head, total, heads, batch, D: tl.constexpr, D_BLOCK: tl.constexpr,
    U: tl.constexpr,
):  # fmt: skip
    """to[i] = k and v at units[i], for (units · batch) rows."""
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, D_BLOCK)
    inside = at < total
    unit = tl.load(units + at // batch, mask=inside, other=0).to(tl.int64)
    row, head, entry = unit // heads, unit % heads, at % batch
    mask = inside[:, None] & (column < D)[None]
    place = to + at[:, None] * (2 * D) + column[None]
    tl.store(place, tl.load(k + (entry * k_batch + row * k_row + head * k_head)[:, None] + column[None], mask=mask), mask=mask)
    tl.store(place + D, tl.load(v + (entry * v_batch + row * v_row + head * v_head)[:, None] + column[None], mask=mask), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _assemble_kernel(  # type: ignore[no-untyped-def]
    memory, k, v, came, source, k_batch, k_row, k_head, v_batch, v_row, v_head, total, own, heads, batch, D: tl.constexpr,
    D_BLOCK: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """memory[i] = own k and v at unit source[i] < own, or came[source[i] − own], or 0 where source[i] is −1. −2 leaves it as it is."""
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, D_BLOCK)
    entry = at % batch
    unit = tl.load(source + at // batch, mask=at < total, other=-2).to(tl.int64)
    is_own, arrived = (unit >= 0) & (unit < own), unit >= own
    row, head = unit // heads, unit % heads
    wide = (column < D)[None]
    place = memory + at[:, None] * (2 * D) + column[None]
    other = came + ((unit - own) * batch + entry)[:, None] * (2 * D) + column[None]
    mine = is_own[:, None] & wide
    theirs = arrived[:, None] & wide
    keys = tl.load(k + (entry * k_batch + row * k_row + head * k_head)[:, None] + column[None], mask=mine, other=0.0)
    keys += tl.load(other, mask=theirs, other=0.0)
    values = tl.load(v + (entry * v_batch + row * v_row + head * v_head)[:, None] + column[None], mask=mine, other=0.0)
    values += tl.load(other + D, mask=theirs, other=0.0)
    written = (unit > -2)[:, None] & wide
    tl.store(place, keys, mask=written)
    tl.store(place + D, values, mask=written)


@triton.jit(do_not_specialize=_VARYING)
def _add_kernel(  # type: ignore[no-untyped-def]
    dk, dv, own_k, own_v, came, places, returned, offsets, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, total, peers, heads, batch, every, D: tl.constexpr, D_BLOCK: tl.constexpr, U: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    """dk, dv [i] = own gradients at row places[row of i], plus came[returned[p, i]] over peers p (−1 for none), in float32.

    ONTO: row i of head h is row every · i + offsets[h] of dk and dv, and what they hold is added, too.
    """
    at = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, D_BLOCK)
    inside = at < total
    unit, entry = at // batch, at % batch
    row, head = unit // heads, unit % heads
    mask = inside[:, None] & (column < D)[None]
    mine = tl.load(places + row, mask=inside, other=0).to(tl.int64)
    keys = tl.load(own_k + (entry * k_batch + mine * k_row + head * k_head)[:, None] + column[None], mask=mask, other=0.0).to(tl.float32)
    values = tl.load(own_v + (entry * v_batch + mine * v_row + head * v_head)[:, None] + column[None], mask=mask, other=0.0).to(tl.float32)
    for peer in range(peers):
        other = tl.load(returned + peer * (total // batch) + unit, mask=inside, other=-1).to(tl.int64)
        there = came + (other * batch + entry)[:, None] * (2 * D) + column[None]
        some = mask & (other >= 0)[:, None]
        keys += tl.load(there, mask=some, other=0.0).to(tl.float32)
        values += tl.load(there + D, mask=some, other=0.0).to(tl.float32)
    if ONTO:
        row = row * every + tl.load(offsets + head, mask=inside, other=0)
    to_k = dk + (entry * dk_batch + row * dk_row + head * dk_head)[:, None] + column[None]
    to_v = dv + (entry * dv_batch + row * dv_row + head * dv_head)[:, None] + column[None]
    if ONTO:
        keys += tl.load(to_k, mask=mask, other=0.0).to(tl.float32)
        values += tl.load(to_v, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_k, keys.to(dk.dtype.element_ty), mask=mask)
    tl.store(to_v, values.to(dv.dtype.element_ty), mask=mask)


def launch(
    remembered: dict[Any, Any],
    kernel: Any,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int, ...],
    total: int,
    D: int,
    **constants: Any,
) -> None:
    """Launches a kernel over ``total`` rows of 2·D numbers. It is remembered for calls with these numbers."""
    if not total:
        return
    key = (kernel, numbers, D, *constants.values(), *[x.dtype for x in tensors])
    found = remembered.get(key)
    if found is None:
        width = triton.next_power_of_2(D)
        rows = max(1, _BLOCK // (2 * width))
        sizes = {"D": D, "D_BLOCK": width, "U": rows}
        found = remembered[key] = KernelLaunch(
            kernel, triton.cdiv(total, rows), numbers, sizes | constants, dtypes=tuple(x.dtype for x in tensors)
        )  # fmt: skip
    device = tensors[0].device
    found([x.data_ptr() for x in tensors], lambda: tensors, device.index or 0)


def gather(step: StepPlan, to: torch.Tensor, k: torch.Tensor, v: torch.Tensor, units: torch.Tensor) -> None:
    """Writes units of k and v (B, rows, heads, D) to ``to`` (units, B, 2·D). ``units``: int32, row · heads + head."""
    B, _, heads, D = k.shape
    total = units.shape[0] * B
    launch(step.remembered, _gather_kernel, (to, k, v, units), (*k.stride()[:3], *v.stride()[:3], total, heads, B), total, D)


def assemble(step: StepPlan, memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, came: torch.Tensor, sources: torch.Tensor) -> None:
    """Fills a memory (rows, heads, B, 2·D) from own k and v, and units that came (units, B, 2·D), as ``sources`` says."""
    B, rows, heads, D = k.shape
    total = sources.shape[0] * B
    numbers = (*k.stride()[:3], *v.stride()[:3], total, rows * heads, heads, B)
    launch(step.remembered, _assemble_kernel, (memory, k, v, came, sources), numbers, total, D)


def add(
    step: StepPlan,
    grads: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    came: torch.Tensor,
    places: torch.Tensor,
    returned: torch.Tensor,
) -> None:
    """Sets dk and dv (B, n, heads, D) to own[places[row]] plus the units of ``came`` (units, B, 2·D) that ``returned`` names.

    The sums of a step on sparse rows are added to what dk and dv hold.
    """
    B, _, heads, D = grads[0].shape
    peers, units = returned.shape
    strides = [stride for x in (*grads, *own) for stride in x.stride()[:3]]
    numbers = (*strides, units * B, peers, heads, B, 1 if step.sparse is None else step.sparse[0])
    tensors = (*grads, *own, came, places, returned, offsets(step, returned.device))
    launch(step.remembered, _add_kernel, tensors, numbers, units * B, D, ONTO=step.sparse is not None)


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
def _add_rows_kernel(  # type: ignore[no-untyped-def]
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


def take_rows(rows: Rows, tensors: Sequence[torch.Tensor], stats: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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


def merge_rows(rows: Rows, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges results of the rows into out and lse. part (B, n/g, heads, D), part_lse (B, heads, n/g); all are contiguous."""
    launch(rows.launches, _merge_kernel, (out, lse, part, part_lse, rows.offsets), *_numbers(rows, part, out))


def add_rows(rows: Rows, x: torch.Tensor, part: torch.Tensor) -> None:
    """Adds part (B, n/g, heads, D) to the rows of x; both are contiguous."""
    launch(rows.launches, _add_rows_kernel, (x, part, rows.offsets), *_numbers(rows, part, x))


def _numbers(rows: Rows, part: torch.Tensor, whole: torch.Tensor) -> tuple[tuple[int, ...], int, int]:
    B, count, heads, D = part.shape
    assert part.is_contiguous() and whole.is_contiguous()
    return (count, heads, rows.every, whole.shape[1], B * count * heads), B * count * heads, D


def _padded(tensors: Sequence[torch.Tensor], count: int, filler: torch.Tensor) -> list[torch.Tensor]:
    return [*tensors, *[filler] * (count - len(tensors))]
