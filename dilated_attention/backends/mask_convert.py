"""Converts masks, and heads that share keys, to the forms that kernel libraries take, once, at the boundary to the library."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention.backends.base import Options, Result
from dilated_attention.backends.torch_ops.math import band_mask


def additive_bias(
    q: Tensor, k: Tensor, options: Options, pairs: Tensor | None = None, *, pad_keys_to: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (bias (P, 1, L or 1, S) of q's dtype with 0 and −inf, bool (P, L): rows without keys); (None, None) without a mask.

    Args:
        pairs: bool (P, L or 1, S), True where a pair is kept, in place of the mask in ``options``.
        pad_keys_to: the last dimension is a slice of one padded to a multiple of this, for kernels that require aligned rows.
    """
    padding, band = options.mask.padding, options.mask.band
    P, L, S = q.shape[0], q.shape[1], k.shape[1]
    blocked = None if padding is None else padding[:, None, :]
    if pairs is not None:
        blocked = ~pairs
    elif band is not None:
        outside = ~band_mask(band, L, S, q.device)[None]
        blocked = outside if blocked is None else outside | blocked
    if blocked is None:
        return None, None
    assert not options.causal or (band is None and pairs is None), "a band and pairs already include causality"
    # causal, of as many queries as keys: row i sees the keys up to i, so it is empty if all of those are padding
    empty_PL = blocked[:, 0].to(torch.uint8).cummin(-1).values.bool() if options.causal else blocked.all(-1)
    width = -(-S // pad_keys_to) * pad_keys_to
    bias = q.new_zeros((*blocked.shape[:-1], width))[..., :S].masked_fill_(blocked, -torch.inf)
    return bias[:, None].expand(P, 1, -1, -1), empty_PL.expand(P, L)


def clear_empty_rows(out_PLGD: Tensor, lse_PGL: Tensor, empty_PL: Tensor | None) -> Result:
    """Sets out to 0 and lse to −inf in rows without keys, whatever the kernel wrote there."""
    if empty_PL is None:
        return out_PLGD, lse_PGL
    return out_PLGD.masked_fill(empty_PL[:, :, None, None], 0.0), lse_PGL.masked_fill(empty_PL[:, None, :], -torch.inf)


def flash_sides(options: Options, q: Tensor, k: Tensor) -> tuple[int, int]:
    """Returns ``window_sizes`` as FlashAttention 2 and 3 take them, with −1 for unbounded."""
    left, right = window_sizes(options, q, k)
    return -1 if left is None else left, -1 if right is None else right


def window_sizes(options: Options, q: Tensor, k: Tensor) -> tuple[int | None, int | None]:
    """Returns (left, right) in flash-attn's convention: relative to the diagonal that ends at the last query and last key."""
    if options.mask.band is None:
        return None, None
    lowest, highest = options.mask.band
    diagonal = k.shape[1] - q.shape[1]
    left = None if lowest is None else diagonal - lowest
    right = None if highest is None else highest - diagonal
    assert (left is None or left >= 0) and (right is None or right >= 0), "a plan clips keys so that the diagonal is in the band"
    return left, right


def of_kv_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """Returns gradients (P, S, G, D) of repeated keys or values summed over the query heads that read one of them, in float32."""
    return x if x.shape[2] == num_kv_heads else x.unflatten(2, (num_kv_heads, -1)).sum(3, dtype=torch.float32)


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Returns keys or values (P, S, K, D) with a copy of each head for every query head that reads it, for kernels without groups."""
    return x if x.shape[2] == num_heads else x.repeat_interleave(num_heads // x.shape[2], dim=2)
