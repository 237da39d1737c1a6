"""Runs torch's own layers so that a GPU saves little of them for the backward, where the layers are unmodified.

    y_i = W_i · z + b_i,    z = norm(a),    a = x or act(x) or SiLU(gate) ∘ x;    x + path · dropout(y)

Plain layers save x, a, z and, where dtypes differ, copies of them. With the Triton kernels of ``fused_layers_triton.py`` only x (and gate),
which the attention or the previous layer holds anyway, and two float32 numbers per row are saved; the backward recomputes a and z in the
pass that needs them. For a float32 residual stream under autocast the normalised rows are saved in 16 bits instead. Of dropout one seed is
saved instead of a mask. No matrix product is ever computed twice.

Everything else calls plain layers: CPUs, float64, transforms of torch.func, and a layer that was replaced, subclassed, parametrised,
quantised, sharded separately, hooked or moved to another device. The result is the same, but no memory is saved.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

from dilated_attention.backends.hardware import has_kernels
from dilated_attention.engine.ops.prepare import without_autocast
from dilated_attention.engine.ops.transforms import each, is_eager, is_transformed

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swiglu": F.silu}
# without gradients nothing is saved for a backward, and on short sequences fewer passes over memory gain nothing
_WORTH_ROWS = 1024
# the kernels hold a row in registers
_MOST_COLUMNS = 16384
# the dtypes that autocast casts
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# whether to use the kernels; None: where they run
_forced: bool | None = None


@contextlib.contextmanager
def plain_layers(forced: bool | None = False) -> Iterator[None]:
    """Calls every layer as a normal module, for comparisons: equal within rounding, except which elements dropout drops. ``forced=True``
    for the opposite, the kernels on any device: fake tensors of a GPU, Triton's interpreter."""
    global _forced
    before, _forced = _forced, forced
    try:
        yield
    finally:
        _forced = before


