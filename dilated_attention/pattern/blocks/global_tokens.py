"""Windows with global tokens, optionally with random blocks: Longformer and BigBird."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilated_attention.pattern.blocks.base import FULL, BlockPattern, Grid, MaskMod, divided, expand, state_of
from dilated_attention.pattern.blocks.random import checked_seed, hashed
from dilated_attention.pattern.blocks.window import LocalWindow
from dilated_attention.pattern.checks import as_int

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
        object.__setattr__(self, "global_tokens", as_int("global_tokens", self.global_tokens, minimum=0))

    @property
    def is_tight(self) -> bool:  # type: ignore[override]
        # the window and the last global positions may together keep a whole block
        return self.global_tokens % self.q_block == 0 and self.global_tokens % self.k_block == 0

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
        near = super().allowed(queries, keys, heads, num_positions)
        return near | (queries < self.global_tokens) | (keys < self.global_tokens)

    def stretches(self, grid: Grid, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the kept columns of rows: [0, globals) and then [low, high). Rows with a global position keep everything."""
        left, right = self.sides(grid.num_positions)
        first, last = grid.queries(row)
        is_global = first < self.global_tokens
        num_globals = min(-(-self.global_tokens // grid.k_block), grid.num_columns)
        low = torch.where(is_global, 0, (first - left).clamp(min=0) // grid.k_block)
        high = torch.where(is_global, grid.num_columns, (last + right).clamp(max=grid.num_positions - 1) // grid.k_block + 1)
        return low.clamp(max=num_globals), low, high

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_globals, low, high = self.stretches(grid, grid.rows())
        starts, ends = torch.stack([torch.zeros_like(low), low], 1), torch.stack([num_globals, high], 1)
        index, column = expand(starts.flatten(), ends.flatten())
        return torch.zeros_like(index), index // 2 + grid.first_row, column

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, distance = super().classify(grid, head, row, column)
        (first_query, last_query), (first_key, last_key) = grid.queries(row), grid.keys(column)
        some_query, every_query = first_query < self.global_tokens, last_query < self.global_tokens
        some_key, every_key = first_key < self.global_tokens, last_key < self.global_tokens
        full = (state == FULL) | every_query | every_key
        # if global positions end inside the block, its row (column) determines where
        key = torch.where(state > 0, distance, _NO_WINDOW) * 4 + some_query * 2 + some_key
        return state_of((state > 0) | some_query | some_key, full), key

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + 2 * (self.global_tokens / grid.k_block + 1), grid.num_columns)

    def causal(self) -> BlockPattern:
        assert isinstance(self.window, tuple)
        return BlockPattern.causal(GlobalLocal((self.window[0], 0), self.global_tokens, block_size=self.block_size))

    def interval(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return super().interval(positions, num_positions) if self.global_tokens == 0 else None


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
        object.__setattr__(self, "random_blocks", as_int("random_blocks", self.random_blocks, minimum=0))
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def per_head(self) -> bool:
        return self.random_blocks > 0

    @property
    def is_prefix_stable(self) -> bool:
        # blocks are drawn from those of the whole sequence
        return self.random_blocks == 0

    def most_drawn(self, grid: Grid) -> int:
        """Returns the largest number of blocks that a row draws; a row cannot draw more than all columns of the sequence."""
        return min(self.random_blocks, max(grid.num_columns, 1))

    def draws(self, grid: Grid, head: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        """Returns the columns drawn for each row by Floyd's sampling, from those that nothing else reaches; −1 where too few are left."""
        num_globals, low, high = self.stretches(grid, row)
        between = torch.where(low > num_globals, low - num_globals, 0)
        free = between + grid.num_columns - high
        count = free.clamp(max=self.random_blocks)
        most = self.most_drawn(grid)
        chosen: list[torch.Tensor]
        if most == grid.num_columns:
            # every row takes all columns that are left, so there is nothing to draw
            count = count.expand(torch.broadcast_shapes(head.shape, row.shape))
            chosen = [torch.where(count > number, number, -1) for number in range(most)]
            return [torch.where(x < 0, -1, torch.where(x < between, num_globals + x, high + x - between)) for x in chosen]
        random = hashed(self.seed, head[..., None], row[..., None], grid.range(0, most)).unbind(-1)
        chosen = []
        for number in range(most):
            # each draw has one more number to choose from; a duplicate is replaced by that number, which cannot have been drawn before
            newest = free - count + number
            drawn = random[number] % (newest + 1).clamp(min=1)
            for earlier in chosen:
                drawn = torch.where(earlier == drawn, newest, drawn)
            chosen.append(torch.where(count > number, drawn, -1))
        return [torch.where(x < 0, -1, torch.where(x < between, num_globals + x, high + x - between)) for x in chosen]

    def drawn(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Returns bool: whether the block is one of those drawn."""
        found = torch.zeros((), dtype=torch.bool, device=grid.device)
        for x in self.draws(grid, head, row):
            found = found | (x == column)
        return found

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
        grid = self.grid(num_positions, device=queries.device)
        kept = super().allowed(queries, keys, heads, num_positions)
        return kept | self.drawn(grid, heads, queries // self.q_block, keys // self.k_block)

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        if not self.random_blocks or not num_positions:
            return super().mask_mod(num_positions, num_heads, device)
        grid = self.grid(num_positions, device=device)
        drawn = torch.stack(self.draws(grid, grid.range(0, num_heads)[:, None], grid.rows()[None]), -1).to(torch.int32)

        def mask_mod(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            kept = GlobalLocal.allowed(self, q_idx, kv_idx, head, num_positions)
            row, column = q_idx.clamp(max=num_positions - 1) // self.q_block, kv_idx // self.k_block
            for number in range(drawn.shape[-1]):
                kept = kept | (drawn[head, row, number] == column)
            return kept

        return mask_mod

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, row, column = super().columns(grid, heads)
        if not self.random_blocks:
            return torch.zeros_like(row), row, column
        group = grid.range(0, len(heads))[:, None]
        rows = grid.rows()
        shared = grid.block(row - grid.first_row, column) + group * (grid.num_rows * grid.num_columns)
        drawn = torch.stack(self.draws(grid, torch.tensor(heads, device=grid.device)[:, None], rows), 1)
        blocks = torch.where(drawn < 0, -1, grid.block(group[:, None] * grid.num_rows + rows - grid.first_row, drawn))
        # drawn blocks are distinct from the others, so no block occurs twice
        ordered, _ = torch.cat([shared.flatten(), blocks[blocks >= 0]]).sort()
        which, column = divided(ordered, max(grid.num_columns, 1))
        group, row = divided(which, max(grid.num_rows, 1))
        return group, row + grid.first_row, column

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, key = super().classify(grid, head, row, column)
        # blocks of one row are consecutive, so the draws of a row are made once
        blocks = max(-(-grid.num_positions // grid.q_block), 1)
        rows, of_row = torch.unique_consecutive(head * blocks + row, return_inverse=True)
        found = torch.zeros_like(row, dtype=torch.bool)
        for drawn in self.draws(grid, *divided(rows, blocks)):
            found |= drawn[of_row] == column
        return torch.where(found, FULL, state), key

    def cost(self, grid: Grid) -> float:
        return min(super().cost(grid) + self.random_blocks, grid.num_columns)

    def causal(self) -> BlockPattern:
        # the draws depend on the whole window
        return BlockPattern.causal(self)

    def interval(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return super().interval(positions, num_positions) if self.random_blocks == 0 else None
