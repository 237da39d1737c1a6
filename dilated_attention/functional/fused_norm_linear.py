"""Linear layers after a norm, an activation or both, which save only their inputs for the backward.

    y_i = W_i · z + b_i,    z = norm(a),    a = x or act(x) or SiLU(gate) ∘ x

Plain layers save x, a, z and, where dtypes differ, copies of them. This op saves x (and gate), which the attention or the previous
layer holds anyway, and two float32 numbers per row; its backward recomputes a and z in the pass that needs them. For a float32 residual
stream under autocast it saves the normalised rows in 16 bits instead. No matrix product is ever computed twice. The op works alike on
every device: with Triton kernels on GPUs, with plain torch in chunks of rows elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.engine.oom import explains_shortage
from dilated_attention.engine.ops.eager import is_eager, is_transformed
from dilated_attention.engine.ops.prepare import without_autocast
from dilated_attention.engine.ops.transforms import each, on_tangents, on_transforms
from dilated_attention.functional import fused_norm_linear_torch
from dilated_attention.functional.fused_norm_linear_torch import Recipe

# the kernels hold a row in registers
_MOST_COLUMNS = 16384


def norm_linear(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    *,
    gate: torch.Tensor | None = None,
    norm: str = "none",
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
) -> list[torch.Tensor]:
    """Computes [W_i · norm(activation(x)) + b_i for each i].

    Args:
        x: (…, K).
        weights: each (F_i, K).
        biases: each (F_i,), one per weight; [] for none.
        gate: (…, K), with ``activation="swiglu"`` only.
        norm: ``"layer"``, ``"rms"`` or ``"none"``.
        norm_weight, norm_bias: (K,), or None for 1 and 0.
        eps: eps of the norm.
        activation: ``"gelu"`` (exact), ``"relu"``, ``"silu"``, ``"swiglu"``: SiLU(gate) ∘ x, or ``"none"``.

    Returns:
        (…, F_i) each, in the weights' dtype, or autocast's. Norm and activation are computed in float32 (float64 for float64) and
        rounded once.

    Differs from separate layers only in rounding: they round after the activation, and again after the norm.
    """
    dtype = compute_dtype(x, weights[0])
    narrows = activation == "none" and norm != "none" and dtype.itemsize < x.dtype.itemsize and torch.is_grad_enabled()
    settings = (activation, norm, eps, dtype, narrows)
    if not is_eager([x]):
        return list(norm_linear_op(x, gate, norm_weight, norm_bias, weights, biases, *settings)[:-2])
    return list(_NormLinear.apply(len(weights), settings, x, gate, norm_weight, norm_bias, *weights, *biases))


def compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a linear layer computes: autocast's if it is on (it leaves float64 alone), else the weight's."""
    if has_autocast(x) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


def has_autocast(x: torch.Tensor) -> bool:
    # is_autocast_enabled raises for a device without autocast, such as meta
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


