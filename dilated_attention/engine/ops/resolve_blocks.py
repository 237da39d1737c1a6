"""Resolves and runs calls of block-sparse attention, alone or together with dilated branches in one softmax.

Both parts of the union have kernels of their own. The forward merges their (out, lse). The backward runs each part's backward with the
merged out and lse, which yields exactly its share of dq, dk, dv, and adds the shares. No gradient flows through the merge.
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends import NESTED
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.blocks.run import BlockMasks, BlockPass, as_new, blocks_backward, blocks_forward, blocks_shares, make_pass
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.merge import merge_onto
from dilated_attention.engine.oom.requirement import blocks_requirement
from dilated_attention.engine.ops.prepare import kernel_ready, prepare
from dilated_attention.engine.ops.resolve import LocalCall, Optional, Tensors, record_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec


class ResolvedBlocks(LocalCall):
    """Calls of block-sparse attention. ``passes`` holds those without masks, dropout and content-chosen blocks."""

    name = "block_sparse_attention"
    requirement = staticmethod(blocks_requirement)

    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept = inputs
        (q, k, v), found = self._ready((q, k, v), padding, seed, kept)
        return *blocks_forward(found, q, k, v, padding), None

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        """Returns the shares (dq, dk, dv). The outputs may be those of a larger softmax."""
        (q, k, v, padding, _, seed, kept), (out, lse, _) = inputs, outputs
        (q, k, v, dout, out), found = self._ready((q, k, v, dout, out), padding, seed, kept)
        return blocks_backward(found, (dout, q, k, v, out, lse), padding, dlse)

    def _ready(self, tensors: Tensors, padding: Optional, seed: Optional, kept: Optional) -> tuple[Tensors, BlockPass]:
        """Returns the tensors in a layout that kernels accept, and how a pass runs on them: q, k, v, and in a backward dout and out."""
        remembered = self.known_pass(tensors)
        if remembered is None:
            tensors = tuple(kernel_ready(x) for x in tensors)
            remembered = self.known_pass(tensors)
        found = None if remembered is None else remembered.again()
        if found is None:
            found = make_pass(len(tensors) > 3, tensors[:4], self.settings, BlockMasks(padding, self.documents, seed, kept))
            if padding is None and seed is None and kept is None:
                self.keep_pass(tensors, found.remembered())
        return tensors, found


class ResolvedUnion(LocalCall):
    """Calls of dilated branches and a block pattern together."""

    name = "block_sparse_dilated_attention"
    requirement = staticmethod(blocks_requirement)

    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        q, k, v, padding, _, seed, kept = inputs
        q, k, v = (kernel_ready(x) for x in (q, k, v))
        pattern = self.settings.pattern
        shape, call = prepare(False, (q, k, v), pattern, self.settings, padding, self.documents, seed)
        found = make_pass(False, (q, k, v), self._of_blocks(), BlockMasks(padding, self.documents, seed, kept))
        part_out, part_lse = blocks_forward(found, q, k, v, padding)
        out, lse = strategy.forward(pattern, shape, q, k, v, call)
        merge_onto(out, lse.transpose(1, 2), part_out, part_lse.transpose(1, 2))
        return out, lse, None

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, kept), (out, lse, _) = inputs, outputs
        dout, q, k, v, out = (kernel_ready(x) for x in (dout, q, k, v, out))
        pattern = self.settings.pattern
        shape, call = prepare(True, (q, k, v, dout), pattern, self.settings, padding, self.documents, seed)
        found = make_pass(True, (q, k, v, dout), self._of_blocks(), BlockMasks(padding, self.documents, seed, kept))
        tensors, acc = (dout, q, k, v, out, lse), accumulation_dtype(q.dtype)
        shares = strategy.backward(pattern, shape, tensors, call, dlse)
        more = blocks_shares(found, tensors, padding, dlse)
        return tuple(as_new((a.to(acc) + b).to(q.dtype)) for a, b in zip(shares, more, strict=True))

    def _of_blocks(self) -> CallSettings:
        """Returns the settings of the blocks' part. ``"nested"`` concerns only pairs that branches share, so the blocks use "auto"."""
        return self.settings._replace(backend="auto") if self.settings.backend == NESTED else self.settings


def resolve_blocks(q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> LocalCall:
    """Returns the record of calls of a block pattern, with or without branches, like this one."""
    kind: type[LocalCall] = ResolvedBlocks if settings.branches is None else ResolvedUnion
    pattern = pattern_from_spec(settings.blocks)
    # a remembered record would keep a pattern that holds a function or a tensor alive forever; this one does until after the backward
    if pattern.lives_here:
        return kind(settings, q.device.type, alive=pattern)
    return record_of(kind, q, k, padding, settings)
