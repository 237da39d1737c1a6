"""The results of a memory profile: figures of the allocator and of each op, and advice, which is given only where figures support it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from dilated_attention.engine.oom.requirement import MemoryRequirement, size_text
from dilated_attention.profiling.ledger import OUTSIDE, OpMemory

# rows of the printed table; ``ops`` contains all
_SHOWN = 12
# ratio of reserved to allocated memory from which fragmentation is reported; share of the peak from which an item is
FRAGMENTED, SHARE = 1.2, 0.1
_BACKWARD = ("_backward", "(backward)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Memory of a block of code on one device, in bytes. ``str()`` prints it, ``as_dict()`` is for JSON, ``advice()`` says what would help.

    Args:
        seconds: duration of the block, including the measurement.
        peak_allocated: most bytes in tensors at once. On a CPU, only of what the block allocated.
        allocated_before, allocated_after: bytes in tensors; on a CPU 0 before.
        peak_reserved, reserved_before, reserved_after: bytes that PyTorch's allocator had reserved on the GPU. None on a CPU, like all of
            the following up to ``device_frees``.
        inactive_split, peak_inactive_split: unused reserved bytes in blocks whose other parts are in use, at the end and at most.
        retries, refused: how often the GPU was full: cached memory was released, which waits for the GPU; it did not help.
        device_allocs, device_frees: number of allocations and frees on the GPU itself, which are slow.
        allocator: the allocator's settings in the environment, "" for none.
        resident_before, resident_peak: on a CPU, the resident memory of the process. None on a GPU, or where the system does not report it.
        total: memory of the device; for a CPU, the machine's.
        ops: by op, those with the most bytes alive at the peak first; () where ``ops=False``.
        seen: calls of this library's own functions with equal shapes: what each needs by the engine's estimate, and how many there were.
        snapshot: file for PyTorch's memory viewer.
        cannot_tell: what this device provides no figures for.
    """

    device: str
    hardware: str
    seconds: float
    peak_allocated: int
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
    seen: tuple[tuple[MemoryRequirement, int], ...] = dataclasses.field(default=(), repr=False)
    snapshot: str | None = None
    cannot_tell: tuple[str, ...] = ()

    @property
    def fragmentation(self) -> float | None:
        """Returns the peak of reserved memory divided by that of allocated memory; 1 is the minimum. None on a CPU."""
        return self.peak_reserved / self.peak_allocated if self.peak_reserved and self.peak_allocated else None

    def op(self, name: str) -> OpMemory:
        """Returns the figures of one op. Raises KeyError if it allocated nothing; the message lists the ops that did."""
        found = {op.name: op for op in self.ops}
        if name not in found:
            raise KeyError(f"{name!r} allocated nothing in this profile; these ops did: {', '.join(found)}")
        return found[name]

    def advice(self) -> list[str]:
        """Returns advice on what would need less memory, each with its reason and the measured figures; [] where none applies."""
        return list(_advice(self))

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as plain numbers, strings, lists and dicts."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found |= {"fragmentation": self.fragmentation, "cannot_tell": list(self.cannot_tell), "advice": self.advice()}
        found["ops"] = [{**dataclasses.asdict(op), "scratch": op.scratch, "inner": dict(op.inner)} for op in self.ops]
        found["seen"] = [{"op": call.op, "pass": call.pass_name, "call": call.shapes, "count": count} for call, count in self.seen]
        return found

    def __str__(self) -> str:
        lines = [f"memory of {self.device} ({self.hardware}), {self.seconds:.2f} s"]
        reserved = f", {size_text(self.peak_reserved or 0)} reserved: {self.fragmentation:.2f} times as much" if self.fragmentation else ""
        lines.append(f"  at the peak    {size_text(self.peak_allocated)} in tensors{reserved}")
        lines.append(f"  before, after  {size_text(self.allocated_before)}, {size_text(self.allocated_after)} in tensors")
        if self.inactive_split is not None:
            lines.append(
                f"  unused pieces  {size_text(self.inactive_split)} at the end, {size_text(self.peak_inactive_split or 0)} at most"
            )
            lines.append(f"  the allocator  asked the GPU {self.device_allocs} times, retried {self.retries}, was refused {self.refused}")
        if self.resident_before is not None:
            lines.append(f"  the process    had {size_text(self.resident_before)} in memory, {size_text(self.resident_peak or 0)} at most")
        width = max((len(op.name) for op in self.ops[:_SHOWN]), default=0)
        rows = [(op.name, op.calls, op.allocated, op.largest, op.peak, op.kept, op.at_peak) for op in self.ops[:_SHOWN]]
        heads = [f"{head:>13}" for head in ("allocated", "largest", "a call's most", "it leaves", "at the peak")]
        lines += [f"  {'op':<{width}}  {'calls':>6}  {'  '.join(heads)}"] if rows else []
        lines += [f"  {name:<{width}}  {calls:>6}  {'  '.join(f'{size_text(size):>13}' for size in sizes)}" for name, calls, *sizes in rows]
        if rest := self.ops[_SHOWN:]:
            lines.append(f"  and {len(rest)} more that allocated {size_text(sum(op.allocated for op in rest))}")
        lines += [f"  cannot tell    {what}" for what in self.cannot_tell]
        if self.snapshot is not None:
            lines.append(f"  snapshot       python -m torch.cuda._memory_viz trace_plot {self.snapshot} -o snapshot.html")
        return "\n".join(lines)


