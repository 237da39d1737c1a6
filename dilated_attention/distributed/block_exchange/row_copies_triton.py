"""The functions of ``row_copies.py`` as one Triton kernel each: every row is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dilated_attention.backends.block_lists import on_device

# elements that a program handles at a time
_SIZE = 4096


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    memory_ptr, to_ptr, k_ptr, v_ptr, rows_ptr, num_rows, num_batches, num_heads,
    k_stride_b, k_stride_n, k_stride_g, v_stride_b, v_stride_n, v_stride_g,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # (rows, heads) of one batch entry are contiguous in memory, so they are handled as one index
    batch = tl.program_id(1)
    which = tl.program_id(2)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, head = index // num_heads, index % num_heads
    inside = row < num_rows
    columns = tl.arange(0, BLOCK_D)
    tile = inside[:, None] & (columns < HEAD_DIM)[None, :]
    source = tl.load(rows_ptr + row, mask=inside, other=0).to(tl.int64)
    target = tl.load(to_ptr + row, mask=inside, other=0).to(tl.int64)
    if which == 0:
        at = k_ptr + batch.to(tl.int64) * k_stride_b + source * k_stride_n + head * k_stride_g
    else:
        at = v_ptr + batch.to(tl.int64) * v_stride_b + source * v_stride_n + head * v_stride_g
    values = tl.load(at[:, None] + columns[None, :], mask=tile, other=0.0)
    place = ((target * 2 + which) * num_batches + batch) * num_heads + head
    tl.store(memory_ptr + place[:, None] * HEAD_DIM + columns[None, :], values, mask=tile)


def gather_rows(memory: torch.Tensor, to: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """Same as ``row_copies.gather_rows``."""
    B, _, G, D = k.shape
    assert memory.is_contiguous() and k.stride(-1) == 1 and v.stride(-1) == 1
    block = triton.next_power_of_2(D)
    size = max(1, _SIZE // block)
    with on_device(memory.device):
        _gather_kernel[(triton.cdiv(len(to) * G, size), B, 2)](
            memory, to, k, v, rows, len(to), B, G, *k.stride()[:3], *v.stride()[:3], HEAD_DIM=D, BLOCK_D=block, ROWS=size
        )


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    dk_ptr, dv_ptr, own_k_ptr, own_v_ptr, own_at_ptr, came_ptr, came_at_ptr, num_rows, num_batches, num_heads, num_peers, came_rows,
    dk_stride_b, dk_stride_n, dk_stride_g, dv_stride_b, dv_stride_n, dv_stride_g,
    own_k_stride_b, own_k_stride_n, own_k_stride_g, own_v_stride_b, own_v_stride_n, own_v_stride_g,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    which = tl.program_id(2).to(tl.int64)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, head = index // num_heads, index % num_heads
    inside = row < num_rows
    columns = tl.arange(0, BLOCK_D)
    wide = (columns < HEAD_DIM)[None, :]
    own_at = tl.load(own_at_ptr + row, mask=inside, other=-1).to(tl.int64)
    if which == 0:
        own = own_k_ptr + batch * own_k_stride_b + own_at * own_k_stride_n + head * own_k_stride_g
        grad = dk_ptr + batch * dk_stride_b + row * dk_stride_n + head * dk_stride_g
    else:
        own = own_v_ptr + batch * own_v_stride_b + own_at * own_v_stride_n + head * own_v_stride_g
        grad = dv_ptr + batch * dv_stride_b + row * dv_stride_n + head * dv_stride_g
    total = tl.load(own[:, None] + columns[None, :], mask=(own_at >= 0)[:, None] & wide, other=0.0).to(tl.float32)
    for peer in range(num_peers):
        at = tl.load(came_at_ptr + peer * num_rows + row, mask=inside, other=-1).to(tl.int64)
        place = ((which * came_rows + at) * num_batches + batch) * num_heads + head
        came = came_ptr + place[:, None] * HEAD_DIM + columns[None, :]
        total += tl.load(came, mask=(at >= 0)[:, None] & wide, other=0.0).to(tl.float32)
    tl.store(grad[:, None] + columns[None, :], total.to(dk_ptr.dtype.element_ty), mask=inside[:, None] & wide)


def add_rows(
    grads: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    own_at: torch.Tensor,
    came: torch.Tensor,
    came_at: torch.Tensor,
) -> None:
    """Same as ``row_copies.add_rows``."""
    dk, dv = grads
    B, n, G, D = dk.shape
    assert all(x.stride(-1) == 1 for x in (*grads, *own)) and came.is_contiguous() and came_at.is_contiguous()
    block = triton.next_power_of_2(D)
    size = max(1, _SIZE // block)
    with on_device(dk.device):
        _add_kernel[(triton.cdiv(n * G, size), B, 2)](
            dk, dv, *own, own_at, came, came_at, n, B, G, came_at.shape[0], came.shape[1],
            *dk.stride()[:3], *dv.stride()[:3], *own[0].stride()[:3], *own[1].stride()[:3],
            HEAD_DIM=D, BLOCK_D=block, ROWS=size,
        )  # fmt: skip
