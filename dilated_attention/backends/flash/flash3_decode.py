"""FlashAttention-3's forward for one query per request, over a paged or contiguous cache; each row reads all positions up to its length."""

from __future__ import annotations

from torch import Tensor

from dilated_attention.backends.base import HALVES, Capabilities
from dilated_attention.backends.flash.flash3 import Flash3Backend, forward

FACTS = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALVES,
    package="flash-attn-3",
    install=Flash3Backend.capabilities.install,
    compute_capabilities=((9, 0), (9, 0)),
    head_dim_multiple=8,
    backward=False,
    source="splits a row's keys over programs and merges them; takes page tables",
)


def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, *, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (out (B, H, D), lse (B, H)) of q (B, H, D) over the first ``lengths`` (B,) int32 slots of each request.

    Args:
        k, v: (B, C, K, D), or (pages, page size, K, D) with a table.
        table: (B, pages of a request) int32.
    """
    out, lse = forward(q[:, None], k, v, scale, lengths=(*(None,) * 4, lengths, None, None), table=table, num_splits=0)
    return out[:, 0], lse[:, :, 0]
