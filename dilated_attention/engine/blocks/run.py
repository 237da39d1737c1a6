"""Runs attention over the pairs that a block pattern keeps: builds its lists, selects a backend, and runs documents one by one.

These are raw functions on plain tensors, for the custom ops and ring attention. The backward takes the out and lse of the whole softmax,
of which these pairs may be a part. Layout: q (B, Nq, H, D), k and v (B, Nk, K, D), lse (B, H, Nq).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends import NESTED, AttentionRequest, Backend, BackendUnavailable, Dropout, Mask, Options
from dilated_attention.backends.base import Capabilities, accumulation_dtype
from dilated_attention.engine.blocks.bitmask import lists_of_kept
from dilated_attention.engine.blocks.launch import Tensors, backward_lists, forward_lists
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import BlockPattern, pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import BlockLists


class BlockMasks(NamedTuple):
    """What masks pairs or determines their positions, in addition to the pattern.

    Args:
        padding: (B, Nk) bool, True = the key is ignored.
        documents: (start, end) of packed documents, each with a grid of blocks that starts at its first position; None for one document.
        seed: seed of position-based dropout.
        kept: the blocks that a content-chosen pattern keeps, as ``choose_blocks`` packs them.
    """

    padding: Tensor | None = None
    documents: tuple[Range, ...] | None = None
    seed: Tensor | None = None
    kept: Tensor | None = None


class _Part(NamedTuple):
    """The keys and rows of a document (see ``DocumentRows``), and the options and the backend, as it declares itself, that compute it."""

    keys: slice
    rows: slice
    front: int
    options: Options
    backend: Backend
    capabilities: Capabilities


class BlockPass(NamedTuple):
    """How one pass runs: every document, or the whole sequence as one, and its lists, or in a remembered pass weak references to them."""

    parts: tuple[_Part, ...]
    lists: tuple[Any, ...]

    def remembered(self) -> BlockPass:
        """Returns the pass for later calls. It does not keep the lists alive, which have a cache of limited size."""
        return self._replace(lists=tuple(map(weakref.ref, self.lists)))

    def again(self) -> BlockPass | None:
        """Returns a remembered pass with its lists, or None if they are gone or a backend now declares something else."""
        lists = tuple([found() for found in self.lists])
        if None in lists or not all(part.backend.capabilities is part.capabilities for part in self.parts):
            return None
        return BlockPass(self.parts, lists)


def blocks_forward(found: BlockPass, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that the pattern keeps."""
    if padding is not None:
        k, v = without_padding(k, v, padding)
    if len(found.parts) == 1:
        part = found.parts[0]
        out, lse = forward_lists(part.backend, found.lists[0], q, k, v, part.options, front=part.front)
        return as_new(out), as_new(lse)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype), device=q.device)
    for part, lists in zip(found.parts, found.lists, strict=True):
        rows, keys = part.rows, part.keys
        out[:, rows], lse[:, :, rows] = forward_lists(
            part.backend, lists, q[:, rows], k[:, keys], v[:, keys], part.options, front=part.front
        )
    return out, lse


