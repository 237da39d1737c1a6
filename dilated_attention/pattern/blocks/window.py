"""Patterns in which each query keeps one contiguous range of keys: windows, causality, documents."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import BlockPattern, Blocks, Grid, MaskMod, States, expand, state_of
from dilated_attention.pattern.checks import MAX_LENGTH, as_int, as_int_tuple, shown


@dataclass(frozen=True)
class IntervalPattern(BlockPattern):
    """Base class of patterns in which query i keeps the keys low(i) ≤ j < high(i). Neither end falls from one query to the next."""

    @abstractmethod
    def reach(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Returns (low, high) of queries at these positions: their first key and one after their last key."""

    def interval(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor] | None:
        return self.reach(positions, num_positions)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        low, high = self.reach(queries, num_positions)
        return (keys >= low) & (keys < high)

    def stretch(self, grid: Grid, row: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (first, last + 1) column that each row reaches."""
        (low, _), (_, high) = (self.reach(query, grid.num_positions) for query in grid.queries(row))
        return low // grid.k_block, (high + (grid.k_block - 1)) // grid.k_block

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        index, column = expand(*self.stretch(grid, grid.rows()))
        return torch.zeros_like(index), index + grid.first_row, column

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        """Returns the states, and as keys the distances of the blocks, which determine the mask of a window."""
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

    window: int | tuple[int | None, int | None]

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

    def sides(self, num_positions: int) -> tuple[int, int]:
        assert isinstance(self.window, tuple)
        left, right = (num_positions if side is None else min(side, num_positions) for side in self.window)
        return left, right

    def cost(self, grid: Grid) -> float:
        return min((sum(self.sides(grid.num_positions)) + grid.q_block) / grid.k_block + 1, grid.num_columns)

    def causal(self) -> BlockPattern:
        assert isinstance(self.window, tuple)
        return LocalWindow((self.window[0], 0), block_size=self.block_size)

    def reach(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        left, right = self.sides(num_positions)
        return (positions - left).clamp(min=0), (positions + (right + 1)).clamp(max=num_positions)


@dataclass(frozen=True)
class Causal(IntervalPattern):
    """Keys up to the query: j ≤ i. ``is_causal=True`` adds the same restriction to any pattern."""

    is_prefix_stable = shares_lists = True

    def cost(self, grid: Grid) -> float:
        return grid.num_columns / 2 + 1

    def causal(self) -> BlockPattern:
        return self

    def reach(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(positions), positions + 1


@dataclass(frozen=True)
class Document(IntervalPattern):
    """Keys of the query's own document. Documents of the given lengths are packed one after another.

    Args:
        lengths: number of positions of each document; they sum to N.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = as_int_tuple("lengths", self.lengths)
        self._set(lengths=tuple(as_int(f"lengths[{i}]", length, minimum=0) for i, length in enumerate(lengths)))

    def check(self, num_positions: int, num_heads: int) -> None:
        if sum(self.lengths) != num_positions:
            raise ValueError(
                f"lengths sum to {sum(self.lengths)}, the sequence has {num_positions} positions; give lengths that sum to that"
            )

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        return super().classify(grid, head, row, column)[0], grid.block(row, column)

    def cost(self, grid: Grid) -> float:
        return sum(length**2 for length in self.lengths) / max(grid.num_positions, 1) / grid.k_block + 2

    def reach(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
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
