"""The base class of block-sparse patterns: their definition by positions, their kept blocks row by row, and their counts.

A sequence of N positions is cut into query blocks (rows) of ``q_block`` and key blocks (columns) of ``k_block`` positions. The last of
each may be shorter. A new pattern is one class with two methods: ``allowed`` and ``columns``. ``classify`` is derived from ``allowed``,
pair by pair; a class for long sequences, or one that derives from a class with its own, writes it.

Lists are made of numpy arrays on the host, whose operations on few numbers take a third of the time of torch's. So the classes of this
package write ``columns`` and ``classify``, and what these call, for arrays and for tensors; ``array_module`` has what both have. Patterns
of one's own, and those that hold tensors or functions, get tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dilated_attention.pattern.checks import MAX_HEADS, MAX_LENGTH, as_int, check_bool, shown, sizes_of_mask
from dilated_attention.pattern.spec import SpecPattern, kind_named, name_object, register_kind, restored

BLOCK_SIZES = (64, 128)
# lists of blocks store positions in 32 bits
MAX_POSITIONS = 2**31
# pairs evaluated at once, which bounds the memory of building lists
PAIRS_AT_ONCE = 2**24
# FlexAttention's mask function: (batch, head, q_idx, kv_idx) -> bool
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
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


@dataclass(frozen=True)
class BlockPattern(SpecPattern):
    """A pattern with m = 1 on the pairs that it keeps, computed block by block.

    ``allowed`` says which pairs are kept. Patterns compose by ``|`` (either keeps the pair), ``&`` (both do) and ``PerHead``.

    Args:
        block_size: positions per block: 64 or 128, or (query block, key block) with each of them 64 or 128. For patterns defined by
            positions, it does not change which pairs are kept. For patterns defined by blocks, it is the unit of their parameters.
    """

    block_size: int | tuple[int, int] = field(default=128, kw_only=True)

    # whether position t keeps the same keys j ≤ t in every sequence that contains it, whatever follows; False: no, or not known. Only
    # then does decoding a token from cached keys give the same result as the forward of any longer sequence
    is_prefix_stable: ClassVar[bool] = False
    # whether the blocks are chosen by the content of q and k; such a pattern class defines its own | and &
    is_chosen: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_kind(cls)

    def __post_init__(self) -> None:
        self._set(block_size=checked_block_size(self.block_size))
        if self.holds_objects:
            name_object(self)

    @property
    def per_head(self) -> bool:
        """Whether the lists differ between heads."""
        return False

    @property
    def reads_batch(self) -> bool:
        """Whether the pairs may differ between batch entries. The pattern is then that of entry 0."""
        return False

    @property
    def terms(self) -> tuple[BlockPattern, ...]:
        """Patterns whose union this is. Each of them is listed alone, once for all heads unless it is ``per_head``."""
        return (self,)

    def _set(self, **values: Any) -> None:
        """Sets fields, for ``__post_init__``: the record is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_int(self, name: str, minimum: int, maximum: int = MAX_LENGTH) -> None:
        self._set(**{name: as_int(name, getattr(self, name), minimum=minimum, maximum=maximum)})

    @property
    def q_block(self) -> int:
        assert isinstance(self.block_size, tuple)
        return self.block_size[0]

    @property
    def k_block(self) -> int:
        assert isinstance(self.block_size, tuple)
        return self.block_size[1]

    @abstractmethod
    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        """The definition: whether head h keeps the pair (i, j), elementwise.

        Args:
            queries, keys, heads: int64, broadcastable: absolute positions and head indices. Positions from ``num_positions`` on are
                outside the sequence; they must not raise an error, and any answer is valid for them.
            num_positions: N, the number of positions of the whole key sequence.

        Returns:
            bool, of the broadcast shape or of a shape that broadcasts to it.
        """

    @abstractmethod
    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        """Returns (index into ``heads``, row, column) of every kept block, ascending and without duplicates.

        It may include blocks that are not kept. Time and memory must be proportional to the size of the result.
        Patterns that are not ``per_head`` are called with a single head.
        """

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        """Returns (state, key), integers, of any blocks: ABSENT, PARTIAL or FULL, and of partial ones a key: blocks with equal keys keep
        the same pairs, as far as both are within the sequence.

        By default ``allowed`` is evaluated for every pair, and every block has its own key: exact, in time proportional to the pairs.
        """
        state, last = torch.zeros_like(row), grid.num_positions - 1
        for part in grid.parts(row.shape[0]):
            # clamped positions repeat the last ones, which are evaluated anyway
            queries, keys = (x.clamp(max=last) for x in grid.positions(row[part], column[part]))
            pairs = self.allowed(queries, keys, head[part, None, None], grid.num_positions)
            pairs = pairs.broadcast_to(queries.shape[0], grid.q_block, grid.k_block)
            state[part] = state_of(pairs.any(2).any(1), pairs.all(2).all(1))
        block = grid.block(row, column)
        return state, block + head * (grid.num_columns * max(grid.last_row, 1)) if self.per_head else block

    @property
    def takes_arrays(self) -> bool:
        """Whether every method of the class is one of this package, which takes numpy arrays, too."""
        return type(self).__module__.startswith("dilated_attention.") and not self.holds_objects

    def asked(self, name: str, grid: Grid, *arguments: Any) -> tuple[Array, ...]:
        """Returns what ``columns`` or ``classify`` returns, in arrays if ``grid`` has them, whatever the pattern computes with."""
        if not grid.arrays or self.takes_arrays:
            return getattr(self, name)(grid, *arguments)  # type: ignore[no-any-return]
        tensors = (torch.from_numpy(x).to(grid.device) if isinstance(x, np.ndarray) else x for x in arguments)
        return tuple(x.cpu().numpy() for x in getattr(self, name)(replace(grid, arrays=False), *tensors))

    def classified(self, grid: Grid, heads: tuple[int, ...]) -> tuple[Blocks, States]:
        """Returns ``columns`` and what ``classify`` says of them."""
        blocks = self.asked("columns", grid, heads)
        return blocks, self.asked("classify", grid, head_of(blocks[0], heads), *blocks[1:])  # type: ignore[return-value]

    def listed(self, grid: Grid, heads: tuple[int, ...]) -> tuple[Array, Array, Array, Array, Array]:
        """Returns (index into ``heads``, row, column, state, key) of the kept blocks in numpy arrays, ascending."""
        blocks, states = self.classified(replace(grid, arrays=True), heads)
        kept = np.flatnonzero(states[0] > 0)
        arrays = *blocks, *states
        return arrays if len(kept) == len(states[0]) else tuple(x[kept] for x in arrays)  # type: ignore[return-value]

    def cost(self, grid: Grid) -> float:
        """Estimates how many blocks per row ``columns`` returns. An intersection lists its cheapest part and classifies with the others."""
        return float(grid.num_columns)

    def check(self, num_positions: int, num_heads: int) -> None:
        """Raises ValueError if the pattern does not exist for this number of positions or heads."""

    def check_batch(self, num_batch: int) -> None:
        """Raises ValueError if the pairs differ between the entries of a batch of this size: a pattern holds for all of them."""
        if num_batch > 1 and self.reads_batch:
            raise ValueError(
                f"the batch has {num_batch} entries, which the function of {shown(self)} may tell apart; expected one, of index 0: call "
                "once for each entry b, with from_block_mask(mask, batch=b) of a BlockMask made for all of them, or with its own function"
            )

    def at(self, num_positions: int) -> BlockPattern:
        """Returns the pattern for ``num_positions``, which is the pattern itself unless it is defined by a density."""
        return self

    def causal(self) -> BlockPattern:
        """Returns the pattern restricted to pairs with j ≤ i."""
        return self & kind_named("Causal")(block_size=self.block_size)  # type: ignore[no-any-return]

    def interval(self, positions: Array, num_positions: int) -> tuple[Array, Array] | None:
        """Returns (low, high) if every *kept* block keeps exactly its pairs with low[i] ≤ j < high[i]; None if that is not known.
        ``positions`` are those of the queries; the result is the same for all heads."""
        return None

    def runs(self, queries: Array, num_positions: int) -> list[tuple[Array, Array]] | None:
        """Returns intervals [low, high) of keys: a query keeps the keys of a *partial* block that are in any of them; None if that is not
        known. By default the one of ``interval``."""
        interval = self.interval(queries, num_positions) if self.takes_arrays else None
        return None if interval is None else [interval]

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        """Returns the definition in FlexAttention's form, f(batch, head, q_idx, kv_idx) -> bool, with its tables on ``device``. Where
        ``allowed`` searches or hashes, this uses tables, since compilers recompute a value at each use."""
        return lambda batch, head, q_idx, kv_idx: self.allowed(q_idx, kv_idx, head, num_positions)

    def __or__(self, other: BlockPattern) -> BlockPattern:
        return kind_named("Union").of(self, other) if isinstance(other, BlockPattern) and not other.is_chosen else NotImplemented

    def __and__(self, other: BlockPattern) -> BlockPattern:
        return kind_named("Intersection").of(self, other) if isinstance(other, BlockPattern) and not other.is_chosen else NotImplemented

    def grid(self, num_positions: int, rows: tuple[int, int] | None = None, device: torch.device | str = "cpu") -> Grid:
        last = -(-checked_positions(num_positions) // self.q_block)
        first_row, last_row = (0, last) if rows is None else rows
        if not 0 <= first_row <= last_row <= last:
            raise ValueError(f"rows is {rows}; expected 0 ≤ first ≤ last ≤ {last}, the query blocks of {num_positions} positions")
        return Grid(num_positions, self.q_block, self.k_block, first_row, last_row, torch.device(device))

    def entries(
        self, num_positions: int, num_heads: int, *, rows: tuple[int, int] | None = None, device: torch.device | str = "cpu"
    ) -> Entries:
        """Returns the kept blocks of query blocks [first, last), by default all, in time and memory proportional to their number."""
        self.check(checked_positions(num_positions), as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS))
        pattern = self.at(num_positions)
        heads = tuple(range(num_heads)) if pattern.per_head else (0,)
        return pattern.entries_of_heads(self.grid(num_positions, rows, device), heads)

    def entries_of_heads(self, grid: Grid, heads: tuple[int, ...]) -> Entries:
        """Returns ``entries`` of some heads only; group g is head ``heads[g]``."""
        *blocks, state, _ = self.listed(grid, heads)
        group, row, column, full = (torch.from_numpy(x).to(grid.device) for x in (*blocks, state == FULL))
        return Entries(group, row, column, full, len(heads))

    def dense_mask(
        self, num_queries: int, num_keys: int, num_heads: int, *, is_causal: bool = False, query_offset: int = 0,
    ) -> Tensor:  # fmt: skip
        """Returns the kept pairs, bool (num_heads, num_queries, num_keys), of the pattern for max(num_keys, query_offset + num_queries)
        positions. Query row i is position query_offset + i."""
        num_queries, num_keys, num_heads, query_offset = sizes_of_mask(num_queries, num_keys, num_heads, query_offset)
        check_bool("is_causal", is_causal)
        num_positions = checked_positions(max(num_keys, query_offset + num_queries))
        self.check(num_positions, num_heads)
        queries = torch.arange(query_offset, query_offset + num_queries)[None, :, None]
        keys = torch.arange(num_keys)[None, None, :]
        mask = self.allowed(queries, keys, torch.arange(num_heads)[:, None, None], num_positions)
        if is_causal:
            mask = mask & (keys <= queries)
        return mask.broadcast_to(num_heads, num_queries, num_keys).contiguous()

    def pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Returns the exact number of kept (head, query, key) triples, from sizes of full blocks and the pairs of each distinct mask."""
        from dilated_attention.pattern.blocks.kept_blocks import count_pairs

        return count_pairs(self, num_positions, num_heads, is_causal=is_causal)

    def mask_bytes(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Returns the bytes of the lists and masks that kernels read for this pattern."""
        from dilated_attention.pattern.blocks.kept_blocks import kept_blocks

        return kept_blocks(self, num_positions, num_heads, is_causal=is_causal).nbytes

    def long_cell_pairs(self, num_positions: int, num_heads: int, cell: int, is_causal: bool) -> Tensor:
        """Returns ``drawing.cell_pairs`` of a sequence of which no mask is made."""
        from dilated_attention.pattern.blocks.kept_blocks import block_pairs

        pattern, cells = self.at(num_positions), -(-num_positions // cell)
        total = torch.zeros(num_heads, cells, cells, dtype=torch.int64)
        for head, row, column, pairs in block_pairs(pattern.causal() if is_causal else pattern, num_positions, num_heads):
            total.index_put_((head, row * self.q_block // cell, column * self.k_block // cell), pairs, accumulate=True)
        return total if pattern.per_head else total[:1].expand(num_heads, -1, -1)

    def show(self, num_positions: int = 1024, num_heads: int = 4, *, is_causal: bool = False, path: str | None = None) -> Any:
        return super().show(num_positions, num_heads, is_causal=is_causal, path=path)


def pattern_from_spec(spec: str) -> BlockPattern:
    """Restores the pattern that ``BlockPattern.spec`` wrote.

    Raises:
        RuntimeError: the pattern held a Python function or a tensor, and has been freed or was in another process.
        ValueError: the string is not the spec of a pattern.
    """
    pattern = restored(spec)
    assert isinstance(pattern, BlockPattern)
    return pattern


def checked_positions(num_positions: Any) -> int:
    return as_int("num_positions", num_positions, minimum=0, maximum=MAX_POSITIONS)


def checked_block_size(block_size: Any) -> tuple[int, int]:
    """Returns (q_block, k_block) from an integer or a pair."""
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size is {shown(block_size)}; expected one integer or (query block, key block)")
    sizes = tuple(as_int("block_size", size) for size in sizes)
    if any(size not in BLOCK_SIZES for size in sizes):
        raise ValueError(f"block_size is {shown(block_size)}; expected 64 or 128, or (query block, key block) with each of them 64 or 128")
    return sizes


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
