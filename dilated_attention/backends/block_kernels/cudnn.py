"""Block-sparse attention on Hopper by NVIDIA's cudnn-frontend (CuTe DSL), whose backward is the fastest known here at head dim 128.

This module relies on the following behaviour, read in the sources of 1.32:
- its lse is natural, float32 (B, H, N). A row with an lse of +inf gets exp2(s − inf) = 0, or 0 by an explicit test: it contributes nothing;
- rows past the end of the queries: kernels of 128-blocks drop them (loads past the end are zeros, such a row's lse is +inf, stores are
  masked); the forward of 64-blocks takes whole blocks only, and its backward is given only whole blocks here;
- a shorter last key block is declared by ``block_sizes``, as its manual requires;
- the transposed lists of the backward are built with atomics, so its sums over query blocks have no fixed order. That kernel is
  recompiled for each table width, of which ``block_tables.py`` produces few;
- nothing is checked: an index out of range silently corrupts memory;
- importing it wraps CUTLASS's converter of launch arguments for the whole process, with the two rules (``Constexpr`` arguments are not
  passed, named tuples bring their own types) that FlashAttention-4's library also sets. They are compatible in either import order.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilated_attention.backends.base import HALVES, AttentionRequest, Capabilities, Options
from dilated_attention.backends.block_kernels import block_tables
from dilated_attention.backends.block_kernels.base import BlocksBackend
from dilated_attention.pattern.blocks.block_lists import BlockLists

# the number of query rows of a launch must be a multiple of this, by block size
_ROW_MULTIPLE = {64: 64, 128: 1}
# alignment in bytes that the forward of 64-blocks assumes of every tensor
_ALIGNMENT = 128
# limit of batch entries times heads in a launch: the third dimension of its grid
_MOST_HEADS = 65535


class CudnnBlocksBackend(BlocksBackend):
    """Computes lists of whole blocks, 64x64 or 128x128, on compute capability 9.0."""

    name = "cudnn_fe"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        package="nvidia-cudnn-frontend",
        install="pip install 'nvidia-cudnn-frontend>=1.32'",
        compute_capabilities=((9, 0), (9, 0)),
        head_dims=frozenset({64, 96, 128}),
        deterministic=False,
        max_batch=65_535,
        block_sizes=frozenset({(64, 64), (128, 128)}),
        blocks_only=True,
        source="H200, cudnn-frontend 1.32, backward at D = 128, blocks of 128x128, 16 heads, N = 32,768, bfloat16: 0.955/0.854/0.637 of "
        "the dense rate per kept pair at 10/5/2 % kept (flash-attn-4: 0.84/0.78/0.58)",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        if not request.needs_grad:
            return []
        reasons = []
        if request.dtype is torch.float16:
            reasons.append("its backward takes bfloat16 only, not float16")
        if request.head_dim in (64, 96):
            reasons.append(f"its backward takes head_dim 128 only, not {request.head_dim}")
        if request.num_heads != request.num_kv_heads:
            reasons.append(f"its backward takes as many key heads as query heads, not {request.num_heads}/{request.num_kv_heads}")
        return reasons

    def forward_blocks(self, q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, options: Options) -> tuple[Tensor, Tensor]:
        _check(lists, options)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        if not lists.num_entries:
            return out.zero_(), lse.fill_(-torch.inf)
        for launch in _launches(lists, q, k, uncut=False):
            heads, rows = launch.heads, launch.rows
            result = _library().block_sparse_attention_forward(
                _aligned(launch.whole(q[:, rows, heads])), *(_aligned(x[:, :, launch.kv_heads]) for x in (k, v)), launch.indices,
                block_sizes=_block_sizes(lists, q.shape[0]), q2k_block_nums=launch.counts, sparse_block_size=lists.q_block,
                allow_empty_block_nums=True, softmax_scale=options.scale, layout="bshd",
            )  # fmt: skip
            part, part_lse = result["o_tensor"], result["lse_tensor"]
            if part.shape == out.shape:
                return part, part_lse
            length = rows.stop - rows.start
            out[:, rows, heads], lse[:, heads, rows] = part[:, :length], part_lse[..., :length]
        return out, lse

    def backward_blocks(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: BlockLists, options: Options,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        _check(lists, options)
        assert dlse is None, "has no gradient of lse"
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if not lists.num_entries:
            return dq.zero_(), dk.zero_(), dv.zero_()
        launches = _launches(lists, q, k, uncut=True)
        # each launch computes some query blocks and their contributions to dk and dv
        cut = len({launch.rows.start for launch in launches}) > 1
        totals = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)] if cut else []
        for launch in launches:
            heads, rows = launch.heads, launch.rows
            mine = dq[:, rows, heads]
            given_dq, given_dk, given_dv = launch.whole(mine), dk[:, :, heads], dv[:, :, heads]
            _library().block_sparse_attention_backward(
                _aligned(launch.whole(dout[:, rows, heads])), _aligned(launch.whole(q[:, rows, heads])), _aligned(k[:, :, heads]),
                _aligned(v[:, :, heads]), _aligned(launch.whole(out[:, rows, heads])),
                pad(lse[:, heads, rows], (0, launch.missing), value=torch.inf).detach().contiguous(), launch.indices,
                block_sizes=_block_sizes(lists, q.shape[0]), q2k_block_nums=launch.counts, softmax_scale=options.scale, dq_tensor=given_dq,
                dk_tensor=given_dk, dv_tensor=given_dv, sparse_block_size=lists.q_block, layout="bshd",
            )  # fmt: skip
            if launch.missing:
                mine.copy_(given_dq[:, : mine.shape[1]])
            for total, share in zip(totals, (given_dk, given_dv), strict=False):
                total[:, :, heads] += share
        return (dq, totals[0], totals[1]) if cut else (dq, dk, dv)


@dataclass(frozen=True, eq=False)
class _CudnnLaunch:
    """Some heads of some query blocks, and their lists for each batch entry and head, which the library requires in full.

    Args:
        heads, kv_heads, rows: the selected heads of q, heads of k and v, and positions of q.
        missing: rows of padding that this launch needs in addition.
        counts, indices: (B, heads, blocks) and (B, heads, blocks, width) int32, dense.
    """

    heads: slice
    kv_heads: slice
    rows: slice
    missing: int
    counts: Tensor
    indices: Tensor

    def whole(self, x: Tensor) -> Tensor:
        """Returns x (B, rows, heads, D) with the missing rows added as zeros."""
        return pad(x, (0, 0, 0, 0, 0, self.missing)) if self.missing else x


def _launches(lists: BlockLists, q: Tensor, k: Tensor, *, uncut: bool) -> tuple[_CudnnLaunch, ...]:
    batch, heads, group = q.shape[0], q.shape[2], q.shape[2] // k.shape[2]
    return lists.derived(("cudnn_fe", batch, heads, group, uncut), lambda: tuple(_new_launches(lists, batch, heads, group, uncut)))


def _new_launches(lists: BlockLists, batch: int, num_heads: int, group: int, uncut: bool) -> Iterator[_CudnnLaunch]:
    for table in block_tables.row_tables(lists, group, uncut=uncut):
        shared = lists.num_heads == 1
        first, last = (0, num_heads) if shared else table.heads
        counts, indices = table.full
        rows = slice(table.start * lists.q_block, min(table.end * lists.q_block, lists.num_queries))
        bytes_per_head = batch * indices[0, 0].numel() * 4
        most = min(block_tables.TABLE_BYTES // bytes_per_head, _MOST_HEADS // batch)
        step = max(group, most // group * group)
        # if heads share a list, one copy serves all launches with equally many heads
        copies: dict[int, list[Tensor]] = {}
        for head in range(first, last, step):
            heads = slice(head, min(head + step, last))
            num = heads.stop - heads.start
            own = slice(0, 1) if shared else slice(head - first, heads.stop - first)
            place = num if shared else head
            if place not in copies:
                copies[place] = [x[:, own].expand(batch, num, *x.shape[2:]).contiguous() for x in (counts, indices)]
            kv_heads = slice(heads.start // group, heads.stop // group)
            missing = (rows.start - rows.stop) % _ROW_MULTIPLE[lists.q_block]
            yield _CudnnLaunch(heads, kv_heads, rows, missing, *copies[place])


def _check(lists: BlockLists, options: Options) -> None:
    assert lists.masks is None, "masks inside blocks are not supported"
    assert options.mask.is_trivial and options.dropout is None, "padding, windows and dropout are not supported"


def _block_sizes(lists: BlockLists, batch: int) -> Tensor | None:
    """Returns (B, key blocks) int32, the number of keys in each block, if the last one has fewer; else None."""
    last = lists.num_keys % lists.k_block
    if not last:
        return None

    def make() -> Tensor:
        sizes = torch.full((batch, lists.num_columns), lists.k_block, dtype=torch.int32, device=lists.columns.device)
        sizes[:, -1] = last
        return sizes

    return lists.derived(("cudnn_fe block sizes", batch), make)


def _aligned(x: Tensor) -> Tensor:
    """Returns x, or a copy if bulk copies cannot read its rows: strides must be positive multiples of 16 bytes.

    The result is detached, since some of the library's exports refuse tensors that require a gradient.
    """
    x = x.detach()
    fits = x.stride(-1) == 1 and x.data_ptr() % _ALIGNMENT == 0
    fits = fits and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _library() -> Any:
    return importlib.import_module("cudnn.block_sparse_attention")
