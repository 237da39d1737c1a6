"""``block_sparse_attention`` and ``block_sparse_dilated_attention`` (dilated branches plus a block pattern), in one process."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from dilated_attention.functional.arguments import Options, attend
from dilated_attention.pattern import BlockPattern, HeadOffsets, from_block_mask
from dilated_attention.pattern.checks import as_int_tuple, shown

# with the function that it was converted with, which users may set anew
_converted: weakref.WeakKeyDictionary[BlockMask, tuple[Any, BlockPattern]] = weakref.WeakKeyDictionary()


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int = 0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Any:
    """Computes attention over the pairs that a block pattern keeps, exactly, as one softmax over each query's kept keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j,    m_h(i,j) ∈ {0, 1}

    m is ``pattern.dense_mask``. Time and memory grow with the number of kept blocks, not with N². A row without kept keys is 0 with
    lse −inf and gradient 0.

    Args:
        q: queries (B, Nq, H, D), float16, bfloat16, float32 or float64; D from 1 to 256.
        k, v: keys and values (B, Nk, Hk, D); Hk divides H, and query head h reads key/value head h // (H/Hk).
        pattern: a block pattern of ``dilated_attention.pattern``, or several joined by | and &, for all heads or per head; or a
            ``BlockMask`` of torch.nn.attention.flex_attention, read by ``from_block_mask``.
        is_causal: a query sees keys at its own position and before.
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        softcap: see ``dilated_attention``.
        cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1; each document attends to itself, with its own blocks.
        key_padding_mask: (B, Nk) bool, True = padding, as in nn.MultiheadAttention.
        sinks: (H,), float32 or q's dtype: one more key per head, of value 0 and this score: see ``dilated_attention``.
        dropout_p: probability that an attention weight is dropped, by position. Pass 0 in evaluation.
        query_offset: position of the first query in the key sequence, for decoding; query_offset + Nq ≤ Nk.
        return_lse: also return the log-sum-exp of the scores.
        deterministic: use only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a name from ``list_backends()``. A named backend is used or the call is refused; it is never replaced.

    Returns:
        out (B, Nq, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, Nq)), natural logarithm, float32 (float64 for
        float64 inputs). lse is differentiable.

    Raises:
        ValueError, TypeError: bad input, before anything is allocated.
        BackendUnavailable: no backend can compute this, or the named one cannot; the message lists every reason.

    The patterns are those of Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062) and Sparse Transformers (arXiv 1904.10509), in
    whole blocks. Some libraries take a softmax per block, so that a query's weights do not sum to 1; this function does not.

    >>> pattern = LocalWindow(512) | GlobalLocal(128, 16)
    >>> out = block_sparse_attention(q, k, v, pattern, is_causal=True)
    """
    options = Options(is_causal, return_lse, deterministic, query_offset, dropout_p, scale, backend, softcap=softcap)
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), None, checked_pattern(pattern), (), options)


def block_sparse_dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_lengths: Any,
    dilation_rates: Any,
    pattern: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    head_offsets: HeadOffsets = "cyclic",
    branch_heads: str = "all",
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tail: str = "mask",
    dropout_p: float = 0.0,
    query_offset: int = 0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Any:
    """Computes dilated branches and a block pattern together, exactly, as one softmax over the multiset of all their keys.

        m_h(i, j) = m_h(i, j) of ``dilated_attention`` + m_h(i, j) of ``block_sparse_attention``

    A pair that two branches keep, or a branch and a block, counts twice, as a pair in two branches does in LongNet. The two parts are
    computed by separate kernels and merged by their log-sum-exps. The backward of each part uses the merged log-sum-exps; no gradient
    flows through the merge.

    Args:
        segment_lengths, dilation_rates, head_offsets, branch_heads, tail: see ``dilated_attention``.
        pattern: see ``block_sparse_attention``.
        backend: ``"auto"``, or a name that computes both parts or is refused; ``"nested"`` applies to the branches alone.

    All other arguments, results and errors are those of ``dilated_attention``; its ``mixture_grad`` is ``"exact"`` here.

    >>> out = block_sparse_dilated_attention(
    ...     q, k, v, [2048, 8192], [1, 4], BigBird(256, 64, 3), is_causal=True)
    """
    lengths, rates = as_int_tuple("segment_lengths", segment_lengths), as_int_tuple("dilation_rates", dilation_rates)
    branches = lengths, rates, head_offsets, branch_heads, tail
    options = Options(is_causal, return_lse, deterministic, query_offset, dropout_p, scale, backend, softcap=softcap)
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), branches, checked_pattern(pattern), (), options)


def checked_pattern(pattern: Any) -> BlockPattern:
    """Returns the block pattern; a ``BlockMask`` is converted, once for its ``mask_mod``."""
    if isinstance(pattern, BlockPattern):
        return pattern
    if not isinstance(pattern, BlockMask):
        raise TypeError(
            f"pattern is {shown(pattern)} ({type(pattern).__name__}); expected a block pattern of dilated_attention.pattern, e.g. "
            "LocalWindow(512), or a BlockMask of torch.nn.attention.flex_attention"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "pattern is a BlockMask inside a compiled function, where its lists cannot be read; convert it outside: "
            "dilated_attention.pattern.from_block_mask(block_mask)"
        )
    known = _converted.get(pattern)
    if known is None or known[0] is not pattern.mask_mod:
        known = _converted[pattern] = pattern.mask_mod, from_block_mask(pattern)
    return known[1]
