"""What the kernels over a table of tiles or over lists of blocks share: what a program computes, loads and stores of rows, and masks.

A row of the table (``table.py``) is one tile of one segment, the same for every head; the head's offset determines which positions it
selects. Indices (i of queries, j of keys) count the selected positions of a segment. Positions use 32 bits, addresses 64. A head dim is
split into two blocks of columns, D0 + D1 ≥ D, powers of two (D1 may be 0): 48 is 32 + 16.

The key padding mask is packed, 32 keys per word, in the order in which each branch reads it: a kernel tests many keys at once. A *class*
of a branch with rate r is the positions that are equal mod r. The selected keys of a segment are neighbours in their class, whatever the
segment's first position and the head's offset. A branch's words are stored class by class, ⌈⌈N/r⌉/32⌉ + 2 words each; bit t mod 32 of word
t div 32 is set where position class + r·t is padded. The last two words of a class are zeros, so that reading three words from any key on
stays in bounds.

The same kernels compute block-sparse attention: a list of blocks instead of a row of the table says which keys come next. A program
computes a tile inside one block and visits the blocks of that block's list, BLOCK positions at a time. It visits whole and masked blocks in
one loop: two loops would drain and refill the pipeline of loads in between, which costs too much where lists are short. All threads of a
program agree whether a block has a mask.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# numbers in a row of the table: see ``table.py``
WIDTH = tl.constexpr(8)
# words of a packed padding mask that a program of ``pack_kernel`` writes
PACKED_WORDS = 64
# integer arguments that are not specialised: one kernel serves all lengths, numbers of heads and windows
VARYING = [
    "num_heads", "kv_heads", "group", "q_first", "q_last", "num_queries", "num_keys", "part_rows", "delta_rows",
    "q_part_rows", "k_part_rows", "q_tiles", "steps", "direct", "left", "right", "threshold", "num_batches", "pad_b", "pad_branch",
    "dlse_b", "dlse_n", "dlse_h", "lists", "num_shared", "k_tiles", "key_direct", "lse_b", "lse_h",
]  # fmt: skip


@triton.jit
def between(first, rate, count, low, high):
    """Returns (a, b): of the ``count`` positions first, first + rate, …, those with indices [a, b) are in [low, high)."""
    a = (tl.maximum(low - first, 0) + rate - 1) // rate
    b = (tl.maximum(high - first, 0) + rate - 1) // rate
    return a, tl.minimum(b, count)


@triton.jit
def read_segment(rows_ptr, row, offsets_ptr, num_heads, head, q_first, q_last, num_keys, CUT: tl.constexpr):
    """Reads a row of the table for one head. CUT: whether some positions have no query or no key.

    Returns (branch, rate, first selected position, number of keys, indices [low, high) of the queries, tile, place of the segment's first
    result, places per segment, place of the segment's first query, which only a table of keys has).
    """
    at = rows_ptr + row * WIDTH
    branch, rate, start, length = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    tile, place, places, query_place = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    offset = tl.load(offsets_ptr + branch * num_heads + head)
    first = start + offset
    count = tl.where(offset >= 0, (length - offset + rate - 1) // rate, 0)
    low, high = 0, count
    if CUT:
        low, high = between(first, rate, count, q_first, q_last)
        count = tl.minimum(count, (tl.maximum(num_keys - first, 0) + rate - 1) // rate)
    return branch, rate, first, count, low, high, tile, place, places, query_place


@triton.jit
def key_parts(i0, last, count, left, right, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Returns (begin, full_begin, full_end, end): queries i0 … last see keys in [begin, end) only, and each all of [full_begin, full_end).

    LEFT, RIGHT: whether the window has these bounds (causal: right = 0). Without LEFT, full_begin is begin.
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
    """Loads columns [START, START + BLOCK) of the rows at base + offsets; 0 beyond column D and, if MASKED, in rows that are not valid."""
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
    """Writes x where ``load_rows`` reads, in valid rows."""
    columns = START + tl.arange(0, BLOCK)
    inside = valid[:, None]
    if START + BLOCK > D:
        inside = inside & (columns < D)[None, :]
    tl.store(base + offsets[:, None] + columns[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_both(base, offsets, valid, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr):
    """Loads both blocks of columns of valid rows; twice the first one if D1 is 0."""
    x0 = load_rows(base, offsets, valid, 0, D0, D, True)
    x1 = x0
    if D1 > 0:
        x1 = load_rows(base, offsets, valid, D0, D1, D, True)
    return x0, x1


@triton.jit
def store_both(base, offsets, valid, x0, x1, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr):
    """Writes both blocks of columns of valid rows."""
    store_rows(base, offsets, valid, x0, 0, D0, D)
    if D1 > 0:
        store_rows(base, offsets, valid, x1, D0, D1, D)


@triton.jit
def product(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """Computes a·bᵀ over both blocks of the head dim."""
    x = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        x = tl.dot(a1, tl.trans(b1), x, input_precision=PRECISION)
    return x


@triton.jit
def coordinates_of(bias_ptr, batch, num_batches, num_heads, first, num_keys, q_row, num_queries):
    """Returns pointers to the coordinates of keys from ``first`` on and of queries from ``q_row`` on, in a bias that ``run.packed_bias``
    packed: a slope per head, then two coordinates per key, then two per query."""
    keys = bias_ptr + num_heads
    queries = keys + 2 * num_keys.to(tl.int64) * num_batches
    return keys + 2 * (batch * num_keys + first), queries + 2 * (batch * num_queries + q_row)


@triton.jit
def load_coordinates(base, rows, valid, MASKED: tl.constexpr):
    """Loads both coordinates of some rows; 0 where MASKED and not valid."""
    at = base + 2 * rows.to(tl.int64)
    if MASKED:
        return tl.load(at, mask=valid, other=0.0), tl.load(at + 1, mask=valid, other=0.0)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def distances(x0, y0, x1, y1):
    """Returns the distance of each point (x0, y0), a row, from each point (x1, y1), a column."""
    x, y = x0[:, None] - x1[None, :], y0[:, None] - y1[None, :]
    return tl.sqrt(x * x + y * y)


@triton.jit
def seen(i, j, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether query index i sees key index j: i − left ≤ j ≤ i + right, for the bounds that exist."""
    # true, in the shape of i
    good = i == i
    if RIGHT:
        good = good & (j <= i + right)
    if LEFT:
        good = good & (j >= i - left)
    return good


@triton.jit
def kept(a, c, b, threshold):
    """Whether dropout keeps a pair, from the random words a, c of its query and b of its key (``backends/dropout.py``)."""
    x = (a ^ b) * c
    return x.to(tl.uint32, bitcast=True) >= threshold.to(tl.uint32, bitcast=True)


def words_of(rate: int, num_keys: int) -> int:
    """Returns the number of words that the packed padding mask of a branch has."""
    return rate * (((num_keys + rate - 1) // rate + 31) // 32 + 2)


@triton.jit(do_not_specialize=["pad_b", "num_branches", "num_keys", "words", "blocks"])
def pack_kernel(padding_ptr, rates_ptr, words_ptr, pad_b, num_branches, num_keys, words, blocks, WORDS: tl.constexpr):
    """Packs WORDS words of the padding mask, for one branch and batch entry.

    ``words`` is the stride from branch to branch, the most words that a branch has; ``blocks`` is how many programs share a branch.
    """
    pid = tl.program_id(0)
    block, row = pid % blocks, pid // blocks
    branch, batch = row % num_branches, (row // num_branches).to(tl.int64)
    rate = tl.load(rates_ptr + branch)
    class_size = ((num_keys + rate - 1) // rate + 31) // 32 + 2
    index = block * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    # in 64 bits, so that positions beyond the last class do not wrap
    index_in_class = (index % class_size).to(tl.int64)[:, None] * 32 + bit[None, :]
    position = (index // class_size).to(tl.int64)[:, None] + rate * index_in_class
    inside = ((index // class_size) < rate)[:, None] & (position < num_keys)
    hidden = tl.load(padding_ptr + batch * pad_b + position, mask=inside, other=0)
    packed = tl.sum((hidden != 0).to(tl.uint32) << bit[None, :].to(tl.uint32), 1)
    tl.store(words_ptr + row.to(tl.int64) * words + index, packed.to(tl.int32, bitcast=True), mask=index < words)


@triton.jit
def class_words(words_ptr, branch, rate, first, num_keys, pad_branch):
    """Returns (pointer to the words of the class of position ``first``, index of ``first`` in the class), in the packed padding mask."""
    words = ((num_keys + rate - 1) // rate + 31) // 32 + 2
    return words_ptr + branch.to(tl.int64) * pad_branch + (first % rate).to(tl.int64) * words, first // rate


@triton.jit
def hidden_words(words_ptr, index, BLOCK: tl.constexpr):
    """Returns (low, high), 32 bits each: bits index … index + BLOCK − 1 of one class. Without more than 32 bits, high is low."""
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
        # most blocks have no padded key; loading the words again keeps the compiler from doing what follows in every block
        low, high = hidden_words(words_ptr, index, BLOCK)
        columns = tl.arange(0, BLOCK)
        word = tl.where(columns < 32, low, high)
        x = tl.where((((word >> (columns & 31).to(tl.uint32)) & 1) == 0)[None, :], x, fill)
    return x


@triton.jit
def drop(p, keep, number):
    """Returns p where it is kept, else 0.

    ``number`` is any finite number that is not a compile-time constant. With a constant zero the compiler would select in half precision,
    which takes two more instructions per pair.
    """
    return tl.where(keep, p, number * 0.0)


class Lists(NamedTuple):
    """What a kernel reads of ``BlockLists``: each query block's key blocks or, in ``key_kernel``, each key block's query blocks.

    Args:
        starts: where each block's list starts in ``others``; the list ends where the next one starts.
        others: the blocks of all lists, one list after another.
        masks, bits: see ``BlockLists``.
        low, high: its ``interval``.
        order: each group's blocks in the order in which programs process their lists.
        heavy: () int32, the number of lists per head that are processed first, those of all heads together.

    All are tensors: Triton compiles a kernel anew for each alignment of an integer within a tuple.
    """

    starts: Any
    others: Any
    masks: Any
    bits: Any
    low: Any
    high: Any
    order: Any
    heavy: Any


class Form(NamedTuple):
    """The compile-time properties of lists.

    Args:
        tile_block: positions per block that has a list; a program's tile lies inside one.
        visited_block: positions per block in the lists.
        masks: 0 none · 1 interval · 2 bits.
        even: whether the visited positions fill their last block.
        per_batch, per_head: whether batch entries, and heads, have lists of their own.
    """

    tile_block: int
    visited_block: int
    masks: int
    even: bool
    per_batch: bool
    per_head: bool


@triton.jit
def group_start(batch, head, num_heads, num_positions, FORM: tl.constexpr):
    """Returns the index of the first list of a batch entry and head. A group has a list for each block of ``num_positions`` positions."""
    group = batch * 0
    if FORM.per_batch:
        group += batch * (num_heads if FORM.per_head else 1)
    if FORM.per_head:
        group += head
    return group * tl.cdiv(num_positions, FORM.tile_block)


@triton.jit
def read_list(lists, pid, num_batches, num_heads, num_positions, PARTS: tl.constexpr, FORM: tl.constexpr):
    """Returns (batch, head, block, tile) of a program. The ``num_positions`` positions are blocks of PARTS tiles.

    The heavy lists of all heads come first, so that none ends late. Then come the others, one head after the other, since the programs of
    a head share keys in the cache.
    """
    item = pid // PARTS
    heavy = tl.load(lists.heavy)
    pairs = num_batches * num_heads
    after_heavy = item - heavy * pairs
    num_others = tl.maximum(tl.cdiv(num_positions, FORM.tile_block) - heavy, 1)
    pair = tl.where(after_heavy < 0, item % pairs, after_heavy // num_others)
    rank = tl.where(after_heavy < 0, item // pairs, heavy + after_heavy % num_others)
    batch, head = (pair // num_heads).to(tl.int64), pair % num_heads
    block = tl.load(lists.order + group_start(batch, head, num_heads, num_positions, FORM) + rank)
    return batch, head, block, block * PARTS + pid % PARTS


@triton.jit
def whole_sequence(pid, num_queries, num_keys):
    """Returns what kernels over lists need of ``read_segment``'s results, for one segment that is the whole sequence: (branch, rate, first
    position, number of keys, indices [low, high) of the queries, place)."""
    # a tensor, as read_segment returns
    zero = pid * 0
    return zero, zero + 1, zero, num_keys, zero, num_queries, zero


@triton.jit
def list_steps(lists, batch, head, block, num_heads, num_positions, SUBS: tl.constexpr, FORM: tl.constexpr):
    """Returns (first step, end of the steps, first block in it) of a block's list; each block in a list takes SUBS steps."""
    at = lists.starts + group_start(batch, head, num_heads, num_positions, FORM) + block
    start, end = tl.load(at), tl.load(at + 1)
    return start * SUBS, end * SUBS, tl.load(lists.others + start, mask=start < end, other=0)


@triton.jit
def next_block(lists, step, end, SUBS: tl.constexpr):
    """Loads the block of step + 1 during this step: if the loads of its keys waited for it, the pipeline would lose a stage."""
    return tl.load(lists.others + tl.minimum(step + 1, end - 1) // SUBS)


@triton.jit
def hide_pairs(
    x, fill, lists, entry, query0, key0, num_queries, num_keys,
    ROWS: tl.constexpr, KEYS: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, MASKS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Sets x to ``fill`` where the block's mask does not keep the pair or the key lies behind the end.

    x is (ROWS queries, KEYS keys), or its transpose if TRANSPOSED. ``entry`` is the block's index in the lists.
    """
    masked = key0 + KEYS > num_keys
    mask_index = -1
    if MASKS > 0:
        mask_index = tl.load(lists.masks + entry)
        masked = masked | (mask_index >= 0)
    if masked:
        # numbers of queries and keys along the dimensions of x
        query = tl.arange(0, ROWS)[None, :] if TRANSPOSED else tl.arange(0, ROWS)[:, None]
        key = tl.arange(0, KEYS)[:, None] if TRANSPOSED else tl.arange(0, KEYS)[None, :]
        good = key0 + key < num_keys
        if MASKS == 1:
            inside = query0 + query < num_queries
            low = tl.load(lists.low + query0 + query, mask=inside, other=0)
            high = tl.load(lists.high + query0 + query, mask=inside, other=0)
            good = good & ((mask_index < 0) | ((key0 + key >= low) & (key0 + key < high)))
        if MASKS == 2:
            WORDS: tl.constexpr = K_BLOCK // 32
            word = tl.arange(0, KEYS // 32)[:, None] if TRANSPOSED else tl.arange(0, KEYS // 32)[None, :]
            at = lists.bits + tl.maximum(mask_index, 0).to(tl.int64) * (Q_BLOCK * WORDS)
            at += (query0 % Q_BLOCK + query) * WORDS + key0 % K_BLOCK // 32 + word
            # queries and words are never negative: these two tests give the mask of the load its shape
            words = tl.load(at, mask=(query >= 0) & (word >= 0) & (mask_index >= 0), other=-1)
            if TRANSPOSED:
                bits = tl.reshape((words[:, None, :] >> tl.arange(0, 32)[None, :, None]) & 1, (KEYS, ROWS))
            else:
                bits = tl.reshape((words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1, (ROWS, KEYS))
            good = good & (bits != 0)
        x = tl.where(good, x, fill)
    return x


@triton.jit
def hide_listed(
    x, fill, lists, entry, query0, key0, num_queries, num_keys, padding_ptr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDING: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Sets x (ROWS queries, KEYS keys) to ``fill`` where the lists do not keep the pair or the key is padded."""
    if FORM.masks > 0 or not FORM.even:
        x = hide_pairs(
            x, fill, lists, entry, query0, key0, num_queries, num_keys, ROWS, KEYS, FORM.tile_block, FORM.visited_block, FORM.masks, False
        )
    if PADDING:
        keys = key0 + tl.arange(0, KEYS)
        padded = tl.load(padding_ptr + keys, mask=keys < num_keys, other=1)
        x = tl.where((padded == 0)[None, :], x, fill)
    return x
