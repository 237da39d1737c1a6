"""Quantisation to 8-bit floats (e4m3: 4 exponent and 3 mantissa bits, largest number 448), one scale per problem and group of heads.

    y = round((x − c) · 448 / amax),    descale = amax / 448,    mean = avg(x − y · descale),    x ≈ mean + y · descale

c is each channel's average over the rows, or 0. Removing a constant does not change the attention: softmax is invariant to one in its
scores, and one in the values passes through. So ``restore_`` adds scale·q·mean(k) to lse and mean(v) to out, in float32. The
returned mean is that of y *as rounded*: after a shift, rounding may be biased to one side, and an error common to all rows adds up.

Only finite elements enter c and amax. A NaN or an infinity becomes e4m3's NaN, so it is not lost and does not affect a scale.

Shape letters: P problems, L rows, G heads, K scales per problem (groups of G/K neighbouring heads), D head dim.

Quantising reads strided views in place, twice: first for the range of every channel, then to write y. (Doing both reads in one program, in
the hope that the second hits L2, took 3 to 8 % longer on an H200 with 2048 rows per problem.) A row of a kernel is a position and a head of
the scale's group. Rows are split into chunks, with one program per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# the reciprocal of a smaller amax is not representable in float32; such values become zeros
SMALLEST_AMAX = 1e-30
# elements per tile, 32 per thread; three accumulators of that size are held in registers
_TILE = 4096
_WARPS = 4
_CHUNK_TILES = 16


class Quantised(NamedTuple):
    """y (P, L, G, D) e4m3, contiguous · descale (P, K) float32 · mean (P, K, D) float32, None where c is 0."""

    y: Tensor
    descale: Tensor
    mean: Tensor | None


@triton.jit
def _range_kernel(  # type: ignore[no-untyped-def]
    x, ranges, s_P, s_L, s_G, rows, chunk_rows, chunks, K,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes ranges (P·K, chunks, 3, D): sum, largest and smallest finite element of each channel in each chunk."""
    chunk = tl.program_id(0) % chunks
    scale = tl.program_id(0) // chunks
    # 64 bits: a view of a long sequence spans more than 2^31 elements
    base = x + (scale // K).to(tl.int64) * s_P + (scale % K).to(tl.int64) * GROUP * s_G
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    high = tl.full((ROWS, BLOCK_D), float("-inf"), tl.float32)
    low = tl.full((ROWS, BLOCK_D), float("inf"), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = (row // GROUP).to(tl.int64) * s_L + (row % GROUP).to(tl.int64) * s_G
        inside = (row < last)[:, None] & (d < D)[None, :]
        value = tl.load(base + offset[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        taken = inside & (tl.abs(value) < float("inf"))
        total += tl.where(taken, value, 0.0)
        high = tl.maximum(high, tl.where(taken, value, float("-inf")))
        low = tl.minimum(low, tl.where(taken, value, float("inf")))
    target = ranges + tl.program_id(0).to(tl.int64) * 3 * D + d
    tl.store(target, tl.sum(total, 0), mask=d < D)
    tl.store(target + D, tl.max(high, 0), mask=d < D)
    tl.store(target + 2 * D, tl.min(low, 0), mask=d < D)


@triton.jit
def _scale_kernel(  # type: ignore[no-untyped-def]
    ranges, factor, descale, mean, rows, chunks, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    CENTRE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes factor and descale (P·K), and mean (P·K, D), from the chunks' ranges."""
    scale = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    high = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    low = tl.full((BLOCK_D,), float("inf"), tl.float32)
    for start in range(0, chunks, BLOCK_C):
        chunk = start + tl.arange(0, BLOCK_C)
        at = ranges + (scale.to(tl.int64) * chunks + chunk)[:, None] * (3 * D) + d[None, :]
        inside = (chunk < chunks)[:, None] & (d < D)[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
        high = tl.maximum(high, tl.max(tl.load(at + D, mask=inside, other=float("-inf")), 0))
        low = tl.minimum(low, tl.min(tl.load(at + 2 * D, mask=inside, other=float("inf")), 0))
    centre = tl.zeros((BLOCK_D,), tl.float32)
    if CENTRE:
        centre = total / rows
        tl.store(mean + scale * D + d, centre, mask=d < D)
    # a channel without a finite element has high < low
    size = tl.where(high < low, 0.0, tl.maximum(high - centre, centre - low))
    amax = tl.maximum(tl.max(size, 0), SMALLEST)
    # the quotient must be correctly rounded: an approximate one moves every tie of x to the same side
    tl.store(factor + scale, tl.div_rn(tl.zeros_like(amax) + LARGEST, amax))
    tl.store(descale + scale, tl.div_rn(amax, tl.zeros_like(amax) + LARGEST))


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    x, y, sums, factor, mean, s_P, s_L, s_G, rows, chunk_rows, chunks, K, LARGEST: tl.constexpr, CENTRE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes y, and with CENTRE sums (P·K, chunks, D) of y as rounded."""
    chunk = tl.program_id(0) % chunks
    scale = tl.program_id(0) // chunks
    problem, group = (scale // K).to(tl.int64), (scale % K).to(tl.int64)
    base = x + problem * s_P + group * GROUP * s_G
    # y is contiguous (P, L, G, D), so L · G · D = rows · K · D
    target = y + (problem * rows * K + group * GROUP) * D
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    d = tl.arange(0, BLOCK_D)
    by = tl.load(factor + scale)
    centre = tl.zeros((BLOCK_D,), tl.float32)
    if CENTRE:
        centre = tl.load(mean + scale * D + d, mask=d < D, other=0.0)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        position, head = (row // GROUP).to(tl.int64), (row % GROUP).to(tl.int64)
        inside = (row < last)[:, None] & (d < D)[None, :]
        value = tl.load(base + (position * s_L + head * s_G)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum((value - centre[None, :]) * by, -LARGEST), LARGEST)
        rounded = scaled.to(y.dtype.element_ty)
        finite = tl.abs(value) < float("inf")
        if CENTRE:
            total += tl.where(inside & finite, rounded.to(tl.float32), 0.0)
        rounded = tl.where(finite, scaled, float("nan")).to(y.dtype.element_ty)
        tl.store(target + (position * (K * GROUP * D) + head * D)[:, None] + d[None, :], rounded, mask=inside)
    if CENTRE:
        tl.store(sums + tl.program_id(0).to(tl.int64) * D + d, tl.sum(total, 0), mask=d < D)


@triton.jit
def _restore_kernel(  # type: ignore[no-untyped-def]
    q, out, lse, k_mean, v_mean, s_P, s_L, s_G, rows, chunk_rows, chunks, K, softmax_scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) % chunks
    scale = tl.program_id(0) // chunks
    problem, group = (scale // K).to(tl.int64), (scale % K).to(tl.int64)
    base = q + problem * s_P + group * GROUP * s_G
    target = out + (problem * rows * K + group * GROUP) * D
    length = rows // GROUP
    # lse is contiguous (P, G, L)
    lse_base = lse + (problem * K + group) * rows
    d = tl.arange(0, BLOCK_D)
    of_k = tl.load(k_mean + scale * D + d, mask=d < D, other=0.0) * softmax_scale
    of_v = tl.load(v_mean + scale * D + d, mask=d < D, other=0.0)
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        position, head = (row // GROUP).to(tl.int64), (row % GROUP).to(tl.int64)
        inside = (row < last)[:, None] & (d < D)[None, :]
        query = tl.load(base + (position * s_L + head * s_G)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        lse_at = lse_base + head * length + position
        tl.store(lse_at, tl.load(lse_at, mask=row < last, other=0.0) + tl.sum(query * of_k[None, :], 1), mask=row < last)
        out_at = target + (position * (K * GROUP * D) + head * D)[:, None] + d[None, :]
        value = tl.load(out_at, mask=inside, other=0.0).to(tl.float32) + of_v[None, :]
        tl.store(out_at, value.to(out.dtype.element_ty), mask=inside)


def quantise(x: Tensor, num_scales: int, *, centre: bool = False, dtype: torch.dtype = E4M3) -> Quantised:
    """Quantises a view x (P, L, G, D), last stride 1, to 8 bits; ``centre`` subtracts the average.

    ``dtype=torch.float32`` omits the rounding, for tests in Triton's interpreter, which rounds to e4m3 wrongly where a mantissa carries.
    """
    P, _, _, D = x.shape
    programs, cut, shape = _cut(x, num_scales)
    rows, _, chunks = cut
    problems = P * num_scales

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=x.device)

    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    ranges, factor, descale, mean = floats(problems, chunks, 3, D), floats(problems), floats(problems, 1), floats(problems, D)
    reduce = {"D": D, "BLOCK_D": shape["BLOCK_D"], "BLOCK_C": max(1, _TILE // shape["BLOCK_D"])}
    sums = floats(problems, chunks, D) if centre else ranges
    # Triton launches on the current device, which may differ from x's
    with torch.cuda.device_of(x):
        _range_kernel[programs](x, ranges, *x.stride()[:3], *cut, num_scales, **shape)
        _scale_kernel[(problems,)](ranges, factor, descale, mean, rows, chunks, E4M3_MAX, SMALLEST_AMAX, centre, **reduce)
        _write_kernel[programs](x, y, sums, factor, mean, *x.stride()[:3], *cut, num_scales, E4M3_MAX, centre, **shape)
        if centre:
            mean.addcmul_(sums.sum(1), descale, value=-1 / rows)
    return Quantised(y, descale.view(P, num_scales), mean.view(P, num_scales, D) if centre else None)


def restore_(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, scale: float) -> None:
    """Adds to out (P, L, G, D) and lse (P, G, L), both contiguous, in place, what centring removed; sums in float32."""
    assert out.is_contiguous() and lse.is_contiguous()
    num_scales = k_mean.shape[1]
    programs, cut, shape = _cut(q, num_scales)
    with torch.cuda.device_of(q):
        _restore_kernel[programs](q, out, lse, k_mean, v_mean, *q.stride()[:3], *cut, num_scales, scale, **shape)


def _cut(x: Tensor, num_scales: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Returns (grid, (rows, rows per chunk, chunks), constants) of a launch over x."""
    P, L, G, D = x.shape
    group = G // num_scales
    rows = L * group
    block_d = triton.next_power_of_2(D)
    tile_rows = max(1, _TILE // block_d)
    chunk_rows = tile_rows * _CHUNK_TILES
    chunks = triton.cdiv(rows, chunk_rows)
    shape = {"GROUP": group, "D": D, "ROWS": tile_rows, "BLOCK_D": block_d, "num_warps": _WARPS}
    return (P * num_scales * chunks,), (rows, chunk_rows, chunks), shape
