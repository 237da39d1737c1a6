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
from dilated_attention.profiling.ledger import OpMemory, replay
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
        seconds = time.perf_counter() - self._began
        figures = self._of_gpu() if self._device.type == "cuda" else self._of_cpu()
        self._result = MemoryProfile(device=str(self._device), seconds=seconds, seen=tuple(self._seen.values()), **figures)

    def _watch(self, requirement: MemoryRequirement) -> None:
        if requirement.device.type == self._device.type:
            kind = (requirement.op, requirement.is_backward, requirement.shapes)
            self._seen[kind] = (requirement, self._seen.get(kind, (requirement, 0))[1] + 1)

    def _replayed(self, before: int) -> tuple[tuple[OpMemory, ...], int, int]:
        return replay(self._profiler.profiler.kineto_results.experimental_event_tree(), self._device, before)

    def _of_cpu(self) -> dict[str, Any]:
        (ops, peak, end), memory = self._replayed(0), machine_memory()
        figures = {"resident_before": self._resident, "resident_peak": memory.get("VmHWM"), "total": memory.get("MemTotal", 0)}
        name = platform.processor() or platform.machine()
        return figures | {
            "hardware": name, "peak_allocated": peak, "allocated_before": 0, "allocated_after": end, "ops": ops, "cannot_tell": _CPU_CANNOT
        }  # fmt: skip

    def _of_gpu(self) -> dict[str, Any]:
        torch.cuda.synchronize(self._device)
        stats, before = torch.cuda.memory_stats(self._device), self._before
        if self._snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
        figures: dict[str, Any] = {name: stats[counter] - before[counter] for name, counter in _COUNTS.items()}
        for name in ("allocated", "reserved"):
            counter = f"{name}_bytes.all"
            figures[f"peak_{name}"] = stats[f"{counter}.peak"]
            figures[f"{name}_before"], figures[f"{name}_after"] = before[f"{counter}.current"], stats[f"{counter}.current"]
        ops, peak, _ = self._replayed(figures["allocated_before"]) if self._ops else ((), figures["peak_allocated"], 0)
        off = peak - figures["peak_allocated"]
        cannot = () if self._ops else ("which op allocated what: ops=False",)
        if abs(off) > _UNTOLD * figures["peak_allocated"]:
            cannot = (f"which ops hold the peak: the profiler's events are {size_text(abs(off))} off, as some frees are missing in them",)
        return figures | {
            "hardware": torch.cuda.get_device_name(self._device),
            "total": torch.cuda.get_device_properties(self._device).total_memory,
            "inactive_split": stats["inactive_split_bytes.all.current"],
            "peak_inactive_split": stats["inactive_split_bytes.all.peak"],
            "allocator": allocator_settings(),
            "ops": ops,
            "snapshot": None if self._snapshot is None else str(self._snapshot),
            "cannot_tell": cannot,
        }


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
        ops: also reports by op, from PyTorch's profiler, which sees every allocation and costs a few microseconds per op. False: only the
            allocator's own counters, which cost nothing, on a GPU.
        snapshot: file to write for PyTorch's memory viewer, on a GPU. It takes over PyTorch's recording of memory history, and ends it.
        empty_cache: first releases the allocator's unused memory, so that reserved memory is the block's own; on a GPU. The peaks of
            ``torch.cuda.memory_stats`` are reset in any case.

    Returns:
        With a function, its ``MemoryProfile``. Without one, a context manager whose value is that profile once the block has ended, even by
        an error.

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
