"""Resolves a call once for all calls like it, and runs it.

A record (``ResolvedCall``) is looked up by the kind of call: dtype, heads, head dim, device, options, and the state of torch and of the
registry. Each pass makes its plan (``prepare.make_plan``) the first time it gets tensors of some shapes and strides: gradients have their
own strides, and lengths change from call to call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from dilated_attention.backends import registry
from dilated_attention.backends.base import Bias, Result, accumulation_dtype, new_lse
from dilated_attention.backends.hardware import keep_for_graph
from dilated_attention.backends.merge import add_sinks_, merge_onto, sinks_gradient
from dilated_attention.backends.tiles.table import all_aligned
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.memory import explain_shortage
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.prepare import kernel_ready, make_plan, new_like
from dilated_attention.engine.ops.resolve_blocks import BlockPass, as_new, make_pieces, recalled, run_pieces
from dilated_attention.engine.ops.settings import CallSettings, as_dense
from dilated_attention.engine.ops.transforms import dispatched_alike, is_eager
from dilated_attention.engine.plan import Plan, Tensors
from dilated_attention.pattern import pattern_from_spec
from dilated_attention.pattern.blocks.base import redefined_classes

MaybeTensor = Tensor | None
# out, lse, and what the backward needs in addition, if anything
Outputs = tuple[Tensor, Tensor, MaybeTensor]
_OUTER = ("dout", "dlse", "out", "lse", "saved")
# the largest number of sets of shapes and strides that are remembered for one kind of call
MOST_PASSES = 256
# the largest number of records with documents that are kept, each with its tables
_MOST_PACKED = 4
Self = TypeVar("Self", bound="ResolvedCall")


class CallInputs(NamedTuple):
    """The tensors of a call, in the order of the ops' arguments.

    Args:
        seed: of dropout.
        kept: the blocks that a content-chosen pattern has chosen.
        coordinates, slopes: of a bias: (B, Nk, 2), None for positions; (H,).
        sinks: of the heads (H,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_padding_mask: MaybeTensor
    cu_seqlens: MaybeTensor
    seed: MaybeTensor
    kept: MaybeTensor
    coordinates: MaybeTensor
    slopes: MaybeTensor
    sinks: MaybeTensor


NUM_INPUTS = len(CallInputs._fields)


@dataclass(frozen=True, eq=False)
class ResolvedCall(ABC):
    """Computes calls of one kind: the implementation of an attention op, which calls outside the dispatcher run directly.

    ``outputs`` are out, lse, and a tensor or None that the backward needs in addition. ``run_forward`` and ``run_backward`` make the
    ``bias`` of its two tensors, and the sinks join the result there: ``forward`` and ``backward``, which the subclasses define, read
    neither.

    Args:
        device_type: device type of all tensors.
        documents: (start, end) pairs of packed documents, read from ``cu_seqlens``; None for a single document.
        saves_documents: a forward over documents may save tensors whose size depends on the documents. The op saves none, since its
            fake implementation does not know the documents.
        passes: how a pass runs, keyed by the shapes and strides of the tensors it reads: q, k, v, and in a backward dout and out.
        packed: records with documents, keyed by their bounds, which the layers of a model share, N, and ``saves_documents``.
        alive: a pattern that holds a function or a tensor. It is found by its name only while it is alive: until after the backward.
    """

    name: ClassVar[str]
    settings: CallSettings
    device_type: str
    documents: tuple[Range, ...] | None = None
    saves_documents: bool = False
    passes: dict[tuple[tuple[int, ...], ...], Any] = field(default_factory=dict)
    packed: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    alive: Any = None

    @abstractmethod
    def forward(self, inputs: CallInputs, bias: Bias | None) -> Outputs:
        """Returns the outputs. out (B, Nq, H, D) and lse (B, H, Nq) are contiguous. In one process there is at least one query, and the
        record knows the documents.

        Raises:
            BackendUnavailable: no backend can compute it. By then nothing is allocated except copies of tensors whose strides no
                kernel accepts.
        """

    @abstractmethod
    def backward(self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, bias: Bias | None, outputs: Outputs) -> Tensors:
        """Returns (dq, dk, dv), contiguous, in the inputs' dtype."""

    def run_forward(self, inputs: CallInputs) -> Outputs:
        """``forward`` and the sinks, without autocast, and with an explanation if memory runs out."""
        q, call = inputs.q, self.with_documents(inputs.cu_seqlens, inputs.k.shape[1])
        if not (q.numel() or self.settings.sharding):
            out, lse, saved = new_like(q), new_lse(q).fill_(-torch.inf), None
        else:
            bias = bias_of(inputs, self.settings.query_offset)
            out, lse, saved = call._run(call.forward, (inputs, bias), inputs)
        if inputs.sinks is not None:
            add_sinks_(out, lse, inputs.sinks)
        return out, lse, saved

    def run_backward(
        self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, outputs: Outputs, *, of_slopes: bool = True,
        of_sinks: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        """``backward`` as ``run_forward`` runs a forward. Returns (dq, dk, dv, dslopes or None, dsinks or None).

        Args:
            of_slopes, of_sinks: whether their gradients are needed, where there are any.
        """
        sinks, call = inputs.sinks, self.with_documents(inputs.cu_seqlens, inputs.k.shape[1])
        bias = bias_of(inputs, self.settings.query_offset, of_slopes)
        if not (inputs.q.numel() or self.settings.sharding):
            grads = tuple([new_like(x).zero_() for x in inputs[:3]])
        else:
            grads = call._run(call.backward, (dout, dlse, inputs, bias, outputs), inputs, (dout, dlse, *outputs))
        of_bias = None if bias is None or bias.gradient is None else bias.gradient.to(inputs.slopes.dtype)  # type: ignore[union-attr]
        return *grads, of_bias, sinks_gradient(dout, dlse, outputs[0], outputs[1], sinks) if sinks is not None and of_sinks else None

    def _run(self, compute: Callable[..., Any], given: tuple[Any, ...], inputs: CallInputs, outer: tuple[Any, ...] = ()) -> Any:
        """Returns ``compute(*given)``. ``outer``: dout, dlse and the outputs of a backward."""
        if torch.is_autocast_enabled(self.device_type):
            # it stays on inside an op, and would round a backend's float32 arithmetic to half precision
            with torch.autocast(self.device_type, enabled=False):
                return self._run(compute, given, inputs, outer)
        try:
            return compute(*given)
        except RuntimeError as error:
            x = inputs._asdict() | self.settings._asdict() | dict(zip(_OUTER, outer, strict=False))
            explain_shortage(error, f"{'backward' if outer else 'forward'} of {self.name}", x)
            raise

    def backward_op(self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, outputs: Outputs) -> Any:
        """Returns the same as ``run_backward``, but calls the op, which the dispatcher sees."""
        op = getattr(torch.ops.dilated_attention, f"{self.name}_backward")
        saved = dout.new_empty(0) if outputs[2] is None else outputs[2]
        *grads, dslopes, dsinks = op(dout, dlse, *inputs[:3], *outputs[:2], saved, *inputs[3:], *self.settings.arguments())
        return *grads, None if inputs.slopes is None else dslopes, None if inputs.sinks is None else dsinks

    def __call__(self, inputs: CallInputs) -> Result:
        """Returns (out, lse), recorded by autograd if gradients are needed."""
        out, lse = _record(self, *inputs) if self.settings.needs_grad else self.run_forward(inputs)[:2]
        return out, lse

    def with_documents(self: Self, cu_seqlens: MaybeTensor, num_keys: int, *, saves: bool = False) -> Self:
        """Returns the record for calls with these bounds; a distributed call reads them itself.

        Raises:
            ValueError: its values are not the bounds of documents that cover ``num_keys`` positions.
        """
        if cu_seqlens is None or self.documents is not None or self.settings.sharding:
            return self
        key = bounds_of(cu_seqlens), num_keys, saves
        record: Self | None = self.packed.get(key)
        if record is None:
            record = replace(self, documents=document_ranges(key[0], num_keys), saves_documents=saves, passes={}, packed={})
            if len(self.packed) >= _MOST_PACKED:
                self.packed.clear()
            self.packed[key] = record
        return record


class DirectAttention(torch.autograd.Function):
    """The autograd function of a call outside the dispatcher, the same one for every op."""

    @staticmethod
    def forward(ctx: Any, call: ResolvedCall, *inputs: Any) -> Result:  # type: ignore[override]
        outputs = call.run_forward(CallInputs(*inputs))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.call = call
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor) -> tuple[MaybeTensor, ...]:  # type: ignore[override]
        # read only once, since a checkpoint unpacks saved tensors only once
        saved = ctx.saved_tensors
        inputs, outputs = CallInputs(*saved[:NUM_INPUTS]), saved[NUM_INPUTS:]
        dout = gradient_of_out(dout, inputs.q, outputs[0])
        # with create_graph=True the op runs, since it refuses to be differentiated; it also handles batched gradients (vmap)
        given = [x for x in saved if x is not None]
        if not torch.is_grad_enabled() and is_eager(given) and dispatched_alike(dout, inputs.q) and dispatched_alike(dlse, inputs.q):
            # frozen sinks, as of a model that is tuned by adapters
            _, _, of_slopes, of_sinks = ctx.needs_input_grad[-4:]
            grads = ctx.call.run_backward(dout, dlse, inputs, outputs, of_slopes=of_slopes, of_sinks=of_sinks)
        else:
            grads = ctx.call.backward_op(dout, dlse, inputs, outputs)
        return None, *grads[:3], *(None,) * (NUM_INPUTS - 5), *grads[3:]


# not DirectAttention.apply, which checks for transforms and their wrapped tensors again: is_eager has already done so
_record = super(torch.autograd.Function, DirectAttention).apply


def gradient_of_out(dout: MaybeTensor, q: Tensor, out: Tensor) -> Tensor:
    if dout is None:
        return torch.zeros_like(out)
    dout = dout.to(q.dtype)
    # that of a sum has strides of 0
    return dout if dout.stride(-1) == 1 else dout.contiguous()


class LocalCall(ResolvedCall):
    """Calls of one process: of dilated branches, of which dense attention is one of rate 1, of a block pattern, or of both in one softmax.

    Both parts of such a union have kernels of their own. The forward merges their (out, lse). The backward runs each part's backward with
    the merged out and lse, which yields exactly its share of dq, dk, dv, and adds the shares. No gradient flows through the merge.

    ``passes`` holds how a pass runs: the branches' ``Plan`` or None, and the block pattern's pieces, if they hold no values of a call.
    """

    @property
    def name(self) -> str:  # type: ignore[override]
        return _NAMES[self.settings.branches is not None, bool(self.settings.blocks)]

    def forward(self, inputs: CallInputs, bias: Bias | None) -> Outputs:
        """Returns (out, lse, the branches' outputs saved for the backward (``prepare.saved_elements``) or None)."""
        # beside a block pattern, none are saved
        saves = not self.settings.blocks and (self.documents is None or self.saves_documents)
        (q, k, v), plan, pieces, masks = self.tensors_and_pass(inputs[:3], inputs, bias, saves)
        of_blocks = run_pieces(pieces, (q, k, v), masks.padding) if pieces else ()
        if plan is None:
            # results of a backend or cut at the front
            out, lse = map(as_new, of_blocks)
            return out, lse, None
        saved = q.new_empty(plan.saved) if plan.saved else None
        out, lse = plan.runner.forward(plan, q, k, v, masks, saved)
        if of_blocks:
            merge_onto(out, lse.transpose(1, 2), of_blocks[0], of_blocks[1].transpose(1, 2))
        return out, lse, saved

    def backward(self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, bias: Bias | None, outputs: Outputs) -> Tensors:
        out, lse, saved = outputs
        saved = None if saved is None or not saved.numel() else saved
        (q, k, v, dout, out), plan, pieces, masks = self.tensors_and_pass((*inputs[:3], dout, out), inputs, bias, saved is not None)
        tensors = dout, q, k, v, out, lse
        grads: Tensors = () if plan is None else plan.runner.backward(plan, tensors, masks, dlse, saved)
        if not pieces:
            return grads
        of_blocks, acc = run_pieces(pieces, tensors, masks.padding, dlse), accumulation_dtype(q.dtype)
        sums = [x.to(acc) + y for x, y in zip(grads, of_blocks, strict=True)] if grads else of_blocks
        return tuple([as_new(grad.to(q.dtype)) for grad in sums])

    def tensors_and_pass(
        self, tensors: Tensors, inputs: CallInputs, bias: Bias | None, saves: bool
    ) -> tuple[Tensors, Plan | None, BlockPass, Masks]:
        """Returns the tensors in a layout that kernels accept, how a pass runs on them, and its masks.

        Args:
            tensors: q, k, v, and in a backward dout and out.
            inputs: for the other tensors.
            saves: a forward may save the branches' outputs, or a backward gets them.
        """
        known: Any = None
        key: tuple[Any, ...] = ()
        for _ in range(2):
            # strides do not include addresses, which must be aligned too
            if self.device_type != "cuda" or all_aligned([x.data_ptr() for x in tensors]):
                key = (tensors[0].shape, tensors[1].shape, *[x.stride() for x in tensors])
                known = self.passes.get(key)
                if known is not None:
                    break
            if self.device_type != "cuda" and all([x.stride(-1) == 1 for x in tensors]):  # noqa: C419 - a generator takes longer
                break
            tensors = tuple([kernel_ready(x) for x in tensors])
        settings, masks, pieces = self.settings, masks_of(inputs, bias), BlockPass()
        plan, remembered = known or (None, ())
        if plan is None and settings.branches is not None:
            has_padding = masks.padding is not None
            plan = make_plan(settings, tensors, len(tensors) > 3, has_padding=has_padding, documents=self.documents, saved=saves)
        if settings.blocks:
            pieces = recalled(remembered)
            if not pieces:
                pieces, remembered = make_pieces(settings, tensors, self.documents, inputs.kept, masks)
        if known is None or remembered is not known[1]:
            if len(self.passes) >= MOST_PASSES:
                self.passes.clear()
            self.passes[key] = plan, remembered
        keep_for_graph((plan, pieces), self.device_type)
        return tensors, plan, pieces, masks


# by whether there are branches, and blocks
_NAMES = {
    (True, False): "dilated_attention",
    (False, True): "block_sparse_attention",
    (True, True): "block_sparse_dilated_attention",
}
_NO_MASKS = Masks()


def masks_of(inputs: CallInputs, bias: Bias | None) -> Masks:
    padding, seed = inputs.key_padding_mask, inputs.seed
    if padding is None and seed is None and bias is None:
        return _NO_MASKS
    return Masks(padding, 0 if seed is None else int(seed.item()), bias)


def bias_of(inputs: CallInputs, query_offset: int, with_gradient: bool = False) -> Bias | None:
    """Returns the bias of a call, or None; ``with_gradient``: with zeros for that of the slopes."""
    q, k, coordinates, slopes = inputs.q, inputs.k, inputs.coordinates, inputs.slopes
    if slopes is None:
        return None
    acc = accumulation_dtype(q.dtype)
    # of any strides, where launches are kept
    coordinates = positions_as_places(k.shape[1], k, acc) if coordinates is None else coordinates.to(acc).contiguous()
    gradient = slopes.new_zeros(slopes.shape, dtype=acc) if with_gradient else None
    return Bias(coordinates[:, query_offset : query_offset + q.shape[1]], coordinates, slopes.detach().to(acc), gradient)


def positions_as_places(num_keys: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns positions 0, 1, … as coordinates (B, N, 2) of a ``Bias``; B and device as of ``like``."""
    # positions of documents differ by their distance, too
    places = torch.arange(num_keys, dtype=dtype, device=like.device)[:, None]
    return torch.nn.functional.pad(places, (0, 1)).expand(like.shape[0], -1, -1).contiguous()


def find(key: Hashable, dtype: torch.dtype) -> ResolvedCall | None:
    """Returns the record that ``remember`` stored for calls with this key, while the state it was resolved in still holds."""
    return registry.cached.get(_now(key, dtype))  # type: ignore[return-value]


def remember(key: Hashable, dtype: torch.dtype, resolved: ResolvedCall) -> None:
    registry.remember(_now(key, dtype), resolved)


def _now(key: Hashable, dtype: torch.dtype) -> Hashable:
    """Returns a key that also holds the global state that choices depend on."""
    products = torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 else None
    return key, len(redefined_classes), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, products


def record_of(kind: type[Self], q: Tensor, k: Tensor, padding: MaybeTensor, settings: CallSettings) -> Self:
    """Returns the record of calls like this one, which is made for the first of them and serves all lengths and batch sizes."""
    # a pattern that holds a function or a tensor gets a record for this call alone, which keeps it alive until after the backward; a
    # remembered record would forever
    if settings.blocks and (pattern := pattern_from_spec(settings.blocks)).is_bound_to_process:
        return kind(settings, q.device.type, alive=pattern)
    key = (kind, settings, q.shape[2:], k.shape[2:], q.dtype, q.device, padding is None)
    found = find(key, q.dtype)
    if found is None:
        found = kind(settings, q.device.type)
        remember(key, q.dtype, found)
    assert isinstance(found, kind)
    return found


def resolve(q: Tensor, k: Tensor, padding: MaybeTensor, settings: CallSettings) -> LocalCall:
    """Returns the record of calls like this one, of dilated branches, a block pattern, or both."""
    return record_of(LocalCall, q, k, padding, as_dense(settings, q))
