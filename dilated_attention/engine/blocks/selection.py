"""Chooses the key blocks that each query block keeps by their content: it scores the means of blocks and keeps the best of every row.

    score_h(r, c) = scale · mean(q_h of row r) · mean(k_h of block c)

The choice is a single custom op, so torch.compile sees a tensor of bits. It has no gradient. To save memory, scores are computed for
some rows at a time.
The torch functions below are the definition and run on a CPU; ``selection_triton.py`` makes the same choice from the same scores.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels, keep_for_graph
from dilated_attention.engine.blocks.lists import bits_of_lists
from dilated_attention.engine.blocks.selection_grid import SHARE_BITS, Document, Grid, Part, make_grid
from dilated_attention.engine.memory import explains_shortage
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.prepare import kernel_ready, without_autocast
from dilated_attention.engine.ops.transforms import each, folded
from dilated_attention.pattern import BlockPattern, TopBlocks, pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import WORD, kept_blocks, packed, unpacked
from dilated_attention.pattern.blocks.content import num_blocks_of

# bytes of scores at a time: for kernels, and for torch, where sorting takes several times as much in addition
_KERNEL_BYTES, _TORCH_BYTES = 2**26, 2**23
# Softmax weights are integers, so that sums do not depend on the order of summation. The largest weight of a row is 2**_WEIGHT_BITS.
# Together with SHARE_BITS and 2**16 columns that fills 62 bits.
_WEIGHT_BITS = 24
# kernels hold a whole row of columns
_MOST_COLUMNS = 2**16


@torch.library.custom_op("dilated_attention::choose_blocks", mutates_args=())
@explains_shortage("forward of the choice of blocks by content")
def choose_blocks_op(
    q: torch.Tensor, k: torch.Tensor, key_padding_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, spec: str, is_causal: bool,
    scale: float, query_offset: int,
) -> torch.Tensor:  # fmt: skip
    """Returns kept (B, H, R, W) int32: bit c % 32 of word c // 32 of row r is set if query block r keeps key block c.

    Rows begin at positions that are multiples of the query block. With ``cu_seqlens``, the rows of documents follow one another, and
    each document numbers its own columns; rows after those of the last document keep nothing. ``spec`` is ``TopBlocks.spec()``. The
    caller checks the arguments.
    """
    pattern = _top_blocks(spec)
    documents = None if cu_seqlens is None else document_ranges(bounds_of(cu_seqlens), k.shape[1])
    by_earlier = pattern.queries_are_before(is_causal)
    block = (pattern.q_block, pattern.k_block)
    grid = make_grid(q.shape[1], k.shape[1], block, documents, is_causal, query_offset, by_earlier, pattern.near, q.device)
    keep_for_graph(grid, q.device.type)
    kept = q.new_zeros(_kept_shape(q, k, cu_seqlens, pattern, query_offset), dtype=torch.int32)
    if q.numel() and k.numel():
        with without_autocast(q):
            _choose(kept, kernel_ready(q), kernel_ready(k), pattern, grid, key_padding_mask, scale, query_offset)
    return kept


@choose_blocks_op.register_fake
def _(*arguments: Any) -> Tensor:
    q, k, _, cu_seqlens, spec, _, _, query_offset = arguments
    return q.new_empty(_kept_shape(q, k, cu_seqlens, _top_blocks(spec), query_offset), dtype=torch.int32)


@choose_blocks_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    def call(*args: Any) -> tuple[Tensor]:
        return (choose_blocks_op(*args),)

    # cu_seqlens is for batch size 1
    (kept,), _ = (folded if args[3] is None else each)(call, info.batch_size, in_dims, args)
    return kept, 0


def _kept_shape(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, pattern: TopBlocks, query_offset: int) -> tuple[int, ...]:
    q_block, num_queries, words = pattern.q_block, q.shape[1], -(-k.shape[1] // (pattern.k_block * WORD))
    if cu_seqlens is None:
        return q.shape[0], q.shape[2], -(-(query_offset % q_block + num_queries) // q_block), words
    # an upper bound that does not depend on the lengths of documents
    return q.shape[0], q.shape[2], num_queries // q_block + cu_seqlens.shape[0] - 1, words


def _top_blocks(spec: str) -> TopBlocks:
    pattern = pattern_from_spec(spec)
    assert isinstance(pattern, TopBlocks)
    return pattern


def _choose(
    kept: Tensor, q: Tensor, k: Tensor, pattern: TopBlocks, grid: Grid, padding: Tensor | None, scale: float,
    query_offset: int,
) -> None:  # fmt: skip
    B, H = kept.shape[:2]
    q_means = block_means(q, grid.rows[:2]) * scale
    k_means = block_means(k, grid.columns, padding)
    num_real = None if padding is None else _count(~padding, grid.columns)
    share = 0 if pattern.mass is None else math.ceil(pattern.mass * 2**SHARE_BITS)
    for document in grid.documents:
        columns = document.columns[1] - document.columns[0]
        fused = has_kernels(q) and columns <= _MOST_COLUMNS
        size = max(1, (_KERNEL_BYTES if fused else _TORCH_BYTES) // (B * H * max(1, columns) * q_means.element_size()))
        choose = choose_rows
        if fused:
            from dilated_attention.engine.blocks.selection_triton import choose_rows as choose
        first, last = document.rows
        for start in range(first, last, size):
            stop = min(start + size, last)
            # later rows score more columns; the width is a multiple of 16, since kernels read aligned rows faster
            width = min(-(-grid.scored_on_host[stop - 1] // 16) * 16, columns)
            means = k_means[:, :, document.columns[0] : document.columns[0] + width]
            scores = _scores(q_means[:, :, start:stop], means)
            part = part_of(pattern, grid, document, slice(start, stop), num_real, H, query_offset)
            weights = None if pattern.mass is None else softmax_weights(scores, part)
            choose(kept[:, :, start:stop], scores, weights, part, columns, share)


def block_means(x: Tensor, ranges: Tensor, padding: Tensor | None = None) -> Tensor:
    """Computes the means (B, H, ranges, D), float32 (float64), of x (B, N, H, D) over positions [low, high); 0 where all are padding.

    Args:
        ranges: (2, ranges) int32; no range may be empty.
        padding: (B, N) bool, True = the position is ignored.
    """
    if has_kernels(x):
        from dilated_attention.engine.blocks.selection_triton import block_means as fused

        return fused(x, ranges, padding)
    B, _, H, D = x.shape
    dtype = accumulation_dtype(x.dtype)
    means = x.new_empty((B, H, ranges.shape[1], D), dtype=dtype)
    for row, (low, high) in enumerate(ranges.T.tolist()):
        values, count = x[:, low:high], high - low
        if padding is not None:
            values = values.masked_fill(padding[:, low:high, None, None], 0)
            count = (~padding[:, low:high]).sum(1).clamp(min=1)[:, None, None]
        means[:, :, row] = values.sum(1, dtype=dtype) / count
    return means


def _count(flags: Tensor, ranges: Tensor) -> Tensor:
    """Counts the flags (B, N) bool that are set in each range [low, high): (B, ranges)."""
    before = torch.nn.functional.pad(flags.cumsum(1), (1, 0))
    low, high = ranges.long()
    return before[:, high] - before[:, low]


def part_of(
    pattern: TopBlocks, grid: Grid, document: Document, rows: slice, num_real: Tensor | None, num_heads: int, query_offset: int
) -> Part:
    """Returns the data of some rows of a document. num_real (B, columns of all documents): keys of each block that are not padding."""
    _, _, own_low, own_high, scored, seen, missing = grid.rows[:, rows]
    # positions of the first row before the first query
    front = query_offset % pattern.q_block
    num_keys = document.keys[1] - document.keys[0]
    shape = (num_keys, num_heads, query_offset - front, document.num_queries + front, seen.device)
    statics = tuple(None if x is None else _static_bits(x, *shape) for x in (pattern.always, pattern.within))
    keep_for_graph(statics, seen.device.type)
    in_document = slice(rows.start - document.rows[0], rows.stop - document.rows[0])
    always, within = (None if x is None else x[:, in_document] for x in statics)
    real, existing, budget = None, seen[None], None
    if num_real is not None:
        is_real = num_real[:, slice(*document.columns)] > 0
        real = packed(is_real)
        existing = torch.nn.functional.pad(is_real.cumsum(1), (1, 0))[:, seen.long()]
    if pattern.mass is None:
        total = existing + missing
        wanted = missing.new_full((1, 1), pattern.blocks or 0) if pattern.share is None else num_blocks_of(pattern.share, total)
        budget = (wanted[:, None] - _kept_beyond(pattern, missing, query_offset + document.num_queries, num_heads)).to(torch.int32)
    return Part((own_low, own_high), scored, seen, pattern.near, budget, always, within, real)


def _kept_beyond(pattern: TopBlocks, missing: Tensor, end: int, num_heads: int) -> Tensor:
    """Returns (H or 1, rows) int32: of the ``missing`` columns (see ``Grid``) those that each row would always keep.

    Only the last row, that of query ``end`` − 1, can have any; at most one, as blocks have 64 or 128 positions.
    """
    q_block, k_block = pattern.q_block, pattern.k_block
    # where the last row would end if it were complete, and the first key of the first missing column
    row_end, first_key = -(-end // q_block) * q_block, -(-end // k_block) * k_block
    # without ``within`` the diagonal is always kept; from row_end on nothing is missing
    if pattern.within is None or first_key >= row_end:
        return missing[None]
    statics = [x for x in (pattern.within, pattern.always) if x is not None]
    if not all(x.is_prefix_stable for x in statics):
        # of a longer sequence they may keep anything
        return torch.zeros_like(missing)[None]
    # of the last row alone, at the length at which it is complete; made anew, so that a CUDA graph holds it
    places = [torch.arange(*x, device=missing.device) for x in ((row_end - q_block, row_end), (first_key, row_end), (0, num_heads))]
    queries, keys, heads = places[0][:, None], places[1], places[2][:, None, None]
    kept = [x.at(row_end).allowed(queries, keys, heads, row_end).expand(num_heads, q_block, -1).any(2).any(1) for x in statics]
    return missing * torch.stack(kept).any(0)[:, None]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _static_bits(pattern: BlockPattern, num_keys: int, num_heads: int, first_query: int, num_queries: int, device: torch.device) -> Tensor:
    """Returns (H or 1, rows, words) int32: the blocks of which the pattern keeps any pair, without causality."""
    # from lists instead of ``entries``, since only their masks show which blocks of a composition are empty
    lists = kept_blocks(pattern, num_keys, num_heads, first_query=first_query, num_queries=num_queries, device=device)
    return bits_of_lists(lists)


def _scores(q_means: Tensor, k_means: Tensor) -> Tensor:
    """Computes scores (B, H, rows, columns), contiguous, from means (B, H, rows, D) and (B, K, columns, D)."""
    B, H, rows, D = q_means.shape
    K, columns = k_means.shape[1:3]
    grouped = q_means.reshape(B, K, H // K * rows, D)
    return torch.matmul(grouped, k_means.transpose(2, 3)).view(B, H, rows, columns)


def fates(part: Part, num_columns: int) -> tuple[Tensor, Tensor]:
    """Returns (forced, candidates): blocks that are always kept, and those to choose from; bool, broadcastable to (B, H, rows, columns)."""
    column = torch.arange(num_columns, dtype=torch.int32, device=part.seen.device)
    scored, seen, own_low, own_high = (x[:, None] for x in (part.scored, part.seen, *part.own))
    exists = (column < seen)[None, None]
    if part.real is not None:
        exists = exists & unpacked(part.real, num_columns)[:, None, None]
    allowed = exists if part.within is None else exists & unpacked(part.within, num_columns)
    # the diagonal: under causality only some queries of the row see these blocks whole, so they are kept without a score
    forced = allowed & (column >= scored)
    if part.near or part.always is None:
        forced = forced | allowed & (column >= own_low) & (column < own_high)
    if part.near:
        forced = forced | allowed & (column == exists.int().argmax(-1, keepdim=True))
    if part.always is not None:
        forced = forced | exists & unpacked(part.always, num_columns)
    return forced, allowed & (column < scored) & ~forced


def softmax_weights(scores: Tensor, part: Part) -> Tensor:
    """Computes int32 weights (B, H, rows, width) of the scored blocks that may be kept, proportional to the softmax of their scores."""
    width = scores.shape[-1]
    if not width:
        return scores.to(torch.int32)
    forced, candidates = fates(part, width)
    column = torch.arange(width, dtype=torch.int32, device=scores.device)
    weighed = candidates | forced & (column < part.scored[:, None])
    values = torch.where(scores.isnan(), torch.inf, scores).masked_fill_(~weighed, -torch.inf)
    high = values.amax(-1, keepdim=True)
    # the highest score gets weight 1 even if it is infinite, where inf − inf would give NaN
    weights = torch.where(values == high, 1.0, (values - high).exp_())
    return (weights * 2**_WEIGHT_BITS).round_().to(torch.int32).masked_fill_(~weighed, 0)


def choose_rows(kept: Tensor, scores: Tensor, weights: Tensor | None, part: Part, num_columns: int, share: int) -> None:
    """Writes the rows' bits into kept (B, H, rows, words): the forced blocks, then the blocks with the highest scores until it suffices.

    It suffices when the row's budget of blocks is reached or, with weights, ``share`` · 2**-SHARE_BITS of their sum. Among equal scores,
    lower columns come first.

    Args:
        scores: (B, H, rows, width); columns from width on are not scored.
        weights: from ``softmax_weights``; None to count blocks.
    """
    width = scores.shape[-1]
    forced, candidates = (x.expand(*kept.shape[:3], -1) for x in fates(part, num_columns))
    chosen = forced.clone()
    if width:
        key = _ordered(scores).masked_fill_(~candidates[..., :width], torch.iinfo(torch.int64).min)
        order = key.sort(stable=True, dim=-1, descending=True).indices
        weight = candidates[..., :width].long() if weights is None else weights.long()
        if weights is None:
            assert part.budget is not None
            need = part.budget[..., None] - forced.sum(-1, keepdim=True)
        else:
            forced_weight = (weight * forced[..., :width]).sum(-1, keepdim=True)
            need = ((weight.sum(-1, keepdim=True) * share + 2**SHARE_BITS - 1) >> SHARE_BITS) - forced_weight
        weight = (weight * candidates[..., :width]).gather(-1, order)
        # a block is taken while the weights before it do not suffice
        taken = (weight.cumsum(-1) - weight < need) & candidates[..., :width].gather(-1, order)
        chosen[..., :width] |= torch.zeros_like(taken).scatter_(-1, order, taken)
    words = packed(chosen)
    kept[..., : words.shape[-1]] = words


def _ordered(scores: Tensor) -> Tensor:
    """Maps scores to int64 of the same order. NaN ranks above infinity: its block is kept and makes the result NaN, as it should."""
    bits = scores.view(torch.int64 if scores.dtype is torch.float64 else torch.int32)
    highest = torch.iinfo(bits.dtype).max
    key = torch.where(bits < 0, bits ^ highest, bits).long()
    return key.masked_fill_(scores == 0, 0).masked_fill_(scores.isnan(), torch.iinfo(torch.int64).max)
