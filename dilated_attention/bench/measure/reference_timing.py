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

from dilated_attention.bench.measure.timing import device_ms

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
        return found | {f"{what}_{name}": getattr(self, what)[name] for name in YARDSTICKS for what in ("per", "noise")}

    @classmethod
    def of_values(cls, values: Mapping[str, float]) -> Figures:
        """Restores the figures from ``values``."""
        per, noise = ({name: values[f"{what}_{name}"] for name in YARDSTICKS} for what in ("per", "noise"))
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
    rods = yardsticks(device, full)
    everything = [*rods.items(), *calls.items()]
    taken: dict[str, list[float]] = {name: [] for name, _ in everything}
    assert len(taken) == len(everything)
    for _, function in everything:
        function()
        function()
    gc.collect()
    # a garbage collection during a call must not count towards the call
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        until = time.perf_counter() + seconds * len(calls)
        while len(taken[YARDSTICKS[0]]) < least or time.perf_counter() < until:
            for name, function in everything:
                taken[name].append(_milliseconds(function, device))
    finally:
        if was_enabled:
            gc.enable()
    return {name: figures_of(taken[name], {rod: taken[rod] for rod in rods}) for name in calls}


def figures_of(times: Sequence[float], of_rods: Mapping[str, Sequence[float]]) -> Figures:
    """Computes figures from times turn by turn, in milliseconds."""
    size = -(-len(times) // _BLOCKS)
    noise = {}
    for name, theirs in of_rods.items():
        blocks = [min(times[i : i + size]) / min(theirs[i : i + size]) for i in range(0, len(times), size)]
        noise[name] = (max(blocks) - min(blocks)) / (2 * statistics.median(blocks))
    per = {name: min(times) / min(theirs) for name, theirs in of_rods.items()}
    return Figures(ms=statistics.median(times), low_ms=min(times), samples=len(times), per=per, noise=noise)


def _milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return device_ms(function)
    # process time, so that waiting for a core does not count
    begun = time.process_time()
    function()
    return 1000 * (time.process_time() - begun)


def change(then: Figures, now: Figures) -> float:
    """Returns by what share a call became slower, negative if faster: the smallest over all yardsticks, 0 where their directions differ."""
    changes = [now.per[name] / then.per[name] - 1 for name in YARDSTICKS]
    return min(changes) if min(changes) > 0 else max(changes) if max(changes) < 0 else 0.0


def verdict(then: Figures, now: Figures, threshold: float) -> str:
    """Returns "slower" or "faster" if by every yardstick the change exceeds ``threshold`` and the noise of both; otherwise "same"."""
    limits = {name: 1 + max(threshold, math.hypot(then.noise[name], now.noise[name])) for name in YARDSTICKS}
    if all(now.per[name] > limits[name] * then.per[name] for name in YARDSTICKS):
        return "slower"
    return "faster" if all(then.per[name] > limits[name] * now.per[name] for name in YARDSTICKS) else "same"
