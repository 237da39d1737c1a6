"""The results of a memory profile: figures of the allocator and of each op, and advice on what would need less memory.

Each rule of the advice applies only where the figures support it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.engine.branches.chunking import TRANSIENT_BYTES, TRANSIENT_SHARE
from dilated_attention.engine.branches.launch_views import PART_BYTES
from dilated_attention.engine.oom.device_memory import size_text
from dilated_attention.engine.oom.requirement import MemoryRequirement, dtype_text
from dilated_attention.profiling.ledger import OUTSIDE, OpMemory

# rows of the printed table; ``ops`` contains all
_SHOWN = 12
# ratio of reserved to allocated memory from which fragmentation is reported
FRAGMENTED = 1.2
# share of the peak from which an item is reported
SHARE = 0.1
# share of a GPU's memory from which distributing one call over several GPUs is suggested
MOST_OF_A_GPU = 0.5
OURS = "dilated_attention::"
_BACKWARD = ("_backward", "(backward)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """Calls of one of this library's functions with equal shapes: how many, and what each needs by the engine's estimate."""

    count: int
    requirement: MemoryRequirement


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
        raise KeyError(f"{name!r} allocated nothing in this profile; these ops did: {', '.join(found.name for found in self.ops)}")

    def advice(self) -> list[str]:
        """Returns advice on what would need less memory, each with its reason and the measured figures; [] where none applies."""
        return _advice(self)

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as plain numbers, strings, lists and dicts."""
        found = {
            name.name: getattr(self, name.name) for name in dataclasses.fields(self) if name.name not in ("ops", "seen", "cannot_tell")
        }
        found["fragmentation"] = self.fragmentation
        found["ops"] = [{**dataclasses.asdict(op), "scratch": op.scratch, "inner": dict(op.inner)} for op in self.ops]
        found["seen"] = [
            {"op": x.requirement.op, "pass": x.requirement.pass_name, "call": x.requirement.shapes, "count": x.count} for x in self.seen
        ]
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


def _advice(profile: MemoryProfile) -> list[str]:
    """Returns sentences of advice, generally the most effective first; [] where none applies."""
    rules = (_fragmentation, _retries, _no_backward, _activations, _dtype, _detached, _lse_gradient, _chunks, _ring)
    return [text for rule in rules for text in rule(profile)]


def _fragmentation(profile: MemoryProfile) -> Iterator[str]:
    if profile.fragmentation is None or profile.fragmentation <= FRAGMENTED:
        return
    figures = (
        f"{_text(profile.peak_reserved)} were reserved for {_text(profile.peak_allocated)} in tensors, "
        f"{profile.fragmentation:.2f} times as much"
    )
    if "expandable_segments:True" in profile.allocator:
        yield f"torch.cuda.empty_cache() between phases of different streams or sizes: {figures}, with expandable_segments on already"
    else:
        yield (
            f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before the program starts: {figures}, because freed blocks "
            "of one size do not fit others. On an H200 it lowered this ratio from 3.03-4.09 to 1.01-1.16 for 200 random lengths of every "
            "attention; with torch's default setting, running the longest length first gives 1.01-1.33"
        )


def _retries(profile: MemoryProfile) -> Iterator[str]:
    if profile.retries:
        yield (
            "a smaller batch or length, or any other way below, for speed too: "
            f"the GPU was full {profile.retries} times, and each time cached memory was released, which waits for the GPU"
        )


def _no_backward(profile: MemoryProfile) -> Iterator[str]:
    """Forwards that keep what their backward needs, although no backward follows."""
    asked = [seen for seen in profile.seen if seen.requirement.needs_grad and not seen.requirement.is_backward]
    kept = _waiting(profile)
    if asked and not _has_backward(profile) and kept >= SHARE * _peak(profile):
        yield (
            "torch.no_grad() or torch.inference_mode() if no backward follows: "
            f"{sum(seen.count for seen in asked)} attention calls prepared for a backward, "
            f"and {size_text(kept)} of {size_text(_peak(profile))} at the peak are results of forwards"
        )


def _activations(profile: MemoryProfile) -> Iterator[str]:
    """Forward results at the peak of a training step; not reported where they are recomputed already."""
    kept = _waiting(profile)
    calls = sum(seen.count for seen in profile.seen if seen.requirement.is_backward)
    again = any(op.name.startswith(OURS) and op.name.endswith(" (backward)") for op in profile.ops)
    if calls >= 2 and not again and kept >= SHARE * _peak(profile):
        yield (
            "checkpoint_activations=True of the models, or torch.utils.checkpoint around each block: "
            f"{size_text(kept)} of {size_text(_peak(profile))} at the peak are results of forwards that wait for their backward, "
            f"from {calls} attention calls; with checkpoints: about {size_text(kept / calls)} for one block, and the blocks' inputs"
        )


