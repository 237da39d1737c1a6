"""The buffers that hold the branches' results before ``merge_triton.py`` merges them.

Every branch of a self-attention over N positions has one *buffer*: (B, S, L, H, D) with S = ceil(N/w) segments and L = ceil(w/r)
places. Branch (w, r) takes position n of a head with offset o if r divides n mod w − o, and stores it at place (n mod w − o) / r of
segment n div w.
A branch that takes every position of every head needs no buffer: its kernel writes directly into the result (the "direct" branch).

The merge reads each part once and writes each row once, in float32:

    out = Σ_b e^(lse_b − lse) out_b,   lse = log(Σ_b e^(lse_b) + z)        (z zero keys of tail="zero_keys", score and value 0)

Weights are computed relative to the largest lse and divided by their sum, so empty parts (−inf) change nothing and give no NaN.

Cuts a call into chunks, so that results waiting for their merge take bounded memory, however long the sequence is.

Heads are independent of each other, and so are ranges of positions that begin and end at a segment boundary of every branch. So a
call is cut into chunks of heads × positions, each of which is a separate call on views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.engine.branches.launches import PART_BYTES, View
from dilated_attention.engine.branches.problems import Problem
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern


@dataclass(frozen=True, slots=True)
class BranchBuffers:
    """The buffers of one pattern for some heads and N positions.

    Args:
        branches: (w, r) of each branch, w at most N.
        offsets: the offset o of each branch and head; −1 where the head is not part of the branch.
        positions: N.
        direct: index of the branch whose kernel writes into the result, or None.
        zero_keys: whether rows include the zero keys of TorchScale's padding.
    """

    branches: tuple[tuple[int, int], ...]
    offsets: tuple[tuple[int, ...], ...]
    positions: int
    direct: int | None
    zero_keys: bool

    @property
    def heads(self) -> int:
        return len(self.offsets[0])

    @property
    def step(self) -> int:
        """A power of 2: branches other than the direct one take only every ``step``-th row of a head, or any row if it is 1.

        It divides the rates and segment lengths of those branches (except a segment that is the whole sequence), and a head's offsets
        agree modulo it.
        """
        others = [b for b in range(len(self.branches)) if b != self.direct]
        if self.direct is None or self.zero_keys or not others:
            return 1
        step = math.gcd(*(rate for b in others for rate in self.branches[b][1:]))
        step = math.gcd(step, *(w for w, _ in (self.branches[b] for b in others) if w < self.positions))
        step &= -step
        while any(len({self.offsets[b][head] % step for b in others}) > 1 for head in range(self.heads)):
            step //= 2
        return step if all(NOT_IN_BRANCH not in self.offsets[b] for b in others) else 1

    def size(self, branch: int) -> tuple[int, int]:
        """Returns (S, L) of a branch's buffer."""
        length, rate = self.branches[branch]
        return -(-self.positions // length), -(-length // rate)

    def rows(self, *, with_direct: bool) -> int:
        """Returns the number of places in all buffers, for one batch element and head."""
        return sum(S * L for b, (S, L) in enumerate(map(self.size, range(len(self.branches)))) if with_direct or b != self.direct)

    def view(self, problem: Problem, index: int, batch: int, head_dim: int = 0, *, with_direct: bool = False) -> View | None:
        """Returns the problem's rows in a flat buffer, the tensor ``index``; None for the direct branch, unless it is in the buffer.

        Args:
            head_dim: 0 for lse.
        """
        branch = problem.branch
        if branch == self.direct and not with_direct:
            return None
        (S, L), H, heads = self.size(branch), self.heads, problem.heads
        rows = [s * n for s, n in map(self.size, range(branch))]
        start = sum([count for b, count in enumerate(rows) if with_direct or b != self.direct])
        segment = problem.q_start // problem.stride
        if not head_dim:
            offset = (batch * start + segment * L) * H + heads.start * L
            return index, S * L * H, L * H, (problem.q_len, heads.size), (1, heads.step * L), offset
        width = H * head_dim
        offset = (batch * start + segment * L) * width + heads.start * head_dim
        return index, S * L * width, L * width, (problem.q_len, heads.size, head_dim), (width, heads.step * head_dim, 1), offset


@functools.lru_cache(maxsize=256)
def make_branch_buffers(pattern: DilatedPattern, num_heads: int, heads: tuple[int, int], positions: int, is_causal: bool) -> BranchBuffers:
    """Returns the buffers of heads [first, last) of ``num_heads``. The first branch that takes every position is the direct one."""
    branches = tuple((min(length, positions), rate) for length, rate in pattern.branches)
    offsets = tuple(row[slice(*heads)] for row in pattern.offsets(num_heads))
    direct = next((b for b, (_, rate) in enumerate(branches) if rate == 1 and NOT_IN_BRANCH not in offsets[b]), None)
    return BranchBuffers(branches, offsets, positions, direct, pattern.tail == "zero_keys" and not is_causal)


@functools.lru_cache(maxsize=256)
def table(buffers: BranchBuffers, device: torch.device) -> Tensor:
    """Returns the heads' offsets (branches, H), int32, on ``device``. It is cached, so that a captured CUDA graph copies nothing."""
    return torch.tensor(buffers.offsets, dtype=torch.int32, device=device)


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
    """Heads and positions of each chunk."""

    heads: int
    positions: int

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


def chunk_sizes(pattern: DilatedPattern, sizes: CallSizes, is_backward: bool, in_buffers: bool = True) -> ChunkSizes:
    """Returns the chunks of a pass, ``in_buffers`` or, in a backward, problem by problem.

    A part keeps out in the inputs' dtype and a lse, or dq, dk and dv. In addition, a backward's launch on each stream accumulates dq in
    float32.
    """
    if not is_backward:
        return make_chunk_sizes(pattern, sizes, sizes.head_dim * sizes.itemsize + 4, transient_budget(sizes.input_bytes))
    budget = transient_budget(sizes.input_bytes, is_backward=True) - CONCURRENT_CHUNKS * PART_BYTES["cuda"]
    if in_buffers:
        return make_chunk_sizes(pattern, sizes, 3 * sizes.head_dim * sizes.itemsize, budget)
    # problem by problem, dq, dk and dv of the chunk are summed in float32, which takes as much as one buffer that covers every row
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
        buffers = make_branch_buffers(pattern, num_heads, (0, heads), positions, False)
        return batch * heads * buffers.rows(with_direct=False) * row_bytes

    if part_bytes(num_heads, num_positions) <= budget:
        return ChunkSizes(num_heads, num_positions)
    budget //= CONCURRENT_CHUNKS
    period = _period(pattern, num_positions)
    per_period = part_bytes(num_heads, period)
    if period < num_positions and per_period <= budget:
        return ChunkSizes(num_heads, period * (budget // per_period))
    kv_heads = max(1, budget // max(1, per_period // num_kv_heads))
    # the same number of chunks, but of equal size
    kv_heads = -(-num_kv_heads // -(-num_kv_heads // kv_heads))
    return ChunkSizes(kv_heads * group, period)


def _period(pattern: DilatedPattern, num_positions: int) -> int:
    """Returns the number of positions after which all branches begin a segment; N if that exceeds N or if padding depends on N."""
    if max(pattern.segment_lengths) >= num_positions or pattern.tail == "zero_keys":
        return num_positions
    return min(num_positions, math.lcm(*pattern.segment_lengths))
