"""Counts the kept blocks of a block pattern at any length: exactly where there are few, else by extrapolation from shorter sequences."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.pattern import BlockPattern, Sparsity

# the most blocks that are listed to count pairs, and to size lists; counts of longer sequences are extrapolated from shorter ones
MOST_BLOCKS, MOST_FOR_SIZE = 2**18, 2**13


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Counts for one sequence, over all heads.

    Args:
        pairs: kept (head, query, key) triples.
        entries: kept blocks, counted once where heads share their list.
        computed: pairs of all kept blocks over all heads: kernels compute whole blocks and mask them afterwards.
        list_bytes: bytes of the lists that kernels read.
        mask_kind: ``"none"``, ``"interval"`` or ``"bits"``, see ``BlockLists``.
        is_exact: whether the figures were counted rather than extrapolated from shorter sequences.
    """

    pairs: int
    entries: int
    computed: int
    list_bytes: int
    mask_kind: str
    is_exact: bool


@functools.lru_cache(maxsize=512)
def block_counts(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool, most: int) -> BlockCounts:
    """Returns the counts of ``pattern``; those of a sequence of more than ``most`` blocks are extrapolated from three shorter ones.

    The extrapolation is the parabola through their counts, limited by the number of blocks that the pattern itself states. Windows, global
    tokens, random blocks and a fixed density follow such a parabola at every length, except at their ends.
    """
    if num_blocks(pattern, num_positions, num_heads) <= most:
        return _counted(pattern, num_positions, num_heads, is_causal)
    if isinstance(pattern, Sparsity):
        return _of_density(pattern, num_positions, num_heads, is_causal)
    block = max(pattern.q_block, pattern.k_block)
    blocks = 8
    while (longer := num_blocks(pattern, 2 * blocks * block, num_heads)) <= MOST_BLOCKS:
        # rows stop growing once they are longer than the window; sequences that are too short would show only that growth
        grows = longer > 2.1 * num_blocks(pattern, blocks * block // 2, num_heads) * 2
        if longer > most and not grows:
            break
        blocks *= 2
    # whole blocks, so that the ends weigh the same; the same lengths for every long sequence, so that they are counted only once
    lengths = tuple(blocks * part // 4 * block for part in (2, 3, 4))
    known = [_counted(pattern, n, num_heads, is_causal) for n in lengths]
    named = num_blocks(pattern, num_positions, num_heads)
    pairs_of_block = pattern.q_block * pattern.k_block * (1 if pattern.per_head else num_heads)

    def at_length(values: tuple[int, int, int]) -> int:
        first, second = values[1] - values[0], values[2] - values[1]
        if second < first:
            # growth that levels off has reached its window: from there on it is linear
            return values[2] + second * (num_positions - lengths[2]) // (lengths[2] - lengths[1])
        steps = Fraction(num_positions - lengths[0], lengths[1] - lengths[0])
        return max(values[2], round(values[0] + steps * first + steps * (steps - 1) / 2 * (second - first)))

    x, y, z = known
    pairs = min(at_length((x.pairs, y.pairs, z.pairs)), max(z.pairs, int(named * pairs_of_block)))
    entries = min(at_length((x.entries, y.entries, z.entries)), max(z.entries, int(named)))
    lists = at_length((x.list_bytes - 8 * x.entries, y.list_bytes - 8 * y.entries, z.list_bytes - 8 * z.entries)) + 8 * entries
    computed = max(pairs, entries * pairs_of_block)
    return BlockCounts(pairs=pairs, entries=entries, computed=computed, list_bytes=lists, mask_kind=z.mask_kind, is_exact=False)


def _of_density(pattern: Sparsity, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    """Counts from the density that the pattern keeps at every length, to within one block per row; blocks at its edges are kept in part."""
    grid = pattern.grid(num_positions)
    whole = grid.num_rows * grid.num_columns
    causal = (num_positions + 1) / (2 * num_positions) if is_causal else 1.0
    groups = num_heads if pattern.per_head else 1
    is_whole = pattern.kind in ("random", "dilated")
    entries = groups * int(pattern.ratio * whole * causal + (0 if is_whole else grid.num_rows))
    pairs = int(num_heads * pattern.ratio * num_positions**2 * causal)
    computed = max(pairs, entries * pattern.q_block * pattern.k_block * (num_heads // groups))
    if is_whole and not is_causal:
        kind, lists = "none", 4 * entries
    else:
        # includes the interval ends of every query's keys, as blocks are kept in part
        kind, lists = "interval", 8 * entries + 8 * num_positions
    lists += 4 * groups * grid.num_rows
    return BlockCounts(pairs=pairs, entries=entries, computed=computed, list_bytes=lists, mask_kind=kind, is_exact=False)


def num_blocks(pattern: BlockPattern, num_positions: int, num_heads: int) -> float:
    """Returns approximately how many blocks a list would have."""
    grid = pattern.grid(num_positions)
    # a density's own ``cost`` would build the pattern for this length by looking at all its rows
    cost = pattern.ratio * grid.num_columns if isinstance(pattern, Sparsity) else pattern.cost(grid)
    return max(1.0, cost) * grid.num_rows * (num_heads if pattern.per_head else 1)


@functools.lru_cache(maxsize=512)
def _counted(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    pairs = pattern.pairs(num_positions, num_heads, is_causal=is_causal)
    lists = block_lists(pattern, num_positions, num_heads, is_causal=is_causal, device="cpu")
    computed = lists.num_entries * pattern.q_block * pattern.k_block * (num_heads // lists.num_heads)
    return BlockCounts(
        pairs=pairs, entries=lists.num_entries, computed=computed, list_bytes=lists.nbytes, mask_kind=lists.mask_kind, is_exact=True
    )
