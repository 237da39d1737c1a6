"""Runs a whole call on the kernels that walk a table of tiles (``backends/tiles``): two launches forward, three backward."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention.backends.dropout import Words
from dilated_attention.backends.dropout_triton import dropout_words
from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles import run as tiles
from dilated_attention.backends.tiles.backend import float32_precision
from dilated_attention.backends.tiles.call import Prepared, TileCall, prepared
from dilated_attention.engine.branches.launch_views import Call, Into, results_like
from dilated_attention.engine.branches.plan import Range, Shape
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.kernels.tiles_layout import layout_of, ranges_of
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[Tensor, ...]
# kinds of passes whose kernels are compiled or being compiled
_started: set[Hashable] = set()


@dataclass(frozen=True, slots=True)
class Share:
    """Batch entries and query heads that run together. ``whole``: the share covers all of them."""

    batch: Range
    heads: Range
    whole: bool
    prepared: Prepared


@functools.lru_cache(maxsize=256)
def tile_call(pattern: DilatedPattern, shape: Shape, scale: float, keeps_parts: bool, precision: str, heads: Range) -> TileCall:
    """Returns the call of query heads [first, last)."""
    # clamp the window to the sequence, so that one compiled kernel serves windows of any width
    left, right = (None if side is None else min(side, shape.keys[1]) for side in shape.window or (None, None))
    if shape.is_causal:
        right = 0 if right is None else min(right, 0)
    layout = layout_of(pattern, shape, keeps_parts, heads)
    zero_keys = pattern.tail == "zero_keys" and not shape.is_causal
    return TileCall(layout.walk, layout.offsets, scale, left, right, zero_keys, precision)


def make_shares(
    pattern: DilatedPattern, shape: Shape, q: Tensor, k: Tensor, call: Call, *, is_backward: bool, is_saved: bool
) -> tuple[Share, ...]:
    """Returns the shares that run one after another (``tiles_layout.ranges_of``), each with the data its launches have in common.

    Args:
        is_saved: the per-branch outputs are saved from forward to backward.
    """
    B, _, H, D = q.shape
    keeps_parts = call.detached and pattern.num_branches > 1 if is_backward else is_saved
    precision = float32_precision() if q.dtype is torch.float32 else "ieee"
    group = H // shape.num_kv_heads
    ranges = ranges_of(pattern, shape, B, D, q.dtype, is_backward=is_backward, detached=call.detached, is_saved=is_saved)
    shares = []
    for batch, heads in ranges:
        found = tile_call(pattern, shape, call.options.scale, keeps_parts, precision, heads)
        # the documents of a batch do not recur, so caching would not help
        make = prepared if len(shape.documents) == 1 else Prepared
        made = make(found, batch[1] - batch[0], (heads[1] - heads[0]) // group, D, q.dtype, q.device)
        shares.append(Share(batch, heads, len(ranges) == 1, made))
    return tuple(shares)


def compile_ahead(pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call, *, is_backward: bool, is_saved: bool) -> None:
    """Starts compiling all kernels of a pass over tensors like these, unless it did so for one of the kind: a run on meta tensors does."""
    *_, dtype, device = kind = (
        pattern, shape.num_heads, shape.num_kv_heads, shape.is_causal, shape.window is None, shape.is_cut, len(shape.documents) > 1,
        call.padding is None, call.detached, is_backward, is_saved, tensors[0].shape[-1], tensors[0].dtype, tensors[0].device,
    )  # fmt: skip
    # the words of dropout are drawn by a kernel that takes no meta tensors
    if device.type != "cuda" or call.dropout_p or kind in _started:
        return
    _started.add(kind)
    *dout, q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta") for x in tensors[: 3 + is_backward])
    if call.padding is not None:
        call = replace(call, padding=call.padding.to("meta"))
    shares = make_shares(pattern, shape, q, k, call, is_backward=is_backward, is_saved=is_saved)
    saved = q.new_empty(0) if is_saved else None
    with on_device(device):
        if is_backward:
            out = torch.empty(q.shape, dtype=dtype, device="meta")
            lse = out.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
            backward(shares, (*dout, q, k, v, out, lse), call, None, saved)
        else:
            forward(shares, q, k, v, call, saved)


def forward(
    shares: tuple[Share, ...], q: Tensor, k: Tensor, v: Tensor, call: Call, saved_branch_outputs: Tensor | None, into: Into | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D), lse (B, H, Nq)), contiguous. ``saved_branch_outputs`` receives the branches' outputs for ``backward``."""
    k, v = without_padding(k, v, call.padding)
    (out,) = results_like((q,), into)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    for share in shares:
        _forward(share, _narrow(share, q.shape[2], q, k, v, out), _rows_of(share, lse), call, saved_branch_outputs)
    return out, lse


