"""Launches of a kernel with fixed arguments except tensors.

From the second call on they skip Triton's binding of arguments, which takes most of the host's time. Kernels are compiled ahead in several
threads: most of Triton's compiler runs outside Python's lock, or as another process. The threads start with the first GPU kernel, so a
process that is forked earlier starts its own, and one that is forked later cannot use the GPU and needs none.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dilated_attention.backends.hardware import on_device
from dilated_attention.backends.tiles.table import aligned_bytes, all_aligned

NO_DEVICE = -1
# compiled kernels, or those being compiled, by all that Triton selects them by: a new length finds its kernels here
_compiled: dict[Hashable, Any] = {}
_unfinished: set[Future[Any]] = set()


@functools.cache
def _specialised(kernel: Any) -> tuple[bool, ...]:
    """Returns for each argument of a kernel whether Triton compiles other variants where it is 1 or a multiple of 16."""
    return tuple([not argument.do_not_specialize for argument in kernel.params])


class Scratch(NamedTuple):
    """A part of one allocation: what a launch takes in place of a tensor, since making a view takes longer than a launch.

    Args:
        pointer: address of the part on the device.
        memory: the allocation, uint8; it lives as long as a part of it.
        start: bytes of ``memory`` in front of the part.
        elements: number of elements of ``dtype``.
    """

    pointer: int
    memory: Tensor
    start: int
    elements: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer

    def tensor(self) -> Tensor:
        return self.memory[self.start : self.start + self.elements * self.dtype.itemsize].view(self.dtype)

    def after(self, elements: int) -> Scratch:
        """Returns what follows the first ``elements``."""
        offset = elements * self.dtype.itemsize
        return Scratch(self.pointer + offset, self.memory, self.start + offset, self.elements - elements, self.dtype)


def workspace(device: torch.device, *parts: tuple[int, torch.dtype]) -> list[Scratch]:
    """Returns the scratch memory of one pass, in a single allocation: aligned parts of (elements, dtype)."""
    *starts, num_bytes = itertools.accumulate([aligned_bytes(*part) for part in parts], initial=0)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    address = memory.data_ptr()
    return [Scratch(address + start, memory, start, *part) for start, part in zip(starts, parts, strict=True)]


class KernelLaunch:
    """Launches ``kernel`` with ``programs`` programs; its parameters are tensors, then ``numbers``, then ``constants`` by name.

    At each launch Triton selects the compiled kernel that fits the arguments. Here numbers and constants are the same in every call. Of the
    tensors only dtype and alignment matter, and the caller keeps the dtypes the same. So the first selection stays valid, and later calls
    make the launch with which Triton's JITFunction.run ends.

    Args:
        dtypes: with the constants it determines the tensors' dtypes. Launches that are equal in both use the same compiled kernels,
            whatever their lengths.
    """

    def __init__(
        self, kernel: Any, programs: int | tuple[int, int], numbers: Sequence[float], constants: dict[str, Any], warps: int = 4,
        stages: int = 1, *, dtypes: Hashable,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.programs = programs if isinstance(programs, tuple) else (programs, 1)
        self.numbers, self.constants = tuple(numbers), constants
        self.options, self.dtypes = {"num_warps": warps, "num_stages": stages}, dtypes
        # what the first launch with aligned tensors selected, and its arguments after the tensors
        self._selected: Any = None
        self._after_tensors: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor | Scratch | None], device: int) -> None:
        """Launches the kernel.

        Args:
            tensors: on the current device.
            device: its index. ``NO_DEVICE``, for meta tensors: compiling for the current device starts, and nothing is launched.
        """
        if device == NO_DEVICE:
            self._start(tensors, torch.cuda.current_device())
            return
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        aligned, compiled = all_aligned(pointers), self._selected
        if compiled is None and aligned:
            variant = self._variant(len(pointers), device)
            compiled = _compiled.get(variant)
            if isinstance(compiled, Future):
                # if the compilation has failed, ``result`` raises, and the next launch compiles again
                _compiled.pop(variant, None)
                compiled = _compiled[variant] = compiled.result()
            self._select(compiled, len(pointers))
        if compiled is not None and aligned:
            stream = torch._C._cuda_getCurrentRawStream(device)
            # the arguments of the end of JITFunction.run; None stands for what profilers read, metadata and two hooks
            compiled.run(
                *self.programs, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *self._after_tensors
            )  # fmt: skip
            return
        given: list[Any] = [x.tensor() if isinstance(x, Scratch) else x for x in tensors]
        with on_device(given[0].device):
            compiled = self.kernel[self.programs](*given, *self.numbers, **self.constants, **self.options)
        # Triton's interpreter compiles nothing; with a release of Triton that is not known every launch is bound by it
        if compiled is not None and aligned and knows_triton():
            self._select(compiled, len(pointers))
            _compiled[self._variant(len(pointers), device)] = compiled

    def _start(self, tensors: Sequence[Any], device: int) -> None:
        """Starts compiling the kernel for aligned tensors of these dtypes, unless that is done or under way."""
        variant = self._variant(len(tensors), device)
        if variant is not None and variant not in _compiled and knows_triton():
            arguments = *(None if x is None else x.dtype for x in tensors), *self.numbers
            _compiled[variant] = submit(self.kernel, arguments, self.constants | self.options, device)

    def _select(self, compiled: Any, num_tensors: int) -> None:
        """Keeps the compiled kernel for later launches, unless there is none yet."""
        if compiled is not None:
            names = self.kernel.arg_names[num_tensors + len(self.numbers) :]
            self._after_tensors = (*self.numbers, *(self.constants[name] for name in names))
            self._selected = compiled

    def _variant(self, num_tensors: int, device: int) -> Hashable:
        """Returns all that Triton selects a compiled kernel by, for aligned tensors; None in Triton's interpreter."""
        if not hasattr(self.kernel, "params"):
            return None
        specialised = itertools.compress(self.numbers, _specialised(self.kernel)[num_tensors:])
        # 16 for multiples of it, True for 1, False for other numbers
        kinds = tuple([16 if x % 16 == 0 else x == 1 for x in specialised])
        # numbers beyond 32 bits are compiled in 64
        wide = tuple([i for i, x in enumerate(self.numbers) if x >= 2**31 or x < -(2**31)])
        return self.kernel, device, self.dtypes, tuple(self.constants.items()), *self.options.values(), kinds, wide


def knows_triton() -> bool:
    """Whether compiled kernels of this release of Triton are known, so that they can be compiled ahead and launched directly."""
    return triton.__version__.startswith(("3.6.", "3.7."))


def submit(kernel: Any, arguments: Sequence[Any], options: dict[str, Any], device: int) -> Future[Any]:
    """Starts compiling the kernel that a launch with these arguments, dtypes in place of tensors, will select; returns it as a future."""
    compilation = _pool().submit(_compile, kernel, arguments, options, device)
    _unfinished.add(compilation)
    compilation.add_done_callback(_unfinished.discard)
    return compilation


def finish() -> None:
    """Waits until nothing is being compiled."""
    wait(tuple(_unfinished))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    # what every compilation needs is made once, not by several threads at a time
    driver.active.get_current_device()
    triton_key()
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), "dilated_attention.compile")


def _compile(kernel: Any, arguments: Sequence[Any], options: dict[str, Any], device: int) -> Any:
    from triton.runtime import driver

    with torch.cuda.device(device):
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
        # Triton 3.6 builds a launcher in C at a kernel's first launch, unless it is cached on disk
        driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled
