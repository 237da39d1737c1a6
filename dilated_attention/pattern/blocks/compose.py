"""Patterns composed of patterns: their union, their intersection, or one for each head."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dilated_attention.pattern.blocks.base import FULL, PARTIAL, BlockPattern, Grid, MaskMod, divided


@dataclass(frozen=True)
class _Composite(BlockPattern):
    """A pattern composed of ``parts`` with the same block size."""

    parts: tuple[BlockPattern, ...]
    block_size: int | tuple[int, int] = field(init=False, repr=False, compare=False)

    is_tight = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.parts, BlockPattern) or not isinstance(self.parts, Sequence):
            raise TypeError(f"{name} got {self.parts!r}; expected a list of block patterns")
        parts = tuple(self.parts)
        if not parts:
            raise ValueError(f"{name} got no patterns; expected at least one")
        for i, part in enumerate(parts):
            if not isinstance(part, BlockPattern):
                raise TypeError(f"{name} got {part!r} ({type(part).__name__}) as pattern {i}; expected a block pattern")
            if part.is_chosen:
                raise ValueError(
                    f"{name} got {part!r}, which is chosen by content, as pattern {i}; combine it with | or &, which support that"
                )
            if part.block_size != parts[0].block_size:
                raise ValueError(
                    f"{name} got patterns with block_size {parts[0].block_size} and {part.block_size}; give all of them the same block_size"
                )
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "block_size", parts[0].block_size)

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
    def is_prefix_stable(self) -> bool:
        return all(part.is_prefix_stable for part in self.parts)

    def check(self, num_positions: int, num_heads: int) -> None:
        for part in self.parts:
            part.check(num_positions, num_heads)

    def at(self, num_positions: int) -> BlockPattern:
        return type(self)(tuple(part.at(num_positions) for part in self.parts))

    @property
    def different(self) -> tuple[BlockPattern, ...]:
        """The distinct parts."""
        return self.parts

    @abstractmethod
    def combined(self, kept: list[torch.Tensor], heads: torch.Tensor) -> torch.Tensor:
        """Returns ``allowed`` of the whole pattern from that of the ``different`` parts."""

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor, num_positions: int) -> torch.Tensor:
        return self.combined([part.allowed(queries, keys, heads, num_positions) for part in self.different], heads)

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        of_parts = [part.mask_mod(num_positions, num_heads, device) for part in self.different]

        def mask_mod(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            return self.combined([of_part(batch, head, q_idx, kv_idx) for of_part in of_parts], head)

        return mask_mod

    def columns_of(self, part: BlockPattern, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns ``columns`` of a part, which heads may share even if they do not share the whole."""
        group, row, column = part.columns(grid, heads if part.per_head else heads[:1])
        if part.per_head or len(heads) == 1:
            return group, row, column
        group = grid.range(0, len(heads)).repeat_interleave(len(row))
        return group, row.repeat(len(heads)), column.repeat(len(heads))


@dataclass(frozen=True)
class Union(_Composite):
    """The pairs that any of the parts keeps: ``a | b``."""

    def combined(self, kept: list[torch.Tensor], heads: torch.Tensor) -> torch.Tensor:
        return functools.reduce(operator.or_, kept)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = []
        for part in self.parts:
            group, row, column = self.columns_of(part, grid, heads)
            found.append(grid.block(group * grid.num_rows + row - grid.first_row, column))
        rows, column = divided(torch.unique(torch.cat(found)), max(grid.num_columns, 1))
        group, row = divided(rows, max(grid.num_rows, 1))
        return group, row + grid.first_row, column

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _joined(torch.amax, [part.classify(grid, head, row, column) for part in self.parts])

    def cost(self, grid: Grid) -> float:
        return sum(part.cost(grid) for part in self.parts)

    def causal(self) -> BlockPattern:
        # part by part, so that blocks above the diagonal are never listed
        return Union(tuple(part.causal() for part in self.parts))


