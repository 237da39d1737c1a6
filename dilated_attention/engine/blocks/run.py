"""Runs attention over the pairs that a block pattern keeps: builds its lists, selects a backend, and runs documents one by one.

These are raw functions on plain tensors, for the custom ops and ring attention. The backward takes the out and lse of the whole softmax,
of which these pairs may be a part. Layout: q (B, Nq, H, D), k and v (B, Nk, K, D), lse (B, H, Nq).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dilated_attention.backends import NESTED, AttentionRequest, Backend, BackendUnavailable, Dropout, Mask, Options, detect, registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.block_lists import BlockLists
from dilated_attention.engine.blocks.bitmask import lists_of_kept
from dilated_attention.engine.blocks.launch import Tensors, backward_lists, forward_lists
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import segment_extent
from dilated_attention.pattern import BlockPattern


class BlockSettings(NamedTuple):
    """The non-tensor arguments of an op."""

    is_causal: bool
    scale: float
    dropout_p: float
    deterministic: bool
    needs_grad: bool
    backend: str


class BlockMasks(NamedTuple):
    """What masks pairs or determines their positions, in addition to the pattern.

    Args:
        padding: (B, Nk) bool, True = the key is ignored.
        documents: (start, end) of packed documents, each with a grid of blocks that starts at its first position; None for one document.
        seed: seed of position-based dropout.
        query_offset: position of the first query.
        kept: the blocks that a content-chosen pattern keeps, as ``choose_blocks`` packs them.
    """

    padding: torch.Tensor | None = None
    documents: tuple[Range, ...] | None = None
    seed: torch.Tensor | None = None
    query_offset: int = 0
    kept: torch.Tensor | None = None


@dataclass(frozen=True)
class _Part:
    """A document (see ``DocumentRows``) with the backend and options that compute it."""

    keys: slice
    rows: slice
    front: int
    lists: BlockLists
    backend: Backend
    options: Options

    def of_queries(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return x[(slice(None),) * dim + (self.rows,)]


def blocks_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: BlockPattern, settings: BlockSettings, masks: BlockMasks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that the pattern keeps.

    Raises:
        BackendUnavailable: no backend can compute the forward or, with ``needs_grad``, the backward. Raised before results are allocated.
    """
    parts = _parts(False, (q, k, v), pattern, settings, masks)
    k, v = without_padding(k, v, masks.padding)

    def run(part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = part.of_queries(q), k[:, part.keys], v[:, part.keys]
        return forward_lists(part.backend, part.lists, *tensors, part.options, front=part.front)

    if len(parts) == 1:
        return run(parts[0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype), device=q.device)
    for part in parts:
        part_out, part_lse = run(part)
        part.of_queries(out).copy_(part_out)
        part.of_queries(lse, 2).copy_(part_lse)
    return out, lse


def blocks_backward(
    tensors: Tensors, pattern: BlockPattern, settings: BlockSettings, masks: BlockMasks, dlse: torch.Tensor | None = None
) -> Tensors:
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32 (float64), of the pairs that the pattern keeps.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        dlse: the gradient of lse (B, H, Nq).
    """
    dout, q, k, v, out, lse = tensors
    parts = _parts(True, (q, k, v, dout), pattern, settings, masks)
    k, v = without_padding(k, v, masks.padding)

    def run(part: _Part) -> Tensors:
        dout_, q_, out_ = (part.of_queries(x) for x in (dout, q, out))
        inside = (dout_, q_, k[:, part.keys], v[:, part.keys], out_, part.of_queries(lse, 2))
        part_dlse = None if dlse is None else part.of_queries(dlse, 2)
        return backward_lists(part.backend, part.lists, inside, part.options, part_dlse, front=part.front)

    if len(parts) == 1:
        return run(parts[0])
    # documents share no rows, so nothing needs to be summed
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for part in parts:
        dq, dk, dv = run(part)
        part.of_queries(grads[0]).copy_(dq)
        grads[1][:, part.keys] = dk
        grads[2][:, part.keys] = dv
    return grads


def _parts(is_backward: bool, views: Tensors, pattern: BlockPattern, settings: BlockSettings, masks: BlockMasks) -> list[_Part]:
    """Returns every document with its lists, backend and options."""
    q, k = views[:2]
    seed = 0 if masks.seed is None else int(masks.seed.item())
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    parts = []
    for piece in pieces_of(pattern, q.shape[1], k.shape[1], q.shape[2], settings.is_causal, masks, q.device):
        keys, rows, front, lists = piece
        backend = select_backend(request_of(lists, views, settings, masks.padding is not None, is_backward), settings)
        padding = None if masks.padding is None else masks.padding[:, keys]
        dropout = None
        if settings.dropout_p:
            first = masks.query_offset + rows.start - front
            dropout = _dropout(q, settings.dropout_p, seed, (first, first + lists.num_queries), (keys.start, keys.stop))
        options = Options(scale=settings.scale, mask=Mask(padding), dropout=dropout, deterministic=deterministic)
        parts.append(_Part(keys, rows, front, lists, backend, options))
    return parts


class DocumentRows(NamedTuple):
    """A document: its keys, its rows of q, which begin ``front`` rows inside a query block, and its lists, which include those rows."""

    keys: slice
    rows: slice
    front: int
    lists: BlockLists


def pieces_of(
    pattern: BlockPattern,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    is_causal: bool,
    masks: BlockMasks,
    device: torch.device,
) -> Iterator[DocumentRows]:
    """Yields the documents, or the whole sequence as one."""
    # query blocks begin on the pattern's grid: the rows before the first query are computed, too, and cut off afterwards
    front = masks.query_offset % pattern.q_block
    first_query = masks.query_offset - front
    # first row of the document in ``kept``, where the rows of documents follow one another
    first_row = 0
    for start, end in masks.documents or ((0, num_keys),):
        keys = slice(start, end)
        rows = slice(0, num_queries) if masks.documents is None else keys
        length = front + rows.stop - rows.start
        if masks.kept is None:
            lists = block_lists(
                pattern, end - start, num_heads, first_query=first_query, num_queries=length, is_causal=is_causal, device=device
            )
        else:
            kept = masks.kept[:, :, first_row:]
            lists = lists_of_kept(kept, pattern, length, end - start, is_causal=is_causal, query_offset=first_query)
            first_row += lists.num_rows
        yield DocumentRows(keys, rows, front, lists)


def request_of(lists: BlockLists, views: Tensors, settings: BlockSettings, key_mask: bool, is_backward: bool) -> AttentionRequest:
    """Builds the request to a backend for these lists. ``views`` are q, k and the other tensors that it reads."""
    q, k = views[:2]
    return AttentionRequest(
        hardware=detect(q.device),
        dtype=q.dtype,
        head_dim=q.shape[3],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        causal=settings.is_causal,
        needs_grad=is_backward,
        key_mask=key_mask,
        dropout=settings.dropout_p > 0,
        deterministic=settings.deterministic or torch.are_deterministic_algorithms_enabled(),
        torch_deterministic=torch.are_deterministic_algorithms_enabled(),
        extent=max(segment_extent(x, max(lists.num_queries, lists.num_keys)) for x in views),
        # mean number of keys that a row keeps
        length=max(1, lists.num_entries * lists.k_block // max(1, lists.num_groups * lists.num_rows)),
        blocks=(lists.q_block, lists.k_block),
        block_masks=lists.mask_kind,
    )


def select_backend(request: AttentionRequest, settings: BlockSettings) -> Backend:
    """Selects the backend of this pass. A forward that needs gradients checks both passes, so BackendUnavailable comes before any work."""
    if settings.backend == NESTED:
        raise BackendUnavailable(
            f"backend={NESTED!r} cannot compute {request.describe()}\n  {NESTED}: visits the pairs of nested branches, not lists of "
            "blocks\n"
            "  backend='auto' takes the fastest that can"
        )
    chosen = registry.select(request, settings.backend)
    if settings.needs_grad and not request.needs_grad:
        registry.select(replace(request, needs_grad=True), settings.backend)
    return chosen


def _dropout(q: torch.Tensor, probability: float, seed: int, queries: Range, keys: Range) -> Dropout:
    """Returns dropout by position in the whole sequence, so that a cut does not change which elements are dropped."""
    B, _, H, _ = q.shape

    def positions(where: Range) -> torch.Tensor:
        return torch.arange(*where, device=q.device).expand(B, -1)

    batch, heads = torch.arange(B, device=q.device), torch.arange(H, device=q.device)
    return Dropout(probability, seed, batch, heads, positions(queries), positions(keys))
