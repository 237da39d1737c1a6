"""What GPU tests ask of the memory of a GPU that other processes may share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import settle

# a CUDA context, beside what torch has reserved
_CONTEXT_BYTES = 2**30


def others_hold() -> int:
    """Bytes of this GPU that other processes have; a GiB of them may be this one's own context."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def is_shared() -> bool:
    return others_hold() > 2 * _CONTEXT_BYTES


def bare() -> int:
    """Gives back all that no tensor holds, cuBLAS's workspaces included, and returns the bytes that tensors hold."""
    settle()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes beyond what was there, of a second run, which has kernels, plans and lists."""
    run()
    # what goes only during the second run would be counted out of it
    before = bare()
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
