"""Triton kernels for block means and for the choice of blocks.

Rows are query blocks, columns key blocks. A row's columns are chosen without sorting, by a program that holds its scores in registers. The
program looks for the highest threshold such that the columns at or above it suffice: bit by bit, highest bit first, with a sum over the row
for each of the 32 bits. Among equal scores, the lower columns win. So exactly the requested number of blocks is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.engine.blocks.selection_grid import SHARE_BITS, Part

# positions that a program of ``_mean_kernel`` adds up at a time
_TILE = 32
# columns per warp of ``_choose_kernel``: their scores take 32 registers of each thread
_WARP_COLUMNS = 1024
# the limits of int32
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
# the order of a NaN, above that of infinity: it is kept and makes the result NaN, as in dense attention
_NAN_ORDER = tl.constexpr(0x7F800001)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "padding_stride"])
def _mean_kernel(  # type: ignore[no-untyped-def]
    x, ranges, padding, means, num_rows, num_heads, stride_b, stride_n, stride_h, padding_stride,
    PADDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the mean of x (B, N, H, D) over the positions [low, high) of one of ``ranges``, for one head, without padded positions."""
    # programs of all heads of the same positions follow each other: they are adjacent in memory
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
    """Whether the bit of each column is set in a row of words that starts at words + at; false where not inside."""
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
    """Writes the bits of the columns that one row of one batch entry and head keeps. The arguments are those of ``Part`` (``choose_rows``).

    Forced columns are always kept. Candidates are kept by score, until ``need`` is reached: in weights with MASS, else in columns.
    """
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
    score_bits = score.to(tl.int32, bitcast=True)
    # the scores as integers of the same order; −0 counts as 0
    order = tl.where(score_bits < 0, score_bits ^ _HIGHEST, score_bits)
    order = tl.where(score == 0, 0, order)
    order = tl.where(score != score, _NAN_ORDER, order)
    order = tl.where(candidate, order, _LOWEST)
    if MASS:
        weight = tl.load(weights + at, mask=column < num_scored, other=0).to(tl.int64)
        forced_weight = tl.sum(tl.where(forced, weight, 0), 0)
        total = forced_weight + tl.sum(tl.where(candidate, weight, 0), 0)
        wanted = (total * share + ((1 << SHARE_BITS) - 1)) >> SHARE_BITS
        weight = tl.where(candidate, weight, 0)
        need = tl.maximum(wanted - forced_weight, 0)
    else:
        weight = candidate.to(tl.int32)
        need = tl.load(budget + batch * budget_stride_b + head * budget_stride_h + row) - tl.sum(forced.to(tl.int32), 0)
        need = tl.minimum(tl.maximum(need, 0), tl.sum(weight, 0))
    # built in unsigned order, which flips the sign bit of the orders
    threshold = tl.zeros((), tl.int32)
    bit = tl.full((), 1, tl.int32)
    for index in range(32):
        trial = threshold | (bit << (31 - index))
        # other columns are below every threshold tried, so counting candidates needs no weights in registers
        reached = order >= (trial ^ _LOWEST)
        found = tl.sum(tl.where(reached, weight, 0), 0) if MASS else tl.sum(reached.to(tl.int32), 0)
        threshold = tl.where(found >= need, trial, threshold)
    threshold ^= _LOWEST
    # what is still needed at the threshold itself, from the lowest columns on
    need -= tl.sum(tl.where(order > threshold, weight, 0), 0)
    tied = tl.where(order == threshold, weight, 0)
    chosen = (order > threshold) | ((order == threshold) & (tl.cumsum(tied, 0) - tied < need))
    taken = (forced | (chosen & candidate)).to(tl.int32) << (column % 32)
    words = tl.sum(tl.reshape(taken, (COLUMNS // 32, 32)), 1)
    word = tl.arange(0, COLUMNS // 32)
    target = kept + group.to(tl.int64) * kept_stride_g + row.to(tl.int64) * kept_stride_r
    tl.store(target + word, words, mask=word < num_words)


def block_means(x: Tensor, ranges: Tensor, padding: Tensor | None = None) -> Tensor:
    """Computes ``selection.block_means``, reading each position once and in place. The last stride of x (B, N, H, D) must be 1."""
    B, _, H, D = x.shape
    rows = ranges.shape[1]
    means = x.new_empty((B, H, rows, D), dtype=torch.float32)
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
    """Does what ``selection.choose_rows`` does.

    Args:
        kept: (B, H, rows, words) int32, is written; batch and heads must fold into one dimension.
        scores: (B, H, rows, width) float32, contiguous.
        weights: (B, H, rows, width) int32, contiguous; None to count blocks.
        num_columns: columns of the document.
        share: of the weights' sum, in units of 2**-SHARE_BITS.
    """
    B, H, rows, width = scores.shape
    assert scores.is_contiguous() and (weights is None or weights.is_contiguous()) and kept.stride(0) == H * kept.stride(1)
    tables = (part.always, part.within, part.real)
    # the kernel has one stride for the rows of all tables
    strides = {x.stride(-2) for x in tables if x is not None}
    assert len(strides) <= 1 and all(x is None or x.stride(-1) == 1 for x in tables)
    columns = max(32, triton.next_power_of_2(num_columns))
    head_strides = [0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (part.always, part.within)]
    with torch.cuda.device_of(scores):
        _choose_kernel[(B * H * rows,)](
            # a tensor that is not read stands for one that is missing
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
