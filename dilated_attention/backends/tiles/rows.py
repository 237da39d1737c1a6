"""What all kernels over a table share: the row of a program, loads of strided rows, and the scores of a tile.

A row of the table (``table.py``) is one tile of one segment, the same for every head; the head's offset determines which positions it
selects. Positions use 32 bits, addresses 64. A head dim is split into two blocks D0 + D1 ≥ D, powers of two (D1 may be 0), so that 48 is
32 + 16.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# numbers in a row of the table
WIDTH = tl.constexpr(8)
# integer arguments that are not specialised: one kernel serves all lengths, numbers of heads and windows
VARYING = [
    "num_heads", "kv_heads", "offset_heads", "group", "q_first", "q_last", "num_queries", "num_keys", "part_rows", "delta_rows",
    "q_part_rows", "k_part_rows", "q_tiles", "steps", "direct", "left", "right", "threshold", "num_batches", "pad_b", "pad_branch",
    "dlse_b", "dlse_n", "dlse_h", "lists", "num_shared", "k_tiles", "key_direct", "lse_b", "lse_h",
]  # fmt: skip


@triton.jit
def between(first, rate, count, low, high):
    """Returns the indices [a, b) of those of the ``count`` positions first, first + rate, … that are in [low, high)."""
    a = (tl.maximum(low - first, 0) + rate - 1) // rate
    b = (tl.maximum(high - first, 0) + rate - 1) // rate
    return a, tl.minimum(b, count)


@triton.jit
def read_segment(rows_ptr, row, offsets_ptr, offset_heads, head, q_first, q_last, num_keys, CUT: tl.constexpr):
    """Reads a row of the table for one head. CUT: whether some positions have no query or no key.

    Returns (branch, rate, first position, number of keys, indices [low, high) of the queries, tile, place of the first result, places per
    segment, place of the first query in a row of keys).
    """
    at = rows_ptr + row * WIDTH
    branch, rate, start, length = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    tile, place, places, query_place = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    offset = tl.load(offsets_ptr + branch * offset_heads + head)
    first = start + offset
    count = tl.where(offset >= 0, (length - offset + rate - 1) // rate, 0)
    low, high = 0, count
    if CUT:
        low, high = between(first, rate, count, q_first, q_last)
        count = tl.minimum(count, (tl.maximum(num_keys - first, 0) + rate - 1) // rate)
    return branch, rate, first, count, low, high, tile, place, places, query_place


@triton.jit
def key_parts(i0, last, count, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns the ends of the three parts of the keys that queries i0 … last see; every query sees all keys of the second part.

    LEFT, RIGHT: whether the window has these bounds (causal: right = 0). Without LEFT the first part is empty.
    """
    begin, end, full_begin, full_end = 0, count, 0, count
    if RIGHT:
        end = tl.maximum(tl.minimum(count, last + right + 1), 0)
        full_end = tl.maximum(tl.minimum(count, i0 + right + 1), 0)
    if LEFT:
        begin = tl.minimum(tl.maximum(i0 - left, 0), end)
        full_begin = tl.minimum(begin + (tl.maximum(last - left, begin) - begin + BLOCK - 1) // BLOCK * BLOCK, end)
    full_end = full_begin + tl.maximum(full_end - full_begin, 0) // BLOCK * BLOCK
    return begin, full_begin, full_end, end


@triton.jit
def load_rows(base, offsets, valid, START: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Loads (rows, BLOCK) of a tensor, its rows at base + offsets, from column START on; 0 beyond D and, if MASKED, in rows not valid."""
    columns = START + tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + columns[None, :]
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
def store_rows(base, offsets, valid, x, START: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    columns = START + tl.arange(0, BLOCK)
    inside = valid[:, None]
    if START + BLOCK > D:
        inside = inside & (columns < D)[None, :]
    tl.store(base + offsets[:, None] + columns[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def product(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """Computes a·bᵀ over both blocks of the head dim."""
    x = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        x = tl.dot(a1, tl.trans(b1), x, input_precision=PRECISION)
    return x


@triton.jit
def places_of(bias_ptr, batch, num_batches, num_heads, first, num_keys, q_row, num_queries):
    """Returns pointers to the coordinates of a segment's keys, from ``first`` on, and queries, from ``q_row`` on, in a packed bias: see
    ``run.packed_bias``."""
    keys = bias_ptr + num_heads
    queries = keys + 2 * num_keys.to(tl.int64) * num_batches
    return keys + 2 * (batch * num_keys + first), queries + 2 * (batch * num_queries + q_row)


@triton.jit
def load_places(base, rows, valid, MASKED: tl.constexpr):
    """Loads both coordinates of places; 0 where MASKED and not valid."""
    at = base + 2 * rows.to(tl.int64)
    if MASKED:
        return tl.load(at, mask=valid, other=0.0), tl.load(at + 1, mask=valid, other=0.0)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def distances(x0, y0, x1, y1):
    """Returns the distance of each of the first places (rows) and each of the second ones (columns)."""
    x, y = x0[:, None] - x1[None, :], y0[:, None] - y1[None, :]
    return tl.sqrt(x * x + y * y)


@triton.jit
def seen(i, j, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether query index i sees key index j: i − left ≤ j ≤ i + right, for the bounds that exist."""
    # true of every query
    good = i == i
    if RIGHT:
        good = good & (j <= i + right)
    if LEFT:
        good = good & (j >= i - left)
    return good


@triton.jit
def kept(a, c, b, threshold):
    """Whether dropout keeps a pair, from the words a, c of its query and b of its key (``backends/dropout.py``)."""
    x = (a ^ b) * c
    return x.to(tl.uint32, bitcast=True) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def class_words(words_ptr, branch, rate, first, num_keys, pad_branch):
    """Returns (words of the class of ``first``, index of ``first`` in it) of the packed mask; see ``padding.py``."""
    words = ((num_keys + rate - 1) // rate + 31) // 32 + 2
    return words_ptr + branch.to(tl.int64) * pad_branch + (first % rate).to(tl.int64) * words, first // rate


@triton.jit
def hidden_words(words_ptr, index, BLOCK: tl.constexpr):
    """Returns (low, high): bits index … index + BLOCK − 1 of one class in the packed mask (``padding.py``), 32 bits per word."""
    at = words_ptr + (index >> 5)
    shift = (index & 31).to(tl.uint64)
    first = tl.load(at).to(tl.uint32, bitcast=True).to(tl.uint64)
    second = tl.load(at + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    low = (((second << 32) | first) >> shift).to(tl.uint32)
    high = low
    if BLOCK > 32:
        third = tl.load(at + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = (((third << 32) | second) >> shift).to(tl.uint32)
    return low, high


@triton.jit
def hide(x, words_ptr, index, fill, BLOCK: tl.constexpr):
    """Replaces x by ``fill`` in the columns whose bits are set, among BLOCK bits from ``index`` on."""
    low, high = hidden_words(words_ptr, index, BLOCK)
    if (low | high) != 0:
        # Most blocks have no padded key. Loading the words again keeps the compiler from doing what follows in every block.
        low, high = hidden_words(words_ptr, index, BLOCK)
        columns = tl.arange(0, BLOCK)
        word = tl.where(columns < 32, low, high)
        x = tl.where((((word >> (columns & 31).to(tl.uint32)) & 1) == 0)[None, :], x, fill)
    return x


@triton.jit
def drop(p, keep, number):
    """Returns p where it is kept, else 0.

    ``number`` is any finite number that is not a compile-time constant: with a constant zero the compiler would select in half precision,
    with two additional instructions per pair.
    """
    return tl.where(keep, p, number * 0.0)
