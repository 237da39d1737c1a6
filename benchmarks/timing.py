"""Time, memory and failures of calls. Contenders take turns, so that a change of clock rate or load affects all of them equally."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.profiling import profile_memory

T = TypeVar("T")
Call = Callable[[], Any]
# lengths of --lengths-vary, of which the first are not counted
WARM, NEW = 3, 24
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate memory")


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return number


class Refused(Exception):
    """Raised by a contender that cannot run a case; its text becomes the row's note."""


def attempt(function: Callable[..., T], *arguments: Any, foreign: bool = False) -> tuple[T | None, str]:
    """Returns the result and "", or None and a note where memory ran out or the case was refused. Other errors are bugs and propagate. All
    errors of ``foreign`` code are notes, except those after which a GPU cannot compute."""
    try:
        return function(*arguments), ""
    except Refused as refusal:
        return None, str(refusal)
    except BackendUnavailable as unavailable:
        # the second line is why the requested backend cannot run, after its name
        return None, " ".join(str(unavailable).splitlines()[1:2]).strip().split(": ", 1)[-1][:200] or str(unavailable)[:200]
    except Exception as error:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in _OUT_OF_MEMORY):
            note = "out of memory"
        elif foreign and "CUDA error" not in text:
            note = f"raised {type(error).__name__}: {' '.join(text.split())[:200]}"
        else:
            raise
    # the frames of a caught error keep its tensors alive until here
    release()
    return None, note


def release() -> None:
    """Frees what earlier calls left: lists of blocks, cycles, and on a GPU the memory that no tensor holds."""
    clear_block_lists()
    gc.collect()
    if torch.cuda.is_available():
        settle()
        # cuBLAS's workspaces may be part of a large block, which cannot be returned as a whole while they exist
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def settle(device: torch.device | None = None) -> None:
    """Waits until a GPU's autograd thread has freed what the last backward held: it may do so during the next call."""
    x = torch.zeros((), device=device or "cuda", requires_grad=True)
    torch.autograd.grad(x * 1, x)
    torch.cuda.synchronize(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(call: Call, device: torch.device) -> int:
    """Returns the most bytes in tensors during a call, beyond those before it; on a CPU by ``profile_memory``, which makes it slower."""
    if device.type != "cuda":
        return profile_memory(call, device=device).peak_allocated
    settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def loop(function: Call, device: torch.device, calls: int = 1) -> float:
    """Returns the milliseconds of a call in a loop without synchronising, until the device is done with the last call."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronise(device)
    return 1000 * (time.perf_counter() - start) / calls


def host_time(function: Call, device: torch.device, calls: int) -> float:
    """Returns the median milliseconds until a call returns that finds the queue empty."""
    times = []
    for _ in range(calls):
        synchronise(device)
        begun = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def in_turns(
    calls: Mapping[str, Callable[[], Call]], device: torch.device, *, seconds: float, graphs: bool = False
) -> dict[str, dict[str, float]]:
    """Times calls in turn for about ``seconds`` each and at least three turns. All must have run before: a first call may compile. ``ms``:
    on a GPU the device's time with a cold cache, by triton's ``do_bench``; ``called``: in a loop without synchronising; ``host``: until the
    call returns; with ``graphs`` also ``graph``, as a CUDA graph. Calls are made for each turn and dropped after it, so that only one holds
    memory at a time."""
    once = {name: max(loop(make(), device), 1e-3) for name, make in calls.items()}
    turns = max(3, min(20, int(1000 * seconds / max(once.values(), default=1000.0))))
    times: dict[str, dict[str, list[float]]] = {name: {"ms": [], "called": [], "host": []} for name in calls}
    for turn, (name, make) in itertools.product(range(turns), calls.items()):
        call, mine, budget = make(), times[name], 1000 * seconds / turns
        count = max(1, min(200, int(budget / once[name])))
        mine["called"].append(loop(call, device, count))
        mine["ms"] += _device_times(call, once[name], budget) if device.type == "cuda" else mine["called"][-1:]
        mine["host"].append(host_time(call, device, min(count, 10)))
        if graphs and device.type == "cuda" and turn == 0:
            with contextlib.suppress(Refused):
                mine["graph"] = [loop(captured(call), device, count)]
    return {name: {key: statistics.median(values) for key, values in mine.items()} for name, mine in times.items()}


def _device_times(call: Call, once: float, budget: float) -> list[float]:
    if once < 5:
        from triton.testing import do_bench

        return list(do_bench(call, warmup=1, rep=max(1, min(100, int(budget))), return_mode="all"))
    # two events around a call that finds the queue empty: within a hundredth of its time the cache is refilled
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return [float(start.elapsed_time(end))]


def captured(step: Call) -> Call:
    """Returns the replay of ``step`` as one CUDA graph. Raises Refused for what reads a number back, as bounds of documents."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        raise Refused(f"cannot be captured: {error}") from error
    return graph.replay


def new_and_again(make: Callable[[int], Call], lengths: Sequence[int], once: Callable[[Call], float], warm: int = WARM) -> dict[str, float]:
    """Calls lengths that were not before, each twice: ``new_ms`` and ``again_ms``, medians, and ``worst_ms`` of the first of two calls.
    ``once`` gives the milliseconds of a call; the first ``warm`` lengths are not counted."""
    both = []
    for length in lengths:
        call = make(length)
        both.append((once(call), once(call)))
        del call
    fresh, again = ([pair[i] for pair in both[warm:]] for i in (0, 1))
    return {"new_ms": statistics.median(fresh), "worst_ms": max(fresh), "again_ms": statistics.median(again)}
