"""What every block-sparse pattern offers: its definition by positions, its kept blocks row by row, its counts.

A sequence of N positions is cut into query blocks (rows) of ``q_block`` and key blocks (columns) of ``k_block`` positions; the last of
each may be shorter. A new pattern is one class with three methods: ``allowed``, ``columns`` and ``classify``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.checks import MAX_HEADS, as_int, check_bool, shown, sizes_of_mask

BLOCK_SIZES = (64, 128)
# lists of blocks count positions in 32 bits
MAX_POSITIONS = 2**31
# FlexAttention's mask function: (batch, head, q_idx, kv_idx) -> bool
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# the state of a block: no pair kept · some pairs kept · every pair within the sequence kept
ABSENT, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Grid:
    """The blocks of a sequence, and which rows of them are asked for: [first_row, last_row)."""

    num_positions: int
    q_block: int
    k_block: int
    first_row: int
    last_row: int
    device: torch.device

    @property
    def num_columns(self) -> int:
        return -(-self.num_positions // self.k_block)

    @property
    def num_rows(self) -> int:
        """Rows asked for."""
        return self.last_row - self.first_row

    def rows(self) -> torch.Tensor:
        return self.range(self.first_row, self.last_row)

    def range(self, first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last, device=self.device)

    def queries(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First and last position of query blocks."""
        return self._ends(row, self.q_block)

    def keys(self, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First and last position of key blocks."""
        return self._ends(column, self.k_block)

    def _ends(self, block: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = block * size
        last = first + (size - 1)
        return first, last if self.num_positions % size == 0 else last.clamp(max=self.num_positions - 1)

    def block(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """A number for each block of the whole sequence."""
        return row * self.num_columns + column


@dataclass(frozen=True, eq=False)
class Entries:
    """Kept blocks, flat and ascending by (group, row, column).

    Args:
        group: (E,) int64, index of the head; 0 where all heads share one list.
        row, column: (E,) int64, of the whole sequence.
        full: (E,) bool, every pair within the sequence is kept.
        key: (E,) int64: two blocks that are not full and have equal keys keep the same pairs, as far as both lie within the sequence.
    """

    group: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    full: torch.Tensor
    key: torch.Tensor
    num_groups: int


@dataclass(frozen=True)
class BlockPattern(Pattern):
    """A pattern with m = 1 on the pairs that it keeps, computed block by block.

    ``allowed`` says which pairs are kept. Patterns compose by ``|`` (either keeps the pair), ``&`` (both do) and ``PerHead``.

    Args:
        block_size: positions of a block: 64 or 128, or (query block, key block) with each of them 64 or 128. It changes no kept pair of
            patterns given by positions; patterns given by blocks count in it.
    """

    block_size: int | tuple[int, int] = field(default=128, kw_only=True)

    # whether ``columns`` names kept blocks only, and ``classify`` never calls a block partial that is full or empty
    is_tight: ClassVar[bool] = True
    # a Python function or a tensor cannot be written down: ``spec`` names the living object instead
    holds_objects: ClassVar[bool] = False
    # whether the blocks are chosen by what q and k hold; such a pattern says itself what | and & with it mean
    is_chosen: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        from dilated_attention.pattern.spec import register_kind

        super().__init_subclass__(**kwargs)
        register_kind(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", checked_block_size(self.block_size))
        if self.holds_objects:
            from dilated_attention.pattern.spec import name_object

            name_object(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_number", "_spec")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy has a name of its own, since its original may be freed before it
        self.__dict__.update(state)
        if self.holds_objects:
            from dilated_attention.pattern.spec import name_object

            name_object(self)

    @property
    def per_head(self) -> bool:
        """Whether the lists differ from head to head."""
        return False

    @property
    def is_prefix_stable(self) -> bool:
        """Whether position t keeps the same keys j ≤ t in every sequence that is long enough to have it, whatever follows.

        Only then can a token be decoded from cached keys as the forward of any longer sequence has it. A pattern class says so itself: False
        stands for "not, or not known".
        """
        return False

    @property
    def q_block(self) -> int:
        assert isinstance(self.block_size, tuple)
        return self.block_size[0]

    @property
    def k_block(self) -> int:
        assert isinstance(self.block_size, tuple)
        return self.block_size[1]

    @abstractmethod
    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
        """The definition: whether head h keeps the pair (i, j), elementwise.

        Args:
            queries, keys, heads: int64, broadcastable: absolute positions and head indices. Positions from ``num_positions`` on belong
                to no sequence; they must raise nothing, and any answer is right.
            num_positions: N, the positions of the whole key sequence.

        Returns:
            bool, of the broadcast shape or of one that broadcasts to it.
        """

    @abstractmethod
    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(index into ``heads``, row, column) of every kept block, ascending, none twice; some that are not kept unless ``is_tight``.

        Time and memory in proportion to what is returned. Patterns that are not ``per_head`` are asked for one head.
        """

    @abstractmethod
    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(state int8, key int64) of any blocks: ABSENT, PARTIAL or FULL, and the key of the partial ones (see ``Entries``)."""

    def cost(self, grid: Grid) -> float:
        """About how many blocks of a row ``columns`` returns; the cheaper part of an intersection is listed, the other one asked."""
        return float(grid.num_columns)

    def check(self, num_positions: int, num_heads: int) -> None:
        """Raise ValueError if there is no such pattern of so many positions or heads."""

    def at(self, num_positions: int) -> BlockPattern:
        """The pattern of ``num_positions``: itself, unless it is given by a density."""
        return self

    def causal(self) -> BlockPattern:
        """The pairs of it with j ≤ i."""
        from dilated_attention.pattern.block_window import Causal

        return self & Causal(block_size=self.block_size)

    def interval(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(low, high) if every *kept* block, partial or full, keeps exactly its pairs with low[i] ≤ j < high[i]; None if that is not known.

        ``positions`` are those of the queries; the result is the same for all heads.
        """
        return None

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        """The definition as FlexAttention takes it: f(batch, head, q_idx, kv_idx) -> bool. Tables that it reads lie on ``device``.

        What is a search or a hash in ``allowed`` is a table here: compilers write each use of a value out again.
        """
        pattern = self

        def mask_mod(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            return pattern.allowed(q_idx, kv_idx, head, num_positions)

        return mask_mod

    def __or__(self, other: BlockPattern) -> BlockPattern:
        from dilated_attention.pattern.block_compose import Union

        return Union.of(self, other) if isinstance(other, BlockPattern) and not other.is_chosen else NotImplemented

    def __and__(self, other: BlockPattern) -> BlockPattern:
        from dilated_attention.pattern.block_compose import Intersection

        return Intersection.of(self, other) if isinstance(other, BlockPattern) and not other.is_chosen else NotImplemented

    def grid(self, num_positions: int, rows: tuple[int, int] | None = None, device: torch.device | str = "cpu") -> Grid:
        last = -(-checked_positions(num_positions) // self.q_block)
        first_row, last_row = (0, last) if rows is None else rows
        if not 0 <= first_row <= last_row <= last:
            raise ValueError(f"rows is {rows}; expected 0 ≤ first ≤ last ≤ {last}, the query blocks of {num_positions} positions")
        return Grid(num_positions, self.q_block, self.k_block, first_row, last_row, torch.device(device))

    def entries(
        self, num_positions: int, num_heads: int, *, rows: tuple[int, int] | None = None, device: torch.device | str = "cpu"
    ) -> Entries:
        """The kept blocks of query blocks [first, last), all by default, in time and memory proportional to their number."""
        self.check(checked_positions(num_positions), as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS))
        pattern = self.at(num_positions)
        heads = tuple(range(num_heads)) if pattern.per_head else (0,)
        return pattern.entries_of_heads(self.grid(num_positions, rows, device), heads)

    def entries_of_heads(self, grid: Grid, heads: tuple[int, ...]) -> Entries:
        """``entries`` of some heads alone; group g is head ``heads[g]``."""
        group, row, column = self.columns(grid, heads)
        head = group if heads == tuple(range(len(heads))) else torch.tensor(heads, device=grid.device)[group]
        state, key = self.classify(grid, head, row, column)
        if not self.is_tight:
            kept = state.nonzero()[:, 0]
            group, row, column, state, key = (x[kept] for x in (group, row, column, state, key))
        return Entries(group, row, column, state == FULL, key, len(heads))

    def dense_mask(
        self,
        num_queries: int,
        num_keys: int,
        num_heads: int,
        *,
        is_causal: bool = False,
        query_offset: int = 0,
    ) -> torch.Tensor:
        """Kept pairs, bool (num_heads, num_queries, num_keys); query row i is position query_offset + i.

        The pattern is that of max(num_keys, query_offset + num_queries) positions.
        """
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
        """Kept (head, query, key) triples, exact: sizes of full blocks and the pairs of each different mask."""
        from dilated_attention.pattern.block_kept import count_pairs

        return count_pairs(self, num_positions, num_heads, is_causal=is_causal)

    def mask_bytes(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Bytes of the lists and masks that kernels read for this pattern."""
        from dilated_attention.pattern.block_kept import kept_blocks

        return kept_blocks(self, num_positions, num_heads, is_causal=is_causal).nbytes

    def spec(self) -> str:
        """The pattern as a string: ``pattern_from_spec`` gives an equal one (the same one, where it holds a function or a tensor)."""
        from dilated_attention.pattern.spec import spec_of

        if torch.compiler.is_compiling():
            return spec_of(self)
        # written once: every call of an op needs it
        if "_spec" not in self.__dict__:
            kind = vars(type(self))
            if "__init__" in kind and "__dataclass_fields__" not in kind:
                raise TypeError(
                    f"{type(self).__name__} has an __init__ of its own and is no dataclass, so two of them cannot be told apart; "
                    "write its arguments as fields and decorate it with @dataclass(frozen=True)"
                )
            self.__dict__["_spec"] = spec_of(self)
        spec: str = self.__dict__["_spec"]
        return spec

    @property
    def lives_here(self) -> bool:
        """Whether it, or a part of it, holds a function or a tensor, which other processes cannot know by ``spec``."""
        from dilated_attention.pattern.spec import OBJECT

        return OBJECT in self.spec()

    def show(self, num_positions: int = 1024, num_heads: int = 4, *, is_causal: bool = False, path: str | None = None) -> Any:
        from dilated_attention.pattern.drawing import draw

        return draw(self, num_positions, num_heads, is_causal=is_causal, path=path)


def checked_positions(num_positions: Any) -> int:
    return as_int("num_positions", num_positions, minimum=0, maximum=MAX_POSITIONS)


def checked_block_size(block_size: Any) -> tuple[int, int]:
    """(q_block, k_block) of an integer or a pair."""
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size is {shown(block_size)}; expected one integer or (query block, key block)")
    sizes = tuple(as_int("block_size", size) for size in sizes)
    if any(size not in BLOCK_SIZES for size in sizes):
        raise ValueError(f"block_size is {shown(block_size)}; expected 64 or 128, or (query block, key block) with each of them 64 or 128")
    return sizes


def expand(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(i, x) for every x in range i, [low[i], high[i]), in order. One host synchronisation."""
    counts = (high - low).clamp(min=0)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    index = torch.repeat_interleave(counts, output_size=total)
    return index, (low - ends + counts)[index] + torch.arange(total, device=low.device)


def state_of(kept: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """States of blocks; whatever is full must be kept."""
    return kept.to(torch.int8) + full.to(torch.int8)


def divided(x: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x // by, x % by)."""
    quotient = x // by
    return quotient, x - quotient * by
