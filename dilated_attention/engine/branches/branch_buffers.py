"""The buffers that hold the branches' results before they are merged, and the merge in plain torch.

Every branch of a self-attention over N positions has one *buffer*: (B, S, L, H, D) with S = ceil(N/w) segments and L = ceil(w/r)
places. Branch (w, r) takes position n of a head with offset o if r divides n mod w − o, and stores it at place (n mod w − o) / r of
segment n div w.
A branch that takes every position of every head needs no buffer: its kernel writes directly into the result (the "direct" branch).

The merge reads each part once and writes each row once, in float32:

    out = Σ_b e^(lse_b − lse) out_b,   lse = log(Σ_b e^(lse_b) + z)        (z zero keys of tail="zero_keys", score and value 0)

Weights are computed relative to the largest lse and divided by their sum, so empty parts (−inf) change nothing and give no NaN.
``merge_triton.py`` does the same in one kernel; the functions here are its equivalent on any device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches.plan import Problem
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

    def split(self, flat: Tensor, batch: int, *, head_dim: int, with_direct: bool) -> list[Tensor | None]:
        """Returns views (B, S, L, H, D) of one flat buffer, one per branch; for lse, with ``head_dim`` 0, they are (B, S, H, L)."""
        views: list[Tensor | None] = []
        start = 0
        for branch in range(len(self.branches)):
            if branch == self.direct and not with_direct:
                views.append(None)
                continue
            S, L = self.size(branch)
            shape = (batch, S, L, self.heads, head_dim) if head_dim else (batch, S, self.heads, L)
            count = functools.reduce(int.__mul__, shape)
            views.append(flat[start : start + count].view(shape))
            start += count
        assert start == flat.numel()
        return views


@functools.lru_cache(maxsize=256)
def make_branch_buffers(pattern: DilatedPattern, num_heads: int, heads: tuple[int, int], positions: int, is_causal: bool) -> BranchBuffers:
    """Returns the buffers of heads [first, last) of ``num_heads``. The first branch that takes every position is the direct one."""
    branches = tuple((min(length, positions), rate) for length, rate in pattern.branches)
    offsets = tuple(row[slice(*heads)] for row in pattern.offsets(num_heads))
    direct = next((b for b, (_, rate) in enumerate(branches) if rate == 1 and NOT_IN_BRANCH not in offsets[b]), None)
    return BranchBuffers(branches, offsets, positions, direct, pattern.tail == "zero_keys" and not is_causal)


def of_problem(problem: Problem, buffer: Tensor) -> Tensor:
    """Returns the problem's rows of its branch's buffer: (B, S, L, G, D) for out or a gradient, (B, S, G, L) for lse."""
    heads = problem.heads
    first = problem.q_start // problem.stride
    segments = slice(first, first + problem.segments)
    which = slice(heads.start, heads.start + (heads.count - 1) * heads.step + 1, heads.step)
    if buffer.dim() == 5:
        return buffer[:, segments, : problem.q_len, which]
    return buffer[:, segments, which, : problem.q_len]


@functools.lru_cache(maxsize=256)
def table(buffers: BranchBuffers, device: torch.device) -> Tensor:
    """Returns the heads' offsets (branches, H), int32, on ``device``. It is cached, so that a captured CUDA graph copies nothing."""
    return torch.tensor(buffers.offsets, dtype=torch.int32, device=device)


