"""Builds the lists of blocks that a pattern keeps, with the masks of their pairs. Each distinct mask is computed once."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dilated_attention.pattern.blocks.base import BlockPattern
from dilated_attention.pattern.blocks.block_lists import WORD, BlockLists
from dilated_attention.pattern.blocks.grid import FULL, PAIRS_AT_ONCE, Array, Grid, distinct, divided, head_of
from dilated_attention.pattern.checks import check_bool

# blocks listed at once, which bounds the memory of building lists, and at all
BLOCKS_AT_ONCE = 2**23
MOST_BLOCKS = 2**31
# the number of bits of a byte
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.int64)


class _Piece(NamedTuple):
    """Blocks of the rows of a grid, for one group of heads or for each, in numpy arrays.

    ``counts``: (groups · rows,), the number of blocks of each row; ``columns, masks``: (E,) int32, ascending in each row, −1 for no mask;
    ``bits, pairs, sizes``: of each mask, its bits (int32), the pairs that it keeps, and those that its blocks have within the sequence;
    ``parts``: pieces without a common block that this one joins.
    """

    counts: Array
    columns: Array
    masks: Array
    bits: Array
    pairs: Array
    sizes: Array
    parts: tuple[_Piece, ...] = ()

    def rows(self) -> Array:
        """Returns (E,): group · rows + row of each block."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def at(self, index: Array) -> _Piece:
        """Returns some of the blocks."""
        counts = np.bincount(self.rows()[index], minlength=len(self.counts))
        return self._replace(counts=counts, columns=self.columns[index], masks=self.masks[index])


