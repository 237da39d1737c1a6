"""Triton kernels of ``fused_layers.py``, for rows x (M, K): activation and norm of a row held in registers ("prepare"), dropout; rotation.

    a = x, act(x) or SiLU(gate) ∘ x,    x̂ = (a − mean) / std,    z = weight ∘ x̂ + bias

The forward writes z. The backward gets dz and writes z again and the gradients of x and gate. Both read each input once. In names,
"normal" means x̂; without a norm x̂ = a and z = a. An RMS norm has mean 0 and std √(avg(a²) + eps).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch

# threads of the backward per multiprocessor; its programs loop over tiles, so that partial column sums are few
_THREADS_PER_SM = 1024
# elements per program of the dropout kernel
_ELEMENTS = 1024


@triton.jit
def _gaussian_cdf(x, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (Φ(x), e^(−x²/2)), for GELU and its derivative.

    SHORT, for 16-bit inputs: Φ from formula 7.1.26 of Abramowitz and Stegun, with an absolute error below 1e-7. It needs no erf, only the
    exponential that is returned, too.
    """
    bell = tl.exp(-0.5 * x * x)
    if SHORT:
        t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
        series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
        tail = 0.5 * series * bell
        return tl.where(x < 0, tail, 1.0 - tail), bell
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)), bell