def _advice(profile: MemoryProfile) -> Iterator[str]:
    """Yields sentences of advice, generally the most effective first."""
    peak, threshold = size_text(profile.peak_allocated), SHARE * profile.peak_allocated
    ratio = profile.fragmentation or 0
    if ratio > FRAGMENTED and "expandable_segments:True" in profile.allocator:
        yield f"torch.cuda.empty_cache() between phases: {ratio:.2f} times {peak} were reserved, with expandable_segments on already"
    elif ratio > FRAGMENTED:
        yield (
            f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before the program starts: {ratio:.2f} times as much was "
            f"reserved, {size_text(profile.peak_reserved or 0)} for {peak} in tensors. On an H200 it lowered this ratio from 3.03-4.09 to "
            "1.01-1.16 for 200 random lengths of every attention; with torch's default setting, the longest length first gives 1.01-1.33"
        )
    if profile.retries:
        yield f"a smaller batch or length, for speed too: the GPU was full {profile.retries} times, and each time waited to release memory"
    has_backward = any(op.name.endswith(_BACKWARD) for op in profile.ops)
    recomputed = any(op.name.startswith("dilated_attention::") and op.name.endswith(" (backward)") for op in profile.ops)
    waiting = sum(op.at_peak for op in profile.ops if not op.name.endswith(_BACKWARD) and op.name != OUTSIDE)
    forwards = sum(count for call, count in profile.seen if call.needs_grad and call.pass_name == "forward")
    backwards = sum(count for call, count in profile.seen if call.pass_name == "backward")
    share = f"{size_text(waiting)} of {peak} at the peak are results of forwards"
    if waiting >= threshold and forwards and not has_backward:
        yield f"torch.no_grad() or torch.inference_mode() if no backward follows: {forwards} attention calls prepared for one, and {share}"
    if waiting >= threshold and backwards >= 2 and not recomputed:
        yield (
            f"checkpoint_activations=True of the models, or torch.utils.checkpoint around each block: {share} that wait for a backward; "
            f"with checkpoints: about {size_text(waiting / backwards)} for one block, and the blocks' inputs"
        )
    calls = [call for call, _ in profile.seen if call.terms is not None]
    largest = max(calls, key=lambda call: call.bytes_at(), default=None)
    if largest is None:
        return
    needs = f"{largest.op} with {largest.shapes} needs {size_text(largest.bytes_at())}"
    if largest.setting.dtype.itemsize > 2 and largest.bytes_at() - (half := largest.bytes_at(dtype=torch.bfloat16)) >= threshold:
        dtype = str(largest.setting.dtype).removeprefix("torch.")
        yield f"bfloat16 in place of {dtype}, by torch.autocast or .to(torch.bfloat16): {needs}, and {size_text(half)} in bfloat16"
    if largest.device.type == "cuda" and 2 * largest.bytes_at() >= profile.total:
        yield f"a ring over several GPUs (docs/ring.md): {needs} of {size_text(profile.total)}"
