"""Resolves and runs calls of block-sparse attention, alone or together with dilated branches in one softmax.

Both parts of the union have kernels of their own. The forward merges their (out, lse). The backward runs each part's backward with the
merged out and lse, which yields exactly its share of dq, dk, dv, and adds the shares. No gradient flows through the merge.

Every document has its lists of kept blocks and its backend, and runs cut to that backend's limits, including a gradient of lse.

Layout: q, dout, out (B, Nq, H, D), k and v (B, Nk, K, D), lse and dlse (B, H, Nq).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends import AttentionRequest, Dropout
from dilated_attention.backends.base import Backend, Capabilities, Mask, Options, accumulation_dtype, new_lse, placed
from dilated_attention.backends.merge import merge_onto
from dilated_attention.engine.blocks.lists import block_lists, lists_of_kept
from dilated_attention.engine.branches.launches import problems_at_once, without_padding
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.branches.run_problems import shares
from dilated_attention.engine.ops import prepare
from dilated_attention.engine.ops.prepare import new_like, select_backend
from dilated_attention.engine.ops.resolve import LocalCall, Optional, ResolvedDilated, Tensors, masks_of, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import BlockPattern, pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import BlockLists


def pieces_of(
    pattern: BlockPattern, sizes: tuple[int, int, int], settings: CallSettings, documents: tuple[Range, ...] | None, kept: Tensor | None,
    device: torch.device,
) -> list[tuple[slice, slice, int, BlockLists]]:  # fmt: skip
    """Returns the documents, or the whole sequence as one: (keys, rows of q, which begin ``front`` rows inside a query block, front, lists,
    which include those rows).

    Args:
        sizes: the numbers of queries, keys and heads.
        documents: (start, end) of packed documents, each with a grid of blocks that starts at its first position; None for one document.
        kept: the blocks that a content-chosen pattern keeps, as ``choose_blocks`` packs them.
    """
    num_queries, num_keys, num_heads = sizes
    # query blocks begin on the pattern's grid: the rows before the first query are computed, too, and cut off afterwards
    front = settings.query_offset % pattern.q_block
    first_query = settings.query_offset - front
    # first row of the document in ``kept``, where the rows of documents follow one another
    first_row, pieces = 0, []
    for start, end in documents or ((0, num_keys),):
        keys = slice(start, end)
        # packed documents attend to themselves, without query_offset
        rows = slice(0, num_queries) if documents is None else keys
        length = front + rows.stop - rows.start
        if kept is None:
            lists = block_lists(
                pattern, end - start, num_heads, first_query=first_query, num_queries=length, is_causal=settings.is_causal, device=device
            )
        else:
            # what follows the document's rows is not read
            of_document = kept[:, :, first_row:]
            lists = lists_of_kept(of_document, pattern, length, end - start, is_causal=settings.is_causal, query_offset=first_query)
            first_row += lists.num_rows
        pieces.append((keys, rows, front, lists))
    return pieces


def blocks_request(
    lists: BlockLists, views: tuple[Tensor, ...], settings: CallSettings, key_mask: bool, is_backward: bool
) -> AttentionRequest:
    """Builds the request to a backend for these lists. ``views`` are q, k and the other tensors that it reads."""
    return prepare.request_of(
        views,
        settings,
        is_backward,
        # the positions that they span
        max(lists.num_queries, lists.num_keys),
        key_mask=key_mask,
        # mean number of keys that a row keeps
        length=max(1, lists.num_entries * lists.k_block // max(1, lists.num_groups * lists.num_rows)),
        blocks=(lists.q_block, lists.k_block),
        block_masks=lists.mask_kind,
    )


def forward_lists(
    backend: Backend, lists: BlockLists, q: Tensor, k: Tensor, v: Tensor, options: Options, *, front: int = 0, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that ``lists`` keep.

    Args:
        into: where out goes if one launch computes it; otherwise it is another tensor.
        options: options of the whole batch; causality is in the lists.
        front: number of rows by which q starts inside the first query block. Dropout counts these rows, too.
    """
    q = _with_front(q, 1, front)
    assert q.shape[1] == lists.num_queries and k.shape[1] == lists.num_keys
    if not lists.num_entries or not q.shape[0]:
        out, lse = torch.zeros_like(q), new_lse(q).fill_(-torch.inf)
    else:
        cuts = _launches(backend.capabilities, lists, (q, k, v), options)
        if len(cuts) == 1:
            out, lse = placed(backend.forward(q, k, v, options, lists, out=(into, None)), (into, None))
        else:
            parts = [backend.forward(q[where], k[where], v[where], some_options, some) for where, some, some_options in cuts]
            out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return (out[:, front:], lse[:, :, front:]) if front else (out, lse)


