"""The results of a memory profile: figures of the allocator, and of each op."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dilated_attention.engine.oom.device_memory import size_text
from dilated_attention.engine.oom.requirement import Need

# rows of the printed table; ``ops`` contains all
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemory:
    """What all calls of one op allocated, in bytes; allocations of nested ops count towards the outermost op.

    Args:
        name: such as ``"aten::mm"``; with "(backward)" where autograd called it.
        calls: number of calls that allocated or freed anything.
        allocated: by all calls together, whether freed since or not.
        largest: the largest single allocation.
        peak: the most bytes of one call's own allocations alive at once.
        kept: the most bytes of one call's own allocations alive at its end: results, and what is saved for the backward.
        at_peak: bytes alive when the whole profile was at its peak.
        inner: (name, bytes) allocated by the ops that it called, largest first.
    """

    name: str
    calls: int
    allocated: int
    largest: int
    peak: int
    kept: int
    at_peak: int
    inner: tuple[tuple[str, int], ...] = ()

    @property
    def scratch(self) -> int:
        """Returns the bytes of one call beyond what it leaves allocated."""
        return max(0, self.peak - self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """Calls of one of this library's functions with equal shapes: how many, and what each needs by the engine's estimate."""

    count: int
    need: Need


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Memory of a block of code on one device, in bytes. ``str()`` prints it, ``as_dict()`` is for JSON, ``advice()`` says what would help.

    Args:
        device: as text.
        hardware: its name.
        seconds: duration of the block, including the measurement.
        peak_allocated: most bytes in tensors at once. On a CPU, only of what the block allocated; None where ``ops=False``.
        allocated_before, allocated_after: bytes in tensors; on a CPU 0 before.
        peak_reserved, reserved_before, reserved_after: bytes that PyTorch's allocator had reserved on the GPU. None on a CPU, like all of
            the following up to ``device_frees``.
        inactive_split, peak_inactive_split: unused reserved bytes in blocks whose other parts are in use, at the end and at most.
        retries: number of times that the GPU ran out of memory and cached memory was released; each waits for the GPU.
        refused: number of out-of-memory errors.
        device_allocs, device_frees: number of allocations and frees on the GPU itself, which are slow.
        allocator: the allocator's settings in the environment, "" for none.
        resident_before, resident_peak: on a CPU, the resident memory of the process. None on a GPU, or where the system does not report it.
        total: memory of the device; for a CPU, the machine's.
        ops: by op, those with the most bytes alive at the peak first; () where ``ops=False``.
        seen: calls of this library's own functions.
        snapshot: file for PyTorch's memory viewer.
        cannot_tell: what this device provides no figures for.
    """

    device: str
    hardware: str
    seconds: float
    peak_allocated: int | None
    allocated_before: int
    allocated_after: int
    peak_reserved: int | None = None
    reserved_before: int | None = None
    reserved_after: int | None = None
    inactive_split: int | None = None
    peak_inactive_split: int | None = None
    retries: int | None = None
    refused: int | None = None
    device_allocs: int | None = None
    device_frees: int | None = None
    allocator: str = ""
    resident_before: int | None = None
    resident_peak: int | None = None
    total: int = 0
    ops: tuple[OpMemory, ...] = ()
    seen: tuple[SeenCall, ...] = dataclasses.field(default=(), repr=False)
    snapshot: str | None = None
    cannot_tell: tuple[str, ...] = ()

    @property
    def fragmentation(self) -> float | None:
        """Returns the peak of reserved memory divided by that of allocated memory; 1 is the minimum. None on a CPU."""
        if self.peak_reserved is None or not self.peak_allocated:
            return None
        return self.peak_reserved / self.peak_allocated

    def op(self, name: str) -> OpMemory:
        """Returns the figures of one op.

        Raises:
            KeyError: it allocated nothing; the message lists the ops that did.
        """
        for found in self.ops:
            if found.name == name:
                return found
        raise KeyError(f"{name!r} allocated nothing in this profile; what did: {', '.join(found.name for found in self.ops)}")

    def advice(self) -> list[str]:
        """Returns advice on what would need less memory, each with its reason and the measured figures; [] where none applies."""
        from dilated_attention.profiling.advice import advice_of

        return advice_of(self)

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as plain numbers, strings, lists and dicts."""
        found = {
            name.name: getattr(self, name.name) for name in dataclasses.fields(self) if name.name not in ("ops", "seen", "cannot_tell")
        }
        found["fragmentation"] = self.fragmentation
        found["ops"] = [{**dataclasses.asdict(op), "scratch": op.scratch, "inner": dict(op.inner)} for op in self.ops]
        found["seen"] = [{"op": x.need.op, "pass": x.need.pass_name, "call": x.need.shapes, "count": x.count} for x in self.seen]
        found["cannot_tell"] = list(self.cannot_tell)
        found["advice"] = self.advice()
        return found

    def __str__(self) -> str:
        lines = [f"memory of {self.device} ({self.hardware}), {self.seconds:.2f} s"]
        if self.peak_allocated is not None:
            reserved = (
                ""
                if self.peak_reserved is None
                else f", {size_text(self.peak_reserved)} reserved: {self.fragmentation or 0:.2f} times as much"
            )
            lines.append(f"  at the peak    {size_text(self.peak_allocated)} in tensors{reserved}")
        lines.append(f"  before, after  {size_text(self.allocated_before)}, {size_text(self.allocated_after)} in tensors")
        if self.inactive_split is not None and self.peak_inactive_split is not None:
            split = f"{size_text(self.inactive_split)} at the end, {size_text(self.peak_inactive_split)} at most"
            lines.append(f"  unused pieces  {split}, beside pieces of the same block that are in use")
            lines.append(f"  the allocator  asked the GPU {self.device_allocs} times, retried {self.retries}, was refused {self.refused}")
        if self.resident_peak is not None and self.resident_before is not None:
            lines.append(f"  the process    had {size_text(self.resident_before)} in memory, {size_text(self.resident_peak)} at most")
        if self.ops:
            lines += _table(self.ops)
        lines += [f"  cannot tell    {what}" for what in self.cannot_tell]
        if self.snapshot is not None:
            lines.append(f"  snapshot       python -m torch.cuda._memory_viz trace_plot {self.snapshot} -o snapshot.html")
        return "\n".join(lines)


def _table(ops: tuple[OpMemory, ...]) -> list[str]:
    heads = ("calls", "allocated", "largest", "a call's most", "it leaves", "at the peak")
    width = max(len(op.name) for op in ops[:_SHOWN])
    lines = [f"  {'op':<{width}}  {heads[0]:>6}" + "".join(f"  {head:>13}" for head in heads[1:])]
    for op in ops[:_SHOWN]:
        sizes = (op.allocated, op.largest, op.peak, op.kept, op.at_peak)
        lines.append(f"  {op.name:<{width}}  {op.calls:>6}" + "".join(f"  {size_text(size):>13}" for size in sizes))
    if len(ops) > _SHOWN:
        lines.append(f"  and {len(ops) - _SHOWN} more that allocated {size_text(sum(op.allocated for op in ops[_SHOWN:]))}")
    return lines
