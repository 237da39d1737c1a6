"""Converts block lists to FlexAttention's BlockMask, which has padded tables of both directions instead of CSR lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.block_lists import BlockLists
from dilated_attention.pattern.blocks.flex_mask import padded_tables


def block_mask(lists: BlockLists) -> Any:
    """Returns the BlockMask of ``lists`` with masks "none" or "interval"; batch and head dimensions are 1 where all share a list.

    Memory: 4 bytes · rows · the longest row, and the same for columns; masked and whole blocks have separate tables.
    """
    return lists.derived("flex", lambda: _build(lists))


@torch.inference_mode(False)
def _build(lists: BlockLists) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    assert lists.mask_kind in ("none", "interval"), lists.mask_kind
    by_column = lists.by_column
    mask_mod = _every_pair if lists.masks is None or lists.interval is None else _in_interval(*lists.interval)
    # ragged blocks at the end are listed like any other: the kernels check the end of both kinds
    rows = _tables(lists, lists.row_starts, lists.columns, lists.masks)
    columns = _tables(lists, by_column.starts, by_column.rows, by_column.masks)
    sizes = (lists.q_block, lists.k_block)
    return BlockMask((lists.num_queries, lists.num_keys), *rows, *columns, BLOCK_SIZE=sizes, mask_mod=mask_mod)  # type: ignore[misc, arg-type]


def _tables(lists: BlockLists, starts: Tensor, values: Tensor, masks: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns (counts, table, counts of whole blocks, their table) of the rows or columns of ``lists``.

    Without masks all blocks are in the first table, whose mask keeps every pair, and there is no second table.
    """
    kinds = (torch.ones_like(values, dtype=torch.bool),) if masks is None else (masks >= 0, masks < 0)
    tables = padded_tables(lists, starts, values, kinds)
    return (*tables, *[None] * (4 - len(tables)))


def _every_pair(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


def _in_interval(low: Tensor, high: Tensor) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= low[q_idx]) & (kv_idx < high[q_idx])

    return mask_mod
