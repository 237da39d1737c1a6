"""Rotary position embedding (RoFormer, arXiv 2104.09864, Eq. 34), and XPOS (arXiv 2212.10554), by absolute position, before dilation."""

from __future__ import annotations

import math
from typing import Any

import torch

from dilated_attention.engine.transforms import each

Table = tuple[torch.Tensor, torch.Tensor]
# log(1/ζ_0) of XPOS: ζ_0 = 0.4/1.4 for every head dimension
XPOS_STEEPEST = math.log(3.5)
# queries and keys up to this size are left room for
XPOS_HEADROOM = 16.0


def rotary_table(positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Table:
    """(cos, sin) of the angles position · base^(−2i/D), i = 0 … D/2 − 1, each (N, 1, D/2).

    A pure function without a cache, so that a compiled graph neither breaks nor depends on the length.

    Args:
        positions: integers (N,).
        head_dim: D, even.
        base: > 1; the longest wavelength is about 2π · base positions.
        dtype: of the vectors to be rotated; the table is float32, or float64 for float64.
    """
    # float32 has no digits left for the fraction of a turn at long range: at position 2^20 its angles are off by 0.06. So the
    # angle is reduced to one turn in float64, which only Apple's GPUs lack
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(head_dim // 2, dtype=wide, device=positions.device) * (-2 * math.log(base) / head_dim)
    turn = (positions.to(wide)[:, None] * exponent.exp()).remainder(2 * math.pi)
    angle = turn.to(torch.float64 if dtype is torch.float64 else torch.float32)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Each pair (x_i, x_{i+D/2}) of x (B, N, H, D) turned by its position's angle i; in the table's dtype, rounded to x's.

    The halves are paired as in GPT-NeoX and Llama; the paper pairs neighbours, which differs by a permutation of the
    dimensions. q·k of two rotated vectors depends on the difference of their positions only.
    """
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def document_positions(cu_seqlens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(n,) positions counted from the start of the packed document that each of ``positions`` (n,) lies in."""
    positions = positions.to(cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, positions, right=True) - 1
    return positions - cu_seqlens[document]


def xpos_tables(table: Table, positions: torch.Tensor, head_dim: int, scale_base: float) -> tuple[Table, Table]:
    """(queries' table, keys' table): the rotation times ζ_i^(n/b) for queries and ζ_i^(−n/b) for keys, ζ_i = (2i + 0.4D)/1.4D.

    ``rotate`` takes either. A score then has the factor ζ_i^((n−m)/b) in pair i, for a query at n and a key at m, so that it depends on
    the distance only: less than one for keys before the query, *more* for keys after it.

    Args:
        table: of ``rotary_table``.
        positions: n (N,), counted from the middle of what attends to itself, so that the factors of both ends are equally far from 1.
        head_dim: D, even.
        scale_base: b, > 0.
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
    """The longest sequence whose factors, half its length from the middle, times a query or key of 16, ``dtype`` can hold."""
    return int(2 * scale_base / XPOS_STEEPEST * math.log(torch.finfo(dtype).max / XPOS_HEADROOM))


def xpos_positions(positions: torch.Tensor, seq_len: int, scale_base: float, dtype: torch.dtype) -> torch.Tensor:
    """``positions`` (N,) of a sequence of ``seq_len``, counted from its middle.

    Raises:
        ValueError: a sequence whose factors overflow ``dtype``.
    """
    longest = xpos_max_length(scale_base, dtype)
    if seq_len > longest:
        raise ValueError(_too_long("the sequence", seq_len, longest, scale_base, dtype))
    return positions - (seq_len + 1) // 2


def xpos_document_positions(
    positions: torch.Tensor, cu_seqlens: torch.Tensor, seq_len: int, scale_base: float, dtype: torch.dtype
) -> torch.Tensor:
    """``positions`` (n,) in a packed sequence of ``seq_len``, counted from the middle of the document that each lies in.

    Raises:
        ValueError: a document whose factors overflow ``dtype``.
    """
    longest = xpos_max_length(scale_base, dtype)
    # the bounds' values, which are on the device, are asked for only where a document may be too long
    if seq_len > longest:
        cu_seqlens = bounded_documents(cu_seqlens, longest, _too_long("a document", "{length}", longest, scale_base, dtype))
    positions = positions.to(cu_seqlens.dtype)
    # positions beyond the last bound, which the attention refuses, must not read beyond it
    document = (torch.searchsorted(cu_seqlens, positions, right=True) - 1).clamp(0, cu_seqlens.shape[0] - 2)
    start, end = cu_seqlens[document], cu_seqlens[document + 1]
    return positions - start - (end - start + 1) // 2


@torch.library.custom_op("dilated_attention::bounded_documents", mutates_args=())
def bounded_documents(cu_seqlens: torch.Tensor, longest: int, complaint: str) -> torch.Tensor:
    """A copy of cu_seqlens whose documents have at most ``longest`` positions. An op, as a graph cannot branch on values."""
    length = int(cu_seqlens.diff().max())
    if length > longest:
        raise ValueError(complaint.format(length=length))
    return cu_seqlens.clone()


@bounded_documents.register_fake
def _(cu_seqlens: torch.Tensor, longest: int, complaint: str) -> torch.Tensor:
    return torch.empty_like(cu_seqlens)


@bounded_documents.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], cu_seqlens: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, int]:
    return each(bounded_documents, info.batch_size, in_dims, (cu_seqlens, *settings))


def _too_long(what: str, length: int | str, longest: int, scale_base: float, dtype: torch.dtype) -> str:
    return (
        f"{what} has {length} positions; with xpos_scale_base {scale_base:g}, XPOS overflows {dtype} beyond {longest}: use a larger "
        "xpos_scale_base, rotary=True without it, or a dtype of larger range"
    )
