"""Resolves and runs calls of block-sparse attention, alone or together with dilated branches in one softmax.

Both parts of the union have kernels of their own. The forward merges their (out, lse). The backward runs each part's backward with the
merged out and lse, which yields exactly its share of dq, dk, dv, and adds the shares. No gradient flows through the merge.

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
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends import Dropout
from dilated_attention.backends.base import Backend, Bias, Capabilities, Mask, Options, Result, accumulation_dtype, new_lse, placed
from dilated_attention.backends.merge import merge_onto
from dilated_attention.engine.blocks.lists import block_lists, lists_of_kept, select_groups
from dilated_attention.engine.branches.launches import entries_at_once, without_padding
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.branches.run_problems import shares
from dilated_attention.engine.ops.prepare import new_like, request_of, select_backend
from dilated_attention.engine.ops.resolve import (
    CallInputs,
    LocalCall,
    MaybeTensor,
    Outputs,
    ResolvedCall,
    ResolvedDilated,
    Tensors,
    masks_of,
    record_of,
    resolve,
)
from dilated_attention.engine.ops.settings import CallSettings, as_dense
from dilated_attention.engine.plan import Plan
from dilated_attention.pattern import BlockPattern, pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import BlockLists


class Piece(NamedTuple):
    """A document, or the whole sequence as one, and how a pass computes it.

    Args:
        keys: its slice of k and v.
        rows: its slice of q.
        front: number of positions from the start of a query block to the first of these rows.
        lists: the blocks that are kept, for ``front`` rows more than ``rows``; in a remembered pass a weak reference to them.
        options, backend: of a pass, by ``make_pass``; None before.
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


def forward_lists(
    backend: Backend, lists: BlockLists, q: Tensor, k: Tensor, v: Tensor, options: Options, *, place: int | Tensor = 0,
    into: Tensor | None = None,
) -> Result:  # fmt: skip
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that ``lists`` keep.

    Args:
        into: where out goes if one launch computes it for the rows of q alone; otherwise the out returned is another tensor.
        options: options of the whole batch; causality is in the lists.
        place: which of the lists' rows, whole query blocks, q has: all from this number on, or those with these numbers. Dropout counts the
            others, too.
    """
    Nq, is_part = q.shape[1], q.shape[1] < lists.num_queries
    if is_part:
        q, into = _spread(q, 1, place, lists), None
    assert q.shape[1] == lists.num_queries and k.shape[1] == lists.num_keys
    if not lists.num_entries or not q.shape[0]:
        out, lse = torch.zeros_like(q), new_lse(q).fill_(-torch.inf)
    else:
        launches = _launches(backend.capabilities, lists, (q, k, v), options)
        if len(launches) == 1:
            # a backend may ignore ``into``; then placed copies
            out, lse = placed(backend.forward(q, k, v, options, lists, out=(into, None)), (into, None))
        else:
            results = [
                backend.forward(q[entries], k[entries], v[entries], own_options, own_lists) for entries, own_lists, own_options in launches
            ]
            out, lse = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    return (_taken(out, 1, place, Nq), _taken(lse, 2, place, Nq)) if is_part else (out, lse)


def backward_lists(
    backend: Backend, lists: BlockLists, tensors: Tensors, options: Options, dlse: Tensor | None, *,
    place: int | Tensor = 0, into: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32, of the pairs that ``lists`` keep.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        options, place: same as in ``forward_lists``; so is ``into``, for dq.
    """
    dout, q, k, v, out, lse = tensors
    Nq, is_part = q.shape[1], q.shape[1] < lists.num_queries
    if options.mask.padding is not None or not lists.fills_every_row:
        # there may be rows without keys, which must give their scores weight 0; exp(s − (+inf)) does that in every kernel
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if is_part:
        dout, q, out = (_spread(x, 1, place, lists) for x in (dout, q, out))
        # +inf: the other rows must get weight 0, too
        lse = _spread(lse, 2, place, lists, torch.inf)
        dlse, into = None if dlse is None else _spread(dlse, 2, place, lists), None
    if not lists.num_entries or not q.shape[0]:
        grads: Tensors = tuple(torch.zeros_like(x) for x in (q, k, v))
    else:
        launches = _launches(backend.capabilities, lists, (dout, q, k, v, out), options)
        if len(launches) == 1 and (dlse is None or backend.capabilities.lse_grad):
            views = into, None, None
            grads = placed(backend.backward(dout, q, k, v, out, lse, options, lists, dlse=dlse, grads=views), views)
        else:
            # ``shares`` adds what dlse contributes where the backend takes none
            results = []
            for entries, own_lists, own_options in launches:
                own_tensors = tuple(x[entries] for x in (dout, q, k, v, out, lse))
                results.append(shares(backend, own_tensors, own_options, None if dlse is None else dlse[entries], own_lists))
            grads = tuple(torch.cat(of_launches) for of_launches in zip(*results, strict=True)) if len(results) > 1 else results[0]
    return (_taken(grads[0], 1, place, Nq), *grads[1:]) if is_part else grads


