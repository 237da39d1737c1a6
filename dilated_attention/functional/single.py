"""``dilated_attention`` and its dense special case ``attention``, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch

from dilated_attention import validation as check
from dilated_attention.backends import PRECISIONS, registry
from dilated_attention.engine.ops import flops  # noqa: F401  registers the formulas of the ops
from dilated_attention.engine.ops.dilated import dilated_attention_op
from dilated_attention.engine.ops.eager import is_eager
from dilated_attention.engine.ops.resolve import find, remember, resolve
from dilated_attention.pattern import MAX_LENGTH, DilatedPattern, HeadOffsets
from dilated_attention.pattern.checks import as_int_tuple, one_of

# a segment longer than any sequence; plans clamp it, so a pattern with one such branch is dense attention
WHOLE_SEQUENCE = MAX_LENGTH


def dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_lengths: Any,
    dilation_rates: Any,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    head_offsets: HeadOffsets = "cyclic",
    branch_heads: str = "all",
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
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
    branch of its head selects, or whose keys are all masked, is 0 with lse −inf and gradient 0.

    Args:
        q: queries (B, Nq, H, D), float16, bfloat16, float32 or float64; D from 1 to 256.
        k, v: keys and values (B, Nk, Hk, D); Hk divides H, and query head h reads key/value head h // (H/Hk).
        segment_lengths: w of each branch, in positions; any w ≥ 1, which need not divide N and may exceed it.
        dilation_rates: r of each branch, 1 ≤ r ≤ w; r need not divide w.
        is_causal: a query sees keys at its own position and before.
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        head_offsets: ``"cyclic"`` o_h = h mod r (the paper) · ``"blocked"`` o_h = h // ceil(H/r) (TorchScale) · ``"zero"`` ·
            one list of H integers per branch.
        branch_heads: ``"all"``: every head runs every branch · ``"split"``: the heads are split among the branches (fkodom's layout).
        cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1; segments start anew at position 0 of each document.
            It is copied to the host once per tensor, and again after an in-place change; on a GPU, each copy synchronises.
        key_padding_mask: (B, Nk) bool, True = padding, as in nn.MultiheadAttention.
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
        BackendUnavailable: no backend, or not the named one, can do this; the message lists every reason.
        NotImplementedError: a second derivative or a forward-mode tangent (torch.func.jvp) is asked for; grad, vjp, jacrev and vmap work.

    Equals the paper where r divides w and w divides N. Differs from TorchScale in its exact gradients, in having no zero keys, and in
    its offsets h mod r; ``head_offsets="blocked", tail="zero_keys", mixture_grad="detached"`` gives TorchScale's semantics.
    """
    lengths = _plain_ints(segment_lengths) or as_int_tuple("segment_lengths", segment_lengths)
    rates = _plain_ints(dilation_rates) or as_int_tuple("dilation_rates", dilation_rates)
    return _attend(
        q,
        k,
        v,
        lengths,
        rates,
        head_offsets,
        branch_heads,
        tail,
        [],
        is_causal=is_causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        mixture_grad=mixture_grad,
        dropout_p=dropout_p,
        query_offset=query_offset,
        return_lse=return_lse,
        deterministic=deterministic,
        backend=backend,
        precision=precision,
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
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
    return _attend(
        q,
        k,
        v,
        (WHOLE_SEQUENCE,),
        (1,),
        "zero",
        "all",
        "mask",
        [] if window is None else check.check_window(window),
        is_causal=is_causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        mixture_grad="exact",
        dropout_p=dropout_p,
        query_offset=query_offset,
        return_lse=return_lse,
        deterministic=deterministic,
        backend=backend,
        precision=precision,
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    rates: tuple[int, ...],
    head_offsets: HeadOffsets,
    branch_heads: str,
    tail: str,
    window: list[int],
    *,
    is_causal: bool,
    scale: float | None,
    cu_seqlens: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    mixture_grad: str,
    dropout_p: float,
    query_offset: int,
    return_lse: bool,
    deterministic: bool,
    backend: str,
    precision: str,
) -> Any:
    q, k, v = autocast(q, k, v)
    key, known, eager = None, None, is_eager([q, k, v, *(x for x in (key_padding_mask, cu_seqlens) if x is not None)])
    if eager:
        needs_grad = _needs_grad(q, k, v)
        tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, key_padding_mask is None, needs_grad
        options = is_causal, return_lse, deterministic, query_offset, dropout_p, scale
        key = _key((lengths, rates, branch_heads, tail, *window), head_offsets, options, (tensors, backend, precision, mixture_grad))
        known = None if key is None else find(key, q.dtype)
    if known is None:
        check.check_tensors(q, k, v)
        offset_name, offset_list = flat_offsets(lengths, rates, head_offsets, branch_heads, tail, q.shape[2])
        one_of("mixture_grad", mixture_grad, ("exact", "detached"))
        one_of("precision", precision, PRECISIONS)
        scale, dropout_p, query_offset, seed, needs_grad = checked_options(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            query_offset=query_offset,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
        arguments = (
            *(list(lengths), list(rates), offset_name, offset_list, branch_heads, tail, window, is_causal, scale, query_offset),
            *(dropout_p, mixture_grad == "detached", deterministic, needs_grad, backend, precision),
        )
        if eager:
            known = resolve(q, k, key_padding_mask, arguments)
            if key is not None:
                remember(key, q.dtype, known)
    else:
        if key_padding_mask is not None:
            check.check_key_padding_mask(key_padding_mask, k)
        if cu_seqlens is not None:
            check.check_cu_seqlens(cu_seqlens, q, k)
        seed = _drawn(dropout_p) if dropout_p else None
    if known is None:
        out, lse, _ = dilated_attention_op(q, k, v, key_padding_mask, cu_seqlens, seed, *arguments)
    else:
        known = known if cu_seqlens is None else known.with_documents(cu_seqlens, k.shape[1], outside=True)
        out, lse = known(needs_grad, q, k, v, key_padding_mask, cu_seqlens, seed)
    if not return_lse:
        return out
    return out, lse.detach() if mixture_grad == "detached" else lse


# the types allowed for is_causal, return_lse, deterministic, query_offset, dropout_p and scale in a cache key: 1 == True would mix up
# two calls, and a tensor's value may change
_OPTION_TYPES = frozenset(itertools.product((bool,), (bool,), (bool,), (int,), (int, float), (int, float, type(None))))
_STR = {str}


def _key(pattern: tuple[Any, ...], head_offsets: Any, options: tuple[Any, ...], others: tuple[Any, ...]) -> Hashable:
    """Returns the cache key of a checked call: all its arguments but the masks. None where equal values do not imply equal calls."""
    if type(head_offsets) is not str:
        if type(head_offsets) not in (list, tuple):
            return None
        head_offsets = tuple([_plain_ints(row) for row in head_offsets])
        if None in head_offsets:
            return None
    if tuple(map(type, options)) not in _OPTION_TYPES or set(map(type, (*pattern[2:4], *others[1:]))) != _STR:
        return None
    return pattern, head_offsets, options, others


def _plain_ints(values: Any) -> tuple[int, ...] | None:
    """Returns a list or tuple of plain Python integers, which need no checks, as a tuple; None for anything else."""
    if type(values) is not tuple and type(values) is not list:
        return None
    for value in values:
        if type(value) is not int:
            return None
    return tuple(values)


def checked_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    cu_seqlens: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    dropout_p: float,
    query_offset: int,
    return_lse: bool,
    deterministic: bool,
    backend: str,
) -> tuple[float, float, int, torch.Tensor | None, bool]:
    """Validates the options for checked q, k, v. Returns (scale, dropout_p, query_offset, dropout seed, whether gradients are needed)."""
    scale = check.check_scale(scale, q.shape[3], q.dtype)
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        check.check_bool(name, flag)
    dropout_p = check.check_probability("dropout_p", dropout_p)
    query_offset = check.check_query_offset(query_offset, q.shape[1], k.shape[1])
    check.check_key_padding_mask(key_padding_mask, k)
    check.check_cu_seqlens(cu_seqlens, q, k)
    registry.check_name(backend)
    return scale, dropout_p, query_offset, _drawn(dropout_p), _needs_grad(q, k, v)


def _drawn(dropout_p: float) -> torch.Tensor | None:
    """Draws the dropout seed of a call."""
    # from torch's default generator: reproducible under manual_seed, and repeated by activation checkpointing
    return torch.randint(2**62, (), dtype=torch.int64) if dropout_p > 0 else None


def _needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def flat_offsets(
    lengths: tuple[int, ...], rates: tuple[int, ...], head_offsets: HeadOffsets, branch_heads: str, tail: str, num_heads: int
) -> tuple[str, list[int]]:
    """Validates the whole pattern and returns head_offsets as the op's two flat arguments."""
    # this does not use the cached pattern_of: torch.compile traces this function and warns about every lru_cache that it looks through
    pattern = DilatedPattern(lengths, rates, head_offsets, branch_heads, tail)  # type: ignore[arg-type]
    if isinstance(pattern.head_offsets, str):
        return pattern.head_offsets, []
    return "list", [offset for row in pattern.offsets(num_heads) for offset in row]


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Casts the tensors to the autocast dtype if autocast is enabled."""
    # is_autocast_enabled raises for a device without autocast, such as meta
    if not isinstance(q, torch.Tensor) or q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return q, k, v

    def cast(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64:
            return x.to(torch.get_autocast_dtype(x.device.type))
        return x

    return cast(q), cast(k), cast(v)
