"""Patterns that keep whole blocks only: strided, dilated, axial, or given as a table."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import FULL, MAX_POSITIONS, BlockPattern, Blocks, Grid, States, expand


@dataclass(frozen=True)
class WholeBlocks(BlockPattern):
    """Base class of patterns that keep whole blocks and whose parameters count in blocks. Only causality cuts a block."""

    @abstractmethod
    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Returns bool: whether the block is kept, elementwise on broadcastable tensors."""

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        grid = self.grid(num_positions, device=queries.device)
        return self.keeps(grid, heads, queries // self.q_block, keys // self.k_block)

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        return self.keeps(grid, head, row, column).to(torch.int8) * FULL, torch.zeros_like(row)

    def interval(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor] | None:
        return torch.zeros_like(positions), torch.full_like(positions, num_positions)


@dataclass(frozen=True)
class _AroundOwn(WholeBlocks):
    """Base class of patterns that keep columns by their distance from the row's own ones: the key blocks that hold its positions."""

    @property
    def is_prefix_stable(self) -> bool:  # type: ignore[override]
        # the end of the sequence may leave the first half of a query block, whose second own column is then no longer one
        return self.q_block <= self.k_block

    @abstractmethod
    def keeps_at(self, distance: Tensor) -> Tensor:
        """Returns bool: whether a column at this distance of one of the own columns is kept."""

    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        first, last = own_columns(grid, row)
        return self.keeps_at(column - first) | self.keeps_at(column - last)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        distance = grid.range(1 - grid.num_columns, max(grid.num_columns, 1))
        column = torch.stack(own_columns(grid, grid.rows())[: own_count(grid)], 1)[:, :, None] + distance[self.keeps_at(distance)]
        index = grid.range(0, grid.num_rows)[:, None, None].expand_as(column)
        inside = (column >= 0) & (column < grid.num_columns)
        return merged(grid, (index[inside], column[inside]))


@dataclass(frozen=True)
class Strided(_AroundOwn):
    """The blocks next to the row's own, and every ``stride_blocks``-th block (Sparse Transformers, arXiv 1904.10509, section 4.2).

    A query block's own columns are the key blocks that hold its positions: one, or two if key blocks are half as long. Column c is kept
    if an own column o has |c − o| < local_blocks or c ≡ o (mod stride_blocks).

    Args:
        stride_blocks: distance between far blocks, in key blocks; ≥ 1.
        local_blocks: number of blocks kept on each side, including the row's own block; ≥ 0.

    Differs from the paper: strides count blocks, not positions, and both parts are one pattern instead of two sets of heads. Use
    ``PerHead`` to give the parts to separate heads.
    """

    shares_lists = True
    stride_blocks: int
    local_blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("stride_blocks", 1, MAX_POSITIONS)
        self._check_int("local_blocks", 0, MAX_POSITIONS)

    def keeps_at(self, distance: Tensor) -> Tensor:
        return (distance.abs() < self.local_blocks) | (distance % self.stride_blocks == 0)

    def cost(self, grid: Grid) -> float:
        return min(2 * self.local_blocks + 2 * grid.num_columns / self.stride_blocks + 2, grid.num_columns)


@dataclass(frozen=True)
class DilatedBlocks(_AroundOwn):
    """``num_blocks`` blocks around the row's own, ``dilation`` apart (Longformer's dilated window, arXiv 2004.05150, 3.1, in blocks).

    Keeps column c = o + t · dilation for t = −⌊num_blocks / 2⌋ … ⌈num_blocks / 2⌉ − 1 and each own column o (see ``Strided``), if that
    column exists. With an even number, the extra block is in the past.

    Args:
        dilation: distance between kept blocks, in key blocks; ≥ 1.
        num_blocks: number of kept blocks, away from the ends of the sequence; ≥ 1.
    """

    shares_lists = True
    dilation: int
    num_blocks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("dilation", 1, MAX_POSITIONS)
        self._check_int("num_blocks", 1, MAX_POSITIONS)

    def keeps_at(self, distance: Tensor) -> Tensor:
        before, after = self.num_blocks // 2, (self.num_blocks - 1) // 2
        return (distance % self.dilation == 0) & (distance >= -before * self.dilation) & (distance <= after * self.dilation)

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("width", 1, MAX_POSITIONS)

    @property
    def is_prefix_stable(self) -> bool:  # type: ignore[override]
        # otherwise a query block that the end of the sequence cuts short shares image columns with fewer key blocks
        return self.q_block == self.k_block and self.width % self.q_block == 0

    shares_lists = is_prefix_stable  # type: ignore[assignment]

    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        first_query, last_query = grid.queries(row)
        first_key, last_key = grid.keys(column)
        same_row = (first_key // self.width <= last_query // self.width) & (first_query // self.width <= last_key // self.width)
        # true if a multiple of the width is between the smallest and the largest distance (key − query) of the two blocks
        same_column = (last_key - first_query) // self.width * self.width >= first_key - last_query
        return same_row | same_column

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
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
class BlockTable(WholeBlocks):
    """Base class of patterns that a table of kept blocks defines. An instance is equal only to itself."""

    holds_objects: ClassVar[bool] = True
    # query block of the table's first row
    first_row = 0

    # those of the base class would compare only block sizes
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @abstractmethod
    def table(self, heads: slice | list[int]) -> Tensor:
        """Returns bool (heads, rows, columns) of some heads: whether the block is kept."""

    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        table, row = self.table(slice(None)).to(grid.device), row - self.first_row
        inside = (row >= 0) & (row < table.shape[1]) & (column < table.shape[2])
        head = head if self.per_head else torch.zeros_like(head)
        return inside & table[head, row.clamp(0, max(table.shape[1] - 1, 0)), column.clamp(max=table.shape[2] - 1)]

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        rows = slice(grid.first_row - self.first_row, grid.last_row - self.first_row)
        group, row, column = self.table(list(heads) if self.per_head else [0])[:, rows].to(grid.device).nonzero(as_tuple=True)
        return group, row + grid.first_row, column


@dataclass(frozen=True, eq=False)
class BlockTensor(BlockTable):
    """The blocks that a table marks as kept. An instance is equal only to itself.

    Args:
        mask: bool (H, rows, columns), or (1, rows, columns) or (rows, columns) for all heads: whether the block is kept. It is copied. The
            sequence must have that many rows and columns of blocks.
    """

    shares_lists = True
    mask: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mask, Tensor) or self.mask.dtype is not torch.bool:
            found = self.mask.dtype if isinstance(self.mask, Tensor) else type(self.mask).__name__
            raise TypeError(f"mask is {found}; expected a bool tensor (heads or 1, rows, columns) of blocks")
        mask = self.mask[None] if self.mask.ndim == 2 else self.mask
        if mask.ndim != 3 or mask.shape[0] == 0:
            raise ValueError(f"mask has shape {tuple(self.mask.shape)}; expected (heads or 1, rows, columns) of blocks")
        self._set(mask=mask.detach().clone())

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

    def table(self, heads: slice | list[int]) -> Tensor:
        return self.mask[heads]


def own_columns(grid: Grid, row: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first and the last key block that hold positions of a query block."""
    first, last = grid.queries(row)
    return first // grid.k_block, last // grid.k_block


def own_count(grid: Grid) -> int:
    """Returns the number of key blocks that hold the positions of a whole query block."""
    return max(1, grid.q_block // grid.k_block)


def merged(grid: Grid, *lists: tuple[Tensor, Tensor]) -> Blocks:
    """Returns ``columns`` of one group from lists of (index into the requested rows, column), sorted and without duplicates."""
    return grid.listed(torch.unique(torch.cat([grid.block(index, column) for index, column in lists])))
