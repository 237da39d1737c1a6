"""Counts the kept blocks of a block pattern at any length: exactly where there are few, else by extrapolation from shorter sequences."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

import torch

from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.pattern import BlockPattern, MaskFunction, Sparsity

# the most blocks that are listed to count pairs, and to size lists; counts of longer sequences are extrapolated from shorter ones
MOST_BLOCKS, MOST_FOR_SIZE = 2**18, 2**13
# of a function of pairs: the most blocks of which every pair is asked about; and in a sample of more of them, the most blocks of a row, the
# most blocks, rows of blocks, and queries of a row
_MOST_ASKED, _MOST_OF_A_ROW, _SAMPLED_BLOCKS, _SAMPLED_ROWS, _SAMPLED_QUERIES = 2**10, 2**15, 2**16, 16, 4
# multiples of it, without their whole parts, fill [0, 1) evenly
_GOLDEN = 0.618034


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Counts for one sequence, over all heads.

    Args:
        pairs: kept (head, query, key) triples.
        entries: kept blocks, counted once where heads share their list.
        computed: pairs of all kept blocks over all heads: kernels compute whole blocks and mask them afterwards.
        list_bytes: bytes of the lists that kernels read.
        mask_kind: ``"none"``, ``"interval"`` or ``"bits"``, see ``BlockLists``.
        is_exact: whether the figures were counted rather than extrapolated from shorter sequences, or from a sample of the queries.
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
    tokens, random blocks and a fixed density follow such a parabola at every length, except at their ends. A function of pairs is counted
    from a sample of its rows, and its counts are extrapolated only where rows have too many blocks.
    """
    asks = _asks_pairs(pattern)

    def few(length: int, most: int) -> bool:
        rows = pattern.grid(length).num_rows
        return num_blocks(pattern, length, num_heads) <= (max(1, rows) * _MOST_OF_A_ROW if asks else most)

    if few(num_positions, most):
        return _counted(pattern, num_positions, num_heads, is_causal)
    if isinstance(pattern, Sparsity):
        return _of_density(pattern, num_positions, num_heads, is_causal)
    block = max(pattern.q_block, pattern.k_block)
    blocks = 8
    while few(2 * blocks * block, MOST_BLOCKS):
        longer = num_blocks(pattern, 2 * blocks * block, num_heads)
        # rows stop growing once they are longer than the window; sequences that are too short would show only that growth
        grows = longer > 2.1 * num_blocks(pattern, blocks * block // 2, num_heads) * 2
        if longer > most and not grows and not asks:
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
            return max(values[2], values[2] + second * (num_positions - lengths[2]) // (lengths[2] - lengths[1]))
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
    if _asks_pairs(pattern) and num_blocks(pattern, num_positions, num_heads) > _MOST_ASKED:
        return _of_sample(pattern, num_positions, num_heads, is_causal)
    pairs = pattern.pairs(num_positions, num_heads, is_causal=is_causal)
    lists = block_lists(pattern, num_positions, num_heads, is_causal=is_causal, device="cpu")
    computed = lists.num_entries * pattern.q_block * pattern.k_block * (num_heads // lists.num_heads)
    return BlockCounts(
        pairs=pairs, entries=lists.num_entries, computed=computed, list_bytes=lists.nbytes, mask_kind=lists.mask_kind, is_exact=True
    )


def _asks_pairs(pattern: BlockPattern) -> bool:
    """Whether a part of the pattern is a function that its lists ask about every pair."""
    return isinstance(pattern, MaskFunction) or any(_asks_pairs(part) for part in getattr(pattern, "parts", ()))


def _of_sample(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    """Counts from all keys of some queries: a few, drawn by a seed, of each of some rows of blocks all over the sequence.

    A block counts as kept if any of these queries keeps a key of it, and as kept whole if all of them keep every key.
    """
    pattern.check(num_positions, num_heads)
    whole = pattern.at(num_positions)
    whole = whole.causal() if is_causal else whole
    q_block, k_block, num_rows = whole.q_block, whole.k_block, whole.grid(num_positions).num_rows
    heads = tuple(range(num_heads)) if whole.per_head else (0,)
    generator = torch.Generator().manual_seed(0)
    in_all = num_blocks(pattern, num_positions, num_heads)
    # at least two rows, of which the later ones of a causal pattern are longer
    count = min(num_rows, max(2, min(_SAMPLED_ROWS, int(_SAMPLED_BLOCKS * num_rows / in_all))))
    pairs = entries = partial = 0.0
    # one row of each part of the sequence, at another place in each part: equal distances would meet one phase of what repeats itself
    for row in [int((i + (0.5 + i * _GOLDEN) % 1) / count * num_rows) for i in range(count)]:
        in_row = min(q_block, num_positions - row * q_block)
        queries = row * q_block + torch.randint(in_row, (_SAMPLED_QUERIES, 1), generator=generator)
        head, _, column = whole.columns(whole.grid(num_positions, (row, row + 1)), heads)
        keys = column[:, None, None] * k_block + torch.arange(k_block)
        exists = keys < num_positions
        kept = whole.allowed(queries, keys, head[:, None, None], num_positions) & exists
        of_query, every = kept.sum(2), exists.sum((1, 2)) * _SAMPLED_QUERIES
        of_block = of_query.sum(1)
        pairs += int(of_block.sum()) * in_row / _SAMPLED_QUERIES
        entries += int((of_block > 0).sum())
        partial += int(((of_block > 0) & (of_block < every)).sum())
    pairs, entries, partial = (int(x * num_rows / count) for x in (pairs, entries, partial))
    # of a short sequence, whose pairs are all asked about
    short = min(num_positions, 32 * q_block)
    kind = block_lists(pattern, short, num_heads, is_causal=is_causal, device="cpu").mask_kind if partial else "none"
    # row starts and columns; the number of each block's mask, and masks, of which no two are known to be equal; intervals
    lists = 4 * len(heads) * num_rows + 4 * entries + (4 * entries + partial * q_block * k_block // 8 if partial else 0)
    shared = num_heads // len(heads)
    return BlockCounts(
        pairs=pairs * shared, entries=entries, computed=entries * q_block * k_block * shared,
        list_bytes=lists + (8 * num_positions if kind == "interval" else 0), mask_kind=kind, is_exact=False,
    )  # fmt: skip