@explains_shortage("forward of norm_linear")
def _forward(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    activation: str,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    narrows: bool,
) -> list[torch.Tensor]:
    """Returns [y_i …, statistics, x̂].

    The statistics are mean and 1/std of each row, (2, rows), or (0, rows) without a norm. x̂ is empty unless ``narrows``: then, for an x
    wider than ``dtype``, the backward gets x̂ = (x − mean) / std in ``dtype`` instead of x. The caller checks the arguments.
    """
    recipe = Recipe(norm_weight, norm_bias, activation, norm, eps, dtype)
    rows, gates = _rows(x), None if gate is None else _rows(gate)
    weights, biases = [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
    shape, stats, normal = x.shape[:-1], _new_stats(x, norm), _new_normal(x, dtype, narrows)
    with without_autocast(x):
        if _fused(x):
            from dilated_attention.functional import fused_norm_linear_triton

            z = fused_norm_linear_triton.prepare(rows, gates, recipe, stats, normal if narrows else None)
            ys = [F.linear(z, w, biases[i] if biases else None) for i, w in enumerate(weights)]
        else:
            kept = normal.view(rows.shape) if narrows else None
            ys = fused_norm_linear_torch.forward(rows, gates, weights, biases, recipe, stats, kept)
    # the outputs must not be views: autograd refuses in-place changes of a view of a function's output, and FSDP2's hooks would be lost
    return [*(torch.ops.aten._unsafe_view(y, [*shape, y.shape[-1]]) for y in ys), stats, normal]


@explains_shortage("backward of norm_linear")
def _backward(
    dys: list[torch.Tensor],
    x: torch.Tensor,
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    stats: torch.Tensor,
    needs: list[bool],
    activation: str,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    wide: torch.dtype | None,
) -> list[torch.Tensor]:
    """Returns gradients of x, gate, the norm's weight and bias, each weight, each bias: of those given that ``needs`` asks for.

    ``needs`` has one flag each for x and gate, the norm, the weights and the biases. ``wide`` is the original dtype of x where the
    tensor passed as x is x̂.
    """
    recipe = Recipe(norm_weight, norm_bias, activation, norm, eps, dtype)
    needs_input, needs_norm, needs_weights, needs_biases = needs
    rows, gates = _rows(x), None if gate is None else _rows(gate)
    widths = [w.shape[0] for w in weights]
    with without_autocast(x):
        # one product over all layers sums their contributions to dz in its accumulator
        joined = weights[0].to(dtype) if len(weights) == 1 else torch.cat([w.to(dtype) for w in weights])
        dy = _rows(dys[0]).to(dtype) if len(dys) == 1 else torch.cat([_rows(dy).to(dtype) for dy in dys], dim=-1)
        if _fused(x):
            from dilated_attention.functional import fused_norm_linear_triton

            dz = dy @ joined if needs_input or needs_norm else None
            z, dx, dgate, sums = fused_norm_linear_triton.prepare_backward(rows, gates, recipe, stats, dz, needs_weights, wide)
            dnorm: list[torch.Tensor | None] = [*sums]
            dweight = None if z is None else dy.t() @ z
            del z, dz
        else:
            dx, dgate, dnorm, dweight = fused_norm_linear_torch.backward(dy, rows, gates, joined, stats, recipe, needs, wide)
        dbias = dy.sum(0, dtype=stats.dtype) if needs_biases else None
    grads: list[torch.Tensor] = []
    if needs_input:
        grads += [d.view(x.shape) for d in (dx, dgate) if d is not None]
    if needs_norm:
        # the kernel returns the two gradients in one tensor
        pairs = zip(dnorm, (norm_weight, norm_bias), strict=True)
        grads += [d.to(p.dtype, copy=True) for d, p in pairs if d is not None and p is not None]
    if dweight is not None:
        grads += [d.to(w.dtype, copy=len(weights) > 1) for d, w in zip(dweight.split(widths), weights, strict=True)]
    if dbias is not None:
        grads += [d.to(b.dtype, copy=len(weights) > 1) for d, b in zip(dbias.split(widths), biases, strict=True)]
    return grads


def _fused(x: torch.Tensor) -> bool:
    return has_kernels(x) and x.shape[-1] <= _MOST_COLUMNS


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _new_stats(x: torch.Tensor, norm: str) -> torch.Tensor:
    # Size.numel() would specialise a symbolic length
    return x.new_empty((0 if norm == "none" else 2, math.prod(x.shape[:-1])), dtype=accumulation_dtype(x.dtype))


def _new_normal(x: torch.Tensor, dtype: torch.dtype, narrows: bool) -> torch.Tensor:
    return x.new_empty(x.shape if narrows else (0,), dtype=dtype)


norm_linear_op = torch.library.custom_op("dilated_attention::norm_linear", _forward, mutates_args=())
norm_linear_backward_op = torch.library.custom_op("dilated_attention::norm_linear_backward", _backward, mutates_args=())


@norm_linear_op.register_fake
def _(
    x: torch.Tensor, gate: Any, norm_weight: Any, norm_bias: Any, weights: list[torch.Tensor], biases: Any, activation: str, norm: str,
    eps: float, dtype: torch.dtype, narrows: bool,
) -> list[torch.Tensor]:  # fmt: skip
    ys = [x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype) for w in weights]
    return [*ys, _new_stats(x, norm), _new_normal(x, dtype, narrows)]


