"""Windows with global tokens, optionally with random blocks: Longformer and BigBird."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import BlockPattern, MaskMod
from dilated_attention.pattern.blocks.grid import (
    FULL,
    Array,
    Blocks,
    Grid,
    States,
    array_module,
    at_least,
    at_most,
    divided,
    expand,
    head_of,
    state_of,
)
from dilated_attention.pattern.blocks.random import checked_seed, hashed
from dilated_attention.pattern.blocks.whole_blocks import WholeBlocks
from dilated_attention.pattern.blocks.window import LocalWindow

# the key of blocks that the window does not reach; larger than the distance of any two positions
_NO_WINDOW = 2**40


@dataclass(frozen=True)
class GlobalLocal(LocalWindow):
    """A window and global tokens: the first positions attend to all, and all attend to them (Longformer, arXiv 2004.05150, section 3.1).

    Args:
        window: as in ``LocalWindow``.
        global_tokens: positions 0 … global_tokens − 1 are global.

    Differs from the paper: global positions use the same projections as the others, and are the first ones. If ``global_tokens`` is a
    multiple of the block size, it needs no masks of single pairs.
    """

    global_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("global_tokens", 0)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        near = super().allowed(queries, keys, heads, num_positions)
        return near | (queries < self.global_tokens) | (keys < self.global_tokens)

    def stretches(self, grid: Grid, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the kept columns of rows: [0, globals) and then [low, high). Rows with a global position keep everything."""
        first, last = grid.queries(row)
        is_global, num_globals = first < self.global_tokens, min(-(-self.global_tokens // grid.k_block), grid.num_columns)
        where = array_module(first).where
        low = where(is_global, 0, self.low(first, grid.num_positions) // grid.k_block)
        high = where(is_global, grid.num_columns, (self.high(last, grid.num_positions) - 1) // grid.k_block + 1)
        return at_most(low, num_globals), low, high

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        num_globals, low, high = self.stretches(grid, grid.rows())
        stack = array_module(low).stack
        index, column = expand(stack([low * 0, low], 1).reshape(-1), stack([num_globals, high], 1).reshape(-1))
        return index * 0, index // 2 + grid.first_row, column

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        state, distance = super().classify(grid, head, row, column)
        some_query, every_query, some_key, every_key = (end < self.global_tokens for end in (*grid.queries(row), *grid.keys(column)))
        # if global positions end inside the block, its row (column) determines where
        key = array_module(state).where(state > 0, distance, _NO_WINDOW) * 4 + some_query * 2 + some_key
        return state_of((state > 0) | some_query | some_key, (state == FULL) | every_query | every_key), key

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + 2 * (self.global_tokens / grid.k_block + 1), grid.num_columns)

    def causal(self) -> BlockPattern:
        assert isinstance(self.window, tuple)
        return BlockPattern.causal(GlobalLocal((self.window[0], 0), self.global_tokens, block_size=self.block_size))

    def interval(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor] | None:
        return None if self.global_tokens or self.per_head else super().interval(positions, num_positions)

    def runs(self, queries: Array, num_positions: int) -> list[tuple[Array, Array]] | None:
        if self.per_head or not self.takes_arrays:
            return None
        near = self.low(queries, num_positions), self.high(queries, num_positions)
        is_global, zero = queries < self.global_tokens, queries * 0
        return [near, (zero, zero + self.global_tokens), (zero, is_global * num_positions)]


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

    random_blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("random_blocks", 0)
        self._set(seed=checked_seed(self.seed))

    @property
    def per_head(self) -> bool:
        return self.random_blocks > 0

    @property
    def is_prefix_stable(self) -> bool:  # type: ignore[override]
        # blocks are drawn from those of the whole sequence
        return self.random_blocks == 0

    def draws(self, grid: Grid, head: Array, row: Array) -> Array:
        """Returns the columns (…, draws) of each row by Floyd's sampling among those that nothing else reaches; −1 if too few are left."""
        num_globals, low, high = self.stretches(grid, row)
        xp = array_module(low)
        between = low - num_globals
        free = between + grid.num_columns - high
        count = at_most(free, self.random_blocks)
        # a row cannot draw more than all columns of the sequence
        most = min(self.random_blocks, max(grid.num_columns, 1))
        # where every row takes all columns that are left, there is nothing to draw
        draws_all, zero = most == grid.num_columns, head * 0 + row * 0
        random = None if draws_all else hashed(self.seed, head[..., None], row[..., None], grid.range(0, most))
        numbers: list[Array] = []
        for number in range(most):
            # each draw has one more number to choose from; a duplicate is replaced by that number, which cannot have been drawn before
            newest = free - count + number
            drawn = zero + number if random is None else random[..., number] % at_least(newest + 1, 1)
            for earlier in () if draws_all else numbers:
                drawn = xp.where(earlier == drawn, newest, drawn)
            numbers.append(xp.where(count > number, drawn, -1))
        x, between = xp.stack(numbers, -1), between[..., None]
        return xp.where(x < 0, -1, x + xp.where(x < between, num_globals[..., None], high[..., None] - between))

    @property
    def _union(self) -> BlockPattern:
        near = GlobalLocal(self.window, self.global_tokens, block_size=self.block_size)
        return near | _Draws(self, block_size=self.block_size) if self.random_blocks else near

    @property
    def terms(self) -> tuple[BlockPattern, ...]:
        return self._union.terms if self.takes_arrays else (self,)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        return self._union.allowed(queries, keys, heads, num_positions)

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        return self._union.mask_mod(num_positions, num_heads, device)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        return self._union.columns(grid, heads)

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        return self._union.classify(grid, head, row, column)

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + self.random_blocks, grid.num_columns)

    def causal(self) -> BlockPattern:
        return functools.reduce(operator.or_, (BlockPattern.causal(term) for term in self.terms))


@dataclass(frozen=True)
class _Draws(WholeBlocks):
    """The random blocks of a ``BigBird`` alone."""

    pattern: BigBird

    per_head: ClassVar[bool] = True  # type: ignore[misc]

    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        drawn = self.pattern.draws(grid, head, row)
        return functools.reduce(operator.or_, (drawn[..., number] == column for number in range(drawn.shape[-1])))

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        # the draws of a row are made once
        rows, of_row = array_module(row).unique(head * grid.whole_rows + row, return_inverse=True)
        drawn = self.pattern.draws(grid, *divided(rows, grid.whole_rows))[of_row]
        return (drawn == column[:, None]).any(1) * FULL, row * 0

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        if not num_positions:
            return super().mask_mod(num_positions, num_heads, device)
        grid = self.grid(num_positions, device=device)
        table = self.pattern.draws(grid, grid.range(0, num_heads)[:, None], grid.rows()[None]).to(torch.int32)

        def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row, column = q_idx.clamp(max=num_positions - 1) // self.q_block, kv_idx // self.k_block
            return functools.reduce(operator.or_, (table[head, row, number] == column for number in range(table.shape[-1])))

        return mask_mod

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        group, rows = grid.range(0, len(heads))[:, None], grid.rows()
        drawn = self.pattern.draws(grid, head_of(group, heads), rows)
        drawn = drawn.sort()[0] if isinstance(drawn, Tensor) else np.sort(drawn)
        group, row, place = array_module(drawn).where(drawn >= 0)
        return group, row + grid.first_row, drawn[group, row, place]

    def cost(self, grid: Grid) -> float:
        return min(self.pattern.random_blocks, grid.num_columns)
