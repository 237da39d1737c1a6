"""``merge.merge_onto``, ``add_sinks_`` and ``sinks_gradient`` as Triton kernels, which read and write every element once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.backends.hardware import on_device

# elements of out that a program merges
_TILE_ELEMENTS = 4096
# elements of out that a program gives sinks to, or reads for their gradient
_SIZE = 8192


@triton.jit
def merged_weights(lse, part_lse):  # type: ignore[no-untyped-def]
    """Returns (merged lse, weight, part_weight), as ``merge.merge_weights`` does. Two empty parts have zero weights and stay empty."""
    high = tl.maximum(lse, part_lse)
    # of two empty parts: 0 avoids −inf − (−inf) = NaN, and a total of 1 below 0/0
    high = tl.where(high == -float("inf"), 0.0, high)
    weight, part_weight = tl.exp(lse - high), tl.exp(part_lse - high)
    total = weight + part_weight
    merged = tl.where(total == 0.0, -float("inf"), high + tl.log(tl.where(total == 0.0, 1.0, total)))
    total = tl.where(total == 0.0, 1.0, total)
    return merged, weight / total, part_weight / total


# not specialised on these, which change with the length: a kernel would be compiled for each. lse is stored as (batch, heads, length), so
# its strides are among them
_VARYING = ["num_rows", *(f"{x}_stride_{axis}" for x in ("lse", "part_lse") for axis in "plg")]


@triton.jit(do_not_specialize=_VARYING)
def _onto_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, num_rows,
    out_stride_p, out_stride_l, out_stride_g, lse_stride_p, lse_stride_l, lse_stride_g,
    part_out_stride_p, part_out_stride_l, part_out_stride_g, part_lse_stride_p, part_lse_stride_l, part_lse_stride_g,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # problems and rows are both in the first grid dimension, since the others are limited to 65,535; addresses have 64 bits, since rows of
    # a dilated view may be gigabytes apart
    tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, problem = tl.program_id(1).to(tl.int64), (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_rows
    lse_at = lse_ptr + problem * lse_stride_p + head * lse_stride_g + rows * lse_stride_l
    part_lse_at = part_lse_ptr + problem * part_lse_stride_p + head * part_lse_stride_g + rows * part_lse_stride_l
    lse = tl.load(lse_at, mask=inside, other=-float("inf"))
    part_lse = tl.load(part_lse_at, mask=inside, other=-float("inf"))
    merged, weight, part_weight = merged_weights(lse, part_lse)
    tile = inside[:, None] & (columns < HEAD_DIM)[None, :]
    out_at = out_ptr + problem * out_stride_p + head * out_stride_g + rows[:, None] * out_stride_l + columns[None, :]
    part_out_at = (
        part_out_ptr + problem * part_out_stride_p + head * part_out_stride_g + rows[:, None] * part_out_stride_l + columns[None, :]
    )
    out = tl.load(out_at, mask=tile, other=0.0).to(tl.float32) * weight[:, None]
    out += tl.load(part_out_at, mask=tile, other=0.0).to(tl.float32) * part_weight[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_at, merged, mask=inside)


def merge_onto(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges into out and lse in place. out, part_out (problems P, rows L, heads G, D) have last stride 1; lse,
    part_lse (P, L, G) are float32."""
    P, L, G, D = out.shape
    assert out.stride(-1) == 1 and part_out.stride(-1) == 1
    block = triton.next_power_of_2(D)
    rows = max(1, _TILE_ELEMENTS // block)
    with on_device(out.device):
        _onto_kernel[(triton.cdiv(L, rows) * P, G)](
            out, lse, part_out, part_lse, L, *out.stride()[:3], *lse.stride(), *part_out.stride()[:3], *part_lse.stride(),
            HEAD_DIM=D, BLOCK_D=block, ROWS=rows,
        )  # fmt: skip


@triton.jit
def _place(num_rows, num_heads, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(batch entry, rows, head) of this program. Heads come first: programs that run at the same time then share whole rows of out."""
    tile, tiles, head = tl.program_id(0) // num_heads, tl.cdiv(num_rows, ROWS), tl.program_id(0) % num_heads
    return (tile // tiles).to(tl.int64), (tile % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64), head.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _add_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, sinks_ptr, num_rows, num_heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    batch, rows, head = _place(num_rows, num_heads, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_rows
    lse_at = lse_ptr + (batch * num_heads + head) * num_rows + rows
    lse = tl.load(lse_at, mask=inside, other=-float("inf"))
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    merged, share, _ = merged_weights(lse, sink)
    out_at = out_ptr + ((batch * num_rows + rows[:, None]) * num_heads + head) * HEAD_DIM + columns[None, :]
    tile = inside[:, None] & (columns < HEAD_DIM)[None, :]
    out = tl.load(out_at, mask=tile, other=0.0).to(tl.float32) * share[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_at, merged, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _gradient_kernel(  # type: ignore[no-untyped-def]
    dout_ptr, dlse_ptr, out_ptr, lse_ptr, sinks_ptr, partial_ptr, num_rows, num_heads, dout_stride_b, dout_stride_n, dout_stride_h,
    dout_stride_d, dlse_stride_b, dlse_stride_h, dlse_stride_n,
    HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, rows, head = _place(num_rows, num_heads, ROWS)
    columns = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = rows < num_rows
    tile = inside[:, None] & (columns < HEAD_DIM)[None, :]
    out_at = out_ptr + ((batch * num_rows + rows[:, None]) * num_heads + head) * HEAD_DIM + columns[None, :]
    dout_at = dout_ptr + batch * dout_stride_b + head * dout_stride_h + rows[:, None] * dout_stride_n + columns[None, :] * dout_stride_d
    out, dout = tl.load(out_at, mask=tile, other=0.0).to(tl.float32), tl.load(dout_at, mask=tile, other=0.0).to(tl.float32)
    row_gradient = -tl.sum(out * dout, axis=1)
    if HAS_DLSE:
        row_gradient += tl.load(dlse_ptr + batch * dlse_stride_b + head * dlse_stride_h + rows * dlse_stride_n, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + (batch * num_heads + head) * num_rows + rows, mask=inside, other=-float("inf"))
    weight = tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - lse)
    # a row with lse −inf has neither keys nor a sink
    total = tl.sum(tl.where(lse == -float("inf"), 0.0, weight * row_gradient), axis=0)
    tl.store(partial_ptr + tl.program_id(0), total)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """See ``merge.add_sinks_``; lse is float32."""
    B, N, H, D = out.shape
    assert out.is_contiguous() and lse.is_contiguous()
    block, rows = _tile(N, D)
    with on_device(out.device):
        _add_kernel[(triton.cdiv(N, rows) * B * H,)](out, lse, sinks.contiguous(), N, H, HEAD_DIM=D, BLOCK_D=block, ROWS=rows)


def sinks_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """See ``merge.sinks_gradient``; lse and dlse are float32. The sums repeat bit for bit."""
    B, N, H, D = out.shape
    assert out.is_contiguous() and lse.is_contiguous()
    block, rows = _tile(N, D)
    partial = lse.new_empty((triton.cdiv(N, rows) * B, H))
    with on_device(out.device):
        _gradient_kernel[(partial.numel(),)](
            dout, lse if dlse is None else dlse, out, lse, sinks.contiguous(), partial, N, H, *dout.stride(),
            *(0, 0, 0) if dlse is None else dlse.stride(), HAS_DLSE=dlse is not None, HEAD_DIM=D, BLOCK_D=block, ROWS=rows,
        )  # fmt: skip
    return partial.sum(0).to(sinks.dtype)


def _tile(num_rows: int, head_dim: int) -> tuple[int, int]:
    """Returns the padded head dim and the rows of a program, one of two sizes so that few kernels are compiled."""
    block = triton.next_power_of_2(head_dim)
    return block, _SIZE // block if num_rows > 16 else 16
