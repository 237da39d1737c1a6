"""A pattern defined by a Python function of single pairs, like FlexAttention's ``mask_mod``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dilated_attention.pattern.blocks.base import FULL, PARTIAL, BlockPattern, Grid, MaskMod, expand
from dilated_attention.pattern.blocks.whole_blocks import merged

# pairs that are evaluated at once
_PAIRS_AT_ONCE = 2**24


@dataclass(frozen=True)
class MaskFunction(BlockPattern):
    """The pairs for which a function returns True. It is evaluated once for every pair, in O(N²) time, in chunks of blocks.

    In an intersection with a cheaper pattern (``LocalWindow(4096) & MaskFunction(fn)``, or ``is_causal``), it is evaluated only on the
    blocks of that pattern.

    Args:
        fn: fn(batch, head, q_idx, kv_idx) -> bool, elementwise on int64 tensors that broadcast, on the device on which lists are built. Any
            function works that FlexAttention takes and that has no Python branches. ``batch`` is 0. It must not change afterwards.
        per_head: whether the result depends on ``head``; if not, ``head`` is 0.
    """

    fn: MaskMod
    per_head: bool = False

    holds_objects: ClassVar[bool] = True
    is_tight: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise TypeError(f"fn is {self.fn!r} ({type(self.fn).__name__}); expected a function fn(batch, head, q_idx, kv_idx) -> bool")

    @property
    def is_prefix_stable(self) -> bool:
        return True

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
        # a function may index tables of N entries with positions
        queries, keys = (x.clamp(max=num_positions - 1) for x in (queries, keys))
        batch = torch.zeros_like(heads)
        kept = self.fn(batch, heads if self.per_head else batch, queries, keys)
        if not isinstance(kept, torch.Tensor) or kept.dtype is not torch.bool:
            found = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
            raise TypeError(f"fn returned {found}; expected a bool tensor, True where query q_idx attends to key kv_idx")
        return kept

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = grid.rows()
        _, row, column = merged(grid, expand(torch.zeros_like(rows), torch.full_like(rows, grid.num_columns)))
        group = grid.range(0, len(heads)).repeat_interleave(len(row))
        return group, row.repeat(len(heads)), column.repeat(len(heads))

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.zeros_like(row, dtype=torch.int8)
        step = _PAIRS_AT_ONCE // (grid.q_block * grid.k_block)
        for first in range(0, row.shape[0], step):
            part = slice(first, first + step)
            queries = (row[part, None] * grid.q_block + grid.range(0, grid.q_block))[:, :, None]
            keys = (column[part, None] * grid.k_block + grid.range(0, grid.k_block))[:, None, :]
            # clamped positions repeat the last ones, which are evaluated anyway
            kept = self.allowed(queries, keys, head[part, None, None], grid.num_positions)
            kept = kept.broadcast_to(queries.shape[0], grid.q_block, grid.k_block)
            some, every = kept.any(2).any(1), kept.all(2).all(1)
            state[part] = torch.where(every, FULL, some * PARTIAL).to(torch.int8)
        block = grid.block(row, column)
        return state, block + head * (grid.num_columns * max(grid.last_row, 1)) if self.per_head else block

    def cost(self, grid: Grid) -> float:
        # more expensive than any list
        return 4.0 * grid.num_columns
