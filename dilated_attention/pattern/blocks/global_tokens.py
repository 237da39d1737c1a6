"""Windows with global tokens, optionally with random blocks: Longformer and BigBird."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import ABSENT, FULL, BlockPattern, Blocks, Grid, MaskMod, States, divided, expand, state_of
from dilated_attention.pattern.blocks.random import checked_seed, hashed
from dilated_attention.pattern.blocks.window import LocalWindow

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

    shares_lists = True
    global_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("global_tokens", 0)

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

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        num_globals, low, high = self.stretches(grid, grid.rows())
        # two ranges of a row
        index, column = expand(torch.stack([torch.zeros_like(low), low], 1).flatten(), torch.stack([num_globals, high], 1).flatten())
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
        assert isinstance(self.window, tuple)
        return BlockPattern.causal(GlobalLocal((self.window[0], 0), self.global_tokens, block_size=self.block_size))

    def interval(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor] | None:
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
        for drawn in self.draws(grid, heads, queries // self.q_block).unbind(-1) if self.random_blocks else ():
            kept = kept | (drawn == column)
        return kept

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        if not self.random_blocks or not num_positions:
            return super().mask_mod(num_positions, num_heads, device)
        grid = self.grid(num_positions, device=device)
        drawn = self.draws(grid, grid.range(0, num_heads)[:, None], grid.rows()[None]).to(torch.int32)

        def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            kept = GlobalLocal.allowed(self, q_idx, kv_idx, head, num_positions)
            row, column = q_idx.clamp(max=num_positions - 1) // self.q_block, kv_idx // self.k_block
            for number in range(drawn.shape[-1]):
                kept = kept | (drawn[head, row, number] == column)
            return kept

        return mask_mod

    def allowed_in_partial(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        # a drawn block is kept whole
        return super().allowed(queries, keys, heads, num_positions)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        blocks = _, row, column = super().columns(grid, heads)
        if not self.random_blocks:
            return blocks
        group, rows = grid.range(0, len(heads))[:, None], grid.rows()
        shared = grid.block(row - grid.first_row, column) + group * (grid.num_rows * grid.num_columns)
        draws = self.draws(grid, torch.tensor(heads, device=grid.device)[:, None], rows)
        drawn = grid.block((group * grid.num_rows + rows - grid.first_row)[..., None], draws)
        # drawn blocks are distinct from the others, so no block occurs twice
        return grid.listed(torch.cat([shared.flatten(), drawn[draws >= 0]]).sort()[0])

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        state, key = super().classify(grid, head, row, column)
        if not self.random_blocks:
            return state, key
        # nothing else reaches a drawn block
        outside = (state == ABSENT).nonzero()[:, 0]
        # blocks of one row are consecutive, so the draws of a row are made once
        rows, of_row = torch.unique_consecutive((head * grid.whole_rows + row)[outside], return_inverse=True)
        drawn = self.draws(grid, *divided(rows, grid.whole_rows))[of_row]
        state[outside] = torch.where((drawn == column[outside, None]).any(-1), FULL, ABSENT).to(state.dtype)
        return state, key

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + self.random_blocks, grid.num_columns)

    def causal(self) -> BlockPattern:
        # the draws depend on the whole window
        return BlockPattern.causal(self)
