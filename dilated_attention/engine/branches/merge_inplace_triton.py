"""``merge.merge_onto`` and ``merge.add_up`` as one Triton kernel each, which reads every part once and writes every result once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dilated_attention.backends.block_lists import on_device

# elements of out that a program takes at a time
_SIZE = 4096


@triton.jit
def _onto_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, num_rows,
    out_stride_p, out_stride_l, out_stride_g, lse_stride_p, lse_stride_l, lse_stride_g,
    part_stride_p, part_stride_l, part_stride_g, part_lse_stride_p, part_lse_stride_l, part_lse_stride_g,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # problems and rows share the only grid dimension without a small limit; addresses have 64 bits, since rows of a dilated view may be
    # gigabytes apart
    tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, problem = tl.program_id(1).to(tl.int64), (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_rows
    lse_at = lse_ptr + problem * lse_stride_p + head * lse_stride_g + rows * lse_stride_l
    part_lse_at = part_lse_ptr + problem * part_lse_stride_p + head * part_lse_stride_g + rows * part_lse_stride_l
    lse = tl.load(lse_at, mask=inside, other=-float("inf"))
    part_lse = tl.load(part_lse_at, mask=inside, other=-float("inf"))
    high = tl.maximum(lse, part_lse)
    high = tl.where(high == -float("inf"), 0.0, high)
    weight, part_weight = tl.exp(lse - high), tl.exp(part_lse - high)
    total = weight + part_weight
    # two empty parts have zero weights and stay empty
    merged = tl.where(total == 0.0, -float("inf"), high + tl.log(tl.where(total == 0.0, 1.0, total)))
    total = tl.where(total == 0.0, 1.0, total)
    tile = inside[:, None] & (columns < HEAD_DIM)[None, :]
    out_at = out_ptr + problem * out_stride_p + head * out_stride_g + rows[:, None] * out_stride_l + columns[None, :]
    part_at = part_ptr + problem * part_stride_p + head * part_stride_g + rows[:, None] * part_stride_l + columns[None, :]
    out = tl.load(out_at, mask=tile, other=0.0).to(tl.float32) * (weight / total)[:, None]
    out += tl.load(part_at, mask=tile, other=0.0).to(tl.float32) * (part_weight / total)[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_at, merged, mask=inside)


def merge_onto(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges into out and lse in place. out, part (P, L, G, D) have last stride 1; lse, part_lse (P, L, G) are float32."""
    P, L, G, D = out.shape
    assert out.stride(-1) == 1 and part.stride(-1) == 1
    block = triton.next_power_of_2(D)
    rows = max(1, _SIZE // block)
    with on_device(out.device):
        _onto_kernel[(triton.cdiv(L, rows) * P, G)](
            out, lse, part, part_lse, L, *out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride(),
            HEAD_DIM=D, BLOCK_D=block, ROWS=rows,
        )  # fmt: skip


@triton.jit
def _add_up_kernel(  # type: ignore[no-untyped-def]
    dk_ptr, dv_ptr, own_ptr, other_ptr, came_ptr, num_rows, num_heads, num_batches, num_came,
    dk_stride_b, dk_stride_l, dk_stride_g, dv_stride_b, dv_stride_l, dv_stride_g,
    NUM_OWN: tl.constexpr, WRITES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(0) // tiles % num_heads
    batch = tl.program_id(0) // tiles // num_heads
    which = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    tile = (rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    # layout (rows, 2, B, heads, D), contiguous
    row_size = 2 * num_batches * num_heads * HEAD_DIM
    at = rows[:, None] * row_size + ((which * num_batches + batch) * num_heads + head) * HEAD_DIM + columns[None, :]
    if which == 0:
        grad = dk_ptr + batch.to(tl.int64) * dk_stride_b + head.to(tl.int64) * dk_stride_g + rows[:, None] * dk_stride_l
    else:
        grad = dv_ptr + batch.to(tl.int64) * dv_stride_b + head.to(tl.int64) * dv_stride_g + rows[:, None] * dv_stride_l
    grad += columns[None, :]
    total = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    if not WRITES:
        total += tl.load(grad, mask=tile, other=0.0).to(tl.float32)
    if NUM_OWN > 0:
        total += tl.load(own_ptr + at, mask=tile, other=0.0).to(tl.float32)
    if NUM_OWN > 1:
        total += tl.load(other_ptr + at, mask=tile, other=0.0).to(tl.float32)
    # not num_rows.to(): Triton turns an argument of 1 into a constant, which has no .to()
    size = (tl.zeros((), dtype=tl.int64) + num_rows) * row_size
    for index in range(num_came):
        total += tl.load(came_ptr + index * size + at, mask=tile, other=0.0).to(tl.float32)
    tl.store(grad, total.to(dk_ptr.dtype.element_ty), mask=tile)


def add_up(dk: torch.Tensor, dv: torch.Tensor, own: Sequence[torch.Tensor], came: torch.Tensor | None, *, writes: bool) -> None:
    """Same as ``merge.add_up``, with at most two shares in ``own``."""
    B, L, G, D = dk.shape
    assert len(own) <= 2 and dk.stride(-1) == 1 and dv.stride(-1) == 1
    assert all(x.is_contiguous() for x in own) and (came is None or came.is_contiguous())
    block = triton.next_power_of_2(D)
    rows = max(1, _SIZE // block)
    some = came if came is not None else own[0]
    with on_device(dk.device):
        _add_up_kernel[(triton.cdiv(L, rows) * B * G, 2)](
            dk, dv, own[0] if own else some, own[1] if len(own) > 1 else some, some, L, G, B, 0 if came is None else came.shape[0],
            *dk.stride()[:3], *dv.stride()[:3],
            NUM_OWN=len(own), WRITES=writes, HEAD_DIM=D, BLOCK_D=block, ROWS=rows,
        )  # fmt: skip
