"""Lists of the key blocks that a pattern keeps, in the form that block-sparse kernels read (``BlockLists``), and how they are built
(``kept_blocks``): each distinct mask is computed once.

The sequence is split into query blocks (rows) of ``q_block`` and key blocks (columns) of ``k_block`` positions. Each row keeps some key
blocks whole and some under a mask of single pairs. A *group* is a (batch entry, head) that has lists of its own; if all share them, it is
the only one. The lists are in CSR form: list i = group · num_rows + row holds, in ascending order, the key blocks
``columns[row_starts[i] : row_starts[i + 1]]``. A kept block is an *entry* of its list.

Memory: 4 bytes per row, 4 (8 with masks) per kept block, and q_block · k_block / 8 bytes per *distinct* mask of pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dilated_attention.pattern.blocks.base import (
    PAIRS_AT_ONCE,
    BlockPattern,
    Blocks,
    Ends,
    Grid,
    Heads,
    checked_positions,
    divided,
    head_of,
)
from dilated_attention.pattern.blocks.whole_blocks import ordered
from dilated_attention.pattern.checks import check_bool

T = TypeVar("T")
# bits in a word of a mask
WORD = 32
# int32 numbers at whose multiples ``moved`` begins a tensor: 128 bytes
_ALIGNMENT = 32
# the block sizes that lists may have: (query block, key block)
BLOCK_SIZES = frozenset((q, k) for q in (64, 128) for k in (64, 128))


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Which key blocks each query block (row) keeps, and under which masks.

    Args:
        num_queries, num_keys: positions; the last block of each may be shorter.
        num_batch, num_heads: 1 where all batch entries (heads) share lists, else their number; their product is the number of groups.
        row_starts: (num_batch · num_heads · num_rows + 1,) int32.
        columns: (entries,) int32 key blocks, ascending in each row.
        masks: (entries,) int32, −1 where every pair of the block is kept, else the index of its mask in ``bits``; None if all are −1.
        bits: (distinct masks, q_block, k_block / 32) int32: bit n % 32 of word n // 32 of row m is set where query m of the block keeps
            key n. Pairs beyond the end of the sequence may have any bit: kernels check the end themselves. Empty if ``masks`` is None.
        interval: (low, high), each (num_queries,) int32, if every mask keeps just the key positions low[i] ≤ j < high[i] of each query i;
            some kernels take this instead of bits. Else None.
    """

    num_queries: int
    num_keys: int
    q_block: int
    k_block: int
    num_batch: int
    num_heads: int
    row_starts: Tensor
    columns: Tensor
    masks: Tensor | None
    bits: Tensor
    interval: Ends | None = None
    num_rows: int = field(init=False)
    num_columns: int = field(init=False)
    num_groups: int = field(init=False)
    num_entries: int = field(init=False)
    # what backends derive from the lists, by key, each once (``derived``). The key "source" is special: it has the lists that these were
    # made from, with the same blocks: before a copy to a GPU (``on``), or with a longer last block (``of_length``)
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # the record is frozen
        self.__dict__.update(
            num_rows=-(-self.num_queries // self.q_block), num_columns=-(-self.num_keys // self.k_block),
            num_groups=self.num_batch * self.num_heads, num_entries=self.columns.shape[0],
        )  # fmt: skip

    def derived(self, key: Hashable, make: Callable[[BlockLists], T], *, by_length: bool = False) -> T:
        """Returns ``make(self)``, computed once. If these lists have a source, the source makes it, and it is moved to their device.

        Args:
            key: names the result in ``cache``.
            by_length: the result depends on the numbers of positions, which may be others in the source, so it is made here.
        """
        if key not in self.cache:
            source = None if by_length else self.cache.get("source")
            self.cache[key] = make(self) if source is None else moved(source.derived(key, make), self.row_starts.device)
        return self.cache[key]  # type: ignore[no-any-return]

    def of_length(self, num_queries: int, num_keys: int) -> BlockLists:
        """Returns these lists for fewer positions in as many blocks. Of some listed blocks no pair may be left."""
        interval = None if self.interval is None else (self.interval[0][:num_queries], self.interval[1][:num_queries].clamp(max=num_keys))
        shorter = replace(self, num_queries=num_queries, num_keys=num_keys, interval=interval)
        shorter.cache["source"] = self
        return shorter

    def on(self, device: torch.device) -> BlockLists:
        """Copies these lists from the host to a GPU, without waiting for it."""
        names = ("row_starts", "columns", "masks", "bits", "interval")
        there = replace(self, **dict(zip(names, moved(tuple(getattr(self, name) for name in names), device), strict=True)))
        there.cache["source"] = self
        return there

    @property
    def mask_kind(self) -> str:
        """The simplest form of masks that a kernel must support: ``"none"`` · ``"interval"`` · ``"bits"``."""
        if self.masks is None:
            return "none"
        return "interval" if self.interval is not None else "bits"

    @cached_property
    def nbytes(self) -> int:
        tensors = [self.row_starts, self.columns, self.bits, *(() if self.masks is None else (self.masks,)), *(self.interval or ())]
        return sum(x.nbytes for x in tensors)

    @property
    def fills_every_row(self) -> bool:
        """Whether every query certainly keeps a key; False if masks leave it open. Waits for the GPU once."""
        # a source has as many blocks, and each of them has positions here, too
        return self.derived("fills_every_row", lambda lists: lists.masks is None and bool((lists.row_starts.diff() > 0).all()))

    # kept for later calls, which may train: no inference tensor
    @cached_property
    @torch.inference_mode(False)
    def row_of_entry(self) -> Tensor:
        """The index group · num_rows + row of each entry, (entries,) int64."""
        counts = self.row_starts.diff().long()
        rows = torch.arange(counts.shape[0], device=counts.device)
        return torch.repeat_interleave(rows, counts, output_size=self.num_entries)

    @property
    def by_column(self) -> ColumnLists:
        """The same entries by key block, for the gradients of k and v."""
        return self.derived("by_column", _by_column)


class ColumnLists(NamedTuple):
    """Which query blocks keep each key block: ``rows[starts[i] : starts[i + 1]]``, ascending, for i = group · num_columns + column.
    ``masks``: as in ``BlockLists``, in the order of ``rows``."""

    starts: Tensor
    rows: Tensor
    masks: Tensor | None


@torch.inference_mode(False)
def _by_column(lists: BlockLists) -> ColumnLists:
    group, row = divided(lists.row_of_entry, max(lists.num_rows, 1))
    # the list by column that each entry goes to, and how many there are
    target, num_lists = group * lists.num_columns + lists.columns, lists.num_groups * lists.num_columns
    # by list and then by row
    places, order = ordered(target * lists.num_rows + row, num_lists * lists.num_rows)
    ends = torch.arange(num_lists + 1, device=target.device) * lists.num_rows
    starts = torch.searchsorted(places, ends, out_int32=True)
    rows, masks = row.to(torch.int32).index_select(0, order), lists.masks
    return ColumnLists(starts, rows, None if masks is None else masks.index_select(0, order))


def moved(x: Any, device: torch.device) -> Any:
    """Copies the int32 tensors in x, a tensor or nested tuples, from the host to a GPU: all in one copy from pinned memory, so that nothing
    waits for it."""
    leaves, form = tree_flatten(x, is_leaf=lambda part: not isinstance(part, tuple))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or tensors[0].device == device:
        return x
    assert all(tensor.dtype is torch.int32 for tensor in tensors)
    # kernels are compiled for pointers that are multiples of 16 bytes
    buffer = torch.cat([torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % _ALIGNMENT)) for tensor in tensors])
    buffer = (buffer.pin_memory() if device.type == "cuda" else buffer).to(device, non_blocking=True)
    parts = iter(buffer.split([-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]))
    there = [next(parts)[: leaf.numel()].view(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(there, form)


def checked_total(total: int) -> int:
    """Returns ``total``, the number of entries, if kernels can count them; raises otherwise. They count in 32 bits, and up to four parts of
    a block."""
    if total >= 2**29:
        raise ValueError(
            f"{total} kept blocks over all batch entries and heads; lists count to 2**29 − 1: "
            "keep less, use larger blocks, or give one list to all heads"
        )
    return total


# how many blocks are listed at once, which bounds the memory of building lists
BLOCKS_AT_ONCE = 2**23
# how many are listed in all, in as many pieces as that takes
MOST_BLOCKS = 2**31


def kept_blocks(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, first_query: int = 0, num_queries: int | None = None,
    is_causal: bool = False, device: torch.device | str = "cpu",
) -> BlockLists:  # fmt: skip
    """Returns the lists of a pattern for the queries [first_query, first_query + num_queries), to the end by default. ``first_query`` must
    begin a block."""
    pattern, heads = pattern.resolved(num_positions, num_heads, is_causal)
    num_queries = num_positions - first_query if num_queries is None else num_queries
    assert first_query % pattern.q_block == 0
    rows = (first_query // pattern.q_block, -(-(first_query + num_queries) // pattern.q_block))
    whole = pattern.grid(num_positions, rows, device)
    # of each piece; a row starts where the one before it ends, and the first at 0
    row_starts, columns, masks, bits = [whole.range(0, 1).to(torch.int32)], [], [], []
    num_entries = num_masks = 0
    for grid, some_heads in _pieces(pattern, whole, heads):
        (group, row, column), piece_masks, piece_bits, _ = _masked_blocks(pattern, grid, some_heads)
        list_of_entry = group * grid.num_rows + row - grid.first_row
        ends = torch.searchsorted(list_of_entry, grid.range(0, len(some_heads) * grid.num_rows), right=True, out_int32=True)
        row_starts.append(ends + num_entries)
        columns.append(column.to(torch.int32))
        masks.append(torch.where(piece_masks < 0, -1, piece_masks + num_masks) if num_masks else piece_masks)
        bits.append(piece_bits)
        num_entries, num_masks = num_entries + len(piece_masks), num_masks + len(piece_bits)
    # nearly all lists are one piece, which is not copied
    all_columns, all_masks, all_bits = (x[0] if len(x) == 1 else torch.cat(x) for x in (columns, masks, bits))
    kept = BlockLists(
        num_queries, num_positions, pattern.q_block, pattern.k_block, 1, len(heads), torch.cat(row_starts), all_columns,
        all_masks if num_masks else None, all_bits,
    )  # fmt: skip
    if kept.masks is None:
        return kept
    # some patterns know their intervals; of the others they are searched for in the masks
    interval = pattern.interval(whole.range(first_query, first_query + num_queries), num_positions) or _interval_of(kept, whole)
    return kept if interval is None else replace(kept, interval=(interval[0].to(torch.int32), interval[1].to(torch.int32)))


def count_pairs(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, is_causal: bool = False, device: torch.device | str = "cpu"
) -> int:
    """Counts the kept pairs of all heads, from the sizes of full blocks and the masks of the others. On a CPU (``device``) a million
    positions take minutes."""
    total = sum(int(pairs.sum()) for *_, pairs in block_pairs(pattern, num_positions, num_heads, is_causal=is_causal, device=device))
    return total if pattern.at(num_positions).per_head else total * num_heads


def block_pairs(
    pattern: BlockPattern, num_positions: int, num_heads: int, *, is_causal: bool = False, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields (head, row, column, number of kept pairs) of the kept blocks, many at a time; of head 0 alone if the pattern is not
    ``per_head``."""
    check_bool("is_causal", is_causal)
    num_positions = checked_positions(num_positions)
    pattern, heads = pattern.resolved(num_positions, num_heads, is_causal)
    for grid, some_heads in _pieces(pattern, pattern.grid(num_positions, device=device), heads):
        (group, row, column), masks, _, pairs_of_mask = _masked_blocks(pattern, grid, some_heads)
        # whole blocks keep all their pairs
        pairs, partial = _pairs_in_blocks(grid, row, column), (masks >= 0).nonzero()[:, 0]
        pairs[partial] = pairs_of_mask[masks[partial]]
        yield head_of(group, some_heads), row, column, pairs


def packed(kept: Tensor) -> Tensor:
    """Packs bool (…, n) into int32 (…, ceil(n / 32)): entry i is bit i % 32 of word i // 32."""
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % WORD))
    shifts = torch.arange(WORD, dtype=torch.int32, device=kept.device)
    return (kept.unflatten(-1, (-1, WORD)).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def unpacked(bits: Tensor, count: int | None = None) -> Tensor:
    """Unpacks int32 (…, w) into bool (…, count), all 32 · w by default."""
    words = bits if count is None else bits[..., : -(-count // WORD)]
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :count]


def _pieces(pattern: BlockPattern, grid: Grid, heads: Heads) -> Iterator[tuple[Grid, Heads]]:
    """Yields (grid of some rows, some heads) to list at once: everything, or if that would take too much memory, each head by groups of
    rows."""
    per_row = max(pattern.cost(grid), 1.0)
    blocks = per_row * grid.num_rows * len(heads)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"num_positions is {grid.num_positions:,} and {pattern!r} keeps about {per_row * grid.num_rows:.2g} blocks of them for each of "
            f"{len(heads):,} heads; expected at most {MOST_BLOCKS:,} in all, the most that can be listed: use a shorter sequence"
        )
    if blocks <= BLOCKS_AT_ONCE:
        yield grid, heads
        return
    step = max(1, int(BLOCKS_AT_ONCE / per_row))
    for head, first in itertools.product(heads, range(grid.first_row, grid.last_row, step)):
        yield pattern.grid(grid.num_positions, (first, min(first + step, grid.last_row)), grid.device), (head,)


def _masked_blocks(pattern: BlockPattern, grid: Grid, heads: Heads) -> tuple[Blocks, Tensor, Tensor, Tensor]:
    """Returns (blocks, masks, bits, pairs): the kept blocks of the grid's rows for some heads (group g is head ``heads[g]``); the index of
    each one's mask in ``bits``, int32, −1 for none; the distinct masks; and how many pairs each of these keeps."""
    blocks, full, key = pattern.entries(grid, heads)
    partial = (~full).nonzero()[:, 0]
    if not partial.numel():
        bits = key.new_zeros((0, grid.q_block, grid.k_block // WORD), dtype=torch.int32)
        return blocks, torch.full_like(key, -1, dtype=torch.int32), bits, partial
    key = key[partial]
    # blocks with equal keys have equal masks, except that one at the end may be shorter: it gets a key of its own
    for block, size in zip(blocks[1:], (grid.q_block, grid.k_block), strict=True):
        if grid.num_positions % size:
            key = key * 2 + (block[partial] == grid.num_positions // size)
    distinct, mask_of_partial = torch.unique(key, return_inverse=True)
    # compute each mask from the first block that has it, so that every process takes the same block. len(full) is above every index
    first_block = torch.full_like(distinct, len(full)).scatter_reduce(0, mask_of_partial, partial, "amin")
    group, row, column = (x[first_block] for x in blocks)
    bits, pairs = _compute_masks(pattern, grid, head_of(group, heads), row, column)
    masks = torch.full_like(full, -1, dtype=torch.int32).index_put((partial,), mask_of_partial.to(torch.int32))
    # a mask may turn out to keep no pair, then its blocks are dropped, or every pair, then its blocks need none
    needed = (pairs > 0) & (pairs < _pairs_in_blocks(grid, row, column))
    if bool(needed.all()):
        return blocks, masks, bits, pairs
    # the new index of each mask: −1: its blocks need none; −2: they are dropped
    new_index = torch.where(needed, needed.cumsum(0) - 1, torch.where(pairs == 0, -2, -1))
    # blocks without a mask have the index −1, which reads the last element: −1 is appended for them
    masks = torch.nn.functional.pad(new_index, (0, 1), value=-1)[masks.long()].to(torch.int32)
    kept = (masks > -2).nonzero()[:, 0]
    group, row, column = (x[kept] for x in blocks)
    return (group, row, column), masks[kept], bits[needed], pairs[needed]


def _compute_masks(pattern: BlockPattern, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (bits, number of kept pairs) of some blocks, by the pattern's definition ``allowed``."""
    bits, pairs = [], []
    for part in grid.parts(row.shape[0]):
        queries, keys = grid.positions(row[part], column[part])
        kept = pattern.allowed(queries, keys, head[part, None, None], grid.num_positions)
        kept = kept & (queries < grid.num_positions) & (keys < grid.num_positions)
        bits.append(packed(kept))
        pairs.append(kept.sum((1, 2)))
    return torch.cat(bits), torch.cat(pairs)


def _pairs_in_blocks(grid: Grid, row: Tensor, column: Tensor) -> Tensor:
    """Returns how many pairs within the sequence each block has."""
    (first_query, last_query), (first_key, last_key) = grid.queries(row), grid.keys(column)
    return (last_query - first_query + 1) * (last_key - first_key + 1)


def _interval_of(kept: BlockLists, grid: Grid) -> Ends | None:
    """Returns (low, high) such that every mask keeps just its pairs with low[i] ≤ j < high[i]; None if there are none.

    The candidate for a query is the shortest interval that holds all keys that its masks keep. It fits if it has as many keys in each block
    as the block's mask keeps. If it does not fit, a longer one does not either."""
    assert kept.masks is not None
    ranges = []
    for bits in kept.bits.split(max(1, PAIRS_AT_ONCE // (grid.q_block * grid.k_block))):
        keeps = unpacked(bits).to(torch.int8)
        ranges.append(torch.stack([keeps.argmax(-1), keeps.shape[-1] - keeps.flip(-1).argmax(-1), keeps.sum(-1)]))
    # of each query in each mask, (masks, q_block): its first kept key, the key after the last one, and how many it keeps
    first, end, count = torch.cat(ranges, 1)
    # a gap between kept keys is in no interval
    if not bool(((end - first == count) | (count == 0)).all()):
        return None
    partial = (kept.masks >= 0).nonzero()[:, 0]
    row = torch.searchsorted(kept.row_starts[1:].long(), partial, right=True) % grid.num_rows
    column, mask = kept.columns[partial].long(), kept.masks[partial].long()
    if kept.num_groups > 1:
        # heads mostly share their masks, so each block is taken once
        num_masks = kept.bits.shape[0]
        block, mask = divided(torch.unique(grid.block_number(row, column) * num_masks + mask), num_masks)
        row, column = divided(block, grid.num_columns)
    # the queries and the first key of each block. These blocks are few, since only those at an end of an interval have masks
    query, start = row[:, None] * grid.q_block + grid.range(0, grid.q_block), column[:, None] * grid.k_block
    # from here on of each query in each block
    first, end, count = first[mask], end[mask], count[mask]
    # a query that keeps nothing in a block must not move its ends: ``beyond`` is above every low, and −1 below every high
    beyond = grid.num_positions + 1
    low = torch.full((grid.num_rows * grid.q_block,), beyond, device=grid.device)
    high = torch.full_like(low, -1)
    low.scatter_reduce_(0, query.flatten(), torch.where(count == 0, beyond, start + first).flatten(), "amin")
    high.scatter_reduce_(0, query.flatten(), torch.where(count == 0, -1, start + end).flatten(), "amax")
    # queries that keep nothing in all masks get the empty interval [0, 0)
    low, high = torch.where(high < 0, 0, low), high.clamp(min=0)
    inside = torch.minimum(high[query], start + grid.k_block) - torch.maximum(low[query], start)
    if bool((inside.clamp(min=0) != count).any()):
        return None
    return low[: kept.num_queries], high[: kept.num_queries]
