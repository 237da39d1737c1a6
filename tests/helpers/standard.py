"""Attention as in textbooks, whose memory plans estimate as kind ``"standard"``."""

from __future__ import annotations

import torch


def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False) -> torch.Tensor:
    """softmax(q·kᵀ/√D)·v with all N² scores in memory; q (B, N, H, D), k and v (B, N, Hk, D)."""
    hidden = None
    if is_causal:
        # allocated before the scores: after them it would take the memory of a freed matrix, and no other matrix would fit there again
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    # reusing the name keeps at most two matrices alive at a time
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)
