"""The kernels' tile sizes. They were measured beforehand, and are looked up by head dim, dtype and the rows of a problem."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


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


# By dtype class and head dim rounded up, of the kernels "forward", "query" (dq) and "key" (dk, dv). These are the fastest of a sweep on an
# H200 with Triton 3.6 (benchmarks/results/2026-11-22-h200/tiles.md)
_KERNELS = ("forward", "query", "key")
_Table = dict[tuple[str, int], tuple[tuple[int, int, int, int] | None, ...]]
_SIZES: _Table = {
    ("half", 48): (None, None, (128, 32, 4, 2)),
    ("half", 64): ((128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3)),
    ("half", 128): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    ("half", 256): ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
    # blocks of 16 with 8 warps read out of bounds with Triton 3.6
    ("float32", 64): ((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2)),
    ("float32", 128): ((128, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
}
# Replacements for lists of blocks. Of half precision: the fastest on an H200 with random blocks of 128x128 at 10 %. Of float32, whose
# products are exact here and take more registers: chosen by the output of ptxas, not timed
_LIST_SIZES: _Table = {
    ("half", 64): (None, None, (64, 64, 4, 3)),
    ("half", 128): (None, (128, 64, 8, 3), (128, 64, 8, 3)),
    ("float32", 64): ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2)),
    ("float32", 128): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
    ("float32", 256): ((16, 32, 8, 2), (32, 32, 8, 2), (32, 16, 8, 2)),
}
# replacements for sizes that do not fit where a program has 99 KiB of shared memory (sm_86, sm_89, sm_120); chosen by the output of ptxas,
# not timed
_SMALL_SIZES: _Table = {
    ("half", 256): ((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
    ("float32", 64): ((64, 32, 4, 2), (64, 32, 8, 1), (64, 32, 8, 1)),
    ("float32", 128): ((64, 32, 8, 1), None, None),
}


@functools.lru_cache(maxsize=256)
def sizes(
    which: str, head_dim: int, dtype: torch.dtype, longest: int, small: bool = False, dropout: bool = False, lists: bool = False
) -> TileSizes:
    """Returns the sizes of a kernel.

    Args:
        which: "forward", "query" (dq) or "key" (dk, dv).
        longest: the number of selected positions in the longest segment; of lists, the positions of a block.
        small: whether a program has only 99 KiB of shared memory.
    """
    kind, width = "float32" if dtype is torch.float32 else "half", sum(head_blocks(head_dim))
    by_dim: dict[int, tuple[int, int, int, int]] = {}
    for table in (_SIZES, _LIST_SIZES if lists else {}, _SMALL_SIZES if small else {}):
        for (of_kind, dim), row in table.items():
            if of_kind == kind and dim >= width and (numbers := row[_KERNELS.index(which)]) is not None:
                by_dim[dim] = numbers
    size = TileSizes(*by_dim[min(by_dim)])
    if dropout and which == "query":
        # the dropout decisions are held in registers, so smaller blocks take 11 % less time on an H200
        size = size._replace(block=32)
    rows = min(size.rows, max(16, 1 << (longest - 1).bit_length()))
    return size if rows == size.rows else size._replace(rows=rows, warps=4)
