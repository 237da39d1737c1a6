"""Reports how much memory a device has, who holds it, and what is left.

The figures come from torch's allocator and the driver for a GPU, and from the operating system's kernel for a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """The current state of a device's memory, in bytes.

    Args:
        device: name such as ``"cuda:0"``.
        total: memory of the device, or of the machine for a CPU.
        free: what this process may still take from the device or from the system; None if the system does not report it.
        allocated: memory of tensors; for a CPU, what the process has in memory.
        reserved: memory of torch's allocator, including what it caches; for a CPU, the same as ``allocated``.
        bound: description of what limits ``free``.
    """

    device: str
    total: int
    free: int | None
    allocated: int
    reserved: int
    bound: str

    @property
    def left(self) -> int | None:
        """Bytes that tensors may still take, provided that they can use what the allocator caches."""
        return None if self.free is None else self.free + self.reserved - self.allocated

    def __str__(self) -> str:
        free = "unknown" if self.free is None else size_text(self.free)
        if self.device == "cpu":
            return f"cpu: the process has {size_text(self.allocated)} in memory, and may take {free} more ({self.bound})"
        kept = f"tensors hold {size_text(self.allocated)} of {size_text(self.reserved)} that torch has reserved"
        return f"{self.device}: {kept}; {free} more are free of {size_text(self.total)} ({self.bound})"


def memory_info(device: torch.device) -> MemoryInfo:
    """Returns the current figures. For a GPU this calls the driver, so use it for reports and not in every call of an op."""
    return _gpu_memory(device) if device.type == "cuda" else _cpu_memory()


def size_text(size: float) -> str:
    """ "1.50 GiB": in the largest unit of which there is at least one."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} bytes" if unit == 0 else f"{size:,.2f} {_UNITS[unit]}"


def _gpu_memory(device: torch.device) -> MemoryInfo:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    allocated, reserved = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
    bound = "the driver's figure"
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    if allowed - reserved < free:
        free, bound = (
            max(0, allowed - reserved),
            f"this process is allowed {size_text(allowed)}, torch.cuda.set_per_process_memory_fraction",
        )
    return MemoryInfo(device=f"cuda:{index}", total=total, free=free, allocated=allocated, reserved=reserved, bound=bound)


def _cpu_memory() -> MemoryInfo:
    status, machine = _table("/proc/self/status"), _table("/proc/meminfo")
    resident, total = status.get("VmRSS", 0), machine.get("MemTotal", 0)
    bounds = [(machine["MemAvailable"], "available on the machine")] if "MemAvailable" in machine else []
    if sys.platform == "linux":
        import resource

        for name, limit, used in (
            ("address space, RLIMIT_AS", resource.RLIMIT_AS, status.get("VmSize", 0)),
            ("data, RLIMIT_DATA", resource.RLIMIT_DATA, status.get("VmData", 0)),
        ):
            soft = resource.getrlimit(limit)[0]
            if soft != resource.RLIM_INFINITY:
                bounds.append((max(0, soft - used), f"the limit of {size_text(soft)} of {name}"))
        bounds += _of_container()
    free, bound = min(bounds, default=(None, "the system does not report it"))
    return MemoryInfo(device="cpu", total=total, free=free, allocated=resident, reserved=resident, bound=bound)


def _of_container() -> list[tuple[int, str]]:
    """Returns what is left of each memory limit of a control group (v2), counting file pages that the kernel may drop as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines()).get("inactive_file", "0")
    except OSError:
        return []
    if not limit.isdigit():
        return []
    return [(max(0, int(limit) - int(used) + int(files)), f"the limit of {size_text(int(limit))} of the control group")]


def _table(path: str) -> dict[str, int]:
    """Parses lines such as "Name:   123 kB" into bytes; returns an empty dictionary if the system has no such file."""
    try:
        text = Path(path).read_text()
    except OSError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
