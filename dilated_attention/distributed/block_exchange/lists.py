"""Block lists of one rank: its query blocks, some of their heads, and key blocks renumbered to their place in a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dilated_attention.distributed.exchange.plan import RingBlockProblem
from dilated_attention.engine.blocks.lists import block_lists, renumber_columns, select_rows
from dilated_attention.engine.branches.plan import Range
from dilated_attention.pattern.blocks.block_lists import BlockLists

# for up to this many runs of query blocks, lists are made per run and joined; for more, rows of the whole sequence's lists are used
_MOST_RUNS = 8


@dataclass(frozen=True, eq=False)
class RankLists:
    """The query blocks of a document of which a rank holds rows.

    Args:
        positions: (L,) positions of all rows of these blocks, counted from the start of the document; includes rows the rank does not hold.
        lists: lists of the document's key blocks.
    """

    document: int
    positions: torch.Tensor
    lists: BlockLists


def rank_lists(ring_problem: RingBlockProblem, rank: int, device: torch.device) -> list[RankLists]:
    found = []
    block = ring_problem.pattern.q_block
    for index, (start, end) in enumerate(ring_problem.documents):
        length = end - start
        runs: list[Range] = []
        for low, high in ring_problem.shards[rank]:
            low, high = max(low, start) - start, min(high, end) - start
            if low >= high:
                continue
            rows = (low // block, -(-high // block))
            # two runs that meet inside a block share this block
            if runs and rows[0] <= runs[-1][1]:
                runs[-1] = (runs[-1][0], rows[1])
            else:
                runs.append(rows)
        if not runs:
            continue
        positions = torch.cat([torch.arange(first * block, min(last * block, length)) for first, last in runs])
        found.append(RankLists(index, positions, _of_runs(ring_problem, runs, length, device)))
    return found


def _of_runs(ring_problem: RingBlockProblem, runs: list[Range], length: int, device: torch.device) -> BlockLists:
    pattern, block = ring_problem.pattern, ring_problem.pattern.q_block
    if len(runs) > _MOST_RUNS:
        whole = block_lists(pattern, length, ring_problem.num_heads, is_causal=ring_problem.is_causal, device=device)
        return select_rows(whole, torch.cat([torch.arange(*run) for run in runs]))
    return join_rows(
        [
            block_lists(
                pattern,
                length,
                ring_problem.num_heads,
                first_query=first * block,
                num_queries=min(last * block, length) - first * block,
                is_causal=ring_problem.is_causal,
                device=device,
            )
            for first, last in runs
        ]
    )


def join_rows(parts: Sequence[BlockLists]) -> BlockLists:
    """Concatenates lists along the query blocks; all parts except the last consist of whole blocks."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    assert all(part.num_queries % part.q_block == 0 for part in parts[:-1])
    # (groups, rows) of all parts side by side: how many entries each row has, and where they begin in the concatenation of all parts
    counts, starts = [], []
    at = 0
    for part in parts:
        counts.append(part.row_starts.long().diff().view(part.num_groups, -1))
        starts.append(part.row_starts[:-1].long().view(part.num_groups, -1) + at)
        at += part.num_entries
    count, start = torch.cat(counts, 1).flatten(), torch.cat(starts, 1).flatten()
    ends = count.cumsum(0)
    place = torch.repeat_interleave(start - ends + count, count, output_size=at) + torch.arange(at, device=count.device)
    row_starts = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
    masks = None
    if any(part.masks is not None for part in parts):
        numbered, base = [], 0
        for part in parts:
            ids = torch.full_like(part.columns, -1) if part.masks is None else torch.where(part.masks < 0, -1, part.masks + base)
            numbered.append(ids)
            base += part.bits.shape[0]
        masks = torch.cat(numbered)[place]
    intervals = [_interval_of(part) for part in parts]
    known = [x for x in intervals if x is not None]
    return replace(
        first,
        num_queries=sum(part.num_queries for part in parts),
        row_starts=row_starts,
        columns=torch.cat([part.columns for part in parts])[place],
        masks=masks,
        bits=torch.cat([part.bits for part in parts]),
        interval=(torch.cat([x[0] for x in known]), torch.cat([x[1] for x in known])) if len(known) == len(parts) else None,
    )


def _interval_of(part: BlockLists) -> tuple[torch.Tensor, torch.Tensor] | None:
    if part.masks is not None:
        return part.interval
    # the part has no masks, so its interval is never read
    bound = torch.zeros(part.num_queries, dtype=torch.int32, device=part.columns.device)
    return bound, bound


def lists_of_heads(lists: BlockLists, heads: Range) -> BlockLists:
    """Returns the lists of query heads [first, last); lists that all heads share stay as they are."""
    if lists.num_heads == 1:
        return lists
    assert lists.num_batch == 1
    first, last = heads[0] * lists.num_rows, heads[1] * lists.num_rows
    starts = lists.row_starts[first : last + 1]
    low, high = (int(x) for x in starts[[0, -1]].tolist())
    masks = None if lists.masks is None else lists.masks[low:high]
    found = replace(lists, num_heads=heads[1] - heads[0], row_starts=starts - low, columns=lists.columns[low:high], masks=masks)
    return _without_unused_masks(found)


def _without_unused_masks(lists: BlockLists) -> BlockLists:
    """Drops masks that only other rows or heads have, because more kernels support lists without masks."""
    if lists.masks is None or bool((lists.masks >= 0).any()):
        return lists
    return replace(lists, masks=None, bits=lists.bits[:0], interval=None)


def lists_of_buffer(lists: BlockLists, mapping: torch.Tensor, num_keys: int) -> BlockLists:
    """Same as ``renumber_columns``, but keeps the interval, in rows of the buffer, if it still describes the masks."""
    mapping = mapping.to(lists.columns.device)
    moved = _without_unused_masks(renumber_columns(lists, mapping, num_keys))
    return moved if moved.masks is None else replace(moved, interval=moved_interval(lists, mapping))


def moved_interval(lists: BlockLists, mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (low, high) of each query in rows of a buffer that stores key block c as its block ``mapping[c]``; None if there is none.

    Each masked block determines the first and the last of its keys that a query keeps. The interval is the intersection over all masked
    blocks of the row. Then the function checks whether the interval reproduces the mask of every block. It does if the masked blocks of a
    row are stored in the buffer in the order of their positions.
    """
    if lists.interval is None or lists.masks is None:
        return None
    size, R, n = lists.k_block, lists.num_rows, lists.num_queries
    masked = (lists.masks >= 0).nonzero()[:, 0]
    row, column = lists.row_of_entry[masked] % R, lists.columns[masked].long()
    first = (mapping[column] * size)[:, None]
    low, high = (torch.nn.functional.pad(x.long(), (0, R * lists.q_block - n)).view(R, -1) for x in lists.interval)
    from_key, to_key = ((x[row] - column[:, None] * size).clamp(0, size) for x in (low, high))
    index = row[:, None].expand_as(from_key)
    end = len(mapping) * size
    new_low = torch.zeros_like(low).scatter_reduce(0, index, torch.where(from_key > 0, first + from_key, 0), "amax")
    new_high = torch.full_like(high, end).scatter_reduce(0, index, torch.where(to_key < size, first + to_key, end), "amin")
    got_from, got_to = ((x[row] - first).clamp(0, size) for x in (new_low, new_high))
    equal = ((from_key == got_from) & (to_key == got_to)) | ((from_key >= to_key) & (got_from >= got_to))
    if not bool(equal.all()):
        return None
    return new_low.flatten()[:n].to(torch.int32), new_high.flatten()[:n].to(torch.int32)
