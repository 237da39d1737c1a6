"""FlashAttention-4 (CuTe DSL): ``pip install --pre "flash-attn-4[cu13]"``. The fastest known backend here on Hopper and Blackwell.

Over lists of blocks, on Hopper: its kernels take one row of indices per block, padded to the longest. Such a table needs rows × longest
list: at a million positions, one block that keeps everything (a global one) would make it 256 MiB. So blocks with long lists and blocks
with short ones get separate tables, in runs of neighbours, and groups are processed a few at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.backends.base import FLASH, AttentionRequest, Backend, Grads, Keys, Options, Result, Views, new_lse, new_results
from dilated_attention.backends.flash.flash4_launch_cache import replay_backward, replay_forward
from dilated_attention.backends.hardware import Streams
from dilated_attention.backends.mask_convert import window_sizes
from dilated_attention.pattern.blocks.block_lists import BLOCK_SIZES, BlockLists
from dilated_attention.pattern.blocks.whole_blocks import elements_of

# launches over parts of the columns that run side by side; each additional one takes memory for its dq
_MOST_CONCURRENT = 3
# the largest size of one table; it holds all groups if they fit
TABLE_BYTES = 128 * 2**20
# a list counts as long if it has more than this many times the mean
_LONG = 4
_MOST_RUNS = 8


class Flash4Backend(Backend):
    """``flash_attn.cute.interface._flash_attn_fwd`` and ``_flash_attn_bwd``, called directly.

    Not through torch: the wrapper in torch 2.11–2.13 unpacks a tuple that has since grown, and FlexAttention's backend FLASH returns
    lse · ln 2 in torch 2.11 and 2.12. The forward returns 2 to 5 values, depending on the release: first
    out and lse.

    On Hopper the backward of 4.0.0b36 is wrong at head dims that round up to 16, 48, 80 or 112: the relative error is near 1 in dq, and
    with grouped heads in dk and dv too. This was measured at every multiple of 8. The forward is right at all of them.
    """

    name = "flash4"
    capabilities = replace(
        FLASH,
        package="flash-attn-4",
        install='pip install --pre "flash-attn-4[cu13]"',
        softcap=True,
        lse_grad=True,
        block_sizes=BLOCK_SIZES,
        block_masks=frozenset({"none", "interval"}),
        writes_views=True,
        source="H200, flash-attn-4 4.0.0b36: 530/525 TFLOP/s forward/backward at D = 64, 700/620 at 128",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        capability = request.hardware.capability
        if capability is None:
            return []
        reasons, major, head_dim = [], capability[0], request.head_dim
        rounded = -(-head_dim // 16) * 16
        if request.needs_grad and major == 9 and rounded < 128 and rounded % 32:
            reasons.append(f"its backward on compute capability 9.0 gives wrong gradients at head_dim {head_dim} (4.0.0b36, measured)")
        if request.needs_grad and major == 8:
            reasons.append("has no backward on compute capability 8.x")
        if request.needs_grad and major == 12 and (request.deterministic or request.window or request.softcap):
            reasons.append("its backward on compute capability 12.x is dense, without softcap and not deterministic")
        if major in (10, 11) and head_dim > 128 and head_dim != 256:
            reasons.append(f"head_dim is at most 128, or 256, on compute capability {major}.x, not {head_dim}")
        if head_dim < 8:
            reasons.append(f"head_dim is at least 8, not {head_dim}")
        if request.blocks is None:
            return reasons
        # measured on 4.0.0b36, compute capability 9.0
        if major != 9:
            reasons.append("its block-sparse kernels were tested only on compute capability 9.0")
        if head_dim > 128:
            reasons.append(f"with lists of blocks head_dim is at most 128, not {head_dim}")
        if request.needs_grad:
            q_block, k_block = request.blocks
            if k_block != 128 or (head_dim <= 64 and q_block != 128):
                least = "128x128" if head_dim <= 64 else "64x128 or 128x128"
                reasons.append(f"its backward with head_dim {head_dim} takes blocks of {least}, not {q_block}x{k_block}")
            if request.deterministic:
                reasons.append("its backward over lists of blocks is not deterministic here")
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys = None, *, out: Views = (None, None)) -> Result:
        interface, (out_view, lse_view) = _interface(), out
        if keys is not None:
            assert isinstance(keys, BlockLists)
            return forward_blocks(interface, q, k, v, keys, options, out_view)
        left, right = window_sizes(options, q, k)
        # the kernel writes lse in rows of stride 1
        lse_rows = lse_view if lse_view is not None and lse_view.stride(-1) == 1 else new_lse(q)
        (result,) = new_results((out_view,), (q,))

        def call() -> None:
            interface._flash_attn_fwd(
                q, k, v, softmax_scale=options.scale, causal=options.causal, softcap=options.softcap, window_size_left=left,
                window_size_right=right, return_lse=True, out=result, lse=lse_rows,
            )  # fmt: skip

        settings = (options.scale, options.causal, left, right, options.softcap)
        replay_forward(interface, (q, k, v, result, lse_rows), settings, call, options.geometry)
        return result, lse_rows

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> Grads:  # fmt: skip
        interface = _interface()
        if keys is not None:
            assert isinstance(keys, BlockLists)
            return backward_blocks(interface, (dout, q, k, v, out, lse), keys, options, dlse, grads[0])
        left, right = window_sizes(options, q, k)
        lse = _with_dense_rows(lse, q.shape[-1])
        dlse = None if dlse is None else _with_dense_rows(dlse, q.shape[-1])
        dq, dk, dv = new_results(grads, (q, k, v))

        def call() -> None:
            interface._flash_attn_bwd(
                q, k, v, out, dout, lse, softmax_scale=options.scale, causal=options.causal, softcap=options.softcap,
                window_size_left=left, window_size_right=right, deterministic=options.deterministic, dq=dq, dk=dk, dv=dv, dlse=dlse,
            )  # fmt: skip

        if options.deterministic:
            # not replayed: the semaphores that order its sums must start as zeros, which a replay does not ensure
            call()
            return dq, dk, dv
        tensors = (q, k, v, out, dout, lse, dq, dk, dv, *(() if dlse is None else (dlse,)))
        settings = (options.scale, options.causal, left, right, options.softcap, dlse is not None)
        replay_backward(q, k)(interface, tensors, settings, call, options.geometry)
        return dq, dk, dv


def _with_dense_rows(x: Tensor, head_dim: int) -> Tensor:
    """Returns x, lse or its gradient (P, G, L), with rows of stride 1, which the backward's kernels require."""
    # larger head dims have kernels of their own on compute capability 10.0, which are known to be right for contiguous x only
    return x if x.stride(-1) == 1 and head_dim <= 128 else x.contiguous()