def blocks_shares(found: BlockPass, tensors: Tensors, padding: Tensor | None, dlse: Tensor | None = None) -> Tensors:
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32 (float64), of the pairs that the pattern keeps.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        dlse: the gradient of lse (B, H, Nq).
    """
    dout, q, k, v, out, lse = tensors
    if padding is not None:
        k, v = without_padding(k, v, padding)
    if len(found.parts) == 1:
        part = found.parts[0]
        return backward_lists(part.backend, found.lists[0], (dout, q, k, v, out, lse), part.options, dlse, front=part.front)
    # documents share no rows, so nothing needs to be summed
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for part, lists in zip(found.parts, found.lists, strict=True):
        rows, keys = part.rows, part.keys
        inside = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        part_dlse = None if dlse is None else dlse[:, :, rows]
        shares = backward_lists(part.backend, lists, inside, part.options, part_dlse, front=part.front)
        grads[0][:, rows], grads[1][:, keys], grads[2][:, keys] = shares
    return grads


def make_pass(is_backward: bool, views: Tensors, settings: CallSettings, masks: BlockMasks) -> BlockPass:
    """Chooses the lists, backend and options of every document. ``views`` are q, k and the other tensors that kernels read.

    Raises:
        BackendUnavailable: no backend can compute the forward or, with ``needs_grad``, the backward. Raised before results are allocated.
    """
    q, k = views[:2]
    pattern = pattern_from_spec(settings.blocks)
    seed = 0 if masks.seed is None else int(masks.seed.item())
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    parts, found = [], []
    for keys, rows, front, lists in pieces_of(pattern, (q.shape[1], k.shape[1], q.shape[2]), settings, masks, q.device):
        backend = select_backend(request_of(lists, views, settings, masks.padding is not None, is_backward), settings)
        padding = None if masks.padding is None else masks.padding[:, keys]
        dropout = None
        if settings.dropout_p:
            first = settings.query_offset + rows.start - front
            dropout = _dropout(q, settings.dropout_p, seed, (first, first + lists.num_queries), (keys.start, keys.stop))
        options = Options(settings.scale, mask=Mask(padding), dropout=dropout, deterministic=deterministic, softcap=settings.softcap)
        parts.append(_Part(keys, rows, front, options, backend, backend.capabilities))
        found.append(lists)
    return BlockPass(tuple(parts), tuple(found))


class DocumentRows(NamedTuple):
    """A document: its keys, its rows of q, which begin ``front`` rows inside a query block, and its lists, which include those rows."""

    keys: slice
    rows: slice
    front: int
    lists: BlockLists


def pieces_of(
    pattern: BlockPattern, sizes: tuple[int, int, int], settings: CallSettings, masks: BlockMasks, device: torch.device
) -> Iterator[DocumentRows]:
    """Yields the documents, or the whole sequence as one. ``sizes``: the numbers of queries, keys and heads."""
    num_queries, num_keys, num_heads = sizes
    # query blocks begin on the pattern's grid: the rows before the first query are computed, too, and cut off afterwards
    front = settings.query_offset % pattern.q_block
    first_query = settings.query_offset - front
    # first row of the document in ``kept``, where the rows of documents follow one another
    first_row = 0
    for start, end in masks.documents or ((0, num_keys),):
        keys = slice(start, end)
        rows = slice(0, num_queries) if masks.documents is None else keys
        length = front + rows.stop - rows.start
        if masks.kept is None:
            lists = block_lists(
                pattern, end - start, num_heads, first_query=first_query, num_queries=length, is_causal=settings.is_causal, device=device
            )
        else:
            kept = masks.kept[:, :, first_row:]
            lists = lists_of_kept(kept, pattern, length, end - start, is_causal=settings.is_causal, query_offset=first_query)
            first_row += lists.num_rows
        yield DocumentRows(keys, rows, front, lists)


def request_of(lists: BlockLists, views: Tensors, settings: CallSettings, key_mask: bool, is_backward: bool) -> AttentionRequest:
    """Builds the request to a backend for these lists. ``views`` are q, k and the other tensors that it reads."""
    return prepare.request_of(
        views,
        settings,
        is_backward,
        max(lists.num_queries, lists.num_keys),
        key_mask=key_mask,
        # mean number of keys that a row keeps
        length=max(1, lists.num_entries * lists.k_block // max(1, lists.num_groups * lists.num_rows)),
        blocks=(lists.q_block, lists.k_block),
        block_masks=lists.mask_kind,
    )


def select_backend(request: AttentionRequest, settings: CallSettings) -> Backend:
    """Selects the backend of this pass as ``prepare.select_backend`` does."""
    if settings.backend == NESTED:
        raise BackendUnavailable(
            f"backend={NESTED!r} cannot compute {request.describe()}\n  {NESTED}: "
            "visits the pairs of nested branches, not lists of blocks\n  backend='auto' uses the fastest that can"
        )
    return prepare.select_backend(request, settings)


def _dropout(q: Tensor, probability: float, seed: int, queries: Range, keys: Range) -> Dropout:
    """Returns dropout by position in the whole sequence, so that a cut does not change which elements are dropped."""
    B, _, H, _ = q.shape

    def positions(where: Range) -> Tensor:
        return torch.arange(*where, device=q.device).expand(B, -1)

    batch, heads = torch.arange(B, device=q.device), torch.arange(H, device=q.device)
    return Dropout(probability, seed, batch, heads, positions(queries), positions(keys))


def as_new(x: Tensor) -> Tensor:
    """Returns x with default strides and no storage offset, as the fake implementation promises, or a copy of x if it has others.

    Strides of dimensions of size 1 must be the default ones, too.
    """
    strides = itertools.accumulate((max(size, 1) for size in reversed(x.shape[1:])), operator.mul, initial=1)
    if x.storage_offset() == 0 and x.stride() == tuple(strides)[::-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)
