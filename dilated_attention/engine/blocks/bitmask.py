"""Kept blocks as bits and as lists: in ``kept`` (B, H, R, W) int32, bit c % 32 of word c // 32 of row r is set if block c is kept.

The bits take N² / (8 · q_block · k_block) bytes per head, 8 MiB at N = 2^20 with blocks of 128. Bits are what is saved for the backward
and sent between processes; lists are built from them when a kernel is launched.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.blocks.block_lists import WORD, BlockLists, checked_total, packed, unpacked

# blocks whose bits are unpacked at a time, of 9 bytes each
_CHUNK = 2**24


def bits_of_lists(lists: BlockLists) -> Tensor:
    """Returns (groups, rows, words) int32: the blocks of which ``lists`` keep any pair."""
    words = -(-lists.num_columns // WORD)
    bits = torch.zeros(lists.num_groups * lists.num_rows * words, dtype=torch.int32, device=lists.columns.device)
    # no block occurs twice, so the sum is the union
    bits.index_add_(0, lists.row_of_entry * words + lists.columns // WORD, torch.ones_like(lists.columns) << lists.columns % WORD)
    return bits.view(lists.num_groups, lists.num_rows, words)


def lists_of_kept(
    kept: Tensor, pattern: BlockPattern, num_queries: int, num_keys: int, *, is_causal: bool, query_offset: int = 0
) -> BlockLists:
    """Returns lists of the kept blocks of one document, for each batch entry and head in ``kept``, which may be any slice.

    Args:
        kept: (B, H, rows, words) int32, with at least the rows and words of the document.
        num_queries: number of queries, counted from the start of the first query block.
        is_causal: cut blocks by causality, with an interval and with bit masks. Blocks entirely in the future must not be kept.
        query_offset: position of the first query block, a multiple of its length.

    It waits for the GPU, to get the lengths of the lists.
    """
    q_block, k_block = pattern.q_block, pattern.k_block
    assert query_offset % q_block == 0
    B, H = kept.shape[:2]
    rows, columns = -(-num_queries // q_block), -(-num_keys // k_block)
    kept = kept[:, :, :rows, : -(-columns // WORD)]
    deltas = _partial_deltas(q_block, k_block) if is_causal else range(0)
    row_starts = torch.zeros(B * H * rows + 1, dtype=torch.int64, device=kept.device)
    entries = [torch.zeros(0, dtype=torch.int32, device=kept.device)]
    masks_of_parts = list(entries)
    size = max(1, _CHUNK // max(1, columns))
    for first, part in enumerate(kept.reshape(B * H * rows, kept.shape[3]).split(size)):
        taken = unpacked(part, columns)
        row, column = taken.nonzero().unbind(1)
        row_starts[1 + first * size :][: part.shape[0]] = taken.sum(-1)
        entries.append(column.to(torch.int32))
        if deltas:
            delta = (row + first * size) % rows * q_block + query_offset - column * k_block
            masks_of_parts.append(torch.where(delta < k_block - 1, (delta - deltas.start) // deltas.step, -1).to(torch.int32))
    checked_total(sum(len(x) for x in entries))
    masks = torch.cat(masks_of_parts) if deltas else None
    if masks is not None and not bool((masks >= 0).any()):
        masks = None
    interval = None
    if masks is not None:
        interval = _causal_interval(num_queries, num_keys, query_offset, kept.device)
    return BlockLists(
        num_queries=num_queries,
        num_keys=num_keys,
        q_block=q_block,
        k_block=k_block,
        num_batch=B,
        num_heads=H,
        row_starts=row_starts.cumsum(0).to(torch.int32),
        columns=torch.cat(entries),
        masks=masks,
        bits=_causal_bits(q_block, k_block, deltas if masks is not None else range(0), kept.device),
        interval=interval,
    )


def _partial_deltas(q_block: int, k_block: int) -> range:
    """Returns the values of (first query − first key) for blocks that causality cuts, keeping some pairs but not all."""
    step = math.gcd(q_block, k_block)
    return range(step - q_block, k_block - 1, step)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _causal_bits(q_block: int, k_block: int, deltas: range, device: torch.device) -> Tensor:
    """Returns (deltas, q_block, k_block / 32) int32: query m keeps key n of its block if n ≤ m + delta."""
    delta = torch.tensor(list(deltas), dtype=torch.int64).reshape(-1, 1, 1)
    return packed(torch.arange(k_block) <= torch.arange(q_block)[:, None] + delta).to(device)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _causal_interval(num_queries: int, num_keys: int, query_offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    high = (torch.arange(num_queries, dtype=torch.int32) + (query_offset + 1)).clamp(max=num_keys).to(device)
    return torch.zeros_like(high), high
