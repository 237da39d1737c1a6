"""One Triton kernel that writes the random words of ``dropout`` for consecutive positions; attention kernels read them to drop pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dilated_attention.backends.dropout import Words
from dilated_attention.backends.hardware import on_device

# words per program: four per thread
_BLOCK = 512
_WARPS = 4
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
    """Each program writes BLOCK positions of one head: query blocks first, then key blocks. Integers arrive as signed 32-bit words."""
    query_blocks = tl.cdiv(num_queries, BLOCK)
    blocks = query_blocks + tl.cdiv(num_keys, BLOCK)
    block = tl.program_id(0) % blocks
    row = tl.program_id(0) // blocks
    is_key = block >= query_blocks
    places = tl.where(is_key, block - query_blocks, block) * BLOCK + tl.arange(0, BLOCK)
    # sums wrap, as positions do (mod 2³²)
    positions = places.to(tl.uint32) + tl.where(is_key, key_position_offset, query_position_offset).to(tl.uint32)
    zeros = tl.zeros((BLOCK,), tl.uint32)
    head = zeros + (first_head + row % heads).to(tl.uint32)
    batch = zeros + (first_batch + row // heads).to(tl.uint32)
    seed = (seed_high.to(tl.uint32).to(tl.uint64) << 32) | seed_low.to(tl.uint32).to(tl.uint64)
    first, second, _third, _fourth = tl.philox(seed, positions, head, batch, zeros + is_key.to(tl.uint32))
    # 64 bits: all heads of a long sequence can have more than 2^31 words
    if is_key:
        tl.store(b_ptr + row.to(tl.int64) * num_keys + places, first.to(tl.int32, bitcast=True), mask=places < num_keys)
    else:
        target = row.to(tl.int64) * num_queries + places
        tl.store(a_ptr + target, first.to(tl.int32, bitcast=True), mask=places < num_queries)
        tl.store(c_ptr + target, (second | 1).to(tl.int32, bitcast=True), mask=places < num_queries)


def dropout_words(
    seed: int, batch: int, heads: int, num_positions: int, device: torch.device | str, *, position_offset: int = 0,
    num_keys: int | None = None, key_position_offset: int | None = None, first_head: int = 0, first_batch: int = 0,
) -> Words:  # fmt: skip
    """Returns contiguous (a (B, H, N), c (B, H, N), b (B, H, M)) of consecutive batch entries, heads and positions, in one launch.

    Args:
        num_positions, position_offset: the queries are at ``position_offset`` … ``position_offset + num_positions − 1``; 0 positions leave
            a and c empty.
        num_keys, key_position_offset: the same for the keys, where they differ; 0 keys leave b empty.
        first_head, first_batch: the index in the whole model of the first head, and in the whole batch of the first entry.

    Shapes: B = ``batch``, H = ``heads``, N = ``num_positions``, M = ``num_keys``.
    """
    keys = num_positions if num_keys is None else num_keys
    if max(num_positions, keys) > 2**31 - _BLOCK:
        raise ValueError(f"words of {max(num_positions, keys)} positions are requested; a launch writes up to 2**31 − {_BLOCK}: split them")
    a, c = (torch.empty((batch, heads, num_positions), dtype=torch.int32, device=device) for _ in range(2))
    b = torch.empty((batch, heads, keys), dtype=torch.int32, device=device)
    programs = batch * heads * (triton.cdiv(num_positions, _BLOCK) + triton.cdiv(keys, _BLOCK))
    if programs:
        origins = position_offset, position_offset if key_position_offset is None else key_position_offset
        varying = (seed, seed >> 32, num_positions, keys, *origins, heads, first_head, first_batch)
        with on_device(a.device):
            _words_kernel[(programs,)](a, c, b, *map(_signed, varying), _BLOCK, num_warps=_WARPS)
    return Words(a, c, b)


def _signed(number: int) -> int:
    """Returns ``number`` mod 2³² as a signed word, so that all values have one argument type."""
    return (number + 2**31) % 2**32 - 2**31
