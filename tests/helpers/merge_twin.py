"""``engine/branches/merge_triton.py`` in plain torch: its definition, for any device and dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.merge import merge_
from dilated_attention.engine.branches.branch_buffers import BranchBuffers


def split(buffers: BranchBuffers, flat: Tensor, batch: int, *, head_dim: int, with_direct: bool) -> list[Tensor | None]:
    """Returns views (B, S, L, H, D) of one flat buffer, one per branch; for lse, with ``head_dim`` 0, they are (B, S, H, L)."""
    views: list[Tensor | None] = []
    start = 0
    for branch in range(len(buffers.branches)):
        if branch == buffers.direct and not with_direct:
            views.append(None)
            continue
        S, L = buffers.size(branch)
        shape = (batch, S, L, buffers.heads, head_dim) if head_dim else (batch, S, buffers.heads, L)
        count = functools.reduce(int.__mul__, shape)
        views.append(flat[start : start + count].view(shape))
        start += count
    assert start == flat.numel()
    return views


def merge_buffers(
    buffers: BranchBuffers, out: Tensor, lse: Tensor, flat: Tensor, flat_lse: Tensor, *, is_concurrent: bool = False, own: bool = False
) -> None:
    B, _, _, D = out.shape
    parts = split(buffers, flat, B, head_dim=D, with_direct=False)
    part_lses = [x for x in split(buffers, flat_lse, B, head_dim=0, with_direct=True) if x is not None]
    acc_dtype = part_lses[0].dtype
    high = torch.full(lse.shape, -torch.inf, dtype=acc_dtype, device=lse.device)
    spread = [at_positions(buffers, b, part_lse, -torch.inf) for b, part_lse in enumerate(part_lses)]
    for part_lse in spread:
        high = torch.maximum(high, part_lse)
    zeros = _zero_key_counts(buffers, lse.device).to(acc_dtype) if buffers.zero_keys else None
    if zeros is not None:
        high = torch.where(zeros > 0, high.clamp(min=0), high)
    high = high.masked_fill(high == -torch.inf, 0.0)
    total = torch.zeros_like(high)
    acc = torch.zeros(out.shape, dtype=acc_dtype, device=out.device)
    for b, (part, part_lse) in enumerate(zip(parts, spread, strict=True)):
        weight = (part_lse - high).exp()
        rows = out if part is None else at_positions(buffers, b, part, 0.0)
        acc += torch.where(weight[..., None] > 0, rows.to(acc_dtype), 0.0) * weight[..., None]
        total += weight
    if zeros is not None:
        total += zeros * (-high).exp()
    lse.copy_(high + total.log())
    out.copy_(acc / total.masked_fill(total == 0, 1.0)[..., None])
    if own and buffers.zero_keys:
        count_zero_keys(buffers, [x for x in parts if x is not None], part_lses)


def count_zero_keys(buffers: BranchBuffers, parts: Sequence[Tensor], part_lses: Sequence[Tensor]) -> None:
    """Adds the zero keys of its own branch to each part, in place: out_b ← out_b · e^(lse_b) / (e^(lse_b) + z_b)."""
    for (length, rate), offsets, part, part_lse in zip(buffers.branches, buffers.offsets, parts, part_lses, strict=True):
        offset = torch.tensor(offsets, device=part.device)
        size = torch.clamp(buffers.positions - torch.arange(part.shape[1], device=part.device)[:, None] * length, max=length)
        # number of zero keys of each segment and head
        zeros = (-(-length // rate) - (size - offset + rate - 1) // rate)[None, :, :, None]
        share = torch.where(zeros > 0, (part_lse - zeros.to(part_lse.dtype).log()).sigmoid(), 1.0)
        part.mul_(share.transpose(2, 3)[..., None])


def sum_buffers(buffers: BranchBuffers, grads: Sequence[Tensor], parts: Sequence[Tensor], *, is_concurrent: bool = False) -> None:
    for grad, flat in zip(grads, parts, strict=True):
        acc = torch.zeros(grad.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device)
        for b, part in enumerate(split(buffers, flat, grad.shape[0], head_dim=grad.shape[3], with_direct=False)):
            acc += grad if part is None else at_positions(buffers, b, part, 0.0)
        grad.copy_(acc)


def _zero_key_counts(buffers: BranchBuffers, device: torch.device) -> Tensor:
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


def at_positions(buffers: BranchBuffers, branch: int, buffer: Tensor, empty: float) -> Tensor:
    """Spreads a buffer (B, S, L, H, D), or (B, S, H, L) of lse, over positions: (B, N, H, …), ``empty`` where the branch takes no row."""
    _, taken, segment, place, _ = _places(buffers, branch, buffer.device)
    heads = torch.arange(buffers.heads, device=buffer.device)[None, :].expand_as(taken)
    if buffer.dim() == 5:
        return torch.where(taken[None, ..., None], buffer[:, segment, place, heads], empty)
    return torch.where(taken[None], buffer[:, segment, heads, place], empty)


def merge(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge_`` into new tensors, in lse's dtype."""
    out, lse = out_1.to(lse_1.dtype, copy=True), lse_1.clone()
    merge_(out, lse, out_2, lse_2)
    return out, lse