def linear_layers(
    x: torch.Tensor,
    linears: Sequence[nn.Module],
    *,
    norm: nn.Module | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Returns [linear(norm(activation(x))) for each of ``linears``]; with ``activation="swiglu"`` the activation is SiLU(gate) ∘ x. The
    kernels compute norm and activation in float32 and round once; separate layers round after each of them."""
    if (norm is None and activation is None) or not _worth(x) or not _fit(x, linears, norm):
        if activation is not None:
            x = ACTIVATIONS[activation](x) if gate is None else ACTIVATIONS[activation](gate) * x
        x = x if norm is None else norm(x)
        return [linear(x) for linear in linears]
    parameters = [_parameter(linear, name) for name in ("weight", "bias") for linear in linears]
    recipe = _recipe(x, linears, norm, activation)
    return list(_NormLinear.apply(recipe, x, gate, _parameter(norm, "weight"), _parameter(norm, "bias"), *parameters))


def _recipe(x: torch.Tensor, linears: Sequence[nn.Module], norm: nn.Module | None, activation: str | None) -> tuple[Any, ...]:
    """Returns (activation, norm, eps, dtype of the products, narrows), as in ``_NormLinear``."""
    kind = "none" if norm is None else "layer" if type(norm) is nn.LayerNorm else "rms"
    eps = 0.0 if norm is None else cast(float, norm.eps)
    dtype = compute_dtype(x, cast(torch.Tensor, _parameter(linears[0], "weight")))
    narrows = activation is None and dtype.itemsize < x.dtype.itemsize and torch.is_grad_enabled()
    return activation or "none", kind, eps, dtype, narrows


def compile_layers(x: torch.Tensor, linears: Sequence[nn.Module], norm: nn.Module | None, activation: str | None = None) -> None:
    """Starts compiling the kernels of ``linear_layers`` and of its backward for a tensor like x on a GPU, which is not read."""
    if (norm is None and activation is None) or not _worth(x) or not _fit(x, linears, norm):
        return
    recipe = activation, kind, _, dtype, narrows = _recipe(x, linears, norm, activation)
    rows = torch.empty((1, x.shape[-1]), dtype=x.dtype, device="meta")
    gate, parameters = rows if activation == "swiglu" else None, (_parameter(norm, "weight"), _parameter(norm, "bias"))
    z, stats, normal = _prepare(rows, gate, *parameters, *recipe)
    if torch.is_grad_enabled():
        _prepare_backward(normal if narrows else rows, gate, *parameters, stats, z, activation, kind, dtype, x.dtype, True, narrows)


def compile_dropped(x: torch.Tensor, y: torch.Tensor, dropout: float, has_path: bool) -> None:
    """Starts compiling the kernels of ``add_dropped`` and of its backward for tensors like these on a GPU, which are not read."""
    if (dropout or has_path) and _takes_kernels(x, y):
        x, y = (torch.empty(one.shape, dtype=one.dtype, device="meta") for one in (x, y))
        seed, path = x.new_empty((), dtype=torch.int64) if dropout else None, x.new_empty(x.shape[0]) if has_path else None
        out = _add_dropped(x, y, seed, path, dropout, torch.promote_types(x.dtype, y.dtype))
        if torch.is_grad_enabled():
            _add_dropped(None, out, seed, path, dropout, y.dtype)


def add_dropped(x: torch.Tensor, y: torch.Tensor, *, dropout: float = 0.0, path: torch.Tensor | None = None) -> torch.Tensor:
    """Computes x + path · dropout(y), the end of a residual branch; x, y: (B, …), of equal shape.

    ``dropout``: p ∈ [0, 1), 0 in evaluation; kept elements are scaled by 1/(1 − p). ``path``: float factors of y, 0 where stochastic depth
    drops the branch: (B,), one per sample, or (B, N), one per row.

    With the kernels, a hash of an element's index and a seed decides whether it is kept. The seed is drawn from the default generator of
    x's device: it is reproducible under ``manual_seed``, repeated by activation checkpointing, and new in each replay of a CUDA graph. The
    mask differs from that of nn.Dropout under the same seed.
    """
    if not dropout and path is None:
        return x + y
    if not _takes_kernels(x, y) or is_transformed():
        y = F.dropout(y, dropout) if dropout else y
        return x + (y if path is None else y * path.to(y.dtype).view(*path.shape, *(1,) * (y.ndim - path.ndim)))
    seed = torch.randint(2**62, (), dtype=torch.int64, device=x.device) if dropout else None
    return _AddDropped.apply(x, y, seed, path, dropout)  # type: ignore[no-any-return]


def _parameter(module: nn.Module | None, name: str) -> torch.Tensor | None:
    return cast("torch.Tensor | None", getattr(module, name, None))


def is_lean(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes (not a subclass) and calling it does no more than its ``forward``."""
    return (
        _forced is not False
        and type(module) in classes
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        and not (torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
    )


def compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a linear layer computes: autocast's if it is on (it leaves float64 alone), else the weight's."""
    if _has_autocast(x) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


def _has_autocast(x: torch.Tensor) -> bool:
    # is_autocast_enabled raises for a device without autocast, such as meta
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _worth(x: torch.Tensor) -> bool:
    # of these transforms the autograd functions have no rules
    return not is_transformed() and (torch.is_grad_enabled() or math.prod(x.shape[:-1]) >= _WORTH_ROWS)


def _fit(x: torch.Tensor, linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
    if not _takes_kernels(x) or x.shape[-1] > _MOST_COLUMNS or not all(is_lean(linear, nn.Linear) for linear in linears):
        return False
    if norm is not None and not is_lean(norm, nn.LayerNorm, nn.RMSNorm):
        return False
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and (norm.eps is None or norm.normalized_shape != x.shape[-1:]):
        return False
    parameters = [_parameter(module, name) for module in (*linears, norm) for name in ("weight", "bias")]
    dtypes = _AUTOCAST_DTYPES if _has_autocast(x) else (x.dtype,)
    return x.dtype in dtypes and all(p is None or _fits(p, x, dtypes) for p in parameters)


def _fits(parameter: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    return type(parameter) in (nn.Parameter, torch.Tensor, FakeTensor) and parameter.dtype in dtypes and parameter.device == x.device


def _takes_kernels(*tensors: torch.Tensor) -> bool:
    """Whether the kernels compute with these tensors: with plain ones, in float32 or less, and where Triton runs."""
    if _forced is False or any(type(x) not in (torch.Tensor, nn.Parameter, FakeTensor) or x.dtype not in _AUTOCAST_DTYPES for x in tensors):
        return False
    return _forced is True or all(x.device.type == "cuda" and _has_kernels(x.device) for x in tensors)


@functools.lru_cache(maxsize=8)
def _runs_triton(device: torch.device) -> bool:
    return has_kernels(torch.empty(0, device=device))


def _has_kernels(device: torch.device) -> bool:
    return _runs_triton(device)


# a constant to torch.compile, which cannot look for packages: see ``functional.arguments.place_in``
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _refuse_second_derivative() -> None:
    # a backward has gradients on with create_graph alone
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "layers on fused kernels have no second derivative: their backward keeps no graph; leave out create_graph=True, or compute the "
            "forward inside fused_layers.plain_layers()"
        )


class _NormLinear(torch.autograd.Function):
    """[W_i · norm(activation(x)) + b_i for each i] of ``recipe`` (activation, norm, eps, dtype of the products, narrows), gate, the norm's
    weight and bias, every W_i and every b_i. ``narrows``: x̂ = (x − mean) / std is saved in that dtype instead of a wider x."""

    @staticmethod
    def forward(ctx: Any, recipe: tuple[Any, ...], x: torch.Tensor, gate: Any, scale: Any, shift: Any, *parameters: Any) -> Any:
        *_, dtype, narrows = ctx.recipe = recipe
        ctx.wide, ctx.parameters = x.dtype, [None if p is None else (p.shape[0], p.dtype) for p in parameters]
        count = len(parameters) // 2
        with without_autocast(x):
            prepare = _prepare if is_eager([x]) else _prepare_op
            z, stats, normal = prepare(_rows(x), None if gate is None else _rows(gate), scale, shift, *recipe)
            weights, biases = parameters[:count], parameters[count:]
            saved: Sequence[torch.Tensor] = weights
            if any(w.dtype is not dtype for w in weights):
                # cast weights are saved for the backward, as autocast saves them; others are not copied, since FSDP frees them in between
                saved = (_joined(weights, dtype),)
                weights = saved[0].split([w.shape[0] for w in weights])
            ys = [F.linear(z, w, None if b is None else b.to(dtype)) for w, b in zip(weights, biases, strict=True)]
        ctx.save_for_backward(normal if narrows else x, gate, scale, shift, stats, *saved)
        # no views: autograd refuses in-place changes of a view of a function's output, and FSDP2's hooks would be lost
        return tuple(torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]]) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        _refuse_second_derivative()
        x, gate, scale, shift, stats, *weights = ctx.saved_tensors
        activation, norm, _, dtype, narrows = ctx.recipe
        count, shape = len(dys), dys[0].shape[:-1]
        kinds = ctx.parameters[:count]
        sizes = [size for size, _ in kinds]
        _, of_x, of_gate, of_scale, of_shift, *of_parameters = ctx.needs_input_grad
        of_weights, of_biases = any(of_parameters[:count]), any(of_parameters[count:])
        with without_autocast(x):
            # one product over all layers sums their contributions to dz in its accumulator
            dy = _joined([_rows(one) for one in dys], dtype, dim=-1)
            dz = dy @ _joined(weights, dtype) if of_x or of_gate or of_scale or of_shift else None
            prepare = _prepare_backward if is_eager([x, *dys]) else _prepare_backward_op
            z, dx, dgate, dnorm = prepare(
                _rows(x), None if gate is None else _rows(gate), scale, shift, stats, dz, activation, norm, dtype, ctx.wide, of_weights,
                narrows,
            )  # fmt: skip
            dx = dz if dz is not None and dz.dtype is ctx.wide else dx
            dweights = _product(dy.t(), z, kinds[0][1]).split(sizes) if of_weights else [None] * count
            del z, dz
            dbiases = dy.sum(0, dtype=stats.dtype).split(sizes) if of_biases else [None] * count
        grads = [
            None if d is None or kind is None else d.to(kind[1]) for d, kind in zip((*dweights, *dbiases), ctx.parameters, strict=True)
        ]
        norms = zip(dnorm, (scale, shift), (of_scale, of_shift), strict=True)
        dscale, dshift = (d.to(p.dtype) if is_needed else None for d, p, is_needed in norms)
        return None, dx.view(*shape, x.shape[-1]) if of_x else None, dgate.view(gate.shape) if of_gate else None, dscale, dshift, *grads


def _joined(tensors: Sequence[torch.Tensor], dtype: torch.dtype, dim: int = 0) -> torch.Tensor:
    """Concatenates tensors in ``dtype``, in one call."""
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    if all(x.dtype is dtype for x in tensors):
        return torch.cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return torch.cat(list(tensors), dim, out=tensors[0].new_empty(shape, dtype=dtype))


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b, on a GPU from the accumulators to float32 without a rounding in between."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype is torch.float32 and a.dtype is not dtype else a @ b


class _AddDropped(torch.autograd.Function):
    """x + path · dropout(y). Its backward is itself without x: linear and diagonal in y."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor | None, path: torch.Tensor | None, dropout: float) -> Any:
        ctx.save_for_backward(seed, path)
        ctx.dropout, ctx.dtypes = dropout, (x.dtype, y.dtype)
        add = _add_dropped if is_eager([x, y]) else _add_dropped_op
        return add(x, y, seed, path, dropout, torch.promote_types(x.dtype, y.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_second_derivative()
        seed, path = ctx.saved_tensors
        add = _add_dropped if is_eager([grad]) else _add_dropped_op
        dy = add(None, grad, seed, path, ctx.dropout, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return grad.to(ctx.dtypes[0]), dy, None, None, None


# the kernels with their results, as ops for what traces, compiles or counts calls; called directly, they take less of the host's time


def _prepare(
    x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None, shift: torch.Tensor | None, activation: str, norm: str,
    eps: float, dtype: torch.dtype, narrows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (z, mean and 1/std of each row (2, M), x̂ or an empty tensor) of rows x (M, K)."""
    # not empty_like, whose meta function imports sympy: what compiles ahead comes here with meta tensors
    z, normal = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape if narrows else (0,), dtype=dtype)
    stats = x.new_empty((0 if norm == "none" else 2, x.shape[0]), dtype=torch.float32)
    if not isinstance(x, FakeTensor):
        from dilated_attention.functional import fused_layers_triton

        fused_layers_triton.prepare(x, gate, scale, shift, activation, norm, eps, z, stats, normal)
    return z, stats, normal


def _prepare_backward(
    x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None, shift: torch.Tensor | None, stats: torch.Tensor,
    dz: torch.Tensor | None, activation: str, norm: str, dtype: torch.dtype, wide: torch.dtype, needs_z: bool, is_normal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (z, dx, dgate, gradients of the norm's weight and bias (2, K)) of rows x (M, K); what is not asked for is empty. Where dz (M,
    K) has dx's dtype ``wide``, dx is empty and written to dz. ``is_normal``: x is x̂."""
    needs_dx, needs_dgate = dz is not None and dz.dtype is not wide, dz is not None and gate is not None
    z = x.new_empty(x.shape if needs_z else (0,), dtype=dtype)
    dx, dgate = x.new_empty(x.shape if needs_dx else (0,), dtype=wide), x.new_empty(x.shape if needs_dgate else (0,))
    if isinstance(x, FakeTensor):
        return z, dx, dgate, stats.new_empty(2, x.shape[1])
    from dilated_attention.functional import fused_layers_triton

    dnorm = fused_layers_triton.prepare_backward(x, gate, scale, shift, stats, dz, activation, norm, is_normal, z, dx, dgate)
    return z, dx, dgate, dnorm


def _add_dropped(
    x: torch.Tensor | None, y: torch.Tensor, seed: torch.Tensor | None, path: torch.Tensor | None, dropout: float, dtype: torch.dtype
) -> torch.Tensor:
    """Returns x (or 0) + path · dropout(y) in ``dtype``."""
    x, y, path = None if x is None else x.contiguous(), y.contiguous(), None if path is None else path.float().contiguous()
    out = y.new_empty(y.shape, dtype=dtype)
    if not isinstance(y, FakeTensor):
        from dilated_attention.functional import fused_layers_triton

        fused_layers_triton.add_dropped(x, y, seed, path, dropout, out)
    return out


def _op(function: Callable[..., Any], *mutates: str) -> Any:
    op = torch.library.custom_op(f"dilated_attention::{function.__name__[1:]}", function, mutates_args=mutates)
    op.register_fake(function)
    # a batch of gradients, as autograd's is_grads_batched passes it
    op.register_vmap(lambda info, in_dims, *args: each(op, info.batch_size, in_dims, args))
    return op


_prepare_op, _prepare_backward_op, _add_dropped_op = _op(_prepare), _op(_prepare_backward, "dz"), _op(_add_dropped)
