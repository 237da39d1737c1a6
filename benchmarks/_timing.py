"""Timing on a GPU: events, several inputs, competitors turn by turn, median and spread; one call seen from its caller, the GPU and its
kernels; and the dates and versions of a result."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dilated_attention import DilatedPattern
from dilated_attention.engine.reference_rows import sampled_gradients, sampled_rows


def interleaved(
    functions: dict[str, Callable[[], Any]], *, warmup: int = 2, seconds: float = 0.6, most: int = 50
) -> dict[str, tuple[float, float]]:
    """{name: (median ms, spread)}: each function in its turn, again and again; spread is (90th − 10th percentile) / median."""
    for function in functions.values():
        for _ in range(warmup):
            function()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for function in functions.values():
        function()
    end.record()
    end.synchronize()
    rounds = max(5, min(most, int(1000 * seconds / max(start.elapsed_time(end), 1e-3))))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    result = {}
    for name, pairs in events.items():
        times = sorted(a.elapsed_time(b) for a, b in pairs)
        median = statistics.median(times)
        result[name] = (median, (times[int(0.9 * (len(times) - 1))] - times[int(0.1 * (len(times) - 1))]) / median)
    return result


def sustained(functions: dict[str, Callable[[], Any]], *, turn: float = 0.15, turns: int = 3) -> dict[str, tuple[float, float]]:
    """{name: (median ms of a call, spread)}: each function runs alone for ``turn`` seconds, in turns; the second half of each counts.

    For functions of very different length and power: called one after another, a short one runs at the clock that a long one's heat has
    left, and a long one at that which others have let recover. Here each has its own. Calls are queued ahead, so Python's time counts only
    where it is longer than the GPU's.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
        function()
    for _ in range(turns):
        for name, function in functions.items():
            start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            start.record()
            function()
            middle.record()
            middle.synchronize()
            calls = max(1, min(400, int(500 * turn / max(start.elapsed_time(middle), 1e-3))))
            for _ in range(calls):
                function()
            middle.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            found[name].append(middle.elapsed_time(end) / calls)
    return {name: (statistics.median(times), (max(times) - min(times)) / statistics.median(times)) for name, times in found.items()}


def call_figures(function: Callable[[], Any], device: str, *, seconds: float, kernels: bool = True) -> dict[str, float]:
    """One call, seen four ways, in milliseconds. On a CPU, for smoke runs, there are neither events nor kernels.

    ``called``: a loop of calls without synchronising, divided by their number · ``single``: events around one call, the queue empty
    before, median · ``host``: until such a call returns, median · ``kernels``: device time of the kernels of one call, and their
    ``launches``. About ``seconds`` each, at least 20 calls where these fit into three times that, 200 at most.
    """
    for _ in range(2):
        function()
    _synchronise(device)
    start = time.perf_counter()
    function()
    _synchronise(device)
    once = max(time.perf_counter() - start, 1e-6)
    calls = max(3, min(max(20, int(seconds / once)), int(3 * seconds / once), 200))
    singles, hosts = [], []
    for _ in range(min(calls, 50)):
        single, host = _single(function, device)
        singles.append(single)
        hosts.append(host)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _synchronise(device)
    found = {
        "called": 1000 * (time.perf_counter() - start) / calls,
        "single": statistics.median(singles),
        "host": statistics.median(hosts),
        "calls": calls,
    }
    if kernels:
        found["kernels"], found["launches"] = kernel_time(function, device)
    return found


def _single(function: Callable[[], Any], device: str) -> tuple[float, float]:
    """(ms between events, ms until the call returns) of one call; what it returns is freed afterwards."""
    _synchronise(device)
    if device == "cpu":
        begun = time.perf_counter()
        kept = function()
        ms = 1000 * (time.perf_counter() - begun)
        del kept
        return ms, ms
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begun = time.perf_counter()
    kept = function()
    host = 1000 * (time.perf_counter() - begun)
    end.record()
    end.synchronize()
    del kept
    return float(start.elapsed_time(end)), host


def kernel_time(function: Callable[[], Any], device: str) -> tuple[float, int]:
    """(sum of their ms on the device, number) of the kernels, copies and fills of one call, by torch.profiler."""
    activity = torch.profiler.ProfilerActivity
    # the first session of a process can miss what ran while CUPTI was starting
    for _ in range(2):
        with torch.profiler.profile(activities=[activity.CPU if device == "cpu" else activity.CUDA]) as profile:
            function()
            _synchronise(device)
        times = [event.time_range.elapsed_us() for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        if times or device == "cpu":
            break
    return sum(times) / 1000, len(times)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """``step`` as one CUDA graph."""
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


def _synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_extra(function: Callable[[], Any]) -> int:
    """Bytes allocated at the highest point of a call beyond those before it, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def inputs(N: int, H: int, D: int, *, count: int = 3, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Random normal (B, N, H, D) tensors; large ones are drawn a stretch at a time."""
    tensors = []
    for _ in range(count):
        x = torch.empty(batch, N, H, D, dtype=dtype, device="cuda")
        for part in x.split(2**22, 1):
            part.copy_(torch.randn(part.shape, dtype=dtype, device="cuda"))
        tensors.append(x)
    return tensors


def sampled_error(
    pattern: DilatedPattern, tensors: list[torch.Tensor], results: list[torch.Tensor], *, is_causal: bool, count: int = 24
) -> dict[str, float]:
    """Relative error of sampled rows against float64. ``tensors`` q, k, v[, dout]; ``results`` out, lse[, dq, dk, dv]."""
    q, k, v, *rest = tensors
    out, lse, *grads = results
    N, H = q.shape[1:3]
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(N, (count,), generator=generator).tolist()
    # the ends, and rows that the widest dilation takes
    rate = max(pattern.dilation_rates)
    places += [0, N - 1, *(p // rate * rate for p in places[:4])]
    rows = [(p, (p if i >= count else int(torch.randint(H, (1,), generator=generator))) % H) for i, p in enumerate(places)]
    true_out, true_lse = sampled_rows(pattern, q, k, v, rows, is_causal=is_causal)
    at = tuple(torch.tensor(x, device=q.device) for x in zip(*rows, strict=True))
    errors = {"out": _relative(out[0][at], true_out), "lse": float((lse[0][at[::-1]].double() - true_lse).abs().max())}
    if grads:
        true = sampled_gradients(pattern, (rest[0], q, k, v, out, lse), rows, is_causal=is_causal)
        errors |= {name: _relative(grad[0][at], t) for name, grad, t in zip(("dq", "dk", "dv"), grads, true, strict=True)}
    return errors


def _relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def machine() -> dict[str, str]:
    found = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    for package in ("triton", "flash-attn-4"):
        try:
            import importlib.metadata

            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def save(path: str | None, record: dict[str, Any]) -> None:
    """Append one JSON line."""
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(record) + "\n")
