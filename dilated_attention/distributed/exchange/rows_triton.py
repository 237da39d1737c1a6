"""Copies of the rows that an exchange moves, one launch each: into what is sent, into a step's memory, and the sums of gradients. A unit is
one (row, head): B times 2·D numbers, K and V or their gradients. Rows are read from k and v (B, rows, heads, D), whose last stride is 1."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

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
    """dk, dv [i] = own gradients at row places[row of i], plus came[returned[p, i]] over peers p (−1 for none), in float32. ONTO: row i of
    head h is row every · i + offsets[h] of dk and dv, and what they hold is added, too."""
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
    """Sets dk and dv (B, n, heads, D) to own[places[row]] plus the units of ``came`` (units, B, 2·D) that ``returned`` names; a step on
    sparse rows adds the sums to what dk and dv hold."""
    B, _, heads, D = grads[0].shape
    peers, units = returned.shape
    strides = [stride for x in (*grads, *own) for stride in x.stride()[:3]]
    numbers = (*strides, units * B, peers, heads, B, 1 if step.sparse is None else step.sparse[0])
    tensors = (*grads, *own, came, places, returned, offsets(step, returned.device))
    launch(step.remembered, _add_kernel, tensors, numbers, units * B, D, ONTO=step.sparse is not None)
