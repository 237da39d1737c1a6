"""Runs a whole call on the kernels that walk a table of tiles (``backends/tiles``): two launches forward, three backward.

Results that wait for the merge or the sum have the same budget as elsewhere (``places.transient_budget``). If they would exceed it, heads
run one group after another. What runs at a time, and the scratch memory it takes, follow from shapes alone and do not need Triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import Result, Views, new_lse, new_results
from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles.table import Extent, counts_of, scratch_bytes
from dilated_attention.engine.branches.launches import Masks, narrowed, without_padding
from dilated_attention.engine.branches.places import input_bytes, layout_of, transient_budget
from dilated_attention.engine.branches.problems import Range, Shape
from dilated_attention.engine.plan import Plan, Tensors, Terms
from dilated_attention.pattern import DilatedPattern

# kinds of passes whose kernels are compiled or being compiled
_started: set[Hashable] = set()


class Share(NamedTuple):
    """Batch entries and query heads that run together, and what their launches have in common (``backends.tiles.call.Prepared``).

    ``whole``: the share covers all of them.
    """

    batch: Range
    heads: Range
    whole: bool
    prepared: Any

    def narrow(self, num_heads: int, *tensors: Tensor) -> Tensors:
        """See ``narrowed``."""
        return tensors if self.whole else narrowed(tensors, num_heads, self.heads, slice(*self.batch))

    def rows(self, x: Tensor) -> Tensor:
        return x if self.whole else x[slice(*self.batch), slice(*self.heads)]


def head_bytes(
    pattern: DilatedPattern, shape: Shape, size: tuple[int, int, int], is_backward: bool, detached: bool, is_saved: bool = False
) -> tuple[int, int]:
    """Returns (bytes of waiting results per head, budget in bytes).

    Args:
        size: see ``Plan``.
        detached: mixing is detached.
        is_saved: the per-branch outputs are saved from forward to backward.
    """
    _, head_dim, itemsize = size
    own, width = detached and pattern.num_branches > 1, head_dim * itemsize
    counts = counts_of(layout_of(pattern, shape, own if is_backward else is_saved, (0, shape.num_heads)).walk, False)
    budget = transient_budget(input_bytes(shape, size))
    if is_backward:
        # dq, dk, dv and per-branch outputs; δ and lse of each row
        return counts.num_places * width * (3 + own) + counts.all_places * 8, budget
    return counts.num_places * (width + 4), budget


def split_of(plan: Plan) -> tuple[int, tuple[Range, ...]]:
    """Returns (batch entries, query heads) that run at a time: all if the waiting results fit the budget, else heads of one batch entry."""
    B, H = plan.size[0], plan.shape.num_heads
    row_bytes, budget = head_bytes(plan.pattern, plan.shape, plan.size, plan.is_backward, plan.is_detached, plan.is_saved)
    # with saved outputs both passes run everything at once
    if plan.is_saved or B * H * row_bytes <= budget:
        return B, ((0, H),)
    group = H // plan.shape.num_kv_heads
    count = min(H, max(1, budget // max(1, group * row_bytes)) * group)
    return 1, tuple([(h, min(h + count, H)) for h in range(0, H, count)])


def ranges_of(plan: Plan) -> tuple[tuple[Range, Range], ...]:
    """Returns the batch entries and query heads of each share."""
    entries, heads = split_of(plan)
    return tuple([((b, b + entries), part) for b in range(0, max(1, plan.size[0]), max(1, entries)) for part in heads])


def shares_of(plan: Plan, device: torch.device) -> tuple[Share, ...]:
    """Returns the shares that run one after another, each with the data its launches have in common."""
    # what follows needs Triton
    from dilated_attention.backends.tiles.backend import float32_precision
    from dilated_attention.backends.tiles.call import TileCall, prepared

    shape, pattern = plan.shape, plan.pattern
    left, right = shape.window or (None, None)
    if shape.is_causal:
        right = 0
    zero_keys, keeps_parts = pattern.tail == "zero_keys" and not shape.is_causal, plan.is_detached if plan.is_backward else plan.is_saved
    precision = float32_precision() if plan.dtype is torch.float32 else "ieee"
    group, ranges, shares = shape.num_heads // shape.num_kv_heads, ranges_of(plan), []
    for batch, heads in ranges:
        layout = layout_of(pattern, shape, keeps_parts, heads)
        call = TileCall(layout.walk, layout.offsets, plan.options.scale, left, right, zero_keys, precision)
        made = prepared(call, batch[1] - batch[0], (heads[1] - heads[0]) // group, plan.size[1], plan.dtype, device)
        shares.append(Share(batch, heads, len(ranges) == 1, made))
    return tuple(shares)


def compile_ahead(plan: Plan, tensors: Tensors, has_padding: bool) -> bool:
    """Starts compiling all kernels of a plan for tensors like these: a run on meta tensors does. Returns whether it did; for a plan of a
    kind it does so once."""
    shape, q = plan.shape, tensors[0]
    kind = (
        plan.pattern, shape.num_heads, shape.num_kv_heads, shape.is_causal, tuple([side is None for side in shape.window or ()]),
        shape.is_cut, len(shape.documents) > 1, has_padding, plan.is_detached, plan.is_backward,
        plan.settings.needs_grad, plan.is_saved, plan.size[1], q.dtype, q.device,
    )  # fmt: skip
    # the words of dropout are drawn by a kernel that takes no meta tensors; a bias is rare
    if q.device.type != "cuda" or plan.settings.dropout_p or plan.settings.bias or kind in _started:
        return False
    _started.add(kind)
    q, k, v, *dout = (torch.empty_strided(x.shape, x.stride(), dtype=q.dtype, device="meta") for x in tensors[: 3 + plan.is_backward])
    masks = Masks(torch.empty(k.shape[:2], dtype=torch.bool, device="meta") if has_padding else None)
    rehearsed, saved = replace(plan, made={}), q.new_empty(0) if plan.is_saved else None
    with on_device(tensors[0].device):
        if plan.is_backward:
            backward(rehearsed, (*dout, q, k, v, q.new_empty(q.shape), new_lse(q)), masks, None, saved)
        else:
            forward(rehearsed, q, k, v, masks, saved)
    return True


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, masks: Masks, saved: Tensor | None, into: Views | None = None) -> Result:
    k, v = without_padding(k, v, masks.padding)
    (out,) = new_results(into, (q,))
    lse = new_lse(q)
    for share in plan.once("shares", lambda: shares_of(plan, q.device)):
        _forward(plan, share, share.narrow(q.shape[2], q, k, v, out), share.rows(lse), masks, saved)
    return out, lse


def backward(plan: Plan, tensors: Tensors, masks: Masks, dlse: Tensor | None, saved: Tensor | None, into: Views | None = None) -> Tensors:
    from dilated_attention.backends.tiles import run

    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, masks.padding)
    grads = new_results(into, (q, k, v))
    for share in plan.once("shares", lambda: shares_of(plan, q.device)):
        p = share.prepared
        dout_, q_, k_, v_, out_, dq, dk, dv = share.narrow(q.shape[2], dout, q, k, v, out, *grads)
        lse_, dlse_ = share.rows(lse), None if dlse is None else share.rows(dlse)
        parts = saved if plan.is_detached else None
        if plan.is_detached and parts is None:
            parts = q.new_empty(p.batch * p.num_heads * p.part_rows * p.head_dim)
            _forward(plan, share, (q_, k_, v_, out_.new_empty(out_.shape)), lse_.new_empty(lse_.shape), masks, parts)
        run.backward(p, (dout_, q_, k_, v_, out_, lse_), dlse_, (dq, dk, dv), parts=parts, **_masks_of(plan, share, masks))
    return grads


def _forward(plan: Plan, share: Share, tensors: Tensors, lse: Tensor, masks: Masks, parts: Tensor | None) -> None:
    from dilated_attention.backends.tiles import run

    q, k, v, out = tensors
    run.forward(share.prepared, q, k, v, out, lse, parts=parts, **_masks_of(plan, share, masks))


def _masks_of(plan: Plan, share: Share, masks: Masks) -> dict[str, Any]:
    """Returns a share's padding, the words of its queries and keys that decide dropout (``backends/dropout.py``), and its bias."""
    p, dropout_p, words = share.prepared, plan.settings.dropout_p, None
    if dropout_p:
        from dilated_attention.backends.dropout_triton import dropout_words

        words = dropout_words(
            masks.seed, p.batch, p.num_heads, p.num_queries, p.device, position_offset=plan.position_offset + p.q_first,
            num_keys=p.num_keys, key_position_offset=plan.position_offset, first_head=plan.first_head + share.heads[0],
            first_batch=share.batch[0],
        )  # fmt: skip
    padding = None if masks.padding is None else masks.padding[slice(*share.batch)]
    bias = masks.bias
    if bias is not None:
        batch = slice(*share.batch)
        bias = bias.part(batch, batch, slice(*share.heads))
    return {"padding": padding, "words": words, "dropout_p": dropout_p, "bias": bias}


