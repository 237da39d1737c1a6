"""Rotary position embedding (RoFormer, arXiv 2104.09864, Eq. 34) and XPOS (arXiv 2212.10554) by absolute position, before dilation."""

from __future__ import annotations

import math

import torch

from dilated_attention.pattern.checks import MAX_LENGTH
from dilated_attention.validation import refuse_where

Table = tuple[torch.Tensor, torch.Tensor]
# log(1/ζ_0) of XPOS: ζ_0 = 0.4/1.4 for every head dimension
XPOS_STEEPEST = math.log(3.5)
# largest query or key element that must not overflow after scaling
XPOS_HEADROOM = 16.0


def rotary_table(positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Table:
    """Returns (cos, sin) of the angles position · base^(−2i/D), i = 0 … D/2 − 1, each (N, 1, D/2), of integer positions (N,).

    Without a cache, so that a compiled graph neither breaks nor depends on the length. The longest wavelength is about 2π · base positions.
    ``dtype``: of the vectors to be rotated; the table is float32, or float64 for float64.
    """
    # at long range float32 has no digits left for the fraction of a turn: at position 2^20 its angles are off by 0.06. So the
    # angle is reduced to one turn in float64, which only Apple's GPUs lack
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(head_dim // 2, dtype=wide, device=positions.device) * (-2 * math.log(base) / head_dim)
    turn = (positions.to(wide)[:, None] * exponent.exp()).remainder(2 * math.pi)
    angle = turn.to(torch.float64 if dtype is torch.float64 else torch.float32)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotates each pair (x_i, x_{i+D/2}) of x (B, N, H, D) by angle i of its position, in the table's dtype, and rounds to x's dtype.
    Halves are paired as in GPT-NeoX and Llama; the paper pairs neighbours, which differs by a permutation of the dimensions."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def document_ends(cu_seqlens: torch.Tensor, positions: torch.Tensor) -> Table:
    """Returns the first position of the packed document that each of ``positions`` (n,) is in, and one after its last."""
    # the attention refuses positions beyond the last boundary; here they must not cause an out-of-bounds read
    document = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
    document = document.clamp(0, cu_seqlens.shape[0] - 2)
    return cu_seqlens[document], cu_seqlens[document + 1]


def xpos_tables(table: Table, positions: torch.Tensor, head_dim: int, scale_base: float) -> tuple[Table, Table]:
    """Returns (query table, key table): the rotation times ζ_i^(n/b) for queries and ζ_i^(−n/b) for keys, ζ_i = (2i + 0.4D)/1.4D.

    A score then has the factor ζ_i^((n−m)/b) in pair i, for a query at n and a key at m: less than one for keys before the query and *more*
    for keys after it. ``positions``: n (N,), counted from the middle of the sequence or document, so that the factors at both ends are
    equally far from 1; ``scale_base``: b, > 0.
    """
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(head_dim // 2, dtype=wide, device=positions.device)
    exponent = (positions.to(wide) / scale_base)[:, None, None] * ((2 * pair + 0.4 * head_dim) / (1.4 * head_dim)).log()
    rotation = [part.to(wide) for part in table]
    (q_cos, q_sin), (k_cos, k_sin) = (
        [(part * factor).to(table[0].dtype) for part in rotation] for factor in (exponent.exp(), (-exponent).exp())
    )
    return (q_cos, q_sin), (k_cos, k_sin)


def xpos_max_length(scale_base: float, dtype: torch.dtype) -> int:
    """Returns the longest sequence for which ``dtype`` can hold the factors at its ends times a query or key element of 16."""
    return int(min(2 * scale_base / XPOS_STEEPEST * math.log(torch.finfo(dtype).max / XPOS_HEADROOM), MAX_LENGTH))


def check_xpos_length(cu_seqlens: torch.Tensor | None, seq_len: int, scale_base: float, dtype: torch.dtype) -> None:
    """Raises ValueError if the factors of a sequence of ``seq_len``, or of one of its documents, overflow ``dtype``."""
    longest = xpos_max_length(scale_base, dtype)
    if seq_len <= longest:
        return
    text = (
        f"has {{}} positions; with xpos_scale_base {scale_base:g}, XPOS overflows {dtype} beyond {longest}: use a larger "
        "xpos_scale_base, rotary=True without it, or a dtype of larger range"
    )
    if cu_seqlens is None:
        raise ValueError(f"the sequence {text}".format(seq_len))
    # the boundaries are on the device; they are read only where a document may be too long
    lengths = cu_seqlens.diff()
    most = "too many" if torch.compiler.is_compiling() else int(lengths.max())
    refuse_where(lengths > longest, f"a document {text}".format(most))
