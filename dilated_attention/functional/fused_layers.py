"""Computes torch's own layers so that on a GPU little of them is saved for the backward.

    linear_layers:  y_i = W_i · z + b_i,  with z = norm(a) and a = x, act(x) or SiLU(gate) ∘ x
    add_dropped:    x + path · dropout(y)
    fused_block:    both, for a whole transformer block

Separate layers save x, a, z and, where dtypes differ, copies of them. With the Triton kernels of ``fused_layers_triton.py`` only x (and
gate), which others hold anyway, and two float32 numbers per row are saved; the backward recomputes a and z, but no matrix product. For a
float32 residual stream under autocast the normalised rows x̂ are saved in 16 bits instead of x; for dropout a seed instead of a mask.

The layers are called as usual on CPUs, in float64, under transforms of torch.func, and if a layer was replaced, subclassed, parametrised,
quantised, sharded separately, hooked or moved to another device. Then the result is the same, but no memory is saved.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

from dilated_attention.backends.hardware import has_triton
from dilated_attention.engine.ops.prepare import without_autocast
from dilated_attention.engine.ops.resolve import CallInputs
from dilated_attention.engine.ops.transforms import dispatched_alike, each, is_eager, is_transformed

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swiglu": F.silu}
# from this many rows on, kernels are worth it without gradients, where all that they save is passes over memory
_WORTH_ROWS = 1024
# the kernels hold a row in registers
MOST_COLUMNS = 16384
# how many parameters each of a block's four steps has
_COUNTS = (8, 4, 4, 4)
# the dtypes that autocast casts, which are those that the kernels take
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# whether to use the kernels; None: where they run
_forced: bool | None = None


@contextlib.contextmanager
def plain_layers(forced: bool | None = False) -> Iterator[None]:
    """In this context every layer is called as a normal module, for comparisons: results are equal within rounding, except for which
    elements dropout drops. ``forced=True`` is the opposite: kernels on any device, for fake tensors of a GPU or Triton's interpreter."""
    global _forced
    before, _forced = _forced, forced
    try:
        yield
    finally:
        _forced = before


class Step(NamedTuple):
    """Linear layers with the same input, and the activation and the norm before them."""

    linears: tuple[nn.Module, ...]
    norm: nn.Module | None = None
    activation: str | None = None


