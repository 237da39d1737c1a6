"""Resolves a call once for all calls like it, and runs it. Every decision about how a call runs is made here.

A record (``ResolvedCall``) is looked up by everything the decision depends on: shapes, dtype, device, options, and the state of torch and
of the registry. The decision also depends on strides, which only each pass knows, since gradients have their own strides. So each pass
chooses its backend and the way it runs (``branches/strategy.py``) the first time it gets tensors with these strides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from dilated_attention.backends import registry
from dilated_attention.backends.base import Capabilities, new_lse
from dilated_attention.backends.tiles.ahead import is_compiling
from dilated_attention.backends.tiles.scratch import all_aligned
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.oom import explain_shortage
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.eager import dispatched_alike, is_eager
from dilated_attention.engine.ops.prepare import kernel_ready, new_like, prepare, saved_elements
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.sinks import add_sinks_, sinks_gradient

Optional = torch.Tensor | None
Tensors = tuple[torch.Tensor, ...]
# the tensors of a call. seed: of dropout; kept: the blocks that a content-chosen pattern has chosen; sinks: of the heads (H,)
INPUTS = ("q", "k", "v", "key_padding_mask", "cu_seqlens", "seed", "kept", "sinks")
# the largest number of sets of strides that are remembered for one kind of call
MOST_PASSES = 16
# the largest number of records with documents that are kept, each with its tables
_MOST_PACKED = 4
Self = TypeVar("Self", bound="ResolvedCall")


@dataclass(frozen=True, eq=False)
class ResolvedCall(ABC):
    """Computes calls of one kind: the implementation of an attention op, which calls outside the dispatcher run directly.

    ``inputs`` are the tensors named ``INPUTS``; ``outputs`` are out, lse, and a tensor or None that the backward needs in addition. The
    sinks join the result in ``run_forward``, so that ``forward`` and ``backward``, which the subclasses define, get the other inputs only.

    Args:
        device_type: device type of all tensors.
        documents: (start, end) pairs of packed documents, read from ``cu_seqlens``; None for a single document.
        saves_documents: a forward over documents may save tensors whose size depends on the documents. The op saves none, since its
            fake implementation does not know the documents.
        passes: how a pass runs, keyed by the strides of the tensors it reads: q, k, v, and in a backward dout and out.
        packed: records with documents, keyed by their bounds, which the layers of a model share, and ``saves_documents``.
        alive: a pattern that holds a function or a tensor. It is found by its name only while it is alive: until after the backward.
    """

    name: ClassVar[str]
    settings: CallSettings
    device_type: str
    documents: tuple[Range, ...] | None = None
    saves_documents: bool = False
    passes: dict[tuple[tuple[int, ...], ...], Any] = field(default_factory=dict)
    packed: dict[tuple[tuple[int, ...], bool], Any] = field(default_factory=dict)
    alive: Any = None

    @abstractmethod
    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """Returns the outputs. out (B, Nq, H, D) and lse (B, H, Nq) are contiguous."""

    @abstractmethod
    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        """Returns (dq, dk, dv), contiguous, in the inputs' dtype."""

    def run_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """``forward`` and the sinks, without autocast, and with an explanation if memory runs out."""
        out, lse, saved = self._run(self.forward, inputs[:-1], inputs)
        if inputs[-1] is not None:
            add_sinks_(out, lse, inputs[-1])
        return out, lse, saved

    def run_backward(
        self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...], *, of_sinks: bool = True
    ) -> tuple[Any, ...]:
        """``backward`` as ``run_forward`` runs a forward. Returns (dq, dk, dv, dsinks or None).

        Args:
            of_sinks: whether the gradient of sinks is needed, where there are any.
        """
        grads = self._run(self.backward, (dout, dlse, inputs[:-1], outputs), inputs, (dout, dlse, *outputs))
        sinks = inputs[-1]
        return *grads, sinks_gradient(dout, dlse, outputs[0], outputs[1], sinks) if sinks is not None and of_sinks else None

    def _run(self, compute: Callable[..., Any], given: tuple[Any, ...], *tensors: tuple[Any, ...]) -> Any:
        """Returns ``compute(*given)``. ``tensors``: see ``_arguments``."""
        if torch.is_autocast_enabled(self.device_type):
            # it stays on inside an op, and would round a backend's float32 arithmetic to half precision
            with torch.autocast(self.device_type, enabled=False):
                return self._run(compute, given, *tensors)
        try:
            return compute(*given)
        except RuntimeError as error:
            x = self._arguments(*tensors)
            explain_shortage(error, f"{'backward' if 'dout' in x else 'forward'} of {self.name}", x)
            raise

    def _arguments(self, inputs: tuple[Any, ...], of_backward: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Returns the arguments of a pass by name. ``of_backward``: dout, dlse and the outputs; () in a forward."""
        found = dict(zip(INPUTS, inputs, strict=True)) | self.settings._asdict()
        return found | dict(zip(("dout", "dlse", "out", "lse", "saved"), of_backward, strict=True)) if of_backward else found

    def backward_op(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
        """Returns the same as ``run_backward``, but calls the op, which the dispatcher sees."""
        op = getattr(torch.ops.dilated_attention, f"{self.name}_backward")
        saved = dout.new_empty(0) if outputs[2] is None else outputs[2]
        *grads, dsinks = op(dout, dlse, *inputs[:3], *outputs[:2], saved, *inputs[3:], *self.settings.arguments())
        return *grads, None if inputs[-1] is None else dsinks

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse), recorded by autograd if gradients are needed."""
        out, lse = _record(self, *inputs) if self.settings.needs_grad else self.run_forward(*inputs)[:2]
        return out, lse

    def with_documents(self: Self, cu_seqlens: Optional, num_keys: int, *, saves: bool = False) -> Self:
        """Returns the record for calls with these bounds.

        Raises:
            ValueError: its values are not the bounds of documents that cover ``num_keys`` positions.
        """
        if cu_seqlens is None or self.documents is not None:
            return self
        key = bounds_of(cu_seqlens), saves
        record: Self | None = self.packed.get(key)
        if record is None:
            record = replace(self, documents=document_ranges(key[0], num_keys), saves_documents=saves, passes={}, packed={})
            if len(self.packed) >= _MOST_PACKED:
                self.packed.clear()
            self.packed[key] = record
        return record

    def keep_pass(self, tensors: Tensors, found: Any) -> None:
        if len(self.passes) >= MOST_PASSES:
            self.passes.clear()
        self.passes[tuple([x.stride() for x in tensors])] = found


class DirectAttention(torch.autograd.Function):
    """The autograd function of a call outside the dispatcher, the same one for every op."""

    @staticmethod
    def forward(ctx: Any, call: ResolvedCall, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        outputs = call.run_forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.call = call
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, dout: Optional, dlse: Optional) -> tuple[Optional, ...]:  # type: ignore[override]
        # read only once, since a checkpoint unpacks saved tensors only once
        saved = ctx.saved_tensors
        inputs, outputs = saved[: len(INPUTS)], saved[len(INPUTS) :]
        dout = gradient_of_out(dout, inputs[0], outputs[0])
        # with create_graph=True the op runs, since it refuses to be differentiated; it also handles batched gradients (vmap)
        eager = not torch.is_grad_enabled() and is_eager([x for x in saved if x is not None])
        eager = eager and dispatched_alike(dout, inputs[0]) and dispatched_alike(dlse, inputs[0])
        if eager:
            # frozen sinks, as of a model that is tuned by adapters
            dq, dk, dv, dsinks = ctx.call.run_backward(dout, dlse, inputs, outputs, of_sinks=ctx.needs_input_grad[-1])
        else:
            dq, dk, dv, dsinks = ctx.call.backward_op(dout, dlse, inputs, outputs)
        return None, dq, dk, dv, *(None,) * (len(INPUTS) - 4), dsinks


# not DirectAttention.apply, which checks for transforms and their wrapped tensors again: is_eager has already done so
_record = super(torch.autograd.Function, DirectAttention).apply


def gradient_of_out(dout: Optional, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(out) if dout is None else dout.to(q.dtype)


class LocalCall(ResolvedCall):
    """Calls of one process: packed documents are read here, and a call without queries has nothing to compute."""

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """Returns the outputs.

        Raises:
            BackendUnavailable: no backend can compute it. By then nothing is allocated except copies of tensors whose strides no
                kernel accepts.
        """
        q, k, _, _, cu_seqlens, *_ = inputs
        record = self if cu_seqlens is None else self.with_documents(cu_seqlens, k.shape[1])
        if not q.numel():
            return new_like(q), new_lse(q).fill_(-torch.inf), None
        return record.compute_forward(*inputs)

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        q, k, v, _, cu_seqlens, *_ = inputs
        record = self if cu_seqlens is None else self.with_documents(cu_seqlens, k.shape[1])
        if not q.numel():
            return new_like(q).zero_(), new_like(k).zero_(), new_like(v).zero_()
        return record.compute_backward(dout, dlse, inputs, outputs)

    @abstractmethod
    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """``forward`` of a record that knows the documents, with at least one query."""

    @abstractmethod
    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        """``backward`` of a record that knows the documents, with at least one query."""

    @abstractmethod
    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> Any:
        """Chooses how a pass runs on these tensors and keeps what later passes can use; that has a method ``again``."""

    def ready(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> tuple[Tensors, Any]:
        """Returns the tensors in a layout that kernels accept, and how a pass runs on them.

        Args:
            tensors: q, k, v, and in a backward dout and out.
            more: what ``make_pass`` depends on in addition.
        """
        for _ in range(2):
            # strides do not include addresses, which must be aligned too
            if self.device_type != "cuda" or all_aligned([x.data_ptr() for x in tensors]):
                found = self.passes.get(tuple([x.stride() for x in tensors]))
                if found is not None and (found := found.again()) is not None:
                    return tensors, found
            tensors = tuple(kernel_ready(x) for x in tensors)
        return tensors, self.make_pass(tensors, padding, seed, more)


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

    def again(self) -> ResolvedPass | None:
        """Returns the pass for later calls, or None if the backend now declares something else."""
        return self if self.capabilities is self.call.backend.capabilities else None


class ResolvedDilated(LocalCall):
    """Calls of dilated attention, of which dense attention is one branch of rate 1. ``passes`` holds a ``ResolvedPass`` for each."""

    name = "dilated_attention"

    def compute_forward(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """Returns (out, lse, the branches' outputs saved for the backward (``prepare.saved_elements``) or None)."""
        q, k, v, padding, _, seed, _ = inputs
        (q, k, v), (call, run, elements, _) = self.ready((q, k, v), padding, seed, False)
        saved = q.new_empty(elements) if elements else None
        return *run(q, k, v, with_masks(call, padding, seed), saved), saved

    def compute_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Tensors:
        (q, k, v, padding, _, seed, _), (out, lse, saved) = inputs, outputs
        saved = None if saved is None or not saved.numel() else saved
        (q, k, v, dout, out), (call, run, *_) = self.ready((q, k, v, dout, out), padding, seed, saved is not None)
        return run((dout, q, k, v, out, lse), with_masks(call, padding, seed), dlse, saved)  # type: ignore[no-any-return]

    def make_pass(self, tensors: Tensors, padding: Optional, seed: Optional, more: Any) -> ResolvedPass:
        """Chooses the backend of a pass and the way it runs. ``more``: a backward gets what the forward has saved."""
        q, k, v, *of_backward = tensors
        pattern = self.settings.pattern
        shape, call = prepare(bool(of_backward), tensors[:4], pattern, self.settings, padding, self.documents, seed)
        elements = 0
        run: Any
        if of_backward:
            dout, out = of_backward
            run = strategy.choose_backward(pattern, shape, (dout, q, k, v, out), call, saved=more)
        else:
            if self.saves_documents and self.settings.detached and self.settings.needs_grad:
                elements = strategy.saved_elements_of_documents(pattern, shape, q, call)
            elif self.documents is None:
                elements = saved_elements(q, k, self.settings, None)
            run = strategy.choose_forward(pattern, shape, tensors, call, saves=elements > 0)
            if self.settings.needs_grad and is_compiling():
                # the first call of a kind: kernels of its backward are compiled beside those of the forward
                like = new_like(q)
                self.make_pass((q, k, v, like, like), padding, seed, elements > 0)
        # the mask and the seed belong to a single call, so the record holds neither
        made = ResolvedPass(replace(call, padding=None, seed=0), run, elements, call.backend.capabilities)
        self.keep_pass(tensors, made)
        return made


def with_masks(call: Call, padding: Optional, seed: Optional) -> Call:
    """Returns the call of a known pass with the mask and the seed of this call."""
    return call if padding is None and seed is None else replace(call, padding=padding, seed=0 if seed is None else int(seed.item()))


def find(key: Hashable, dtype: torch.dtype) -> ResolvedCall | None:
    """Returns the record that ``remember`` stored for calls with this key, while the state it was resolved in still holds."""
    found: ResolvedCall | None = registry.cached.get(_now(key, dtype))
    return found


def remember(key: Hashable, dtype: torch.dtype, resolved: ResolvedCall) -> None:
    registry.remember(_now(key, dtype), resolved)


def _now(key: Hashable, dtype: torch.dtype) -> Hashable:
    """Returns a key that also holds the global state that choices depend on."""
    products = torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 else None
    state = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, products
    return key, state


def record_of(kind: type[Self], q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> Self:
    """Returns the record of calls like this one, which is made for the first of them."""
    key = (kind, settings, q.shape, k.shape, q.dtype, q.device, padding is None)
    found = find(key, q.dtype)
    if found is None:
        found = kind(settings, q.device.type)
        remember(key, q.dtype, found)
    assert isinstance(found, kind)
    return found


def resolve(q: torch.Tensor, k: torch.Tensor, padding: Optional, settings: CallSettings) -> ResolvedDilated:
    """Returns the record of calls of dilated attention like this one."""
    return record_of(ResolvedDilated, q, k, padding, settings)
