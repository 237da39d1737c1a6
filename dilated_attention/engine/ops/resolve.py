"""Resolves a call of dilated attention once for all calls like it, and runs it: what is decided about a call is decided here.

A ``ResolvedCall`` is looked up by everything the decision depends on: shapes, dtype, device, options, and the state of torch and of the
registry. The decision also depends on strides, which only each pass knows, since gradients have their own strides; so each pass chooses
its backend and the way it runs (``branches/strategy.py``) when tensors of these strides come for the first time.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import hardware, registry, tuning_table
from dilated_attention.backends.base import Capabilities, accumulation_dtype
from dilated_attention.backends.tiles.scratch import all_aligned
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.oom.requirements import dilated_requirement
from dilated_attention.engine.ops.gradients import DirectCall, Optional
from dilated_attention.engine.ops.op_hooks import op_hook
from dilated_attention.engine.ops.prepare import CallSettings, document_ranges, kernel_ready, pattern_of, prepare, saved_elements
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# most sets of strides that are remembered for one kind of call
_MOST_PASSES = 16
# most ``cu_seqlens`` tensors whose records are kept, each with its tables
_MOST_PACKED = 4


# the op's arguments by name: its tensors, and what follows them
_TENSORS = ("q", "k", "v", "key_padding_mask", "cu_seqlens", "seed")
_ARGUMENTS = (
    "segment_lengths", "dilation_rates", "head_offsets", "offset_list", "branch_heads", "tail", "window", "is_causal", "scale",
    "query_offset",
    "dropout_p", "detached", "deterministic", "needs_grad", "backend", "precision",
)  # fmt: skip


class ResolvedPass(NamedTuple):
    """How one pass runs on tensors of given strides.

    Args:
        run: ``strategy.Forward`` or ``strategy.Backward``.
        saved: number of elements of per-branch outputs that a forward saves for the backward.
        capabilities: what the backend declared when this was decided.
    """

    call: Call
    run: Any
    saved: int
    capabilities: Capabilities


def _forward_arguments(resolved: ResolvedCall, *tensors: Any) -> dict[str, Any]:
    return dict(zip((*_TENSORS, *_ARGUMENTS), (*tensors, *resolved.arguments), strict=True))


def _backward_arguments(
    resolved: ResolvedCall, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> dict[str, Any]:
    names = ("dout", "dlse", *_TENSORS[:3], "out", "lse", "kept", *_TENSORS[3:], *_ARGUMENTS)
    return dict(zip(names, (dout, dlse, *inputs[:3], *outputs, *inputs[3:], *resolved.arguments), strict=True))


@dataclass(frozen=True, eq=False)
class ResolvedCall(DirectCall):
    """The record of one kind of call. Calling it runs a call outside the dispatcher; the ops use its two passes.

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
    settings: CallSettings
    query_offset: int
    arguments: tuple[Any, ...]
    device_type: str
    documents: tuple[Range, ...] | None = None
    outside: bool = False
    passes: dict[tuple[tuple[int, ...], ...], ResolvedPass] = field(default_factory=dict)
    packed: dict[tuple[int, int, bool], tuple[weakref.ref[torch.Tensor], ResolvedCall]] = field(default_factory=dict)

    def with_documents(self, cu_seqlens: torch.Tensor, num_keys: int, *, outside: bool = False) -> ResolvedCall:
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

    @op_hook(dilated_requirement, _forward_arguments)
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: Optional, cu_seqlens: Optional, seed: Optional
    ) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """Returns (out (B, Nq, H, D), lse (B, H, Nq), the branches' outputs saved for the backward (``prepare.saved_elements``) or None).

        Raises:
            BackendUnavailable: no backend can compute it. By then nothing is allocated except copies of tensors whose strides no
                kernel accepts.
        """
        if not q.numel():
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
            return torch.empty_like(q, memory_format=torch.contiguous_format), lse, None
        (q, k, v), (call, run, elements, _) = self._ready((q, k, v), padding, seed)
        saved = q.new_empty(elements) if elements else None
        if torch.is_autocast_enabled(self.device_type):
            # it stays on inside an op, and would round a backend's float32 arithmetic to half precision
            with torch.autocast(self.device_type, enabled=False):
                return *run(q, k, v, call, saved), saved
        return *run(q, k, v, call, saved), saved

    @op_hook(dilated_requirement, _backward_arguments)
    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Returns (dq, dk, dv), contiguous, in the inputs' dtype. ``inputs`` and ``outputs`` are those of ``forward``."""
        (q, k, v, padding, _, seed), (out, lse, saved) = inputs, outputs
        if not q.numel():
            return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        saved = None if saved is None or not saved.numel() else saved
        (q, k, v, dout, out), (call, run, *_) = self._ready((q, k, v, dout, out), padding, seed, is_saved=saved is not None)
        if torch.is_autocast_enabled(self.device_type):
            with torch.autocast(self.device_type, enabled=False):
                return run((dout, q, k, v, out, lse), call, dlse, saved)  # type: ignore[no-any-return]
        return run((dout, q, k, v, out, lse), call, dlse, saved)  # type: ignore[no-any-return]

    def backward_op(self, dout: Any, dlse: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
        outputs = (*outputs[:2], dout.new_empty(0) if outputs[2] is None else outputs[2])
        arguments = _backward_arguments(self, dout, dlse, inputs, outputs)
        return torch.ops.dilated_attention.dilated_attention_backward(*arguments.values())

    def _ready(self, tensors: Tensors, padding: Optional, seed: Optional, *, is_saved: bool = False) -> tuple[Tensors, ResolvedPass]:
        """Returns the tensors in a layout that kernels accept, and how a pass runs on them.

        ``tensors`` are q, k, v, and in a backward dout and out.
        """
        found = self.passes.get(tuple([x.stride() for x in tensors])) if self._aligned(tensors) else None
        if found is None or found.capabilities is not found.call.backend.capabilities:
            tensors = tuple(kernel_ready(x) for x in tensors)
            strides = tuple([x.stride() for x in tensors])
            found = self.passes.get(strides)
            if found is None or found.capabilities is not found.call.backend.capabilities:
                found = self._make(tensors, padding, seed, is_saved)
                if len(self.passes) >= _MOST_PASSES:
                    self.passes.clear()
                self.passes[strides] = found
        if padding is not None or seed is not None:
            found = found._replace(call=replace(found.call, padding=padding, seed=0 if seed is None else int(seed.item())))
        return tensors, found

    def _aligned(self, tensors: Tensors) -> bool:
        """Whether the tensors' addresses are aligned. Strides in ``passes`` are ones that kernels accept, but do not include addresses."""
        if self.device_type != "cuda":
            return True
        return all_aligned([x.data_ptr() for x in tensors])

    def _make(self, tensors: Tensors, padding: Optional, seed: Optional, is_saved: bool) -> ResolvedPass:
        """Chooses the backend of a pass and the way it runs."""
        q, k, v, *of_backward = tensors
        shape, call = prepare(bool(of_backward), tensors[:4], self.pattern, self.settings, padding, self.documents, seed, self.query_offset)
        # the mask and the seed belong to a single call, so the record holds neither
        kept = replace(call, padding=None, seed=0)
        if of_backward:
            dout, out = of_backward
            backward = strategy.choose_backward(self.pattern, shape, (dout, q, k, v, out), call, saved=is_saved)
            return ResolvedPass(kept, backward, 0, call.backend.capabilities)
        elements = 0
        if self.settings.detached and self.settings.needs_grad:
            if self.outside:
                elements = strategy.saved_elements_of_documents(self.pattern, shape, q, call)
            elif self.documents is None:
                elements = saved_elements(q, k, self.pattern, self.settings, None, self.query_offset)
        forward = strategy.choose_forward(self.pattern, shape, tensors, call, saves=elements > 0)
        return ResolvedPass(kept, forward, elements, call.backend.capabilities)


def find(key: Hashable, dtype: torch.dtype) -> ResolvedCall | None:
    """Returns the record that ``remember`` stored for calls with this key, while the state it was resolved in still holds."""
    found: ResolvedCall | None = registry.cached.get(_now(key, dtype))
    return found


def remember(key: Hashable, dtype: torch.dtype, resolved: ResolvedCall) -> None:
    registry.remember(_now(key, dtype), resolved)


def _now(key: Hashable, dtype: torch.dtype) -> Hashable:
    """Returns a key that also holds the global state that choices depend on."""
    products = torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 else None
    state = torch.are_deterministic_algorithms_enabled(), products, *strategy.FUSED_DEVICES
    return key, state, tuning_table.generation, hardware.generation


def resolve(q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None, arguments: tuple[Any, ...]) -> ResolvedCall:
    """Returns the record of a call with checked arguments. ``arguments``: those that follow the op's tensors, as plain Python types."""
    lengths, rates, head_offsets, offset_list, branch_heads, tail, window, is_causal, scale, query_offset, *rest = arguments
    lists = (tuple(lengths), tuple(rates), tuple(offset_list), tuple(window))
    others = (head_offsets, branch_heads, tail, is_causal, scale, query_offset, *rest)
    key = (ResolvedCall, lists, others, q.shape, k.shape, q.dtype, q.device, padding is None)
    found = find(key, q.dtype)
    if found is None:
        pattern = pattern_of(lists[0], lists[1], head_offsets, lists[2], branch_heads, tail)
        settings = CallSettings(list(window), is_causal, scale, *rest)
        found = ResolvedCall(pattern, settings, query_offset, arguments, q.device.type)
        remember(key, q.dtype, found)
    return found
