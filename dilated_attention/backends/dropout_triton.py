"""One Triton kernel that writes the random words of ``dropout`` for consecutive positions; attention kernels read them to drop pairs.

Query i has the words a and c, key j has the word b. The pair (i, j) is dropped if ((a xor b) · c) mod 2³² < threshold = ⌊p · 2³²⌋. c is
odd, so this number is as uniform as a xor b.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dilated_attention.backends.dropout import Words
from dilated_attention.backends.hardware import on_device

# positions per program: four per thread of Triton's four warps
_BLOCK = 512
# arguments that are not specialised, so that one compiled kernel serves all seeds, sizes and origins
_VARYING = [
    "seed_low", "seed_high", "num_queries", "num_keys", "query_position_offset", "key_position_offset", "heads", "first_head",
    "first_batch",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def _words_kernel(  # type: ignore[no-untyped-def]
    a_ptr, c_ptr, b_ptr, seed_low, seed_high, num_queries, num_keys, query_position_offset, key_position_offset, heads, first_head,
    first_batch,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes the words of BLOCK positions of one head: query blocks first, then key blocks. Integers arrive as signed 32-bit
    words. An index counts in a, c or b; the position is that in the sequence."""
    query_blocks = tl.cdiv(num_queries, BLOCK)
    blocks = query_blocks + tl.cdiv(num_keys, BLOCK)
    block = tl.program_id(0) % blocks
    row = tl.program_id(0) // blocks
    is_key = block >= query_blocks
    indices = tl.where(is_key, block - query_blocks, block) * BLOCK + tl.arange(0, BLOCK)
    # sums wrap, as positions do (mod 2³²)
    positions = indices.to(tl.uint32) + tl.where(is_key, key_position_offset, query_position_offset).to(tl.uint32)
    zeros = tl.zeros((BLOCK,), tl.uint32)
    head = zeros + (first_head + row % heads).to(tl.uint32)
    batch = zeros + (first_batch + row // heads).to(tl.uint32)
    seed = (seed_high.to(tl.uint32).to(tl.uint64) << 32) | seed_low.to(tl.uint32).to(tl.uint64)
    first, second, _third, _fourth = tl.philox(seed, positions, head, batch, zeros + is_key.to(tl.uint32))
    # addresses have 64 bits: all heads of a long sequence can have more than 2^31 words
    if is_key:
        tl.store(b_ptr + row.to(tl.int64) * num_keys + indices, first.to(tl.int32, bitcast=True), mask=indices < num_keys)
    else:
        target = row.to(tl.int64) * num_queries + indices
        tl.store(a_ptr + target, first.to(tl.int32, bitcast=True), mask=indices < num_queries)
        tl.store(c_ptr + target, (second | 1).to(tl.int32, bitcast=True), mask=indices < num_queries)


def dropout_words(
    seed: int, batch: int, heads: int, num_queries: int, device: torch.device | str, *, position_offset: int = 0,
    num_keys: int | None = None, key_position_offset: int | None = None, first_head: int = 0, first_batch: int = 0,
) -> Words:  # fmt: skip
    """Returns contiguous (a (B, H, N), c (B, H, N), b (B, H, M)) of consecutive batch entries, heads and positions, in one launch.

    Args:
        num_queries, position_offset: the queries are at positions ``position_offset`` … ``position_offset + num_queries − 1``; without
            queries a and c are empty.
        num_keys, key_position_offset: the same for the keys, where they differ; without keys b is empty.
        first_head, first_batch: the index in the whole model of the first head, and in the whole batch of the first entry.

    Shapes: B = ``batch``, H = ``heads``, N = ``num_queries``, M = ``num_keys``.
    """
    keys = num_queries if num_keys is None else num_keys
    if max(num_queries, keys) > 2**31 - _BLOCK:
        raise ValueError(f"words of {max(num_queries, keys)} positions are requested; a launch writes up to 2**31 − {_BLOCK}: split them")
    a, c = (torch.empty((batch, heads, num_queries), dtype=torch.int32, device=device) for _ in range(2))
    b = torch.empty((batch, heads, keys), dtype=torch.int32, device=device)
    programs = batch * heads * (triton.cdiv(num_queries, _BLOCK) + triton.cdiv(keys, _BLOCK))
    if programs:
        origins = position_offset, position_offset if key_position_offset is None else key_position_offset
        varying = (seed, seed >> 32, num_queries, keys, *origins, heads, first_head, first_batch)
        with on_device(a.device):
            _words_kernel[(programs,)](a, c, b, *map(_signed, varying), _BLOCK)
    return Words(a, c, b)


def _signed(number: int) -> int:
    """Returns ``number`` mod 2³² as a signed word, so that all values have one argument type."""
    return (number + 2**31) % 2**32 - 2**31