def linear_layers(
    x: torch.Tensor, linears: Sequence[nn.Module], *, norm: nn.Module | None = None, activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Returns [linear(norm(activation(x))) for each of ``linears``]; with ``activation="swiglu"`` the activation is SiLU(gate) ∘ x. The
    kernels compute norm and activation in float32 and round once; separate layers round after each of them."""
    step = Step(tuple(linears), norm, activation)
    # the autograd functions have no rules for torch.func's transforms
    worth = not is_transformed() and (torch.is_grad_enabled() or math.prod(x.shape[:-1]) >= _WORTH_ROWS)
    if not (worth and step[1:] != (None, None) and takes_kernels(x) and _is_formula(x, step, x.shape[-1])):
        if activation is not None:
            x = ACTIVATIONS[activation](x) if gate is None else ACTIVATIONS[activation](gate) * x
        x = x if norm is None else norm(x)
        return [linear(x) for linear in linears]
    parameters = _parameters(step)
    return list(_NormLinear.apply(_recipe(step, x.dtype, compute_dtype(x, parameters[2])), x, gate, *parameters))


def _recipe(step: Step, input_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns how to compute a step: (activation, norm, eps, dtype of the products, narrows). ``narrows``: x̂ = (x − mean) / std is saved in
    that dtype, which is narrower than x's, instead of x."""
    _, norm, activation = step
    kind = "none" if norm is None else "layer" if type(norm) is nn.LayerNorm else "rms"
    narrows = activation is None and dtype.itemsize < input_dtype.itemsize and torch.is_grad_enabled()
    return activation or "none", kind, 0.0 if norm is None else cast(float, norm.eps), dtype, narrows


def _parameters(step: Step) -> list[Any]:
    """Returns [the norm's weight, its bias, every W_i, every b_i], None for those that do not exist."""
    groups = (step.norm,), step.linears
    return [getattr(module, name, None) for group in groups for name in ("weight", "bias") for module in group]


def fused_block(
    x: torch.Tensor, steps: Sequence[Step], attend: Callable[..., Any], dropout: float, draw_path: Callable[[], Any]
) -> torch.Tensor | None:
    """Computes a block in one autograd function, which takes less of the host's time than its layers do one by one:

        x' = x + path · dropout(step_2(attention(step_1(x)))),    x' + path · dropout(step_4(step_3(x')))

    Returns None without gradients, and if a layer must be called as a module, or torch's dispatcher must see it.

    Args:
        steps: the four steps; the first has the layers of q, k and v, the others have one each.
        attend: takes q, k and v side by side (M, (H + 2 Hk) D), and whether they need a gradient; returns the attention's
            ``ResolvedCall``, its inputs, tensors to save, and a function of gradients, side by side, and of these tensors, which undoes
            what it did to q and k; both in place. ``run_forward(inputs)`` of the call returns (out, …), ``run_backward`` (dq, dk, dv, …).
        dropout, draw_path: of each half, the latter returns ``path``; see ``add_dropped``.
    """
    up, *gates = steps[2].linears
    # columns of each step's input
    widths = *x.shape[-1:] * 3, getattr(up, "out_features", 0)
    if gates or not (torch.is_grad_enabled() and is_eager([x]) and takes_kernels(x) and all(map(_is_formula, [x] * 4, steps, widths))):
        return None
    parameters = [parameter for step in steps for parameter in _parameters(step)]
    # the biases of q, k and v: their products are one, with a bias or without
    if len({bias is None for bias in parameters[5:8]}) > 1:
        return None
    dtype = compute_dtype(x, parameters[2])
    input_dtypes = x.dtype, dtype, torch.promote_types(x.dtype, dtype), dtype
    recipes = [_recipe(step, input_dtype, dtype) for step, input_dtype in zip(steps, input_dtypes, strict=True)]
    return _Block.apply(recipes, attend, dropout, draw_path, x, *parameters)  # type: ignore[no-any-return]


def compile_block(x: torch.Tensor, steps: Sequence[Step], dropout: float, has_path: bool) -> None:
    """Starts compiling a block's kernels, but the attention's: launches on meta tensors compile and compute nothing. x is not read."""
    if not takes_kernels(x):
        return
    low, trains = compute_dtype(x, x), torch.is_grad_enabled()
    for step, wide in zip(steps, (x.dtype, low) * 2, strict=True):
        if _is_formula(x, step, getattr(step.linears[0], "in_features", 0)):
            recipe = activation, kind, _, dtype, narrows = _recipe(step, wide, low)
            scale, shift, weight, *_ = _parameters(step)
            rows = torch.empty((1, weight.shape[1]), dtype=wide, device="meta")
            gate = rows if activation == "swiglu" else None
            z, stats, normal = _prepare(rows, gate, scale, shift, *recipe)
            if trains:
                saved = normal if narrows else rows
                _prepare_backward(saved, gate, scale, shift, stats, z, activation, kind, dtype, wide, True, narrows)
    if dropout or has_path:
        x, y = (torch.empty(x.shape, dtype=dtype, device="meta") for dtype in (x.dtype, low))
        seed, path = x.new_empty((), dtype=torch.int64) if dropout else None, x.new_empty(x.shape[0]) if has_path else None
        out = _add_dropped(x, y, seed, path, dropout, torch.promote_types(x.dtype, low))
        if trains:
            _add_dropped(None, out, seed, path, dropout, low)


def add_dropped(x: torch.Tensor, y: torch.Tensor, *, dropout: float = 0.0, path: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x + path · dropout(y), the end of a residual branch; x, y: (B, …), of equal shape.

    ``dropout``: p ∈ [0, 1), 0 in evaluation; kept elements are scaled by 1/(1 − p). ``path``: factors of y, (B,) for samples or (B, N) for
    rows; 0 where stochastic depth drops the branch.

    With the kernels, a hash of an element's index and a seed decides whether it is kept. The seed is drawn from the default generator of
    x's device: it is reproducible under ``manual_seed``, repeated by activation checkpointing, and new in each replay of a CUDA graph. The
    mask differs from that of nn.Dropout under the same seed.
    """
    if not dropout and path is None:
        return x + y
    if not takes_kernels(x, y) or is_transformed():
        y = F.dropout(y, dropout) if dropout else y
        return x + (y if path is None else y * path.to(y.dtype).view(*path.shape, *(1,) * (y.ndim - path.ndim)))
    return _AddDropped.apply(x, y, _draw_seed(x, dropout), path, dropout)  # type: ignore[no-any-return]


def _draw_seed(x: torch.Tensor, dropout: float) -> torch.Tensor | None:
    return torch.randint(2**62, (), dtype=torch.int64, device=x.device) if dropout else None


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


def _is_formula(x: torch.Tensor, step: Step, K: int) -> bool:
    """Whether calling the step's layers would do no more than compute their formula, on K columns, in a dtype that the kernels take."""
    linears, norm, _ = step
    if K > MOST_COLUMNS or not all([is_lean(linear, nn.Linear) for linear in linears]):  # noqa: C419 - a generator takes longer
        return False
    if norm is not None and not (is_lean(norm, nn.LayerNorm, nn.RMSNorm) and norm.eps is not None and norm.normalized_shape == (K,)):
        return False
    dtypes = _AUTOCAST_DTYPES if _has_autocast(x) else (x.dtype,)
    return x.dtype in dtypes and all([p is None or _is_plain(p, x, dtypes) for p in _parameters(step)])  # noqa: C419


def _is_plain(parameter: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    return type(parameter) in (nn.Parameter, torch.Tensor, FakeTensor) and parameter.dtype in dtypes and parameter.device == x.device


def takes_kernels(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can compute with these tensors: plain ones, in float32, bfloat16 or float16, where Triton runs."""
    if _forced is False or any(type(x) not in (torch.Tensor, nn.Parameter, FakeTensor) or x.dtype not in _AUTOCAST_DTYPES for x in tensors):
        return False
    return _forced is True or all(x.device.type == "cuda" and _has_kernels(x.device) for x in tensors)


def _has_kernels(device: torch.device) -> bool:
    return has_triton(device)


# a constant to torch.compile, which cannot look for packages; see ``functional.arguments.place_in``
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _refuse_second_derivative() -> None:
    # gradients are enabled in a backward only with create_graph=True
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "layers on fused kernels have no second derivative: their backward keeps no graph; leave out create_graph=True, or compute the "
            "forward inside fused_layers.plain_layers()"
        )


def _step_input(recipe: Any, x: torch.Tensor, gate: Any, scale: Any, shift: Any, eager: bool) -> Any:
    """Returns z, the input of a step's linear layers, and what to save: x or x̂, gate, the norm's weight and bias, (mean, 1/std)."""
    prepare = _prepare if eager else _prepare_op
    z, stats, normal = prepare(_rows(x), None if gate is None else _rows(gate), scale, shift, *recipe)
    return z, (normal if recipe[-1] else x, gate, scale, shift, stats)


def _linear_backward(recipe: Any, saved: Any, parameters: Any, dy: torch.Tensor, needs_x: bool, needs: Any, eager: bool) -> Any:
    """Returns the gradients of rows x (M, K), of gate, and of each parameter of a step.

    Args:
        saved: what ``_step_input`` returns to save, and the weights.
        dy: the gradients of all outputs, side by side: one product sums their contributions to dz in its accumulator.
        needs_x, needs: whether the gradients of x or gate, and of each parameter, are needed.
    """
    x, gate, scale, shift, stats, *weights = saved
    activation, norm, _, dtype, narrows = recipe
    count = len(parameters) // 2 - 1
    sizes = [w.shape[0] for w in parameters[2 : 2 + count]]
    dz = dy @ _concatenated([weights], dtype)[0] if needs_x or any(needs[:2]) else None
    prepare = _prepare_backward if eager else _prepare_backward_op
    wide, needs_z = torch.float32 if narrows else x.dtype, any(needs[2 : 2 + count])
    z, dx, dgate, dnorm = prepare(
        _rows(x), None if gate is None else _rows(gate), scale, shift, stats, dz, activation, norm, dtype, wide, needs_z, narrows
    )
    # with dz in this dtype, dx was written to it
    dx = dz if dz is not None and dz.dtype is wide else dx
    dweights = _split(_product(dy.t(), z, parameters[2].dtype), sizes) if needs_z else [None] * count
    del z, dz
    dbiases = _split(dy.sum(0, dtype=torch.float32), sizes) if any(needs[2 + count :]) else [None] * count
    grads = zip((*dnorm, *dweights, *dbiases), parameters, strict=True)
    return dx, dgate, *[None if d is None or p is None else d.to(p.dtype) for d, p in grads]


class _NormLinear(torch.autograd.Function):
    """[W_i · norm(activation(x)) + b_i for each i]. ``recipe``: see ``_recipe``; ``parameters``: see ``_parameters``."""

    @staticmethod
    def forward(ctx: Any, recipe: Any, x: torch.Tensor, gate: Any, *parameters: Any) -> Any:
        ctx.recipe, ctx.parameters = recipe, parameters
        # the weights are parameters[2:middle], then come the biases
        middle, dtype = len(parameters) // 2 + 1, recipe[3]
        with without_autocast(x):
            z, saved = _step_input(recipe, x, gate, parameters[0], parameters[1], is_eager([x]))
            weights: Any = parameters[2:middle]
            kept = weights
            if any(w.dtype is not dtype for w in weights):
                # cast weights are saved for the backward, as autocast saves them; others are not copied, since FSDP frees them in between
                kept = _concatenated([weights], dtype)
                weights = _split(kept[0], [w.shape[0] for w in weights])
            ys = [F.linear(z, w, None if b is None else b.to(dtype)) for w, b in zip(weights, parameters[middle:], strict=True)]
        ctx.save_for_backward(*saved, *kept)
        # no views: autograd refuses in-place changes of a view of a function's output, and FSDP2's hooks would be lost
        return tuple(torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]]) for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        _refuse_second_derivative()
        x, gate, *_ = saved = ctx.saved_tensors
        _, needs_x, needs_gate, *needs = ctx.needs_input_grad
        with without_autocast(x):
            dy = torch.cat([_rows(dy) for dy in dys], -1) if len(dys) > 1 else _rows(dys[0])
            dx, dgate, *grads = _linear_backward(ctx.recipe, saved, ctx.parameters, dy, needs_x or needs_gate, needs, is_eager([x, *dys]))
        shape = dys[0].shape[:-1]
        return None, dx.view(*shape, x.shape[-1]) if needs_x else None, dgate.view(gate.shape) if needs_gate else None, *grads


class _Block(torch.autograd.Function):
    """See ``fused_block``; the parameters are those of ``_parameters``, step by step."""

    @staticmethod
    def forward(ctx: Any, recipes: Any, attend: Any, dropout: float, draw_path: Any, x: torch.Tensor, *parameters: Any) -> torch.Tensor:
        ctx.recipes, ctx.dropout, ctx.parameters = recipes, dropout, _grouped(parameters, _COUNTS)
        dtype = recipes[0][3]
        saved: list[Any] = []
        draws: list[Any] = []
        # of each step: (all weights, all biases)
        groups = [_grouped(step[2:], [len(step) // 2 - 1] * 2) for step in ctx.parameters]
        with without_autocast(x):
            joined = _concatenated([*itertools.chain(*groups)], dtype)

            def linear(i: int, a: torch.Tensor) -> torch.Tensor:
                scale, shift, *_ = ctx.parameters[i]
                z, kept = _step_input(recipes[i], a, None, scale, shift, True)
                weights, weight = groups[i][0], joined[2 * i]
                saved.append((*kept, *(weights if weights[0].dtype is dtype else (weight,))))
                return F.linear(z, weight, joined[2 * i + 1])

            def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                draws.append((path := draw_path(), seed := _draw_seed(x, dropout)))
                return _summed(x, y, path, seed, dropout, torch.promote_types(x.dtype, dtype), True)

            call, inputs, tables, ctx.undo = attend(linear(0, rows := _rows(x)), any(ctx.needs_input_grad[: 5 + _COUNTS[0]]))
            outputs = call.run_forward(inputs)
            rows = add(rows, linear(1, outputs[0].view(rows.shape)))
            out = add(rows.view(x.shape), linear(3, linear(2, rows)).view(x.shape))
        saved += inputs, outputs, tables, *draws
        ctx.save_for_backward(*itertools.chain(*saved))
        ctx.call, ctx.lengths = call, [len(part) for part in saved]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_second_derivative()
        *steps, inputs, outputs, tables, draw, last_draw = _grouped(ctx.saved_tensors, ctx.lengths)
        needs_x, needs = ctx.needs_input_grad[4], _grouped(ctx.needs_input_grad[5:], _COUNTS)
        # whether the gradient of each step's input is needed
        needed = list(itertools.accumulate(map(any, needs[:3]), operator.or_, initial=needs_x))
        eager = is_eager([grad, inputs[0]]) and dispatched_alike(grad, inputs[0])
        grads: list[Any] = [[None] * count for count in _COUNTS]

        def linear(i: int, dy: torch.Tensor) -> torch.Tensor:
            dx, _, *grads[i] = _linear_backward(ctx.recipes[i], steps[i], ctx.parameters[i], dy, needed[i], needs[i], eager)
            return dx

        def dropped(dy: torch.Tensor, path: Any, seed: Any) -> torch.Tensor:
            return _summed(None, dy, path, seed, ctx.dropout, ctx.recipes[0][3], eager)

        dx = _rows(grad)
        with without_autocast(grad):
            dy = linear(3, dropped(dx, *last_draw))
            if needed[3]:
                dy = linear(2, dy)
            if needed[2]:
                # the gradient of x', the sum in the middle
                dx = dy.add_(dx)
                dy = linear(1, dropped(dx, *draw))
            if needed[1]:
                run = ctx.call.run_backward if eager else ctx.call.backward_op
                dqkv = run(dy.view(outputs[0].shape), None, CallInputs(*inputs), outputs)[:3]
                dy = torch.cat([x.flatten(2) for x in dqkv], -1).flatten(0, 1)
                del dqkv
                ctx.undo(dy, tables)
                dy = linear(0, dy)
        return None, None, None, None, dy.add_(dx).view(grad.shape) if needs_x else None, *itertools.chain(*grads)


def _grouped(flat: Any, lengths: Any) -> list[Any]:
    values = iter(flat)
    return [tuple(itertools.islice(values, length)) for length in lengths]


def _split(x: torch.Tensor, sizes: list[int]) -> Any:
    return (x,) if len(sizes) == 1 else x.split_with_sizes(sizes)


def _concatenated(groups: Any, dtype: torch.dtype) -> list[Any]:
    """Returns each group's tensors, concatenated along their rows, in ``dtype``; None for a group of None. All are cast in one call."""
    results: list[Any] = []
    sources: list[Any] = []
    targets: list[Any] = []
    for group in groups:
        one = group[0]
        if one is not None and any([x.dtype is not dtype for x in group]):  # noqa: C419
            sizes = [x.shape[0] for x in group]
            one = one.new_empty((sum(sizes), *one.shape[1:]), dtype=dtype)
            targets += _split(one, sizes)
            sources += group
        elif len(group) > 1 and one is not None:
            one = torch.cat(list(group))
        results.append(one)
    if sources:
        torch._foreach_copy_(targets, sources)
    return results


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a @ b; on a GPU a float32 result comes from the accumulators, without a rounding to a's dtype."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype is torch.float32 and a.dtype is not dtype else a @ b


class _AddDropped(torch.autograd.Function):
    """x + path · dropout(y). Its backward is itself without x: linear and diagonal in y."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor | None, path: torch.Tensor | None, dropout: float) -> Any:
        ctx.save_for_backward(seed, path)
        ctx.dropout, ctx.dtypes = dropout, (x.dtype, y.dtype)
        return _summed(x, y, path, seed, dropout, torch.promote_types(x.dtype, y.dtype), is_eager([x, y]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_second_derivative()
        seed, path = ctx.saved_tensors
        dy = _summed(None, grad, path, seed, ctx.dropout, ctx.dtypes[1], is_eager([grad])) if ctx.needs_input_grad[1] else None
        return grad.to(ctx.dtypes[0]), dy, None, None, None


def _summed(x: torch.Tensor | None, y: torch.Tensor, path: Any, seed: Any, dropout: float, dtype: torch.dtype, eager: bool) -> torch.Tensor:
    """Returns x (or 0) + path · dropout(y) in ``dtype``, by a kernel unless it is a mere sum."""
    if seed is None and path is None:
        return y.to(dtype) if x is None else x + y
    return (_add_dropped if eager else _add_dropped_op)(x, y, seed, path, dropout, dtype)  # type: ignore[no-any-return]


# allocate results and launch kernels: directly, which takes less host time, or as ops for what traces, compiles or counts calls


def _prepare(
    x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None, shift: torch.Tensor | None, activation: str, norm: str,
    eps: float, dtype: torch.dtype, narrows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (z, mean and 1/std of each row (2, M), x̂ or an empty tensor) of rows x (M, K)."""
    # not empty_like, whose meta function imports sympy: what compiles ahead comes here with meta tensors
    z, normal = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape if narrows else (0,), dtype=dtype)
    stats = x.new_empty((0 if norm == "none" else 2, x.shape[0]), dtype=torch.float32)
    if x.numel() and not isinstance(x, FakeTensor):
        from dilated_attention.functional import fused_layers_triton as kernels

        tensors = x, gate, scale, shift, z, normal, stats
        kernels.run(kernels.launch_of(kernels.rows_launch, tensors, *x.shape, activation, norm, narrows, True, eps), *tensors)
    return z, stats, normal


def _prepare_backward(
    x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None, shift: torch.Tensor | None, stats: torch.Tensor,
    dz: torch.Tensor | None, activation: str, norm: str, dtype: torch.dtype, wide: torch.dtype, needs_z: bool, is_normal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (z, dx, dgate, gradients of the norm's weight and bias (2, K)) of rows x (M, K); what is not needed is empty. If dz (M, K)
    has dx's dtype ``wide``, dx is written to dz, and the dx returned is empty. ``is_normal``: x is x̂."""
    needs_dx, needs_dgate = dz is not None and dz.dtype is not wide, dz is not None and gate is not None
    z = x.new_empty(x.shape if needs_z else (0,), dtype=dtype)
    dx, dgate = x.new_empty(x.shape if needs_dx else (0,), dtype=wide), x.new_empty(x.shape if needs_dgate else (0,))
    if isinstance(x, FakeTensor) or not x.numel():
        return z, dx, dgate, stats.new_zeros(2, x.shape[1])
    from dilated_attention.functional import fused_layers_triton as kernels

    tensors = x, gate, scale, shift, stats, dz, z, dx if needs_dx else dz, dgate
    launch = kernels.launch_of(kernels.rows_launch, tensors, *x.shape, activation, norm, is_normal, needs_z, None)
    kernels.run(launch, *tensors, shares := stats.new_empty(launch.programs[0], 2, x.shape[1]))
    # the sum of a meta tensor, like its empty_like, would import sympy
    return z, dx, dgate, shares[0] if x.is_meta else shares.sum(0)


def _add_dropped(
    x: torch.Tensor | None, y: torch.Tensor, seed: torch.Tensor | None, path: torch.Tensor | None, dropout: float, dtype: torch.dtype
) -> torch.Tensor:
    """Returns x (or 0) + path · dropout(y) in ``dtype``."""
    x, y, path = None if x is None else x.contiguous(), y.contiguous(), None if path is None else path.float().contiguous()
    out = y.new_empty(y.shape, dtype=dtype)
    if y.numel() and not isinstance(y, FakeTensor):
        from dilated_attention.functional import fused_layers_triton as kernels

        tensors, samples = (y, x, seed, path, out), 1 if path is None else path.numel()
        kernels.run(kernels.launch_of(kernels.dropped_launch, tensors, y.numel(), samples, dropout), *tensors)
    return out


def _op(function: Callable[..., Any], *mutates: str) -> Any:
    op = torch.library.custom_op(f"dilated_attention::{function.__name__[1:]}", function, mutates_args=mutates)
    op.register_fake(function)
    # for batches of gradients under torch.func.vmap; is_grads_batched knows no such rules and fails in the backward of these layers
    op.register_vmap(lambda info, in_dims, *args: each(op, info.batch_size, in_dims, args))
    return op


_prepare_op, _prepare_backward_op, _add_dropped_op = _op(_prepare), _op(_prepare_backward, "dz"), _op(_add_dropped)
