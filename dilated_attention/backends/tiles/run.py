"""Launches of a table of tiles: two forward (one where nothing is to merge), three backward."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.backends.blocks import on_device
from dilated_attention.backends.dropout import Words, threshold_of
from dilated_attention.backends.tiles import backward as backward_kernels
from dilated_attention.backends.tiles import combine
from dilated_attention.backends.tiles.forward import forward_kernel
from dilated_attention.backends.tiles.sizes import Sizes, head_blocks, sizes
from dilated_attention.backends.tiles.table import Walk, make_spans, spans_on, table_on

_LOG2_E = 1.4426950408889634
# of merge and sum: elements of a program
_MERGE, _SUM = 4096, 4096


@dataclass(frozen=True)
class TileCall:
    """All of a call but its tensors.

    Args:
        walk: branches, documents, positions of the queries.
        offsets: o of each branch and head, −1 where a head does not run the branch.
        left, right: keys i − left … i + right are seen; None where unbounded. Causal: right = 0. Windows need one branch of rate 1.
        zero_keys: each segment has the zero keys of ``tail="zero_keys"``.
        keeps_parts: the forward leaves each branch's own output for a backward with detached mixing; ``walk.direct`` is −1 then.
    """

    walk: Walk
    offsets: tuple[tuple[int, ...], ...]
    scale: float
    left: int | None = None
    right: int | None = None
    zero_keys: bool = False
    keeps_parts: bool = False
    precision: str = "ieee"

    @property
    def num_heads(self) -> int:
        return len(self.offsets[0])


class Prepared:
    """What the launches of a call on one device share: tables, constants, grids. Made once."""

    def __init__(self, call: TileCall, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        walk = call.walk
        self.call, self.batch, self.kv_heads = call, batch, kv_heads
        self.head_dim, self.dtype, self.device = head_dim, dtype, device
        self.num_heads, self.group = call.num_heads, call.num_heads // kv_heads
        self.q_first, q_last = walk.queries
        self.num_queries, self.num_keys = q_last - self.q_first, walk.keys[1]
        heads = range(0, self.num_heads, self.group)
        self.shared = all(len(set(row[h : h + self.group])) == 1 for row in call.offsets for h in heads)
        assert self.shared or walk.key_direct < 0
        self.key_heads = kv_heads if self.shared else self.num_heads
        # of places: what the merge and the sum read, and δ of all branches
        query_spans, key_spans = make_spans(walk, False), make_spans(walk, True)
        self.part_rows, self.delta_rows = query_spans.num_places, query_spans.all_places
        self.key_part_rows = key_spans.num_places
        self.offsets = torch.tensor(call.offsets, dtype=torch.int32, device=device)
        self.spans, self.starts, self.rates = spans_on(device, walk, False)
        self.key_spans = spans_on(device, walk, True)[0]
        D0, D1 = head_blocks(head_dim)
        self.longest = max((min(w, end - start) + r - 1) // r for w, r in walk.branches for start, end in walk.documents)
        self.bounds = (call.left or 0, call.right or 0)
        self.constants: dict[str, Any] = {
            "D": head_dim, "D0": D0, "D1": D1, "LEFT": call.left is not None, "RIGHT": call.right is not None, "CUT": walk.is_cut,
            "PRECISION": call.precision,
        }  # fmt: skip
        self.columns = 1 << (head_dim - 1).bit_length()

    def kernel(self, which: str, of_keys: bool) -> tuple[torch.Tensor, Sizes, int]:
        """(table, tile sizes, programs) of a launch."""
        size = sizes(which, self.head_dim, self.dtype, self.longest)
        table = table_on(self.device, self.call.walk, of_keys, size.rows, self.call.right == 0)
        return table, size, len(table) * self.batch * (self.key_heads if of_keys else self.num_heads)

    @functools.cached_property
    def forward(self) -> tuple[torch.Tensor, Sizes, int]:
        return self.kernel("forward", False)

    @functools.cached_property
    def query(self) -> tuple[torch.Tensor, Sizes, int]:
        return self.kernel("query", False)

    @functools.cached_property
    def key(self) -> tuple[torch.Tensor, Sizes, int]:
        return self.kernel("key", True)

    def tiles(self, elements: int, rows: int, heads: int) -> tuple[int, int]:
        """(rows of a program, programs) of a launch over all rows."""
        size = max(8, elements // self.columns)
        return size, -(-rows // size) * heads * self.batch


@functools.lru_cache(maxsize=1024)
def prepared(call: TileCall, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    return Prepared(call, batch, kv_heads, head_dim, dtype, device)


def _dropout_arguments(words: Words | None, dropout_p: float, nothing: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int, float]:
    if words is None:
        return (nothing, nothing, nothing), 0, 1.0
    threshold = threshold_of(dropout_p)
    # as the kernels' signed integers
    return words, threshold - 2**32 if threshold >= 2**31 else threshold, 2**32 / (2**32 - threshold)


def forward(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, parts: torch.Tensor | None = None, padding: torch.Tensor | None = None, words: Words | None = None, dropout_p: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Write out (B, Nq, H, D), any strides but the last, and lse (B, H, Nq), contiguous.

    Returns ``parts`` (B, H, places, D), flat: each branch's own output but that of the direct one.
    """
    call, walk = p.call, p.call.walk
    B, H, D, rows = p.batch, p.num_heads, p.head_dim, p.part_rows
    if parts is None:
        parts = torch.empty(B * H * rows * D, dtype=q.dtype, device=q.device) if rows else out
    part_lse = torch.empty(B * H * rows, dtype=torch.float32, device=q.device) if rows else lse
    table, size, programs = p.forward
    (a, c, b), threshold, keep_scale = _dropout_arguments(words, dropout_p, p.offsets)
    with on_device(q.device):
        forward_kernel[(programs,)](
            q, k, v, out, lse, parts, part_lse, table, p.offsets, p.offsets if padding is None else padding, a, c, b,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], 0 if padding is None else padding.stride(0),
            B, H, H, p.group, p.q_first, walk.queries[1], p.num_queries, p.num_keys, rows, walk.direct, *p.bounds,
            call.scale * _LOG2_E, threshold, keep_scale,
            **p.constants, ROWS=size.rows, BLOCK=size.block, ZERO_KEYS=call.zero_keys, PADDING=padding is not None, DROPOUT=words is not None,
            STAGES=size.stages, num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
        if rows:
            step, programs = p.tiles(_MERGE, p.num_queries, H)
            combine.merge_kernel[(programs,)](
                out, lse, parts, part_lse, p.spans, p.starts, p.rates, p.offsets, *out.stride()[:3],
                B, H, H, p.q_first, p.num_queries, rows, walk.steps,
                D=D, COLUMNS=p.columns, ROWS=step, BRANCHES=walk.num_branches, DIRECT=walk.direct, num_warps=4,
            )  # fmt: skip
    return parts


