"""Times as multiples of yardsticks that are timed in turns with the measured calls, so that a busy or throttled machine slows both.

On a GPU a time is measured between two events; on a CPU it is process time, which excludes time when other processes run. A figure is the
fastest call divided by the fastest call of the yardstick, because other load only ever adds time. There are three yardsticks (a matrix
product, a copy, and many small operations), because other processes may affect a core's clock, the memory or the caches. A change is
reported only to the extent that all three show it.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.bench.measure.timing import synchronise

YARDSTICKS = ("product", "copy", "calls")
# blocks of turns, each of which gives a separate figure; the differences between them are the noise
_BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one call.

    Args:
        ms: median, in milliseconds.
        low_ms: the fastest.
        samples: number of calls.
        per: time divided by that of each yardstick.
        noise: for each yardstick, half the spread of that ratio over blocks of turns, (largest − smallest) / (2 · median).
    """

    ms: float
    low_ms: float
    samples: int
    per: Mapping[str, float]
    noise: Mapping[str, float]

    def values(self) -> dict[str, float]:
        found: dict[str, float] = {"ms": self.ms, "low_ms": self.low_ms, "samples": self.samples}
        for name in YARDSTICKS:
            found |= {f"per_{name}": self.per[name], f"noise_{name}": self.noise[name]}
        return found

    @classmethod
    def of_values(cls, values: Mapping[str, float]) -> Figures:
        """Restores the figures from ``values``."""
        per = {name: values[f"per_{name}"] for name in YARDSTICKS}
        noise = {name: values[f"noise_{name}"] for name in YARDSTICKS}
        return cls(ms=values["ms"], low_ms=values["low_ms"], samples=int(values["samples"]), per=per, noise=noise)


def yardsticks(device: torch.device, full: bool) -> dict[str, Callable[[], Any]]:
    """Returns yardsticks about as long as a short call: a product, a copy larger than any cache, and many tiny operations."""
    edge, size = (2048, 2**28) if full else (256, 2**24)
    a, b = (torch.ones(edge, edge, device=device) for _ in range(2))
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    small = torch.ones(64, device=device)

    def many() -> None:
        for _ in range(100):
            small.view(8, 8).transpose(0, 1).contiguous().mul_(1.0)

    return {"product": functools.partial(torch.mm, a, b), "copy": functools.partial(target.copy_, source), "calls": many}


def sampled(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, *, full: bool, seconds: float, least: int = 10
) -> dict[str, Figures]:
    """Returns figures of calls that take turns with all yardsticks, for about ``seconds`` per call in total, at least ``least`` turns."""
    if not calls:
        return {}
    reference_timings = yardsticks(device, full)
    for function in (*reference_timings.values(), *calls.values()):
        function()
        function()
    taken: dict[str, list[float]] = {name: [] for name in (*reference_timings, *calls)}
    assert len(taken) == len(reference_timings) + len(calls)
    gc.collect()
    # a garbage collection during a call must not count towards the call
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        until = time.perf_counter() + seconds * len(calls)
        turns = 0
        while turns < least or time.perf_counter() < until:
            for name, function in reference_timings.items():
                taken[name].append(_milliseconds(function, device))
            for name, function in calls.items():
                taken[name].append(_milliseconds(function, device))
            turns += 1
    finally:
        if was_enabled:
            gc.enable()
    return {name: figures_of(taken[name], {reference: taken[reference] for reference in reference_timings}) for name in calls}


def figures_of(times: Sequence[float], reference_timings: Mapping[str, Sequence[float]]) -> Figures:
    """Computes figures from times turn by turn, in milliseconds."""
    per, noise = {}, {}
    for name, of_reference in reference_timings.items():
        per[name] = min(times) / min(of_reference)
        blocks = [min(mine) / min(theirs) for mine, theirs in zip(_blocks(times), _blocks(of_reference), strict=True)]
        noise[name] = (max(blocks) - min(blocks)) / (2 * statistics.median(blocks))
    return Figures(ms=statistics.median(times), low_ms=min(times), samples=len(times), per=per, noise=noise)


def _blocks(times: Sequence[float]) -> list[Sequence[float]]:
    size = -(-len(times) // _BLOCKS)
    return [times[i : i + size] for i in range(0, len(times), size)]


def _milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        # process time, so that waiting for a core does not count
        begun = time.process_time()
        function()
        return 1000 * (time.process_time() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronise(device)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def change(then: Figures, now: Figures) -> float:
    """Returns by what share a call became slower, negative if faster: the smallest over all yardsticks, 0 where their directions differ."""
    changes = [now.per[name] / then.per[name] - 1 for name in YARDSTICKS]
    return min(changes) if min(changes) > 0 else max(changes) if max(changes) < 0 else 0.0


def verdict(then: Figures, now: Figures, threshold: float) -> str:
    """Returns "slower" or "faster" if by every yardstick the change exceeds ``threshold`` and the noise of both; otherwise "same"."""
    slower = faster = True
    for name in YARDSTICKS:
        noise = math.hypot(then.noise[name], now.noise[name])
        limit = 1 + max(threshold, noise)
        slower &= now.per[name] > limit * then.per[name]
        faster &= then.per[name] > limit * now.per[name]
    return "slower" if slower else "faster" if faster else "same"