def _launches(capabilities: Capabilities, lists: BlockLists, tensors: Tensors, options: Options) -> list[tuple[slice, BlockLists, Options]]:
    """Returns the batch entries of each launch with their lists and options, as many entries as the backend takes at once."""
    B, at_once = tensors[0].shape[0], entries_at_once(tensors, capabilities)
    if at_once == B:
        return [(slice(None), lists, options)]
    slices = [slice(start, min(start + at_once, B)) for start in range(0, B, at_once)]
    return [(entries, _lists_of(lists, entries), _options_of(options, entries)) for entries in slices]


def _lists_of(lists: BlockLists, entries: slice) -> BlockLists:
    """Returns the lists of some batch entries."""
    if lists.num_batch == 1:
        return lists
    first, last = entries.start * lists.num_heads, entries.stop * lists.num_heads
    return select_groups(lists, first, last, num_batch=entries.stop - entries.start)


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


def blocks_forward(pieces: BlockPass, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Result:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that the pattern keeps."""
    k, v = without_padding(k, v, padding)
    if len(pieces) == 1:
        (whole,) = pieces
        out, lse = forward_lists(whole.backend, whole.lists, q, k, v, whole.options, place=whole.front)
        # results of a backend or cut at the front; those of several pieces are new anyway
        return as_new(out), as_new(lse)
    out, lse = new_like(q), new_lse(q)
    for keys, rows, front, lists, options, backend in pieces:
        out[:, rows], lse[:, :, rows] = forward_lists(backend, lists, q[:, rows], k[:, keys], v[:, keys], options, place=front)
    return out, lse


def blocks_shares(pieces: BlockPass, tensors: Tensors, padding: Tensor | None, dlse: Tensor | None) -> Tensors:
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32 (float64), of the pairs that the pattern keeps.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        dlse: the gradient of lse (B, H, Nq).
    """
    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, padding)
    if len(pieces) == 1:
        (whole,) = pieces
        return backward_lists(whole.backend, whole.lists, (dout, q, k, v, out, lse), whole.options, dlse, place=whole.front)
    # documents share no rows, so nothing needs to be summed
    dq, dk, dv = (new_like(x) for x in (q, k, v))
    for keys, rows, front, lists, options, backend in pieces:
        inside = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        dlse_inside = None if dlse is None else dlse[:, :, rows]
        dq[:, rows], dk[:, keys], dv[:, keys] = backward_lists(backend, lists, inside, options, dlse_inside, place=front)
    return dq, dk, dv


