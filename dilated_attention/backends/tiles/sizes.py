"""Sizes that need no tensors and no Triton: the kernels' tiles, measured beforehand, and the scratch memory of each pass, for the launches
that allocate it and for plans."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dilated_attention.backends.hardware import capability

# (elements, dtype) of each part of an allocation
Parts = tuple[tuple[int, torch.dtype], ...]
_ALIGNMENT = 128
# compute capabilities with 163 KiB of shared memory per program, or more; others have 99
LARGE_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


class TileSizes(NamedTuple):
    """ROWS of a program (queries, or keys for dk and dv), the size of the BLOCK that it visits at a time, warps, and pipeline stages."""

    rows: int
    block: int
    warps: int
    stages: int


def head_blocks(head_dim: int) -> tuple[int, int]:
    """Returns (D0, D1) with D0 + D1 ≥ head dim, both powers of two ≥ 16, or D1 = 0: 48 is 32 + 16, not 64.

    A second block that is not full is avoided where the head dim is no multiple of 16: of 40 as 32 + 16 in float16, Triton 3.6 compiles a
    forward with zero keys that reads outside shared memory.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    if head_dim <= 16 or whole == 32 or head_dim % 16:
        return whole, 0
    rest = max(16, 1 << (head_dim - half - 1).bit_length())
    return (half, rest) if rest < half else (whole, 0)


# By kernel ("forward", "query" for dq, "key" for dk and dv), dtype class and head dim rounded up. These are the fastest of a sweep on an
# H200 with Triton 3.6 (benchmarks/results/2026-11-22-h200/tiles.md)
_SIZES = {
    ("forward", "half", 64): TileSizes(128, 64, 4, 3),
    ("query", "half", 64): TileSizes(64, 64, 4, 3),
    ("key", "half", 48): TileSizes(128, 32, 4, 2),
    ("key", "half", 64): TileSizes(64, 32, 4, 3),
    ("forward", "half", 128): TileSizes(64, 64, 4, 3),
    ("query", "half", 128): TileSizes(64, 64, 4, 2),
    ("key", "half", 128): TileSizes(64, 32, 4, 2),
    ("forward", "half", 256): TileSizes(64, 64, 8, 2),
    ("query", "half", 256): TileSizes(64, 32, 8, 2),
    ("key", "half", 256): TileSizes(64, 32, 8, 1),
    # blocks of 16 with 8 warps read out of bounds with Triton 3.6
    ("forward", "float32", 64): TileSizes(128, 64, 8, 2),
    ("query", "float32", 64): TileSizes(128, 32, 8, 2),
    ("key", "float32", 64): TileSizes(128, 32, 8, 2),
    ("forward", "float32", 128): TileSizes(128, 32, 8, 1),
    ("query", "float32", 128): TileSizes(32, 32, 4, 1),
    ("key", "float32", 128): TileSizes(32, 32, 4, 1),
}
# Replacements for lists of blocks. Of half precision: the fastest on an H200 with random blocks of 128x128 at 10 %. Of float32, whose
# products are exact here and take more registers: chosen by the output of ptxas, not timed
_LIST_SIZES = {
    ("key", "half", 64): TileSizes(64, 64, 4, 3),
    ("query", "half", 128): TileSizes(128, 64, 8, 3),
    ("key", "half", 128): TileSizes(128, 64, 8, 3),
    ("forward", "float32", 64): TileSizes(64, 64, 8, 2),
    ("query", "float32", 64): TileSizes(64, 32, 8, 2),
    ("key", "float32", 64): TileSizes(64, 32, 8, 2),
    ("forward", "float32", 128): TileSizes(64, 32, 8, 2),
    ("query", "float32", 128): TileSizes(64, 32, 8, 2),
    ("key", "float32", 128): TileSizes(32, 64, 8, 2),
    ("forward", "float32", 256): TileSizes(16, 32, 8, 2),
    ("query", "float32", 256): TileSizes(32, 32, 8, 2),
    ("key", "float32", 256): TileSizes(32, 16, 8, 2),
}
# replacements for sizes that do not fit where a program has 99 KiB of shared memory (sm_86, sm_89, sm_120); chosen by the output of ptxas,
# not timed
_SMALL_SIZES = {
    ("forward", "half", 256): TileSizes(64, 32, 8, 2),
    ("query", "half", 256): TileSizes(32, 32, 4, 2),
    ("key", "half", 256): TileSizes(32, 32, 8, 1),
    ("forward", "float32", 64): TileSizes(64, 32, 4, 2),
    ("query", "float32", 64): TileSizes(64, 32, 8, 1),
    ("key", "float32", 64): TileSizes(64, 32, 8, 1),
    ("forward", "float32", 128): TileSizes(64, 32, 8, 1),
}


@functools.lru_cache(maxsize=256)
def sizes(
    which: str, head_dim: int, dtype: torch.dtype, longest: int, device: torch.device, dropout: bool = False, lists: bool = False
) -> TileSizes:
    """Returns the sizes of a kernel.

    Args:
        which: "forward", "query" (dq) or "key" (dk, dv).
        longest: the number of selected positions in the longest segment; of lists, the positions of a block.
    """
    kind, width = "float32" if dtype is torch.float32 else "half", sum(head_blocks(head_dim))
    of_gpu = capability(device)
    small = of_gpu is not None and of_gpu not in LARGE_MEMORY
    table = _SIZES | (_LIST_SIZES if lists else {}) | (_SMALL_SIZES if small else {})
    size = table[min((key for key in table if key[:2] == (which, kind) and key[2] >= width), key=lambda key: key[2])]
    if dropout and which == "query":
        # the dropout decisions are held in registers, so smaller blocks take 11 % less time on an H200
        size = size._replace(block=32)
    rows = min(size.rows, max(16, 1 << (longest - 1).bit_length()))
    return size if rows == size.rows else size._replace(rows=rows, warps=4)


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
