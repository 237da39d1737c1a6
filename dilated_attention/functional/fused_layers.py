"""Runs torch's own layers through the memory-saving ops of ``functional/fused_norm_linear.py`` where the layers are unmodified.

A layer that was replaced, subclassed, parametrised, quantised, sharded separately, hooked or moved to another device is called as a normal
module: the result is the same, but no memory is saved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

from dilated_attention.functional.fused_norm_linear import has_autocast, norm_linear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swiglu": F.silu}
# without gradients nothing is saved for a backward, and on short sequences fewer passes over memory gain nothing
_WORTH_ROWS = 1024
# the dtypes that autocast casts
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_enabled = True


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Calls every layer as a normal module, for comparisons. Results are equal within rounding, except which elements dropout drops."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def linear_layers(
    x: torch.Tensor,
    linears: Sequence[nn.Module],
    *,
    norm: nn.Module | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Returns [linear(norm(activation(x))) for each of ``linears``]; with ``activation="swiglu"`` the activation is SiLU(gate) ∘ x."""
    if (norm is None and activation is None) or not _worth(x) or not _fit(x, linears, norm):
        if activation is not None:
            x = ACTIVATIONS[activation](x) if gate is None else ACTIVATIONS[activation](gate) * x
        x = x if norm is None else norm(x)
        return [linear(x) for linear in linears]
    biases = [_parameter(linear, "bias") for linear in linears]
    return norm_linear(
        x,
        [cast(torch.Tensor, linear.weight) for linear in linears],
        [bias for bias in biases if bias is not None],
        gate=gate,
        norm="none" if norm is None else "layer" if type(norm) is nn.LayerNorm else "rms",
        norm_weight=_parameter(norm, "weight"),
        norm_bias=_parameter(norm, "bias"),
        eps=0.0 if norm is None else cast(float, norm.eps),
        activation=activation or "none",
    )


def _parameter(module: nn.Module | None, name: str) -> torch.Tensor | None:
    return cast("torch.Tensor | None", getattr(module, name, None))


def is_lean(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes (not a subclass) and calling it does no more than its ``forward``."""
    return (
        _enabled
        and type(module) in classes
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        and not (torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
    )


def _worth(x: torch.Tensor) -> bool:
    if torch._C._are_functorch_transforms_active():
        # torch.func transforms only support the plain layers
        return False
    return torch.is_grad_enabled() or (x.device.type == "cuda" and math.prod(x.shape[:-1]) >= _WORTH_ROWS)


def _fit(x: torch.Tensor, linears: Sequence[nn.Module], norm: nn.Module | None) -> bool:
    if type(x) not in (torch.Tensor, FakeTensor) or not all(is_lean(linear, nn.Linear) for linear in linears):
        return False
    if len({linear.bias is None for linear in linears}) > 1:
        return False
    if norm is not None and not is_lean(norm, nn.LayerNorm, nn.RMSNorm):
        return False
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and (norm.eps is None or norm.normalized_shape != x.shape[-1:]):
        return False
    parameters = [_parameter(module, name) for module in (*linears, norm) for name in ("weight", "bias")]
    dtypes = _AUTOCAST_DTYPES if has_autocast(x) else (x.dtype,)
    return x.dtype in dtypes and x.is_floating_point() and all(p is None or _fits(p, x, dtypes) for p in parameters)


def _fits(parameter: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    return type(parameter) in (nn.Parameter, torch.Tensor, FakeTensor) and parameter.dtype in dtypes and parameter.device == x.device
