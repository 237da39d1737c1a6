"""Compiles kernels in threads, side by side: most of Triton's compiler runs outside Python's lock, or as another process.

There are no threads before the first GPU kernel. So a forked process, which cannot use the GPU of its parent, needs none of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import triton
from triton.runtime.jit import MockTensor

_unfinished: set[Future[Any]] = set()


def knows_triton() -> bool:
    """Whether compiled kernels of this release of Triton are known, so that they can be compiled ahead and launched directly."""
    return triton.__version__.startswith(("3.6.", "3.7."))


def stand_in(x: Any) -> Any:
    """Returns what stands in for a tensor of a dtype within a tuple of arguments; anything else as it is."""
    return MockTensor.wrap_dtype(x)


def submit(kernel: Any, arguments: Sequence[Any], options: dict[str, Any], device: int) -> Future[Any]:
    """Returns the kernel that a launch with these arguments, dtypes in place of tensors, will select."""
    compilation = _pool().submit(_compile, kernel, arguments, options, device)
    _unfinished.add(compilation)
    compilation.add_done_callback(_unfinished.discard)
    return compilation


def finish() -> None:
    """Waits for all that is being compiled."""
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
