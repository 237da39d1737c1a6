"""``dilated_attention`` and its dense special case ``attention``, in one process."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.functional.arguments import DENSE, attend, branches_of
from dilated_attention.functional.options import LocalBranchOptions, LocalOptions, shows_options


@shows_options
def dilated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_lengths: Any, dilation_rates: Any, *, mixture_grad: str = "exact",
    precision: str = "native", **options: Unpack[LocalBranchOptions],
) -> Any:  # fmt: skip
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
        mixture_grad: ``"exact"`` · ``"detached"``: no gradient through the mixing weights of the branches (as in TorchScale).
        precision: ``"native"``: products in the inputs' dtype · ``"fp8"``: products in 8-bit floats (e4m3), summed in float32 over at most
            8192 keys at a time. It runs on Hopper, forward only, without gradients; out is in q's dtype, with an error of about 5 % where
            values average out.
        options: is_causal, scale, cu_seqlens, key_padding_mask, sinks, softcap, dropout_p, return_lse, deterministic, backend,
            query_offset, head_offsets, branch_heads, tail: see ``functional.CallOptions``, ``LocalOptions`` and ``BranchOptions``.

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
    branches = branches_of(segment_lengths, dilation_rates)
    return attend("dilated_attention", options, q, k, v, branches, mixture_grad=mixture_grad, precision=precision)


@shows_options
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | tuple[int | None, int | None] | None = None,
    precision: str = "native", **options: Unpack[LocalOptions],
) -> Any:  # fmt: skip
    """Computes dense softmax attention (m = 1) on the same engine and backends: ``dilated_attention`` with one segment and rate 1.

    Args:
        window: (left, right): a query at position i sees keys i − left … i + right; None is unbounded, and one integer stands
            for both sides. Together with ``is_causal``, right is at most 0.

    All other arguments, results and errors are those of ``dilated_attention``.
    """
    sides = () if window is None else check.check_window(window)
    return attend("attention", options, q, k, v, DENSE, window=sides, head_offsets="zero", precision=precision)