def backward(
    shares: tuple[Share, ...], tensors: Tensors, call: Call, dlse: Tensor | None, saved_branch_outputs: Tensor | None,
    into: Into | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (dq, dk, dv) in the inputs' dtype.

    Args:
        tensors: dout, q, k, v, out (B, N, H, D) and lse (B, H, Nq).
        dlse: gradient of lse (B, H, Nq).
        saved_branch_outputs: the per-branch outputs as ``forward`` left them. If None, detached mixing recomputes them.
    """
    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, call.padding)
    grads = results_like((q, k, v), into)
    for share in shares:
        p = share.prepared
        dout_, q_, k_, v_, out_, dq, dk, dv = _narrow(share, q.shape[2], dout, q, k, v, out, *grads)
        lse_, dlse_ = _rows_of(share, lse), None if dlse is None else _rows_of(share, dlse)
        parts = None
        if call.detached and p.call.walk.num_branches > 1:
            parts = saved_branch_outputs
            if parts is None:
                parts = q.new_empty(p.batch * p.num_heads * p.part_rows * p.head_dim)
                _forward(share, (q_, k_, v_, out_.new_empty(out_.shape)), lse_.new_empty(lse_.shape), call, parts)
        padding, words = _padding(call, share), _words(call, share)
        tiles.backward(
            p, (dout_, q_, k_, v_, out_, lse_), dlse_, (dq, dk, dv), parts=parts, padding=padding, words=words, dropout_p=call.dropout_p
        )
    dq, dk, dv = grads
    return dq, dk, dv


def _forward(share: Share, tensors: Tensors, lse: Tensor, call: Call, parts: Tensor | None = None) -> None:
    q, k, v, out = tensors
    padding, words = _padding(call, share), _words(call, share)
    tiles.forward(share.prepared, q, k, v, out, lse, parts=parts, padding=padding, words=words, dropout_p=call.dropout_p)


def _narrow(share: Share, num_heads: int, *tensors: Tensor) -> Tensors:
    """Returns views of a share's batch entries and heads, or of the corresponding key/value heads where a tensor has only those."""
    if share.whole:
        return tensors
    return tuple(x[slice(*share.batch), :, slice(*(h * x.shape[2] // num_heads for h in share.heads))] for x in tensors)


def _rows_of(share: Share, x: Tensor) -> Tensor:
    return x if share.whole else x[slice(*share.batch), slice(*share.heads)]


def _padding(call: Call, share: Share) -> Tensor | None:
    return None if call.padding is None else call.padding[slice(*share.batch)]


def _words(call: Call, share: Share) -> Words | None:
    """Returns the words of a share's queries and keys that decide dropout (``backends/dropout.py``)."""
    if not call.dropout_p:
        return None
    p = share.prepared
    return dropout_words(
        call.seed,
        p.batch,
        p.num_heads,
        p.num_queries,
        p.device,
        position_offset=call.position_offset + p.q_first,
        num_keys=p.num_keys,
        key_position_offset=call.position_offset,
        first_head=call.first_head + share.heads[0],
        first_batch=share.batch[0],
    )
