"""What work costs: a training's FLOPs by formula and the share of the device's that it reaches; time and memory, of a GPU what tensors
take, else what the process has in memory."""

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

from dilated_attention.models import LongNetLM

# dense bf16 TFLOP/s that the makers state; another machine is measured
PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "A100": 312.0, "B200": 2250.0}


def flops_per_token(model: LongNetLM, length: int) -> float:
    """Of a training step, without recomputation: 6 for each weight of a matrix product, 12·D for each pair of query and key."""
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    pairs = sum(layer.pattern.pairs(length, config.num_heads, is_causal=config.is_causal) for layer in config.layers)
    return 6 * weights + 12 * config.head_dim * pairs / length


def peak_flops(device: torch.device, stated: float | None) -> tuple[float, str]:
    """(FLOP/s of one device, where the figure is from)."""
    if stated is not None:
        return stated * 1e12, "--peak-tflops"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, tflops in PEAK_TFLOPS.items():
            if known in name:
                return tflops * 1e12, f"{name}, bf16 as stated by its maker"
    # enough to fill it; a CPU core takes a second for the larger ones
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    x = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        (x @ x)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds), f"a product of two {size} x {size} matrices on this machine"


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
