"""The merge and the sum of branch buffers (``branch_buffers.py``): each part is read once and each row is written once.

A program processes ROWS positions of one head. Rows that only the direct branch computes already hold their result. If those are all rows
except every STEP-th one (every second one in LongNet's pattern), the program skips them. Row indices have 32 bits, addresses 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.backends.hardware import on_device
from dilated_attention.engine.branches.branch_buffers import BranchBuffers, table

# (elements of out that a program takes at a time, warps), alone and alongside other work: the fastest of a sweep on an H200
_MERGE_SIZES, _SUM_SIZES = ((8192, 4), (8192, 8)), ((4096, 8), (8192, 8))
# number of programs that reach half the memory bandwidth on a fraction of the multiprocessors
_PROGRAMS_ASIDE = 96
_NO_END = 2**30
# integers that follow the length are not specialised: one compiled kernel serves all lengths
_VARYING = ["num_rows", "num_heads", "num_batches", "num_tiles", "lse_stride_b", "lse_stride_n", "lse_stride_h"]


@triton.jit
def _place(table_ptr, branch, head, num_heads, rows, num_rows, LENGTH: tl.constexpr, RATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (taken, segment, place, places per segment, segments, zero keys) of each row in one branch, in 32 bits.

    LENGTH and RATE are compile-time constants, since divisions by runtime values would take longer than the memory accesses.
    """
    offset = tl.load(table_ptr + branch * num_heads + head)
    segment = rows // LENGTH
    t = rows - segment * LENGTH - offset
    place = t // RATE
    taken = (rows < num_rows) & (offset >= 0) & (t >= 0) & (place * RATE == t)
    places = (tl.minimum(num_rows, LENGTH) + RATE - 1) // RATE
    segments = (num_rows + LENGTH - 1) // LENGTH
    size = tl.minimum(num_rows - segment * LENGTH, LENGTH)
    zeros = places - (size - offset + RATE - 1) // RATE
    return taken, segment, place, places, segments, tl.where(taken, zeros, 0)


