"""Defines the derivatives of the attention ops in one place: reverse mode, the transforms of ``torch.func``, and what is refused.

    forward(q, k, v, *masks, *settings) -> (out, lse, *extra)
    backward(dout, dlse, q, k, v, out, lse, *extra, *masks, *settings) -> (dq, dk, dv)

If no tracer, transform or profiler needs to see the op (``eager.py``), a call runs outside the dispatcher: ``DirectCall`` implements it
and autograd records ``DirectAttention``. Otherwise the op runs as torch.library defines it. torch.library defines nothing for ``grad``,
``vjp``, ``vmap`` and the like, so under these the op is an autograd function that this module makes. Forward mode is refused,
because a tangent would otherwise be dropped silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.engine.ops.eager import dispatched_alike, is_eager
from dilated_attention.engine.ops.transforms import each, folded, on_tangents, on_transforms
from dilated_attention.pattern import BlockPattern, pattern_from_spec

Optional = torch.Tensor | None


class DirectCall(ABC):
    """One call outside the dispatcher: the op's implementations, and the backward op for a backward that must be visible as an op.

    ``inputs`` are the op's tensors, q, k and v first; ``outputs`` are out, lse, and what else the backward needs.
    """

    @abstractmethod
    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns the outputs."""

    @abstractmethod
    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Returns (dq, dk, dv)."""

    @abstractmethod
    def backward_op(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
        """Returns the same by calling the op."""

    def __call__(self, needs_grad: bool, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse), recorded by autograd if ``needs_grad``."""
        out, lse = _record(self, *inputs) if needs_grad else self.forward(*inputs)[:2]
        return out, lse


class DirectAttention(torch.autograd.Function):
    """The autograd function of a call outside the dispatcher, the same one for every op."""

    @staticmethod
    def forward(ctx: Any, call: DirectCall, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        outputs = call.forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.call, ctx.num_inputs = call, len(inputs)
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, dout: Optional, dlse: Optional) -> tuple[Optional, ...]:  # type: ignore[override]
        # read only once, since a checkpoint unpacks saved tensors only once
        saved = ctx.saved_tensors
        inputs, outputs = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        dout = _gradient_of_out(dout, inputs[0], outputs[0])
        # with create_graph=True the op runs, since it refuses to be differentiated; it also handles batched gradients (vmap)
        eager = not torch.is_grad_enabled() and is_eager([x for x in saved if x is not None])
        eager = eager and dispatched_alike(dout, inputs[0]) and dispatched_alike(dlse, inputs[0])
        run = ctx.call.backward if eager else ctx.call.backward_op
        return None, *run(dout, dlse, inputs, outputs), *(None,) * (len(inputs) - 3)


# not Attention.apply, which checks for transforms and their wrapped tensors again: is_eager has already done so
_record = super(torch.autograd.Function, DirectAttention).apply


class _OpCall(DirectCall):
    """A call that runs the functions which the op and its backward op were defined from."""

    def __init__(self, ops: tuple[Any, Any], arguments: tuple[Any, ...], pattern: BlockPattern) -> None:
        # a pattern that holds a function or a tensor can be looked up by name only while it is alive, so keep it until after the backward
        self.ops, self.arguments, self.pattern = ops, arguments, pattern

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self.ops[0]._init_fn(*inputs, *self.arguments)
        return outputs

    def backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        grads: tuple[torch.Tensor, ...] = self.ops[1]._init_fn(*self._of_backward(dout, dlse, inputs, outputs))
        return grads

    def backward_op(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
        return self.ops[1](*self._of_backward(dout, dlse, inputs, outputs))

    def _of_backward(self, dout: torch.Tensor, dlse: Optional, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return dout, dlse, *inputs[:3], *outputs, *inputs[3:], *self.arguments


def call_op(
    ops: tuple[Any, Any], needs_grad: bool, pattern: BlockPattern, inputs: tuple[Any, ...], *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of an op whose only outputs these are, running it outside the dispatcher where possible."""
    if is_eager([x for x in inputs if x is not None]):
        return _OpCall(ops, arguments, pattern)(needs_grad, *inputs)
    out, lse = ops[0](*inputs, *arguments)
    return out, lse


def _gradient_of_out(dout: Optional, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(out) if dout is None else dout.to(q.dtype)


def register_gradients(forward: Any, backward: Any, way_out: str) -> None:
    """Makes ``backward`` the derivative of ``forward``. Both are custom ops with the signatures given in the module docstring.

    Args:
        way_out: the alternative that error messages name for second derivatives and forward mode at small N.
    """
    name = forward._opoverload._schema.name.rpartition("::")[2]
    arguments = forward._opoverload._schema.arguments
    num_tensors = sum("Tensor" in str(argument.type) for argument in arguments)
    spec = next((i for i, argument in enumerate(arguments) if argument.name == "spec"), None)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:num_tensors], *output)
        ctx.settings = inputs[num_tensors:]
        if spec is not None:
            # a pattern that holds a function or a tensor can be looked up by name only while it is alive: keep it until after the backward
            ctx.pattern = pattern_from_spec(inputs[spec])

    def gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # read only once, since a checkpoint unpacks saved tensors only once
        saved = ctx.saved_tensors
        (q, k, v, *masks), output = saved[:num_tensors], saved[num_tensors:]
        dq, dk, dv = backward(_gradient_of_out(dout, q, output[0]), dlse, q, k, v, *output, *masks, *ctx.settings)
        return dq, dk, dv, *(None,) * (len(arguments) - 3)

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    def no_double_backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            f"{name} has no second derivative: its backward keeps no graph. For gradients of gradients at small N, use {way_out}"
        )

    def no_forward_mode(*_: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no forward mode, and got a tangent (torch.func.jvp, jacfwd, hessian, linearize, or make_dual). Use reverse mode "
            f"(torch.func.vjp, jacrev, grad), or detach what needs no derivative; for forward mode at small N, use {way_out}"
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
            # cu_seqlens is for batch size 1, a seed belongs to one call, and what detached mixing keeps is laid out for one batch
            alone = given["cu_seqlens"] is not None or given["seed"] is not None or given.get("detached", False)
            return (each if alone else folded)(Transformed.apply, info.batch_size, in_dims, args)

    Transformed.__name__ = Transformed.__qualname__ = op._opoverload._schema.name.rpartition("::")[2]
    return Transformed
