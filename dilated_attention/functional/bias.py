"""Biases by formula: numbers added to the scores that kernels compute from positions, so that no (N, N) tensor exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilated_attention.validation import check_numbers_of_heads, check_plain


@dataclass(frozen=True, eq=False)
class Alibi:
    """A bias by position: head h adds −slope_h · |i − j| to the score of query position i and key position j.

        s_ij = scale · q_i·k_j − slope_h · |i − j|,    lse includes it

    ALiBi (Press et al. 2022, arXiv 2108.12409, section 3) with slopes 2^(−8/H), 2^(−16/H), … for H heads. It differs in that keys after a
    query count, too, where attention is not causal, and in that slopes may be learned.

    Args:
        slopes: (H,), float32 or q's dtype, on q's device; any finite numbers. They may need a gradient.

    Raises (where it is given to an attention):
        ValueError, TypeError: slopes of another shape, dtype or device, or a softcap beside the bias.

    >>> slopes = 2.0 ** (-8.0 / 12 * torch.arange(1, 13))
    >>> out = attention(q, k, v, is_causal=True, bias=Alibi(slopes))
    """

    slopes: Tensor
    kind: ClassVar[str] = "position"


@dataclass(frozen=True, eq=False)
class Distance:
    """A bias by place: head h adds −slope_h · ‖c_i − c_j‖, the Euclidean distance of query and key, to their score.

        s_ij = scale · q_i·k_j − slope_h · ‖c_i − c_j‖,    lse includes it

    The two-dimensional ALiBi of TITAN's slide encoder (Ding et al. 2024, arXiv 2411.19666), where a place is that of a tile in the grid
    of its slide. It differs in that every position has a place, a class token too, in that slopes may be learned, and in that any other
    attention of this library takes it, not only a dense one.

    Args:
        coordinates: places of all keys: (N,), (N, 1) or (N, 2), or with the batch in front (B, N, 1) or (B, N, 2); floating-point or
            integers, finite, in any unit; computed in float32 (float64 for float64 q). Query i has the place of key query_offset + i.
            They get no gradient.
        slopes: (H,), float32 or q's dtype, on q's device, in 1/unit; any finite numbers. They may need a gradient.

    Raises (where it is given to an attention):
        ValueError, TypeError: coordinates or slopes of another shape, dtype or device, coordinates that need a gradient, or a softcap.

    >>> bias = Distance(tile_corners / 256, slopes)
    >>> out = dilated_attention(q, k, v, [1024, 4096], [1, 4], bias=bias)
    """

    coordinates: Tensor
    slopes: Tensor
    kind: ClassVar[str] = "place"


def check_bias(bias: Any, q: Tensor, k: Tensor) -> None:
    """Checks a bias for checked q and k."""
    if bias is None:
        return
    if not isinstance(bias, Alibi | Distance):
        way_out = "; a tensor of N² numbers is not taken" if isinstance(bias, Tensor) else ""
        raise TypeError(f"bias is a {type(bias).__name__}; expected Alibi(slopes), Distance(coordinates, slopes) or None{way_out}")
    check_numbers_of_heads("bias.slopes", bias.slopes, q)
    if isinstance(bias, Alibi):
        return
    x, (B, N) = bias.coordinates, k.shape[:2]
    check_plain("bias.coordinates", x, "a tensor of shape (N, 2), the places of all keys")
    allowed = [(N,), (N, 1), (N, 2), (B, N, 1), (B, N, 2)]
    if tuple(x.shape) not in allowed:
        raise ValueError(f"bias.coordinates has shape {tuple(x.shape)}; expected one of {', '.join(map(str, allowed))} for {N} keys")
    if x.dtype is torch.bool or x.is_complex():
        raise TypeError(f"bias.coordinates has dtype {x.dtype}; expected floating-point numbers or integers: convert it with .float()")
    if x.device != q.device:
        raise ValueError(f"bias.coordinates is on {x.device} and q on {q.device}; they must be on one device: move it with .to()")
    if x.requires_grad:
        raise ValueError("bias.coordinates needs a gradient, and a bias has none for places; expected fixed ones: give .detach()")


def bias_tensors(bias: Alibi | Distance, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns what an op takes of a checked bias: coordinates (B, Nk, 2) in the dtype of lse, None for positions, and slopes (H,)."""
    if isinstance(bias, Alibi):
        return None, bias.slopes
    x = bias.coordinates
    x = (x[:, None] if x.ndim == 1 else x).to(torch.float64 if q.dtype is torch.float64 else torch.float32)
    return torch.nn.functional.pad(x, (0, 2 - x.shape[-1])).expand(k.shape[0], -1, -1), bias.slopes
