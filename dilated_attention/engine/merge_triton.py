"""The fused merge and the fused sum of ``parts.py`` as Triton kernels: each part is read once, each row written once.

A program takes ROWS positions of one head. Where the direct branch alone takes a row its result already stands, so of LongNet's
rows half are neither read nor written. Positions are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from dilated_attention.engine.parts import Layers, table

_ROWS = 64
_NUM_WARPS = 4


@triton.jit
def _place(table_ptr, branch, head, row_length, rows, num_rows):  # type: ignore[no-untyped-def]
    """(taken, segment, place, places a segment, segments, zero keys) of each row in one branch."""
    length = tl.load(table_ptr + branch * row_length)
    rate = tl.load(table_ptr + branch * row_length + 1)
    offset = tl.load(table_ptr + branch * row_length + 2 + head)
    segment = rows // length
    t = rows - segment * length - offset
    place = t // rate
    taken = (rows < num_rows) & (offset >= 0) & (t >= 0) & (place * rate == t)
    places = (length + rate - 1) // rate
    segments = (num_rows + length - 1) // length
    size = tl.minimum(num_rows - segment * length, length)
    zeros = places - (size - offset + rate - 1) // rate
    return taken, segment, place, places, segments, tl.where(taken, zeros, 0)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, parts_ptr, part_lses_ptr, table_ptr,
    num_rows, num_heads, row_length,
    out_stride_b, out_stride_n, out_stride_h, lse_stride_b, lse_stride_n, lse_stride_h,
    BATCH, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, DIRECT: tl.constexpr,
    ZERO_KEYS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM

    # rows that the direct branch alone takes are left as they stand
    more = tl.zeros((ROWS,), dtype=tl.int1) if DIRECT >= 0 else rows < num_rows
    zero_keys = tl.zeros((ROWS,), dtype=tl.int64)
    for branch in tl.static_range(BRANCHES):
        taken, _segment, _pl, _places, _segments, zeros = _place(table_ptr, branch, head, row_length, rows, num_rows)
        zero_keys += zeros
        if branch != DIRECT:
            more |= taken
    if ZERO_KEYS:
        more |= zero_keys > 0

    high = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if ZERO_KEYS:
        high = tl.where(zero_keys > 0, 0.0, high)
        total = zero_keys.to(tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    part_start = tl.zeros((), dtype=tl.int64)
    lse_start = tl.zeros((), dtype=tl.int64)
    for branch in tl.static_range(BRANCHES):
        taken, segment, place, places, segments, _zeros = _place(table_ptr, branch, head, row_length, rows, num_rows)
        part_row = ((batch * segments + segment) * places + place) * num_heads + head
        lse_row = ((batch * segments + segment) * num_heads + head) * places + place
        part_lse = tl.load(part_lses_ptr + lse_start + lse_row, mask=taken, other=-float("inf"))
        if branch == DIRECT:
            pointers = out_ptr + batch * out_stride_b + rows * out_stride_n + head * out_stride_h
        else:
            pointers = parts_ptr + part_start + part_row * HEAD_DIM
            part_start += BATCH * segments * places * num_heads * HEAD_DIM
        lse_start += BATCH * segments * places * num_heads
        part = tl.load(pointers[:, None] + columns[None, :], mask=(taken & more)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        new_high = tl.maximum(high, part_lse)
        base = tl.where(new_high == -float("inf"), 0.0, new_high)
        kept, weight = tl.exp(high - base), tl.exp(part_lse - base)
        # an empty part may hold anything
        part = tl.where(weight[:, None] > 0, part, 0.0)
        acc = acc * kept[:, None] + part * weight[:, None]
        total = total * kept + weight
        high = new_high
    lse = tl.where(total > 0, high + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    tl.store(lse_ptr + batch * lse_stride_b + rows * lse_stride_n + head * lse_stride_h, lse, mask=rows < num_rows)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    pointers = out_ptr + batch * out_stride_b + rows * out_stride_n + head * out_stride_h
    tl.store(pointers[:, None] + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=more[:, None] & inside[None, :])


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, parts_ptr, table_ptr, num_rows, num_heads, row_length, grad_stride_b, grad_stride_n, grad_stride_h,
    BATCH, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BRANCHES: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    more = tl.zeros((ROWS,), dtype=tl.int1) if DIRECT >= 0 else rows < num_rows
    for branch in tl.static_range(BRANCHES):
        taken, _segment, _pl, _places, _segments, _zeros = _place(table_ptr, branch, head, row_length, rows, num_rows)
        if branch != DIRECT:
            more |= taken
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    part_start = tl.zeros((), dtype=tl.int64)
    grad_rows = grad_ptr + batch * grad_stride_b + rows * grad_stride_n + head * grad_stride_h
    for branch in tl.static_range(BRANCHES):
        taken, segment, place, places, segments, _zeros = _place(table_ptr, branch, head, row_length, rows, num_rows)
        part_row = ((batch * segments + segment) * places + place) * num_heads + head
        if branch == DIRECT:
            pointers = grad_rows
        else:
            pointers = parts_ptr + part_start + part_row * HEAD_DIM
            part_start += BATCH * segments * places * num_heads * HEAD_DIM
        acc += tl.load(pointers[:, None] + columns[None, :], mask=(taken & more)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(grad_rows[:, None] + columns[None, :], acc.to(grad_ptr.dtype.element_ty), mask=more[:, None] & inside[None, :])


def merge_layers(layers: Layers, out: torch.Tensor, lse: torch.Tensor, parts: torch.Tensor, part_lses: torch.Tensor) -> None:
    """As ``parts.merge_layers``, on the flat buffers of all layers. out (B, N, H, D) with last stride 1, lse (B, N, H) float32."""
    assert out.stride(-1) == 1 and lse.dtype is torch.float32
    _launch(_merge_kernel, layers, out, (out, lse, parts, part_lses), (*out.stride()[:3], *lse.stride()), ZERO_KEYS=layers.zero_keys)


def sum_layers(layers: Layers, grads: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """As ``parts.sum_layers``, for several gradients (B, N, H, D) with last stride 1 and the flat buffer of each."""
    for grad, part in zip(grads, parts, strict=True):
        assert grad.stride(-1) == 1
        _launch(_sum_kernel, layers, grad, (grad, part), grad.stride()[:3])


def _launch(
    kernel: Any, layers: Layers, x: torch.Tensor, tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...], **flags: bool
) -> None:
    B, N, H, D = x.shape
    offsets = table(layers, x.device)
    kernel[(triton.cdiv(N, _ROWS), H, B)](
        *tensors,
        offsets,
        N,
        H,
        offsets.shape[1],
        *strides,
        B,
        HEAD_DIM=D,
        BLOCK_D=triton.next_power_of_2(D),
        ROWS=_ROWS,
        BRANCHES=len(layers.branches),
        DIRECT=-1 if layers.direct is None else layers.direct,
        num_warps=_NUM_WARPS,
        **flags,
    )
