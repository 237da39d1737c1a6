"""Defines what an op does under ``torch.func`` transforms and with forward-mode tangents, which torch.library does not cover.

Both are handled in the dispatcher, so they apply however an op is reached: from a public function, inside a compiled graph, or directly.

``is_eager`` decides whether a call may run outside the dispatcher: its tensors are plain, and no tracer or compiler needs to see one op.

A custom op of torch.library costs some hundred microseconds of host time for forward and backward, which dominates short calls.
Whatever traces, transforms, counts or profiles calls gets the op, and everything else gets its implementation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import TransformType, get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from dilated_attention.engine.ops.settings import with_needs_grad

# subclasses and fake tensors have other types
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided


def is_eager(tensors: Iterable[Any]) -> bool:
    """Whether the implementation may be called on these tensors in place of the op. Pass all tensors of a call, without None.

    It is False, as a constant, inside torch.compile. It is also False for objects that are not tensors, which later checks report.
    """
    if torch.compiler.is_compiling():
        return False
    if _len_torch_dispatch_stack() or is_transformed() or _get_tracing_state() is not None or _profiler_enabled():
        return False
    # the mode of torch.set_default_device alone does not affect existing tensors
    if (modes := _len_torch_function_stack()) and (modes > 1 or type(_get_current_function_mode()) is not DeviceContext):
        return False
    for x in tensors:
        # wrapped tensors left over from a transform, and tensors with a pending negation, need the dispatcher
        if type(x) not in _PLAIN or x.layout is not _STRIDED or x.is_meta or x.is_nested or is_functorch_wrapped_tensor(x) or x.is_neg():
            return False
    return True


def is_transformed() -> bool:
    """Whether a torch.func transform or forward mode is active. torch.compile treats it as a constant."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def dispatched_alike(x: Tensor | None, plain: Tensor) -> bool:
    """Whether a gradient dispatches like a plain tensor. Only dispatch keys reveal batched gradients, and zeros without storage."""
    return x is None or (type(x) in _PLAIN and torch._C._dispatch_keys(x) == torch._C._dispatch_keys(plain))


_library = torch.library.Library("dilated_attention", "FRAGMENT")
_FRONT = "FuncTorchDynamicLayerFrontMode"


def on_transforms(op: Any, transformed: Callable[..., Any]) -> None:
    """Calls ``transformed`` in place of a custom op, with its arguments, under any transform of torch.func.

    ``functionalize`` is the exception: it calls the op unchanged.
    """
    schema = op._opoverload._schema
    settings = [argument.name for argument in schema.arguments].index("settings")
    unchanged = torch._C._dispatch_get_computed_kernel_for_dispatch_key(schema.name, _FRONT)

    def front(keyset: Any, *args: Any) -> Any:
        if peek_interpreter_stack().key() == TransformType.Functionalize:
            return unchanged.call_boxed(keyset, *args)
        # the caller cannot see whether a transform around a vmap needs gradients
        if torch.is_grad_enabled() and any(x.requires_grad for x in _seen_by_each_transform(args)):
            args = (*args[:settings], with_needs_grad(args[settings]), *args[settings + 1 :])
        return transformed(*args)

    _library.impl(op._name, front, _FRONT, with_keyset=True)


def on_tangents(op: Any, with_tangents: Callable[..., Any]) -> None:
    """Calls ``with_tangents`` in place of a custom op if an argument has a tangent of ``torch.autograd.forward_ad``."""
    reverse_mode = make_autograd_impl(op._opoverload, op)

    def autograd(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, _tensors(args))):
            return with_tangents(*args)
        return reverse_mode(keyset, *args)

    with warnings.catch_warnings():
        # the override is intended: the kernel that torch.library registered is called above
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        _library.impl(op._name, autograd, "Autograd", with_keyset=True, allow_override=True)


def folded(call: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """A vmap rule that folds the mapped dimension into the batch, the first dimension of every tensor with two or more dimensions."""
    first = [length for i, length in enumerate(args[0].shape) if i != in_dims[0]]

    def fold(x: Any, dim: int | None) -> Any:
        # tensors with fewer dimensions are the same for the whole batch
        if not isinstance(x, Tensor) or (dim is None and x.ndim < 2):
            return x
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    outputs = call(*map(fold, args, in_dims))
    split = tuple(x.unflatten(0, (size, first[0])) if x.ndim > 1 else x for x in outputs)
    return split, tuple(0 if x.ndim > 1 else None for x in outputs)


def each(call: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """A vmap rule that makes one call for each index of the mapped dimension."""
    if not size:
        raise NotImplementedError("torch.func.vmap maps over a dimension of size 0, and this call runs once for each entry of it")
    (flat, spec), dims = pytree.tree_flatten(list(args)), pytree.tree_leaves(list(in_dims))
    calls = [
        call(*pytree.tree_unflatten([x if dim is None else x.select(dim, i) for x, dim in zip(flat, dims, strict=True)], spec))
        for i in range(size)
    ]
    stacked = pytree.tree_map(lambda *parts: torch.stack(parts), *calls)
    return stacked, pytree.tree_map(lambda _: 0, stacked)


def refuse_transforms(name: str, way_out: str, *tensors: Any) -> None:
    """Raises an error where a missing derivative of ``name`` would count as 0, or where vmap hides the batch dimension.

    Raises:
        NotImplementedError: a tensor is mapped, carries a tangent, or is differentiated by a transform of torch.func.
    """
    if not is_transformed():
        return
    for x in _tensors(tensors):
        if _has_tangent(x):
            raise NotImplementedError(f"{name} has no derivative, and got a tangent of forward mode; {way_out}")
        if not is_functorch_wrapped_tensor(x):
            continue
        if any(map(is_batchedtensor, _seen_by_each_transform([x]))):
            raise NotImplementedError(f"{name} has no rule for torch.func.vmap; {way_out}")
        if any(inner.requires_grad or _has_tangent(inner) for inner in _seen_by_each_transform([x])):
            raise NotImplementedError(f"{name} has no derivative, and torch.func asks for one; {way_out}")


def _tensors(args: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]


def _seen_by_each_transform(args: Any) -> Iterable[Tensor]:
    for x in _tensors(args):
        yield x
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
            yield x


def _has_tangent(x: Tensor) -> bool:
    return x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None