@triton.jit
def _activated(x, gate, ACTIVATION: tl.constexpr, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a."""
    if ACTIVATION == "gelu":
        cdf, _bell = _gaussian_cdf(x, SHORT)
        return x * cdf
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    if ACTIVATION == "swiglu":
        return x * gate * tl.sigmoid(gate)
    return x


# the number of rows follows the length, so it is not specialised
@triton.jit(do_not_specialize=["num_rows"])
def _prepare_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, bias_ptr, z_ptr, normal_ptr, stats_ptr, num_rows, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS_NORMAL: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (columns < K)[None, :]
    mask = (rows < num_rows)[:, None] & inside
    places = rows[:, None] * K + columns[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    # a tensor, whether or not it is used
    gate = x
    if ACTIVATION == "swiglu":
        gate = tl.load(gate_ptr + places, mask=mask, other=0.0).to(tl.float32)
    # from here on z is a, then x̂, then z
    z = _activated(x, gate, ACTIVATION, SHORT)
    if NORM != "none":
        mean = tl.zeros((ROWS,), dtype=tl.float32)
        if NORM == "layer":
            mean = tl.sum(z, axis=1) / K
            # the padding stays 0
            z = tl.where(inside, z - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(z * z, axis=1) / K + eps)
        z = z * rstd[:, None]
        if KEEPS_NORMAL:
            tl.store(normal_ptr + places, z.to(normal_ptr.dtype.element_ty), mask=mask)
        if HAS_WEIGHT:
            z = z * tl.load(weight_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            z = z + tl.load(bias_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
        # stats (2, M)
        tl.store(stats_ptr + rows, mean, mask=rows < num_rows)
        tl.store(stats_ptr + num_rows + rows, rstd, mask=rows < num_rows)
    tl.store(z_ptr + places, z.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _prepare_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, bias_ptr, stats_ptr, dz_ptr, z_ptr, dx_ptr, dgate_ptr, shares_ptr, num_rows, num_tiles,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, NEEDS_Z: tl.constexpr, HAS_DZ: tl.constexpr, IS_NORMAL: tl.constexpr,
    SHORT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    # a program's partial sums of dweight and dbias, over its rows; the caller adds those of all programs
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        places = rows[:, None] * K + columns[None, :]
        x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
        gate = x
        if ACTIVATION == "swiglu":
            gate = tl.load(gate_ptr + places, mask=mask, other=0.0).to(tl.float32)
        normal = _activated(x, gate, ACTIVATION, SHORT)
        if NORM != "none":
            rstd = tl.load(stats_ptr + num_rows + rows, mask=rows < num_rows, other=0.0)
            if not IS_NORMAL:
                mean = tl.load(stats_ptr + rows, mask=rows < num_rows, other=0.0)
                normal = tl.where(inside[None, :], (normal - mean[:, None]) * rstd[:, None], 0.0)
        if NEEDS_Z:
            z = normal
            if HAS_WEIGHT:
                z = z * weight[None, :]
            if HAS_BIAS:
                z = z + bias[None, :]
            tl.store(z_ptr + places, z.to(z_ptr.dtype.element_ty), mask=mask)
        if HAS_DZ:
            # da is dz, then dx̂, then da, then dx: da = (dx̂ − x̂·mean(dx̂·x̂) − mean(dx̂)) / std, of an RMS norm without the last mean
            da = tl.load(dz_ptr + places, mask=mask, other=0.0).to(tl.float32)
            if NORM != "none":
                # needs no exchange between threads: each holds its columns of all rows of the tile
                dweight += tl.sum(da * normal, axis=0)
                dbias += tl.sum(da, axis=0)
                if HAS_WEIGHT:
                    da = da * weight[None, :]
                # scaling or shifting a row does not change x̂: these components of the gradient are removed
                along = tl.sum(da * normal, axis=1) / K
                remaining = da - normal * along[:, None]
                if NORM == "layer":
                    remaining -= (tl.sum(da, axis=1) / K)[:, None]
                da = remaining * rstd[:, None]
            # dx may overwrite dz: a program has read its rows before it writes them
            if ACTIVATION == "gelu":
                cdf, bell = _gaussian_cdf(x, SHORT)
                da = da * (cdf + x * bell * 0.3989422804014327)
            if ACTIVATION == "relu":
                da = tl.where(x > 0, da, 0.0)
            if ACTIVATION == "silu":
                sigmoid = tl.sigmoid(x)
                da = da * sigmoid * (1.0 + x * (1.0 - sigmoid))
            if ACTIVATION == "swiglu":
                sigmoid = tl.sigmoid(gate)
                dgate = da * x * sigmoid * (1.0 + gate * (1.0 - sigmoid))
                tl.store(dgate_ptr + places, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
                da = da * gate * sigmoid
            tl.store(dx_ptr + places, da.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_DZ and NORM != "none":
        shares = shares_ptr + tl.program_id(0) * 2 * K + columns
        tl.store(shares, dweight, mask=inside)
        tl.store(shares + K, dbias, mask=inside)


def rows_launch(dtypes: Any, M: int, K: int, activation: str, norm: str, is_normal: bool, needs_z: bool, eps: float | None) -> KernelLaunch:
    """Returns the launch that prepares rows (M, K), or for ``eps=None`` that of its backward.

    Args:
        dtypes: of the launch's tensors, None for one that is absent. Forward: x, gate, weight, bias, z, x̂, statistics (2, M).
            Backward: x, gate, weight, bias, statistics, dz, z, dx, dgate; the launch takes one more, (programs, 2, K) float32, for each
            program's share of the gradients of weight and bias.
        is_normal: x̂ is saved in place of x, only without an activation: the forward writes it, and the backward's x is it.
        eps: of the norm, any number without one; None for the backward.
        needs_z: the backward writes z.
    """
    # the sixth is dz in a backward; in a forward it is x̂'s, and not read
    x_dtype, _, weight_dtype, bias_dtype, _, dz_dtype, *_ = dtypes
    # elements of a tile, which is one long row or several short ones; elements of a thread, more than 8 (16 bytes of bfloat16) to keep more
    # bytes in flight; least rows of a tile, for up to 4096 columns. By sweeps on an H200 with 45,682 rows of bfloat16. Forward: 42 µs for
    # 768 columns, 202 µs for 3072 with GELU (50 and 327 µs with 8 elements per thread). Backward: 103 and 669 µs; one row at a time, or no
    # prefetch, takes a fifth to a half longer
    is_backward = eps is None
    tile, per_thread, least_rows = (2048, 16, 2) if is_backward else (4096, 32, 1)
    block = triton.next_power_of_2(K)
    rows = max(least_rows if block <= 4096 else 1, tile // block)
    warps, tiles = min(32, max(4, block * rows // (32 * per_thread))), triton.cdiv(M, rows)
    constants = {
        "K": K, "BLOCK": block, "ROWS": rows, "ACTIVATION": activation, "NORM": norm, "HAS_WEIGHT": weight_dtype is not None,
        "HAS_BIAS": bias_dtype is not None, "SHORT": x_dtype.itemsize == 2,
    }  # fmt: skip
    if eps is not None:
        return KernelLaunch(_prepare_kernel, tiles, (M, eps), {**constants, "KEEPS_NORMAL": is_normal}, warps, dtypes=dtypes)
    constants |= {"NEEDS_Z": needs_z, "HAS_DZ": dz_dtype is not None, "IS_NORMAL": is_normal, "STAGES": 2}
    # 3: without a GPU, in Triton's interpreter
    processors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 3
    programs = min(tiles, processors * max(1, _THREADS_PER_SM // (32 * warps)))
    return KernelLaunch(_prepare_backward_kernel, programs, (M, tiles), constants, warps, dtypes=dtypes)


@triton.jit
def _keep(seed, places, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether elements are kept: by number ``place + 1`` of the SplitMix64 sequence (Steele, Lea, Flood 2014) that begins at ``seed``."""
    state = (places + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 33).to(tl.int64) >= THRESHOLD


# specialised on the number of elements: a multiple of 16, as it is for usual widths, makes loads wide
@triton.jit
def _dropped_kernel(  # type: ignore[no-untyped-def]
    y_ptr, x_ptr, seed_ptr, path_ptr, out_ptr, num_elements, per_sample, scale,
    THRESHOLD: tl.constexpr, HAS_X: tl.constexpr, HAS_PATH: tl.constexpr, IS_LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    mask = places < num_elements
    out = tl.load(y_ptr + places, mask=mask, other=0.0).to(tl.float32) * scale
    if THRESHOLD > 0:
        out = tl.where(_keep(tl.load(seed_ptr), places, THRESHOLD), out, 0.0)
    if HAS_PATH:
        # one 64-bit division per program: one per element would take longer than the memory accesses. ``beyond``: elements after the
        # start of the program's first sample, at most per_sample + BLOCK of them, which 32 bits hold unless IS_LONG
        first = start // per_sample
        beyond = places - first * per_sample
        if not IS_LONG:
            beyond = beyond.to(tl.int32)
        out = out * tl.load(path_ptr + first + beyond // per_sample, mask=mask, other=0.0)
    if HAS_X:
        out += tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)


def dropped_launch(dtypes: Any, count: int, samples: int, dropout: float) -> KernelLaunch:
    """Returns the launch that writes x (or 0) + path · dropout(y).

    Its contiguous tensors, and ``dtypes``: y (``count`` elements), x or None, seed, path (``samples``) or None, out. Each sample, an equal
    part of y, has a factor in path.
    """
    _, x_dtype, _, path_dtype, _ = dtypes
    per_sample = count // samples
    # a 31-bit hash below the threshold drops its element
    constants = {
        "THRESHOLD": int(dropout * 2**31), "HAS_X": x_dtype is not None, "HAS_PATH": path_dtype is not None,
        "IS_LONG": per_sample >= 2**31 - _ELEMENTS, "BLOCK": _ELEMENTS,
    }  # fmt: skip
    return KernelLaunch(_dropped_kernel, triton.cdiv(count, _ELEMENTS), (count, per_sample, 1 / (1 - dropout)), constants, dtypes=dtypes)


@triton.jit(do_not_specialize=["count", "length"])
def _rotated_kernel(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, count, length, sign, x_row, out_row,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # a head of a position, of all of them
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows, pair = places // HEADS, tl.arange(0, BLOCK)
    mask = (places < count)[:, None] & (pair < HALF)[None, :]
    columns = ((places % HEADS) * 2 * HALF)[:, None] + pair[None, :]
    of_table = ((rows % length) * HALF)[:, None] + pair[None, :]
    cos = tl.load(cos_ptr + of_table, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + of_table, mask=mask, other=0.0) * sign
    x = x_ptr + (rows * x_row)[:, None] + columns
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    # out may be x: a program has read its heads before it writes them
    out = out_ptr + (rows * out_row)[:, None] + columns
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


def rotated_launch(dtypes: Any, rows: int, length: int, heads: int, half: int, sign: float, x_row: int, out_row: int) -> KernelLaunch:
    """Returns the launch that rotates pairs (x_i, x_{i + half}) of ``heads`` heads in each of ``rows`` rows, which take positions 0 to
    ``length`` − 1 in turn.

    Its tensors, and ``dtypes``: x, cos and sin (length, half) in float32, out, which may be x. ``sign``: of the angles. ``x_row``,
    ``out_row``: elements from one row to the next; a row's heads are side by side.
    """
    block = triton.next_power_of_2(half)
    together = max(1, 2 * _ELEMENTS // block)
    constants = {"HEADS": heads, "HALF": half, "BLOCK": block, "ROWS": together}
    count = rows * heads
    return KernelLaunch(_rotated_kernel, triton.cdiv(count, together), (count, length, sign, x_row, out_row), constants, dtypes=dtypes)


def launch_of(make: Callable[..., KernelLaunch], tensors: Sequence[Any], *arguments: Any) -> KernelLaunch:
    """Returns what ``make``, one of the functions above, makes of the tensors' dtypes and its other arguments; remembers it."""
    return _launch_of(make, tensors[0].device, tuple([None if x is None else x.dtype for x in tensors]), *arguments)


@functools.lru_cache(1024)
def _launch_of(make: Callable[..., KernelLaunch], device: torch.device, *arguments: Any) -> KernelLaunch:
    # the compiled kernel that it keeps is loaded on this device
    with on_device(device):
        return make(*arguments)


def run(launch: KernelLaunch, *tensors: Any) -> None:
    """Launches a kernel on the device of the first tensor; for meta tensors it starts compiling for the current one."""
    device = tensors[0].device
    with on_device(device):
        launch(tensors, NO_DEVICE if device.type == "meta" else device.index)