class ResolvedBlocks(LocalCall):
    """Calls of block-sparse attention. ``passes`` remembers only passes without padding, dropout, content-chosen blocks and bias.

    The op's coordinates, slopes and sinks do not come here: ``run_forward`` and ``run_backward`` make the bias, and handle sinks.
    """

    name = "block_sparse_attention"

    def forward(self, inputs: CallInputs, bias: Bias | None) -> Outputs:
        (q, k, v), pieces = self.tensors_and_pass(inputs[:3], inputs, bias)
        return *blocks_forward(pieces, q, k, v, inputs.key_padding_mask), None

    def backward(self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, bias: Bias | None, outputs: Outputs) -> Tensors:
        out, lse, _ = outputs
        (q, k, v, dout, out), pieces = self.tensors_and_pass((*inputs[:3], dout, out), inputs, bias)
        grads = blocks_shares(pieces, (dout, q, k, v, out, lse), inputs.key_padding_mask, dlse)
        return tuple([as_new(grad.to(q.dtype)) for grad in grads])

    def make_pass(self, tensors: Tensors, inputs: CallInputs, more: Any) -> tuple[BlockPass, Any]:
        """Chooses lists, backend and options of every document. ``more``: the bias."""
        q, k, padding, kept, bias = *tensors[:2], inputs.key_padding_mask, inputs.kept, more
        # a forward gets q, k and v, a backward dout and out, too
        settings, is_backward, seed = self.settings, len(tensors) > 3, masks_of(inputs, None).seed
        pattern, sizes = pattern_from_spec(settings.blocks), (q.shape[1], k.shape[1], q.shape[2])
        pieces = []
        for keys, rows, front, lists, *_ in pieces_of(pattern, sizes, settings, self.documents, kept, q.device):
            backend = blocks_backend(lists, tensors[:4], settings, padding is not None, is_backward)
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
        plain = padding is None and inputs.seed is None and kept is None and bias is None
        return tuple(pieces), [piece._replace(lists=weakref.ref(piece.lists)) for piece in pieces] if plain else None

    def remembered(self, key: tuple[Any, ...]) -> BlockPass | None:
        """Returns a pass with its lists, or None if they are gone."""
        pieces = tuple([piece._replace(lists=piece.lists()) for piece in self.passes.get(key, ())])
        return pieces if pieces and all([piece.lists is not None for piece in pieces]) else None  # noqa: C419 - a generator takes longer


class ResolvedUnion(ResolvedCall):
    """Calls of dilated branches and a block pattern together: each has a record of its own, and their results are merged here."""

    name = "block_sparse_dilated_attention"

    @cached_property
    def both(self) -> tuple[ResolvedDilated, ResolvedBlocks]:
        arguments = self.settings, self.device_type, self.documents
        return ResolvedDilated(*arguments), ResolvedBlocks(*arguments)

    def tensors_and_passes(self, tensors: Tensors, inputs: CallInputs, bias: Bias | None) -> tuple[Tensors, BlockPass, Plan]:
        """Returns the tensors as kernels accept them, the pieces of the block pattern and the plan of the branches."""
        dilated, blocks = self.both
        # False: no outputs of branches are saved
        tensors, plan = dilated.tensors_and_pass(tensors, inputs, False)
        return *blocks.tensors_and_pass(tensors, inputs, bias), plan

    def forward(self, inputs: CallInputs, bias: Bias | None) -> Outputs:
        (q, k, v), pieces, plan = self.tensors_and_passes(inputs[:3], inputs, bias)
        out_of_blocks, lse_of_blocks = blocks_forward(pieces, q, k, v, inputs.key_padding_mask)
        out, lse = plan.runner.forward(plan, q, k, v, masks_of(inputs, bias), None)
        merge_onto(out, lse.transpose(1, 2), out_of_blocks, lse_of_blocks.transpose(1, 2))
        return out, lse, None

    def backward(self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, bias: Bias | None, outputs: Outputs) -> Tensors:
        out, lse, _ = outputs
        (q, k, v, dout, out), pieces, plan = self.tensors_and_passes((*inputs[:3], dout, out), inputs, bias)
        tensors, acc = (dout, q, k, v, out, lse), accumulation_dtype(q.dtype)
        of_branches = plan.runner.backward(plan, tensors, masks_of(inputs, bias), dlse, None)
        of_blocks = blocks_shares(pieces, tensors, inputs.key_padding_mask, dlse)
        return tuple(as_new((x.to(acc) + y).to(q.dtype)) for x, y in zip(of_branches, of_blocks, strict=True))


def resolve_blocks(q: Tensor, k: Tensor, padding: MaybeTensor, settings: CallSettings) -> ResolvedCall:
    """Returns the record of calls of a block pattern, with or without branches, like this one."""
    settings = as_dense(settings, q)
    if not settings.blocks:
        return resolve(q, k, padding, settings)
    return record_of(ResolvedBlocks if settings.branches is None else ResolvedUnion, q, k, padding, settings)


def as_new(x: Tensor) -> Tensor:
    """Returns x, or a copy of it if it has a storage offset or other strides than the default ones, which the op's fake promises.

    Strides of dimensions of size 1 must be the default ones, too.
    """
    strides = itertools.accumulate((max(size, 1) for size in reversed(x.shape[1:])), operator.mul, initial=1)
    if x.storage_offset() == 0 and x.stride() == tuple(strides)[::-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)