def terms(plan: Plan) -> Terms:
    (_, head_dim, itemsize), shape = plan.size, plan.shape
    own, is_saved, dropout, bias = plan.is_detached, plan.is_saved, plan.settings.dropout_p > 0, bool(plan.settings.bias)
    num_queries = shape.queries[1] - shape.queries[0]
    queries_and_keys = 2 * num_queries + shape.keys[1] - shape.keys[0]
    most = 0
    # all batch entries take the same amount
    B, shares = split_of(plan)
    for heads in shares:
        layout = layout_of(plan.pattern, shape, own if plan.is_backward else is_saved, heads)
        H = heads[1] - heads[0]
        extent = Extent.of(layout.walk, layout.shared, B, H, H * shape.num_kv_heads // shape.num_heads, head_dim)
        size = forward = scratch_bytes(extent.forward(plan.dtype, is_saved=is_saved or (own and plan.is_backward)))
        if plan.is_backward:
            size = scratch_bytes(extent.backward(plan.dtype, dropout=dropout, bias=bias))
            if own and not is_saved:
                # the per-branch outputs are recomputed, along with a result and an lse that are not used
                size = extent.own_outputs() * itemsize + max(size, forward + B * H * num_queries * (head_dim * itemsize + 4))
        # dropout words: two per query, one per key; places of queries and of keys
        most = max(most, size + 4 * B * H * queries_and_keys * dropout + 8 * B * (queries_and_keys - num_queries) * bias)
    return [("scratch of the tiles", most)]