def backward(
    p: Prepared, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dlse: torch.Tensor | None, grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *, parts: torch.Tensor | None = None, padding: torch.Tensor | None = None, words: Words | None = None, dropout_p: float = 0.0,
) -> None:  # fmt: skip
    """Write dq, dk, dv. ``parts``: each branch's own output, for detached mixing."""
    call, walk = p.call, p.call.walk
    B, H, D = p.batch, p.num_heads, p.head_dim
    dq, dk, dv = grads
    q_rows, k_rows = p.part_rows, p.key_part_rows
    q_parts = torch.empty(B * H * q_rows * D, dtype=q.dtype, device=q.device) if q_rows else dq
    k_parts, v_parts = (torch.empty((2, B * p.key_heads * k_rows * D), dtype=q.dtype, device=q.device) if k_rows else (dk, dv))
    # δ and lse of each row by place, for the kernel of keys
    stats = torch.empty(2 * B * H * p.delta_rows, dtype=torch.float32, device=q.device)
    (a, c, b), threshold, keep_scale = _dropout_arguments(words, dropout_p, p.offsets)
    pad, pad_stride = (p.offsets, 0) if padding is None else (padding, padding.stride(0))
    scales = call.scale * _LOG2_E, call.scale
    flags: dict[str, Any] = {"PADDING": padding is not None, "DROPOUT": words is not None}
    with on_device(q.device):
        table, size, programs = p.query
        backward_kernels.query_kernel[(programs,)](
            q, k, v, out if parts is None else parts, lse, dout, lse if dlse is None else dlse, stats, dq, q_parts, table, p.offsets, pad, a, c, b,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *dout.stride()[:3], *dq.stride()[:3],
            *((0, 0, 0) if dlse is None else (dlse.stride(0), dlse.stride(2), dlse.stride(1))), pad_stride,
            B, H, H, p.group, p.q_first, walk.queries[1], p.num_queries, p.num_keys, q_rows, p.delta_rows, walk.direct, *p.bounds,
            *scales, threshold, keep_scale,
            **p.constants, **flags, ROWS=size.rows, BLOCK=size.block, OWN=parts is not None, DLSE=dlse is not None, STAGES=size.stages,
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
        table, size, programs = p.key
        backward_kernels.key_kernel[(programs,)](
            q, k, v, dout, stats, dk, dv, k_parts, v_parts, table, p.offsets, pad, a, c, b,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], pad_stride,
            B, H, p.kv_heads, H, p.group, p.q_first, walk.queries[1], p.num_queries, p.num_keys, k_rows, p.delta_rows, walk.key_direct, *p.bounds,
            *scales, threshold, keep_scale,
            **p.constants, **flags, ROWS=size.rows, BLOCK=size.block, SHARED=p.shared, STAGES=size.stages,
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
        if q_rows or k_rows:
            step, q_tiles = p.tiles(_SUM, p.num_queries, H if q_rows else 0)
            _, k_tiles = p.tiles(_SUM, p.num_keys, p.kv_heads if k_rows else 0)
            combine.sum_kernel[(q_tiles + k_tiles,)](
                dq, dk, dv, q_parts, k_parts, v_parts, p.spans, p.key_spans, p.starts, p.rates, p.offsets,
                *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
                B, H, p.kv_heads, H, p.group, p.q_first, p.num_queries, p.num_keys, q_tiles, q_rows, k_rows, walk.steps,
                D=D, COLUMNS=p.columns, ROWS=step, BRANCHES=walk.num_branches, Q_DIRECT=walk.direct, K_DIRECT=walk.key_direct,
                SHARED=p.shared, QUERIES=q_rows > 0, KEYS=k_rows > 0, num_warps=4,
            )  # fmt: skip
