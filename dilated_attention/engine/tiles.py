"""A whole call on the kernels that walk a table of tiles (``backends/tiles``): two launches forward, three backward.

What waits for the merge or the sum is bounded as elsewhere (``chunks.transient_budget``): where it would be more, heads run in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from dilated_attention.backends.dropout import Words
from dilated_attention.backends.dropout_triton import dropout_words
from dilated_attention.backends.tiles import run as tiles
from dilated_attention.backends.tiles.run import Prepared, TileCall
from dilated_attention.backends.tiles.table import Walk, make_spans
from dilated_attention.backends.triton_tiles import float32_precision
from dilated_attention.engine.chunks import transient_budget
from dilated_attention.engine.plan import Range, Shape
from dilated_attention.engine.run import Call
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# batch entries and heads that run together
Share = tuple[Range, Range]


@functools.lru_cache(maxsize=1024)
def tile_call(pattern: DilatedPattern, shape: Shape, scale: float, keeps_parts: bool, precision: str, heads: Range) -> TileCall:
    """The call of query heads [first, last)."""
    rows = tuple(row[slice(*heads)] for row in pattern.offsets(shape.num_heads))
    left, right = shape.window or (None, None)
    if shape.is_causal:
        right = 0 if right is None else min(right, 0)
    documents = tuple(document for document in shape.documents if document[0] < document[1])
    everywhere = [b for b, (_, rate) in enumerate(pattern.branches) if rate == 1 and NOT_IN_BRANCH not in rows[b]]
    group = shape.num_heads // shape.num_kv_heads
    shared = all(len(set(row[h : h + group])) == 1 for row in rows for h in range(0, len(row), group))
    direct = everywhere[0] if everywhere and not keeps_parts else -1
    key_direct = everywhere[0] if everywhere and shared else -1
    walk = Walk(pattern.branches, documents, shape.queries, direct, key_direct)
    zero_keys = pattern.tail == "zero_keys" and not shape.is_causal
    return TileCall(walk, rows, scale, left, right, zero_keys, keeps_parts, precision)


def forward(
    pattern: DilatedPattern, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, Nq, H, D), lse (B, H, Nq)), contiguous. ``kept``: filled with the branches' own outputs for ``backward``."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    for share in _shares(pattern, shape, q, k, 1, whole=kept is not None):
        p = _prepared(pattern, shape, q, k, call, share, kept is not None)
        _forward(p, _narrow(share, shape, q, k, v, out), _rows_of(share, lse), call, share, kept)
    return out, lse


def backward(
    pattern: DilatedPattern, shape: Shape, tensors: Tensors, call: Call, dlse: torch.Tensor | None, kept: torch.Tensor | None = None
) -> Tensors:
    """(dq, dk, dv) in the inputs' dtype. ``tensors``: dout, q, k, v, out (B, N, H, D), lse (B, H, Nq), as ``dlse``.

    Args:
        kept: the branches' own outputs as ``forward`` left them; None: detached mixing makes them again.
    """
    dout, q, k, v, out, lse = tensors
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    own = call.detached and pattern.num_branches > 1
    for share in _shares(pattern, shape, q, k, 3 + own, whole=kept is not None):
        p = _prepared(pattern, shape, q, k, call, share, own)
        dout_, q_, k_, v_, out_, dq, dk, dv = _narrow(share, shape, dout, q, k, v, out, *grads)
        lse_ = _rows_of(share, lse)
        parts = kept if own else None
        if own and parts is None:
            parts = _forward(p, (q_, k_, v_, torch.empty_like(out_)), torch.empty_like(lse_), call, share)
        tiles.backward(
            p, dout_, q_, k_, v_, out_, lse_, None if dlse is None else _rows_of(share, dlse), (dq, dk, dv),
            parts=parts, padding=_padding(call, share), words=_words(p, call, share), dropout_p=call.dropout_p,
        )  # fmt: skip
    return grads


def num_places(pattern: DilatedPattern, shape: Shape, needs_direct: bool) -> int:
    """Rows of one head that wait for the merge."""
    call = tile_call(pattern, shape, 1.0, needs_direct, "ieee", (0, shape.num_heads))
    return make_spans(call.walk, False).num_places


def _forward(p: Prepared, tensors: Tensors, lse: torch.Tensor, call: Call, share: Share, parts: torch.Tensor | None = None) -> torch.Tensor:
    words, padding = _words(p, call, share), _padding(call, share)
    q, k, v, out = tensors
    return tiles.forward(p, q, k, v, out, lse, parts=parts, padding=padding, words=words, dropout_p=call.dropout_p)


def _prepared(
    pattern: DilatedPattern, shape: Shape, q: torch.Tensor, k: torch.Tensor, call: Call, share: Share, keeps_parts: bool
) -> Prepared:
    (first, last), heads = share
    precision = float32_precision() if q.dtype is torch.float32 else "ieee"
    found = tile_call(pattern, shape, call.options.scale, keeps_parts, precision, heads)
    kv_heads = (heads[1] - heads[0]) * shape.num_kv_heads // shape.num_heads
    return tiles.prepared(found, last - first, kv_heads, q.shape[3], q.dtype, q.device)


def _shares(pattern: DilatedPattern, shape: Shape, q: torch.Tensor, k: torch.Tensor, copies: int, whole: bool) -> Iterator[Share]:
    """All at once where what waits fits the budget, else some heads of one batch entry at a time."""
    B, _, H, D = q.shape
    row_bytes = num_places(pattern, shape, copies == 4 or whole) * (D * q.element_size() + 4) * copies
    budget = transient_budget((q.numel() + 2 * k.numel()) * q.element_size())
    if whole or B * H * row_bytes <= budget:
        yield (0, B), (0, H)
        return
    group = H // shape.num_kv_heads
    count = min(H, max(1, budget // max(1, group * row_bytes)) * group)
    for b in range(B):
        for h in range(0, H, count):
            yield (b, b + 1), (h, min(h + count, H))


def _narrow(share: Share, shape: Shape, *tensors: torch.Tensor) -> Tensors:
    """Views of a share's batch entries and heads; of the key/value heads where a tensor has only those."""
    (first, last), heads = share
    if last - first == tensors[0].shape[0] and heads == (0, shape.num_heads):
        return tensors
    return tuple(x[first:last, :, slice(*(h * x.shape[2] // shape.num_heads for h in heads))] for x in tensors)


def _rows_of(share: Share, x: torch.Tensor) -> torch.Tensor:
    (first, last), heads = share
    return x[first:last, slice(*heads)]


def _padding(call: Call, share: Share) -> torch.Tensor | None:
    return None if call.padding is None else call.padding[slice(*share[0])]


def _words(p: Prepared, call: Call, share: Share) -> Words | None:
    """Words of the queries and keys of a share, by which dropout decides (``backends/dropout.py``)."""
    if not call.dropout_p:
        return None
    (first_batch, _), (first_head, _) = share
    return dropout_words(
        call.seed,
        p.batch,
        p.num_heads,
        p.num_queries,
        p.device,
        origin=call.origin + p.q_first,
        num_keys=p.num_keys,
        key_origin=call.origin,
        first_head=call.first_head + first_head,
        first_batch=first_batch,
    )
