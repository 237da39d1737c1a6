"""The memory that a block of code takes."""

from __future__ import annotations

import os

import torch

from dilated_attention.bench.measure.skip import settle
from dilated_attention.profiling import profile_memory

# torch 2.13's profiler, which counts a CPU's bytes, writes two lines to stderr each time it runs
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Peak:
    """Most bytes in tensors in a block of code, beyond those before it.

    By the allocator's counters on a GPU; on a CPU by ``profile_memory``, which makes calls slower.
    """

    bytes: int

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profile = None if device.type == "cuda" else profile_memory(device=device)

    def __enter__(self) -> Peak:
        if self._profile is not None:
            self._profile.__enter__()
        else:
            settle(self.device)
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)
            self.bytes = self._profile.peak_allocated
        else:
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
