"""FlashAttention-3's forward for one query a request, over a paged cache or one of plain stretches: its rows read all of the first positions."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import HALVES, Facts
from dilated_attention.backends.flash3 import Flash3Backend, _ops

FACTS = Facts(
    devices=frozenset({"cuda"}),
    dtypes=HALVES,
    package="flash-attn-3",
    install=Flash3Backend.facts.install,
    capabilities=((9, 0), (9, 0)),
    head_dim_multiple=8,
    backward=False,
    source="splits a row's keys over programs and merges them; takes page tables",
)


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float, *, table: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, H, D), lse (B, H)) of q (B, H, D) over the first ``lengths`` (B,) int32 slots of each request.

    Args:
        k, v: (B, C, K, D), or with a table (pages, page size, K, D).
        table: (B, pages of a request) int32.
    """
    left, causal, softcap, window = None, False, 0.0, -1
    out, lse, *_ = _ops().fwd(
        q[:, None], k, v, None, None, None, None,
        # cu_seqlens of q, k and new keys; rows used of q and of k; longest of q and k
        None, None, None, None, lengths, None, None,
        table, None, left, None, None, None, None, None, None,
        scale, causal, window, window, 0, softcap, True, None,
        # as many splits as it finds best
        0, None, 0,
    )  # fmt: skip
    return out[:, 0], lse[:, :, 0]
