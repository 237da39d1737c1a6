"""``dilated_attention`` and its dense special case ``attention``, in one process."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.functional.arguments import DENSE, Options, attend, plain_ints
from dilated_attention.pattern import HeadOffsets
from dilated_attention.pattern.checks import as_int_tuple


def dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_lengths: Any,
    dilation_rates: Any,
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
    mixture_grad: str = "exact",
    dropout_p: float = 0.0,
    query_offset: int = 0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    precision: str = "native",
) -> Any:
    """Computes LongNet's dilated attention (arXiv 2307.02486) exactly, as one softmax over the multiset of all branches' keys.

        out_h(i) = Σ_j m_h(i,j) e^{s_ij} v_j / Σ_j m_h(i,j) e^{s_ij},    s_ij = scale · q_i·k_j

    m_h(i, j) counts the branches (w, r) in which positions i and j are in the same segment of w positions and both have an index
    ≡ o_h (mod r) inside it. This is the paper's mixing of branches by their softmax denominators (Eq. 8–11). A row that no
    branch of its head selects, or whose keys are all masked, is 0 with lse −inf (with sinks sink_h) and gradient 0.

    Args:
        q: queries (B, Nq, H, D), float16, bfloat16, float32 or float64; D from 1 to 256.
        k, v: keys and values (B, Nk, Hk, D); Hk divides H, and query head h reads key/value head h // (H/Hk).
        segment_lengths: w of each branch, in positions; any w ≥ 1, which need not divide N and may exceed it.
        dilation_rates: r of each branch, 1 ≤ r ≤ w; r need not divide w.
        is_causal: a query sees keys at its own position and before.
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        softcap: c, from 1.18e-38 to 1.01e31: scores are c·tanh(s/c) (Gemma 2); None for s. Few backends can:
            ``explain_backend(softcap=…)`` says which.
        head_offsets: ``"cyclic"`` o_h = h mod r (the paper) · ``"blocked"`` o_h = h // ceil(H/r) (TorchScale) · ``"zero"`` ·
            one list of H integers per branch.
        branch_heads: ``"all"``: every head runs every branch · ``"split"``: the heads are split among the branches (fkodom's layout).
        cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1; segments start anew at position 0 of each document.
            The host reads it, at every call if it is on the CPU. On a GPU it waits for that once, and again after a change by torch; other
            changes (``.data``, dlpack) are refused there by an assertion on the device.
        key_padding_mask: (B, Nk) bool, True = padding, as in nn.MultiheadAttention.
        sinks: (H,), float32 or q's dtype: each head has one more key of value 0, whose score is this number: e^{sink_h} is added to the
            denominator, and to what lse is the logarithm of (as in gpt-oss). They may need a gradient. Not with detached mixing.
        tail: ``"mask"``: only real keys take part · ``"zero_keys"``: TorchScale's zero padding takes part (non-causal only).
        mixture_grad: ``"exact"`` · ``"detached"``: no gradient through the mixing weights of the branches (as in TorchScale).
        dropout_p: probability that an attention weight is dropped. A pair of positions has the same decision in every branch. Pass 0
            in evaluation.
        query_offset: position of the first query in the key sequence, for decoding; query_offset + Nq ≤ Nk.
        return_lse: also return the log-sum-exp of the scores.
        deterministic: use only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a name from ``list_backends()``. A named backend is used or the call is refused; it is never replaced.
        precision: ``"native"``: products in the inputs' dtype · ``"fp8"``: products in 8-bit floats (e4m3), summed in float32 over at most
            8192 keys at a time. It runs on Hopper, forward only, without gradients; out is in q's dtype, with an error of about 5 % where
            values average out.

    Returns:
        out (B, Nq, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, Nq)), natural logarithm, float32 (float64 for
        float64 inputs). lse is differentiable; with ``mixture_grad="detached"`` it is returned without a gradient.

    Raises:
        ValueError, TypeError: bad input, before anything is allocated.
        BackendUnavailable: no backend can compute this, or the named one cannot; the message lists every reason.
        NotImplementedError: a second derivative or a forward-mode tangent (torch.func.jvp) is asked for; grad, vjp, jacrev and vmap work.

    Equals the paper where r divides w and w divides N. Differs from TorchScale in its exact gradients, in having no zero keys, and in
    its offsets h mod r; ``head_offsets="blocked", tail="zero_keys", mixture_grad="detached"`` gives TorchScale's semantics.
    """
    lengths = plain_ints(segment_lengths) or as_int_tuple("segment_lengths", segment_lengths)
    rates = plain_ints(dilation_rates) or as_int_tuple("dilation_rates", dilation_rates)
    branches = lengths, rates, head_offsets, branch_heads, tail
    options = Options(
        is_causal, return_lse, deterministic, query_offset, dropout_p, scale, backend, precision, mixture_grad, softcap=softcap
    )
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), branches, None, (), options)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
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
    precision: str = "native",
) -> Any:
    """Computes dense softmax attention (m = 1) on the same engine and backends: ``dilated_attention`` with one segment and rate 1.

    Args:
        window: (left, right): a query at position i sees keys i − left … i + right; None is unbounded, and one integer stands
            for both sides. Together with ``is_causal``, right is at most 0.

    All other arguments, results and errors are those of ``dilated_attention``.
    """
    options = Options(is_causal, return_lse, deterministic, query_offset, dropout_p, scale, backend, precision, softcap=softcap)
    sides = () if window is None else check.check_window(window)
    return attend(q, k, v, (key_padding_mask, cu_seqlens, sinks), DENSE, None, sides, options)
