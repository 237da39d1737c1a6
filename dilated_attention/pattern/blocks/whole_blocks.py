"""Patterns that keep whole blocks only: strided, dilated, axial, or given as a table."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dilated_attention.pattern.blocks.base import FULL, MAX_POSITIONS, BlockPattern, Grid, divided, expand
from dilated_attention.pattern.checks import as_int


@dataclass(frozen=True)
class WholeBlocks(BlockPattern):
    """Base class of patterns that keep whole blocks and whose parameters count in blocks. Only causality cuts a block."""

    @abstractmethod
    def keeps(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Returns bool: whether the block is kept, elementwise on broadcastable tensors."""

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
        grid = self.grid(num_positions, device=queries.device)
        return self.keeps(grid, heads, queries // self.q_block, keys // self.k_block)

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keeps(grid, head, row, column).to(torch.int8) * FULL, torch.zeros_like(row)

    def interval(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return torch.zeros_like(positions), torch.full_like(positions, num_positions)


@dataclass(frozen=True)
class Strided(WholeBlocks):
    """The blocks next to the row's own, and every ``stride_blocks``-th block (Sparse Transformers, arXiv 1904.10509, section 4.2).

    A query block's own columns are the key blocks that hold its positions: one, or two if key blocks are half as long. Column c is kept
    if an own column o has |c − o| < local_blocks or c ≡ o (mod stride_blocks).

    Args:
        stride_blocks: distance between far blocks, in key blocks; ≥ 1.
        local_blocks: number of blocks kept on each side, including the row's own block; ≥ 0.

    Differs from the paper: strides count blocks, not positions, and both parts are one pattern instead of two sets of heads. Use
    ``PerHead`` to give the parts to separate heads.
    """

    stride_blocks: int
    local_blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stride_blocks", as_int("stride_blocks", self.stride_blocks, minimum=1, maximum=MAX_POSITIONS))
        object.__setattr__(self, "local_blocks", as_int("local_blocks", self.local_blocks, minimum=0, maximum=MAX_POSITIONS))

    @property
    def is_prefix_stable(self) -> bool:
        # the end of the sequence may leave the first half of a query block, whose second own column is then no longer one
        return self.q_block <= self.k_block

    def keeps(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        first, last = own_columns(grid, row)
        near = (column > first - self.local_blocks) & (column < last + self.local_blocks)
        return near | ((column - first) % self.stride_blocks == 0) | ((column - last) % self.stride_blocks == 0)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, last = own_columns(grid, grid.rows())
        near = expand((first - self.local_blocks + 1).clamp(min=0), (last + self.local_blocks).clamp(max=grid.num_columns))
        if self.local_blocks == 0:
            near = (near[0][:0], near[1][:0])
        return merged(grid, near, *(self._far(grid, own) for own in (first, last)[: own_count(grid)]))

    def _far(self, grid: Grid, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lowest = own % self.stride_blocks
        index, step = expand(torch.zeros_like(lowest), (grid.num_columns - lowest + self.stride_blocks - 1) // self.stride_blocks)
        return index, lowest[index] + step * self.stride_blocks

    def cost(self, grid: Grid) -> float:
        return min(2 * self.local_blocks + 2 * grid.num_columns / self.stride_blocks + 2, grid.num_columns)


@dataclass(frozen=True)
class DilatedBlocks(WholeBlocks):
    """``num_blocks`` blocks around the row's own, ``dilation`` apart (Longformer's dilated window, arXiv 2004.05150, 3.1, in blocks).

    Keeps column c = o + t · dilation for t = −⌊num_blocks / 2⌋ … ⌈num_blocks / 2⌉ − 1 and each own column o (see ``Strided``), if that
    column exists. With an even number, the extra block is in the past.

    Args:
        dilation: distance between kept blocks, in key blocks; ≥ 1.
        num_blocks: number of kept blocks, away from the ends of the sequence; ≥ 1.
    """

    dilation: int
    num_blocks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dilation", as_int("dilation", self.dilation, minimum=1, maximum=MAX_POSITIONS))
        object.__setattr__(self, "num_blocks", as_int("num_blocks", self.num_blocks, minimum=1, maximum=MAX_POSITIONS))

    @property
    def is_prefix_stable(self) -> bool:
        # the end of the sequence may leave the first half of a query block, whose second own column is then no longer one
        return self.q_block <= self.k_block

    @property
    def reach(self) -> tuple[int, int]:
        """Returns the number of blocks before and after the row's own."""
        return self.num_blocks // 2, (self.num_blocks - 1) // 2

    def keeps(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        first, last = own_columns(grid, row)
        return self._around(column - first) | self._around(column - last)

    def _around(self, distance: torch.Tensor) -> torch.Tensor:
        before, after = self.reach
        return (distance % self.dilation == 0) & (distance >= -before * self.dilation) & (distance <= after * self.dilation)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return merged(grid, *(self._of(grid, own) for own in own_columns(grid, grid.rows())[: own_count(grid)]))

    def _of(self, grid: Grid, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before, after = self.reach
        low, high = (-(own // self.dilation)).clamp(min=-before), ((grid.num_columns - 1 - own) // self.dilation).clamp(max=after)
        index, step = expand(low, high + 1)
        return index, own[index] + step * self.dilation

    def cost(self, grid: Grid) -> float:
        return min(2 * self.num_blocks, grid.num_columns)


@dataclass(frozen=True)
class Axial(WholeBlocks):
    """The blocks in the same row and in the same column of an image (axial attention, arXiv 1912.12180).

    Position p is at row p // width and column p % width. A key block is kept whole if any of its keys shares a row or a column of the
    image with any query of the query block.

    Args:
        width: number of positions in a row of the image. If it is at most a block, every block sees everything.

    Differs from the paper: rows and columns share one softmax, and blocks are whole. A width that is a multiple of the block size keeps the
    fewest pairs beyond the paper's.
    """

    width: int

    # if the image is narrower than a block, listed columns include some that the short last row does not keep
    is_tight: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "width", as_int("width", self.width, minimum=1, maximum=MAX_POSITIONS))

    @property
    def is_prefix_stable(self) -> bool:
        # otherwise a query block that the end of the sequence cuts short shares image columns with fewer key blocks
        return self.q_block == self.k_block and self.width % self.q_block == 0

    def keeps(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        first_query, last_query = grid.queries(row)
        first_key, last_key = grid.keys(column)
        same_row = (first_key // self.width <= last_query // self.width) & (first_query // self.width <= last_key // self.width)
        # true if a multiple of the width is between the smallest and the largest distance (key − query) of the two blocks
        same_column = (last_key - first_query) // self.width * self.width >= first_key - last_query
        return same_row | same_column

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, last = grid.queries(grid.rows())
        end = grid.num_positions
        if self.width <= grid.q_block:
            return merged(grid, expand(torch.zeros_like(first), torch.full_like(first, grid.num_columns)))
        stretch = (last // self.width + 1) * self.width
        same_row = expand(first // self.width * self.width // grid.k_block, (stretch.clamp(max=end) - 1) // grid.k_block + 1)
        index, step = expand(-(last // self.width), (end - 1 - first) // self.width + 1)
        low = (first[index] + step * self.width).clamp(min=0) // grid.k_block
        high = (last[index] + step * self.width).clamp(max=end - 1) // grid.k_block + 1
        which, column = expand(low, high)
        return merged(grid, same_row, (index[which], column))

    def cost(self, grid: Grid) -> float:
        return min((self.width + grid.q_block) / grid.k_block + 2 * (grid.num_positions / self.width + 1), grid.num_columns)


@dataclass(frozen=True, eq=False)
class BlockTensor(WholeBlocks):
    """The blocks that a table marks as kept. An instance is equal only to itself.

    Args:
        mask: bool (H, rows, columns), or (1, rows, columns) or (rows, columns) for all heads: whether the block is kept. It is copied. The
            sequence must have that many rows and columns of blocks.
    """

    mask: torch.Tensor = field(repr=False)

    holds_objects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mask, torch.Tensor) or self.mask.dtype is not torch.bool:
            found = self.mask.dtype if isinstance(self.mask, torch.Tensor) else type(self.mask).__name__
            raise TypeError(f"mask is {found}; expected a bool tensor (heads or 1, rows, columns) of blocks")
        mask = self.mask[None] if self.mask.ndim == 2 else self.mask
        if mask.ndim != 3 or mask.shape[0] == 0:
            raise ValueError(f"mask has shape {tuple(self.mask.shape)}; expected (heads or 1, rows, columns) of blocks")
        object.__setattr__(self, "mask", mask.detach().clone())

    # the base class would compare only block sizes
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def per_head(self) -> bool:
        return self.mask.shape[0] > 1

    def check(self, num_positions: int, num_heads: int) -> None:
        rows, columns = (-(-num_positions // size) for size in (self.q_block, self.k_block))
        heads = num_heads if self.per_head else 1
        if tuple(self.mask.shape) != (heads, rows, columns):
            raise ValueError(
                f"mask has shape {tuple(self.mask.shape)}; {num_heads} heads of {num_positions} positions have ({num_heads} or 1, {rows}, "
                f"{columns}) blocks of {self.q_block}x{self.k_block}"
            )

    def keeps(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        mask = self.mask.to(grid.device)
        head = head if self.per_head else torch.zeros_like(head)
        return mask[head, row.clamp(max=mask.shape[1] - 1), column.clamp(max=mask.shape[2] - 1)]

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mask = self.mask[list(heads) if self.per_head else [0], grid.first_row : grid.last_row].to(grid.device)
        group, row, column = mask.nonzero(as_tuple=True)
        return group, row + grid.first_row, column


def own_columns(grid: Grid, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and the last key block that hold positions of a query block."""
    first, last = grid.queries(row)
    return first // grid.k_block, last // grid.k_block


def own_count(grid: Grid) -> int:
    """Returns the number of key blocks that hold the positions of a whole query block."""
    return max(1, grid.q_block // grid.k_block)


def merged(grid: Grid, *found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``columns`` of one group from lists of (index into the requested rows, column), sorted and without duplicates."""
    blocks = torch.cat([grid.block(index, column) for index, column in found])
    row, column = divided(torch.unique(blocks), max(grid.num_columns, 1))
    return torch.zeros_like(row), row + grid.first_row, column
