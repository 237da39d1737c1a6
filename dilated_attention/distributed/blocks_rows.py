"""Rows of keys gathered into what is sent and read, and gradients of rows added up: each one kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.merge import has_kernels


def gather_rows(memory: torch.Tensor, to: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """memory (R, 2, B, G, D) gets at rows ``to`` the ``rows`` of k and v (B, n, G, D), any strides but the last."""
    if not len(to):
        return
    if has_kernels(memory):
        from dilated_attention.distributed.blocks_triton import gather_rows as fused

        fused(memory, to, k, v, rows)
        return
    for which, x in enumerate((k, v)):
        memory[to, which] = x[:, rows].transpose(0, 1)


def add_rows(
    grads: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    own_at: torch.Tensor,
    came: torch.Tensor,
    came_at: torch.Tensor,
) -> None:
    """Each row i of dk and dv (B, n, G, D) becomes the sum of own[own_at[i]] and of came[came_at[p, i]] over p, in the dtype of sums.

    Args:
        own: shares (B, rows, G, D) of dk and dv.
        own_at, came_at: (n,) and (P, n) int32; −1 for nothing.
        came: (2, rows, B, G, D) of dk and dv.
    """
    if not grads[0].numel():
        return
    if has_kernels(grads[0]):
        from dilated_attention.distributed.blocks_triton import add_rows as fused

        fused(grads, own, own_at, came, came_at)
        return
    for which, grad in enumerate(grads):
        total = torch.zeros(grad.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device)
        for at, share in ((own_at, own[which]), *((at, came[which].transpose(0, 1)) for at in came_at)):
            rows = (at >= 0).nonzero()[:, 0]
            total[:, rows] += share[:, at[rows].long()]
        grad.copy_(total)
