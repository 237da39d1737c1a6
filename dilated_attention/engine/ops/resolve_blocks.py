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
from dilated_attention.backends.base import Capabilities, accumulation_dtype, new_lse
from dilated_attention.backends.merge import merge_onto
from dilated_attention.engine.blocks.documents import pieces_of, request_of
from dilated_attention.engine.blocks.launch import backward_lists, forward_lists
from dilated_attention.engine.branches.launches import without_padding
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.prepare import new_like, select_backend
from dilated_attention.engine.ops.resolve import LocalCall, Optional, ResolvedDilated, Tensors, key_of, masks_of, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


class _Part(NamedTuple):
    """A document, or the whole sequence as one (see ``DocumentRows``), and the options and the backend, as it declares itself.

    ``lists``: of its blocks, in a remembered pass a weak reference to them.
    """

    keys: slice
    rows: slice
    front: int
    lists: Any
    options: Options
    backend: Backend
    capabilities: Capabilities


class BlockPass(tuple[_Part, ...]):
    """How one pass runs: every document."""

    def again(self) -> BlockPass | None:
        """Returns a remembered pass with its lists, or None if they are gone or a backend now declares something else."""
        parts = BlockPass([part._replace(lists=part.lists()) for part in self])
        return None if any(part.lists is None or part.backend.capabilities is not part.capabilities for part in parts) else parts


def blocks_forward(parts: BlockPass, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (out (B, Nq, H, D) in q's dtype, lse (B, H, Nq)) over the pairs that the pattern keeps."""
    k, v = without_padding(k, v, padding)
    if len(parts) == 1:
        (part,) = parts
        out, lse = forward_lists(part.backend, part.lists, q, k, v, part.options, front=part.front)
        return as_new(out), as_new(lse)
    out, lse = new_like(q), new_lse(q)
    for keys, rows, front, lists, options, backend, _ in parts:
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
    for keys, rows, front, lists, options, backend, _ in parts:
        inside = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        part_dlse = None if dlse is None else dlse[:, :, rows]
        dq[:, rows], dk[:, keys], dv[:, keys] = backward_lists(backend, lists, inside, options, part_dlse, front=front)
    return dq, dk, dv


class ResolvedBlocks(LocalCall):
    """Calls of block-sparse attention. ``passes`` holds those without masks, dropout and content-chosen blocks."""

    name = "block_sparse_attention"

    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept, bias = inputs
        (q, k, v), parts = self.ready((q, k, v), padding, seed, (kept, bias))
        return *blocks_forward(parts, q, k, v, padding), None

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, kept, bias), (out, lse, _) = inputs, outputs
        (q, k, v, dout, out), parts = self.ready((q, k, v, dout, out), padding, seed, (kept, bias))
        shares = blocks_shares(parts, (dout, q, k, v, out, lse), padding, dlse)
        return tuple([as_new(share.to(x.dtype)) for share, x in zip(shares, (q, k, v), strict=True)])

    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> BlockPass:
        """Chooses lists, backend and options of every document. ``more``: the blocks that a content-chosen pattern keeps, and the bias."""
        (q, k, *_), (kept, bias) = tensors, more
        settings, number = self.settings, 0 if seed is None else int(seed.item())
        pattern, sizes = pattern_from_spec(settings.blocks), (q.shape[1], k.shape[1], q.shape[2])
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        parts = []
        for keys, rows, front, lists in pieces_of(pattern, sizes, settings, self.documents, kept, q.device):
            backend = select_backend(request_of(lists, tensors[:4], settings, padding is not None, len(tensors) > 3), settings)
            mask, dropout = Mask(None if padding is None else padding[:, keys]), None
            first, of_part = settings.query_offset + rows.start - front, None
            if bias is not None:
                of_part = bias._replace(queries=bias.keys[:, first : first + lists.num_queries], keys=bias.keys[:, keys])
            if settings.dropout_p:
                dropout = _dropout(q, settings.dropout_p, number, (first, first + lists.num_queries), (keys.start, keys.stop))
            options = Options(
                settings.scale, mask=mask, dropout=dropout, deterministic=deterministic, softcap=settings.softcap, bias=of_part
            )
            parts.append(_Part(keys, rows, front, lists, options, backend, backend.capabilities))
        if padding is None and seed is None and kept is None and bias is None:
            # without keeping the lists alive, which have a cache of limited size
            self.keep_pass(key_of(tensors), BlockPass([part._replace(lists=weakref.ref(part.lists)) for part in parts]))
        return BlockPass(parts)


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
        q, k, v, padding, _, seed, kept, bias = inputs
        (q, k, v), (branches, blocks) = self.ready((q, k, v), padding, seed, (kept, bias))
        part_out, part_lse = blocks_forward(blocks, q, k, v, padding)
        out, lse = branches.runner.forward(branches, q, k, v, masks_of(padding, seed, bias), None)
        merge_onto(out, lse.transpose(1, 2), part_out, part_lse.transpose(1, 2))
        return out, lse, None

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
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
