"""Resolves a call of dilated attention once for all calls like it: its pattern, its settings, and the backend and shape of each pass.

A ``Resolved`` is looked up by everything the decision depends on: shapes, dtype, device, options, and the state of torch and of the
registry. The decision also depends on strides, which only each pass knows, since gradients have their own strides.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import registry
from dilated_attention.backends.tiles.scratch import all_aligned
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.plan import Range, Shape
from dilated_attention.engine.branches.sequential import Call
from dilated_attention.engine.ops.prepare import Settings, document_ranges, kernel_ready, pattern_of, prepare
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# most sets of strides that are remembered for one kind of call
_MOST_PASSES = 16
# most ``cu_seqlens`` tensors whose records are kept, each with its tables
_MOST_PACKED = 4


class Pass(NamedTuple):
    """How one pass runs on tensors of given strides. Runners store in ``tables`` what they compute once and read in every call."""

    shape: Shape
    call: Call
    tables: dict[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """The record of one kind of call.

    Args:
        arguments: the op's arguments that follow its tensors.
        device_type: device type of all tensors.
        documents: (start, end) pairs of packed documents, read from ``cu_seqlens``; None for a single document. A record with
            documents belongs to one ``cu_seqlens`` tensor.
        outside: the call runs outside the dispatcher, so what it keeps for its backward may depend on the documents.
        passes: the passes, keyed by the strides of the tensors they read: q, k, v, and in a backward dout and out.
        packed: records with documents, keyed by the ``cu_seqlens`` tensor and its version, since the layers of a model share one.
    """

    pattern: DilatedPattern
    settings: Settings
    query_offset: int
    arguments: tuple[Any, ...]
    device_type: str
    documents: tuple[Range, ...] | None = None
    outside: bool = False
    passes: dict[tuple[tuple[int, ...], ...], Pass] = field(default_factory=dict)
    packed: dict[tuple[int, int, bool], tuple[weakref.ref[torch.Tensor], Resolved]] = field(default_factory=dict)

    def with_documents(self, cu_seqlens: torch.Tensor, num_keys: int, *, outside: bool = False) -> Resolved:
        """Returns the record of calls with this very tensor, unchanged since, because the bounds of documents are data.

        The tensor is read once, which synchronizes with the GPU if it is on one.

        Raises:
            ValueError: its values are not the bounds of documents that cover ``num_keys`` positions.
        """
        key = (id(cu_seqlens), -1 if cu_seqlens.is_inference() else cu_seqlens._version, outside)
        known = self.packed.get(key)
        if known is not None and known[0]() is cu_seqlens:
            return known[1]
        found = replace(self, documents=document_ranges(cu_seqlens, num_keys), outside=outside, passes={}, packed={})
        # a tensor made in inference mode has no version counter
        if not cu_seqlens.is_inference():
            if len(self.packed) >= _MOST_PACKED:
                self.packed.clear()
            self.packed[key] = weakref.ref(cu_seqlens), found
        return found

    def ready(self, tensors: Tensors, padding: torch.Tensor | None, seed: torch.Tensor | None) -> tuple[Tensors, Pass]:
        """Returns the tensors in a layout that kernels accept, and how a pass runs on them.

        ``tensors`` are q, k, v, and in a backward dout and out.

        Raises:
            BackendUnavailable: no backend can compute it. By then nothing is allocated except copies of tensors whose strides no
                kernel accepts.
        """
        found = self.passes.get(tuple([x.stride() for x in tensors])) if self._aligned(tensors) else None
        if found is None:
            tensors = tuple(kernel_ready(x) for x in tensors)
            strides = tuple([x.stride() for x in tensors])
            found = self.passes.get(strides)
            if found is None:
                found = self._make(tensors, padding, seed)
                if len(self.passes) >= _MOST_PASSES:
                    self.passes.clear()
                self.passes[strides] = found
        if padding is not None or seed is not None:
            call = replace(found.call, padding=padding, seed=0 if seed is None else int(seed.item()))
            found = Pass(found.shape, call, found.tables)
        return tensors, found

    def _aligned(self, tensors: Tensors) -> bool:
        """Whether the tensors' addresses are aligned. Strides in ``passes`` are ones that kernels accept, but do not include addresses."""
        if self.device_type != "cuda":
            return True
        return all_aligned([x.data_ptr() for x in tensors])

    def _make(self, tensors: Tensors, padding: torch.Tensor | None, seed: torch.Tensor | None) -> Pass:
        shape, call = prepare(len(tensors) > 3, tensors[:4], self.pattern, self.settings, padding, self.documents, seed, self.query_offset)
        # the mask and the seed belong to a single call, so the record holds neither
        return Pass(shape, replace(call, padding=None, seed=0), {})


def resolve(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None, arguments: tuple[Any, ...]) -> Resolved:
    """Returns the record of a call with checked arguments. ``arguments``: those that follow the op's tensors, as plain Python types."""
    lengths, rates, head_offsets, offset_list, branch_heads, tail, window, is_causal, scale, query_offset, *rest = arguments
    lists = (tuple(lengths), tuple(rates), tuple(offset_list), tuple(window))
    others = (head_offsets, branch_heads, tail, is_causal, scale, query_offset, *rest)
    key = (Resolved, lists, others, q.shape, k.shape, q.dtype, q.device, padding is None, state(q.dtype))
    found = registry.answers().get(key)
    if found is None:
        pattern = pattern_of(lists[0], lists[1], head_offsets, lists[2], branch_heads, tail)
        settings = Settings(list(window), is_causal, scale, *rest)
        found = Resolved(pattern, settings, query_offset, arguments, q.device.type)
        registry.remember(key, found)
    return found


def state(dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns the global state a choice depends on, apart from changes that make the registry forget its answers."""
    products = torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 else None
    return torch.are_deterministic_algorithms_enabled(), products, *strategy.FUSED_DEVICES
