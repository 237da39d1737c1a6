"""The buffers that hold the branches' results before ``merge_triton.py`` merges them.

Every branch of a self-attention over N positions has one *buffer*: (B, S, L, H, D) with S = ceil(N/w) segments and L = ceil(w/r)
places. Branch (w, r) takes position n of a head with offset o if r divides n mod w − o, and stores it at place (n mod w − o) / r of
segment n div w.
A branch that takes every position of every head needs no buffer: its kernel writes directly into the result (the "direct" branch).

The merge reads each part once and writes each row once, in float32:

    out = Σ_b e^(lse_b − lse) out_b,   lse = log(Σ_b e^(lse_b) + z)        (z zero keys of tail="zero_keys", score and value 0)

Weights are computed relative to the largest lse and divided by their sum, so empty parts (−inf) change nothing and give no NaN.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.engine.branches.launches import View
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
