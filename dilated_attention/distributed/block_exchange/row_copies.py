"""Gathers rows of keys into the buffers that are sent and read, and sums gradients of rows: one kernel each on a GPU, else plain torch."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches.merge import has_kernels


def gather_rows(memory: torch.Tensor, to: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes ``rows`` of k and v (B, n, G, D) to rows ``to`` of memory (R, 2, B, G, D). Only the last stride of k and v must be 1."""
    if not len(to):
        return
    if has_kernels(memory):
        from dilated_attention.distributed.block_exchange.row_copies_triton import gather_rows as fused

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
    """Sets each row i of dk and dv (B, n, G, D) to own[own_at[i]] plus the sum of came[came_at[p, i]] over p, in the accumulation dtype.

    Args:
        own: this rank's own contributions (B, rows, G, D) to dk and dv.
        own_at, came_at: (n,) and (P, n) int32 row numbers; −1 for none.
        came: (2, rows, B, G, D), the received contributions to dk and dv.
    """
    if not grads[0].numel():
        return
    if has_kernels(grads[0]):
        from dilated_attention.distributed.block_exchange.row_copies_triton import add_rows as fused

        fused(grads, own, own_at, came, came_at)
        return
    for which, grad in enumerate(grads):
        total = torch.zeros(grad.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device)
        for at, share in ((own_at, own[which]), *((at, came[which].transpose(0, 1)) for at in came_at)):
            rows = (at >= 0).nonzero()[:, 0]
            total[:, rows] += share[:, at[rows].long()]
        grad.copy_(total)
