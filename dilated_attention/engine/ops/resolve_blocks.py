"""Resolves and runs calls of block-sparse attention, alone or together with dilated branches in one softmax.

Both parts of the union have kernels of their own. The forward merges their (out, lse). The backward runs each part's backward with the
merged out and lse, which yields exactly its share of dq, dk, dv, and adds the shares. No gradient flows through the merge.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends import Backend, Dropout, Mask, Options
from dilated_attention.backends.base import Capabilities, accumulation_dtype
from dilated_attention.backends.merge import merge_onto
from dilated_attention.engine.blocks.documents import pieces_of, request_of
from dilated_attention.engine.blocks.launch import backward_lists, forward_lists
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.branches.sequential import without_padding
from dilated_attention.engine.ops.prepare import select_backend
from dilated_attention.engine.ops.resolve import LocalCall, Optional, ResolvedDilated, Tensors, record_of, with_masks
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


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


class ResolvedBlocks(LocalCall):
    """Calls of block-sparse attention. ``passes`` holds those without masks, dropout and content-chosen blocks."""

    name = "block_sparse_attention"

    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept = inputs
        (q, k, v), found = self.ready((q, k, v), padding, seed, kept)
        return *blocks_forward(found, q, k, v, padding), None

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, kept), (out, lse, _) = inputs, outputs
        (q, k, v, dout, out), found = self.ready((q, k, v, dout, out), padding, seed, kept)
        shares = blocks_shares(found, (dout, q, k, v, out, lse), padding, dlse)
        return tuple([as_new(share.to(x.dtype)) for share, x in zip(shares, (q, k, v), strict=True)])

    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> BlockPass:
        """Chooses the lists, backend and options of every document. ``more``: the blocks that a content-chosen pattern keeps."""
        q, k, *_ = tensors
        settings, number = self.settings, 0 if seed is None else int(seed.item())
        pattern, sizes = pattern_from_spec(settings.blocks), (q.shape[1], k.shape[1], q.shape[2])
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        parts, found = [], []
        for keys, rows, front, lists in pieces_of(pattern, sizes, settings, self.documents, more, q.device):
            backend = select_backend(request_of(lists, tensors[:4], settings, padding is not None, len(tensors) > 3), settings)
            mask, dropout = Mask(None if padding is None else padding[:, keys]), None
            if settings.dropout_p:
                first = settings.query_offset + rows.start - front
                dropout = _dropout(q, settings.dropout_p, number, (first, first + lists.num_queries), (keys.start, keys.stop))
            options = Options(settings.scale, mask=mask, dropout=dropout, deterministic=deterministic, softcap=settings.softcap)
            parts.append(_Part(keys, rows, front, options, backend, backend.capabilities))
            found.append(lists)
        made = BlockPass(tuple(parts), tuple(found))
        if padding is None and seed is None and more is None:
            self.keep_pass(tensors, made.remembered())
        return made


class ResolvedUnion(LocalCall):
    """Calls of dilated branches and a block pattern together, each part of which is a record of its own."""

    name = "block_sparse_dilated_attention"

    @cached_property
    def parts(self) -> tuple[ResolvedDilated, ResolvedBlocks]:
        of_both = self.settings, self.device_type, self.documents
        return ResolvedDilated(*of_both), ResolvedBlocks(*of_both)

    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> tuple[Any, BlockPass]:
        """Returns how both parts run. It is not kept here, since each part keeps its own."""
        branches, blocks = self.parts
        return branches.ready(tensors, padding, seed, False)[1], blocks.ready(tensors, padding, seed, more)[1]

    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept = inputs
        (q, k, v), (branches, blocks) = self.ready((q, k, v), padding, seed, kept)
        part_out, part_lse = blocks_forward(blocks, q, k, v, padding)
        out, lse = branches.run(q, k, v, with_masks(branches.call, padding, seed), None)
        merge_onto(out, lse.transpose(1, 2), part_out, part_lse.transpose(1, 2))
        return out, lse, None

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, kept), (out, lse, _) = inputs, outputs
        (q, k, v, dout, out), (branches, blocks) = self.ready((q, k, v, dout, out), padding, seed, kept)
        tensors, acc = (dout, q, k, v, out, lse), accumulation_dtype(q.dtype)
        shares = branches.run(tensors, with_masks(branches.call, padding, seed), dlse, None)
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
