"""What a call of dilated attention is, decided once for all calls like it: pattern, settings, and the backend and shape of each pass.

A ``Resolved`` is found by everything that the decision depends on: shapes, dtype, device, options, and the state of torch and of the registry.
Strides decide, too, and are known to each pass only, as gradients have strides of their own.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import registry
from dilated_attention.backends.tiles.scratch import all_aligned
from dilated_attention.engine import schedule
from dilated_attention.engine.plan import Range, Shape
from dilated_attention.engine.prepare import Settings, document_ranges, kernel_ready, pattern_of, prepare
from dilated_attention.engine.run import Call
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# distinct strides of one kind of call
_MOST_PASSES = 16
# tensors of bounds whose records are kept, each with its tables
_MOST_PACKED = 4


class Pass(NamedTuple):
    """How one pass runs on tensors of these strides. ``tables`` is empty at first: for what a runner makes once and reads in every call."""

    shape: Shape
    call: Call
    tables: dict[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """One kind of call.

    Args:
        arguments: the op's arguments behind its tensors.
        device_type: of all tensors.
        documents: (start, end) pairs of packed documents, read from ``cu_seqlens``; None for one. With them the record is of one call.
        outside: the call runs outside the dispatcher, so that what it keeps for its backward may depend on the documents.
        passes: by the strides of what the pass reads: q, k, v, and in a backward dout and out.
        packed: records of documents by the tensor that bounds them and its version, as the layers of a model share one.
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
        """The record of calls with this very tensor, unchanged: where documents begin is data. Reads it once, which waits for a GPU.

        Raises:
            ValueError: its values bound no documents of ``num_keys`` positions.
        """
        key = (id(cu_seqlens), -1 if cu_seqlens.is_inference() else cu_seqlens._version, outside)
        known = self.packed.get(key)
        if known is not None and known[0]() is cu_seqlens:
            return known[1]
        found = replace(self, documents=document_ranges(cu_seqlens, num_keys), outside=outside, passes={}, packed={})
        # a tensor made in inference mode counts no versions
        if not cu_seqlens.is_inference():
            if len(self.packed) >= _MOST_PACKED:
                self.packed.clear()
            self.packed[key] = weakref.ref(cu_seqlens), found
        return found

    def ready(self, tensors: Tensors, padding: torch.Tensor | None, seed: torch.Tensor | None) -> tuple[Tensors, Pass]:
        """The tensors as kernels take them, and how a pass runs on them. ``tensors``: q, k, v, and in a backward dout and out.

        Raises:
            BackendUnavailable: nothing can do it; before anything but copies of q, k, v of strides that no kernel takes is allocated.
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
        """Strides in ``passes`` are those that kernels take; what they cannot say is where a tensor begins."""
        if self.device_type != "cuda":
            return True
        return all_aligned([x.data_ptr() for x in tensors])

    def _make(self, tensors: Tensors, padding: torch.Tensor | None, seed: torch.Tensor | None) -> Pass:
        shape, call = prepare(len(tensors) > 3, tensors[:4], self.pattern, self.settings, padding, self.documents, seed, self.query_offset)
        # a mask and a seed are those of one call
        return Pass(shape, replace(call, padding=None, seed=0), {})


def resolve(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None, arguments: tuple[Any, ...]) -> Resolved:
    """The record of a call whose arguments were checked. ``arguments``: the op's behind its tensors, of their own plain types."""
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
    """What else a choice depends on, apart from what makes the registry forget its answers."""
    products = torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 else None
    return torch.are_deterministic_algorithms_enabled(), products, *schedule.FUSED_DEVICES
