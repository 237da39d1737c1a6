"""Cuts a call into chunks, so that results waiting for their merge take bounded memory, however long the sequence is.

Heads are independent of each other, and so are ranges of positions that begin and end at a segment boundary of every branch. So a
call is cut into chunks of heads × positions, each of which is a separate call on views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from dilated_attention.engine.branches.launches import PART_BYTES
from dilated_attention.engine.branches.places import layout_of
from dilated_attention.engine.branches.problems import whole_shape
from dilated_attention.pattern import DilatedPattern

# a call limits its transient memory to this many bytes, or to this share of the bytes of q, k and v if that is more
TRANSIENT_BYTES = 512 * 2**20
# a backward makes three launches where a forward makes one, so its chunks must be larger to keep the GPU from waiting for the CPU
BACKWARD_TRANSIENT_BYTES = 2 * TRANSIENT_BYTES
TRANSIENT_SHARE = 0.05
# number of chunks that are computed concurrently
CONCURRENT_CHUNKS = 2


class Chunk(NamedTuple):
    """Heads [first, last) and positions [first, last)."""

    heads: tuple[int, int]
    positions: tuple[int, int]


class ChunkSizes(NamedTuple):
    """Heads and positions of each chunk, and how many chunks are alive at once."""

    heads: int
    positions: int
    concurrent: int = 1

    def chunks(self, num_heads: int, num_positions: int) -> Iterator[Chunk]:
        for start in range(0, num_positions, self.positions):
            for head in range(0, num_heads, self.heads):
                yield Chunk((head, min(head + self.heads, num_heads)), (start, min(start + self.positions, num_positions)))


class CallSizes(NamedTuple):
    """The sizes of self-attention over one sequence."""

    batch: int
    num_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def input_bytes(self) -> int:
        return self.batch * self.num_positions * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.itemsize


def transient_budget(input_bytes: int, *, is_backward: bool = False) -> int:
    return max(BACKWARD_TRANSIENT_BYTES if is_backward else TRANSIENT_BYTES, int(TRANSIENT_SHARE * input_bytes))


def chunk_sizes(pattern: DilatedPattern, sizes: CallSizes, is_backward: bool, at_places: bool = True) -> ChunkSizes:
    """Returns the chunks of a pass.

    A forward keeps out in the inputs' dtype and a lse; a backward dq, dk and dv, and the launch on each stream accumulates dq in float32.

    Args:
        at_places: of a backward; otherwise it runs problem by problem.
    """
    width, budget = sizes.head_dim * sizes.itemsize, transient_budget(sizes.input_bytes, is_backward=is_backward)
    if not is_backward:
        return make_chunk_sizes(pattern, sizes, width + 4, budget)
    budget -= CONCURRENT_CHUNKS * PART_BYTES["cuda"]
    if at_places:
        return make_chunk_sizes(pattern, sizes, 3 * width, budget)
    # problem by problem, dq, dk and dv of the chunk are summed in float32, which takes as much as a branch that covers every row
    everything = DilatedPattern((sizes.num_positions,) * 2, (1, 1), "zero")
    return make_chunk_sizes(everything, sizes, 3 * sizes.head_dim * 4, budget)


def make_chunk_sizes(pattern: DilatedPattern, sizes: CallSizes, row_bytes: int, budget: int) -> ChunkSizes:
    """Returns the largest chunks whose parts together fit ``budget`` bytes, or the smallest possible chunks if none fit.

    Args:
        row_bytes: bytes that a part keeps for one position of one head.
    """
    batch, num_positions, num_heads, num_kv_heads, *_ = sizes
    group = num_heads // num_kv_heads

    def part_bytes(heads: int, positions: int) -> int:
        shape = whole_shape(num_heads, num_heads, positions, False)
        return batch * heads * layout_of(pattern, shape, False, (0, heads)).num_places * row_bytes

    if part_bytes(num_heads, num_positions) <= budget:
        return ChunkSizes(num_heads, num_positions)
    budget //= CONCURRENT_CHUNKS
    period = _period(pattern, num_positions)
    per_period = part_bytes(num_heads, period)
    if period < num_positions and per_period <= budget:
        return ChunkSizes(num_heads, period * (budget // per_period), CONCURRENT_CHUNKS)
    kv_heads = max(1, budget // max(1, per_period // num_kv_heads))
    # the same number of chunks, but of equal size
    kv_heads = -(-num_kv_heads // -(-num_kv_heads // kv_heads))
    # one at a time where two of the smallest chunks are too many
    fits = part_bytes(kv_heads * group, period) <= budget
    return ChunkSizes(kv_heads * group, period, CONCURRENT_CHUNKS if fits else 1)


def _period(pattern: DilatedPattern, num_positions: int) -> int:
    """Returns the number of positions after which all branches begin a segment; N if that exceeds N or if padding depends on N."""
    if max(pattern.segment_lengths) >= num_positions or pattern.tail == "zero_keys":
        return num_positions
    return min(num_positions, math.lcm(*pattern.segment_lengths))