def merge_buffers(buffers: BranchBuffers, out: Tensor, lse: Tensor, parts: Sequence[Tensor | None], part_lses: Sequence[Tensor]) -> None:
    """Computes out (B, N, H, D) and lse (B, N, H) from the buffers, in place; ``out`` already holds the direct branch's result."""
    acc_dtype = part_lses[0].dtype
    high = torch.full(lse.shape, -torch.inf, dtype=acc_dtype, device=lse.device)
    spread = [_at_positions(buffers, b, part_lse, -torch.inf) for b, part_lse in enumerate(part_lses)]
    for part_lse in spread:
        high = torch.maximum(high, part_lse)
    zeros = zero_key_counts(buffers, lse.device).to(acc_dtype) if buffers.zero_keys else None
    if zeros is not None:
        high = torch.where(zeros > 0, high.clamp(min=0), high)
    high = high.masked_fill(high == -torch.inf, 0.0)
    total = torch.zeros_like(high)
    acc = torch.zeros(out.shape, dtype=acc_dtype, device=out.device)
    for b, (part, part_lse) in enumerate(zip(parts, spread, strict=True)):
        weight = (part_lse - high).exp()
        rows = out if part is None else _at_positions(buffers, b, part, 0.0)
        acc += torch.where(weight[..., None] > 0, rows.to(acc_dtype), 0.0) * weight[..., None]
        total += weight
    if zeros is not None:
        total += zeros * (-high).exp()
    lse.copy_(high + total.log())
    out.copy_(acc / total.masked_fill(total == 0, 1.0)[..., None])


def count_zero_keys(buffers: BranchBuffers, parts: Sequence[Tensor], part_lses: Sequence[Tensor]) -> None:
    """Adds the zero keys of its own branch to each part, in place: out_b ← out_b · e^(lse_b) / (e^(lse_b) + z_b)."""
    for (length, rate), offsets, part, part_lse in zip(buffers.branches, buffers.offsets, parts, part_lses, strict=True):
        offset = torch.tensor(offsets, device=part.device)
        size = torch.clamp(buffers.positions - torch.arange(part.shape[1], device=part.device)[:, None] * length, max=length)
        # number of zero keys of each segment and head
        zeros = (-(-length // rate) - (size - offset + rate - 1) // rate)[None, :, :, None]
        share = torch.where(zeros > 0, (part_lse - zeros.to(part_lse.dtype).log()).sigmoid(), 1.0)
        part.mul_(share.transpose(2, 3)[..., None])


def sum_buffers(buffers: BranchBuffers, grad: Tensor, parts: Sequence[Tensor | None]) -> None:
    """Sums the buffers into grad (B, N, H, D) in place, in float32; ``grad`` already holds the direct branch's share."""
    acc = torch.zeros(grad.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device)
    for b, part in enumerate(parts):
        acc += grad if part is None else _at_positions(buffers, b, part, 0.0)
    grad.copy_(acc)


def zero_key_counts(buffers: BranchBuffers, device: torch.device) -> Tensor:
    """Returns z of each row, (1, N, H): places of its padded segments that hold no real position, over the branches that take it."""
    counts = torch.zeros(1, buffers.positions, buffers.heads, dtype=torch.int64, device=device)
    for b, (length, rate) in enumerate(buffers.branches):
        _, taken, segment, _, offset = _places(buffers, b, device)
        size = torch.clamp(buffers.positions - segment * length, max=length)
        z = -(-length // rate) - (size - offset + rate - 1) // rate
        counts[0] += torch.where(taken, z, 0)
    return counts


def _places(buffers: BranchBuffers, branch: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns (n, taken, segment, place, offset) of each position and head, (N, H)."""
    length, rate = buffers.branches[branch]
    offset = torch.tensor(buffers.offsets[branch], device=device)[None, :]
    n = torch.arange(buffers.positions, device=device)[:, None]
    segment = n // length
    t = n - segment * length - offset
    taken = (offset >= 0) & (t >= 0) & (t % rate == 0)
    return n, taken, segment.expand_as(taken), torch.where(taken, t // rate, 0), offset


def _at_positions(buffers: BranchBuffers, branch: int, buffer: Tensor, empty: float) -> Tensor:
    """Spreads a buffer (B, S, L, H, D), or (B, S, H, L) of lse, over positions: (B, N, H, …), ``empty`` where the branch takes no row."""
    _, taken, segment, place, _ = _places(buffers, branch, buffer.device)
    heads = torch.arange(buffers.heads, device=buffer.device)[None, :].expand_as(taken)
    if buffer.dim() == 5:
        return torch.where(taken[None, ..., None], buffer[:, segment, place, heads], empty)
    return torch.where(taken[None], buffer[:, segment, heads, place], empty)
