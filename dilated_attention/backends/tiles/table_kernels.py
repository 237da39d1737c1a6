"""Writes the spans and tables of ``table.py`` on the device, from a few integers a branch and the starts of documents."""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.tiles.rows import WIDTH

_VARYING = [
    "num_documents", "num_positions", "q_first", "q_last", "num_keys", "direct", "key_direct", "tile", "rows0",
    "longest", "steps", "order",
]  # fmt: skip


@triton.jit
def _span(starts_ptr, document, inside, w, rate, low, high, num_positions, ONE: tl.constexpr):
    """Returns (start, end, segment length, places per segment, first segment in [low, high), number of such segments) of documents."""
    start, end = document * 0, document * 0 + num_positions
    if not ONE:
        start = tl.load(starts_ptr + document, mask=inside, other=0)
        end = tl.load(starts_ptr + document + 1, mask=inside, other=1)
    length = tl.minimum(w, end - start)
    places = (length + rate - 1) // rate
    a, b = tl.maximum(start, low), tl.minimum(end, high)
    first = (a - start) // length
    count = tl.where((a < b) & inside, (b - 1 - start) // length - first + 1, 0)
    return start, end, length, places, first, count


@triton.jit
def _num_tiles(start, end, length, rate, segment, low, high, tile):
    """Returns the number of tiles of a segment's positions in [low, high)."""
    begin = start + segment * length
    stop = tl.minimum(tl.minimum(begin + length, end), high)
    rows = (tl.maximum(stop - tl.maximum(begin, low), 0) + rate - 1) // rate
    return (rows + tile - 1) // tile


@triton.jit(do_not_specialize=_VARYING)
def spans_kernel(
    spans_ptr, counts_ptr, starts_ptr, lengths_ptr, rates_ptr, num_documents, num_positions, q_first, q_last, num_keys, direct, key_direct,
    tile, order, BRANCHES: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the spans of one branch (program 0) and the tiles before each document, for queries (program 1: 0) or keys (1).

    spans: (documents, branches, 2): place of segment 0 of queries, and of keys.
    counts: (2, branches, documents + 1), of documents in the order that follows their starts, the longest first.
    """
    branch, of_keys = tl.program_id(0), tl.program_id(1)
    low, high = tl.where(of_keys == 1, 0, q_first), tl.where(of_keys == 1, num_keys, q_last)
    last = tl.where(of_keys == 1, key_direct, direct)
    base = tl.program_id(0) * 0
    for other in range(BRANCHES):
        # the direct branch's places come last
        if (other != last) & ((branch == last) | (other < branch)):
            w, rate = tl.load(lengths_ptr + other), tl.load(rates_ptr + other)
            for at in range(0, num_documents, BLOCK):
                document = at + tl.arange(0, BLOCK)
                _, _, _, places, _, count = _span(starts_ptr, document, document < num_documents, w, rate, low, high, num_positions, ONE)
                base += tl.sum(places * count, 0)
    w, rate = tl.load(lengths_ptr + branch), tl.load(rates_ptr + branch)
    tiles = base * 0
    counts_at = counts_ptr + (of_keys * BRANCHES + branch) * (num_documents + 1)
    for at in range(0, num_documents, BLOCK):
        document = at + tl.arange(0, BLOCK)
        inside = document < num_documents
        start, end, length, places, first, count = _span(starts_ptr, document, inside, w, rate, low, high, num_positions, ONE)
        sizes = places * count
        spans_at = spans_ptr + (document * BRANCHES + branch) * 2 + of_keys
        tl.store(spans_at, base + tl.cumsum(sizes, 0) - sizes - first * places, mask=inside)
        base += tl.sum(sizes, 0)
        if not ONE:
            ordered = tl.load(starts_ptr + order + document, mask=inside, other=0)
            start, end, length, places, first, count = _span(starts_ptr, ordered, inside, w, rate, low, high, num_positions, ONE)
        rest = tl.where(count > 1, _num_tiles(start, end, length, rate, first + count - 1, low, high, tile), 0)
        rest += tl.maximum(count - 2, 0) * ((places + tile - 1) // tile)
        own = tl.where(count > 0, _num_tiles(start, end, length, rate, first, low, high, tile) + rest, 0)
        tl.store(counts_at + document, tiles + tl.cumsum(own, 0) - own, mask=inside)
        tiles += tl.sum(own, 0)
    tl.store(counts_at + num_documents, tiles)


@triton.jit(do_not_specialize=_VARYING)
def table_kernel(
    table_ptr, spans_ptr, counts_ptr, starts_ptr, lengths_ptr, rates_ptr, num_documents, num_positions, q_first, q_last, num_keys, tile,
    order, rows0, longest, steps, BRANCHES: tl.constexpr, CAUSAL: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Writes a row of the table of queries, which has ``rows0`` rows, or of that of keys, which follows it.

    A program writes one row, since Triton 3.6 fails to compile these divisions of a tensor of rows. Branches with the longest rows come
    first. With CAUSAL, the segments of a document are visited together, their last tiles of queries first.
    """
    row = tl.program_id(0)
    of_keys = (row >= rows0).to(tl.int32)
    low, high = tl.where(of_keys == 1, 0, q_first), tl.where(of_keys == 1, num_keys, q_last)
    row_of_table = row - of_keys * rows0
    branch, index = row * 0, row * 0
    for b in range(BRANCHES):
        cost = tl.cdiv(tl.minimum(tl.load(lengths_ptr + b), longest), tl.load(rates_ptr + b))
        first_row = row * 0
        for other in range(BRANCHES):
            its_cost = tl.cdiv(tl.minimum(tl.load(lengths_ptr + other), longest), tl.load(rates_ptr + other))
            if (its_cost > cost) | ((its_cost == cost) & (other < b)):
                first_row += tl.load(counts_ptr + (of_keys * BRANCHES + other) * (num_documents + 1) + num_documents)
        total = tl.load(counts_ptr + (of_keys * BRANCHES + b) * (num_documents + 1) + num_documents)
        is_there = (row_of_table >= first_row) & (row_of_table < first_row + total)
        branch = tl.where(is_there, b, branch)
        index = tl.where(is_there, row_of_table - first_row, index)
    counts_at = counts_ptr + (of_keys * BRANCHES + branch) * (num_documents + 1)
    document = row * 0
    size = 1 << steps
    for _ in range(steps):
        size = size // 2
        at = document + size
        # of documents without tiles the last one is found, and that has the next row
        document = tl.where(tl.load(counts_at + tl.minimum(at, num_documents)) <= index, at, document)
    index -= tl.load(counts_at + document)
    if not ONE:
        document = tl.load(starts_ptr + order + document)
    w, rate = tl.load(lengths_ptr + branch), tl.load(rates_ptr + branch)
    start, end, length, places, first, count = _span(starts_ptr, document, row >= 0, w, rate, low, high, num_positions, ONE)
    last = first + count - 1
    between = tl.maximum(count - 2, 0)
    in_first, in_whole = _num_tiles(start, end, length, rate, first, low, high, tile), tl.maximum((places + tile - 1) // tile, 1)
    in_last = _num_tiles(start, end, length, rate, last, low, high, tile)
    second = index - in_first
    third = second - between * in_whole
    segment, at_tile = second // in_whole, second % in_whole
    if CAUSAL:
        backwards = of_keys == 0
        several = tl.maximum(between, 1)
        segment = tl.where(backwards, second % several, segment)
        at_tile = tl.where(backwards, in_whole - 1 - second // several, at_tile)
        index = tl.where(backwards, in_first - 1 - index, index)
        third = tl.where(backwards, in_last - 1 - third, third)
    is_first, is_between = second < 0, (second >= 0) & (second < between * in_whole)
    segment = tl.where(is_first, first, tl.where(is_between, first + 1 + segment, last))
    at_tile = tl.where(is_first, index, tl.where(is_between, at_tile, third))
    spans_at = spans_ptr + (document * BRANCHES + branch) * 2
    begin = start + segment * length
    to = table_ptr + row.to(tl.int64) * WIDTH
    tl.store(to, branch)
    tl.store(to + 1, rate)
    tl.store(to + 2, begin)
    tl.store(to + 3, tl.minimum(length, end - begin))
    tl.store(to + 4, at_tile)
    tl.store(to + 5, tl.load(spans_at + of_keys) + segment * places)
    tl.store(to + 6, places)
    tl.store(to + 7, tl.load(spans_at) + segment * places)
