"""What GPU tests ask of a GPU that other processes may share: its memory, and CUDA graphs."""

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


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a step, and the results that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # which compile and plan
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
