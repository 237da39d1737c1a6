"""The copies of ``copies_triton.py`` by torch's operations, on a CPU and in float64."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.exchange.step import Pair, Step


def gather(to: torch.Tensor, of: Pair, came: torch.Tensor | None, lines: torch.Tensor, step: Step, *, are_own: bool = True) -> None:
    """See ``copies_triton.gather``."""
    every = _lines(of, step.width, to.dtype)
    if are_own and step.own_lines is not None:
        every = every[step.own_lines]
    if came is not None:
        every = torch.cat([every, came, came.new_zeros((1, came.shape[1]))])
    torch.index_select(every, 0, lines, out=to.view(-1, every.shape[1]))


def add(to: Pair, grads: Pair, came: torch.Tensor, step: Step) -> None:
    """See ``copies_triton.add``."""
    dtype = accumulation_dtype(came.dtype)
    sums = _lines(grads, step.width, dtype)[step.own_places]
    peers = [count for count in step.send.counts if count]
    # each names a line once, so peer by peer the order of the sums is always the same
    for numbers, share in zip(step.send.numbers.split(peers), came.split(peers), strict=True):
        sums.index_add_(0, numbers, share.to(dtype))
    if step.own_lines is not None:
        sums = _lines(to, step.width, dtype).index_add_(0, step.own_lines, sums)
    B, n, heads, D = to[0].shape
    for x, some in zip(to, sums.view(n, heads, B, 2 * D).permute(2, 0, 1, 3).chunk(2, -1), strict=True):
        x.copy_(some)


def _lines(of: Pair, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of K and V, or their gradients, (B, rows, heads, D), as lines (…, width · B · 2·D)."""
    B, _, _, D = of[0].shape
    return torch.cat([x.permute(1, 2, 0, 3).to(dtype) for x in of], -1).view(-1, width * B * 2 * D)
