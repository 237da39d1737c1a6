"""``merge.merge_onto`` as one Triton kernel, which reads every part once and writes every result once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.backends.hardware import on_device

# elements of out that a program merges
_TILE_ELEMENTS = 4096


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