def backward_lists(
    backend: Backend, lists: BlockLists, tensors: Tensors, options: Options, dlse: Tensor | None = None, *, front: int = 0,
    into: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32, of the pairs that ``lists`` keep.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        options, front: same as in ``forward_lists``; so is ``into``, for dq.
    """
    dout, q, k, v, out, lse = tensors
    if options.mask.padding is not None or not lists.fills_every_row:
        # a row without keys must give its scores weight 0; exp(s − (+inf)) does that in every kernel
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dout, q, out = (_with_front(x, 1, front) for x in (dout, q, out))
    lse = _with_front(lse, 2, front, torch.inf)
    dlse = None if dlse is None else _with_front(dlse, 2, front)
    if not lists.num_entries or not q.shape[0]:
        grads: Tensors = tuple(torch.zeros_like(x) for x in (q, k, v))
    else:
        cuts = _launches(backend.capabilities, lists, (dout, q, k, v, out), options)
        if len(cuts) == 1 and (dlse is None or backend.capabilities.lse_grad):
            views = into, None, None
            grads = placed(backend.backward(dout, q, k, v, out, lse, options, lists, dlse=dlse, grads=views), views)
        else:
            parts = [
                shares(
                    backend, tuple(x[where] for x in (dout, q, k, v, out, lse)), some_options, None if dlse is None else dlse[where], some
                )
                for where, some, some_options in cuts
            ]
            grads = tuple(torch.cat(of_parts) for of_parts in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    return (grads[0][:, front:], *grads[1:]) if front else grads


def _launches(capabilities: Capabilities, lists: BlockLists, tensors: Tensors, options: Options) -> list[tuple[slice, BlockLists, Options]]:
    """Returns the batch entries of each launch with their lists and options, as many entries as the backend takes at once."""
    B = tensors[0].shape[0]
    size = problems_at_once(B, [(x.stride(0), x.shape[1:], x.stride()[1:]) for x in tensors], capabilities)
    if size == B:
        return [(slice(None), lists, options)]
    parts = [slice(start, min(start + size, B)) for start in range(0, B, size)]
    return [(where, _lists_of(lists, where), _options_of(options, where)) for where in parts]


def _lists_of(lists: BlockLists, where: slice) -> BlockLists:
    """Returns the lists of some batch entries."""
    if lists.num_batch == 1:
        return lists
    rows = lists.num_heads * lists.num_rows
    starts = lists.row_starts[where.start * rows : where.stop * rows + 1]
    first, last = int(starts[0]), int(starts[-1])
    return replace(
        lists,
        num_batch=where.stop - where.start,
        row_starts=starts - first,
        columns=lists.columns[first:last],
        masks=None if lists.masks is None else lists.masks[first:last],
    )


def _options_of(options: Options, where: slice) -> Options:
    padding, dropout, bias = options.mask.padding, options.dropout, options.bias
    if padding is not None:
        options = replace(options, mask=Mask(padding[where]))
    if bias is not None:
        options = replace(options, bias=bias.part(where, where))
    if dropout is not None:
        options = replace(
            options, dropout=replace(dropout, batch=dropout.batch[where], queries=dropout.queries[where], keys=dropout.keys[where])
        )
    return options


def _with_front(x: Tensor, dim: int, front: int, value: float = 0.0) -> Tensor:
    """Returns x with ``front`` rows of ``value`` inserted before it along ``dim``."""
    # padding alone may keep another order of dimensions in memory
    return torch.nn.functional.pad(x, (*(0, 0) * (x.ndim - 1 - dim), front, 0), value=value).contiguous() if front else x


class _Part(NamedTuple):
    """A document, or the whole sequence as one (see ``pieces_of``), with its options and backend. ``lists``: in a remembered pass a weak
    reference to them."""

    keys: slice
    rows: slice
    front: int
    lists: Any
    options: Options
    backend: Backend


# how one pass runs: every document
BlockPass = tuple[_Part, ...]


def blocks_forward(parts: BlockPass, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that the pattern keeps."""
    k, v = without_padding(k, v, padding)
    if len(parts) == 1:
        (part,) = parts
        out, lse = forward_lists(part.backend, part.lists, q, k, v, part.options, front=part.front)
        return as_new(out), as_new(lse)
    out, lse = new_like(q), new_lse(q)
    for keys, rows, front, lists, options, backend in parts:
        out[:, rows], lse[:, :, rows] = forward_lists(backend, lists, q[:, rows], k[:, keys], v[:, keys], options, front=front)
    return out, lse


def blocks_shares(parts: BlockPass, tensors: Tensors, padding: Tensor | None, dlse: Tensor | None = None) -> Tensors:
    """Returns the shares (dq, dk, dv), in the inputs' dtype or float32 (float64), of the pairs that the pattern keeps.

    Args:
        tensors: dout, q, k, v, and the out and lse of the whole softmax, of which these pairs may be a part.
        dlse: the gradient of lse (B, H, Nq).
    """
    dout, q, k, v, out, lse = tensors
    k, v = without_padding(k, v, padding)
    if len(parts) == 1:
        (part,) = parts
        return backward_lists(part.backend, part.lists, (dout, q, k, v, out, lse), part.options, dlse, front=part.front)
    # documents share no rows, so nothing needs to be summed
    dq, dk, dv = (new_like(x) for x in (q, k, v))
    for keys, rows, front, lists, options, backend in parts:
        inside = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        part_dlse = None if dlse is None else dlse[:, :, rows]
        dq[:, rows], dk[:, keys], dv[:, keys] = backward_lists(backend, lists, inside, options, part_dlse, front=front)
    return dq, dk, dv


class ResolvedBlocks(LocalCall):
    """Calls of block-sparse attention. ``passes`` holds those without masks, dropout and content-chosen blocks."""

    name = "block_sparse_attention"

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept, bias = inputs
        (q, k, v), parts = self.ready((q, k, v), padding, seed, (kept, bias))
        return *blocks_forward(parts, q, k, v, padding), None

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, kept, bias), (out, lse, _) = inputs, outputs
        (q, k, v, dout, out), parts = self.ready((q, k, v, dout, out), padding, seed, (kept, bias))
        shares = blocks_shares(parts, (dout, q, k, v, out, lse), padding, dlse)
        return tuple([as_new(share.to(x.dtype)) for share, x in zip(shares, (q, k, v), strict=True)])

    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> tuple[BlockPass, Any]:
        """Chooses lists, backend and options of every document. ``more``: the blocks that a content-chosen pattern keeps, and the bias."""
        (q, k, *_), (kept, bias) = tensors, more
        settings, number = self.settings, 0 if seed is None else int(seed.item())
        pattern, sizes = pattern_from_spec(settings.blocks), (q.shape[1], k.shape[1], q.shape[2])
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        parts = []
        for keys, rows, front, lists in pieces_of(pattern, sizes, settings, self.documents, kept, q.device):
            backend = select_backend(blocks_request(lists, tensors[:4], settings, padding is not None, len(tensors) > 3), settings)
            mask, dropout = Mask(None if padding is None else padding[:, keys]), None
            first, of_part = settings.query_offset + rows.start - front, None
            if bias is not None:
                of_part = bias._replace(queries=bias.keys[:, first : first + lists.num_queries], keys=bias.keys[:, keys])
            if settings.dropout_p:
                # by position in the whole sequence, so that a cut does not change which elements are dropped
                spans = (0, q.shape[0]), (0, q.shape[2]), (first, first + lists.num_queries), (keys.start, keys.stop)
                batch, heads, *positions = (torch.arange(*span, device=q.device) for span in spans)
                dropout = Dropout(settings.dropout_p, number, batch, heads, *(x.expand(q.shape[0], -1) for x in positions))
            options = Options(
                settings.scale, mask=mask, dropout=dropout, deterministic=deterministic, softcap=settings.softcap, bias=of_part
            )
            parts.append(_Part(keys, rows, front, lists, options, backend))
        # what is kept does not hold the lists, which have a cache of limited size
        plain = padding is None and seed is None and kept is None and bias is None
        return tuple(parts), [part._replace(lists=weakref.ref(part.lists)) for part in parts] if plain else None

    def remembered(self, key: tuple[Any, ...]) -> BlockPass | None:
        """Returns a pass with its lists, or None if they are gone."""
        parts = tuple([part._replace(lists=part.lists()) for part in self.passes.get(key, ())])
        return parts if parts and all([part.lists is not None for part in parts]) else None  # noqa: C419 - a generator takes longer


