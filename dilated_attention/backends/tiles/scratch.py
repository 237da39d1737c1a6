"""The scratch memory of each pass over a table of tiles, computed from sizes alone: for the launches that allocate it and for plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# (elements, dtype) of each part of an allocation
Parts = tuple[tuple[int, torch.dtype], ...]
_ALIGNMENT = 128
# compute capabilities with 163 KiB of shared memory per program, or more; others have 99
LARGE_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class Extent:
    """The numbers of intermediate rows, which the merge or the sum reads.

    Args:
        batch, heads, key_heads: B, H, and the number of heads for which gradients of keys are summed.
        part_rows, delta_rows: number of query places in all branches except the direct one, and in all branches.
        key_part_rows: number of key places in all branches except the direct one.
    """

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    part_rows: int
    delta_rows: int
    key_part_rows: int

    def own_outputs(self) -> int:
        """Returns the number of elements of the branches' own outputs."""
        return self.batch * self.heads * self.part_rows * self.head_dim

    def forward(self, dtype: torch.dtype, *, is_saved: bool) -> Parts:
        """Returns the parts of the forward: the branches' outputs, unless they are stored elsewhere, and their lse."""
        return (0 if is_saved else self.own_outputs(), dtype), (self.batch * self.heads * self.part_rows, torch.float32)

    def backward(self, dtype: torch.dtype, *, dropout: bool, bias: bool = False) -> Parts:
        """Returns the parts of the backward: per query row δ, lse · log2(e), with dropout two words, with a bias a part of its
        gradient; dq, dk and dv of the branches."""
        keys = self.batch * self.key_heads * self.key_part_rows * self.head_dim
        stats = ((4 if dropout else 2) + bias) * self.batch * self.heads * self.delta_rows
        return (stats, torch.float32), (self.own_outputs(), dtype), (keys, dtype), (keys, dtype)


def all_aligned(pointers: Sequence[int]) -> bool:
    """Whether all pointers are aligned to 16 bytes, as a kernel compiled for aligned pointers assumes."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits % 16 == 0


def aligned_bytes(elements: int, dtype: torch.dtype) -> int:
    return -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def scratch_bytes(parts: Iterable[tuple[int, torch.dtype]]) -> int:
    return sum(aligned_bytes(*part) for part in parts)
