"""Time and memory of functions that take turns, so that a change of clock rate or load affects all of them equally.

On a GPU a turn is ``triton.testing.do_bench``: CUDA events, with the cache emptied before each call. On a CPU it is a loop of calls. A long
call is timed once per turn.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dilated_attention.bench.measure.limits import counted, synchronise

# how one call is seen in addition to its median
WAYS = ("called", "host", "kernels", "graph")
# seconds of a call from which a GPU times it once per turn: do_bench calls a function six times before it measures. Within a hundredth of
# that time the cache is refilled, and the launch latency is negligible
_LONG = 0.005


# figures of one call in milliseconds: "ms", the median, "low_ms" and "high_ms", the 10th and the 90th percentile, and "samples"
Timing = dict[str, float]


def summary(times: Sequence[float]) -> Timing:
    """Returns the figures of turns, or loops, or calls."""
    ordered, last = sorted(times), len(times) - 1
    low, high = (ordered[round(share * last)] for share in (0.1, 0.9))
    return {"ms": statistics.median(ordered), "low_ms": low, "high_ms": high, "samples": len(ordered)}


def interleaved(
    calls: Mapping[str, Callable[[], Callable[[], Any]]], device: torch.device, *, seconds: float = 0.5, least: int = 3, most: int = 20,
    loops: bool = False,
) -> dict[str, Timing]:  # fmt: skip
    """Times every call in turn, repeatedly, for about ``seconds`` each, and at least ``least`` turns.

    Args:
        calls: name → a function that makes the call; made for each turn and dropped after it, so that only one holds memory at a time.
            It must have been made and called before: the first call may compile.
        device: what they run on.
        most: maximum number of turns.
        loops: a turn is a loop of calls by the wall clock, also on a GPU. Host time counts, and no cache is emptied.
    """
    once = {name: max(loop(make(), device) / 1000, 1e-9) for name, make in calls.items()}
    turns = max(least, min(most, int(seconds / max(once.values(), default=1.0))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, make in calls.items():
            if loops or device.type != "cuda":
                times[name].append(loop(make(), device, max(1, int(seconds / turns / once[name]))))
            else:
                times[name] += _device_times(make(), device, once[name], seconds / turns)
    return {name: summary(mine) for name, mine in times.items()}


def in_turns(functions: Mapping[str, Callable[[], Any]], device: torch.device, *, seconds: float, least: int = 3) -> dict[str, Timing]:
    """Times long work such as a training step: the host may run ahead of the device as in normal use."""
    calls = {name: functools.partial(lambda function: function, function) for name, function in functions.items()}
    return interleaved(calls, device, seconds=seconds, least=least, most=10, loops=True)


def _device_times(function: Callable[[], Any], device: torch.device, once: float, seconds: float) -> list[float]:
    with torch.cuda.device(device):
        if once < _LONG:
            from triton.testing import do_bench

            return list(do_bench(function, warmup=1, rep=max(1, int(1000 * min(seconds, 0.1))), return_mode="all"))
        # two events around a call that finds the queue empty
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        end.synchronize()
        return [float(start.elapsed_time(end))]


def loop(function: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Returns the milliseconds of a call in a loop without synchronising, until the device is done with the last call."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronise(device)
    return 1000 * (time.perf_counter() - start) / calls


def peak_extra(function: Callable[[], Any], device: torch.device) -> int | None:
    """Returns the peak bytes of a call beyond those before it, results included; None without CUDA, where PyTorch does not count them."""
    if device.type != "cuda":
        return None
    with counted(device) as peak:
        function()
    return peak.bytes


def call_figures(function: Callable[[], Any], device: torch.device, *, seconds: float, ways: Sequence[str] = WAYS) -> dict[str, float]:
    """Returns the milliseconds of one call, already warm, as its caller, the device and its kernels see it.

    ``called``: a loop of calls without synchronising, divided by their number · ``host``: until a call that finds the queue empty returns,
    median · ``kernels``: device time of the kernels of one call, and their number ``launches``, by torch.profiler · ``graph``: replayed
    from a CUDA graph. About ``seconds`` each, at least 20 calls where these fit into three times that, 200 at most. A CPU has neither
    kernels nor graphs.
    """
    once = max(loop(function, device) / 1000, 1e-6)
    calls = max(3, min(max(20, int(seconds / once)), int(3 * seconds / once), 200))
    found: dict[str, float] = {}
    if "host" in ways:
        hosts = []
        for _ in range(min(calls, 50)):
            synchronise(device)
            begun = time.perf_counter()
            function()
            hosts.append(1000 * (time.perf_counter() - begun))
        found["host"] = statistics.median(hosts)
    if "called" in ways:
        found["called"] = loop(function, device, calls)
    if device.type == "cuda" and "kernels" in ways:
        found["kernels"], found["launches"] = kernel_time(function)
    if device.type == "cuda" and "graph" in ways:
        # what reads a number back, as bounds of documents, cannot be captured
        with contextlib.suppress(RuntimeError):
            found["graph"] = loop(captured(function), device, calls)
    return found


def kernel_time(function: Callable[[], Any]) -> tuple[float, int]:
    """Returns (sum of their ms on the device, number) of the kernels, copies and fills of one call, by torch.profiler."""
    times: list[float] = []
    # the first session of a process can miss what ran while CUPTI was starting
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        times = [event.time_range.elapsed_us() for event in profile.events() if event.device_type == on_gpu]
        if times:
            break
    return sum(times) / 1000, len(times)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the replay of ``step`` as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
