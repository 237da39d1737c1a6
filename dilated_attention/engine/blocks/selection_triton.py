"""Triton kernels for block means and for the choice of blocks.

A row's blocks are chosen without sorting. The threshold score that suffices is built bit by bit, highest bit first, by 32 sums over the
row, which a program holds in registers. Among equal scores, the lower columns win. So exactly the requested number of blocks is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.engine.blocks.selection_grid import SHARE_BITS, Part

# positions that a program adds up at a time
_TILE = 32
# columns per warp: 32 registers per thread for their scores
_WARP_COLUMNS = 1024
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
# above the key of infinity: a NaN is kept and makes the result NaN, as in dense attention
_NAN_KEY = tl.constexpr(0x7F800001)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "padding_stride"])
def _mean_kernel(  # type: ignore[no-untyped-def]
    x, ranges, padding, means, num_rows, num_heads, stride_b, stride_n, stride_h, padding_stride,
    PADDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # heads of the same positions are adjacent in memory
    head, row, batch = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads, tl.program_id(1)
    low, high = tl.load(ranges + row), tl.load(ranges + num_rows + row)
    d = tl.arange(0, BLOCK_D)
    base = x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    total = tl.zeros((TILE, BLOCK_D), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    for start in range(low, high, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < high
        if PADDED:
            inside &= tl.load(padding + batch.to(tl.int64) * padding_stride + at, mask=inside, other=1) == 0
        value = tl.load(base + at.to(tl.int64)[:, None] * stride_n + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        total += value.to(tl.float32)
        count += inside.to(tl.int32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    target = means + ((batch.to(tl.int64) * num_heads + head) * num_rows + row) * D
    tl.store(target + d, mean, mask=d < D)


@triton.jit
def _has_bit(words, at, column, inside):  # type: ignore[no-untyped-def]
    return ((tl.load(words + at + column // 32, mask=inside, other=0) >> (column % 32)) & 1) > 0


_VARYING = [
    "num_rows", "num_heads", "width", "num_words", "kept_stride_g", "kept_stride_r", "budget_stride_b", "budget_stride_h", "always_stride",
    "within_stride", "bits_stride", "share",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def _choose_kernel(  # type: ignore[no-untyped-def]
    kept, scores, weights, own_low, own_high, scored, seen, budget, always, within, real,
    num_rows, num_heads, width, num_words, kept_stride_g, kept_stride_r, budget_stride_b, budget_stride_h, always_stride, within_stride,
    bits_stride, share,
    OWN: tl.constexpr, NEAR: tl.constexpr, ALWAYS: tl.constexpr, WITHIN: tl.constexpr, REAL: tl.constexpr, MASS: tl.constexpr,
    SHARE_BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, row = tl.program_id(0) // num_rows, tl.program_id(0) % num_rows
    batch, head = group // num_heads, group % num_heads
    column = tl.arange(0, COLUMNS)
    num_scored = tl.load(scored + row)
    exists = column < tl.load(seen + row)
    if REAL:
        exists &= _has_bit(real, batch.to(tl.int64) * bits_stride, column, exists)
    allowed = exists
    if WITHIN:
        allowed &= _has_bit(within, head.to(tl.int64) * within_stride + row.to(tl.int64) * bits_stride, column, exists)
    forced = allowed & (column >= num_scored)
    if OWN:
        forced |= allowed & (column >= tl.load(own_low + row)) & (column < tl.load(own_high + row))
    if NEAR:
        forced |= allowed & (column == tl.min(tl.where(exists, column, COLUMNS), 0))
    if ALWAYS:
        forced |= exists & _has_bit(always, head.to(tl.int64) * always_stride + row.to(tl.int64) * bits_stride, column, exists)
    candidate = allowed & (column < num_scored) & (forced == 0)

    at = (group.to(tl.int64) * num_rows + row) * width + column
    score = tl.load(scores + at, mask=column < num_scored, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _HIGHEST, bits)
    key = tl.where(score == 0, 0, key)
    key = tl.where(score != score, _NAN_KEY, key)
    key = tl.where(candidate, key, _LOWEST)
    if MASS:
        weight = tl.load(weights + at, mask=column < num_scored, other=0).to(tl.int64)
        taken_before = tl.sum(tl.where(forced, weight, 0), 0)
        total = taken_before + tl.sum(tl.where(candidate, weight, 0), 0)
        wanted = (total * share + ((1 << SHARE_BITS) - 1)) >> SHARE_BITS
        weight = tl.where(candidate, weight, 0)
        need = tl.maximum(wanted - taken_before, 0)
    else:
        weight = candidate.to(tl.int32)
        need = tl.load(budget + batch * budget_stride_b + head * budget_stride_h + row) - tl.sum(forced.to(tl.int32), 0)
        need = tl.minimum(tl.maximum(need, 0), tl.sum(weight, 0))
    # in unsigned order: the largest threshold such that the scores at or above it suffice
    limit = tl.zeros((), tl.int32)
    bit = tl.full((), 1, tl.int32)
    for index in range(32):
        trial = limit | (bit << (31 - index))
        # keys of non-candidates are all below the threshold, so counting blocks needs no weights in registers
        reached = key >= (trial ^ _LOWEST)
        above = tl.sum(tl.where(reached, weight, 0), 0) if MASS else tl.sum(reached.to(tl.int32), 0)
        limit = tl.where(above >= need, trial, limit)
    limit ^= _LOWEST
    need -= tl.sum(tl.where(key > limit, weight, 0), 0)
    tied = tl.where(key == limit, weight, 0)
    chosen = (key > limit) | ((key == limit) & (tl.cumsum(tied, 0) - tied < need))
    taken = (forced | (chosen & candidate)).to(tl.int32) << (column % 32)
    words = tl.sum(tl.reshape(taken, (COLUMNS // 32, 32)), 1)
    word = tl.arange(0, COLUMNS // 32)
    target = kept + group.to(tl.int64) * kept_stride_g + row.to(tl.int64) * kept_stride_r
    tl.store(target + word, words, mask=word < num_words)


def block_means(x: Tensor, ranges: Tensor, padding: Tensor | None = None) -> Tensor:
    """Same as ``selection.block_means``, reading each position once and in place. x (B, N, H, D) has any strides, the last one 1."""
    B, _, H, D = x.shape
    rows = ranges.shape[1]
    means = torch.empty((B, H, rows, D), dtype=torch.float32, device=x.device)
    if not means.numel():
        return means
    if padding is not None and padding.stride(1) != 1:
        padding = padding.contiguous()
    assert x.stride(3) == 1 and ranges.is_contiguous()
    # Triton launches on the current device, which may not be x's
    with torch.cuda.device_of(x):
        _mean_kernel[(rows * H, B)](
            x, ranges, ranges if padding is None else padding.view(torch.uint8), means, rows, H, *x.stride()[:3],
            0 if padding is None else padding.stride(0),
            PADDED=padding is not None, D=D, BLOCK_D=triton.next_power_of_2(D), TILE=_TILE,
        )  # fmt: skip
    return means


def choose_rows(kept: Tensor, scores: Tensor, weights: Tensor | None, part: Part, num_columns: int, share: int) -> None:
    """Same as ``selection.choose_rows``. scores float32, weights int32 (B, H, rows, width), contiguous; kept (B, H, rows, words)."""
    B, H, rows, width = scores.shape
    assert scores.is_contiguous() and (weights is None or weights.is_contiguous()) and kept.stride(0) == H * kept.stride(1)
    tables = (part.always, part.within, part.real)
    # all tables must have the same number of words per row
    strides = {x.stride(-2) for x in tables if x is not None}
    assert len(strides) <= 1 and all(x is None or x.stride(-1) == 1 for x in tables)
    columns = max(32, triton.next_power_of_2(num_columns))
    head_strides = [0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (part.always, part.within)]
    with torch.cuda.device_of(scores):
        _choose_kernel[(B * H * rows,)](
            kept, scores, scores if weights is None else weights, part.own[0], part.own[1], part.scored, part.seen,
            kept if part.budget is None else part.budget, *(kept if x is None else x for x in tables),
            rows, H, width, min(kept.shape[-1], columns // 32), kept.stride(1), kept.stride(2),
            *(0 if part.budget is None or part.budget.shape[i] == 1 else part.budget.stride(i) for i in (0, 1)), *head_strides,
            strides.pop() if strides else 0,
            share,
            OWN=part.near or part.always is None, NEAR=part.near, ALWAYS=part.always is not None, WITHIN=part.within is not None,
            REAL=part.real is not None, MASS=weights is not None, SHARE_BITS=SHARE_BITS, COLUMNS=columns,
            num_warps=min(32, max(1, columns // _WARP_COLUMNS)),
        )  # fmt: skip
