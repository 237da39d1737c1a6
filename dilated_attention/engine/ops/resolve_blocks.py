"""Resolves and runs calls of block-sparse attention, alone or together with dilated branches in one softmax.

Both parts of the union have kernels of their own. The forward merges their (out, lse). The backward runs each part's backward with the
merged out and lse, which yields exactly its share of dq, dk, dv, and adds the shares. No gradient flows through the merge.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends import NESTED
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.blocks.run import BlockMasks, BlockPass, as_new, blocks_forward, blocks_shares, make_pass
from dilated_attention.engine.branches.merge import merge_onto
from dilated_attention.engine.oom.requirement import blocks_requirement
from dilated_attention.engine.ops.resolve import LocalCall, Optional, ResolvedDilated, Tensors, record_of, with_masks
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.fork import cached_property
from dilated_attention.pattern import pattern_from_spec


class ResolvedBlocks(LocalCall):
    """Calls of block-sparse attention. ``passes`` holds those without masks, dropout and content-chosen blocks."""

    name = "block_sparse_attention"
    requirement = staticmethod(blocks_requirement)

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
        """Chooses the lists and the backends. ``more``: the blocks that a content-chosen pattern keeps."""
        found = make_pass(len(tensors) > 3, tensors[:4], self.settings, BlockMasks(padding, self.documents, seed, more))
        if padding is None and seed is None and more is None:
            self.keep_pass(tensors, found.remembered())
        return found


class ResolvedUnion(LocalCall):
    """Calls of dilated branches and a block pattern together, each part of which is a record of its own."""

    name = "block_sparse_dilated_attention"
    requirement = staticmethod(blocks_requirement)

    @cached_property
    def parts(self) -> tuple[ResolvedDilated, ResolvedBlocks]:
        # "nested" concerns only pairs that branches share
        blocks = self.settings._replace(backend="auto") if self.settings.backend == NESTED else self.settings
        return ResolvedDilated(self.settings, self.device_type, self.documents), ResolvedBlocks(blocks, self.device_type, self.documents)

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
