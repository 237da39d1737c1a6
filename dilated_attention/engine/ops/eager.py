"""Decides whether a call may run outside the dispatcher: its tensors are plain, and no tracer or compiler needs to see one op.

A custom op of torch.library costs some hundred microseconds of host time for forward and backward, which dominates short calls. This
module decides in one place who needs the op: whatever traces, transforms, counts or profiles calls gets the op, and everything else
gets its implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode
from torch.utils._device import DeviceContext

# subclasses and fake tensors have other types
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided


def is_eager(tensors: Iterable[Any]) -> bool:
    """Whether the implementation may be called on these tensors in place of the op. Pass all tensors of a call, without None.

    It is False, as a constant, inside torch.compile. It is also False for objects that are not tensors, which later checks report.
    """
    if torch.compiler.is_compiling():
        return False
    if _len_torch_dispatch_stack() or is_transformed() or _get_tracing_state() is not None or _profiler_enabled():
        return False
    if _len_torch_function_stack() and not _only_default_device():
        return False
    for x in tensors:
        # wrapped tensors left over from a transform, and tensors with a pending negation, need the dispatcher
        if type(x) not in _PLAIN or x.layout is not _STRIDED or x.is_meta or x.is_nested or is_functorch_wrapped_tensor(x) or x.is_neg():
            return False
    return True


def is_transformed() -> bool:
    """Whether a torch.func transform or forward mode is active. torch.compile treats it as a constant."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def dispatched_alike(x: torch.Tensor | None, plain: torch.Tensor) -> bool:
    """Whether a gradient dispatches like a plain tensor. Only dispatch keys reveal batched gradients, and zeros without storage."""
    return x is None or (type(x) in _PLAIN and torch._C._dispatch_keys(x) == torch._C._dispatch_keys(plain))


def _only_default_device() -> bool:
    """Whether the only active mode is that of ``torch.set_default_device``, which does not affect existing tensors."""
    return _len_torch_function_stack() == 1 and type(_get_current_function_mode()) is DeviceContext
