"""What a function of pairs reads: whether its answer may depend on the batch entry or the head."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch's functions whose results do not depend on the values of their tensor arguments
_VALUE_FREE = {
    getattr(torch.ops.aten, name).default
    for name in ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like")
}
# methods by which a tensor's numbers leave torch
_LEAVING = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr"}


class _RecordsReads(TorchDispatchMode):
    """Records which of a function's arguments are read, directly or through a view: bit i of ``bits`` is set for argument i."""

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()
        self.arguments, self.bits = {x.untyped_storage()._cdata: 1 << i for i, x in enumerate(arguments)}, 0

    def bits_of(self, values: Any) -> int:
        """Returns the bits of the arguments whose memory is among these values."""
        each = (self.arguments.get(x.untyped_storage()._cdata, 0) for x in tree_leaves(values) if isinstance(x, Tensor))
        return functools.reduce(operator.or_, each, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, bits = func(*args, **(kwargs or {})), self.bits_of((args, kwargs))
        # an output in an argument's memory is a view, which reads nothing yet, or what was written into it, which is read with it
        if func not in _VALUE_FREE and (bits := bits & ~self.bits_of(out)):
            # without a tensor as output, a number was taken out of one, and all that follows may depend on it: set all bits
            self.bits |= bits if any(isinstance(x, Tensor) for x in tree_leaves(out)) else -1
        return out


class _RecordsLeaving(TorchFunctionMode):
    """Records in ``reads`` which arguments leave torch, such as for numpy, where nothing sees them read."""

    def __init__(self, reads: _RecordsReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _LEAVING:
            self.reads.bits |= self.reads.bits_of(args)
        return func(*args, **(kwargs or {}))


def reads_of(fn: Callable[..., Tensor], num_heads: int = 1) -> tuple[bool, bool]:
    """Returns whether ``fn(batch, head, query, key)`` reads the batch entry, and whether it reads the head, as seen in a call for one
    pair of ``num_heads`` heads."""
    # a function that holds tensors of a GPU only works there
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        arguments = [torch.zeros(size, dtype=torch.int64, device=device) for size in (1, num_heads, 1, 1)]
        try:
            with _RecordsReads(arguments) as reads, _RecordsLeaving(reads):
                result = fn(*arguments)
            reads.bits |= reads.bits_of(result)
            return bool(reads.bits & 1), bool(reads.bits & 2)
        except Exception:  # noqa: BLE001  whatever a user's function raises
            continue
    # every call failed, so it may read both
    return True, True
