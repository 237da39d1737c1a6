"""Lists of blocks as a second way to find the next keys: the kernels over a table of tiles also compute block-sparse attention.

A program computes a tile inside one block and visits the blocks of that block's list, BLOCK positions at a time. It visits whole and
masked blocks in one loop: two loops would drain and refill the pipeline of loads in between, which is too expensive for short lists. The
test for a mask is a branch that is uniform over the program.
"""

# mypy does not know the types of kernels
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Lists(NamedTuple):
    """What a kernel reads of lists: of key blocks (``row_starts`` of ``BlockLists``), or in ``key_kernel`` of query blocks, with roles
    swapped.

    Args:
        starts, others, masks, bits, low, high: see ``BlockLists``.
        order: each group's lists in the order in which programs process them.
        heavy: () int32, the number of lists that all heads process before any head continues with its others.

    Tensors alone: Triton compiles a kernel anew for each alignment of an integer within a tuple.
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
        tile_block, visited_block: positions per block: of those that a program's tile is part of, and of those in the lists.
        masks: 0 none · 1 interval · 2 bits.
        even: whether the sequence fills its last block.
        per_batch, per_head: whether batch entries, and heads, have lists of their own.
        negative: whether the forward's scores are those of −q, for a scale that is negative; the kernel gets −scale.
    """

    tile_block: int
    visited_block: int
    masks: int
    even: bool
    per_batch: bool
    per_head: bool
    negative: bool = False


@triton.jit
def group_start(batch, head, num_heads, num_positions, FORM: tl.constexpr):
    """Returns the index of the first list of a batch entry and head, whose lists are those of blocks of ``num_positions``."""
    group = batch * 0
    if FORM.per_batch:
        group += batch * (num_heads if FORM.per_head else 1)
    if FORM.per_head:
        group += head
    return group * tl.cdiv(num_positions, FORM.tile_block)


@triton.jit
def read_list(lists, pid, num_batches, num_heads, num_positions, PARTS: tl.constexpr, FORM: tl.constexpr):
    """Returns (batch, head, block, tile) of a program, where a block of ``num_positions`` has PARTS tiles.

    The longest lists of all heads come first, then one head after the other, since the programs of a head share keys in the cache.
    """
    item = pid // PARTS
    heavy = tl.load(lists.heavy)
    pairs = num_batches * num_heads
    late = item - heavy * pairs
    light = tl.maximum(tl.cdiv(num_positions, FORM.tile_block) - heavy, 1)
    pair = tl.where(late < 0, item % pairs, late // light)
    place = tl.where(late < 0, item // pairs, heavy + late % light)
    batch, head = (pair // num_heads).to(tl.int64), pair % num_heads
    block = tl.load(lists.order + group_start(batch, head, num_heads, num_positions, FORM) + place)
    return batch, head, block, block * PARTS + pid % PARTS


@triton.jit
def whole_sequence(pid, num_queries, num_keys):
    """Returns (branch, rate, first position, number of keys, indices [low, high) of the queries, place), which kernels need of
    ``read_segment``'s results."""
    # a tensor, as read_segment returns
    zero = pid * 0
    return zero, zero + 1, zero, num_keys, zero, num_queries, zero


@triton.jit
def list_steps(lists, batch, head, block, num_heads, num_positions, SUBS: tl.constexpr, FORM: tl.constexpr):
    """Returns (first step, end of the steps, first block) of a list; each of its blocks takes SUBS steps."""
    at = lists.starts + group_start(batch, head, num_heads, num_positions, FORM) + block
    start, end = tl.load(at), tl.load(at + 1)
    return start * SUBS, end * SUBS, tl.load(lists.others + start, mask=start < end, other=0)


@triton.jit
def next_block(lists, step, end, SUBS: tl.constexpr):
    """Loads the block of step + 1 one step ahead: loads of tiles that waited for it would cost the pipeline a stage."""
    return tl.load(lists.others + tl.minimum(step + 1, end - 1) // SUBS)


@triton.jit
def hide_pairs(
    x, fill, lists, entry, query0, key0, num_queries, num_keys,
    ROWS: tl.constexpr, KEYS: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, MASKS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Sets x of ROWS queries and KEYS keys, or transposed, to ``fill`` where the block's mask does not keep the pair."""
    masked = key0 + KEYS > num_keys
    mask_index = -1
    if MASKS > 0:
        mask_index = tl.load(lists.masks + entry)
        masked = masked | (mask_index >= 0)
    if masked:
        # along the tile's two dimensions
        row = tl.arange(0, ROWS)[None, :] if TRANSPOSED else tl.arange(0, ROWS)[:, None]
        key = tl.arange(0, KEYS)[:, None] if TRANSPOSED else tl.arange(0, KEYS)[None, :]
        good = key0 + key < num_keys
        if MASKS == 1:
            inside = query0 + row < num_queries
            low = tl.load(lists.low + query0 + row, mask=inside, other=0)
            high = tl.load(lists.high + query0 + row, mask=inside, other=0)
            good = good & ((mask_index < 0) | ((key0 + key >= low) & (key0 + key < high)))
        if MASKS == 2:
            WORDS: tl.constexpr = K_BLOCK // 32
            word = tl.arange(0, KEYS // 32)[:, None] if TRANSPOSED else tl.arange(0, KEYS // 32)[None, :]
            at = lists.bits + tl.maximum(mask_index, 0).to(tl.int64) * (Q_BLOCK * WORDS)
            at += (query0 % Q_BLOCK + row) * WORDS + key0 % K_BLOCK // 32 + word
            # rows and words are never negative; they give the condition its shape
            words = tl.load(at, mask=(row >= 0) & (word >= 0) & (mask_index >= 0), other=-1)
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
    """Sets x (ROWS queries, KEYS keys) to ``fill`` where the pair is not kept or the key is padded."""
    if FORM.masks > 0 or not FORM.even:
        x = hide_pairs(
            x, fill, lists, entry, query0, key0, num_queries, num_keys, ROWS, KEYS, FORM.tile_block, FORM.visited_block, FORM.masks, False
        )
    if PADDING:
        keys = key0 + tl.arange(0, KEYS)
        padded = tl.load(padding_ptr + keys, mask=keys < num_keys, other=1)
        x = tl.where((padded == 0)[None, :], x, fill)
    return x
