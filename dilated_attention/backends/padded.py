"""Lists of blocks in the form that flash-attn-4 and flex_attention take: one row of indices a block, padded to the longest.

A padded table needs rows × longest list: one block that keeps everything (a global one) at a million positions would make it 256 MiB.
So blocks with long lists and blocks with short ones get tables of their own, in runs of neighbours, and groups are taken some at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dilated_attention.backends.blocks import BlockLists

# of one table; all groups together where they fit
TABLE_BYTES = 128 * 2**20
# a list is long above this many times the mean
_LONG = 4
_MOST_RUNS = 8


@dataclass(frozen=True)
class Table:
    """Lists of blocks [start, end) of one side, of some heads: counts (batch, heads, blocks) and indices (batch, heads, blocks, width).

    Args:
        heads: the range of list groups' heads; (0, 1) where all heads share one list.
        partial, full: (counts, indices) int32 of the blocks with a mask of pairs, and of those kept whole.
    """

    heads: tuple[int, int]
    start: int
    end: int
    partial: tuple[torch.Tensor, torch.Tensor]
    full: tuple[torch.Tensor, torch.Tensor]


def row_tables(lists: BlockLists, together: int = 1, *, uncut: bool = False) -> tuple[Table, ...]:
    """Key blocks of every query block.

    Args:
        together: heads that share a key head, and so stay in one table.
        uncut: all query blocks in one table where that is not too large, however unlike their lists are: for a launch that costs
            more than padding.
    """
    return _kept(lists, ("row_tables", together, uncut), lists.row_starts, lists.columns, lists.masks, lists.num_rows)


def column_tables(lists: BlockLists, together: int = 1) -> tuple[Table, ...]:
    """Query blocks of every key block."""
    by_column = lists.by_column
    return _kept(lists, ("column_tables", together, False), by_column.starts, by_column.rows, by_column.masks, lists.num_columns)


def _kept(
    lists: BlockLists, key: tuple[str, int, bool], starts: torch.Tensor, others: torch.Tensor, masks: torch.Tensor | None, blocks: int
) -> tuple[Table, ...]:
    """Made once for these lists, which are a frozen record with a place for what is worked out of it."""
    found = lists.cache.get(key)
    if found is None:
        found = lists.cache[key] = tuple(_tables(lists, starts, others, masks, blocks, *key[1:]))
    return found


def _tables(
    lists: BlockLists, starts: torch.Tensor, others: torch.Tensor, masks: torch.Tensor | None, blocks: int, together: int, uncut: bool
) -> Iterator[Table]:
    groups = (lists.num_batch, lists.num_heads)
    counts = starts.diff().view(*groups, blocks)
    longest = counts.amax((0, 1))
    small = lists.num_groups * blocks * int(longest.max()) * 4 <= TABLE_BYTES
    for start, end in [(0, blocks)] if uncut and small else _runs(longest):
        width = int(longest[start:end].max())
        per_head = max(1, groups[0] * (end - start) * width * 4)
        step = groups[1] if groups[1] == 1 else max(together, TABLE_BYTES // per_head // together * together)
        for first in range(0, groups[1], step):
            heads = (first, min(first + step, groups[1]))
            yield _table(lists, starts, others, masks, blocks, heads, start, end)


def _runs(longest: torch.Tensor) -> list[tuple[int, int]]:
    """Ranges of neighbours whose lists are alike long, or one range if those are many or nothing is gained."""
    lengths = longest.cpu().double()
    blocks = lengths.shape[0]
    if blocks < 64 or float(lengths.max()) <= _LONG * float(lengths.mean()):
        return [(0, blocks)]
    long = lengths > _LONG * lengths.mean()
    bounds = [0, *(torch.nonzero(long[1:] != long[:-1]).flatten() + 1).tolist(), blocks]
    return list(itertools.pairwise(bounds)) if len(bounds) - 1 <= _MOST_RUNS else [(0, blocks)]


def _table(
    lists: BlockLists, starts: torch.Tensor, others: torch.Tensor, masks: torch.Tensor | None, blocks: int,
    heads: tuple[int, int], start: int, end: int,
) -> Table:  # fmt: skip
    """One table, written by scattering every entry to its place."""
    shape = (lists.num_batch, heads[1] - heads[0], end - start)
    grid = torch.arange(lists.num_batch * lists.num_heads * blocks, device=starts.device).view(lists.num_batch, lists.num_heads, blocks)
    chosen = grid[:, heads[0] : heads[1], start:end].flatten()
    lengths = (starts[1:] - starts[:-1])[chosen].long()
    row = torch.repeat_interleave(torch.arange(chosen.shape[0], device=starts.device), lengths)
    offset = torch.arange(row.shape[0], device=starts.device) - (lengths.cumsum(0) - lengths)[row]
    entry = starts[chosen].long()[row] + offset
    other = others[entry]
    whole = torch.ones_like(other, dtype=torch.bool) if masks is None else masks[entry] < 0
    most = lists.num_columns if starts is lists.row_starts else lists.num_rows
    return Table(heads, start, end, _side(row, other, ~whole, shape, most), _side(row, other, whole, shape, most))


def _side(
    row: torch.Tensor, other: torch.Tensor, kept: torch.Tensor, shape: tuple[int, int, int], most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``most``: blocks that there are on the other side, the widest table that libraries take."""
    row, other = row[kept], other[kept]
    counts = torch.bincount(row, minlength=shape[0] * shape[1] * shape[2])
    # widths that differ little share what depends on shapes
    longest = int(counts.max()) if counts.numel() else 0
    width = max(1, min(-(-longest // 16) * 16, most))
    place = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
    indices = torch.zeros((counts.shape[0], width), dtype=torch.int32, device=row.device)
    indices[row, place] = other.to(torch.int32)
    return counts.to(torch.int32).view(shape), indices.view(*shape, width)
