"""Time and memory of functions that take turns, so that a change of clock rate or load affects all of them equally.

On a GPU a turn is ``triton.testing.do_bench``: CUDA events, with the cache emptied before each call. On a CPU it is a
``torch.utils.benchmark.Timer``. A long call is timed once per turn.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import benchmark

from dilated_attention.bench.measure.skip import settle

# how one call is seen in addition to its median
WAYS = ("called", "host", "kernels", "graph")
# seconds of a call beyond which it is timed once per turn: do_bench calls a function six times before it measures, Timer twice. Within a
# hundredth of that time a GPU's cache is refilled, and its launch latency is negligible
_LONG = {"cuda": 0.005, "cpu": 0.05}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one call in milliseconds: median, 10th and 90th percentile, and the number of turns or calls they are based on."""

    ms: float
    low_ms: float
    high_ms: float
    samples: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """Creates a timing from times in milliseconds."""
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(
            ms=statistics.median(ordered), low_ms=ordered[round(0.1 * last)], high_ms=ordered[round(0.9 * last)], samples=len(ordered)
        )

    @property
    def spread(self) -> float:
        """(90th − 10th percentile) / median."""
        return (self.high_ms - self.low_ms) / self.ms if self.ms else 0.0

    def scaled(self, factor: float) -> Timing:
        return Timing(ms=factor * self.ms, low_ms=factor * self.low_ms, high_ms=factor * self.high_ms, samples=self.samples)

    def values(self) -> dict[str, float]:
        return {"ms": self.ms, "low_ms": self.low_ms, "high_ms": self.high_ms, "samples": self.samples}


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    seconds: float = 0.5,
    least: int = 3,
    most: int = 20,
    warm: bool = False,
    agree: Callable[[float], float] | None = None,
) -> dict[str, Timing]:
    """Times every function in turn, repeatedly, for about ``seconds`` each, and at least ``least`` turns.

    Args:
        functions: results are discarded. Each is called twice before it is timed: the first call may compile.
        device: what they run on.
        most: maximum number of turns.
        warm: whether they were called before; they are then called only once before they are timed.
        agree: returns the first process's number on all processes, where functions exchange data between processes: all processes then
            call them equally often, one by one.
    """
    if not warm:
        for function in functions.values():
            function()

    def turn(function: Callable[[], Any], once: float, share: float) -> list[float]:
        if agree is None:
            return _turn(function, device, once, min(share, 0.1))
        return [1000 * one_call(function, device) for _ in range(max(1, min(100, int(min(share, 0.1) / max(once, 1e-9)))))]

    return _in_turns(functions, device, turn, seconds, least, most, agree or (lambda x: x))


def in_turns(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, *, seconds: float = 0.5, least: int = 3, most: int = 10
) -> dict[str, Timing]:
    """Like ``interleaved``, but by the wall clock, for long work such as a training step: host time counts, and no cache is emptied.

    A sample is a turn: several consecutive calls where they are short, so that the host may run ahead of the device as in normal use.

    Args:
        functions: already called, so that nothing compiles any more; each is called once more before it is timed.
    """

    def turn(function: Callable[[], Any], once: float, share: float) -> list[float]:
        return [loop(function, device, max(1, int(share / max(once, 1e-9))))]

    return _in_turns(functions, device, turn, seconds, least, most, lambda x: x)


def _in_turns(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    turn: Callable[[Callable[[], Any], float, float], list[float]],
    seconds: float,
    least: int,
    most: int,
    agree: Callable[[float], float],
) -> dict[str, Timing]:
    """Calls ``turn`` (function, seconds of a call, seconds of this turn → milliseconds of calls) of each function in turn."""
    once = {name: agree(one_call(function, device)) for name, function in functions.items()}
    turns = max(least, min(most, int(seconds / max([*once.values(), 1e-9]))))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            samples[name] += turn(function, once[name], seconds / turns)
    return {name: Timing.of(times) for name, times in samples.items()}


def one_call(function: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of one call by the wall clock, including waiting for the device."""
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def loop(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Returns the milliseconds of a call in a loop without synchronising."""

    def several() -> None:
        for _ in range(calls):
            function()

    return 1000 * one_call(several, device) / calls


def device_ms(function: Callable[[], Any]) -> float:
    """Returns the milliseconds between two CUDA events around a call that finds the queue empty."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _turn(function: Callable[[], Any], device: torch.device, once: float, seconds: float) -> list[float]:
    """Returns the milliseconds of some calls."""
    if device.type != "cuda":
        if once >= _LONG["cpu"]:
            return [1000 * one_call(function, device)]
        timer = benchmark.Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
        return [1000 * timer.timeit(max(1, int(seconds / max(once, 1e-9)))).median]
    with torch.cuda.device(device):
        if once < _LONG["cuda"]:
            from triton.testing import do_bench

            return list(do_bench(function, warmup=1, rep=max(1, int(1000 * seconds)), return_mode="all"))
        return [device_ms(function)]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_extra(function: Callable[[], Any], device: torch.device) -> int | None:
    """Returns the peak bytes of a call beyond those before it, results included; None without CUDA, where PyTorch does not count them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = function()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def call_figures(function: Callable[[], Any], device: torch.device, *, seconds: float, ways: Sequence[str] = WAYS) -> dict[str, float]:
    """Returns the milliseconds of one call, already warm, as its caller, the device and its kernels see it.

    ``called``: a loop of calls without synchronising, divided by their number · ``host``: until a call that finds the queue empty returns,
    median · ``kernels``: device time of the kernels of one call, and their number ``launches``, by torch.profiler · ``graph``: replayed
    from a CUDA graph. About ``seconds`` each, at least 20 calls where these fit into three times that, 200 at most. A CPU has neither
    kernels nor graphs.
    """
    once = max(one_call(function, device), 1e-6)
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
