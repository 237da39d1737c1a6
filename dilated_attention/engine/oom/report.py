"""Explains a call that ran out of memory: what it needs, what there is, and the one setting that would fit."""

from __future__ import annotations

import bisect
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilated_attention.engine.oom.requirement import MemoryRequirement, size_text

# estimates count tensors, but kernels need a little more, and the allocator rounds blocks up
MARGIN = 0.95


class MemoryInfo(NamedTuple):
    """Memory in bytes: what is free (None if unknown) up to a bound, what tensors (on a CPU, the process) hold, what torch has cached."""

    free: int | None
    bound: str
    allocated: int
    cached: int = 0


def memory_info(device: torch.device) -> MemoryInfo:
    """Returns the current figures. For a GPU this calls the driver, so use it for reports and not in every call of an op."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        limit = f"this process is allowed {size_text(allowed)}, torch.cuda.set_per_process_memory_fraction"
        free, bound = min((free, "the driver's figure"), (max(0, allowed - reserved), limit))
        return MemoryInfo(free, bound, allocated, reserved - allocated)
    found = machine_memory()
    if "MemAvailable" not in found:
        return MemoryInfo(None, "the system does not report it", found.get("VmRSS", 0))
    # a module of systems with these figures alone
    import resource

    bounds, allowed = [(found["MemAvailable"], "available on the machine")], resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY:
        bounds.append((max(0, allowed - found["VmSize"]), f"the limit of {size_text(allowed)} of address space, RLIMIT_AS"))
    return MemoryInfo(*min(bounds), found["VmRSS"])


def machine_memory() -> dict[str, int]:
    """Returns what Linux says of this process's and the machine's memory, such as VmRSS and MemTotal, in bytes; {} on other systems."""
    files = [file for file in (Path("/proc/self/status"), Path("/proc/meminfo")) if file.exists()]
    rows = [line.split() for file in files for line in file.read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def allocator_settings() -> str:
    """Returns the settings of torch's allocator in the environment, under any of the variable's names."""
    return ",".join(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF", "") for kind in ("", "CUDA_", "HIP_")).strip(",")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator of torch raised the error; the one for CPUs has no type of its own. False for one that is explained already."""
    of_cpu = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    return error.__cause__ is None and (of_cpu or isinstance(error, torch.OutOfMemoryError))


def explanation(error: RuntimeError, requirement: MemoryRequirement, arguments: Mapping[str, Any]) -> str:
    """Returns what the call needs, what there is, and the setting that would fit, with torch's own words at the end."""
    memory = memory_info(requirement.device)
    held = "the process has" if requirement.device.type == "cpu" else f"{size_text(memory.cached)} are cached, tensors hold"
    free = "unknown" if memory.free is None else size_text(memory.free)
    lines = [f"the {requirement.pass_name} of {requirement.op} ran out of memory", f"  call: {requirement.shapes}"]
    if requirement.terms is not None:
        terms = ", ".join(f"{what} {size_text(size)}" for what, size in requirement.terms(requirement.setting))
        lines.append(f"  needs: {requirement.size_text()}: {terms}; of that {size_text(requirement.held)} existed before the call")
    lines.append(f"  memory: {requirement.device}: {held} {size_text(memory.allocated)}, free: {free} ({memory.bound})")
    if requirement.terms is not None and memory.free is not None:
        # the call's own tensors count as free: their size changes with the setting, or they are gone with the failed call
        own = requirement.held + _allocated(error, arguments, requirement.device)
        lines.append(f"  would fit: {what_fits(requirement, memory, own)}")
    return "\n".join([*lines, f"  torch: {str(error).strip()}"])


def what_fits(requirement: MemoryRequirement, memory: MemoryInfo, own: int) -> str:
    """Returns the setting closest to the call's that fits into what is free, with the call's ``own`` bytes free again."""
    assert memory.free is not None
    there = int(MARGIN * (memory.free + memory.cached + own))
    in_pieces = memory.cached > memory.free and "expandable_segments:True" not in allocator_settings()
    if in_pieces and requirement.bytes_at() <= there:
        return "this call, with PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: the cached memory is in pieces"
    now, after = requirement.setting, ", after torch.cuda.empty_cache()" if requirement.device.type == "cuda" else ""
    lengths = range(0, now.length, max(1, now.length // 256))[1:] if requirement.positions else range(0)
    for name, sizes, what in (("batch", range(1, now.batch), "sequences at once"), ("length", lengths, requirement.positions)):
        changes = [{name: size} for size in sizes]
        if number := bisect.bisect_right(changes, there, key=lambda change: requirement.bytes_at(**change)):
            found = changes[number - 1]
            return f"{found[name]:,} in place of {getattr(now, name):,} {what}: {requirement.size_text(**found)}{after}"
    return f"no part of this call, while other tensors hold {size_text(max(0, memory.allocated - own))}: free some of that"


def _allocated(error: BaseException, arguments: Mapping[str, Any], device: torch.device) -> int:
    """Returns the bytes of the tensors that the failed call's functions had made and hold in variables."""
    # the first frame is the caller's, which is still running
    frames = traceback.walk_tb(error.__traceback__ and error.__traceback__.tb_next)
    found = [x for frame, _ in frames for x in frame.f_locals.values() if isinstance(x, torch.Tensor) and x.device == device]
    given = {x.untyped_storage().data_ptr() for x in arguments.values() if isinstance(x, torch.Tensor)}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
    return sum(size for pointer, size in sizes.items() if pointer not in given)
