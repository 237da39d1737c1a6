"""Runs one document's attention over lists of kept blocks on one backend, cut to its limits, including a gradient of lse.

Layout: q, dout, out (B, Nq, H, D), k and v (B, Nk, K, D), lse and dlse (B, H, Nq).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention.backends.base import Backend, Capabilities, Mask, Options, accumulation_dtype, new_lse, placed
from dilated_attention.engine.branches.launches import problems_at_once
from dilated_attention.engine.branches.run_problems import lse_share
from dilated_attention.pattern.blocks.block_lists import BlockLists

Tensors = tuple[Tensor, ...]


def forward_lists(
    backend: Backend, lists: BlockLists, q: Tensor, k: Tensor, v: Tensor, options: Options, *, front: int = 0, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that ``lists`` keep.

    Args:
        into: where out goes if one launch computes it; otherwise it is another tensor.
        options: options of the whole batch; causality is in the lists.
        front: number of rows by which q starts inside the first query block. Dropout counts these rows, too.
    """
    q = _with_front(q, 1, front)
    assert q.shape[1] == lists.num_queries and k.shape[1] == lists.num_keys
    if not lists.num_entries or not q.shape[0]:
        out, lse = torch.zeros_like(q), new_lse(q).fill_(-torch.inf)
    else:
        cuts = list(_launches(backend.capabilities, lists, (q, k, v), options))
        if into is not None and len(cuts) == 1:
            out, lse = placed(backend.forward(q, k, v, options, lists, out=(into, None)), (into, None))
            return out, lse
        parts = [backend.forward(q[where], k[where], v[where], some_options, some) for where, some, some_options in cuts]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return (out[:, front:], lse[:, :, front:]) if front else (out, lse)


def backward_lists(
    backend: Backend, lists: BlockLists, tensors: Tensors, options: Options, dlse: Tensor | None = None, *, front: int = 0,
    into: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32, of the pairs that ``lists`` keep.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        options, front: same as in ``forward_lists``; so is ``into``, for dq.
    """
    dout, q, k, v, out, lse = tensors
    if options.mask.padding is not None or not lists.fills_every_row:
        # a row without keys must give its scores weight 0; exp(s − (+inf)) does that in every kernel
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dout, q, out = (_with_front(x, 1, front) for x in (dout, q, out))
    lse = _with_front(lse, 2, front, torch.inf)
    dlse = None if dlse is None else _with_front(dlse, 2, front)
    if not lists.num_entries or not q.shape[0]:
        grads: Tensors = tuple(torch.zeros_like(x) for x in (q, k, v))
    else:
        cuts = list(_launches(backend.capabilities, lists, (dout, q, k, v, out), options))
        if into is not None and len(cuts) == 1 and (dlse is None or backend.capabilities.lse_grad):
            views = into, None, None
            return placed(backend.backward(dout, q, k, v, out, lse, options, lists, dlse=dlse, grads=views), views)
        parts = [
            _shares(backend, some, tuple(x[where] for x in (dout, q, k, v, out, lse)), some_options, None if dlse is None else dlse[where])
            for where, some, some_options in cuts
        ]
        grads = parts[0] if len(parts) == 1 else tuple(torch.cat(shares) for shares in zip(*parts, strict=True))
    return (grads[0][:, front:], *grads[1:])


def _shares(backend: Backend, lists: BlockLists, tensors: Tensors, options: Options, dlse: Tensor | None) -> Tensors:
    dout, q, k, v, out, lse = tensors

    native = dlse if backend.capabilities.lse_grad else None
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, options, lists, dlse=native)
    if dlse is None or native is not None:
        return dq, dk, dv
    more_dq, more_dk = lse_share(functools.partial(backend.backward, keys=lists), q, k, lse, dlse, options)
    acc = accumulation_dtype(q.dtype)
    return dq.to(acc) + more_dq, dk.to(acc) + more_dk, dv


def _launches(
    capabilities: Capabilities, lists: BlockLists, tensors: Tensors, options: Options
) -> Iterator[tuple[slice, BlockLists, Options]]:
    """Yields the batch entries of each launch with their lists and options, as many entries as the backend takes at once."""
    B = tensors[0].shape[0]
    size = problems_at_once(B, [(x.stride(0), x.shape[1:], x.stride()[1:]) for x in tensors], capabilities)
    if size == B:
        yield slice(None), lists, options
        return
    for start in range(0, B, size):
        where = slice(start, min(start + size, B))
        yield where, _lists_of(lists, where), _options_of(options, where)


def _lists_of(lists: BlockLists, where: slice) -> BlockLists:
    """Returns the lists of some batch entries."""
    if lists.num_batch == 1:
        return lists
    rows = lists.num_heads * lists.num_rows
    starts = lists.row_starts[where.start * rows : where.stop * rows + 1]
    first, last = int(starts[0]), int(starts[-1])
    return replace(
        lists,
        num_batch=where.stop - where.start,
        row_starts=starts - first,
        columns=lists.columns[first:last],
        masks=None if lists.masks is None else lists.masks[first:last],
    )


def _options_of(options: Options, where: slice) -> Options:
    padding, dropout, bias = options.mask.padding, options.dropout, options.bias
    if padding is not None:
        options = replace(options, mask=Mask(padding[where]))
    if bias is not None:
        options = replace(options, bias=bias.part(where, where))
    if dropout is not None:
        options = replace(
            options, dropout=replace(dropout, batch=dropout.batch[where], queries=dropout.queries[where], keys=dropout.keys[where])
        )
    return options


def _with_front(x: Tensor, dim: int, front: int, value: float = 0.0) -> Tensor:
    """Returns x with ``front`` rows of ``value`` inserted before it along ``dim``."""
    if not front:
        return x
    shape = list(x.shape)
    shape[dim] = front
    return torch.cat([x.new_full(shape, value), x], dim)
