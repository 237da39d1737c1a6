"""Tile sizes of the kernels: measured, shipped, and looked up by head dim, dtype and the rows of a problem."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Sizes(NamedTuple):
    """ROWS of a program (queries, or keys for dk and dv), BLOCK that it visits at a time, warps, stages of the pipeline."""

    rows: int
    block: int
    warps: int
    stages: int


def head_blocks(head_dim: int) -> tuple[int, int]:
    """(D0, D1) ≥ head dim, powers of two from 16 on, D1 possibly 0: 48 is 32 + 16, not 64."""
    whole = max(16, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    if head_dim <= 16 or whole == 32:
        return whole, 0
    rest = max(16, 1 << (head_dim - half - 1).bit_length())
    return (half, rest) if rest < half else (whole, 0)


@functools.lru_cache(maxsize=256)
def sizes(which: str, head_dim: int, dtype: torch.dtype, longest: int) -> Sizes:
    """``which``: "forward", "query" (dq) or "key" (dk, dv). ``longest``: taken positions of the longest segment."""
    width = sum(head_blocks(head_dim))
    if dtype is torch.float32:
        base = {"forward": Sizes(64, 32, 4, 2), "query": Sizes(64, 32, 4, 2), "key": Sizes(64, 32, 4, 2)}[which]
        if width > 64:
            base = Sizes(32, 32, 4, 1)
    elif width <= 64:
        base = {"forward": Sizes(128, 64, 4, 3), "query": Sizes(128, 64, 8, 3), "key": Sizes(128, 64, 8, 2)}[which]
    elif width <= 128:
        base = {"forward": Sizes(128, 64, 8, 3), "query": Sizes(128, 64, 8, 2), "key": Sizes(128, 64, 8, 2)}[which]
    else:
        base = {"forward": Sizes(64, 64, 8, 2), "query": Sizes(64, 32, 8, 2), "key": Sizes(64, 32, 8, 1)}[which]
    rows = min(base.rows, max(16, 1 << (longest - 1).bit_length()))
    return base._replace(rows=rows, warps=base.warps if rows >= 64 else 4)
