"""Patterns made of patterns: their union, their intersection, one for each head, or the one of a kind that has a wanted density."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import (
    FULL,
    OBJECT,
    PARTIAL,
    SEED,
    BlockPattern,
    Blocks,
    Ends,
    Grid,
    Heads,
    MaskMod,
    Sides,
    States,
    _classes,
    redefined_classes,
)
from dilated_attention.pattern.blocks.whole_blocks import (
    DilatedBlocks,
    RandomBlocks,
    checked_ratio,
    own_columns,
    own_count,
)
from dilated_attention.pattern.blocks.window import BigBird, GlobalLocal, LocalWindow
from dilated_attention.pattern.checks import one_of


@dataclass(frozen=True)
class _Composite(BlockPattern):
    """A pattern composed of ``parts`` with the same block size."""

    # stored as a tuple
    parts: Sequence[BlockPattern]
    block_size: int | tuple[int, int] = field(init=False, repr=False, compare=False)

    # of two parts: whether both together keep a pair, from whether each keeps it; and a block's state, from its states in each
    join: ClassVar[Callable[..., Tensor]]
    join_states: ClassVar[Callable[..., Tensor]]
    # of all parts: the cost of the whole, from theirs
    join_costs: ClassVar[Any]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.parts, BlockPattern) or not isinstance(self.parts, Sequence):
            raise TypeError(f"{name} got {self.parts!r}; expected a list of block patterns")
        if not self.parts:
            raise ValueError(f"{name} got no patterns; expected at least one")
        for i, part in enumerate(self.parts):
            if not isinstance(part, BlockPattern):
                raise TypeError(f"{name} got {part!r} ({type(part).__name__}) as pattern {i}; expected a block pattern")
            if part.is_chosen:
                raise ValueError(
                    f"{name} got {part!r}, which is chosen by content, as pattern {i}; combine it with | or &, which support that"
                )
            if part.block_size != (size := self.parts[0].block_size):
                raise ValueError(f"{name} got patterns with block_size {size} and {part.block_size}; give all of them the same block_size")
        self._set(parts=tuple(self.parts))
        self._set_blocks((self.parts[0].q_block, self.parts[0].k_block))

    @classmethod
    def of(cls, *patterns: BlockPattern) -> _Composite:
        """Returns the composition of patterns. Of one that is a composition of this class, the parts are taken: (a | b) | c has three."""
        # a derived class with an ``allowed`` of its own may keep others than its parts
        parts = (x.parts if isinstance(x, cls) and type(x).allowed is cls.allowed else (x,) for x in patterns)
        return cls(tuple(itertools.chain.from_iterable(parts)))

    @property
    def _parts(self) -> tuple[BlockPattern, ...]:  # type: ignore[override]
        return tuple(self.parts)

    @property
    def per_head(self) -> bool:
        return any(part.per_head for part in self.parts)

    @property
    def is_prefix_stable(self) -> bool:  # type: ignore[override]
        return all(part.is_prefix_stable for part in self.parts)

    @property
    def shares_lists(self) -> bool:  # type: ignore[override]
        return all(part.shares_lists for part in self.parts)

    def at(self, num_positions: int) -> BlockPattern:
        return type(self)(tuple(part.at(num_positions) for part in self.parts))

    def causal(self) -> BlockPattern:
        # part by part, so that blocks above the diagonal are never listed
        return type(self)(tuple(part.causal() for part in self.parts))

    def cost(self, grid: Grid) -> float:
        return type(self).join_costs(part.cost(grid) for part in self.parts)

    @property
    def distinct_parts(self) -> tuple[BlockPattern, ...]:
        """The parts that ``allowed`` and ``mask_mod`` evaluate. ``PerHead`` evaluates a pattern of several heads once."""
        return self._parts

    def combined(self, kept: list[Tensor], heads: Tensor) -> Tensor:
        """Returns ``allowed`` of the whole pattern from that of each of ``distinct_parts``."""
        return functools.reduce(type(self).join, kept)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        return self.combined([part.allowed(queries, keys, heads, num_positions) for part in self.distinct_parts], heads)

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        of_parts = [part.mask_mod(num_positions, num_heads, device) for part in self.distinct_parts]
        return lambda batch, head, q_idx, kv_idx: self.combined([of_part(batch, head, q_idx, kv_idx) for of_part in of_parts], head)

    def columns_of(self, part: BlockPattern, grid: Grid, heads: Heads) -> Blocks:
        """Returns ``columns`` of a part for all ``heads``. A part that heads share is listed once and repeated for each head."""
        group, row, column = part.columns(grid, heads if part.per_head else heads[:1])
        if part.per_head or len(heads) == 1:
            return group, row, column
        group = grid.range(0, len(heads)).repeat_interleave(len(row))
        return group, row.repeat(len(heads)), column.repeat(len(heads))

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        """Keys are equal just if all parts have equal states and, where they are partial, equal keys.

        A key is the number of such a combination among those that occur, part by part. Numbers are below the number of blocks, so no
        product overflows; a hash might give two combinations one key.
        """
        parts = [part.classify(grid, head, row, column) for part in self.parts]
        states = functools.reduce(type(self).join_states, (state for state, _ in parts))
        partial = (states == PARTIAL).nonzero()[:, 0]
        keys = torch.zeros_like(partial)
        for state, key in parts:
            # a part that is full or absent has no mask
            state, key = state[partial], key[partial]
            numbers, num_keys = _numbered(torch.where(state == PARTIAL, key, 0))
            # state has one of FULL + 1 values
            keys, _ = _numbered((keys * num_keys + numbers) * (FULL + 1) + state)
        return states, torch.zeros_like(row).index_put((partial,), keys)


@dataclass(frozen=True)
class Union(_Composite):
    """The pairs that any of the parts keeps: ``a | b``."""

    join, join_states, join_costs = operator.or_, torch.maximum, sum

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        numbers = []
        for part in self.parts:
            group, row, column = self.columns_of(part, grid, heads)
            numbers.append(grid.block_number(group * grid.num_rows + row - grid.first_row, column))
        return grid.blocks_of(torch.unique(torch.cat(numbers)))


@dataclass(frozen=True)
class Intersection(_Composite):
    """The pairs that every part keeps: ``a & b``. The part with the fewest blocks is listed, and the others classify these blocks."""

    join, join_states, join_costs = operator.and_, torch.minimum, min

    @property
    def dense_window(self) -> Sides | None:
        windows = [part.dense_window for part in self.parts]
        # a derived class may keep other pairs
        if None in windows or type(self) is not Intersection:
            return None
        left, right = (min((side for side in sides if side is not None), default=None) for sides in zip(*windows, strict=True))  # type: ignore[arg-type]
        return left, right

    def causal(self) -> BlockPattern:
        # what one part refuses is refused, so it is enough that Causal is one more part, which may be the one that is listed
        return BlockPattern.causal(self)

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        return self.columns_of(min(self.parts, key=lambda part: part.cost(grid)), grid, heads)

    def interval(self, positions: Tensor, num_positions: int) -> Ends | None:
        intervals = [ends for part in self.parts if (ends := part.interval(positions, num_positions)) is not None]
        if len(intervals) < len(self.parts):
            return None
        lows, highs = zip(*intervals, strict=True)
        return functools.reduce(torch.maximum, lows), functools.reduce(torch.minimum, highs)


@dataclass(frozen=True)
class PerHead(_Composite):
    """Pattern h for head h.

    Args:
        parts: one pattern for each head. Of a part that differs between heads, head h uses that of head h.
    """

    join_costs = max

    @property
    def per_head(self) -> bool:
        return True

    def check(self, num_positions: int, num_heads: int) -> None:
        if len(self.parts) != num_heads:
            raise ValueError(f"PerHead got {len(self.parts)} patterns for {num_heads} heads; give one pattern per head")
        super().check(num_positions, num_heads)

    @property
    def distinct_parts(self) -> tuple[BlockPattern, ...]:
        return tuple(dict.fromkeys(self.parts))

    def combined(self, kept: list[Tensor], heads: Tensor) -> Tensor:
        # of each distinct part, whether a head is one of its heads
        owners = [
            functools.reduce(operator.or_, [heads == head for head, part in enumerate(self.parts) if part == distinct])
            for distinct in self.distinct_parts
        ]
        return functools.reduce(operator.or_, (x & owned for x, owned in zip(kept, owners, strict=True)))

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        shared = {part: part.columns(grid, heads[:1]) for part in self.distinct_parts if not part.per_head}
        lists = []
        for group, head in enumerate(heads):
            part = self.parts[head]
            _, row, column = shared[part] if part in shared else part.columns(grid, (head,))
            lists.append((torch.full_like(row, group), row, column))
        return tuple(torch.cat(x) for x in zip(*lists, strict=True))  # type: ignore[return-value]

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        state, key, first_key = torch.zeros_like(head, dtype=torch.int8), torch.zeros_like(head), 0
        number = torch.tensor([self.distinct_parts.index(part) for part in self.parts], device=grid.device)[head]
        for i, part in enumerate(self.distinct_parts):
            blocks = (number == i).nonzero()[:, 0]
            state[blocks], keys = part.classify(grid, head[blocks], row[blocks], column[blocks])
            numbers, num_keys = _numbered(keys)
            # parts choose their keys apart, so those of each begin behind those of the parts before
            key[blocks] = numbers + first_key
            first_key += num_keys
        return state, key


def _numbered(keys: Tensor) -> tuple[Tensor, int]:
    """Returns the number of each key, equal for equal ones, from 0 on; and how many distinct ones there are."""
    distinct, numbers = torch.unique(keys, return_inverse=True)
    return numbers, distinct.shape[0]


# the kinds of Sparsity, and those that draw blocks by a seed
KINDS = ("random", "local", "dilated", "global_local", "big_bird")
_SEEDED = ("random", "big_bird")


def with_sparsity(ratio: float, kind: str = "random", *, block_size: int | tuple[int, int] = 128, seed: int = 0) -> Sparsity:
    """Returns a ``Sparsity`` that keeps ``ratio`` of all N² pairs at every N, like ``sparsity_ratio=0.1`` of earlier libraries."""
    return Sparsity(ratio, kind, seed, block_size=block_size)


@dataclass(frozen=True)
class Sparsity(BlockPattern):
    """A pattern of density ``ratio``, whatever the length: ``at(N)`` is the pattern of N positions.

    |density(N) − ratio| ≤ k_block / N, which is one block per row; with ``"dilated"`` max(q_block, k_block) / N, since a row keeps all key
    blocks that hold its positions. Every query has at least one key; with ``"random"`` and ``"dilated"`` at least one block. The density
    is that without causality. With it, about the same fraction of causal pairs is kept.

    Args:
        ratio: fraction of all pairs that is kept, above 0 and at most 1.
        kind: ``"random"``: ``RandomBlocks`` with the row's own block · ``"local"``: a ``LocalWindow`` · ``"dilated"``: ``DilatedBlocks``
            over about the whole sequence · ``"global_local"``: a window and global tokens, which take at most a quarter of the pairs, and
            one block if that is enough · ``"big_bird"``: the same with up to three random blocks per row, which take at most a quarter
            of the pairs; none above a ratio of a half.
        seed: seed of the draws, for ``"random"`` and ``"big_bird"``.
    """

    limits = (SEED,)
    ratio: float
    kind: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kind", self.kind, KINDS)
        ratio = checked_ratio(self.ratio)
        if ratio == 0:
            raise ValueError("ratio is 0: nothing would be kept; expected a number above 0 and at most 1")
        self._set(ratio=ratio)
        if self.seed and self.kind not in _SEEDED:
            raise ValueError(
                f"seed is {self.seed}, but kind={self.kind!r} draws nothing: leave seed at 0, or take one of {', '.join(_SEEDED)}"
            )

    @property
    def per_head(self) -> bool:
        return self.kind in _SEEDED

    def at(self, num_positions: int) -> BlockPattern:
        n, ratio, block_size, grid = num_positions, self.ratio, self.block_size, self.grid(num_positions)
        if n == 0:
            return LocalWindow(0, block_size=block_size)
        if self.kind == "random":
            # every row keeps its own block, so that no query is without keys, causal or not
            return RandomBlocks(max(ratio, 1 / grid.num_columns), self.seed, own_block=True, block_size=block_size)
        if self.kind == "local":
            return LocalWindow(_window(n, ratio * n * n), block_size=block_size)
        if self.kind == "dilated":
            return _dilated(grid, ratio)
        # g global positions keep about 2·g·N pairs, which is a quarter of ratio · N² for g = ratio · N / 8
        block = max(self.q_block, self.k_block)
        num_globals = block if 8 * block <= ratio * n else int(ratio * n / 8)
        num_others = n - num_globals
        # left for the window: global queries see n keys, and the others see the global keys
        pairs = ratio * n * n - num_globals * (n + num_others)
        if self.kind == "global_local":
            return GlobalLocal(_window(num_others, pairs), num_globals, block_size=block_size)
        # up to a ratio of a half there are enough blocks outside the window to draw the full number
        num_random = min(3, int(ratio * grid.num_columns / 4)) if ratio <= 0.5 else 0
        # rows with global positions draw nothing
        num_drawing = n - min(n, -(-num_globals // self.q_block) * self.q_block)
        pairs -= num_random * self.k_block * num_drawing
        return BigBird(_window(num_others, pairs), num_globals, num_random, self.seed if num_random else 0, block_size=block_size)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        # a derived class with an ``allowed`` of its own has the general ``at``, which is itself
        at = Sparsity.at if type(self).at is BlockPattern.at else type(self).at
        return at(self, num_positions).allowed(queries, keys, heads, num_positions)

    def cost(self, grid: Grid) -> float:
        return self.ratio * grid.num_columns


def _window(num_positions: int, pairs: float) -> int:
    """Returns the window w whose number of pairs at N = ``num_positions``, N·(2w + 1) − w·(w + 1), is nearest to ``pairs``."""
    return _nearest(lambda w: num_positions * (2 * w + 1) - w * (w + 1), pairs, 0, num_positions - 1)


def _dilated(grid: Grid, ratio: float) -> DilatedBlocks:
    """Returns blocks as far apart as the ratio allows, and as many as it requires."""
    num_own = own_count(grid)
    # a row's own columns are neighbors and must lead to different columns. 1e-12: a ratio of 1/3 gives 3, however the division is rounded
    dilation = max(num_own, int(num_own / ratio * (1 + 1e-12)))
    row = grid.rows()
    first_query, last_query = grid.queries(row)
    first, last = own_columns(grid, row)
    # how many keys the last column lacks
    missing = grid.num_columns * grid.k_block - grid.num_positions

    def pairs(num_blocks: int) -> int:
        """Counts the pairs of ``DilatedBlocks`` with so many blocks around each own column."""
        before, after = num_blocks // 2, (num_blocks - 1) // 2
        kept = torch.zeros_like(row)
        for number, column in enumerate((first, last)[:num_own]):
            # steps that fit into the sequence after the column, as column // dilation do before it
            steps = (grid.num_columns - 1 - column) // dilation
            keys = ((column // dilation).clamp(max=before) + steps.clamp(max=after) + 1) * grid.k_block
            reaches_end = (steps <= after) & (column + steps * dilation == grid.num_columns - 1)
            # the last row may have only one own column
            kept += torch.where((last > first) | (number == 0), keys - reaches_end * missing, 0)
        return int((kept * (last_query - first_query + 1)).sum())

    num_blocks = _nearest(pairs, ratio * grid.num_positions**2, 1, 2 * (grid.num_columns // dilation + 1))
    return DilatedBlocks(dilation, num_blocks, block_size=(grid.q_block, grid.k_block))


def _nearest(count: Callable[[int], int], wanted: float, low: int, high: int) -> int:
    """Returns the x in [low, high] whose count, which grows with x, is nearest to ``wanted``."""
    reaching = low + bisect.bisect_left(range(low, high), wanted, key=count)
    return min(range(max(reaching - 1, low), reaching + 1), key=lambda x: abs(count(x) - wanted))


def spec_of_call(pattern: BlockPattern) -> str:
    """Returns the spec by which a call finds its pattern: where a class of it was defined again, the pattern itself by number, since in
    ``pattern.spec()`` the name would be the new class's."""
    # not seen by torch.compile, which would compile anew with each class
    if torch.compiler.is_compiling() or not redefined_classes or not _is_replaced(pattern):
        return pattern.spec()
    if "_number" not in pattern.__dict__:
        pattern._name_object(is_needed=True)
    return json.dumps(f"{OBJECT}{pattern.__dict__['_number']}")


def _is_replaced(value: object) -> bool:
    if isinstance(value, BlockPattern):
        return _classes[type(value).__name__] is not type(value) or any(map(_is_replaced, value.arguments().values()))
    return isinstance(value, tuple) and any(map(_is_replaced, value))