def kept_blocks(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, first_query: int = 0, num_queries: int | None = None,
    is_causal: bool = False, device: torch.device | str = "cpu",
) -> BlockLists:  # fmt: skip
    """Returns the lists of queries [first_query, first_query + num_queries), made on the host. ``first_query`` must begin a block. Patterns
    that hold tensors or functions are asked on ``device``."""
    pattern, heads = pattern.resolved(num_positions, num_heads, is_causal)
    num_queries = num_positions - first_query if num_queries is None else num_queries
    assert first_query % pattern.q_block == 0
    rows = (first_query // pattern.q_block, -(-(first_query + num_queries) // pattern.q_block))
    grid = replace(pattern.grid(num_positions, rows, device), arrays=True)
    pieces = [piece for _, _, piece in _pieces(pattern, grid, heads)]
    # what is in one piece, as nearly all lists are, is not copied
    whole = pieces[0] if len(pieces) == 1 else _Piece(*map(np.concatenate, list(zip(*_numbered_on(pieces), strict=True))[:-1]))  # type: ignore[arg-type]
    interval = None
    if len(whole.bits):
        interval = pattern.interval(torch.arange(first_query, first_query + num_queries), num_positions)
        if interval is None:
            interval = _interval_of(whole, grid, num_queries)
        else:
            interval = (interval[0].to(torch.int32), interval[1].to(torch.int32))
    starts = np.append(0, whole.counts.cumsum()).astype(np.int32)
    row_starts, columns, masks, bits = map(torch.from_numpy, (starts, whole.columns, whole.masks, whole.bits))
    sizes = num_queries, num_positions, pattern.q_block, pattern.k_block, 1, len(heads)
    kept = BlockLists(*sizes, row_starts, columns, masks if len(bits) else None, bits, interval)
    return kept if grid.device.type == "cpu" else kept.on(grid.device)


def _numbered_on(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Returns pieces with masks numbered one after another over all of them."""
    ends = itertools.accumulate(len(piece.bits) for piece in pieces)
    return [
        piece._replace(masks=np.where(piece.masks < 0, np.int32(-1), piece.masks + np.int32(end - len(piece.bits))))
        if 0 < len(piece.bits) < end
        else piece
        for piece, end in zip(pieces, ends, strict=True)
    ]


def count_pairs(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, is_causal: bool = False, device: torch.device | str = "cpu"
) -> int:
    """Counts the kept pairs of all heads: the sizes of full blocks within the sequence, and the pairs that the masks of the others keep. On
    a CPU (``device``) lists of a million positions take minutes."""
    total = sum(int(pairs.sum()) for *_, pairs in block_pairs(pattern, num_positions, num_heads, is_causal=is_causal, device=device))
    return total if pattern.at(num_positions).per_head else total * num_heads


def block_pairs(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, is_causal: bool = False, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields (head, row, column, kept pairs) of kept blocks, some at a time; of head 0 alone if the pattern is not ``per_head``."""
    check_bool("is_causal", is_causal)
    pattern, heads = pattern.resolved(num_positions, num_heads, is_causal)
    for grid, some, piece in _pieces(pattern, replace(pattern.grid(num_positions, device=device), arrays=True), heads):
        group, row = divided(piece.rows(), max(grid.num_rows, 1))
        row, column = row + grid.first_row, piece.columns.astype(np.int64)
        pairs = _sizes(grid, row, column)
        if len(piece.bits):
            pairs = np.where(piece.masks < 0, pairs, piece.pairs[piece.masks])
        yield tuple(map(torch.from_numpy, (head_of(group, some), row, column, pairs)))  # type: ignore[misc]


def packed(kept: Tensor) -> Tensor:
    """Packs bool (…, n) into bits, int32 (…, ceil(n / 32)): bit n % 32 of word n // 32."""
    kept = pad(kept, (0, -kept.shape[-1] % WORD))
    if kept.device.type == "cpu":
        return torch.from_numpy(np.packbits(kept.numpy(), axis=-1, bitorder="little").view(np.int32))
    shifts = torch.arange(WORD, dtype=torch.int32, device=kept.device)
    return (kept.unflatten(-1, (-1, WORD)).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def unpacked(bits: Tensor, count: int | None = None) -> Tensor:
    """Unpacks int32 (…, w) into bool (…, count), all 32 · w by default."""
    words = bits if count is None else bits[..., : -(-count // WORD)]
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :count]


def _pieces(pattern: BlockPattern, grid: Grid, heads: tuple[int, ...]) -> Iterator[tuple[Grid, tuple[int, ...], _Piece]]:
    """Yields everything at once, or head by head in groups of rows if that would take too much memory."""
    per_row = max(pattern.cost(grid), 1.0)
    if per_row * grid.num_rows * len(heads) > MOST_BLOCKS:
        raise ValueError(
            f"num_positions is {grid.num_positions:,} and {pattern!r} keeps about {per_row * grid.num_rows:.2g} blocks of them for each of "
            f"{len(heads):,} heads; expected at most {MOST_BLOCKS:,} in all, the most that can be listed: use a shorter sequence"
        )
    if per_row * grid.num_rows * len(heads) <= BLOCKS_AT_ONCE:
        yield grid, heads, _union(pattern, grid, heads)
        return
    step = max(1, int(BLOCKS_AT_ONCE / per_row))
    for head in heads:
        for first in range(grid.first_row, grid.last_row, step):
            rows = replace(grid, first_row=first, last_row=min(first + step, grid.last_row))
            yield rows, (head,), _union(pattern, rows, (head,))


def _union(pattern: BlockPattern, grid: Grid, heads: tuple[int, ...]) -> _Piece:
    """Lists every term of a pattern alone, those that heads share once, and joins them."""
    terms = sorted(pattern.terms, key=lambda term: term.per_head)
    return functools.reduce(functools.partial(_joined, grid), (_piece(term, grid, heads if term.per_head else heads[:1]) for term in terms))


def _piece(pattern: BlockPattern, grid: Grid, heads: tuple[int, ...]) -> _Piece:
    blocks = group, row, column, state, key = pattern.listed(grid, heads)
    rows = group * grid.num_rows + row - grid.first_row if len(heads) > 1 else row - grid.first_row
    counts = np.bincount(rows, minlength=len(heads) * grid.num_rows)
    columns, masks = column.astype(np.int32), np.full(len(column), -1, np.int32)
    partial = np.flatnonzero(state < FULL)
    key, rows = key[partial], row[partial]
    # the mask of a short block does not determine the pairs of a whole one
    if grid.num_positions % grid.q_block:
        key = key * 2 + (rows == grid.num_positions // grid.q_block)
    if grid.num_positions % grid.k_block:
        key = key * 2 + (column[partial] == grid.num_positions // grid.k_block)
    # the first block with each mask, so that every process takes the same one
    _, chosen, masks[partial] = np.unique(key, return_index=True, return_inverse=True)
    group, row, column = (x[partial[chosen]] for x in blocks[:3])
    bits, pairs = _masks(pattern, grid, head_of(group, heads), row, column)
    # patterns may call blocks partial that keep no pair or every pair
    return _needed(_Piece(counts, columns, masks, bits, pairs, _sizes(grid, row, column)))


def _needed(piece: _Piece) -> _Piece:
    """Leaves out blocks without a kept pair, and masks that keep every pair or that no block has."""
    used = np.bincount(piece.masks + 1, minlength=len(piece.pairs) + 1)[1:] > 0
    needed = used & (piece.pairs > 0) & (piece.pairs < piece.sizes)
    if needed.all():
        return piece
    numbers = np.where(needed, needed.cumsum() - 1, np.where(piece.pairs == 0, -2, -1))
    # the last number is that of blocks without a mask, which −1 refers to
    masks = np.append(numbers, -1).astype(np.int32)[piece.masks]
    piece = piece._replace(masks=masks, bits=piece.bits[needed], pairs=piece.pairs[needed], sizes=piece.sizes[needed], parts=())
    return piece.at(np.flatnonzero(masks > -2))


def _joined(grid: Grid, a: _Piece, b: _Piece) -> _Piece:
    """Returns the blocks that either piece keeps, with the pairs that either keeps of them. ``a`` may be of one group for all of ``b``."""
    times, (a, b) = len(b.counts) // max(len(a.counts), 1), _numbered_on((a, b))
    group, row = divided(b.rows(), max(len(a.counts), 1))
    block, blocks = row * grid.num_columns + b.columns, a.rows() * grid.num_columns + a.columns
    place = np.searchsorted(blocks, block)
    both = np.append(blocks, -1)[place] == block
    place += group * len(blocks)
    columns, masks = np.tile(a.columns, times), np.tile(a.masks, times)
    bits, pairs, sizes = (np.concatenate(x) for x in ((a.bits, b.bits), (a.pairs, b.pairs), (a.sizes, b.sizes)))
    parts = tuple(part for piece in (a, b) for part in piece.parts or (piece,))
    if overlap := both.any():
        one, other, parts = masks[place[both]].astype(np.int64), b.masks[both], ()
        pair = np.where((one < 0) | (other < 0), -1, one * len(bits) + other)
        different, number = np.unique(pair, return_inverse=True)
        masks[place[both]] = np.where(different < 0, -1, len(bits) + np.arange(len(different)))[number]
        if len(bits):
            one, other = divided(np.maximum(different, 0), len(bits))
            joined = bits[one] | bits[other]
            pairs = np.concatenate([pairs, _count(joined)])
            bits, sizes = np.concatenate([bits, joined]), np.concatenate([sizes, sizes[one]])
        b, place = b.at(np.flatnonzero(~both)), place[~both]
    # every new block goes behind the new ones before it
    is_old = np.ones(len(columns) + len(place), bool)
    is_old[place + np.arange(len(place))] = False
    merged = np.empty((2, len(is_old)), np.int32)
    for into, old, new in zip(merged, (columns, masks), (b.columns, b.masks), strict=True):
        into[is_old], into[~is_old] = old, new
    piece = _Piece(np.tile(a.counts, times) + b.counts, merged[0], merged[1], bits, pairs, sizes, parts)
    return _needed(piece) if overlap else piece


def _masks(pattern: BlockPattern, grid: Grid, head: Array, row: Array, column: Array) -> tuple[Array, Array]:
    """Computes (bits, kept pairs) of some blocks from the pattern's definition."""
    queries, start = row[:, None] * grid.q_block + np.arange(grid.q_block), column[:, None] * grid.k_block
    if (runs := pattern.runs(queries, grid.num_positions)) is not None:
        firsts, size = _firsts(grid.k_block), np.minimum(grid.num_positions - start, grid.k_block)
        lows, highs = ([np.minimum(np.maximum(x - start, 0), size) for x in ends] for ends in zip(*runs, strict=True))
        of_runs = [firsts[high] & ~firsts[low] for low, high in zip(lows, highs, strict=True)]
        joined = np.where(queries[..., None] < grid.num_positions, functools.reduce(operator.or_, of_runs), 0)
        return joined, _count(joined)
    bits = [np.zeros((0, grid.q_block, grid.k_block // WORD), np.int32)]
    pairs = [np.zeros(0, np.int64)]
    device = grid.device if pattern.lives_here else "cpu"
    head, row, column = (torch.from_numpy(x).to(device) for x in (head, row, column))
    grid = replace(grid, device=torch.device(device), arrays=False)
    for part in grid.parts(len(row)):
        queries, keys = grid.positions(row[part], column[part])
        kept = pattern.allowed(queries, keys, head[part, None, None], grid.num_positions)
        kept = kept & (queries < grid.num_positions) & (keys < grid.num_positions)
        bits.append(packed(kept).cpu().numpy())
        pairs.append(kept.sum((1, 2)).cpu().numpy())
    return np.concatenate(bits), np.concatenate(pairs)


@functools.cache
def _firsts(k_block: int) -> Array:
    """Returns (k_block + 1, k_block / 32) int32: the bits of the first 0, 1, … keys of a block."""
    return np.packbits(np.tri(k_block + 1, k_block, -1, bool), axis=-1, bitorder="little").view(np.int32)


def _count(bits: Array) -> Array:
    """Returns the number of pairs that each mask keeps."""
    return _ONES[bits.view(np.uint8)].sum((1, 2))


def _sizes(grid: Grid, row: Array, column: Array) -> Array:
    """Returns the number of pairs of blocks within the sequence."""
    first_query, last_query = grid.queries(row)
    first_key, last_key = grid.keys(column)
    return (last_query - first_query + 1) * (last_key - first_key + 1)


def _interval_of(piece: _Piece, grid: Grid, num_queries: int) -> tuple[Tensor, Tensor] | None:
    """Returns (low, high) such that every mask keeps exactly its pairs with low[i] ≤ j < high[i]; None if there is no such interval. The
    tightest candidate is compared with the number of keys that each mask keeps: where one keeps less, so it would of a wider one."""
    blocks = []
    for part in piece.parts or (piece,):
        partial = np.flatnonzero(part.masks >= 0)
        row, column, mask = part.rows()[partial], part.columns[partial], part.masks[partial]
        if len(part.counts) > grid.num_rows:
            # heads mostly share their masks, so each block is taken once
            block = distinct((row % grid.num_rows * grid.num_columns + column) * len(piece.bits) + mask)
            block, mask = divided(block, len(piece.bits))
            row, column = divided(block, grid.num_columns)
        blocks.append((row, column * grid.k_block, mask))
    row, start, mask = (np.concatenate(x) for x in zip(*blocks, strict=True))
    step = PAIRS_AT_ONCE // grid.q_block
    parts = [(row[i : i + step], start[i : i + step, None], mask[i : i + step]) for i in range(0, len(row), step)]
    # most of those that have none have none for the first query of each block
    for queries in (1, grid.q_block):
        ends = []
        size = max(1, PAIRS_AT_ONCE // (queries * grid.k_block))
        for i in range(0, len(piece.bits), size):
            keeps = np.unpackbits(piece.bits[i : i + size, :queries].view(np.uint8), axis=-1, bitorder="little")
            ends.append((keeps.argmax(-1), grid.k_block - keeps[..., ::-1].argmax(-1), keeps.sum(-1, dtype=np.int64)))
        first, last, count = (np.concatenate(x) for x in zip(*ends, strict=True))
        if not ((last - first == count) | (count == 0)).all():
            return None
        beyond = grid.num_positions + 1
        first, last = np.where(count == 0, beyond, first), np.where(count == 0, -beyond, last)
        low, high = np.full((grid.num_rows, queries), beyond), np.zeros((grid.num_rows, queries), np.int64)
        for rows, begin, number in parts:
            index = torch.from_numpy(rows)[:, None].expand(-1, queries)
            for ends_of_rows, of_blocks, reduce in ((low, begin + first[number], "amin"), (high, begin + last[number], "amax")):
                torch.from_numpy(ends_of_rows).scatter_reduce_(0, index, torch.from_numpy(of_blocks), reduce)
        low[high == 0] = 0
        for rows, begin, number in parts:
            inside = np.minimum(high[rows], begin + grid.k_block) - np.maximum(low[rows], begin)
            if (np.maximum(inside, 0) != count[number]).any():
                return None
    of_queries = (torch.from_numpy(x.reshape(-1)[:num_queries].astype(np.int32)) for x in (low, high))
    return next(of_queries), next(of_queries)
