"""Counts the kept blocks of a block pattern at any length: exactly where there are few, else by extrapolation from shorter sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
def block_counts(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool, most: int = MOST_BLOCKS) -> BlockCounts:
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

    def told(values: tuple[int, ...]) -> int:
        if values[2] - values[1] < values[1] - values[0]:
            # growth that levels off has reached its window: from there on it is linear
            return values[2] + (values[2] - values[1]) * (num_positions - lengths[2]) // (lengths[2] - lengths[1])
        return max(values[-1], parabola(lengths, values, num_positions))

    pairs = min(told(tuple(x.pairs for x in known)), max(known[-1].pairs, int(named * pairs_of_block)))
    entries = min(told(tuple(x.entries for x in known)), max(known[-1].entries, int(named)))
    return BlockCounts(
        pairs=pairs,
        entries=entries,
        computed=max(pairs, entries * pairs_of_block),
        list_bytes=told(tuple(x.list_bytes - 8 * x.entries for x in known)) + 8 * entries,
        mask_kind=known[-1].mask_kind,
        is_exact=False,
    )


def _of_density(pattern: Sparsity, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    """Counts from the density that the pattern keeps at every length, to within one block per row; blocks at its edges are kept in part."""
    grid = pattern.grid(num_positions)
    whole = grid.num_rows * grid.num_columns
    causal = (num_positions + 1) / (2 * num_positions) if is_causal else 1.0
    groups = num_heads if pattern.per_head else 1
    is_whole = pattern.kind in ("random", "dilated")
    entries = groups * int(pattern.ratio * whole * causal + (0 if is_whole else grid.num_rows))
    pairs = int(num_heads * pattern.ratio * num_positions**2 * causal)
    return BlockCounts(
        pairs=pairs,
        entries=entries,
        computed=max(pairs, entries * pattern.q_block * pattern.k_block * (num_heads // groups)),
        # includes the interval ends of every query's keys where blocks are kept in part
        list_bytes=4 * groups * grid.num_rows
        + (4 if is_whole and not is_causal else 8) * entries
        + (0 if is_whole and not is_causal else 8 * num_positions),
        mask_kind="none" if is_whole and not is_causal else "interval",
        is_exact=False,
    )


def num_blocks(pattern: BlockPattern, num_positions: int, num_heads: int) -> float:
    """Returns approximately how many blocks a list would have."""
    grid = pattern.grid(num_positions)
    if isinstance(pattern, Sparsity):
        # its ``cost`` would build the pattern for this length by looking at all its rows
        return max(1.0, pattern.ratio * grid.num_columns) * grid.num_rows * (num_heads if pattern.per_head else 1)
    return max(1.0, pattern.cost(grid)) * grid.num_rows * (num_heads if pattern.per_head else 1)


@functools.lru_cache(maxsize=512)
def _counted(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    pairs = pattern.pairs(num_positions, num_heads, is_causal=is_causal)
    lists = block_lists(pattern, num_positions, num_heads, is_causal=is_causal, device="cpu")
    computed = lists.num_entries * pattern.q_block * pattern.k_block * (num_heads // lists.num_heads)
    return BlockCounts(
        pairs=pairs, entries=lists.num_entries, computed=computed, list_bytes=lists.nbytes, mask_kind=lists.mask_kind, is_exact=True
    )


def parabola(x: Sequence[int], y: Sequence[int], at: int) -> int:
    """Evaluates the parabola through three points at ``at``, in exact arithmetic (Lagrange)."""
    total = Fraction(0)
    for i in range(3):
        a, b = (x[j] for j in range(3) if j != i)
        total += Fraction(y[i] * (at - a) * (at - b), (x[i] - a) * (x[i] - b))
    return round(total)
