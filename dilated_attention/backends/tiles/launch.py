"""One kernel with all its arguments but the tensors: from its second call on without Triton's binding of arguments, which costs the host most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# what a compiled kernel assumes of the pointers that it was compiled with
_ALIGNMENT = 16


class Launch:
    """``kernel`` with ``programs`` programs; its signature is tensors, then ``numbers``, then ``constants`` by name.

    Triton decides at each launch which compiled kernel fits the arguments. Numbers and constants are the same here in every call, and of
    tensors only their dtypes, which are the caller's to keep, and their alignment count; so the first choice holds.
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: Sequence[float], constants: dict[str, Any], warps: int = 4, stages: int = 1
    ) -> None:
        self.kernel, self.programs = kernel, programs
        self.numbers, self.constants = tuple(numbers), constants
        self.options = {"num_warps": warps, "num_stages": stages}
        self._again: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        pointers = [x.data_ptr() for x in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = bits % _ALIGNMENT == 0
        if aligned and self._again is not None:
            self._again(*pointers, *self._rest)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants, **self.options)
        # the interpreter compiles nothing
        if aligned and compiled is not None:
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._rest = (*self.numbers, *(self.constants[name] for name in names))
            self._again = compiled[(self.programs, 1, 1)]
