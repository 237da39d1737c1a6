"""Whether a call runs outside the dispatcher: plain tensors, and nothing that has to see the op.

A custom op of torch.library costs some hundred microseconds of the host's time in both directions, which short calls are made of. What it is for
is asked here, in one place: whoever traces, transforms, counts or profiles calls gets the op, and everyone else its implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import _get_current_function_mode
from torch.utils._device import DeviceContext

from dilated_attention.engine.transforms import is_transformed

# subclasses and fake tensors are of other types
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided


def is_eager(tensors: Iterable[Any]) -> bool:
    """Whether the implementation may be called on these tensors in place of the op: all of a call's, without None.

    False, and a constant, inside torch.compile; False for what is no tensor, which is for the checks that follow.
    """
    if torch.compiler.is_compiling():
        return False
    if _len_torch_dispatch_stack() or is_transformed() or _get_tracing_state() is not None or _profiler_enabled():
        return False
    if _len_torch_function_stack() and not _only_default_device():
        return False
    return all(map(_is_plain, tensors))


def dispatched_alike(x: torch.Tensor | None, plain: torch.Tensor) -> bool:
    """Whether a gradient is such a tensor, too: of a batch of them (``is_grads_batched``) or of zeros without memory only the keys tell."""
    return x is None or (type(x) in _PLAIN and torch._C._dispatch_keys(x) == torch._C._dispatch_keys(plain))


def _is_plain(x: Any) -> bool:
    # what a transform left behind, and a tensor whose sign is yet to be applied, are for the dispatcher
    return type(x) in _PLAIN and x.layout is _STRIDED and not (x.is_meta or x.is_nested or is_functorch_wrapped_tensor(x) or x.is_neg())


def _only_default_device() -> bool:
    """``torch.set_default_device`` is a mode, too, which asks nothing of tensors that are there."""
    return _len_torch_function_stack() == 1 and type(_get_current_function_mode()) is DeviceContext
