"""Patterns that keep whole blocks only: strided, dilated, axial, given as a table, or drawn at random.

Draws are hashes of (seed, head, row, draw), so that every process and device draws the same blocks without a table.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import FULL, MAX_POSITIONS, SEED, BlockPattern, Blocks, Ends, Grid, Heads, States
from dilated_attention.pattern.checks import check_bool, check_number, shown


@dataclass(frozen=True)
class WholeBlocks(BlockPattern):
    """Base class of patterns that keep whole blocks and whose parameters count in blocks. Only causality cuts a block."""

    @abstractmethod
    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Returns bool: whether the block is kept, elementwise on broadcastable tensors. Columns behind the last count as not kept."""

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        grid = self.grid(num_positions, device=queries.device)
        return self.keeps(grid, heads, queries // self.q_block, keys // self.k_block)

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        return self.keeps(grid, head, row, column).to(torch.int8) * FULL, torch.zeros_like(row)

    def interval(self, positions: Tensor, num_positions: int) -> Ends | None:
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

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        distance = grid.range(1 - grid.num_columns, max(grid.num_columns, 1))
        column = torch.stack(own_columns(grid, grid.rows())[: own_count(grid)], 1)[:, :, None] + distance[self.keeps_at(distance)]
        index = grid.range(0, grid.num_rows)[:, None, None].expand_as(column)
        inside = (column >= 0) & (column < grid.num_columns)
        return grid.blocks_of(torch.unique(grid.block_number(index[inside], column[inside])))


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
    limits = ("stride_blocks", 1, MAX_POSITIONS), ("local_blocks", 0, MAX_POSITIONS)
    stride_blocks: int
    local_blocks: int = 1

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
    limits = ("dilation", 1, MAX_POSITIONS), ("num_blocks", 1, MAX_POSITIONS)
    dilation: int
    num_blocks: int

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

    limits = (("width", 1, MAX_POSITIONS),)
    width: int

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

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        width, last_position = self.width, grid.num_positions - 1
        if width <= grid.q_block:
            return super().columns(grid, heads)
        first, last = grid.queries(grid.rows())
        # of each row of blocks, every row of the image, by its distance from the queries' own
        index, step = elements_of(-(last // width), (last_position - first) // width + 1)
        first, last = first[index], last[index]
        # the own ones are kept from end to end, of the others what is above and below the queries
        low = torch.where(step == 0, first // width * width, first + step * width)
        high = torch.where(step == 0, (last // width + 1) * width - 1, last + step * width)
        which, column = elements_of(low.clamp(min=0) // grid.k_block, high.clamp(max=last_position) // grid.k_block + 1)
        return grid.blocks_of(torch.unique(grid.block_number(index[which], column)))

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

    @property
    def per_head(self) -> bool:
        """False: a table of one head is that of all; a class whose heads differ says so."""
        return False

    @abstractmethod
    def table(self, heads: slice | list[int]) -> Tensor:
        """Returns bool (heads, rows, columns) of some heads: whether the block is kept."""

    def keeps(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        table, row = self.table(slice(None)).to(grid.device), row - self.first_row
        inside = (row >= 0) & (row < table.shape[1]) & (column < table.shape[2])
        head = head if table.shape[0] > 1 else torch.zeros_like(head)
        return inside & table[head, row.clamp(0, max(table.shape[1] - 1, 0)), column.clamp(max=table.shape[2] - 1)]

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
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
        heads = num_heads if self.mask.shape[0] > 1 else 1
        if tuple(self.mask.shape) != (heads, rows, columns):
            raise ValueError(
                f"mask has shape {tuple(self.mask.shape)}; {num_heads} heads of {num_positions} positions have ({num_heads} or 1, {rows}, "
                f"{columns}) blocks of {self.q_block}x{self.k_block}"
            )

    def table(self, heads: slice | list[int]) -> Tensor:
        return self.mask[heads]


def own_columns(grid: Grid, row: Tensor) -> Ends:
    """Returns the first and the last key block that hold positions of a query block."""
    first, last = grid.queries(row)
    return first // grid.k_block, last // grid.k_block


def own_count(grid: Grid) -> int:
    """Returns the number of key blocks that hold the positions of a whole query block."""
    return max(1, grid.q_block // grid.k_block)


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

    shares_lists, limits = True, (SEED,)
    ratio: float
    seed: int = 0
    per_head: bool = True
    own_block: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(ratio=checked_ratio(self.ratio))
        check_bool("per_head", self.per_head)
        check_bool("own_block", self.own_block)

    def counts(self, grid: Grid, row: Tensor) -> Tensor:
        """Returns the number of kept blocks in rows of the whole sequence."""
        rows = grid.num_sequence_rows
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

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        rows = grid.rows()
        index, number = elements_of(torch.zeros_like(rows), self.counts(grid, rows))
        group = grid.range(0, len(heads))[:, None]
        head = self._drawing(torch.tensor(heads, device=grid.device)[:, None])
        row = rows[index]
        column = self.draw(grid, head, row, self.counts(grid, row), number)
        return group.expand_as(column).flatten(), row.expand_as(column).flatten(), column.flatten()

    def entries(self, grid: Grid, heads: Heads) -> tuple[Blocks, Tensor, Tensor]:
        # what is drawn is kept, so nothing is drawn a second time to ask
        group, row, column = self.columns(grid, heads)
        return (group, row, column), torch.ones_like(row, dtype=torch.bool), torch.zeros_like(row)

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


def elements_of(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (i, x) for every x in range i, [low[i], high[i]), in order: [2, 7) and [5, 4) and [0, 1) give i = 0 0 0 0 0 2 and
    x = 2 3 4 5 6 0. It takes one host synchronization."""
    counts = (high - low).clamp(min=0)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    index = torch.repeat_interleave(counts, output_size=total)
    # range i begins at place ends[i] − counts[i] of the result
    return index, (low - ends + counts)[index] + torch.arange(total, device=low.device)


def ordered(numbers: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Returns distinct int64 numbers from 0 below ``end`` in ascending order, and where each of them was."""
    if numbers.is_cuda or end > 16 * len(numbers):
        return numbers.sort()
    # on a CPU, marking them takes a third of the time of sorting them
    place = numbers.new_full((end,), -1).scatter_(0, numbers, torch.arange(len(numbers), device=numbers.device))
    ascending = (place >= 0).nonzero()[:, 0]
    return ascending, place.index_select(0, ascending)