def _interface() -> Any:
    """Returns the library's module, imported at the first launch."""
    from flash_attn.cute import interface

    return interface


class BlockTable(NamedTuple):
    """Lists of blocks [start, end) of one side for some heads: counts (batch, heads, blocks) and indices (batch, heads, blocks, width).

    Args:
        heads: the range of heads; (0, 1) where all heads share one list.
        partial, full: (counts, indices) int32 of the blocks with a mask of pairs, and of the blocks kept whole.
    """

    heads: tuple[int, int]
    start: int
    end: int
    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]


def forward_blocks(interface: Any, q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, options: Options, out: Tensor | None) -> Result:
    """Computes (out, lse). ``out``: a view to write to."""
    (out,), lse = new_results((out,), (q,)), new_lse(q)
    mask_mod, interval = _interval(lists)
    cut = _cut(interface, lists, False, q, k)
    settings = (options.scale, options.softcap, lists.q_block, lists.k_block, mask_mod is None)
    parts: list[tuple[slice, slice, Tensor]] = []
    launches: list[tuple[tuple[Tensor, ...], Any]] = []
    for rows, heads, kv_heads, sparse in cut:
        tensors = q[:, rows, heads], k[:, :, kv_heads], v[:, :, kv_heads], out[:, rows, heads]
        # the kernel requires a dense lse
        part = lse
        if len(cut) > 1:
            part = lse.new_empty((q.shape[0], heads.stop - heads.start, rows.stop - rows.start))
            parts.append((heads, rows, part))
        aux = None if interval is None else [x[rows.start :].contiguous() for x in interval]
        call = functools.partial(
            interface._flash_attn_fwd,
            *tensors[:3],
            softmax_scale=options.scale,
            softcap=options.softcap,
            return_lse=True,
            out=tensors[3],
            lse=part,
            mask_mod=mask_mod,
            aux_tensors=aux,
            block_sparse_tensors=sparse,
        )
        launches.append(((*tensors, part, *sparse[:4], *(aux or ())), call))
    # a few rows of many blocks, as those of global tokens, would leave most of the GPU idle for as long as all others take
    with Streams(q.device, min(2, len(cut))) as streams:
        for index, (given, call) in enumerate(launches):
            with streams.stream(index):
                replay_forward(interface, given, settings, call)
    for heads, rows, part in parts:
        lse[:, heads, rows] = part
    return out, lse


