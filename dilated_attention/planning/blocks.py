"""Counts the kept blocks of a block pattern at any length: exactly where there are few, else from a sample of the rows of blocks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.pattern import BlockPattern, Intersection, MaskFunction, PerHead, Sparsity, Union
from dilated_attention.pattern.blocks.base import FULL, PARTIAL, head_of, state_of
from dilated_attention.pattern.blocks.block_lists import kept_blocks

# the most blocks that are listed to count pairs, and to size lists; counts of longer sequences come from a sample
MOST_BLOCKS, MOST_FOR_SIZE = 2**18, 2**13
# the most blocks of a function of pairs all of whose pairs are asked about
_MOST_ASKED = 2**10
# a sample is taken where a mean row keeps at most so many blocks, and one that keeps all (a global one) has at most so many
_MOST_OF_A_ROW, _MOST_COLUMNS = 2**13, 2**15
# of a sample, the most blocks, rows of blocks, and queries of a row
_SAMPLED_BLOCKS, _SAMPLED_ROWS, _SAMPLED_QUERIES = 2**15, 16, 4
# multiples of it, without their whole parts, fill [0, 1) evenly
_GOLDEN = 0.618034


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Counts for one sequence, over all heads.

    ``pairs``: kept (head, query, key) triples; ``entries``: kept blocks, once where heads share their list; ``computed``: pairs of all kept
    blocks, which kernels compute whole; ``list_bytes``: of the lists that kernels read; ``mask_kind``: see ``BlockLists``; ``is_exact``:
    the figures were counted rather than estimated from a sample.
    """

    pairs: int
    entries: int
    computed: int
    list_bytes: int
    mask_kind: str
    is_exact: bool


