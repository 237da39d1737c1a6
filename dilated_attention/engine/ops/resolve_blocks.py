"""Runs calls of block-sparse attention, and the blocks' part of calls of dilated branches and blocks in one softmax.

Every document has its lists of kept blocks and its backend. Its batch is split to the backend's limits, and dlse is handled where the
backend takes none.

Layout: q, dout, out (B, Nq, H, D), k and v (B, Nk, K, D), lse and dlse (B, H, Nq).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends import Dropout
from dilated_attention.backends.base import Backend, Capabilities, Mask, Options, new_lse, placed
from dilated_attention.engine.blocks.lists import block_lists, lists_of_kept, select_groups
from dilated_attention.engine.branches.launches import Masks, entries_at_once, without_padding
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.branches.run_problems import shares
from dilated_attention.engine.ops.prepare import new_like, request_of, select_backend
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.plan import Tensors
from dilated_attention.pattern import BlockPattern, pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import BlockLists


class Piece(NamedTuple):
    """A document, or the whole sequence as one, and how a pass computes it.

    Args:
        keys: its slice of k and v.
        rows: its slice of q.
        front: number of positions from the start of a query block to the first of these rows.
        lists: the blocks that are kept, for ``front`` rows more than ``rows``; in a remembered pass a weak reference to them.
        options, backend: of a pass, by ``make_pieces``; None before.
    """

    keys: slice
    rows: slice
    front: int
    lists: Any
    options: Any = None
    backend: Any = None


# how one pass runs: every document
BlockPass = tuple[Piece, ...]


def pieces_of(
    pattern: BlockPattern, sizes: tuple[int, int, int], settings: CallSettings, documents: tuple[Range, ...] | None, kept: Tensor | None,
    device: torch.device,
) -> Iterator[Piece]:  # fmt: skip
    """Yields a piece for every document, or the whole sequence as one piece, without options and backend.

    Args:
        sizes: the numbers of queries, keys and heads.
        documents: (start, end) of packed documents, each with a grid of blocks that starts at its first position; None for one document.
        kept: the blocks that a content-chosen pattern keeps, as ``choose_blocks`` packs them.
    """
    num_queries, num_keys, num_heads = sizes
    # query blocks begin on the pattern's grid, so the first one may begin before the first query: these positions are computed, too, and
    # cut off afterwards
    front = settings.query_offset % pattern.q_block
    first_query = settings.query_offset - front
    # the document's first row of blocks in ``kept``, which holds those of all documents one after the other
    first_block_row = 0
    for start, end in documents or ((0, num_keys),):
        keys = slice(start, end)
        # queries of packed documents are at the same positions as keys: they allow no query_offset, so ``front`` is 0
        rows = slice(0, num_queries) if documents is None else keys
        length = front + rows.stop - rows.start
        if kept is None:
            lists = block_lists(
                pattern, end - start, num_heads, first_query=first_query, num_queries=length, is_causal=settings.is_causal, device=device
            )
        else:
            # lists_of_kept reads only as many rows of blocks as ``length`` needs
            of_document = kept[:, :, first_block_row:]
            lists = lists_of_kept(of_document, pattern, length, end - start, is_causal=settings.is_causal, query_offset=first_query)
            first_block_row += lists.num_rows
        yield Piece(keys, rows, front, lists)


def blocks_backend(lists: BlockLists, views: Tensors, settings: CallSettings, key_mask: bool, is_backward: bool) -> Backend:
    """Selects the backend for these lists. ``views``: q, k and the other tensors that it reads; ``key_mask``: whether there is padding."""
    request = request_of(
        views,
        settings,
        is_backward,
        # the positions that the lists span
        max(lists.num_queries, lists.num_keys),
        key_mask=key_mask,
        # mean number of keys that a row keeps; a group is a head of a batch entry that has its own lists
        length=max(1, lists.num_entries * lists.k_block // max(1, lists.num_groups * lists.num_rows)),
        blocks=(lists.q_block, lists.k_block),
        block_masks=lists.mask_kind,
    )
    return select_backend(request, settings)


def run_lists(
    backend: Backend, lists: BlockLists, tensors: Tensors, options: Options, dlse: Tensor | None = None, *, place: int | Tensor = 0,
    into: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that ``lists`` keep; or in a backward their shares
    (dq, dk, dv), in the inputs' dtype or float32 (float64).

    Args:
        tensors: q, k and v; or dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        options: options of the whole batch; causality is in the lists.
        place: which of the lists' rows, whole query blocks, q has: all from this number on, or those with these numbers. Dropout counts the
            others, too.
        into: where out or dq goes if one launch computes it for the rows of q alone; otherwise it is another tensor.
    """
    is_forward, where = len(tensors) == 3, _ROWS[len(tensors)]
    Nq = tensors[0].shape[1]
    is_part = Nq < lists.num_queries
    if not is_forward and (options.mask.padding is not None or not lists.fills_every_row):
        # there may be rows without keys, which must give their scores weight 0; exp(s − (+inf)) does that in every kernel
        tensors = *tensors[:5], tensors[5].masked_fill(tensors[5] == -torch.inf, torch.inf)
    if is_part:
        # lse is +inf: the other rows must get weight 0, too
        values = 0.0, 0.0, torch.inf
        tensors = tuple(_spread(x, dim, place, lists, values[dim]) if dim else x for x, dim in zip(tensors, where, strict=True))
        dlse, into = None if dlse is None else _spread(dlse, 2, place, lists), None
    q, k, v = tensors[:3] if is_forward else tensors[1:4]
    assert q.shape[1] == lists.num_queries and k.shape[1] == lists.num_keys
    run: Any = backend and (backend.forward if is_forward else backend.backward)
    results: Tensors
    if not lists.num_entries or not q.shape[0]:
        results = tuple(map(torch.zeros_like, (q, k, v)))
        results = (results[0], new_lse(q).fill_(-torch.inf)) if is_forward else results
    elif len(launches := _launches(backend.capabilities, lists, tensors[:5], options)) == 1 and is_forward:
        # a backend may ignore ``into``; then placed copies
        results = placed(run(*tensors, options, lists, out=(into, None)), (into, None))
    elif len(launches) == 1 and (dlse is None or backend.capabilities.lse_grad):
        views = into, None, None
        results = placed(run(*tensors, options, lists, dlse=dlse, grads=views), views)
    else:
        parts: list[Tensors] = []
        for entries, own_lists, own_options in launches:
            own = tuple(x[entries] for x in tensors)
            # ``shares`` adds what dlse contributes where the backend takes none
            parts.append(
                run(*own, own_options, own_lists) if is_forward
                else shares(backend, own, own_options, None if dlse is None else dlse[entries], own_lists)
            )  # fmt: skip
        results = tuple(map(torch.cat, zip(*parts, strict=True))) if len(parts) > 1 else parts[0]
    if not is_part:
        return results
    # of the backward's results, only dq has rows of queries
    return tuple(_taken(x, dim, place, Nq) if dim else x for x, dim in zip(results, (1, 2) if is_forward else (1, 0, 0), strict=True))


