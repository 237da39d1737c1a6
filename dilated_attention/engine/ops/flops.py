"""FLOP formulas of the attention ops of one process, for torch.utils.flop_counter; importing this registers them.

Pairs of a block pattern are counted from the lists that kernels read, so packed documents and chosen blocks are counted exactly; tensors
without values (fake, meta) count as a single document. For dilated branches, packed documents count as one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention.engine.blocks.documents import pieces_of
from dilated_attention.engine.branches.problems import Shape, problems_of
from dilated_attention.engine.ops import definition  # noqa: F401  declares what is counted here
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.prepare import WINDOW_BLOCK
from dilated_attention.engine.ops.resolve import INPUTS
from dilated_attention.engine.ops.settings import CallSettings, settings_of
from dilated_attention.pattern import pattern_from_spec
from dilated_attention.pattern.blocks.base import PAIRS_AT_ONCE
from dilated_attention.pattern.blocks.block_lists import BlockLists, unpacked


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
    # each mask is evaluated once: many blocks share one, and nearly all use the whole of it
    masked = (lists.masks >= 0).nonzero()[:, 0]
    kinds, times = torch.stack((lists.masks.long(), low, high, width), 1)[masked].unique(dim=0, return_counts=True)
    rows, keys = (torch.arange(size, device=kinds.device) for size in (lists.q_block, lists.k_block))
    step = max(1, PAIRS_AT_ONCE // (lists.q_block * lists.k_block))
    for some, number in zip(kinds.split(step), times.split(step), strict=True):
        mask, first_row, last_row, last_key = some.T[:, :, None, None]
        inside = (rows[:, None] >= first_row) & (rows[:, None] < last_row) & (keys < last_key)
        total += int(((unpacked(lists.bits[mask[:, 0, 0]]) & inside).sum((1, 2)) * number).sum())
    return total


def _branch_pairs(q: torch.Tensor, k: torch.Tensor, settings: CallSettings) -> int:
    """Counts the pairs of all heads of one batch entry."""
    (_, Nq, H, _), (_, Nk, Hk, _) = q.shape, k.shape
    first = settings.query_offset
    # a window as those kernels compute it that have none of their own
    shape = Shape(H, Hk, (first, first + Nq), (0, Nk), ((0, Nk),), settings.is_causal, settings.window_sides, WINDOW_BLOCK)
    return problems_of(settings.pattern, shape).pairs


def _block_pairs(tensors: dict[str, Any], settings: CallSettings) -> int:
    """Counts the pairs of the whole batch."""
    q, k = tensors["q"], tensors["k"]
    cu_seqlens, kept = (
        None if x is None or isinstance(x, FakeTensor) or x.is_meta else x for x in (tensors["cu_seqlens"], tensors["kept"])
    )
    pattern = pattern_from_spec(settings.blocks)
    (B, Nq, H), Nk = q.shape[:3], k.shape[1]
    if pattern.is_chosen and kept is None:
        return B * pattern.pairs(Nk, H, is_causal=settings.is_causal) * Nq // Nk
    documents = None if cu_seqlens is None else document_ranges(bounds_of(cu_seqlens), Nk)
    device = torch.device("cpu") if q.is_meta or isinstance(q, FakeTensor) else q.device
    total = 0
    for piece in pieces_of(pattern, (Nq, Nk, H), settings, documents, kept, device):
        lists = piece.lists
        total += kept_pairs(lists, piece.front) * (B // lists.num_batch) * (H // lists.num_heads)
    return total


def _flops(per_pair: int, inputs: tuple[Any, ...], settings: CallSettings) -> int:
    tensors = dict(zip(INPUTS, inputs, strict=True))
    q, k = tensors["q"], tensors["k"]
    if not q.numel():
        return 0
    pairs = q.shape[0] * _branch_pairs(q, k, settings) if settings.branches is not None else 0
    if settings.blocks:
        pairs += _block_pairs(tensors, settings)
    return per_pair * q.shape[3] * pairs


def _register(name: str) -> None:
    ops: Any = torch.ops.dilated_attention
    num_inputs = len(INPUTS)

    def forward(*arguments: Any, **_: Any) -> int:
        """Counts 4·D per pair."""
        return _flops(4, arguments[:num_inputs], settings_of(*arguments[num_inputs:]))

    def backward(*arguments: Any, **_: Any) -> int:
        """Counts 10·D per pair: five matrix products, one of which recomputes the forward's scores."""
        _dout, _dlse, q, k, v, _out, _lse, _saved, *masks = arguments[: num_inputs + 5]
        return _flops(10, (q, k, v, *masks), settings_of(*arguments[num_inputs + 5 :]))

    formulas: list[tuple[Any, Callable[..., int]]] = [(getattr(ops, name), forward), (getattr(ops, f"{name}_backward"), backward)]
    for op, formula in formulas:
        register_flop_formula(op, get_raw=True)(formula)


for _name in ("dilated_attention", "block_sparse_attention", "block_sparse_dilated_attention"):
    _register(_name)