@dataclass(frozen=True)
class Intersection(_Composite):
    """The pairs that every part keeps: ``a & b``. The part with the fewest blocks is listed, and the others classify these blocks."""

    def combined(self, kept: list[torch.Tensor], heads: torch.Tensor) -> torch.Tensor:
        return functools.reduce(operator.and_, kept)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.columns_of(min(self.parts, key=lambda part: part.cost(grid)), grid, heads)

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _joined(torch.amin, [part.classify(grid, head, row, column) for part in self.parts])

    def cost(self, grid: Grid) -> float:
        return min(part.cost(grid) for part in self.parts)

    def interval(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = [part.interval(positions, num_positions) for part in self.parts]
        known = [x for x in found if x is not None]
        if len(known) < len(found):
            return None
        lows, highs = zip(*known, strict=True)
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

    def heads_of(self) -> dict[BlockPattern, list[int]]:
        """Returns the heads of each distinct pattern."""
        heads: dict[BlockPattern, list[int]] = {}
        for head, part in enumerate(self.parts):
            heads.setdefault(part, []).append(head)
        return heads

    @property
    def different(self) -> tuple[BlockPattern, ...]:
        return tuple(self.heads_of())

    def combined(self, kept: list[torch.Tensor], heads: torch.Tensor) -> torch.Tensor:
        chosen = []
        for owners, of_part in zip(self.heads_of().values(), kept, strict=True):
            chosen.append(of_part & functools.reduce(operator.or_, (heads == head for head in owners)))
        return functools.reduce(operator.or_, chosen)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shared = {part: part.columns(grid, heads[:1]) for part in self.heads_of() if not part.per_head}
        found = []
        for group, head in enumerate(heads):
            part = self.parts[head]
            _, row, column = shared[part] if part in shared else part.columns(grid, (head,))
            found.append((torch.full_like(row, group), row, column))
        group_of, rows, columns = (torch.cat(x) for x in zip(*found, strict=True))
        return group_of, rows, columns

    def classify(self, grid: Grid, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        different = self.heads_of()
        number = torch.zeros(len(self.parts), dtype=torch.int64)
        for i, owners in enumerate(different.values()):
            number[owners] = i
        number_of = number.to(grid.device)[head]
        state = torch.zeros(head.shape, dtype=torch.int8, device=grid.device)
        key = torch.zeros_like(head)
        offset = 0
        for i, part in enumerate(different):
            mine = (number_of == i).nonzero()[:, 0]
            state[mine], keys = part.classify(grid, head[mine], row[mine], column[mine])
            key[mine], num_keys = _dense(keys, offset)
            offset += num_keys
        return state, key

    def cost(self, grid: Grid) -> float:
        return max(part.cost(grid) for part in self.parts)

    def causal(self) -> BlockPattern:
        return PerHead(tuple(part.causal() for part in self.parts))


def _joined(reduce: Callable[..., torch.Tensor], parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (state, key) of blocks from those of the parts. Keys are equal if all parts have equal states and equal keys.

    The keys are exact and not hashed: the keys of each part are numbered, and so is each pair of numbers, so that no product overflows.
    """
    states, keys = torch.stack([state for state, _ in parts]), [key for _, key in parts]
    whole = reduce(states, 0)
    chosen = (whole == PARTIAL).nonzero()[:, 0]
    joined = torch.zeros_like(chosen)
    for state, key in zip(states[:, chosen], keys, strict=True):
        # a part that is full or absent has no mask
        numbers, num_keys = _dense(torch.where(state == PARTIAL, key[chosen], 0))
        joined, _ = _dense((joined * num_keys + numbers) * (FULL + 1) + state)
    return whole, torch.zeros_like(whole, dtype=torch.int64).index_put((chosen,), joined)


def _dense(keys: torch.Tensor, offset: int = 0) -> tuple[torch.Tensor, int]:
    """Returns the keys renumbered from ``offset`` on, and the number of distinct ones."""
    different, numbers = torch.unique(keys, return_inverse=True)
    return numbers + offset, different.shape[0]
