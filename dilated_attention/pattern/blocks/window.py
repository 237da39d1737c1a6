"""Windows, causality, documents: each query keeps one range of keys; and windows with global tokens and random blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import (
    ABSENT,
    FULL,
    SEED,
    BlockPattern,
    Blocks,
    Ends,
    Grid,
    Heads,
    MaskMod,
    Sides,
    States,
    divided,
    state_of,
)
from dilated_attention.pattern.blocks.whole_blocks import elements_of, hashed, ordered
from dilated_attention.pattern.checks import MAX_LENGTH, as_int, as_int_tuple, shown


@dataclass(frozen=True)
class IntervalPattern(BlockPattern):
    """Base class of patterns in which query i keeps the keys low(i) ≤ j < high(i). Neither end falls from one query to the next."""

    @abstractmethod
    def reach(self, positions: Tensor, num_positions: int) -> Ends:
        """Returns (low, high) of queries at these positions: their first key and one after their last key."""

    def interval(self, positions: Tensor, num_positions: int) -> Ends | None:
        return self.reach(positions, num_positions)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        low, high = self.reach(queries, num_positions)
        return (keys >= low) & (keys < high)

    def stretch(self, grid: Grid, row: Tensor) -> Ends:
        """Returns (first, last + 1) column that each row reaches."""
        (low, _), (_, high) = (self.reach(query, grid.num_positions) for query in grid.queries(row))
        return low // grid.k_block, (high + (grid.k_block - 1)) // grid.k_block

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        index, column = elements_of(*self.stretch(grid, grid.rows()))
        return torch.zeros_like(index), index + grid.first_row, column

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        """Returns the states, and as keys of the masks the distances of the blocks: partial ones with equal keys have equal masks."""
        queries, (first_key, last_key) = grid.queries(row), grid.keys(column)
        (lowest, least), (most, highest) = (self.reach(query, grid.num_positions) for query in queries)
        kept = (last_key >= lowest) & (first_key < highest)
        full = (first_key >= most) & (last_key < least)
        return state_of(kept, full), first_key - queries[0]


@dataclass(frozen=True)
class LocalWindow(IntervalPattern):
    """Keys near the query: i − left ≤ j ≤ i + right (the sliding window of Longformer, arXiv 2004.05150, section 3.1).

    Args:
        window: (left, right) in positions, None for unbounded; a single integer applies to both sides, as in ``attention(window=)``.

    Differs from the paper: its window w is left + right.
    """

    window: int | Sides

    def __post_init__(self) -> None:
        super().__post_init__()
        window = self.window
        if not isinstance(window, (tuple, list)):
            window = (window, window)
        if len(window) != 2:
            raise ValueError(f"window is {shown(window)}; expected one integer or (left, right), None for unbounded")
        if self.window is None:
            raise TypeError("window is None; expected one integer or (left, right), None for an unbounded side")
        sides = (None if side is None else as_int(f"window[{i}]", side, minimum=0, maximum=None) for i, side in enumerate(window))
        # no sequence is longer than MAX_LENGTH, so such a side is unbounded
        self._set(window=tuple(None if side is None or side >= MAX_LENGTH else side for side in sides))

    is_prefix_stable = shares_lists = True

    @property
    def dense_window(self) -> Sides | None:
        # a derived class may keep other pairs
        return self.window if type(self) in (LocalWindow, Causal) else None  # type: ignore[return-value]

    def sides(self, num_positions: int) -> tuple[int, int]:
        assert isinstance(self.window, tuple)
        left, right = (num_positions if side is None else min(side, num_positions) for side in self.window)
        return left, right

    def cost(self, grid: Grid) -> float:
        # a side reaches no further than the sequence: in the mean side²/2N less
        reach = sum(side - side**2 / max(2 * grid.num_positions, 1) for side in self.sides(grid.num_positions))
        return min((reach + grid.q_block) / grid.k_block + 1, grid.num_columns)

    def causal(self) -> BlockPattern:
        assert isinstance(self.window, tuple)
        return LocalWindow((self.window[0], 0), block_size=self.block_size)

    def reach(self, positions: Tensor, num_positions: int) -> Ends:
        left, right = self.sides(num_positions)
        return (positions - left).clamp(min=0), (positions + (right + 1)).clamp(max=num_positions)


@dataclass(frozen=True)
class Causal(LocalWindow):
    """Keys up to the query: j ≤ i. ``is_causal=True`` adds the same restriction to any pattern."""

    shares_lists = True
    window: Sides = field(default=(None, 0), init=False, repr=False)


@dataclass(frozen=True)
class Document(IntervalPattern):
    """Keys of the query's own document. Documents of the given lengths are packed one after another.

    Args:
        lengths: number of positions of each document; they sum to N.
    """

    lengths: tuple[int, ...]

    if TYPE_CHECKING:
        # a list is stored as a tuple
        def __init__(self, lengths: Sequence[int], *, block_size: int | tuple[int, int] = 128) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(lengths=as_int_tuple("lengths", self.lengths, minimum=0, maximum=MAX_LENGTH))

    def check(self, num_positions: int, num_heads: int) -> None:
        if sum(self.lengths) != num_positions:
            raise ValueError(
                f"lengths sum to {sum(self.lengths)}, the sequence has {num_positions} positions; give lengths that sum to that"
            )

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        first_query, last_query = grid.queries(row)
        ends = self.reach(first_query, grid.num_positions)
        low, high = ((x - column * grid.k_block).clamp(0, grid.k_block) for x in ends)
        # all queries of a row in one document keep the same keys; the mask of other blocks is their own
        key = torch.where(last_query < ends[1], -1 - (low * (grid.k_block + 1) + high), grid.block_number(row, column))
        return super().classify(grid, head, row, column)[0], key

    def cost(self, grid: Grid) -> float:
        return sum(length**2 for length in self.lengths) / max(grid.num_positions, 1) / grid.k_block + 2

    def reach(self, positions: Tensor, num_positions: int) -> Ends:
        starts = torch.tensor((0, *self.lengths), device=positions.device).cumsum(0)
        document = torch.searchsorted(starts[1:], positions.contiguous(), right=True)
        # positions outside the sequence count as those of the last document
        document = document.clamp(max=max(len(self.lengths) - 1, 0))
        return starts[document], starts[document + 1]

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        # a document's first position stands for it; empty ones have none
        document, _ = self.reach(torch.arange(num_positions, device=device), num_positions)
        document, last = document.to(torch.int32), num_positions - 1
        return lambda batch, head, q_idx, kv_idx: document[q_idx.clamp(max=last)] == document[kv_idx.clamp(max=last)]


# in place of the distance of blocks that the window does not reach; larger than the distance of any two positions
_NO_WINDOW = 2**40


@dataclass(frozen=True)
class GlobalLocal(LocalWindow):
    """A window and global tokens: the first positions attend to all, and all attend to them (Longformer, arXiv 2004.05150, section 3.1).

    Args:
        window: as in ``LocalWindow``.
        global_tokens: positions 0 … global_tokens − 1 are global.

    Differs from the paper: global positions use the same projections as the others, and are the first ones. If ``global_tokens`` is a
    multiple of the block size, global positions need no masks of single pairs.
    """

    shares_lists, limits = True, (("global_tokens", 0, MAX_LENGTH),)
    global_tokens: int

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        near = super().allowed(queries, keys, heads, num_positions)
        return near | (queries < self.global_tokens) | (keys < self.global_tokens)

    def stretches(self, grid: Grid, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (end, low, high) of rows, whose kept columns are [0, end) and then [low, high). Rows with a global position keep
        everything."""
        low, high = self.stretch(grid, row)
        is_global, num_globals = row * grid.q_block < self.global_tokens, min(-(-self.global_tokens // grid.k_block), grid.num_columns)
        low, high = torch.where(is_global, 0, low), torch.where(is_global, grid.num_columns, high)
        return low.clamp(max=num_globals), low, high

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        num_globals, low, high = self.stretches(grid, grid.rows())
        # two ranges of a row
        index, column = elements_of(torch.stack([torch.zeros_like(low), low], 1).flatten(), torch.stack([num_globals, high], 1).flatten())
        return torch.zeros_like(index), index // 2 + grid.first_row, column

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        state, distance = super().classify(grid, head, row, column)
        # of the first and the last position of a block
        some_query, every_query, some_key, every_key = (end < self.global_tokens for end in (*grid.queries(row), *grid.keys(column)))
        # if global positions end inside the block, its row (column) determines where. A block that window and global positions fill only
        # together counts as partial, with a mask that keeps every pair
        key = torch.where(state > 0, distance, _NO_WINDOW) * 4 + some_query * 2 + some_key
        return state_of((state > 0) | some_query | some_key, (state == FULL) | every_query | every_key), key

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + 2 * (self.global_tokens / grid.k_block + 1), grid.num_columns)

    def causal(self) -> BlockPattern:
        # neither global positions nor draws are those of a narrower window
        return BlockPattern.causal(self)

    def interval(self, positions: Tensor, num_positions: int) -> Ends | None:
        return None if self.global_tokens or self.per_head else super().interval(positions, num_positions)


@dataclass(frozen=True)
class BigBird(GlobalLocal):
    """``GlobalLocal`` with ``random_blocks`` additional blocks per head in every row of blocks (BigBird, arXiv 2007.14062, section 2).

    Random blocks are distinct from each other and from those that the window or the global positions reach. So all of them are additional,
    as long as enough blocks are left. Rows with a global position draw none.

    Args:
        window, global_tokens: as in ``GlobalLocal``.
        random_blocks: number of blocks drawn in each row; ≥ 0.
        seed: seed of the draws.

    Differs from the paper: window and globals count positions, not blocks. Under causality, a row loses its drawn blocks in the future.
    """

    shares_lists = True
    limits = *GlobalLocal.limits, ("random_blocks", 0, MAX_LENGTH), SEED  # type: ignore[assignment]
    random_blocks: int
    seed: int = 0

    @property
    def per_head(self) -> bool:
        return self.random_blocks > 0

    @property
    def is_prefix_stable(self) -> bool:  # type: ignore[override]
        # blocks are drawn from those of the whole sequence
        return self.random_blocks == 0

    def draws(self, grid: Grid, head: Tensor, row: Tensor) -> Tensor:
        """Returns the columns (…, draws) of each row by Floyd's sampling among those that nothing else reaches; −1 if too few are left."""
        num_globals, low, high = self.stretches(grid, row)
        between = torch.where(low > num_globals, low - num_globals, 0)
        free = between + grid.num_columns - high
        count = free.clamp(max=self.random_blocks)
        # a row cannot draw more than all columns of the sequence
        most = min(self.random_blocks, max(grid.num_columns, 1))
        number = grid.range(0, most)
        # each draw has one more number to choose from; a duplicate is replaced by that number, which cannot have been drawn before
        last_number = (free - count)[..., None] + number
        if most == grid.num_columns:
            # every row takes all columns that are left: there is nothing to draw
            x = number.expand(*torch.broadcast_shapes(head.shape, row.shape), most)
        else:
            x = hashed(self.seed, head[..., None], row[..., None], number) % (last_number + 1).clamp(min=1)
            for i in range(1, most):
                again = (x[..., :i] == x[..., i : i + 1]).any(-1)
                x[..., i] = torch.where(again, last_number[..., i], x[..., i])
        between = between[..., None]
        # 0 … free − 1 count the free columns, first those between the global positions and the window
        column = x + torch.where(x < between, num_globals[..., None], high[..., None] - between)
        return torch.where(count[..., None] > number, column, -1)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        grid = self.grid(num_positions, device=queries.device)
        kept, column = super().allowed(queries, keys, heads, num_positions), keys // self.k_block
        for drawn in self.draws(grid, heads, queries // self.q_block).unbind(-1):
            kept = kept | (drawn == column)
        return kept

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        grid = self.grid(num_positions, device=device)
        drawn = self.draws(grid, grid.range(0, num_heads)[:, None], grid.rows()[None]).to(torch.int32)

        def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            kept = GlobalLocal.allowed(self, q_idx, kv_idx, head, num_positions)
            row, column = q_idx.clamp(max=num_positions - 1) // self.q_block, kv_idx // self.k_block
            for number in range(drawn.shape[-1]):
                kept = kept | (drawn[head, row, number] == column)
            return kept

        return mask_mod

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        return self.entries(grid, heads)[0]

    def entries(self, grid: Grid, heads: Heads) -> tuple[Blocks, Tensor, Tensor]:
        _, row, column = super().columns(grid, heads)
        # what all heads share is classified once; drawn blocks are whole
        state, key = super().classify(grid, torch.zeros_like(row), row, column)
        group, rows = grid.range(0, len(heads))[:, None], grid.rows()
        shared = grid.block_number(row - grid.first_row, column) + group * (grid.num_rows * grid.num_columns)
        draws = self.draws(grid, torch.tensor(heads, device=grid.device)[:, None], rows)
        drawn = grid.block_number((group * grid.num_rows + rows - grid.first_row)[..., None], draws)[draws >= 0]
        # drawn blocks are distinct from the others, so no block occurs twice
        blocks, order = ordered(torch.cat([shared.flatten(), drawn]), len(heads) * grid.num_rows * grid.num_columns)
        both = (torch.cat([x.repeat(len(heads)), x.new_ones(len(drawn))]) for x in (state == FULL, key))
        full, key = (x.index_select(0, order) for x in both)
        return grid.blocks_of(blocks), full, key

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        state, key = super().classify(grid, head, row, column)
        # nothing else reaches a drawn block
        outside = (state == ABSENT).nonzero()[:, 0]
        # blocks of one row are consecutive, so the draws of a row are made once
        rows, of_row = torch.unique_consecutive((head * grid.num_sequence_rows + row)[outside], return_inverse=True)
        drawn = self.draws(grid, *divided(rows, grid.num_sequence_rows))[of_row]
        state[outside] = torch.where((drawn == column[outside, None]).any(-1), FULL, ABSENT).to(state.dtype)
        return state, key

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + self.random_blocks, grid.num_columns)
