"""``profile_memory``: measures where a block of code, or a call, uses memory."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import torch

from dilated_attention.engine.oom.device_memory import memory_info, size_text
from dilated_attention.engine.oom.report import allocator_settings
from dilated_attention.engine.oom.requirement import MemoryRequirement
from dilated_attention.engine.ops.op_hooks import watchers
from dilated_attention.profiling.ledger import Ledger, replay
from dilated_attention.profiling.profile import MemoryProfile, SeenCall

# maximum number of events in a snapshot: the most recent ones
SNAPSHOT_EVENTS = 200_000
# share of the peak by which replayed events may miss it without a note
UNTOLD = 0.01
_CPU_CANNOT = (
    "reserved memory and fragmentation: CPU memory comes from malloc, which does not report them",
    "tensors from before the block: they are included in the figures of the process, but not in those of tensors and ops",
)


class ProfiledBlock:
    """The value of ``with profile_memory() as profile``: after the block, it has all attributes of the ``MemoryProfile``."""

    def __init__(self, device: torch.device, ops: bool, snapshot: Path | None, empty_cache: bool) -> None:
        self._device, self._ops, self._snapshot, self._empty_cache = device, ops, snapshot, empty_cache
        self._result: MemoryProfile | None = None
        self._seen: dict[tuple[object, ...], tuple[MemoryRequirement, int]] = {}
        self._profiler: Any = None

    @property
    def result(self) -> MemoryProfile:
        """Returns the profile itself.

        Raises:
            RuntimeError: the block has not ended.
        """
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
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS, device=self._device)
        else:
            self._resident, self._resets = memory_info(self._device).allocated, _reset_resident_peak()
        watchers.append(self._watch)
        self._began = time.perf_counter()
        if self._ops:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Runs after an error, too: an out-of-memory error is a common reason to want a profile."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
        watchers.remove(self._watch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        before = self._before["allocated_bytes.all.current"] if self._device.type == "cuda" else 0
        ledger = None
        if self._profiler is not None:
            ledger = replay(self._profiler.profiler.kineto_results.experimental_event_tree(), self._device, before)
        seen = tuple(SeenCall(requirement=requirement, count=count) for requirement, count in self._seen.values())
        make = self._of_gpu if self._device.type == "cuda" else self._of_cpu
        self._result = make(seconds, ledger, seen)

    def _watch(self, requirement: MemoryRequirement) -> None:
        if requirement.device.type == self._device.type:
            kind = (requirement.op, requirement.is_backward, requirement.shapes)
            self._seen[kind] = (requirement, self._seen.get(kind, (requirement, 0))[1] + 1)

    def _of_gpu(self, seconds: float, ledger: Ledger | None, seen: tuple[SeenCall, ...]) -> MemoryProfile:
        stats, before = torch.cuda.memory_stats(self._device), self._before
        if self._snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)

        def more(name: str) -> int:
            return int(stats[name] - before[name])

        return MemoryProfile(
            device=str(self._device),
            hardware=torch.cuda.get_device_name(self._device),
            seconds=seconds,
            peak_allocated=stats["allocated_bytes.all.peak"],
            allocated_before=before["allocated_bytes.all.current"],
            allocated_after=stats["allocated_bytes.all.current"],
            peak_reserved=stats["reserved_bytes.all.peak"],
            reserved_before=before["reserved_bytes.all.current"],
            reserved_after=stats["reserved_bytes.all.current"],
            inactive_split=stats["inactive_split_bytes.all.current"],
            peak_inactive_split=stats["inactive_split_bytes.all.peak"],
            retries=more("num_alloc_retries"),
            refused=more("num_ooms"),
            device_allocs=more("num_device_alloc"),
            device_frees=more("num_device_free"),
            allocator=allocator_settings(),
            total=torch.cuda.get_device_properties(self._device).total_memory,
            ops=() if ledger is None else ledger.ops,
            seen=seen,
            snapshot=None if self._snapshot is None else str(self._snapshot),
            cannot_tell=_untold(ledger, stats["allocated_bytes.all.peak"]),
        )

    def _of_cpu(self, seconds: float, ledger: Ledger | None, seen: tuple[SeenCall, ...]) -> MemoryProfile:
        assert ledger is not None
        peak = _resident_peak()
        cannot = list(_CPU_CANNOT)
        if peak is None:
            cannot.append("what the process had in memory: this system has no /proc/self/status")
        elif not self._resets:
            cannot.append("the process's peak in the block: the kernel here cannot reset it, so it is that of the process's life")
        return MemoryProfile(
            device="cpu",
            hardware=platform.processor() or platform.machine(),
            seconds=seconds,
            peak_allocated=ledger.peak,
            allocated_before=0,
            allocated_after=ledger.end,
            resident_before=None if peak is None else self._resident,
            resident_peak=peak,
            total=memory_info(self._device).total,
            ops=ledger.ops,
            seen=seen,
            cannot_tell=tuple(cannot),
        )


@overload
def profile_memory(
    *,
    device: torch.device | str | None = None,
    ops: bool = True,
    snapshot: str | os.PathLike[str] | None = None,
    empty_cache: bool = True,
) -> ProfiledBlock: ...


@overload
def profile_memory(
    function: Callable[..., object],
    /,
    *args: Any,
    device: torch.device | str | None = None,
    ops: bool = True,
    snapshot: str | os.PathLike[str] | None = None,
    empty_cache: bool = True,
    **kwargs: Any,
) -> MemoryProfile: ...


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
        snapshot: file to write for PyTorch's memory viewer (docs/memory.md explains how to view it); on a GPU. It takes over PyTorch's
            recording of memory history, and ends it.
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


def _untold(ledger: Ledger | None, peak: int) -> tuple[str, ...]:
    """Says what the replayed events do not show, for a GPU whose allocator counted ``peak`` bytes."""
    if ledger is None:
        return ("which op allocated what: ops=False",)
    off = ledger.peak - peak
    if abs(off) <= UNTOLD * peak:
        return ()
    return (
        f"exactly which ops hold the peak: by the events of torch's profiler it is {size_text(abs(off))} "
        f"{'more' if off > 0 else 'less'} than by its allocator, because some frees are missing from the events",
    )


def _reset_resident_peak() -> bool:
    """Resets the kernel's record of this process's peak memory, which Linux does on request. Returns whether it succeeded."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