@functools.lru_cache(maxsize=512)
def block_counts(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool, most: int) -> BlockCounts:
    """Returns the counts of ``pattern``, from a sample of its rows if it has more than ``most`` blocks (a function of pairs: more than
    1,024). Where a row is too long to be looked at, the counts are a shorter sequence's, grown as ``num_blocks``."""
    blocks = num_blocks(pattern, num_positions, num_heads)
    if blocks <= (min(most, _MOST_ASKED) if _asks_pairs(pattern) else most):
        lists = block_lists(pattern, num_positions, num_heads, is_causal=is_causal, device="cpu")
        return BlockCounts(
            pairs=pattern.pairs(num_positions, num_heads, is_causal=is_causal), entries=lists.num_entries,
            computed=lists.num_entries * pattern.q_block * pattern.k_block * (num_heads // lists.num_heads), list_bytes=lists.nbytes,
            mask_kind=lists.mask_kind, is_exact=True,
        )  # fmt: skip
    if _can_sample(pattern, num_positions):
        return _of_sample(pattern, num_positions, num_heads, is_causal)
    shorter = 8 * max(pattern.q_block, pattern.k_block)
    while _can_sample(pattern, 2 * shorter):
        shorter *= 2
    counts, growth = block_counts(pattern, shorter, num_heads, is_causal, most), blocks / num_blocks(pattern, shorter, num_heads)
    grown = {name: int(growth * getattr(counts, name)) for name in ("pairs", "entries", "computed", "list_bytes")}
    return replace(counts, **grown, is_exact=False)  # type: ignore[arg-type]


def num_blocks(pattern: BlockPattern, num_positions: int, num_heads: int) -> float:
    """Returns approximately how many blocks a list would have."""
    return _blocks_of_row(pattern, num_positions) * pattern.grid(num_positions).num_rows * (num_heads if pattern.per_head else 1)


def _blocks_of_row(pattern: BlockPattern, num_positions: int) -> float:
    grid = pattern.grid(num_positions)
    # a ``Sparsity``'s own ``cost`` would build the pattern for this length by looking at all its rows
    return max(1.0, pattern.ratio * grid.num_columns if isinstance(pattern, Sparsity) else pattern.cost(grid))


def _can_sample(pattern: BlockPattern, num_positions: int) -> bool:
    return _blocks_of_row(pattern, num_positions) <= _MOST_OF_A_ROW and pattern.grid(num_positions).num_columns <= _MOST_COLUMNS


def _asks_pairs(pattern: BlockPattern) -> bool:
    """Whether a part of the pattern is a function that its lists ask about every pair."""
    return isinstance(pattern, MaskFunction) or any(_asks_pairs(part) for part in getattr(pattern, "parts", ()))


def _of_sample(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    """Counts of the first row of blocks, which may hold global tokens, and of some others all over the sequence, by some of their queries.
    Of a function of pairs a block counts as kept if any of these queries keeps a key of it, and as kept whole if all keep every key."""
    resolved, heads = pattern.resolved(num_positions, num_heads, is_causal)
    groups, asks, q_block, k_block = len(heads), _asks_pairs(pattern), resolved.q_block, resolved.k_block
    num_rows = resolved.grid(num_positions).num_rows
    if not (asks or isinstance(resolved, Intersection | PerHead | Union)):
        # heads that draw their blocks keep equally many
        heads = heads[:1]
    generator = torch.Generator().manual_seed(0)
    # pairs of rows: where the first lies early in its part of the sequence, the second lies as late in its own, so that rows of a causal
    # pattern, which grow with their position, count right however few they are
    count = 2 * max(1, min(_SAMPLED_ROWS, int(_SAMPLED_BLOCKS / _blocks_of_row(pattern, num_positions) / len(heads))) // 2)
    if num_rows - 1 <= 2 * count:
        # few rows: all of them
        rows = [(row, 1.0) for row in range(num_rows)]
    else:
        # at another place in each part: equal distances would meet one phase of what repeats itself
        early = [(0.3 + i // 2 * _GOLDEN) % 1 for i in range(count)]
        sampled_places = [i + (1 - x if i % 2 else x) for i, x in enumerate(early)]
        rows = [(0, 1.0), *((1 + int(place / count * (num_rows - 1)), (num_rows - 1) / count) for place in sampled_places)]
    totals = torch.zeros(3, dtype=torch.float64)
    for row, weight in rows:
        grid, of_row = resolved.grid(num_positions, (row, row + 1)), min(q_block, num_positions - row * q_block)
        queries = row * q_block + torch.randint(of_row, (_SAMPLED_QUERIES, 1), generator=generator)
        group, _, column = resolved.columns(grid, heads)
        head, size_of_block = head_of(group, heads), (num_positions - column * k_block).clamp(max=k_block) * _SAMPLED_QUERIES
        # whole blocks need no look at their pairs
        state = torch.full_like(column, PARTIAL) if asks else resolved.classify(grid, head, torch.full_like(column, row), column)[0]
        pairs_of_block, partial = size_of_block * (state == FULL), (state == PARTIAL).nonzero()[:, 0]
        keys = column[partial, None, None] * k_block + torch.arange(k_block)
        is_kept = resolved.allowed(queries, keys, head[partial, None, None], num_positions) & (keys < num_positions)
        pairs_of_block[partial] = is_kept.broadcast_to(len(partial), _SAMPLED_QUERIES, k_block).sum((1, 2))
        if asks:
            state = state_of(pairs_of_block > 0, pairs_of_block == size_of_block)
        sampled = pairs_of_block.sum().double() * of_row / _SAMPLED_QUERIES, (state > 0).sum(), (state == PARTIAL).sum()
        totals += weight * torch.stack(sampled)
    pairs, entries, num_partial = (int(x) for x in (totals * groups / len(heads)).tolist())
    kind = "none"
    if num_partial and asks:
        # a short sequence, whose pairs are all asked about
        kind = kept_blocks(pattern, min(num_positions, 16 * q_block), num_heads, is_causal=is_causal).mask_kind
    elif num_partial:
        kind = kept_blocks(resolved, num_positions, num_heads, first_query=num_rows // 2 * q_block, num_queries=q_block).mask_kind
    # row starts and columns; the number of each block's mask; masks, of which those of a function may all differ; intervals
    lists = 4 * groups * num_rows + 4 * entries * (1 + (num_partial > 0)) + num_partial * q_block * k_block // 8 * asks
    heads_per_list = num_heads // groups
    return BlockCounts(
        pairs=pairs * heads_per_list, entries=entries, computed=max(pairs, entries * q_block * k_block) * heads_per_list,
        list_bytes=lists + (8 * num_positions if kind == "interval" else 0), mask_kind=kind, is_exact=False,
    )  # fmt: skip
