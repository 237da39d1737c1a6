"""FLOP formulas of the block-sparse ops, for torch.utils.flop_counter; importing this registers them.

Pairs are counted from the lists that kernels read, so packed documents and chosen blocks are counted exactly. Tensors without values
(fake, meta) count as a single document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention.backends.block_lists import BlockLists
from dilated_attention.engine.blocks.run import BlockMasks, pieces_of
from dilated_attention.engine.ops import block_dilated  # noqa: F401  declares, with block_op, what is counted here
from dilated_attention.engine.ops.flops import dilated_flops
from dilated_attention.engine.ops.prepare import document_ranges
from dilated_attention.pattern import pattern_from_spec
from dilated_attention.pattern.blocks.kept_blocks import PAIRS_AT_ONCE, unpacked

FORWARD, BACKWARD = 4, 10


def kept_pairs(lists: BlockLists, front: int = 0) -> int:
    """Counts the (query, key) pairs that lists keep, over all their groups, without the first ``front`` queries."""
    row = lists.row_of_entry % lists.num_rows
    column = lists.columns.long()
    low = torch.where(row == 0, front, 0)
    high = (lists.num_queries - row * lists.q_block).clamp(max=lists.q_block)
    width = (lists.num_keys - column * lists.k_block).clamp(max=lists.k_block)
    sizes = (high - low) * width
    if lists.masks is None:
        return int(sizes.sum())
    total = int(sizes[lists.masks < 0].sum())
    # many blocks share a mask, and nearly all of them use all of it
    masked = (lists.masks >= 0).nonzero()[:, 0]
    kinds, times = torch.stack((lists.masks.long(), low, high, width), 1)[masked].unique(dim=0, return_counts=True)
    rows, keys = (torch.arange(size, device=kinds.device) for size in (lists.q_block, lists.k_block))
    step = max(1, PAIRS_AT_ONCE // (lists.q_block * lists.k_block))
    for some, number in zip(kinds.split(step), times.split(step), strict=True):
        mask, low, high, width = some.T[:, :, None, None]
        inside = (rows[:, None] >= low) & (rows[:, None] < high) & (keys < width)
        total += int(((unpacked(lists.bits[mask[:, 0, 0]]) & inside).sum((1, 2)) * number).sum())
    return total


def _pairs(q: torch.Tensor, k: torch.Tensor, optional: tuple[Any, ...], spec: str, is_causal: bool, query_offset: int) -> int:
    """Counts the pairs of the whole batch. ``optional`` holds key_padding_mask, cu_seqlens, seed, kept."""
    if not q.numel():
        return 0
    cu_seqlens, kept = (None if x is None or isinstance(x, FakeTensor) or x.is_meta else x for x in (optional[1], optional[3]))
    pattern = pattern_from_spec(spec)
    (B, Nq, H), Nk = q.shape[:3], k.shape[1]
    if pattern.is_chosen and kept is None:
        return B * pattern.pairs(Nk, H, is_causal=is_causal) * Nq // Nk
    documents = None if cu_seqlens is None else document_ranges(cu_seqlens, Nk)
    masks = BlockMasks(documents=documents, query_offset=query_offset, kept=kept)
    device = torch.device("cpu") if q.is_meta or isinstance(q, FakeTensor) else q.device
    total = 0
    for piece in pieces_of(pattern, Nq, Nk, H, is_causal, masks, device):
        lists = piece.lists
        total += kept_pairs(lists, piece.front) * (B // lists.num_batch) * (H // lists.num_heads)
    return total


def _block_flops(per_pair: int, q: torch.Tensor, k: torch.Tensor, optional: tuple[Any, ...], arguments: tuple[Any, ...]) -> int:
    spec, is_causal, _, query_offset = arguments[:4]
    return per_pair * q.shape[3] * _pairs(q, k, optional, spec, is_causal, query_offset)


def _both_flops(per_pair: int, q: torch.Tensor, k: torch.Tensor, optional: tuple[Any, ...], arguments: tuple[Any, ...]) -> int:
    branches, of_blocks = arguments[:6], arguments[6:]
    is_causal, scale, query_offset = of_blocks[1:4]
    dilated = dilated_flops(tuple(q.shape), tuple(k.shape), (*branches, [], is_causal, scale, query_offset), per_pair)
    return dilated + _block_flops(per_pair, q, k, optional, of_blocks)


@register_flop_formula(torch.ops.dilated_attention.block_sparse_attention, get_raw=True)
def _forward(q: Any, k: Any, v: Any, *arguments: Any, **_: Any) -> int:
    """Counts 4·D per kept pair."""
    return _block_flops(FORWARD, q, k, arguments[:4], arguments[4:])


@register_flop_formula(torch.ops.dilated_attention.block_sparse_attention_backward, get_raw=True)
def _backward(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *arguments: Any, **_: Any) -> int:
    """Counts 10·D per kept pair."""
    return _block_flops(BACKWARD, q, k, arguments[:4], arguments[4:])


@register_flop_formula(torch.ops.dilated_attention.block_sparse_dilated_attention, get_raw=True)
def _both_forward(q: Any, k: Any, v: Any, *arguments: Any, **_: Any) -> int:
    """Counts 4·D per pair of each part."""
    return _both_flops(FORWARD, q, k, arguments[:4], arguments[4:])


@register_flop_formula(torch.ops.dilated_attention.block_sparse_dilated_attention_backward, get_raw=True)
def _both_backward(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *arguments: Any, **_: Any) -> int:
    """Counts 10·D per pair of each part."""
    return _both_flops(BACKWARD, q, k, arguments[:4], arguments[4:])
