"""Counts the pairs of a pattern in square cells of positions, without a mask of N² pairs, and draws them: patterns of long sequences."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.blocks.base import BlockPattern
from dilated_attention.pattern.blocks.kept_blocks import block_pairs
from dilated_attention.pattern.checks import MAX_HEADS, MAX_MASK, as_int
from dilated_attention.pattern.dilated import NOT_IN_BRANCH, DilatedPattern
from dilated_attention.pattern.drawing import checked_panels, finished, panels

# up to this length, the pattern's definition is evaluated for every pair
_DENSE_POSITIONS = 1024
_MOST_POSITIONS = 2**28


def cell_pairs(pattern: Pattern, num_positions: int, num_heads: int, cell: int, *, is_causal: bool = False) -> Tensor:
    """Counts the pairs, with multiplicity, in every square of ``cell`` × ``cell`` positions; the last of a row or column may be smaller.

    Args:
        cell: side of a cell in positions. For a block pattern beyond 1,024 positions, it must be a multiple of both block sizes.

    Returns:
        int64 (num_heads, ceil(N / cell), ceil(N / cell)): head, cell of the queries, cell of the keys. Their sum is ``pattern.pairs``.
    """
    num_positions, cell = as_int("num_positions", num_positions, minimum=0), as_int("cell", cell, minimum=1)
    num_heads, cells = as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS), -(-num_positions // cell)
    if num_heads * cells**2 > MAX_MASK:
        raise ValueError(
            f"num_heads is {num_heads:,} and cell {cell:,}, which makes {cells:,} × {cells:,} cells for each; take larger "
            "cells or fewer heads"
        )
    if num_positions > _MOST_POSITIONS:
        raise ValueError(f"num_positions is {num_positions:,}; each one is examined, expected at most {_MOST_POSITIONS:,}")
    if num_positions <= _DENSE_POSITIONS or not isinstance(pattern, (DilatedPattern, BlockPattern)):
        return _summed(pattern.dense_mask(num_positions, num_positions, num_heads, is_causal=is_causal), cell)
    if isinstance(pattern, DilatedPattern):
        return _of_dilated(pattern, num_positions, num_heads, cell, is_causal)
    if cell % pattern.q_block or cell % pattern.k_block:
        raise ValueError(f"cell is {cell}; expected a multiple of the pattern's blocks, {pattern.q_block} × {pattern.k_block} positions")
    return _of_blocks(pattern, num_positions, num_heads, cell, is_causal)


def cell_size(pattern: Pattern, num_positions: int, at_most: int) -> int:
    """Returns the smallest cell size that ``cell_pairs`` takes, a power of two, such that at most ``at_most`` cells cover the sequence."""
    cell = 1 << max(0, -(-num_positions // at_most) - 1).bit_length()
    if isinstance(pattern, BlockPattern) and num_positions > _DENSE_POSITIONS:
        cell = max(cell, pattern.q_block, pattern.k_block)
    return cell


def cell_sizes(num_positions: int, cell: int) -> Tensor:
    """Returns the number of all pairs in every square, int64 (cells, cells): the ``cell_pairs`` of dense attention."""
    lengths = torch.arange(0, num_positions + cell, cell).clamp(max=num_positions).diff()
    return lengths[:, None] * lengths


def draw_cells(pattern: Pattern, num_positions: int, num_heads: int, cell: int, *, is_causal: bool = False, path: str | None = None) -> Any:
    """Same as ``drawing.draw``, for longer sequences: the color is the mean multiplicity of the pairs of ``cell`` × ``cell`` positions."""
    num_heads = checked_panels(num_heads)
    from matplotlib.colors import PowerNorm

    pairs = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal)
    mean = pairs / cell_sizes(num_positions, cell)
    # the square root makes cells with few pairs visible
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(1.0, float(mean.max()) if mean.numel() else 1.0))
    edge, label = pairs.shape[-1] * cell, f"mean multiplicity of {cell} × {cell} positions"
    figure = panels(mean, 1.4, label, cmap="Blues", norm=norm, extent=(0, edge, edge, 0))
    ticks = [0, num_positions // 4, num_positions // 2, 3 * num_positions // 4, num_positions]
    for panel in figure.axes[:num_heads]:
        panel.set_xlim(0, num_positions)
        panel.set_ylim(num_positions, 0)
        panel.set_xticks(ticks[::2], [f"{tick:,}" for tick in ticks[::2]])
        panel.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    return finished(figure, pattern, num_positions, num_heads, is_causal, path)


def _summed(mask: Tensor, cell: int) -> Tensor:
    num_heads, num_positions, _ = mask.shape
    cells = -(-num_positions // cell)
    padded = torch.nn.functional.pad(mask.to(torch.int64), (0, cells * cell - num_positions) * 2)
    return padded.view(num_heads, cells, cell, cells, cell).sum((2, 4))


def _of_dilated(pattern: DilatedPattern, num_positions: int, num_heads: int, cell: int, is_causal: bool) -> Tensor:
    cells = -(-num_positions // cell)
    total = torch.zeros(num_heads, cells, cells, dtype=torch.int64)
    positions = torch.arange(num_positions)
    for (length, rate), offsets in zip(pattern.branches, pattern.offsets(num_heads), strict=True):
        for offset in sorted(set(offsets) - {NOT_IN_BRANCH}):
            taken = positions[positions % length % rate == offset]
            # how many positions of each cell a segment has; float64 counts exactly
            places, ones = torch.stack([taken // cell, taken // length]), torch.ones(len(taken), dtype=torch.float64)
            with warnings.catch_warnings():
                # torch's, that sparse matrices may change
                warnings.simplefilter("ignore")
                counts = torch.sparse_coo_tensor(places, ones, (cells, -(-num_positions // length)))
                pairs = torch.sparse.mm(counts, counts.T).to_dense().long()
            if is_causal:
                own = torch.bincount(places[0], minlength=cells)
                pairs = pairs.tril(-1) + ((pairs.diag() + own) // 2).diag()
            total[torch.tensor([o == offset for o in offsets])] += pairs
    return total


def _of_blocks(pattern: BlockPattern, num_positions: int, num_heads: int, cell: int, is_causal: bool) -> Tensor:
    cells = -(-num_positions // cell)
    total = torch.zeros(num_heads, cells, cells, dtype=torch.int64)
    pattern = pattern.at(num_positions)
    for head, row, column, pairs in block_pairs(pattern.causal() if is_causal else pattern, num_positions, num_heads):
        total.index_put_((head, row * pattern.q_block // cell, column * pattern.k_block // cell), pairs, accumulate=True)
    return total if pattern.per_head else total[:1].expand(num_heads, -1, -1)
