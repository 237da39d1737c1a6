"""Patterns defined by the fraction of all pairs that they keep."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import BlockPattern, Blocks, Grid
from dilated_attention.pattern.blocks.global_tokens import BigBird, GlobalLocal
from dilated_attention.pattern.blocks.random import RandomBlocks, checked_ratio, checked_seed
from dilated_attention.pattern.blocks.whole_blocks import DilatedBlocks, own_columns, own_count
from dilated_attention.pattern.blocks.window import LocalWindow
from dilated_attention.pattern.checks import one_of

KINDS = ("random", "local", "dilated", "global_local", "big_bird")
_SEEDED = ("random", "big_bird")


def with_sparsity(ratio: float, kind: str = "random", *, block_size: int | tuple[int, int] = 128, seed: int = 0) -> Sparsity:
    """Returns a ``Sparsity`` that keeps ``ratio`` of all N² pairs at every N, like ``sparsity_ratio=0.1`` of earlier libraries."""
    return Sparsity(ratio, kind, seed, block_size=block_size)


@dataclass(frozen=True)
class Sparsity(BlockPattern):
    """A pattern of density ``ratio``, whatever the length: ``at(N)`` is the pattern of N positions.

    |density(N) − ratio| ≤ k_block / N, which is one block per row; with ``"dilated"`` max(q_block, k_block) / N, since a row keeps all key
    blocks that hold its positions. Every query has at least one key (with ``"random"`` and
    ``"dilated"``, at least one block). The density is that without causality; with it, about the same fraction of causal pairs is kept.

    Args:
        ratio: fraction of all pairs that is kept, above 0 and at most 1.
        kind: ``"random"``: ``RandomBlocks`` with the row's own block · ``"local"``: a ``LocalWindow`` · ``"dilated"``: ``DilatedBlocks``
            over about the whole sequence · ``"global_local"``: a window and global tokens, which take at most a quarter of the pairs, and
            one block if that is enough · ``"big_bird"``: the same with up to three random blocks per row, which take at most a quarter
            of the pairs; none above a ratio of a half.
        seed: seed of the draws, for ``"random"`` and ``"big_bird"``.
    """

    ratio: float
    kind: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kind", self.kind, KINDS)
        ratio = checked_ratio(self.ratio)
        if ratio == 0:
            raise ValueError("ratio is 0: nothing would be kept; expected a number above 0 and at most 1")
        self._set(ratio=ratio, seed=checked_seed(self.seed))
        if self.seed and self.kind not in _SEEDED:
            raise ValueError(
                f"seed is {self.seed}, but kind={self.kind!r} draws nothing: leave seed at 0, or take one of {', '.join(_SEEDED)}"
            )

    @property
    def per_head(self) -> bool:
        return self.kind in _SEEDED

    def at(self, num_positions: int) -> BlockPattern:
        return _resolved(self, num_positions)

    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        return self.at(num_positions).allowed(queries, keys, heads, num_positions)

    def columns(self, grid: Grid, heads: tuple[int, ...]) -> Blocks:
        return self.at(grid.num_positions).columns(grid, heads)

    def cost(self, grid: Grid) -> float:
        return self.at(grid.num_positions).cost(grid)


@functools.lru_cache(maxsize=256)
def _resolved(wanted: Sparsity, num_positions: int) -> BlockPattern:
    n, ratio, block_size = num_positions, wanted.ratio, wanted.block_size
    grid = wanted.grid(n)
    if n == 0:
        return LocalWindow(0, block_size=block_size)
    if wanted.kind == "random":
        # every row keeps its own block, so that no query is without keys, causal or not
        return RandomBlocks(max(ratio, 1 / grid.num_columns), wanted.seed, own_block=True, block_size=block_size)
    if wanted.kind == "local":
        return LocalWindow(_window(n, ratio * n * n), block_size=block_size)
    if wanted.kind == "dilated":
        return _dilated(grid, ratio)
    # g global positions keep about 2·g·N pairs
    block = max(wanted.q_block, wanted.k_block)
    num_globals = block if 8 * block <= ratio * n else int(ratio * n / 8)
    rest = n - num_globals
    pairs = ratio * n * n - num_globals * (n + rest)
    if wanted.kind == "global_local":
        return GlobalLocal(_window(rest, pairs), num_globals, block_size=block_size)
    # up to a ratio of a half there are enough blocks outside the window to draw the full number
    num_random = min(3, int(ratio * grid.num_columns / 4)) if ratio <= 0.5 else 0
    drawing = n - min(n, -(-num_globals // wanted.q_block) * wanted.q_block)
    pairs -= num_random * wanted.k_block * drawing
    return BigBird(_window(rest, pairs), num_globals, num_random, wanted.seed if num_random else 0, block_size=block_size)


def _window(num_positions: int, pairs: float) -> int:
    """Returns the window w whose number of pairs at N = ``num_positions``, N·(2w + 1) − w·(w + 1), is nearest to ``pairs``."""
    return _nearest(lambda w: num_positions * (2 * w + 1) - w * (w + 1), pairs, 0, num_positions - 1)


def _dilated(grid: Grid, ratio: float) -> DilatedBlocks:
    """Returns blocks as far apart as the ratio allows, and as many as it requires."""
    own = own_count(grid)
    # a row's own columns are neighbors and must lead to different columns
    dilation = max(own, int(own / ratio * (1 + 1e-12)))
    row = grid.rows()
    first_query, last_query = grid.queries(row)
    first, last = own_columns(grid, row)
    short = grid.num_columns * grid.k_block - grid.num_positions

    def pairs(num_blocks: int) -> int:
        before, after = num_blocks // 2, (num_blocks - 1) // 2
        kept = torch.zeros_like(row)
        for number, column in enumerate((first, last)[:own]):
            steps = (grid.num_columns - 1 - column) // dilation
            keys = ((column // dilation).clamp(max=before) + steps.clamp(max=after) + 1) * grid.k_block
            reaches_end = (steps <= after) & (column + steps * dilation == grid.num_columns - 1)
            # the last row may have only one own column
            kept += torch.where((last > first) | (number == 0), keys - reaches_end * short, 0)
        return int((kept * (last_query - first_query + 1)).sum())

    num_blocks = _nearest(pairs, ratio * grid.num_positions**2, 1, 2 * (grid.num_columns // dilation + 1))
    return DilatedBlocks(dilation, num_blocks, block_size=(grid.q_block, grid.k_block))


def _nearest(count: Callable[[int], int], wanted: float, low: int, high: int) -> int:
    """Returns the x in [low, high] whose count, which grows with x, is nearest to ``wanted``."""
    reaching = low + bisect.bisect_left(range(low, high), wanted, key=count)
    return min(range(max(reaching - 1, low), reaching + 1), key=lambda x: abs(count(x) - wanted))