@norm_linear_backward_op.register_fake
def _(
    dys: Any, x: torch.Tensor, gate: torch.Tensor | None, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None,
    weights: list[torch.Tensor], biases: list[torch.Tensor], stats: Any, needs: list[bool],
    activation: str, norm: str, eps: float, dtype: torch.dtype, wide: torch.dtype | None,
) -> list[torch.Tensor]:  # fmt: skip
    like: list[torch.Tensor | None] = [x.to(wide or x.dtype), gate] if needs[0] else []
    like += [norm_weight, norm_bias] if needs[1] else []
    like += weights if needs[2] else []
    like += biases if needs[3] else []
    return [torch.empty_like(p, memory_format=torch.contiguous_format) for p in like if p is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, gate, norm_weight, norm_bias, weights, biases = inputs[:6]
    ctx.set_materialize_grads(False)
    narrows = inputs[-1]
    ctx.save_for_backward(output[-1] if narrows else x, gate, norm_weight, norm_bias, output[-2], *weights, *biases)
    ctx.num_weights = len(weights)
    ctx.settings = (*inputs[6:-1], x.dtype if narrows else None)


def _gradients(ctx: Any, grads: Sequence[torch.Tensor | None], asked: Sequence[Any], backward: Callable[..., list[torch.Tensor]]) -> Any:
    """Returns [dx, dgate], [dnorm_weight, dnorm_bias], [dweights], [dbiases], with None where no gradient is needed."""
    x, gate, norm_weight, norm_bias, stats, *parameters = ctx.saved_tensors
    weights, biases = parameters[: ctx.num_weights], parameters[ctx.num_weights :]
    # an unused output has the gradient 0
    kind = {"dtype": ctx.settings[-2], "device": x.device}
    dys = [torch.zeros(*x.shape[:-1], w.shape[0], **kind) if dy is None else dy for dy, w in zip(grads, weights, strict=True)]
    needs = [any(asked[:2]), any(asked[2:4]), any(asked[4]), any(asked[5])]
    found = iter(backward(dys, x, gate, norm_weight, norm_bias, weights, biases, stats, needs, *ctx.settings))
    inputs = ((x, gate), (norm_weight, norm_bias), weights, biases)
    return [[next(found) if need and p is not None else None for p in group] for need, group in zip(needs, inputs, strict=True)]


def _autograd(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    inputs, norm, weights, biases = _gradients(ctx, grads[:-2], ctx.needs_input_grad, norm_linear_backward_op)
    return *inputs, *norm, weights, biases, None, None, None, None, None


class _NormLinear(torch.autograd.Function):
    """The op's forward and backward as a plain autograd function, without the overhead of a custom op."""

    @staticmethod
    def forward(ctx: Any, num_weights: int, settings: tuple[Any, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:
        weights, biases = list(tensors[4 : 4 + num_weights]), list(tensors[4 + num_weights :])
        inputs = (*tensors[:4], weights, biases, *settings)
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return tuple(output[:-2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        asked = ctx.needs_input_grad[2:]
        asked = (*asked[:4], asked[4 : 4 + ctx.num_weights], asked[4 + ctx.num_weights :])
        # if a graph of the backward or a transform is asked for, calls the op, which refuses the second derivative
        backward = norm_linear_backward_op if torch.is_grad_enabled() or is_transformed() else _backward
        inputs, norm, weights, biases = _gradients(ctx, grads, asked, backward)
        return None, None, *inputs, *norm, *weights, *biases


def _no_double_backward(*_: Any) -> Any:
    raise NotImplementedError(
        "norm_linear has no second derivative: its backward keeps no graph. For gradients of gradients call the norm and the linear "
        "layers one by one, or all of it inside torch.func"
    )


def _layers(x: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    """Computes the op's outputs with plain layers, which have every derivative; the outputs saved for the op's own backward are empty.

    Args:
        others: the arguments of ``_forward`` after x.
    """
    gate, norm_weight, norm_bias, weights, biases, *settings, _ = others
    with without_autocast(x):
        ys = fused_norm_linear_torch.layers(x, gate, weights, biases, Recipe(norm_weight, norm_bias, *settings))
    return [*ys, x.new_empty(0), x.new_empty(0)]


norm_linear_op.register_autograd(_autograd, setup_context=_setup_context)
norm_linear_backward_op.register_autograd(_no_double_backward)
on_transforms(norm_linear_op, _layers)
on_tangents(norm_linear_op, _layers)
on_tangents(norm_linear_backward_op, _no_double_backward)


@norm_linear_backward_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    # the gradients of the weights are sums over the whole batch
    return each(norm_linear_backward_op, info.batch_size, in_dims, args)


@register_flop_formula(torch.ops.dilated_attention.norm_linear)
def _forward_flops(x_shape: Any, gate: Any, weight: Any, bias: Any, weight_shapes: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape[:-1]) * sum(math.prod(shape) for shape in weight_shapes)


@register_flop_formula(torch.ops.dilated_attention.norm_linear_backward)
def _backward_flops(
    dys: Any, x_shape: Any, gate: Any, weight: Any, bias: Any, weight_shapes: Any, biases: Any, stats: Any, needs: Any, *_: Any, **__: Any
) -> int:
    """Counts one product for the gradients of the layers' inputs and one for those of their weights."""
    return (any(needs[:2]) + needs[2]) * _forward_flops(x_shape, gate, weight, bias, weight_shapes)
