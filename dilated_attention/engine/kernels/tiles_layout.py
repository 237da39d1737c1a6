"""Decides what a call on tiles computes at a time, and how much scratch memory it takes, from shapes alone and without Triton.

Results that wait for the merge or the sum have the same budget as elsewhere (``chunking.transient_budget``). If they would exceed it, heads
run one group after another.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dilated_attention.backends.tiles.scratch import Extent, scratch_bytes
from dilated_attention.backends.tiles.table import Walk, make_spans
from dilated_attention.engine.branches.chunking import transient_budget
from dilated_attention.engine.branches.plan import Range, Shape
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern


class TilesLayout(NamedTuple):
    """The layout of some query heads: walk, offset of each branch and head, and whether query heads of one key head read the same keys."""

    walk: Walk
    offsets: tuple[tuple[int, ...], ...]
    shared: bool


@functools.lru_cache(maxsize=256)
def layout_of(pattern: DilatedPattern, shape: Shape, keeps_parts: bool, heads: Range) -> TilesLayout:
    """Returns the layout of query heads [first, last). With ``keeps_parts``, per-branch outputs are saved, so no branch is direct."""
    rows = tuple(row[slice(*heads)] for row in pattern.offsets(shape.num_heads))
    documents = tuple(document for document in shape.documents if document[0] < document[1])
    everywhere = [b for b, (_, rate) in enumerate(pattern.branches) if rate == 1 and NOT_IN_BRANCH not in rows[b]]
    group = shape.num_heads // shape.num_kv_heads
    shared = all(len(set(row[h : h + group])) == 1 for row in rows for h in range(0, len(row), group))
    direct = everywhere[0] if everywhere and not keeps_parts else -1
    key_direct = everywhere[0] if everywhere and shared else -1
    return TilesLayout(Walk(pattern.branches, documents, shape.queries, direct, key_direct), rows, shared)


def num_places(pattern: DilatedPattern, shape: Shape) -> int:
    """Returns the number of output rows of one head over all branches, if every branch has a separate output."""
    return make_spans(layout_of(pattern, shape, True, (0, shape.num_heads)).walk, False).num_places


def ranges_of(
    pattern: DilatedPattern, shape: Shape, batch: int, head_dim: int, dtype: torch.dtype, *, is_backward: bool, detached: bool,
    is_saved: bool,
) -> tuple[tuple[Range, Range], ...]:  # fmt: skip
    """Returns (batch entries, query heads) that run at a time: all if the waiting results fit the budget, else heads of one batch entry.

    Args:
        detached: mixing is detached.
        is_saved: the per-branch outputs are saved from forward to backward. Both passes then run everything at once.
    """
    H = shape.num_heads
    row_bytes, budget = _of_head(pattern, shape, batch, head_dim, dtype, is_backward, detached, is_saved)
    if is_saved or batch * H * row_bytes <= budget:
        return (((0, batch), (0, H)),)
    group = H // shape.num_kv_heads
    count = min(H, max(1, budget // max(1, group * row_bytes)) * group)
    return tuple(((b, b + 1), (h, min(h + count, H))) for b in range(batch) for h in range(0, H, count))


def fits(pattern: DilatedPattern, shape: Shape, head_dim: int, dtype: torch.dtype, batch: int, is_backward: bool, detached: bool) -> bool:
    """Whether the smallest group of heads that can run at a time stays within the budget."""
    head_bytes, budget = _of_head(pattern, shape, batch, head_dim, dtype, is_backward, detached, False)
    return head_bytes * (shape.num_heads // shape.num_kv_heads) <= budget


def _of_head(
    pattern: DilatedPattern, shape: Shape, batch: int, head_dim: int, dtype: torch.dtype, is_backward: bool, detached: bool, is_saved: bool
) -> tuple[int, int]:
    """Returns (bytes of waiting results per head, budget in bytes)."""
    H, Hk = shape.num_heads, shape.num_kv_heads
    own = detached and pattern.num_branches > 1
    spans = make_spans(layout_of(pattern, shape, own if is_backward else is_saved, (0, H)).walk, False)
    width = head_dim * dtype.itemsize
    lengths = [end - start for start, end in (shape.queries, shape.keys)]
    budget = transient_budget(batch * (lengths[0] * H + 2 * lengths[1] * Hk) * width)
    if is_backward:
        # dq, dk, dv and per-branch outputs; δ and lse of each row
        return spans.num_places * width * (3 + own) + spans.all_places * 8, budget
    return spans.num_places * (width + 4), budget


def tiles_scratch(
    pattern: DilatedPattern, shape: Shape, batch: int, head_dim: int, dtype: torch.dtype, *, is_backward: bool, detached: bool = False,
    is_saved: bool = False, dropout: bool = False,
) -> int:  # fmt: skip
    """Returns the peak bytes that a pass on tiles allocates in addition to its inputs, its results and saved outputs."""
    own = detached and pattern.num_branches > 1
    ranges = ranges_of(pattern, shape, batch, head_dim, dtype, is_backward=is_backward, detached=detached, is_saved=is_saved)
    most = 0
    # all batch entries take the same amount
    for (first, last), heads in dict.fromkeys(((0, b[1] - b[0]), h) for b, h in ranges):
        layout = layout_of(pattern, shape, own if is_backward else is_saved, heads)
        queries, keys = make_spans(layout.walk, False), make_spans(layout.walk, True)
        B, H = last - first, heads[1] - heads[0]
        key_heads = H // (shape.num_heads // shape.num_kv_heads) if layout.shared else H
        extent = Extent(B, H, key_heads, head_dim, queries.num_places, queries.all_places, keys.num_places)
        forward = scratch_bytes(extent.forward(dtype, is_saved=is_saved or (own and is_backward)))
        size = forward
        if is_backward:
            size = scratch_bytes(extent.backward(dtype, dropout=dropout))
            if own and not is_saved:
                # the per-branch outputs are recomputed, along with a result and an lse that are not used
                rows = B * H * (shape.queries[1] - shape.queries[0])
                size = extent.own_outputs() * dtype.itemsize + max(size, forward + rows * (head_dim * dtype.itemsize + 4))
        if dropout:
            # dropout words: two per query, one per key
            size += 4 * B * H * (2 * (shape.queries[1] - shape.queries[0]) + shape.keys[1] - shape.keys[0])
        most = max(most, size)
    return most