# of q, k, v, and of dout, q, k, v, out, lse: the dimension of queries; 0 for keys
_ROWS = {3: (1, 0, 0), 6: (1, 1, 0, 0, 1, 2)}


def _launches(capabilities: Capabilities, lists: BlockLists, tensors: Tensors, options: Options) -> list[tuple[slice, BlockLists, Options]]:
    """Returns the batch entries of each launch with their lists and options, as many entries as the backend takes at once."""
    B, at_once = tensors[0].shape[0], entries_at_once(tensors, capabilities)
    if at_once == B:
        return [(slice(None), lists, options)]
    slices = [slice(start, min(start + at_once, B)) for start in range(0, B, at_once)]
    launches = []
    for entries in slices:
        own, heads = lists, lists.num_heads
        if lists.num_batch > 1:
            own = select_groups(lists, entries.start * heads, entries.stop * heads, num_batch=entries.stop - entries.start)
        launches.append((entries, own, _options_of(options, entries)))
    return launches


def _options_of(options: Options, entries: slice) -> Options:
    """Returns the options of some batch entries."""
    padding, dropout, bias = options.mask.padding, options.dropout, options.bias
    if padding is not None:
        options = replace(options, mask=Mask(padding[entries]))
    if bias is not None:
        options = replace(options, bias=bias.part(entries, entries))
    if dropout is not None:
        options = replace(
            options, dropout=replace(dropout, batch=dropout.batch[entries], queries=dropout.queries[entries], keys=dropout.keys[entries])
        )
    return options


def _spread(x: Tensor, dim: int, place: int | Tensor, lists: BlockLists, value: float = 0.0) -> Tensor:
    """Returns all of the lists' rows along ``dim``: those of x, and ``value`` in the others."""
    whole = x.new_full((*x.shape[:dim], lists.num_queries, *x.shape[dim + 1 :]), value)
    if isinstance(place, Tensor):
        return whole.index_copy_(dim, place, x)
    whole.narrow(dim, place, x.shape[dim]).copy_(x)
    return whole