def _dtype(profile: MemoryProfile) -> Iterator[str]:
    requirement = _largest(profile, lambda requirement: requirement.setting.dtype.itemsize > 2 and requirement.can_shorten)
    if requirement is None:
        return
    now, then = requirement.bytes_at(requirement.setting), requirement.bytes_at(replace(requirement.setting, dtype=torch.bfloat16))
    if now - then >= SHARE * _peak(profile):
        yield (
            f"bfloat16 in place of {dtype_text(requirement.setting.dtype)}, by torch.autocast or .to(torch.bfloat16): {requirement.op} "
            f"with {requirement.shapes} needs {size_text(then)} in place of {size_text(now)}, and still sums in float32"
        )


def _detached(profile: MemoryProfile) -> Iterator[str]:
    requirement = _largest(profile, lambda requirement: requirement.setting.detached)
    if requirement is None:
        return
    saved = requirement.bytes_at(requirement.setting) - requirement.bytes_at(replace(requirement.setting, detached=False))
    if saved >= SHARE * _peak(profile):
        yield (
            'mixture_grad="exact" in place of "detached" where TorchScale\'s gradient is not needed: '
            f"{requirement.op} keeps {size_text(saved)} less"
        )


def _lse_gradient(profile: MemoryProfile) -> Iterator[str]:
    for seen in profile.seen:
        op = seen.requirement.op
        scratch = _scratch(profile, f"{OURS}{op}_backward")
        if seen.requirement.lse_gradient and scratch >= SHARE * _peak(profile):
            yield (
                f"lse.detach() where lse is only inspected: {seen.count} backwards of {op} took {size_text(scratch)} besides results, "
                "and with a gradient through lse most kernels run a second time on tensors as large as q, k and v"
            )


def _chunks(profile: MemoryProfile) -> Iterator[str]:
    """Memory that this library's ops allocate and free within a call; two constants of the engine limit it."""
    found = max((op for op in profile.ops if op.name.startswith(OURS)), key=lambda op: op.scratch, default=None)
    limit = PART_BYTES["cpu"] if profile.device == "cpu" else TRANSIENT_BYTES
    if found is None or found.scratch < max(limit // 2, SHARE * _peak(profile)):
        return
    took = (
        f"{found.name.removeprefix(OURS)} took {size_text(found.scratch)} in a call besides its results, "
        "for results of launches that wait to be merged"
    )
    if profile.device == "cpu":
        yield (
            f'dilated_attention.engine.branches.launch_views.PART_BYTES["cpu"] below its {size_text(limit)}: {took}; '
            "smaller launches cost time"
        )
    else:
        yield (
            f"dilated_attention.engine.branches.chunking.TRANSIENT_BYTES below its {size_text(limit)} "
            f"(or TRANSIENT_SHARE below {TRANSIENT_SHARE:.0%} of q, k and v, if that is more): {took}; smaller chunks mean more launches"
        )


def _ring(profile: MemoryProfile) -> Iterator[str]:
    """A single call that takes most of a GPU: over how many GPUs it would take half as much of each."""
    requirement = _largest(profile, lambda requirement: requirement.device.type == "cuda")
    if requirement is not None and requirement.bytes_at(requirement.setting) >= MOST_OF_A_GPU * profile.total:
        for way in requirement.suggestions:
            yield from (
                f"{text}, in place of {size_text(requirement.bytes_at(requirement.setting))} on one"
                for text in way(requirement.bytes_at(requirement.setting) // 2)
            )


def _largest(profile: MemoryProfile, applies: Callable[[MemoryRequirement], bool]) -> MemoryRequirement | None:
    """Returns the call that needs the most memory, among those whose requirement is known."""
    requirements = [seen.requirement for seen in profile.seen if seen.requirement.terms is not None and applies(seen.requirement)]
    return max(requirements, key=lambda requirement: requirement.bytes_at(requirement.setting), default=None)


def _waiting(profile: MemoryProfile) -> int:
    """Returns the bytes at the peak that forwards had allocated."""
    return sum(op.at_peak for op in profile.ops if not op.name.endswith(_BACKWARD) and op.name != OUTSIDE)


def _has_backward(profile: MemoryProfile) -> bool:
    return any(op.name.endswith(_BACKWARD) for op in profile.ops)


def _scratch(profile: MemoryProfile, name: str) -> int:
    return max((op.scratch for op in profile.ops if op.name == name), default=0)


def _peak(profile: MemoryProfile) -> int:
    return profile.peak_allocated or 0


def _text(size: int | None) -> str:
    return size_text(size or 0)
