"""How much scratch memory each pass of a table of tiles takes, from sizes alone: what the launches allocate, and what plans count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# (elements, dtype) of each part of one allocation
Parts = tuple[tuple[int, torch.dtype], ...]
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows that wait for the merge or the sum.

    Args:
        batch, heads, key_heads: B, H, and the heads that gradients of keys are summed for.
        part_rows, delta_rows: places of queries in all branches but the direct one, and in all.
        key_part_rows: places of keys in all branches but the direct one.
    """

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    part_rows: int
    delta_rows: int
    key_part_rows: int

    def own_outputs(self) -> int:
        """Elements of the branches' own outputs."""
        return self.batch * self.heads * self.part_rows * self.head_dim

    def forward(self, dtype: torch.dtype, *, is_kept: bool) -> Parts:
        """Outputs, unless they are kept elsewhere, and lse of the branches."""
        return (0 if is_kept else self.own_outputs(), dtype), (self.batch * self.heads * self.part_rows, torch.float32)

    def backward(self, dtype: torch.dtype, *, dropout: bool) -> Parts:
        """Of each query row δ, lse · log2(e) and two words of dropout; dq, dk, dv of the branches."""
        keys = self.batch * self.key_heads * self.key_part_rows * self.head_dim
        stats = (4 if dropout else 2) * self.batch * self.heads * self.delta_rows
        return (stats, torch.float32), (self.own_outputs(), dtype), (keys, dtype), (keys, dtype)


def all_aligned(pointers: Sequence[int]) -> bool:
    """To 16 bytes, as a compiled kernel assumes of the pointers that it was compiled with."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits % 16 == 0


def aligned_bytes(elements: int, dtype: torch.dtype) -> int:
    return -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def scratch_bytes(parts: Iterable[tuple[int, torch.dtype]]) -> int:
    return sum(aligned_bytes(*part) for part in parts)