class ResolvedUnion(LocalCall):
    """Calls of dilated branches and a block pattern together, each part of which is a record of its own."""

    name = "block_sparse_dilated_attention"

    @cached_property
    def parts(self) -> tuple[ResolvedDilated, ResolvedBlocks]:
        of_both = self.settings, self.device_type, self.documents
        return ResolvedDilated(*of_both), ResolvedBlocks(*of_both)

    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> tuple[Any, None]:
        """Returns how both parts run. It is not kept here, since each part keeps its own."""
        branches, blocks = self.parts
        return (branches.ready(tensors, padding, seed, False)[1], blocks.ready(tensors, padding, seed, more)[1]), None

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept, bias = inputs
        (q, k, v), (branches, blocks) = self.ready((q, k, v), padding, seed, (kept, bias))
        part_out, part_lse = blocks_forward(blocks, q, k, v, padding)
        out, lse = branches.runner.forward(branches, q, k, v, masks_of(padding, seed, bias), None)
        merge_onto(out, lse.transpose(1, 2), part_out, part_lse.transpose(1, 2))
        return out, lse, None

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, kept, bias), (out, lse, _) = inputs, outputs
        (q, k, v, dout, out), (branches, blocks) = self.ready((q, k, v, dout, out), padding, seed, (kept, bias))
        tensors, acc = (dout, q, k, v, out, lse), accumulation_dtype(q.dtype)
        shares = branches.runner.backward(branches, tensors, masks_of(padding, seed, bias), dlse, None)
        more = blocks_shares(blocks, tensors, padding, dlse)
        return tuple(as_new((a.to(acc) + b).to(q.dtype)) for a, b in zip(shares, more, strict=True))


def resolve_blocks(q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> LocalCall:
    """Returns the record of calls of a block pattern, with or without branches, like this one."""
    kind: type[LocalCall] = ResolvedBlocks if settings.branches is None else ResolvedUnion
    pattern = pattern_from_spec(settings.blocks)
    # a remembered record would keep a pattern that holds a function or a tensor alive forever; this one does until after the backward
    if pattern.lives_here:
        return kind(settings, q.device.type, alive=pattern)
    return record_of(kind, q, k, padding, settings)


def as_new(x: Tensor) -> Tensor:
    """Returns x with default strides and no storage offset, as the fake implementation promises, or a copy of x if it has others.

    Strides of dimensions of size 1 must be the default ones, too.
    """
    strides = itertools.accumulate((max(size, 1) for size in reversed(x.shape[1:])), operator.mul, initial=1)
    if x.storage_offset() == 0 and x.stride() == tuple(strides)[::-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)