def _taken(whole: Tensor, dim: int, place: int | Tensor, count: int) -> Tensor:
    """Returns the rows that ``_spread`` was given."""
    return whole.index_select(dim, place) if isinstance(place, Tensor) else whole.narrow(dim, place, count)


def run_pieces(pieces: BlockPass, tensors: Tensors, padding: Tensor | None, dlse: Tensor | None = None) -> Tensors:
    """Returns what ``run_lists`` does, of all documents.

    Args:
        tensors, dlse: as in ``run_lists``, of the whole call.
    """
    at = 0 if len(tensors) == 3 else 1
    q, k, v = tensors[at : at + 3]
    tensors = *tensors[:at], q, *without_padding(k, v, padding), *tensors[at + 3 :]
    if len(pieces) == 1:
        (whole,) = pieces
        return run_lists(whole.backend, whole.lists, tensors, whole.options, dlse, place=whole.front)
    # documents share no rows, so nothing needs to be summed
    results = tuple(map(new_like, (q, k, v))) if at else (new_like(q), new_lse(q))
    for keys, rows, front, lists, options, backend in pieces:
        # by the dimension of queries, as in _ROWS
        inside = (slice(None), keys), (slice(None), rows), (slice(None), slice(None), rows)
        own = tuple(x[inside[dim]] for x, dim in zip(tensors, _ROWS[len(tensors)], strict=True))
        found = run_lists(backend, lists, own, options, None if dlse is None else dlse[inside[2]], place=front)
        for whole_result, part, dim in zip(results, found, (1, 0, 0) if at else (1, 2), strict=True):
            whole_result[inside[dim]] = part
    return results


def make_pieces(
    settings: CallSettings, tensors: Tensors, documents: tuple[Range, ...] | None, kept: Tensor | None, masks: Masks
) -> tuple[BlockPass, BlockPass]:
    """Chooses lists, backend and options of every document. Returns the pieces, and what later passes may recall of them, or nothing.

    Args:
        tensors: q, k and v, of a backward dout and out, too.
        kept: the blocks that a content-chosen pattern has chosen.
    """
    q, k = tensors[:2]
    pattern, sizes, (padding, seed, bias) = pattern_from_spec(settings.blocks), (q.shape[1], k.shape[1], q.shape[2]), masks
    pieces = []
    for keys, rows, front, lists, *_ in pieces_of(pattern, sizes, settings, documents, kept, q.device):
        backend = blocks_backend(lists, tensors[:4], settings, padding is not None, len(tensors) > 3)
        mask, dropout, own_bias = Mask(None if padding is None else padding[:, keys]), None, None
        # positions in the whole sequence of the rows that are computed, which begin ``front`` before ``rows``
        first = settings.query_offset + rows.start - front
        end = first + lists.num_queries
        if bias is not None:
            # queries' coordinates, too, come from bias.keys, which has every position; bias.queries begins only after ``front``
            own_bias = bias._replace(queries=bias.keys[:, first:end], keys=bias.keys[:, keys])
        if settings.dropout_p:
            # by position in the whole sequence, so that a cut does not change which elements are dropped
            spans = (0, q.shape[0]), (0, q.shape[2]), (first, end), (keys.start, keys.stop)
            batch, heads, *positions = (torch.arange(*span, device=q.device) for span in spans)
            dropout = Dropout(settings.dropout_p, seed, batch, heads, *(x.expand(q.shape[0], -1) for x in positions))
        options = settings.kernel_options(mask=mask, dropout=dropout, bias=own_bias)
        pieces.append(Piece(keys, rows, front, lists, options, backend))
    # options that hold values of this call are not remembered. Lists are, by weak references: only their own cache, which is limited,
    # keeps them alive
    plain = padding is None and not settings.dropout_p and kept is None and bias is None
    return tuple(pieces), tuple([piece._replace(lists=weakref.ref(piece.lists)) for piece in pieces]) if plain else ()


def recalled(remembered: BlockPass) -> BlockPass:
    """Returns the pieces of a pass with their lists; none if these are gone."""
    pieces = tuple([piece._replace(lists=piece.lists()) for piece in remembered])
    return pieces if all([piece.lists is not None for piece in pieces]) else ()  # noqa: C419 - a generator takes longer


def as_new(x: Tensor) -> Tensor:
    """Returns x, or a copy of it if it has a storage offset or other strides than the default ones, which the op's fake promises.

    Strides of dimensions of size 1 must be the default ones, too.
    """
    strides = itertools.accumulate((max(size, 1) for size in reversed(x.shape[1:])), operator.mul, initial=1)
    if x.storage_offset() == 0 and x.stride() == tuple(strides)[::-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)
