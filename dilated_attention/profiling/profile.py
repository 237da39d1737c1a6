"""What a profile of memory says: figures of the allocator, and of each op."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dilated_attention.engine.need import Need
from dilated_attention.engine.room import size_text

# rows of the table that is printed; ``ops`` has all
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemory:
    """What all calls of one op allocated, in bytes; of ops inside an op the outermost counts.

    Args:
        name: such as ``"aten::mm"``; with "(backward)" where autograd called it.
        calls: that allocated, or freed, anything.
        allocated: by all calls together, whether freed since or not.
        largest: the largest single allocation.
        peak: most of one call's own allocations alive at once.
        kept: most of one call's own allocations alive at its end: results, and what is saved for the backward.
        at_peak: alive when the whole profile was at its highest.
        inner: (name, bytes) allocated by the ops that it called, most first.
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
        """Bytes of one call beyond what it leaves behind."""
        return max(0, self.peak - self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """Calls of one of this library's functions with equal shapes: how often, and what each needs by the engine's account."""

    count: int
    need: Need


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Memory of a block of code on one device, in bytes. ``str()`` prints it, ``as_dict()`` is for JSON, ``advice()`` says what would help.

    Args:
        device: as text.
        hardware: its name.
        seconds: that the block took, measuring included.
        peak_allocated: most bytes in tensors at once. On a CPU, of what was allocated in the block; None where ``ops=False``.
        allocated_before, allocated_after: bytes in tensors; on a CPU 0 before.
        peak_reserved, reserved_before, reserved_after: what torch's allocator had taken from the GPU. None on a CPU, as all of the following.
        inactive_split, peak_inactive_split: reserved bytes in pieces of blocks whose other pieces are in use, at the end and at most.
        retries: times that the GPU had nothing left and cached memory was given back; each waits for the GPU.
        refused: out-of-memory errors.
        device_allocs, device_frees: calls of the GPU for memory, which are slow.
        allocator: the allocator's settings in the environment, "" for none.
        resident_before, resident_peak: of a CPU, what the process had in memory. None on a GPU, or where the system does not tell.
        total: memory of the device; of a CPU, the machine's.
        ops: by op, most alive at the peak first; () where ``ops=False``.
        seen: this library's own calls.
        snapshot: file for PyTorch's memory viewer.
        cannot_tell: what this device gives no figure of.
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
        """Most that was reserved over most that tensors held; 1 is the least. None on a CPU."""
        if self.peak_reserved is None or not self.peak_allocated:
            return None
        return self.peak_reserved / self.peak_allocated

    def op(self, name: str) -> OpMemory:
        """The figures of one op.

        Raises:
            KeyError: it allocated nothing; with the names that did.
        """
        for found in self.ops:
            if found.name == name:
                return found
        raise KeyError(f"{name!r} allocated nothing in this profile; what did: {', '.join(found.name for found in self.ops)}")

    def advice(self) -> list[str]:
        """What would need less memory, each with its reason and the figures that were measured; [] where nothing applies."""
        from dilated_attention.profiling.advice import advice_of

        return advice_of(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
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
