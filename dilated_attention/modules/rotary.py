"""Rotary position embedding (RoFormer, arXiv 2104.09864, Eq. 34) by absolute position, before segments and dilation."""

from __future__ import annotations

import math

import torch

Table = tuple[torch.Tensor, torch.Tensor]


def rotary_table(positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Table:
    """(cos, sin) of the angles position · base^(−2i/D), i = 0 … D/2 − 1, each (N, 1, D/2).

    A pure function without a cache, so that a compiled graph neither breaks nor depends on the length.

    Args:
        positions: integers (N,).
        head_dim: D, even.
        base: > 1; the longest wavelength is about 2π · base positions.
        dtype: of the vectors to be rotated; the table is float32, or float64 for float64.
    """
    # float32 has no digits left for the fraction of a turn at long range: at position 2^20 its angles are off by 0.06. So the
    # angle is reduced to one turn in float64, which only Apple's GPUs lack
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(head_dim // 2, dtype=wide, device=positions.device) * (-2 * math.log(base) / head_dim)
    turn = (positions.to(wide)[:, None] * exponent.exp()).remainder(2 * math.pi)
    angle = turn.to(torch.float64 if dtype is torch.float64 else torch.float32)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Each pair (x_i, x_{i+D/2}) of x (B, N, H, D) turned by its position's angle i; in the table's dtype, rounded to x's.

    The halves are paired as in GPT-NeoX and Llama; the paper pairs neighbours, which differs by a permutation of the
    dimensions. q·k of two rotated vectors depends on the difference of their positions only.
    """
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def document_positions(cu_seqlens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(n,) positions counted from the start of the packed document that each of ``positions`` (n,) lies in."""
    positions = positions.to(cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, positions, right=True) - 1
    return positions - cu_seqlens[document]