@triton.jit(do_not_specialize=_VARYING)
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, parts_ptr, part_lses_ptr, table_ptr, num_rows, num_heads,
    out_stride_b, out_stride_n, out_stride_h, lse_stride_b, lse_stride_n, lse_stride_h, num_batches, num_tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, LENGTHS: tl.constexpr, RATES: tl.constexpr,
    DIRECT: tl.constexpr, STEP: tl.constexpr, ZERO_KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # heads of the same rows are adjacent in memory
        head, batch = tile % num_heads, tl.program_id(1).to(tl.int64)
        first = tile // num_heads * ROWS * STEP
        columns = tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        lse_rows = lse_ptr + batch * lse_stride_b + head * lse_stride_h
        out_rows = out_ptr + batch * out_stride_b + head.to(tl.int64) * out_stride_h
        rows = first + tl.arange(0, ROWS) * STEP
        if STEP > 1:
            offset = _offset_of_others(table_ptr, head, num_heads, DIRECT) % STEP
            rows += offset
            # all other rows belong to the direct branch alone, and their out is already final
            others = first + tl.arange(0, ROWS * STEP)
            taken, segment, place, places, segments, _zeros = _place(
                table_ptr, DIRECT, head, num_heads, others, num_rows, LENGTHS[DIRECT], RATES[DIRECT]
            )
            lse_start = tl.zeros((), dtype=tl.int64)
            for branch in tl.static_range(DIRECT):
                lse_start += _layer_size(num_rows, num_batches, num_heads, LENGTHS[branch], RATES[branch])
            taken &= others % STEP != offset
            lse = tl.load(part_lses_ptr + lse_start + ((batch * segments + segment) * num_heads + head) * places + place, mask=taken)
            tl.store(lse_rows + others.to(tl.int64) * lse_stride_n, lse, mask=taken)
        wide = rows.to(tl.int64)

        high = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        zero_keys = tl.zeros((ROWS,), dtype=tl.int32)
        more = tl.zeros((ROWS,), dtype=tl.int1) if DIRECT >= 0 else rows < num_rows
        lse_start = tl.zeros((), dtype=tl.int64)
        for branch in tl.static_range(len(LENGTHS)):
            taken, segment, place, places, segments, zeros = _place(
                table_ptr, branch, head, num_heads, rows, num_rows, LENGTHS[branch], RATES[branch]
            )
            row = ((batch * segments + segment) * num_heads + head) * places + place
            high = tl.maximum(high, tl.load(part_lses_ptr + lse_start + row, mask=taken, other=-float("inf")))
            lse_start += _layer_size(num_rows, num_batches, num_heads, LENGTHS[branch], RATES[branch])
            zero_keys += zeros
            if branch != DIRECT:
                more |= taken
        total = tl.zeros((ROWS,), dtype=tl.float32)
        if ZERO_KEYS:
            more |= zero_keys > 0
            high = tl.where(zero_keys > 0, tl.maximum(high, 0.0), high)
        base = tl.where(high == -float("inf"), 0.0, high)
        if ZERO_KEYS:
            total = zero_keys.to(tl.float32) * tl.exp(-base)

        acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        part_start = tl.zeros((), dtype=tl.int64)
        lse_start = tl.zeros((), dtype=tl.int64)
        for branch in tl.static_range(len(LENGTHS)):
            taken, segment, place, places, segments, zeros = _place(
                table_ptr, branch, head, num_heads, rows, num_rows, LENGTHS[branch], RATES[branch]
            )
            row = ((batch * segments + segment) * num_heads + head) * places + place
            part_lse = tl.load(part_lses_ptr + lse_start + row, mask=taken, other=-float("inf"))
            weight = tl.exp(part_lse - base)
            size = _layer_size(num_rows, num_batches, num_heads, LENGTHS[branch], RATES[branch])
            lse_start += size
            if branch == DIRECT:
                pointers = out_rows + wide * out_stride_n
            else:
                pointers = parts_ptr + part_start + (((batch * segments + segment) * places + place) * num_heads + head) * HEAD_DIM
                part_start += size * HEAD_DIM
            part = tl.load(pointers[:, None] + columns[None, :], mask=(taken & more)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            if OWN and ZERO_KEYS:
                # the branch's separate output, with its own zero keys; overwriting is safe, since only this program reads these rows
                share = 1.0 / (1.0 + zeros.to(tl.float32) * tl.exp(-part_lse))
                own = tl.where(part_lse[:, None] > -float("inf"), part * share[:, None], 0.0).to(parts_ptr.dtype.element_ty)
                tl.store(pointers[:, None] + columns[None, :], own, mask=(zeros > 0)[:, None] & inside[None, :])
            # an empty part may hold arbitrary values
            acc += tl.where(weight[:, None] > 0, part, 0.0) * weight[:, None]
            total += weight
        lse = tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(lse_rows + wide * lse_stride_n, lse, mask=rows < num_rows)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        pointers = out_rows + wide * out_stride_n
        tl.store(pointers[:, None] + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=more[:, None] & inside[None, :])


@triton.jit
def _layer_size(num_rows, num_batches, num_heads, LENGTH: tl.constexpr, RATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the number of places in one branch's buffer, over all batch elements and heads."""
    segments = (num_rows + LENGTH - 1) // LENGTH
    places = (tl.minimum(num_rows, LENGTH) + RATE - 1) // RATE
    return tl.cast(segments, tl.int64) * places * num_batches * num_heads


@triton.jit
def _offset_of_others(table_ptr, head, num_heads, DIRECT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the head's offset in the first branch that is not the direct one."""
    return tl.load(table_ptr + (1 if DIRECT == 0 else 0) * num_heads + head)


@triton.jit(do_not_specialize=_VARYING)
def _sum_kernel(  # type: ignore[no-untyped-def]
    dq_ptr, dk_ptr, dv_ptr, dq_parts_ptr, dk_parts_ptr, dv_parts_ptr, table_ptr, num_rows, num_heads,
    stride_b, stride_n, stride_h, num_batches, num_tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, LENGTHS: tl.constexpr, RATES: tl.constexpr,
    DIRECT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        head, batch = tile % num_heads, tl.program_id(1).to(tl.int64)
        rows = (tile // num_heads * ROWS + tl.arange(0, ROWS)) * STEP
        if STEP > 1:
            rows += _offset_of_others(table_ptr, head, num_heads, DIRECT) % STEP
        start = batch * stride_b + rows.to(tl.int64) * stride_n + head.to(tl.int64) * stride_h
        sizes = (num_rows, num_heads, num_batches)
        _sum_rows(dq_ptr, dq_parts_ptr, table_ptr, start, rows, head, batch, sizes, HEAD_DIM, BLOCK_D, ROWS, LENGTHS, RATES, DIRECT)
        _sum_rows(dk_ptr, dk_parts_ptr, table_ptr, start, rows, head, batch, sizes, HEAD_DIM, BLOCK_D, ROWS, LENGTHS, RATES, DIRECT)
        _sum_rows(dv_ptr, dv_parts_ptr, table_ptr, start, rows, head, batch, sizes, HEAD_DIM, BLOCK_D, ROWS, LENGTHS, RATES, DIRECT)


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    grad_ptr, parts_ptr, table_ptr, start, rows, head, batch, sizes,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, LENGTHS: tl.constexpr, RATES: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    num_rows, num_heads, num_batches = sizes
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    more = tl.zeros((ROWS,), dtype=tl.int1) if DIRECT >= 0 else rows < num_rows
    for branch in tl.static_range(len(LENGTHS)):
        taken, _segment, _pl, _places, _segments, _zeros = _place(
            table_ptr, branch, head, num_heads, rows, num_rows, LENGTHS[branch], RATES[branch]
        )
        if branch != DIRECT:
            more |= taken
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    part_start = tl.zeros((), dtype=tl.int64)
    for branch in tl.static_range(len(LENGTHS)):
        taken, segment, place, places, segments, _zeros = _place(
            table_ptr, branch, head, num_heads, rows, num_rows, LENGTHS[branch], RATES[branch]
        )
        if branch == DIRECT:
            pointers = grad_ptr + start
        else:
            pointers = parts_ptr + part_start + (((batch * segments + segment) * places + place) * num_heads + head) * HEAD_DIM
            part_start += _layer_size(num_rows, num_batches, num_heads, LENGTHS[branch], RATES[branch]) * HEAD_DIM
        acc += tl.load(pointers[:, None] + columns[None, :], mask=(taken & more)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    pointers = grad_ptr + start
    tl.store(pointers[:, None] + columns[None, :], acc.to(grad_ptr.dtype.element_ty), mask=more[:, None] & inside[None, :])


def merge_buffers(
    buffers: BranchBuffers, out: Tensor, lse: Tensor, parts: Tensor, part_lses: Tensor, *, is_concurrent: bool = False, own: bool = False
) -> None:
    """Computes out (B, N, H, D), last stride 1, and lse (B, N, H), float32, from the flat buffers of all branches.

    ``out`` already holds the direct branch's result.

    Args:
        is_concurrent: run on a few multiprocessors alongside other work, instead of on all of them.
        own: leave each part with the zero keys of its own branch: out_b · e^(lse_b) / (e^(lse_b) + z_b).
    """
    assert not own or buffers.direct is None
    assert out.stride(-1) == 1 and lse.dtype is torch.float32
    strides = (*out.stride()[:3], *lse.stride())
    _launch(_merge_kernel, buffers, out, (out, lse, parts, part_lses), strides, is_concurrent, ZERO_KEYS=buffers.zero_keys, OWN=own)


def sum_buffers(buffers: BranchBuffers, grads: Sequence[Tensor], parts: Sequence[Tensor], *, is_concurrent: bool = False) -> None:
    """Adds the flat buffers of dq, dk and dv to ``grads`` (B, N, H, D), which hold the direct branch's shares.

    All three have equal strides, the last one 1. Sums are in float32.
    """
    first = grads[0]
    assert all(x.stride() == first.stride() and x.shape == first.shape for x in grads) and first.stride(-1) == 1
    _launch(_sum_kernel, buffers, first, (*grads, *parts), first.stride()[:3], is_concurrent)


def _launch(
    kernel: Any, buffers: BranchBuffers, x: Tensor, tensors: tuple[Tensor, ...], strides: tuple[int, ...], is_concurrent: bool,
    **flags: bool,
) -> None:  # fmt: skip
    B, N, H, D = x.shape
    assert N < _NO_END
    step = buffers.step
    elements, num_warps = (_MERGE_SIZES if kernel is _merge_kernel else _SUM_SIZES)[is_concurrent]
    rows = max(16, elements // triton.next_power_of_2(D))
    tiles = triton.cdiv(triton.cdiv(N, step), rows) * H
    with on_device(x.device):
        kernel[(min(tiles, _PROGRAMS_ASIDE) if is_concurrent else tiles, B)](
            *tensors,
            table(buffers, x.device),
            N,
            H,
            *strides,
            B,
            tiles,
            HEAD_DIM=D,
            BLOCK_D=triton.next_power_of_2(D),
            ROWS=rows,
            # one compiled kernel for all sequences that are no longer than a segment
            LENGTHS=tuple(w if w < N else _NO_END for w, _ in buffers.branches),
            RATES=tuple(r for _, r in buffers.branches),
            DIRECT=-1 if buffers.direct is None else buffers.direct,
            STEP=step,
            num_warps=num_warps,
            **flags,
        )
