"""Block lists in the form that flash-attn-4 and flex_attention take: one row of indices per block, padded to the longest.

A padded table needs rows × longest list: at a million positions, one block that keeps everything (a global one) would make it 256 MiB.
So blocks with long lists and blocks with short ones get separate tables, in runs of neighbours, and groups are processed a few at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import expand
from dilated_attention.pattern.blocks.block_lists import BlockLists

# the largest size of one table; it holds all groups if they fit
TABLE_BYTES = 128 * 2**20
# a list counts as long if it has more than this many times the mean
_LONG = 4
_MOST_RUNS = 8


class BlockTable(NamedTuple):
    """Lists of blocks [start, end) of one side for some heads: counts (batch, heads, blocks) and indices (batch, heads, blocks, width).

    Args:
        heads: the range of heads; (0, 1) where all heads share one list.
        partial, full: (counts, indices) int32 of the blocks with a mask of pairs, and of the blocks kept whole.
    """

    heads: tuple[int, int]
    start: int
    end: int
    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]


def row_tables(lists: BlockLists, together: int = 1) -> tuple[BlockTable, ...]:
    """Returns tables of the key blocks of every query block.

    Args:
        together: the number of heads that share a key head and so must stay in one table.
    """
    return lists.derived(
        ("row_tables", together), lambda x: tuple(_tables(x, x.row_starts, x.columns, x.masks, x.num_rows, together))
    )  # fmt: skip


def column_tables(lists: BlockLists, together: int = 1) -> tuple[BlockTable, ...]:
    """Returns tables of the query blocks of every key block."""
    return lists.derived(("column_tables", together), lambda x: tuple(_tables(x, *x.by_column, x.num_columns, together)))


def _tables(lists: BlockLists, starts: Tensor, others: Tensor, masks: Tensor | None, blocks: int, together: int) -> Iterator[BlockTable]:
    groups = (lists.num_batch, lists.num_heads)
    counts = starts.diff().view(*groups, blocks)
    longest = counts.amax((0, 1))
    for start, end in _runs(longest):
        width = int(longest[start:end].max())
        per_head = max(1, groups[0] * (end - start) * width * 4)
        step = groups[1] if groups[1] == 1 else max(together, TABLE_BYTES // per_head // together * together)
        for first in range(0, groups[1], step):
            heads = (first, min(first + step, groups[1]))
            yield _table(lists, starts, others, masks, blocks, heads, start, end)


def _runs(longest: Tensor) -> list[tuple[int, int]]:
    """Returns ranges of neighbouring blocks with lists of similar length, or one range if there are too many or nothing is gained."""
    lengths = longest.cpu().double()
    blocks = lengths.shape[0]
    if blocks < 64 or float(lengths.max()) <= _LONG * float(lengths.mean()):
        return [(0, blocks)]
    long = lengths > _LONG * lengths.mean()
    bounds = [0, *(torch.nonzero(long[1:] != long[:-1]).flatten() + 1).tolist(), blocks]
    return list(itertools.pairwise(bounds)) if len(bounds) - 1 <= _MOST_RUNS else [(0, blocks)]


def _table(
    lists: BlockLists, starts: Tensor, others: Tensor, masks: Tensor | None, blocks: int,
    heads: tuple[int, int], start: int, end: int,
) -> BlockTable:  # fmt: skip
    """Builds one table by scattering every entry to its place."""
    shape = (lists.num_batch, heads[1] - heads[0], end - start)
    grid = torch.arange(lists.num_batch * lists.num_heads * blocks, device=starts.device).view(lists.num_batch, lists.num_heads, blocks)
    chosen = grid[:, heads[0] : heads[1], start:end].flatten()
    row, entry = expand(starts[chosen].long(), starts[chosen + 1].long())
    other = others[entry]
    whole = torch.ones_like(other, dtype=torch.bool) if masks is None else masks[entry] < 0
    most = lists.num_columns if starts is lists.row_starts else lists.num_rows
    return BlockTable(heads, start, end, _side(row, other, ~whole, shape, most), _side(row, other, whole, shape, most))


def _side(row: Tensor, other: Tensor, kept: Tensor, shape: tuple[int, int, int], most: int) -> tuple[Tensor, Tensor]:
    """Builds (counts, indices) of the ``kept`` entries. ``most``: blocks on the other side, the widest table that libraries accept."""
    row, other = row[kept], other[kept]
    counts = torch.bincount(row, minlength=shape[0] * shape[1] * shape[2])
    # rounds the width up, so that similar widths share whatever is compiled per shape
    longest = int(counts.max()) if counts.numel() else 0
    width = max(1, min(-(-longest // 16) * 16, most))
    place = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
    indices = torch.zeros((counts.shape[0], width), dtype=torch.int32, device=row.device)
    indices[row, place] = other.to(torch.int32)
    return counts.to(torch.int32).view(shape), indices.view(*shape, width)
