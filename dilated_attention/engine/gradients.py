"""Derivatives of the attention ops, by one definition: reverse mode, the transforms of ``torch.func``, and what is refused.

    forward(q, k, v, *masks, *settings) -> (out, lse, *extra)
    backward(dout, dlse, q, k, v, out, lse, *extra, *masks, *settings) -> (dq, dk, dv)

Without transforms an op runs as torch.library makes it. Under ``grad``, ``vjp``, ``vmap`` and the like it is the autograd function below,
which torch.library does not make. Forward mode is refused: a tangent would otherwise be dropped without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.engine.transforms import each, folded, on_tangents, on_transforms
from dilated_attention.pattern import pattern_from_spec


def register_gradients(forward: Any, backward: Any, way_out: str) -> None:
    """Make ``backward`` the derivative of ``forward``; both are custom ops with the arguments above.

    Args:
        way_out: how else to get second derivatives and forward mode at small N.
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
            # a pattern that holds a function or a tensor is found again by its name as long as it lives: until after the backward
            ctx.pattern = pattern_from_spec(inputs[spec])

    def gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # read once: a checkpoint unpacks what is saved one time
        saved = ctx.saved_tensors
        (q, k, v, *masks), output = saved[:num_tensors], saved[num_tensors:]
        if dout is None:
            dout = torch.zeros_like(output[0])
        dq, dk, dv = backward(dout.to(q.dtype), dlse, q, k, v, *output, *masks, *ctx.settings)
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
    """The op as torch.func wants it: what is kept apart from the forward, a rule for vmap."""
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
            # documents are bounded for one row, a seed is that of one call, and what a detached mixture keeps is laid out for one batch
            alone = given["cu_seqlens"] is not None or given["seed"] is not None or given.get("detached", False)
            return (each if alone else folded)(Transformed.apply, info.batch_size, in_dims, args)

    Transformed.__name__ = Transformed.__qualname__ = op._opoverload._schema.name.rpartition("::")[2]
    return Transformed
