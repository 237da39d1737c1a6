"""``profile_memory``: measures where a block of code, or a call, uses memory."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import torch

from dilated_attention.engine.oom.report import allocator_settings, machine_memory
from dilated_attention.engine.oom.requirement import MemoryRequirement, size_text
from dilated_attention.engine.ops.op_hooks import watchers
from dilated_attention.profiling.ledger import replay
from dilated_attention.profiling.profile import MemoryProfile

# share of the peak by which replayed events may miss it without a note
_UNTOLD = 0.01
_CPU_CANNOT = ("reserved memory and fragmentation, which malloc does not report; tensors from before the block",)
_COUNTS = {"retries": "num_alloc_retries", "refused": "num_ooms", "device_allocs": "num_device_alloc", "device_frees": "num_device_free"}


class ProfiledBlock:
    """The value of ``with profile_memory() as profile``: after the block, it has all attributes of the ``MemoryProfile``."""

    def __init__(self, device: torch.device, ops: bool, snapshot: Path | None, empty_cache: bool) -> None:
        self._device, self._ops, self._snapshot, self._empty_cache = device, ops, snapshot, empty_cache
        self._result: MemoryProfile | None = None
        self._seen: dict[tuple[object, ...], tuple[MemoryRequirement, int]] = {}
        self._profiler: Any = None

    @property
    def result(self) -> MemoryProfile:
        """Returns the profile itself. Raises RuntimeError if the block has not ended."""
        if self._result is None:
            raise RuntimeError("this profile has no figures yet; read it after the with block")
        return self._result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result, name)

    def __str__(self) -> str:
        return str(self.result)

    def __enter__(self) -> ProfiledBlock:
        if self._result is not None or self._profiler is not None:
            raise RuntimeError("a profile is made once; call profile_memory() again for another block")
        if self._ops and torch._C._autograd._profiler_enabled():
            # otherwise PyTorch would silently end the profile that is running
            raise RuntimeError("torch.profiler is already running, and there can be only one; end it first, or on a GPU pass ops=False")
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if self._empty_cache:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_stats(self._device)
            if self._snapshot is not None:
                torch.cuda.memory._record_memory_history(max_entries=200_000, device=self._device)
        else:
            self._resident = machine_memory().get("VmRSS")
            # Linux then measures the peak anew; where it is not allowed to, the figure is that of the process's life
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        watchers.append(self._watch)
        self._began = time.perf_counter()
        if self._ops:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Runs after an error, too: an out-of-memory error is a common reason to want a profile."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
        watchers.remove(self._watch)
        figures = self._of_gpu() if self._device.type == "cuda" else self._of_cpu()
        if self._ops:
            tree = self._profiler.profiler.kineto_results.experimental_event_tree()
            figures["ops"], peak, end = replay(tree, self._device, figures["allocated_before"])
            counted = figures.setdefault("peak_allocated", peak)
            figures.setdefault("allocated_after", end)
            if abs(peak - counted) > _UNTOLD * counted:
                off = size_text(abs(peak - counted))
                figures["cannot_tell"] = (f"which ops hold the peak: the profiler's events miss frees, and are {off} off",)
        self._result = MemoryProfile(device=str(self._device), seen=tuple(self._seen.values()), **figures)

    def _watch(self, requirement: MemoryRequirement) -> None:
        if requirement.device.type == self._device.type:
            kind = (requirement.op, requirement.pass_name, requirement.shapes)
            self._seen[kind] = (requirement, self._seen.get(kind, (requirement, 0))[1] + 1)

    def _of_cpu(self) -> dict[str, Any]:
        memory = machine_memory()
        return {
            "seconds": time.perf_counter() - self._began,
            "hardware": platform.processor() or platform.machine(),
            "allocated_before": 0,
            "resident_before": self._resident,
            "resident_peak": memory.get("VmHWM"),
            "total": memory.get("MemTotal", 0),
            "cannot_tell": _CPU_CANNOT,
        }

    def _of_gpu(self) -> dict[str, Any]:
        torch.cuda.synchronize(self._device)
        figures: dict[str, Any] = {"seconds": time.perf_counter() - self._began, "allocator": allocator_settings()}
        stats, before = torch.cuda.memory_stats(self._device), self._before
        if self._snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
            figures["snapshot"] = str(self._snapshot)
        for name in ("allocated", "reserved", "inactive_split"):
            now, then = (found[f"{name}_bytes.all.current"] for found in (stats, before))
            figures[f"peak_{name}"] = stats[f"{name}_bytes.all.peak"]
            figures |= {name: now} if name == "inactive_split" else {f"{name}_before": then, f"{name}_after": now}
        properties = torch.cuda.get_device_properties(self._device)
        figures |= {"hardware": properties.name, "total": properties.total_memory}
        figures["cannot_tell"] = () if self._ops else ("which op allocated what: ops=False",)
        return figures | {name: stats[counter] - before[counter] for name, counter in _COUNTS.items()}


@overload
def profile_memory(
    *, device: torch.device | str | None = None, ops: bool = True, snapshot: str | os.PathLike[str] | None = None, empty_cache: bool = True
) -> ProfiledBlock: ...


@overload
def profile_memory(function: Callable[..., object], /, *args: Any, **kwargs: Any) -> MemoryProfile: ...


def profile_memory(
    function: Callable[..., object] | None = None,
    /,
    *args: Any,
    device: torch.device | str | None = None,
    ops: bool = True,
    snapshot: str | os.PathLike[str] | None = None,
    empty_cache: bool = True,
    **kwargs: Any,
) -> Any:
    """Measures where memory is used, in a block of code or in one call.

    Args:
        function: called once with ``args`` and ``kwargs``; without it, a context manager is returned.
        device: the device whose memory is measured; None for the current GPU if there is one, else the CPU.
        ops: also reports by op, from PyTorch's profiler, at a few microseconds per op. False: only the allocator's counters, on a GPU.
        snapshot: file to write for PyTorch's memory viewer, on a GPU. It takes over PyTorch's recording of memory history, and ends it.
        empty_cache: first releases the allocator's unused memory, on a GPU. The peaks of ``torch.cuda.memory_stats`` are always reset.

    Returns:
        With a function, its ``MemoryProfile``. Without one, a context manager that is that profile once the block has ended, even by an
        error.

    Raises:
        ValueError: ``snapshot`` or ``ops=False`` on a CPU, which has no allocator to query.
        RuntimeError: torch.profiler is already running; there can be only one.

    >>> with profile_memory() as profile:
    ...     dilated_attention(q, k, v, [2048, 8192], [1, 4]).sum().backward()
    >>> print(profile, *profile.advice(), sep="\\n")
    >>> profile_memory(model, tokens).peak_allocated
    """
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {where}; expected a CUDA device or the CPU, for which torch reports allocations")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if where.type == "cpu" and snapshot is not None:
        raise ValueError("snapshot is given for the CPU; torch records memory history on GPUs only: leave it out, and print the profile")
    if where.type == "cpu" and not ops:
        raise ValueError("ops=False on the CPU leaves nothing to measure: its allocator has no counters; leave ops=True")
    if function is None and (args or kwargs):
        raise TypeError(f"arguments {args or kwargs} without a function to call; pass it first: profile_memory(function, *args)")
    if function is not None and not callable(function):
        raise TypeError(f"the first argument is {function!r}; expected a function, or none for `with profile_memory() as profile:`")
    block = ProfiledBlock(where, ops, None if snapshot is None else Path(snapshot), empty_cache)
    if function is None:
        return block
    with block:
        function(*args, **kwargs)
    return block.result
