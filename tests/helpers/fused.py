"""Runs public functions on a CPU as a GPU runs them: branches in chunks with one merge each, in plain torch and any dtype.

``merge_buffers`` and ``sum_buffers`` are those of ``engine/branches/merge_triton.py`` by their definition: part after part.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dilated_attention.backends import registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.merge import merge_
from dilated_attention.engine.branches import merge_triton
from dilated_attention.engine.branches.branch_buffers import BranchBuffers
from dilated_attention.engine.ops import definition, prepare


def run_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on calls with branches run with one merge, and what was decided before is not looked up."""
    monkeypatch.setattr(registry, "cached", {})
    for module in (prepare, definition):
        monkeypatch.setattr(module, "fuses", lambda hardware, dtype: True)
    for function in (merge_buffers, sum_buffers):
        monkeypatch.setattr(merge_triton, function.__name__, function)


def split(buffers: BranchBuffers, flat: Tensor, batch: int, head_dim: int, *, with_direct: bool) -> list[Tensor | None]:
    """Returns views (B, S, L, H, D) of one flat buffer, one per branch; for lse, with ``head_dim`` 0, they are (B, S, H, L)."""
    branches = [b for b in range(len(buffers.branches)) if with_direct or b != buffers.direct]
    shapes = [(batch, S, L, buffers.heads, head_dim) if head_dim else (batch, S, buffers.heads, L) for S, L in map(buffers.size, branches)]
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    views = {b: part.view(shape) for b, part, shape in zip(branches, parts, shapes, strict=True)}
    return [views.get(b) for b in range(len(buffers.branches))]


def at_positions(buffers: BranchBuffers, branch: int, buffer: Tensor, empty: float) -> Tensor:
    """Spreads a buffer (B, S, L, H, D), or (B, S, H, L) of lse, over positions: (B, N, H, …), ``empty`` where the branch takes no row."""
    (length, rate), n = buffers.branches[branch], torch.arange(buffers.positions, device=buffer.device)[:, None]
    offset = torch.tensor(buffers.offsets[branch], device=buffer.device)
    t, heads = n % length - offset, torch.arange(buffers.heads, device=buffer.device)
    taken = (offset >= 0) & (t >= 0) & (t % rate == 0)
    segment, place = (n // length).expand_as(taken), torch.where(taken, t // rate, 0)
    if buffer.dim() == 5:
        return torch.where(taken[..., None], buffer[:, segment, place, heads], empty)
    return torch.where(taken, buffer[:, segment, heads, place], empty)


def zero_keys(buffers: BranchBuffers, branch: int, like: Tensor) -> Tensor:
    """Returns z of each row in one branch, (1, S, H, L) as its lse: places of a padded segment that hold no position."""
    (length, rate), offset = buffers.branches[branch], torch.tensor(buffers.offsets[branch], device=like.device)
    first = torch.arange(like.shape[1], device=like.device)[:, None] * length
    z = -(-length // rate) - ((buffers.positions - first).clamp(max=length) - offset + rate - 1) // rate
    return z.to(like.dtype)[None, :, :, None].expand(1, *like.shape[1:])


def merge_buffers(
    buffers: BranchBuffers, out: Tensor, lse: Tensor, flat: Tensor, flat_lse: Tensor, *, is_concurrent: bool = False, own: bool = False
) -> None:
    parts = split(buffers, flat, out.shape[0], out.shape[3], with_direct=False)
    total, total_lse = torch.zeros(out.shape, dtype=lse.dtype, device=out.device), torch.full_like(lse, -torch.inf)
    for b, part_lse in enumerate(split(buffers, flat_lse, out.shape[0], 0, with_direct=True)):
        part, row_lse = parts[b], at_positions(buffers, b, part_lse, -torch.inf)
        rows = out if part is None else at_positions(buffers, b, part, 0.0)
        # whatever a part without keys holds
        merge_(total, total_lse, rows.masked_fill(row_lse[..., None] == -torch.inf, 0.0), row_lse)
        if buffers.zero_keys:
            z = zero_keys(buffers, b, part_lse)
            merge_(total, total_lse, torch.zeros_like(total), at_positions(buffers, b, z, 0.0).log().expand_as(lse))
            if own:
                part.mul_(torch.where(z > 0, (part_lse - z.log()).sigmoid(), 1.0).transpose(2, 3)[..., None])
    out.copy_(total)
    lse.copy_(total_lse)


def sum_buffers(buffers: BranchBuffers, grads: Sequence[Tensor], parts: Sequence[Tensor], *, is_concurrent: bool = False) -> None:
    for grad, flat in zip(grads, parts, strict=True):
        total = torch.zeros(grad.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device)
        for b, part in enumerate(split(buffers, flat, grad.shape[0], grad.shape[3], with_direct=False)):
            total += grad if part is None else at_positions(buffers, b, part, 0.0)
        grad.copy_(total)
