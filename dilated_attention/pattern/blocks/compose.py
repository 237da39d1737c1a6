"""Patterns composed of patterns: their union, their intersection, or one for each head."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import FULL, PARTIAL, BlockPattern, Blocks, Grid, MaskMod, States


@dataclass(frozen=True)
class _Composite(BlockPattern):
    """A pattern composed of ``parts`` with the same block size."""

    parts: tuple[BlockPattern, ...]
    block_size: int | tuple[int, int] = field(init=False, repr=False, compare=False)

    # what becomes of whether two parts keep a pair, and of the states of a block in both
    join: ClassVar[Callable[..., Tensor]]
    join_states: ClassVar[Callable[..., Tensor]]

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
        self._set(parts=tuple(self.parts), block_size=self.parts[0].block_size)

    @classmethod
    def of(cls, *patterns: BlockPattern) -> _Composite:
        """Returns the composition of patterns, in which parts of the same kind are taken apart."""
        return cls(tuple(part for pattern in patterns for part in (pattern.parts if isinstance(pattern, cls) else (pattern,))))

    @property
    def per_head(self) -> bool:
        return any(part.per_head for part in self.parts)

    @property
    def reads_batch(self) -> bool:
        return any(part.reads_batch for part in self.parts)

    @property
    def is_prefix_stable(self) -> bool:  # type: ignore[override]
        return all(part.is_prefix_stable for part in self.parts)

    @property
    def shares_lists(self) -> bool:  # type: ignore[override]
        return all(part.shares_lists for part in self.parts)

    def check(self, num_positions: int, num_heads: int) -> None:
        for part in self.parts:
            part.check(num_positions, num_heads)

    def at(self, num_positions: int) -> BlockPattern:
        return type(self)(tuple(part.at(num_positions) for part in self.parts))

    def causal(self) -> BlockPattern:
        # part by part, so that blocks above the diagonal are never listed
        return type(self)(tuple(part.causal() for part in self.parts))

    @property
    def different(self) -> tuple[BlockPattern, ...]:
        """The parts that are evaluated: of ``PerHead``, the distinct ones."""
        return self.parts

    def combined(self, kept: list[Tensor], heads: Tensor) -> Tensor:
        """Returns ``allowed`` of the whole pattern from that of the ``different`` parts."""
        return functools.reduce(type(self).join, kept)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        return self.combined([part.allowed(queries, keys, heads, num_positions) for part in self.different], heads)

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        of_parts = [part.mask_mod(num_positions, num_heads, device) for part in self.different]
        return lambda batch, head, q_idx, kv_idx: self.combined([of_part(batch, head, q_idx, kv_idx) for of_part in of_parts], head)

    def columns_of(self, part: BlockPattern, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        """Returns ``columns`` of a part, which heads may share even if they do not share the whole."""
        group, row, column = part.columns(grid, heads if part.per_head else heads[:1])
        if part.per_head or len(heads) == 1:
            return group, row, column
        group = grid.range(0, len(heads)).repeat_interleave(len(row))
        return group, row.repeat(len(heads)), column.repeat(len(heads))

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        """Keys are equal if all parts have equal states and equal keys. They are exact and not hashed: no product overflows."""
        parts = [part.classify(grid, head, row, column) for part in self.parts]
        whole = functools.reduce(type(self).join_states, (state for state, _ in parts))
        partial = (whole == PARTIAL).nonzero()[:, 0]
        joined = torch.zeros_like(partial)
        for state, key in parts:
            # a part that is full or absent has no mask
            state, key = state[partial], key[partial]
            numbers, num_keys = _numbered(torch.where(state == PARTIAL, key, 0))
            joined, _ = _numbered((joined * num_keys + numbers) * (FULL + 1) + state)
        return whole, torch.zeros_like(row).index_put((partial,), joined)


@dataclass(frozen=True)
class Union(_Composite):
    """The pairs that any of the parts keeps: ``a | b``."""

    join, join_states = operator.or_, torch.maximum

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        blocks = []
        for part in self.parts:
            group, row, column = self.columns_of(part, grid, heads)
            blocks.append(grid.block(group * grid.num_rows + row - grid.first_row, column))
        return grid.listed(torch.unique(torch.cat(blocks)))

    def cost(self, grid: Grid) -> float:
        return sum(part.cost(grid) for part in self.parts)


@dataclass(frozen=True)
class Intersection(_Composite):
    """The pairs that every part keeps: ``a & b``. The part with the fewest blocks is listed, and the others classify these blocks."""

    join, join_states = operator.and_, torch.minimum

    def causal(self) -> BlockPattern:
        # one more part, which may be the one that is listed
        return BlockPattern.causal(self)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        return self.columns_of(min(self.parts, key=lambda part: part.cost(grid)), grid, heads)

    def cost(self, grid: Grid) -> float:
        return min(part.cost(grid) for part in self.parts)

    def interval(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor] | None:
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

    @property
    def per_head(self) -> bool:
        return True

    def check(self, num_positions: int, num_heads: int) -> None:
        if len(self.parts) != num_heads:
            raise ValueError(f"PerHead got {len(self.parts)} patterns for {num_heads} heads; give one pattern per head")
        super().check(num_positions, num_heads)

    @property
    def different(self) -> tuple[BlockPattern, ...]:
        return tuple(dict.fromkeys(self.parts))

    def combined(self, kept: list[Tensor], heads: Tensor) -> Tensor:
        owners = [[heads == head for head, part in enumerate(self.parts) if part == owned] for owned in self.different]
        return functools.reduce(operator.or_, (x & functools.reduce(operator.or_, own) for x, own in zip(kept, owners, strict=True)))

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        shared = {part: part.columns(grid, heads[:1]) for part in self.different if not part.per_head}
        lists = []
        for group, head in enumerate(heads):
            part = self.parts[head]
            _, row, column = shared[part] if part in shared else part.columns(grid, (head,))
            lists.append((torch.full_like(row, group), row, column))
        return tuple(torch.cat(x) for x in zip(*lists, strict=True))  # type: ignore[return-value]

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        state, key, first_key = torch.zeros_like(head, dtype=torch.int8), torch.zeros_like(head), 0
        number = torch.tensor([self.different.index(part) for part in self.parts], device=grid.device)[head]
        for i, part in enumerate(self.different):
            blocks = (number == i).nonzero()[:, 0]
            state[blocks], keys = part.classify(grid, head[blocks], row[blocks], column[blocks])
            numbers, num_keys = _numbered(keys)
            key[blocks] = numbers + first_key
            first_key += num_keys
        return state, key

    def cost(self, grid: Grid) -> float:
        return max(part.cost(grid) for part in self.parts)


def _numbered(keys: Tensor) -> tuple[Tensor, int]:
    """Returns the keys numbered from 0 on, and the number of distinct ones."""
    different, numbers = torch.unique(keys, return_inverse=True)
    return numbers, different.shape[0]