def backward_blocks(
    interface: Any, tensors: tuple[Tensor, ...], lists: BlockLists, options: Options, dlse: Tensor | None, into: Tensor | None
) -> Grads:
    """Computes (dq, dk, dv).

    Args:
        tensors: dout, q, k, v, out, lse.
        into: a view for dq, which is written to unless dq is the sum of more than two launches: it is then another tensor, in float32.
    """
    dout, q, k, v, out, lse = tensors
    cut = _cut(interface, lists, True, q, k)
    several = len({rows.start for rows, *_ in cut}) > 1
    # those of a few columns of many blocks run concurrently with the others, each with a dq of its own
    concurrent = several and len(cut) <= _MOST_CONCURRENT
    more_dqs = len(cut[1:]) if concurrent else 0
    dk, dv, *dqs = new_results((None, None, into, *(None,) * more_dqs), (k, v, q, *(q,) * more_dqs))
    total = q.new_zeros(q.shape, dtype=torch.float32) if several and not concurrent else None
    mask_mod, interval = _interval(lists)
    replay = replay_backward(q, k)
    settings = (options.scale, options.softcap, lists.q_block, lists.k_block, mask_mod is None, dlse is not None)
    launches: list[tuple[tuple[Tensor, ...], slice, Any]] = []
    for index, (rows, heads, kv_heads, sparse) in enumerate(cut):
        mine = [q[:, :, heads], k[:, rows, kv_heads], v[:, rows, kv_heads], out[:, :, heads], dout[:, :, heads], lse[:, heads].contiguous()]
        grads = [dqs[index if concurrent else 0][:, :, heads], dk[:, rows, kv_heads], dv[:, rows, kv_heads]]
        more = [] if dlse is None else [dlse[:, heads].contiguous()]
        # the kernel counts keys from the first key of the launch
        aux = None if interval is None else [x - rows.start for x in interval] if rows.start else list(interval)

        call = functools.partial(
            interface._flash_attn_bwd,
            *mine,
            softmax_scale=options.scale,
            softcap=options.softcap,
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            dlse=more[0] if more else None,
            mask_mod=mask_mod,
            aux_tensors=aux,
            block_sparse_tensors=sparse,
        )
        launches.append(((*mine, *grads, *more, *sparse[:4], *(aux or ())), heads, call))
    with Streams(q.device, 2 if concurrent else 1) as streams:
        for index, (given, heads, call) in enumerate(launches):
            with streams.stream(index):
                replay(interface, given, settings, call)
            if total is not None:
                total[:, :, heads] += dqs[0][:, :, heads]
    if len(dqs) == 2:
        # rounded once
        return dqs[0].add_(dqs[1]), dk, dv
    if len(dqs) > 2:
        total = dqs[0].float()
        for dq in dqs[1:]:
            total += dq
    return dqs[0] if total is None else total, dk, dv


