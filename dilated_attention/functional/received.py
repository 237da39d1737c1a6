"""``attention_received``: how much attention every key receives from all queries, at the cost of one attention forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.engine.ops.transforms import refuse_transforms
from dilated_attention.functional.arguments import autocast
from dilated_attention.functional.block_sparse import block_sparse_attention, block_sparse_dilated_attention
from dilated_attention.functional.maps import WAY_OUT, checked_patterns
from dilated_attention.functional.options import BranchOptions, MapOptions, Options, check_names, shows_options
from dilated_attention.functional.single import attention, dilated_attention


@shows_options
def attention_received(
    q: torch.Tensor, k: torch.Tensor, segment_lengths: Any = None, dilation_rates: Any = None, *, query_weights: torch.Tensor | None = None,
    pattern: Any = None, average_heads: bool = False, dtype: torch.dtype | None = None, backend: str = "auto",
    **options: Unpack[MapOptions],
) -> torch.Tensor:  # fmt: skip
    """Returns the sum of every key's attention weights over all queries, as a heat map of a slide or a document shows it.

        a_h(j) = Σ_i g_i p_h(i, j),    p_h(i, j) as in ``attention_map``

    No weight is stored: a is the gradient of Σ_i g_i out_h(i) with respect to the values. So one forward and one backward of attention
    compute it, on the same backends, in their time and in memory that grows with N. This is for inspection: it has no gradient.

    Args:
        q, k, segment_lengths, dilation_rates, pattern, average_heads, options: see ``attention_map``.
        query_weights: g (B, Nq), real numbers, such as 0 for queries that are padding (``key_padding_mask`` hides keys alone), 1/Nq for a
            mean, or 1 for the queries of a region; None: 1 for all.
        dtype: the dtype in which q and k are passed to the kernels; None for float32 (float64 for float64). Half precision is several
            times faster on a GPU, but each weight and each a is then rounded to it (float16 holds sums up to 65504).
        backend: see ``dilated_attention``; it must have a backward.

    Returns:
        (B, H, Nk), or (B, Nk) with ``average_heads``, in float32 (float64 for float64). Without ``query_weights`` its sum over the keys is
        the number of queries that have any key, less the weight of zero keys with ``tail="zero_keys"`` and of sinks.

    Raises:
        ValueError, TypeError: bad input.
        BackendUnavailable: no backend can compute this, or the named one cannot.
        NotImplementedError: a torch.func transform or forward-mode AD asks for a derivative or maps over the call.

    >>> heat = attention_received(q, k, [1024, 4096], [1, 4], average_heads=True)
    >>> heat / q.shape[1]  # (B, N), sums to 1
    """
    check_names("attention_received", options)
    given = Options(**options)
    refuse_transforms("attention_received", WAY_OUT, q, k, query_weights, given.sinks)
    q, k, _ = autocast(q, k, k)
    check.check_tensors(q, k, k)
    check.check_bool("average_heads", average_heads)
    H = q.shape[2]
    branches, blocks = checked_patterns(segment_lengths, dilation_rates, pattern, given, q)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    if dtype is not None and dtype not in check.DTYPES:
        raise ValueError(f"dtype is {dtype}; expected one of float16, bfloat16, float32, float64, or None for {wide}")
    weights = _checked_weights(query_weights, q)
    call: dict[str, Any] = {name: value for name, value in options.items() if name not in BranchOptions.__annotations__}
    call["backend"] = backend
    # the caller's inference mode would make a backward impossible, and the caller's autocast would round the tensors
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        q, k = (_ordinary(x, wide if dtype is None else dtype) for x in (q, k))
        for name in ("cu_seqlens", "key_padding_mask"):
            if isinstance(call.get(name), torch.Tensor):
                call[name] = _ordinary(call[name], call[name].dtype)
        if given.sinks is not None:
            check.check_sinks(given.sinks, q)
            call["sinks"] = _ordinary(given.sinks, torch.promote_types(given.sinks.dtype, q.dtype))
        # one value head per query head gives one gradient per query head; the gradient does not depend on what the values hold
        k = k.repeat_interleave(H // k.shape[2], dim=2) if k.shape[2] != H else k
        if branches is not None:
            call |= {name: getattr(branches, name) for name in BranchOptions.__annotations__}

        def attend(v: torch.Tensor) -> Any:
            if branches is None:
                return attention(q, k, v, **call) if blocks is None else block_sparse_attention(q, k, v, blocks, **call)
            dilated = (branches.segment_lengths, branches.dilation_rates)
            if blocks is None:
                return dilated_attention(q, k, v, *dilated, **call)
            return block_sparse_dilated_attention(q, k, v, *dilated, blocks, **call)

        # a transform around this call does not allow requires_grad_, so vjp is used
        out, pull = torch.func.vjp(attend, k)  # type: ignore[misc]
        dout = torch.ones_like(out) if weights is None else _ordinary(weights, out.dtype)[:, :, None, None].expand_as(out).contiguous()
        (received,) = pull(dout)
    # the sum is the same in every dimension of a head
    result = received[..., 0].transpose(1, 2).to(wide)
    return result.mean(1) if average_heads else result.contiguous()


def _ordinary(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x in ``dtype``, as a tensor that autograd can save."""
    x = x.detach().to(dtype)
    return x.clone() if x.is_inference() else x


def _checked_weights(weights: Any, q: torch.Tensor) -> torch.Tensor | None:
    if weights is None:
        return None
    if not isinstance(weights, torch.Tensor):
        raise check.not_a_tensor("query_weights", weights, "a tensor of shape (batch, queries), or None")
    if tuple(weights.shape) != tuple(q.shape[:2]):
        raise ValueError(f"query_weights has shape {tuple(weights.shape)}; expected (batch, queries) = {tuple(q.shape[:2])}")
    if weights.is_complex():
        raise TypeError(f"query_weights has dtype {weights.dtype}; expected real numbers")
    return weights.to(q.device)
