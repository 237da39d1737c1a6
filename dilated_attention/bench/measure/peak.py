"""The memory that code takes; one call of an attention under a limit of it: seconds, peak, what it computed, what the plan expects."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dilated_attention.bench.measure.skip import Attempt, attempt, release, settle, synchronise
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning import plan_attention
from dilated_attention.profiling import profile_memory

# torch 2.13's profiler, which counts a CPU's bytes, writes two lines to stderr each time it runs
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
T = TypeVar("T")
# "training" and "both": forward and backward
PASSES = ("forward", "training")


@dataclass
class Peak:
    """Most bytes in tensors in a block of code, beyond those before it; known after it."""

    bytes: int = 0


@contextlib.contextmanager
def counted(device: torch.device) -> Iterator[Peak]:
    """Counts by the allocator's figures on a GPU; on a CPU by ``profile_memory``, which makes calls slower."""
    peak = Peak()
    if device.type == "cuda":
        settle(device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        with profile_memory(device=device) as profile:
            yield peak
        peak.bytes = profile.peak_allocated


def within(function: Callable[[], T], device: torch.device, *, memory: int | None = None) -> Attempt[T]:
    """Calls a function without what earlier calls have left; on a GPU with ``memory`` bytes, None for all."""
    _forget()
    if device.type != "cuda":
        return attempt(function)
    before, total = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (memory or total) / total), device)
    try:
        found = attempt(function)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        _forget()
    left = torch.cuda.memory_allocated(device) - before
    if found.value is None and left > 2**24:
        return Attempt(None, f"{found.note}, {left / 2**20:.0f} MiB not released")
    return found


def _forget() -> None:
    """Frees lists of blocks and cuBLAS's workspaces, which are parts of large blocks of the allocator."""
    clear_block_lists()
    gc.collect()
    release(workspaces=True)


@dataclass
class Called:
    """A call that succeeded. ``inputs`` are q, k, v and, with a backward, dout; ``results`` those of the function, then dq, dk, dv."""

    seconds: float
    peak: int
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]


def called(make: Callable[[Problem], Callable[..., Any]], problem: Problem, *, backward: bool, memory: int | None = None) -> Called:
    """Calls what ``make`` makes of the problem, in this process. The peak includes inputs and results.

    Raises:
        torch.OutOfMemoryError: also on a CPU, whose allocator has no limit, where the peak is above ``memory``.
    """
    attend, on_gpu = make(problem), problem.device.type == "cuda"
    # the first call of a length compiles, and builds the plans and tables that calls share
    if on_gpu:
        _once(attend, problem, backward)
    with counted(problem.device) as peak:
        found = _once(attend, problem, backward)
    if not on_gpu:
        if memory is not None and peak.bytes > memory:
            raise torch.OutOfMemoryError(f"a call took {peak.bytes} bytes, more than {memory}")
        del found
        found = _once(attend, problem, backward)
    seconds, inputs, results = found
    return Called(seconds, peak.bytes, inputs, results)


def _once(attend: Callable[..., Any], problem: Problem, backward: bool) -> tuple[float, list[torch.Tensor], list[torch.Tensor]]:
    """Returns the seconds of a call, its inputs and its results."""
    gc.collect()
    # dout exists before the forward, so that it does not split up blocks that the forward frees
    leaves, dout = problem.qkv(), [problem.draw(problem.num_heads, 9)] if backward else []
    synchronise(problem.device)
    begun = time.perf_counter()
    with torch.set_grad_enabled(backward):
        found = attend(*leaves)
    found = list(found) if isinstance(found, tuple) else [found]
    grads = torch.autograd.grad(found[0], leaves, dout[0]) if backward else ()
    synchronise(problem.device)
    return time.perf_counter() - begun, [*leaves, *dout], [*(x.detach() for x in found), *grads]


def planned(
    kind: str, problem: Problem, pattern: DilatedPattern | BlockPattern | None, *, backward: bool, memory: int | None = None
) -> dict[str, float]:
    """Returns what the plan of the same call expects: its ``predicted_bytes``; with ``memory`` also the ``planned_longest`` that fits."""
    plan = plan_attention(
        kind,
        num_positions=problem.num_positions,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        batch_size=problem.batch_size,
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        training=backward,
        pattern=pattern,
        gpu=None if problem.device.type == "cuda" else "cpu",
        memory=memory,
        find_longest=memory is not None,
    )
    longest = {} if memory is None else {"planned_longest": plan.longest}
    return {"predicted_bytes": plan.memory.peak if backward else plan.memory.forward_peak, **longest}
