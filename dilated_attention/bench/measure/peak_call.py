"""One call of an attention under limits of memory and time: its seconds, its peak, what it computed, and what the plan expects of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from dilated_attention.bench.measure.skip import Attempt, attempt, release
from dilated_attention.bench.measure.subprocess_runner import Peak, in_child, why_no_children
from dilated_attention.bench.measure.timing import synchronise
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning import plan_attention

T = TypeVar("T")
# "training" and "both": forward and backward
PASSES = ("forward", "training")


def within(function: Callable[[], T], device: torch.device, *, memory: int | None = None, seconds: float | None = None) -> Attempt[T]:
    """Calls a function that can be pickled: on a CPU in a process of its own, on a GPU here, without what earlier calls have left.

    Args:
        memory: bytes that it may take; None for those of the device.
        seconds: after which a process on a CPU is ended. A call on a GPU cannot be interrupted.
    """
    if device.type != "cuda":
        why_not = why_no_children()
        return Attempt(None, why_not) if why_not else in_child(function, memory=memory, seconds=seconds)
    _forget()
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


def called(make: Callable[[Problem], Callable[..., Any]], problem: Problem, *, backward: bool) -> Called:
    """Calls what ``make`` makes of the problem, in this process. The peak includes inputs and results."""
    on_gpu = problem.device.type == "cuda"
    if not on_gpu:
        # code is loaded on first use, which must not count towards the peak
        small = replace(problem, num_positions=min(problem.num_positions, 512))
        _results(make(small), *_inputs(small, backward))
    attend = make(problem)
    found: Called | None = None
    # on a GPU the first call of a length compiles, and builds the plans and tables that calls share
    for _ in range(2 if on_gpu else 1):
        found = None
        gc.collect()
        peak = Peak(problem.device)
        leaves, dout = _inputs(problem, backward)
        synchronise(problem.device)
        begun = time.perf_counter()
        results = _results(attend, leaves, dout)
        synchronise(problem.device)
        found = Called(time.perf_counter() - begun, peak.bytes(), [*leaves, *([] if dout is None else [dout])], results)
        del leaves, dout, results
    assert found is not None
    return found


def _inputs(problem: Problem, backward: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    # dout exists before the forward, so that it does not split up blocks that the forward frees
    return problem.qkv(), problem.draw(problem.num_heads, 9) if backward else None


def _results(attend: Callable[..., Any], leaves: Sequence[torch.Tensor], dout: torch.Tensor | None) -> list[torch.Tensor]:
    with torch.set_grad_enabled(dout is not None):
        found = attend(*leaves)
    found = list(found) if isinstance(found, tuple) else [found]
    grads = () if dout is None else torch.autograd.grad(found[0], leaves, dout)
    return [*(x.detach() for x in found), *grads]


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