def _cut(interface: Any, lists: BlockLists, of_columns: bool, q: Tensor, k: Tensor) -> list[tuple[slice, slice, slice, Any]]:
    """Returns of each launch its keys (``of_columns``) or queries, its query heads, its key heads, and its table in the interface's form.

    Every tensor of the table has its final shape, so that the interface copies and expands nothing.
    """
    H, group = q.shape[2], q.shape[2] // k.shape[2]
    block, most = (lists.k_block, lists.num_keys) if of_columns else (lists.q_block, lists.num_queries)
    launches = []
    for table in tables_of(lists, of_columns, group):
        first, last = (0, H) if lists.num_heads == 1 else table.heads
        assert first % group == 0 and last % group == 0, "tables are cut between key heads"
        sides = [x.expand(len(q), last - first, *x.shape[2:]) for side in (table.partial, table.full) for x in side]
        sparse = interface.BlockSparseTensorsTorch(*sides, block_size=(lists.q_block, lists.k_block))
        part = slice(table.start * block, min(table.end * block, most))
        launches.append((part, slice(first, last), slice(first // group, last // group), sparse))
    return launches


def _interval(lists: BlockLists) -> tuple[Any, tuple[Tensor, ...] | None]:
    if lists.masks is None:
        return None, None
    assert lists.interval is not None, "only interval masks are supported"
    # the kernels' language is imported at the first launch
    from dilated_attention.backends.flash.flash4_mask import interval_mask

    missing = lists.num_rows * lists.q_block - lists.num_queries
    # the kernels also read the bounds of the missing rows of the last block
    bounds = lists.derived(
        "whole blocks", lambda some: tuple(F.pad(x, (0, missing)).contiguous() for x in some.interval or ()), by_length=True
    )
    return interval_mask, bounds


def tables_of(lists: BlockLists, of_columns: bool, together: int) -> tuple[BlockTable, ...]:
    """Returns tables of the key blocks of every query block, or of the query blocks of every key block.

    Args:
        together: the number of heads that share a key head and so must stay in one table.
    """
    return lists.derived(("tables", of_columns, together), lambda x: tuple(_tables(x, of_columns, together)))


def _tables(lists: BlockLists, of_columns: bool, together: int) -> Iterator[BlockTable]:
    starts, others, masks = lists.by_column if of_columns else (lists.row_starts, lists.columns, lists.masks)
    # the most blocks in a list: the widest table that libraries accept
    blocks, most = (lists.num_columns, lists.num_rows) if of_columns else (lists.num_rows, lists.num_columns)
    B, H = lists.num_batch, lists.num_heads
    longest = starts.diff().view(B, H, blocks).amax((0, 1))
    for start, end in _runs(longest):
        per_head = max(1, B * (end - start) * int(longest[start:end].max()) * 4)
        step = H if H == 1 else max(together, TABLE_BYTES // per_head // together * together)
        for first in range(0, H, step):
            last = min(first + step, H)
            lists_of_table = torch.arange(B * H * blocks, device=starts.device).view(B, H, blocks)[:, first:last, start:end].flatten()
            begins, ends = starts[lists_of_table].long(), starts[lists_of_table + 1].long()
            row, entry = elements_of(begins, ends)
            other, shape = others.index_select(0, entry), (B, last - first, end - start)
            if masks is None:
                # to look for masked blocks would wait for the GPU
                sides = [(row[:0], other[:0], torch.zeros_like(begins)), (row, other, ends - begins)]
            else:
                whole = masks.index_select(0, entry) < 0
                parts = [kept.nonzero()[:, 0] for kept in (~whole, whole)]
                rows = [row.index_select(0, part) for part in parts]
                counts = [torch.bincount(some, minlength=len(begins)) for some in rows]
                sides = [*zip(rows, [other.index_select(0, part) for part in parts], counts, strict=True)]
            partial, full = (_side(*side, shape, most) for side in sides)
            yield BlockTable((first, last), start, end, partial, full)


def _runs(longest: Tensor) -> list[tuple[int, int]]:
    """Returns ranges of neighbouring blocks with lists of similar length, or one range if there are too many or nothing is gained."""
    lengths = longest.cpu().double()
    blocks = lengths.shape[0]
    if blocks < 64 or float(lengths.max()) <= _LONG * float(lengths.mean()):
        return [(0, blocks)]
    long = lengths > _LONG * lengths.mean()
    bounds = [0, *(torch.nonzero(long[1:] != long[:-1]).flatten() + 1).tolist(), blocks]
    return list(itertools.pairwise(bounds)) if len(bounds) - 1 <= _MOST_RUNS else [(0, blocks)]


def _side(row: Tensor, other: Tensor, counts: Tensor, shape: tuple[int, int, int], most: int) -> tuple[Tensor, Tensor]:
    """Builds (counts, indices) of entries by scattering each to its place; ``counts``: of the entries of each list."""
    # rounds the width up, so that similar widths share whatever is compiled per shape
    longest = int(counts.max()) if len(row) else 0
    width = max(1, min(-(-longest // 16) * 16, most))
    place = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
    indices = row.new_zeros((counts.shape[0], width), dtype=torch.int32)
    indices[row, place] = other.to(torch.int32)
    return counts.to(torch.int32).view(shape), indices.view(*shape, width)
