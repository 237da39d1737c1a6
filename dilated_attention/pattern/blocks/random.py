"""Random blocks, drawn by a hash of (seed, head, row, draw), so that every process and device draws the same blocks without a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import Blocks, Grid, expand
from dilated_attention.pattern.blocks.whole_blocks import WholeBlocks, own_columns
from dilated_attention.pattern.checks import as_int, check_bool, check_number, shown

# SplitMix64's increment and finaliser (Steele, Lea, Flood 2014) as signed integers: int64 products wrap, as it needs
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass(frozen=True)
class RandomBlocks(WholeBlocks):
    """Random blocks, exactly ``round(ratio · rows · columns)`` of them for each head.

    The numbers of blocks in rows differ by at most one. The n blocks of a row are drawn one from each of n nearly equal ranges of
    columns, so they are distinct and spread over the whole sequence.

    Args:
        ratio: fraction of blocks kept, 0 … 1.
        seed: seed of the draws.
        per_head: every head draws separately; otherwise all heads share one list.
        own_block: a row that keeps any block keeps the key block of its first position. Without it, causal rows may be empty.
    """

    shares_lists = True
    ratio: float
    seed: int = 0
    per_head: bool = True
    own_block: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(ratio=checked_ratio(self.ratio), seed=checked_seed(self.seed))
        check_bool("per_head", self.per_head)
        check_bool("own_block", self.own_block)

    def counts(self, grid: Grid, row: Tensor) -> Tensor:
        """Returns the number of kept blocks in rows of the whole sequence."""
        rows = grid.whole_rows
        total = round(self.ratio * rows * grid.num_columns)
        return (row + 1) * total // rows - row * total // rows

    def draw(self, grid: Grid, head: Tensor, row: Tensor, count: Tensor, number: Tensor) -> Tensor:
        """Returns the column that draw ``number`` of ``count`` takes from its range."""
        low = number * grid.num_columns // count
        high = (number + 1) * grid.num_columns // count
        column = low + hashed(self.seed, head, row, number) % (high - low)
        if self.own_block:
            own, _ = own_columns(grid, row)
            column = torch.where((own >= low) & (own < high), own, column)
        return column

    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # callers may pass columns beyond the end, which have no range
        column = column.clamp(max=max(grid.num_columns - 1, 0))
        count = self.counts(grid, row)
        some = count.clamp(min=1)
        number = ((column + 1) * some - 1) // max(grid.num_columns, 1)
        return (count > 0) & (self.draw(grid, self._drawing(head), row, some, number) == column)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        rows = grid.rows()
        index, number = expand(torch.zeros_like(rows), self.counts(grid, rows))
        group = grid.range(0, len(heads))[:, None]
        head = self._drawing(torch.tensor(heads, device=grid.device)[:, None])
        row = rows[index]
        column = self.draw(grid, head, row, self.counts(grid, row), number)
        return group.expand_as(column).flatten(), row.expand_as(column).flatten(), column.flatten()

    def _drawing(self, head: Tensor) -> Tensor:
        return head if self.per_head else torch.zeros_like(head)

    def cost(self, grid: Grid) -> float:
        return self.ratio * grid.num_columns + 1


def hashed(seed: int, *coordinates: Tensor) -> Tensor:
    """Returns 31 random bits as int64 for each element of the broadcast coordinates. Each coordinate is mixed into the previous ones."""
    state: Tensor | int = seed
    for coordinate in coordinates:
        mixed = coordinate.to(torch.int64) + state + _STEP
        for bits, factor in _MIX:
            mixed = (mixed ^ _shifted(mixed, bits)) * factor
        state = mixed ^ _shifted(mixed, 31)
    assert isinstance(state, Tensor)
    return _shifted(state, 33)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Computes the logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def checked_ratio(value: float) -> float:
    check_number("ratio", value, "a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"ratio is {shown(value)}; expected a number from 0 to 1: the kept part of all pairs")
    return float(value)


def checked_seed(seed: int) -> int:
    return as_int("seed", seed, minimum=0, maximum=2**62 - 1)
