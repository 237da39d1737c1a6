"""The blocks of a sequence as a grid of numbers, and operations on them that take tensors and numpy arrays.

Lists are made of numpy arrays on the host, whose operations on few numbers take a third of the time of torch's. So the classes of this
package write ``columns`` and ``classify``, and what these call, for arrays and for tensors; ``array_module`` has what both have. Patterns
of one's own, and those that hold tensors or functions, get tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# pairs evaluated at once, which bounds the memory of building lists
PAIRS_AT_ONCE = 2**24
# a tensor or a numpy array
Array = Any
# blocks as (index into the heads, row, column), and what they are: (state, key)
Blocks = tuple[Array, Array, Array]
States = tuple[Array, Array]
# states of a block: no pair kept · some pairs kept · every pair within the sequence kept
ABSENT, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Grid:
    """The blocks of a sequence, and the requested rows of them: [first_row, last_row). Numbers are tensors, or numpy ``arrays``."""

    num_positions: int
    q_block: int
    k_block: int
    first_row: int
    last_row: int
    device: torch.device
    arrays: bool = False

    @property
    def num_columns(self) -> int:
        return -(-self.num_positions // self.k_block)

    @property
    def num_rows(self) -> int:
        """Number of requested rows."""
        return self.last_row - self.first_row

    @property
    def whole_rows(self) -> int:
        """Number of rows of the whole sequence, at least 1."""
        return max(-(-self.num_positions // self.q_block), 1)

    def rows(self) -> Array:
        return self.range(self.first_row, self.last_row)

    def range(self, first: int, last: int) -> Array:
        return np.arange(first, last) if self.arrays else torch.arange(first, last, device=self.device)

    def queries(self, row: Array) -> tuple[Array, Array]:
        """Returns the first and the last position of query blocks."""
        return self._ends(row, self.q_block)

    def keys(self, column: Array) -> tuple[Array, Array]:
        """Returns the first and the last position of key blocks."""
        return self._ends(column, self.k_block)

    def _ends(self, block: Array, size: int) -> tuple[Array, Array]:
        first = block * size
        last = first + (size - 1)
        return first, last if self.num_positions % size == 0 else at_most(last, self.num_positions - 1)

    def block(self, row: Array, column: Array) -> Array:
        """Returns a unique number for each block of the whole sequence."""
        return row * self.num_columns + column

    def listed(self, blocks: Array) -> Blocks:
        """Returns ``BlockPattern.columns`` of ascending numbers ``block(group · num_rows + row − first_row, column)``."""
        rows, column = divided(blocks, max(self.num_columns, 1))
        group, row = divided(rows, max(self.num_rows, 1))
        return group, row + self.first_row, column

    def positions(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the positions in blocks, queries (blocks, q_block, 1) and keys (blocks, 1, k_block), also those behind the end."""
        queries = row[:, None] * self.q_block + self.range(0, self.q_block)
        return queries[:, :, None], (column[:, None] * self.k_block + self.range(0, self.k_block))[:, None]

    def parts(self, count: int) -> list[slice]:
        """Returns slices of ``count`` blocks, each with as many blocks as are evaluated at once."""
        step = max(1, PAIRS_AT_ONCE // (self.q_block * self.k_block))
        return [slice(first, first + step) for first in range(0, count, step)]


@dataclass(frozen=True, eq=False)
class Entries:
    """Kept blocks as a flat list, ascending by (group, row, column).

    ``group``: (E,) int64, index of the head, 0 if all heads share one list; ``row, column``: (E,) int64, in the whole sequence; ``full``:
    (E,) bool, every pair within the sequence is kept.
    """

    group: Tensor
    row: Tensor
    column: Tensor
    full: Tensor
    num_groups: int


def array_module(x: Array) -> Any:
    """Returns numpy for an array and torch for a tensor: functions of either have the same names and the same first arguments."""
    return np if isinstance(x, np.ndarray) else torch


def at_least(x: Array, low: Any) -> Array:
    # numpy's clip takes several times as long on few numbers
    return np.maximum(x, low) if isinstance(x, np.ndarray) else x.clamp(min=low)


def at_most(x: Array, high: Any) -> Array:
    return np.minimum(x, high) if isinstance(x, np.ndarray) else x.clamp(max=high)


def distinct(x: Array) -> Array:
    """Returns the distinct elements of x, ascending."""
    if isinstance(x, Tensor):
        return torch.unique(x)
    # numpy's unique hashes, which takes longer
    x = np.sort(x)
    return x[np.append(True, x[1:] != x[:-1])[: len(x)]]


def repeated(x: Array, counts: Array, total: int) -> Array:
    """Returns x with each element as often as ``counts`` says, ``total`` in all."""
    return np.repeat(x, counts) if isinstance(x, np.ndarray) else torch.repeat_interleave(x, counts, output_size=total)


def expand(low: Array, high: Array) -> tuple[Array, Array]:
    """Returns (i, x) for every x in range i, [low[i], high[i]), in order. It takes one host synchronization."""
    counts = at_least(high - low, 0)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    index, place = (torch.arange(n, device=low.device) if isinstance(low, Tensor) else np.arange(n) for n in (len(low), total))
    return repeated(index, counts, total), repeated(low - ends + counts, counts, total) + place


def head_of(group: Array, heads: tuple[int, ...]) -> Array:
    """Returns the heads of indices into ``heads``."""
    if heads == tuple(range(len(heads))):
        return group
    return np.array(heads)[group] if isinstance(group, np.ndarray) else torch.tensor(heads, device=group.device)[group]


def state_of(kept: Array, full: Array) -> Array:
    """Returns the states of blocks. Every full block must be kept."""
    return kept * 1 + full


def divided(x: Array, by: int) -> tuple[Array, Array]:
    """Returns (x // by, x % by)."""
    quotient = x // by
    return quotient, x - quotient * by
