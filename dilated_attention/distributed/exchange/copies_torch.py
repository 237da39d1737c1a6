"""The copies of ``rows_triton.py`` by torch's operations, from the same tables, which live as long as the step: their ids name them."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.exchange.messages import StepPlan, offsets, once


def sparse_index(step: StepPlan, x: torch.Tensor) -> tuple[Any, ...]:
    """Returns the index of the step's own rows (B, n/g, heads, D) in x (B, n, heads, D)."""
    assert step.sparse is not None
    rows = torch.arange(0, x.shape[1], step.sparse[0], device=x.device)[:, None] + offsets(step, x.device)
    return slice(None), rows, torch.arange(x.shape[2], device=x.device)


def gather(step: StepPlan, to: torch.Tensor, k: torch.Tensor, v: torch.Tensor, units: torch.Tensor) -> None:
    """Writes units of k and v (B, rows, heads, D) to ``to`` (units, B, 2·D). ``units``: int32, row · heads + head."""
    row, head = once(step, ("rows and heads", id(units)), lambda: (units.long() // k.shape[2], units.long() % k.shape[2]))
    for part, x in zip(to.chunk(2, -1), (k, v), strict=True):
        part.copy_(x[:, row, head].transpose(0, 1))


def assemble(step: StepPlan, memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, came: torch.Tensor, sources: torch.Tensor) -> None:
    """Fills a memory (rows, heads, B, 2·D) from own k and v, and units that came (units, B, 2·D), as ``sources`` says."""

    def places() -> tuple[torch.Tensor, ...]:
        own, (arrived,) = k.shape[1] * k.shape[2], (sources >= k.shape[1] * k.shape[2]).nonzero(as_tuple=True)
        return (sources == -1).nonzero()[:, 0], arrived, sources[arrived].long() - own

    nothing, arrived, units = once(step, ("places", id(sources)), places)
    flat = memory.view(-1, *memory.shape[2:])
    if len(nothing):
        flat[nothing] = 0
    if step.sparse is not None:
        index = sparse_index(step, k)
        k, v = k[index], v[index]
    for row, place, count in step.fills:
        for part, x in zip(memory[place : place + count].chunk(2, -1), (k, v), strict=True):
            part.copy_(x[:, row : row + count].permute(1, 2, 0, 3))
    if len(arrived):
        flat[arrived] = came[units]


def add(
    step: StepPlan,
    grads: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor] | None,
    came: torch.Tensor,
    places: torch.Tensor,
    returned: torch.Tensor,
) -> None:
    """See ``rows_triton.add``; ``own`` is None for zeros."""

    def contributions() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [((units >= 0).nonzero()[:, 0], units[units >= 0].long()) for units in returned]

    for grad, share, others in zip(grads, own or (None, None), came.chunk(2, -1), strict=True):
        index = ... if step.sparse is None else sparse_index(step, grad)
        before = grad[index]
        B, n, heads, D = before.shape
        total = torch.zeros(n * heads, B, D, dtype=accumulation_dtype(grad.dtype), device=grad.device)
        if share is not None:
            total.view(n, heads, B, D).copy_(share[:, places.long()].permute(1, 2, 0, 3))
        for to, units in once(step, "contributions", contributions):
            total.index_add_(0, to, others[units].to(total.dtype))
        sums = total.view(n, heads, B, D).permute(2, 0, 1, 3)
        grad[index] = (sums if step.sparse is None else before.to(sums.dtype) + sums).to(grad.dtype)
