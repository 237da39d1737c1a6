"""Runs functions that may fail (out of memory, refused, wrong): failures become notes, and a suite continues. Also the memory they take.

One call of an attention under a limit of memory: its seconds, its peak, what it computed, and what the plan expects of it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning import plan_attention
from dilated_attention.profiling import profile_memory

# torch 2.13's profiler, which counts a CPU's bytes, writes two lines to stderr each time it runs
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
T = TypeVar("T")
# messages of PyTorch's CPU allocator, C++ and the system
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate memory")


class Refused(Exception):
    """Raised by a contender that cannot run a case; its text becomes the row's note."""


def attempt(function: Callable[..., T], *arguments: Any, foreign: bool = False) -> tuple[T | None, str]:
    """Calls a function with ``arguments``. Returns its result and "", or None and a note.

    Out of memory, after which the memory is released, and refusals become a note. Other errors are bugs and propagate.

    Args:
        foreign: whether third-party code runs inside, whose kernels may fail at unsupported shapes: then all its errors become notes, too,
            except those after which a GPU can no longer compute.
    """
    try:
        return function(*arguments), ""
    except Refused as refusal:
        return None, _first_line(refusal)
    except BackendUnavailable as unavailable:
        # the second line is why the requested backend cannot run, after its name
        reasons = str(unavailable).splitlines()[1:2]
        return None, reasons[0].strip().split(": ", 1)[-1][:200] if reasons else _first_line(unavailable)
    except Exception as error:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in _OUT_OF_MEMORY):
            note = "out of memory"
        elif foreign and "CUDA error" not in text:
            note = f"raised {type(error).__name__}: {_first_line(error)}"
        else:
            raise
    # the frames of a caught error keep its tensors alive until here
    gc.collect()
    release()
    return None, note


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def release(*, workspaces: bool = False) -> None:
    """Returns unused memory to the device. On a CPU only reference cycles have to be collected.

    Args:
        workspaces: also frees cuBLAS's workspaces, which the next product allocates again: 32 MiB for each thread on Hopper. They may be
            part of a large block, which cannot be returned as a whole while they exist. Must not be used while a CUDA graph lives, whose
            products write there.
    """
    if torch.cuda.is_available():
        settle(torch.device("cuda"))
        gc.collect()
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Waits until a GPU's autograd thread has freed what the last backward held.

    A backward returns to its caller before that thread has dropped the tensors of its last step. Bytes counted right after it may therefore
    be freed during the next call, and a peak relative to them would be too small. The thread starts this small backward only after dropping
    them.
    """
    if device.type == "cuda":
        x = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(x * 1, x)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def within(function: Callable[[], T], device: torch.device, *, memory: int | None = None) -> tuple[T | None, str]:
    """Attempts a function without what earlier calls have left; on a GPU with ``memory`` bytes, None for all."""
    _forget()
    if device.type != "cuda":
        return attempt(function)
    before, total = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (memory or total) / total), device)
    try:
        found, note = attempt(function)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        _forget()
    left = torch.cuda.memory_allocated(device) - before
    return found, note + (f", {left / 2**20:.0f} MiB not released" if note and left > 2**24 else "")


def _forget() -> None:
    """Frees lists of blocks and cuBLAS's workspaces, which are parts of large blocks of the allocator."""
    clear_block_lists()
    gc.collect()
    release(workspaces=True)


@dataclass
class Called:
    """A call that succeeded. ``inputs`` are q, k, v and, with a backward, dout; ``results`` those of the function, then dq, dk, dv.

    ``peak``: its bytes, inputs and results included.
    """

    seconds: float
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    peak: int = 0


def called(make: Callable[[Problem], Callable[..., Any]], problem: Problem, *, backward: bool, memory: int | None = None) -> Called:
    """Calls what ``make`` makes of the problem, in this process.

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
    found.peak = peak.bytes
    return found


def _once(attend: Callable[..., Any], problem: Problem, backward: bool) -> Called:
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
    return Called(time.perf_counter() - begun, [*leaves, *dout], [*(x.detach() for x in found), *grads])


def planned(
    kind: str, problem: Problem, pattern: DilatedPattern | BlockPattern | None, *, backward: bool, memory: int | None = None
) -> dict[str, float]:
    """Returns what the plan of the same call expects: its ``predicted_bytes``; with ``memory`` also the ``planned_longest`` that fits."""
    names = ("num_positions", "num_heads", "num_kv_heads", "head_dim", "batch_size", "dtype", "is_causal")
    options: dict[str, Any] = {name: getattr(problem, name) for name in names}
    options |= {"training": backward, "pattern": pattern, "gpu": None if problem.device.type == "cuda" else "cpu"}
    plan = plan_attention(kind, memory=memory, find_longest=memory is not None, **options)
    longest = {} if memory is None else {"planned_longest": plan.longest}
    return {"predicted_bytes": plan.memory.peak if backward else plan.memory.forward_peak, **longest}
