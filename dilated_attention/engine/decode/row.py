"""One row of attention per request over cached keys and values: the layout of the cache, and the row in plain torch.

Position p of request b is stored at slot p mod capacity of the request's stretch of the cache. In a paged cache, it is at slot
p mod page_size of page ``table[b, p // page_size]``. A stretch may keep its first slots permanently, as global tokens need, and use
the rest as a ring buffer.

Shape letters as in ``keys.py``; in addition, C slots of a stretch or a page, and L keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.decode.keys import Runs


@dataclass(frozen=True, eq=False)
class Cached:
    """The cached keys and values of one layer.

    Args:
        k, v: (B, C, K, D), or with a table (pages, C, K, D); any strides, the last one 1.
        table: (B, pages of a request) int32; None if each request has one stretch, in which positions wrap around.
        wraps: whether positions reach C, so that slots are reused. Only without a table.
        fixed: number of first positions whose slots are never reused.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    wraps: bool = False
    fixed: int = 0

    @property
    def slots(self) -> int:
        return self.k.shape[1]

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (first index, second index) into k and v for positions (B, …) int64."""
        batch = torch.arange(positions.shape[0], device=positions.device).view(-1, *(1,) * (positions.ndim - 1))
        if self.table is not None:
            return self.table[batch, positions // self.slots].long(), positions % self.slots
        slot = positions
        if self.wraps:
            slot = torch.where(positions < self.fixed, positions, self.fixed + (positions - self.fixed) % (self.slots - self.fixed))
        return batch.expand_as(slot), slot

    def write(self, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v (B, n, K, D) at positions (B, n)."""
        at = self.places(positions)
        self.k[at], self.v[at] = k, v

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies (B, n, K, D) of the keys and values at positions (B, n)."""
        at = self.places(positions)
        return self.k[at], self.v[at]


def decode(q: Tensor, cached: Cached, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
    """Returns (out (B, H, D) in q's dtype, lse (B, H)) for q (B, H, D).

    It gathers each row's keys and computes one softmax, in plain torch on any device and in any dtype. A row without keys has out 0 and
    lse −inf.
    """
    B, H, D = q.shape
    K = cached.k.shape[2]
    positions, inside = runs.keys(q.is_cuda and torch.cuda.is_current_stream_capturing())
    wide = accumulation_dtype(q.dtype)
    first, slot = cached.places(positions)
    G = runs.num_groups
    if G == 1:
        # gathered as (B, L, K, D), shared by all heads
        k, v = (x[first[:, 0], slot[:, 0]].to(wide).transpose(1, 2) for x in (cached.k, cached.v))
    else:
        of_group = torch.arange(G, device=q.device) // (G // K)
        k, v = (x[first, slot, of_group[None, :, None]].to(wide) for x in (cached.k, cached.v))
    # (B, K or H, heads that read these keys, D)
    heads = q.to(wide).view(B, k.shape[1], -1, D)
    scores = (heads @ k.transpose(-1, -2) * scale).masked_fill(~inside[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    # slots that no row reads may hold arbitrary values
    out = weights @ v.masked_fill(~inside[..., None], 0.0)
    return out.view(B, H, D).to(q.dtype), lse.view(B, H)
