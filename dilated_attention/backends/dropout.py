"""Dropout by position: a counter-based hash decides each (batch, head, query, key) element, so any cut agrees with any other."""

from __future__ import annotations

import torch

from dilated_attention.backends.base import Dropout

# the finaliser of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit constants; int64 products wrap, as it needs
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def keep_mask(dropout: Dropout, rows: slice) -> torch.Tensor:
    """bool (P, G, rows, S): True where the attention weight is kept, with probability 1 − p."""
    # chained mixing, one coordinate at a time: every coordinate is hashed into the state of those before it
    state = _mix(dropout.batch + dropout.seed)[:, None]
    state = _mix(state + dropout.heads[None, :])[:, :, None]
    state = _mix(state + dropout.queries[:, None, rows])[..., None]
    bits = _mix(state + dropout.keys[:, None, None, :])
    # 31 high bits against a threshold; the sign bit of an arithmetic shift is masked off
    uniform = (bits >> 32) & 0x7FFFFFFF
    return uniform >= int(dropout.probability * 2**31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
