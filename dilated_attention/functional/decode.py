"""``decode_attention``: one new query for each of many requests, over cached keys and values."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.backends import AttentionRequest, Hardware
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import hardware_of
from dilated_attention.engine.decode import dispatch as select
from dilated_attention.engine.decode.dispatch import Explained
from dilated_attention.engine.decode.keys import Cached, row_keys
from dilated_attention.engine.ops.transforms import refuse_transforms
from dilated_attention.functional.options import DecodeOptions, check_names, shows_options
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import as_int


@shows_options
@torch.no_grad()
def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, pattern: DilatedPattern | BlockPattern | None = None, *,
    window: int | None = None, page_table: torch.Tensor | None = None, max_length: int | None = None, backend: str = "auto",
    **options: Unpack[DecodeOptions],
) -> Any:  # fmt: skip
    """Computes the row of causal attention at each request's position, equal to that row of the forward over the whole sequence.

    Reads only the keys that the pattern keeps for this row, directly from the cache, without a copy. On CUDA it does not wait for the
    GPU, except that block patterns other than windows read ``positions`` on the host.

    Args:
        q: queries (B, 1, H, D), one per request; apply rotary embedding to them if it was applied to the keys.
        k, v: the cache. Position p of request b is stored at k[b, p % C] of k (B, C, Hk, D), or with ``page_table`` at
            k[page_table[b, p // C], p % C] of k (pages, C, Hk, D). Keys up to and including the query's own must be stored there.
        positions: (B,) integers, the position of each query.
        pattern: which keys each query attends to, causally; None for every key up to the query.
        window: only without a pattern: attend to the query's own key and this many keys before it.
        page_table: (B, pages of a request) int32. Where no row reads, any number may stand, e.g. −1.
        max_length: an upper bound: all positions are below it. None for the capacity: C, or all pages of a request. If it exceeds C,
            slots are reused, which the pattern must allow: it may read no more than the last C positions.
        backend: ``"auto"`` · ``"flash3"``: FlashAttention-3 (dense rows; Hopper) · ``"triton"`` · ``"torch"``; a name is used or refused.
        options: scale, sinks, return_lse: see ``functional.CallOptions``.

    Returns:
        out (B, 1, H, D) in q's dtype; with ``return_lse`` (out, lse (B, H, 1)), lse in float32 (float64 for float64). A row without keys
        is 0 with lse −inf (with sinks sink_h). There are no gradients.

    Raises:
        ValueError, TypeError: the tensors do not fit together, or a block pattern is not ``is_prefix_stable``.
        BackendUnavailable: the named backend cannot do this; the message lists every reason.
        NotImplementedError: a torch.func transform or forward-mode AD asks for a derivative or maps over the call.

    >>> pattern = DilatedPattern((2048, 8192), (1, 4))
    >>> lengths = torch.tensor([100, 7])
    >>> out = decode_attention(q, cache_k, cache_v, lengths, pattern)
    >>> # a cache of 8,192 slots, which are used again, for sequences of up to 2^20
    >>> out = decode_attention(q, cache_k, cache_v, lengths, pattern, max_length=2**20)
    """
    check_names("decode_attention", options)
    sinks, return_lse = options.get("sinks"), check.check_bool("return_lse", options.get("return_lse", False))
    way_out = "pass detached tensors outside of vmap, in one call for all requests; for derivatives call the forward with query_offset"
    refuse_transforms("decode_attention", way_out, q, k, v, positions, page_table, sinks)
    _check_tensors(q, k, v, positions, page_table)
    check.check_sinks(sinks, q)
    slots, B = k.shape[1], q.shape[0]
    holds = slots if page_table is None else slots * page_table.shape[1]
    max_length = holds if max_length is None else as_int("max_length", max_length, minimum=1)
    select.check_name(backend)
    if window is not None:
        window = as_int("window", window, minimum=0)
        if pattern is not None:
            raise ValueError(f"window is {window} and a pattern is given too; give one of them, e.g. the pattern LocalWindow({window})")
    scale = check.check_scale(options.get("scale"), q.shape[3], q.dtype)
    keys = row_keys(pattern, q.shape[2], k.shape[2], max_length, q.device, window=window)
    if max_length > holds and (page_table is not None or keys.span > slots):
        what = "whose table has pages for" if page_table is not None else "of"
        raise ValueError(
            f"max_length is {max_length} with a cache {what} {holds} positions, and rows read up to {keys.span} positions back; "
            f"give the cache at least {min(keys.span, max_length)} slots per request"
        )
    if not torch.compiler.is_compiling() and positions.device.type == "cpu" and B:
        lowest, highest = int(positions.min()), int(positions.max())
        if lowest < 0 or highest >= max_length:
            raise ValueError(
                f"positions reach from {lowest} to {highest}; expected 0 to max_length − 1 = {max_length - 1}: give as max_length how long "
                "the sequences may become, if the cache keeps their last positions alone"
            )
    if B:
        if isinstance(pattern, BlockPattern):
            keys.prepare(positions.tolist())
        runs = keys.runs(positions.to(device=q.device, dtype=torch.int64))
        cached = Cached(k, v, page_table, wraps=max_length > holds)
        out, lse = select.decode(q[:, 0], cached, runs, scale, backend, sinks)
    else:
        # no request, no row
        out, lse = torch.zeros_like(q[:, 0]), q.new_zeros((0, q.shape[2]), dtype=accumulation_dtype(q.dtype))
    return (out[:, None], lse[..., None]) if return_lse else out[:, None]


def explain_decode(
    *,
    device: torch.device | str | None = None,
    hardware: Hardware | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    dense: bool = False,
    backend: str = "auto",
) -> Explained:
    """Returns a printable explanation: which decoder such a call uses, and every reason against the others.

    Args:
        dense: whether rows read every key before them.
    """
    select.check_name(backend)
    machine, dtype = hardware_of(device, hardware), check.check_dtype(dtype)
    head_dim, num_heads, num_kv_heads = check.check_counts(head_dim, num_heads, num_kv_heads)
    request = AttentionRequest(hardware=machine, dtype=dtype, head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return select.explain(request, check.check_bool("dense", dense), backend)


def _check_tensors(q: Any, k: Any, v: Any, positions: Any, page_table: Any) -> None:
    # a paged cache has another batch size than q, so only the first entries are checked together
    check.check_tensors(*(x[:1] if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in (q, k, v)))
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v has {tuple(v.shape)}; they must be equal")
    B = q.shape[0]
    if q.shape[1] != 1:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected one query per request, (B, 1, H, D): for more use query_offset of the forward"
        )
    if k.shape[1] < 1:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected at least one slot")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has strides {x.stride()}; expected the last one to be 1: a cache is not copied")
    _check_integers("positions", positions, (torch.int32, torch.int64), f"int64 tensor of shape (B,) = ({B},)")
    if tuple(positions.shape) != (B,):
        raise ValueError(f"positions has shape {tuple(positions.shape)}; expected one position per request, ({B},)")
    if page_table is None:
        if k.shape[0] != B:
            raise ValueError(f"q has {B} requests and k has {k.shape[0]}; they must be equal unless the cache is paged: give page_table")
        return
    _check_integers("page_table", page_table, (torch.int32,), "int32 tensor of shape (B, pages of a request)")
    if page_table.ndim != 2 or page_table.shape[0] != B or page_table.device != q.device:
        raise ValueError(
            f"page_table has shape {tuple(page_table.shape)} on {page_table.device}; expected ({B}, pages of a request) on {q.device}"
        )


def _check_integers(name: str, x: Any, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype if isinstance(x, torch.Tensor) else type(x).__name__}; expected an {expected}")
