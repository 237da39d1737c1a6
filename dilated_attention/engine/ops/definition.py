"""The attention ops of one process, and the one definition of such an op: schema, fake implementation, derivatives, transforms, refusals.

    forward(q, k, v, *optional, *settings) -> (out, lse, saved)
    backward(dout, dlse, q, k, v, out, lse, saved, *optional, *settings) -> (dq, dk, dv, dslopes, dsinks)

Dilated, block-sparse and distributed attention differ only in the ``ResolvedCall`` that computes a call. If no tracer, transform or
profiler needs to see the op (``transforms.is_eager``), a call runs outside the dispatcher (``resolve.py``). Otherwise the op runs as
torch.library defines it. torch.library defines nothing for ``grad``, ``vjp``, ``vmap`` and the like, so under these the op is an autograd
function that is made here. Forward mode is refused, because a tangent would otherwise be dropped silently.

A selective-checkpointing policy should list the forward ops as must-save, e.g. ``torch.ops.dilated_attention.dilated_attention``.

FLOPs, for torch.utils.flop_counter: pairs of a block pattern are counted from the lists that kernels read, so packed documents and chosen
blocks are counted exactly. Tensors without values (fake, meta) count as a single document, and chosen blocks by the pattern's mean number
of pairs. For dilated branches, packed documents count as one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention.backends import detect
from dilated_attention.backends.base import new_lse
from dilated_attention.engine.branches.problems import problems_of, whole_shape
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.prepare import WINDOW_BLOCK, fuses, new_like, saved_elements
from dilated_attention.engine.ops.resolve import (
    NUM_INPUTS,
    CallInputs,
    MaybeTensor,
    ResolvedCall,
    gradient_of_out,
    resolve,
)
from dilated_attention.engine.ops.resolve_blocks import pieces_of
from dilated_attention.engine.ops.settings import CallSettings, settings_of
from dilated_attention.engine.ops.transforms import each, folded, on_tangents, on_transforms
from dilated_attention.engine.plan import Tensors
from dilated_attention.pattern import pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import BlockLists, unpacked

_QKV = "Tensor q, Tensor k, Tensor v"
_OPTIONAL = "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, Tensor? kept, Tensor? coordinates, Tensor? slopes, Tensor? sinks"
_SETTINGS = "str settings, float scale, float dropout_p, SymInt query_offset, SymInt seq_len"
_FORWARD = f"({_QKV}, {_OPTIONAL}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
_OUTPUTS = "Tensor out, Tensor lse, Tensor saved"
_BACKWARD = f"(Tensor dout, Tensor? dlse, {_QKV}, {_OUTPUTS}, {_OPTIONAL}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
# where arguments stand: the settings and the two tensors before them in both schemas, q, k, v and the optional tensors in the backward's
_NUM_SETTINGS = 5
_SETTINGS_AT, _SLOPES_AND_SINKS_AT = slice(-_NUM_SETTINGS, None), slice(-_NUM_SETTINGS - 2, -_NUM_SETTINGS)
_BACKWARD_QKV_AT, _BACKWARD_OPTIONAL_AT = slice(2, 5), slice(8, -_NUM_SETTINGS)


def define_attention(
    name: str,
    resolved_call: Callable[[Tensor, Tensor, MaybeTensor, CallSettings], ResolvedCall],
    alternative: str,
    *,
    new_saved: Callable[[CallInputs, CallSettings], Tensor] | None = None,
) -> Any:
    """Defines the op ``torch.ops.dilated_attention.<name>`` and its backward ``<name>_backward``, and returns the forward op.

    Args:
        resolved_call: returns what computes calls with these (q, k, key_padding_mask, settings).
        alternative: what error messages recommend instead, for second derivatives and forward mode at small N.
        new_saved: returns a tensor like the third output, given the inputs; by default an empty tensor.
    """

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs = CallInputs(*arguments[:NUM_INPUTS])
        resolved = resolved_call(inputs.q, inputs.k, inputs.key_padding_mask, settings_of(*arguments[_SETTINGS_AT]))
        out, lse, saved = resolved.run_forward(inputs)
        return out, lse, out.new_empty(0) if saved is None else saved

    def backward(*arguments: Any) -> Tensors:
        dout, dlse, q, k, v, out, lse, saved, key_padding_mask, *others = arguments[:-_NUM_SETTINGS]
        resolved = resolved_call(q, k, key_padding_mask, settings_of(*arguments[_SETTINGS_AT]))
        # a transform of torch.func expands what it does not map, and kernels read both as the forward wrote them
        outputs = out.contiguous(), lse.contiguous(), saved
        grads = resolved.run_backward(dout, dlse, CallInputs(q, k, v, key_padding_mask, *others), outputs)
        return tuple([q.new_empty(0) if x is None else x for x in grads])

    def fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if torch.onnx.is_in_onnx_export():
            # otherwise its exporter ends with a page about a node without decompositions
            raise NotImplementedError(
                f"torch.onnx.export is not supported: ONNX has no operation for dilated_attention::{name}; "
                "use torch.export.export, or torch.compile (docs/limits.md)"
            )
        q, inputs = arguments[0], CallInputs(*arguments[:NUM_INPUTS])
        saved = q.new_empty(0) if new_saved is None else new_saved(inputs, settings_of(*arguments[_SETTINGS_AT]))
        return new_like(q), new_lse(q), saved

    def fake_backward(*arguments: Any) -> Tensors:
        q, k, v = arguments[_BACKWARD_QKV_AT]
        slopes_and_sinks = arguments[_SLOPES_AND_SINKS_AT]
        return new_like(q), new_like(k), new_like(v), *(q.new_empty(0) if x is None else new_like(x) for x in slopes_and_sinks)

    forward_op = torch.library.custom_op(f"dilated_attention::{name}", forward, mutates_args=(), schema=_FORWARD)
    backward_op = torch.library.custom_op(f"dilated_attention::{name}_backward", backward, mutates_args=(), schema=_BACKWARD)
    forward_op.register_fake(fake)
    backward_op.register_fake(fake_backward)
    _register_derivatives(name, forward_op, backward_op, alternative)
    return forward_op


def _register_derivatives(name: str, forward: Any, backward: Any, alternative: str) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:NUM_INPUTS], *output)
        ctx.settings = inputs[NUM_INPUTS:]
        blocks = settings_of(*ctx.settings).blocks
        # a pattern that holds a function or a tensor can be looked up by name only while it is alive: keep it until after the backward
        ctx.pattern = pattern_from_spec(blocks) if blocks else None

    def gradients(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor, *_: Any) -> tuple[MaybeTensor, ...]:
        # read only once, since a checkpoint unpacks saved tensors only once
        saved = ctx.saved_tensors
        (q, k, v, *others, slopes, sinks), output = saved[:NUM_INPUTS], saved[NUM_INPUTS:]
        dout = gradient_of_out(dout, q, output[0])
        dq, dk, dv, dslopes, dsinks = backward(dout, dlse, q, k, v, *output, *others, slopes, sinks, *ctx.settings)
        dslopes, dsinks = None if slopes is None else dslopes, None if sinks is None else dsinks
        return dq, dk, dv, *(None,) * len(others), dslopes, dsinks, *(None,) * _NUM_SETTINGS

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.set_materialize_grads(False)

    def no_double_backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            f"{name} has no second derivative: its backward keeps no graph. For gradients of gradients at small N, use {alternative}"
        )

    def no_forward_mode(*_: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no forward mode, and got a tangent (torch.func.jvp, jacfwd, hessian, linearize, or make_dual). Use reverse mode "
            f"(torch.func.vjp, jacrev, grad), or detach what needs no derivative; for forward mode at small N, use {alternative}"
        )

    forward.register_autograd(gradients, setup_context=setup_context)
    backward.register_autograd(no_double_backward)
    for op, setup, derivative in ((forward, setup_context, gradients), (backward, keep_nothing, no_double_backward)):
        on_transforms(op, _function(op, setup, derivative, no_forward_mode).apply)
        on_tangents(op, no_forward_mode)


def _function(op: Any, setup: Any, derivative: Any, no_forward_mode: Any) -> type[torch.autograd.Function]:
    """Returns the op as an autograd function that torch.func accepts: with a separate ``setup_context`` and a vmap rule."""
    names = [argument.name for argument in op._opoverload._schema.arguments]

    class Transformed(torch.autograd.Function):
        setup_context = staticmethod(setup)
        backward = staticmethod(derivative)
        jvp = staticmethod(no_forward_mode)

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
            given = dict(zip(names, args, strict=True))
            # what cannot be folded into one larger batch: cu_seqlens is for batch size 1, a seed belongs to one call, what detached mixing
            # saves is laid out for one batch, and the gradients of sinks and slopes are summed over it
            is_alone = any(given[name] is not None for name in ("cu_seqlens", "seed", "slopes", "sinks"))
            rule = each if is_alone or settings_of(*args[_SETTINGS_AT]).detached else folded
            return rule(Transformed.apply, info.batch_size, in_dims, args)

    Transformed.__name__ = Transformed.__qualname__ = op._opoverload._schema.name.rpartition("::")[2]
    return Transformed


def _new_saved(inputs: CallInputs, settings: CallSettings) -> Tensor:
    """Returns a tensor like the third output, which only a forward that fuses its branches saves (``prepare.saved_elements``).

    Over packed documents, whose number is not known without values, nothing is saved.
    """
    q, k = inputs.q, inputs.k
    may_save = inputs.cu_seqlens is None and settings.saves_outputs and fuses(detect(q.device), q.dtype)
    return q.new_empty(saved_elements(settings.pattern, q.shape, k.shape, q.element_size()) if may_save else 0)


dilated_attention_op = define_attention(
    "dilated_attention",
    resolve,
    "dilated_attention.engine.reference.reference_attention, which is plain autograd",
    new_saved=_new_saved,
)
block_sparse_attention_op = define_attention(
    "block_sparse_attention", resolve, "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H)"
)
block_sparse_dilated_attention_op = define_attention(
    "block_sparse_dilated_attention",
    resolve,
    "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities",
)


def kept_pairs(lists: BlockLists, front: int) -> int:
    """Counts the (query, key) pairs that lists keep, over all their groups, without the first ``front`` queries."""
    row, column = lists.row_of_entry % lists.num_rows, lists.columns.long()
    # of each block the rows low … high − 1, and the first width columns
    lows = torch.where(row == 0, front, 0)
    highs = (lists.num_queries - row * lists.q_block).clamp(max=lists.q_block)
    widths = (lists.num_keys - column * lists.k_block).clamp(max=lists.k_block)
    masks = torch.full_like(column, -1) if lists.masks is None else lists.masks.long()
    # many blocks share a mask, and nearly all use the whole of it
    kinds, counts = torch.stack((masks, lows, highs, widths), 1).unique(dim=0, return_counts=True)
    total = 0
    for (mask, low, high, width), count in zip(kinds.tolist(), counts.tolist(), strict=True):
        pairs = (high - low) * width if mask < 0 else int(unpacked(lists.bits[mask])[low:high, :width].sum())
        total += pairs * count
    return total


def _block_pairs(inputs: CallInputs, settings: CallSettings) -> int:
    """Counts the pairs of the whole batch, or estimates them for chosen blocks that have no values."""
    q, k = inputs.q, inputs.k
    cu_seqlens, kept = (None if x is None or isinstance(x, FakeTensor) or x.is_meta else x for x in (inputs.cu_seqlens, inputs.kept))
    pattern = pattern_from_spec(settings.blocks)
    (B, Nq, H), Nk = q.shape[:3], k.shape[1]
    if pattern.is_chosen and kept is None:
        return B * pattern.pairs(Nk, H, is_causal=settings.is_causal) * Nq // Nk
    documents = None if cu_seqlens is None else document_ranges(bounds_of(cu_seqlens), Nk)
    device = torch.device("cpu") if q.is_meta or isinstance(q, FakeTensor) else q.device
    pieces = pieces_of(pattern, (Nq, Nk, H), settings, documents, kept, device)
    return sum(kept_pairs(x.lists, x.front) * (B // x.lists.num_batch) * (H // x.lists.num_heads) for x in pieces)


def _formula(per_pair: int, is_backward: bool) -> Callable[..., int]:
    """Returns the formula of ops that take ``per_pair`` · D operations for a pair."""

    def flops(*arguments: Any, **_: Any) -> int:
        inputs = CallInputs(*arguments[:NUM_INPUTS])
        if is_backward:
            inputs = CallInputs(*arguments[_BACKWARD_QKV_AT], *arguments[_BACKWARD_OPTIONAL_AT])
        settings = settings_of(*arguments[_SETTINGS_AT])
        q, k = inputs.q, inputs.k
        if not q.numel():
            return 0
        pairs = _block_pairs(inputs, settings) if settings.blocks else 0
        if settings.branches is not None:
            first, shape = settings.query_offset, whole_shape(q.shape[2], k.shape[2], k.shape[1], settings.is_causal)
            # windows are counted in steps of so many queries, as kernels without windows compute them
            shape = shape._replace(queries=(first, first + q.shape[1]), window=settings.window_sides, window_block=WINDOW_BLOCK)
            pairs += q.shape[0] * problems_of(settings.pattern, shape).pairs
        return per_pair * q.shape[3] * pairs

    return flops


for _op in (dilated_attention_op, block_sparse_attention_op, block_sparse_dilated_attention_op):
    # in the backward five matrix products, one of which computes the forward's scores again
    for _op_name, _op_formula in ((_op._name, _formula(4, False)), (f"{_op._name}_backward", _formula(10, True))):
        register_flop_formula(getattr(torch.ops.dilated_attention, _op_name), get_raw=True)(_op_formula)
