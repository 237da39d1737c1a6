"""Triton kernels that turn bits of kept blocks into lists. There is one program per row, which holds the whole row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.pattern.blocks.block_lists import checked_total

# columns per warp
_WARP_COLUMNS = 1024
_VARYING = ["num_rows", "total_rows", "stride_g", "stride_r", "num_words", "query_offset"]


@triton.jit
def _row_bits(kept, row, num_rows, stride_g, stride_r, num_words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (32 · WORDS,) int32: 1 for each kept column of row ``row``, counted over the rows of all groups."""
    at = kept + (row // num_rows).to(tl.int64) * stride_g + (row % num_rows).to(tl.int64) * stride_r
    word = tl.arange(0, WORDS)
    words = tl.load(at + word, mask=word < num_words, other=0)
    return tl.reshape((words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (WORDS * 32,))


@triton.jit(do_not_specialize=_VARYING)
def _count_kernel(  # type: ignore[no-untyped-def]
    kept, counts, num_rows, total_rows, stride_g, stride_r, num_words, query_offset,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Writes counts (2, rows of all groups): the number of kept blocks, and of kept blocks that causality cuts."""
    row = tl.program_id(0)
    bits = _row_bits(kept, row, num_rows, stride_g, stride_r, num_words, WORDS)
    tl.store(counts + row, tl.sum(bits, 0))
    cut = 0
    if CAUSAL:
        delta = row % num_rows * Q_BLOCK + query_offset - tl.arange(0, WORDS * 32) * K_BLOCK
        cut = tl.sum(tl.where(delta < K_BLOCK - 1, bits, 0), 0)
    tl.store(counts + total_rows + row, cut)


@triton.jit(do_not_specialize=_VARYING)
def _write_kernel(  # type: ignore[no-untyped-def]
    kept, row_starts, entries, masks, num_rows, stride_g, stride_r, num_words, query_offset,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, MASKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    bits = _row_bits(kept, row, num_rows, stride_g, stride_r, num_words, WORDS)
    column = tl.arange(0, WORDS * 32)
    place = tl.load(row_starts + row).to(tl.int64) + tl.cumsum(bits, 0) - 1
    tl.store(entries + place, column, mask=bits > 0)
    if MASKS:
        delta = row % num_rows * Q_BLOCK + query_offset - column * K_BLOCK
        # FIRST is the smallest delta of a block that is not entirely in the future, so the division never rounds below zero
        tl.store(masks + place, tl.where(delta < K_BLOCK - 1, (delta - FIRST) // STEP, -1), mask=bits > 0)


def write_lists(
    kept: Tensor, block: tuple[int, int], columns: int, query_offset: int, deltas: range
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Same as ``bitmask._write_lists``. kept (B, H, rows, words) may be any view with evenly spaced groups."""
    B, H, rows, words = kept.shape
    if kept.stride(-1) != 1 or (B > 1 and kept.stride(0) != H * kept.stride(1)):
        kept = kept.contiguous()
    total_rows = B * H * rows
    device = kept.device
    if not total_rows:
        empty = torch.zeros(0, dtype=torch.int32, device=device)
        return torch.zeros(1, dtype=torch.int32, device=device), empty, None
    strides = (kept.stride(1), kept.stride(2))
    wide = triton.next_power_of_2(words)
    sizes = {"Q_BLOCK": block[0], "K_BLOCK": block[1], "WORDS": wide, "num_warps": min(32, max(1, wide * 32 // _WARP_COLUMNS))}
    counts = torch.empty((2, total_rows), dtype=torch.int32, device=device)
    row_starts = torch.zeros(total_rows + 1, dtype=torch.int64, device=device)
    # Triton launches on the current device, which may not be that of the tensors
    with torch.cuda.device_of(kept):
        _count_kernel[(total_rows,)](kept, counts, rows, total_rows, *strides, words, query_offset, CAUSAL=bool(deltas), **sizes)
        torch.cumsum(counts[0], 0, out=row_starts[1:])
        total, cut = torch.stack([row_starts[-1], counts[1].sum()]).tolist()
        checked_total(total)
        row_starts = row_starts.to(torch.int32)
        entries = torch.empty(total, dtype=torch.int32, device=device)
        masks = torch.empty_like(entries) if cut else None
        _write_kernel[(total_rows,)](
            kept, row_starts, entries, entries if masks is None else masks, rows, *strides, words, query_offset,
            FIRST=deltas.start, STEP=deltas.step, MASKS=masks is not None, **sizes,
        )  # fmt: skip
    return row_starts, entries, masks
