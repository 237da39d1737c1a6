"""Time and memory of a piece of work: of a GPU what tensors take, else what the process has in memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Measured(NamedTuple):
    """What work returned, its seconds, bytes before it and at its peak; NaN where nobody counts them."""

    result: Any
    seconds: float
    before: float
    peak: float


def measured(work: Callable[[], Any], device: torch.device | str) -> Measured:
    device = torch.device(device)
    before = forget_peak(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Measured(result, time.perf_counter() - start, before, peak_memory(device))


def forget_peak(device: torch.device) -> float:
    """Bytes now, from which the peak is counted anew where that can be done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    # what was freed goes back to the system, and Linux forgets a process's peak when it is told so
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def peak_memory(device: torch.device) -> float:
    """Bytes at the peak since ``forget_peak``, or since the process began."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # not getrusage on Linux: its peak counts the process that started this one, if that was larger, and is never forgotten
    if sys.platform == "darwin":
        import resource

        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return _resident("VmHWM")


def _resident(line: str) -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((float(x.split()[1]) * 1024 for x in lines if x.startswith(line)), math.nan)
