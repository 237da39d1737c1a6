"""What all kernels of a table share: the row of a program, loads of strided rows, the scores of a tile.

A row of the table (``table.py``) is one tile of one segment, the same for every head; the head's offset says which positions it takes.
Positions count in 32 bits, addresses in 64. A head dim is cut into two blocks D0 + D1 ≥ D, powers of two (D1 may be 0), so that 48 is 32 + 16.
"""

# kernels have no types that mypy knows
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WIDTH = tl.constexpr(8)
# integers of which no value is compiled in: one kernel for all lengths, numbers of heads and windows
VARYING = [
    "num_heads", "kv_heads", "offset_heads", "group", "q_first", "q_last", "num_queries", "num_keys", "part_rows", "delta_rows", "q_part_rows",
    "k_part_rows", "q_tiles", "steps", "direct", "left", "right", "threshold",
]  # fmt: skip


@triton.jit
def read_row(rows_ptr, row):
    """(branch, rate, first position and length of the segment, tile, place of its first result, places a segment, other place)."""
    at = rows_ptr + row * WIDTH
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7),
    )  # fmt: skip


@triton.jit
def between(first, rate, count, low, high):
    """Indices [a, b) of the ``count`` positions first, first + rate, … that lie in [low, high)."""
    a = (tl.maximum(low - first, 0) + rate - 1) // rate
    b = (tl.maximum(high - first, 0) + rate - 1) // rate
    return a, tl.minimum(b, count)


@triton.jit
def load_rows(base, steps, valid, START: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """(rows, BLOCK) of a tensor from column START on; 0 beyond D and, if MASKED, where a row is not valid."""
    columns = START + tl.arange(0, BLOCK)
    pointers = base + steps[:, None] + columns[None, :]
    if START + BLOCK > D:
        inside = (columns < D)[None, :]
        if MASKED:
            inside = inside & valid[:, None]
        x = tl.load(pointers, mask=inside, other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def store_rows(base, steps, valid, x, START: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    columns = START + tl.arange(0, BLOCK)
    inside = valid[:, None]
    if START + BLOCK > D:
        inside = inside & (columns < D)[None, :]
    tl.store(base + steps[:, None] + columns[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def product(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """a·bᵀ over both blocks of the head dim."""
    x = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        x = tl.dot(a1, tl.trans(b1), x, input_precision=PRECISION)
    return x


@triton.jit
def seen(i, j, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether query index i sees key index j: i − left ≤ j ≤ i + right, as far as there are bounds."""
    good = i == i
    if RIGHT:
        good = good & (j <= i + right)
    if LEFT:
        good = good & (j >= i - left)
    return good


@triton.jit
def kept(a, c, b, threshold):
    """Whether dropout keeps a pair, from the words of its query and its key (``dropout.py``)."""
    x = (a ^ b) * c
    return x.to(tl.uint32, bitcast=True) >= threshold.to(tl.uint32, bitcast=True)
