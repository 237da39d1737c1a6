"""Rotary position embedding (RoFormer, arXiv 2104.09864, Eq. 34) and XPOS (arXiv 2212.10554) by absolute position, before dilation."""

from __future__ import annotations

import math
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.ops.transforms import dispatched_alike, is_eager
from dilated_attention.functional.fused_layers import takes_kernels
from dilated_attention.pattern.checks import MAX_LENGTH
from dilated_attention.validation import refuse_where

Table = tuple[torch.Tensor, torch.Tensor]
# log(1/ζ_0) of XPOS: ζ_0 = 0.4/1.4 for every head dimension
XPOS_STEEPEST = math.log(3.5)
# largest query or key element that must not overflow after scaling
XPOS_HEADROOM = 16.0


def rotary_tables(
    positions: torch.Tensor, cu_seqlens: torch.Tensor | None, seq_len: int, head_dim: int, base: float, scale_base: float | None,
    dtype: torch.dtype,
) -> tuple[Table, Table]:  # fmt: skip
    """Returns (query table, key table), each (cos, sin) of the angles position · base^(−2i/D), i = 0 … D/2 − 1, each (N, 1, D/2).

    With XPOS they are multiplied by ζ_i^(n/b) for queries and by ζ_i^(−n/b) for keys, ζ_i = (2i + 0.4D)/1.4D. A score then has the factor
    ζ_i^((n−m)/b) in pair i, for a query at n and a key at m: less than one for keys before the query and *more* for keys after it. Here n
    is counted from the middle of the sequence or document, so that the factors at both ends are equally far from 1.

    Without a cache, so that a compiled graph neither breaks nor depends on the length. The longest wavelength is about 2π · base positions.

    Args:
        positions: integers (N,); counted anew in each document of ``cu_seqlens``.
        scale_base: b of XPOS, > 0; None for RoPE. ValueError if the factors of ``seq_len`` positions, or of a document, overflow ``dtype``.
        dtype: of the vectors to be rotated; the tables are float32, or float64 for float64.
    """
    if scale_base is not None and seq_len > (longest := xpos_max_length(scale_base, dtype)):
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
    start: Any = 0
    end: Any = seq_len
    if cu_seqlens is not None:
        # the attention refuses positions beyond the last boundary; here they must not cause an out-of-bounds read
        document = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
        document = document.clamp(0, cu_seqlens.shape[0] - 2)
        start, end = cu_seqlens[document], cu_seqlens[document + 1]
    positions = positions - start
    # at long range float32 has no digits left for the fraction of a turn: at position 2^20 its angles are off by 0.06. So the
    # angle is reduced to one turn in float64, which only Apple's GPUs lack
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(head_dim // 2, dtype=wide, device=positions.device)
    turn = (positions.to(wide)[:, None] * (pair * (-2 * math.log(base) / head_dim)).exp()).remainder(2 * math.pi)
    angle = turn.to(accumulation_dtype(dtype))[:, None, :]
    table = angle.cos(), angle.sin()
    if scale_base is None:
        return table, table
    centred = positions - (end - start + 1) // 2
    exponent = (centred.to(wide) / scale_base)[:, None, None] * ((2 * pair + 0.4 * head_dim) / (1.4 * head_dim)).log()
    (q_cos, q_sin), (k_cos, k_sin) = (
        [(part.to(wide) * factor).to(angle.dtype) for part in table] for factor in (exponent.exp(), (-exponent).exp())
    )
    return (q_cos, q_sin), (k_cos, k_sin)


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotates each pair (x_i, x_{i+D/2}) of x (B, N, H, D) by angle i of its position, in the table's dtype, and rounds to x's dtype.
    Halves are paired as in GPT-NeoX and Llama; the paper pairs neighbours, which differs by a permutation of the dimensions."""
    cos, sin = table
    # in a step of decoding each batch entry has its own position
    has_rows = x.ndim == cos.ndim + 1 == 4 and x.shape[1] == cos.shape[0]
    if has_rows and takes_kernels(x, cos) and is_eager((x, cos)) and dispatched_alike(x, cos):
        return _Rotation.apply(x, cos, sin)  # type: ignore[no-any-return]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """``rotate`` as one kernel. Its gradient is turned back, by another call of ``rotate``, so that it has derivatives, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        x = x.contiguous()
        return turn(x, (cos, sin), torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotate(grad, (cos, -sin)), None, None


def turn(x: torch.Tensor, table: Table, out: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """Writes x (B, N, H, D), rotated by ``sign`` times the angles of table (N, 1, D/2), to ``out``, which may be x, and returns it. The
    heads of a position are side by side."""
    if not is_eager((x,)):
        # of a backward under torch.func.vmap, or one that is compiled
        return out.copy_(rotate(x, (table[0], sign * table[1])))
    if x.numel():
        from dilated_attention.functional import fused_layers_triton as kernels

        tensors = x, *(part.contiguous() for part in table), out
        B, N, H, D = x.shape
        # one position may have any stride, contiguous tensors included
        strides = x.stride(int(N > 1)), out.stride(int(N > 1))
        launch = kernels.launch_of(kernels.rotated_launch, tensors, B * N, N, H, D // 2, sign, *strides)
        kernels.run(launch, *tensors)
    return out


def xpos_max_length(scale_base: float, dtype: torch.dtype) -> int:
    """Returns the longest sequence for which ``dtype`` can hold the factors at its ends times a query or key element of 16."""
    return int(min(2 * scale_base / XPOS_STEEPEST * math.log(torch.finfo(dtype).max / XPOS_HEADROOM), MAX_LENGTH))
