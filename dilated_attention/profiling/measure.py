"""``profile_memory``: measures where a block of code, or a call, uses memory, and advises where the figures support it."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch

from dilated_attention.engine.oom.report import allocator_settings
from dilated_attention.engine.oom.requirement import MemoryRequirement, size_text
from dilated_attention.engine.ops.op_hooks import watchers
from dilated_attention.profiling.ledger import OUTSIDE, OpMemory, replay

# names in MemoryProfile.stats, and in torch.cuda.memory_stats
_COUNTERS = {"retries": "num_alloc_retries", "refused": "num_ooms", "device_allocs": "num_device_alloc", "device_frees": "num_device_free"}
# rows of the printed table; ``ops`` contains all
_SHOWN = 12
# ratio of reserved to allocated memory from which it is advised against; shares of the peak from which results of forwards are, and from
# which a difference between the replayed events and the allocator's peak is printed
_FRAGMENTED, _WAITING, _MISSED = 1.2, 0.1, 0.01
_BACKWARD = ("_backward", "(backward)")


class MemoryProfile:
    """Memory of a block of code on one device, in bytes. ``str()`` prints it, ``as_dict()`` is for JSON, ``advice()`` says what would help.

    ``profile_memory`` makes it. It is the context manager of its block, and has its figures once the block has ended, even by an error.

    Attributes:
        peak_allocated: most bytes in tensors at once. On a CPU, only of what the block allocated.
        allocated_before, allocated_after: bytes in tensors; on a CPU 0 before.
        peak_reserved: most bytes that PyTorch's allocator had reserved on the GPU. None on a CPU, whose malloc does not report it.
        stats: on a GPU, how often it was full so that cached memory was released (``retries``, each waits for the GPU) and that did not
            help (``refused``); allocations and frees on the GPU itself, which are slow (``device_allocs``, ``device_frees``). {} on a CPU.
        ops: by op, those with the most bytes alive at the peak first; () where ``ops=False``.
        seen: calls of this library's own functions with equal shapes: what each needs by the engine's estimate, and how many there were.
    """

    device: str
    peak_allocated: int
    allocated_before: int
    allocated_after: int
    peak_reserved: int | None
    stats: dict[str, int]
    ops: tuple[OpMemory, ...]
    seen: tuple[tuple[MemoryRequirement, int], ...]

    def __init__(self, device: torch.device, by_op: bool = True) -> None:
        self.device, self._device, self._by_op = str(device), device, by_op
        self._before: dict[str, int] = {}

    def __enter__(self) -> MemoryProfile:
        if self._by_op and torch._C._autograd._profiler_enabled():
            # otherwise PyTorch would silently end the profile that is running
            raise RuntimeError("torch.profiler is already running, and there can be only one; end it first, or on a GPU pass ops=False")
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_stats(self._device)
        self._calls: dict[tuple[object, ...], tuple[MemoryRequirement, int]] = {}
        watchers.append(self._watch)
        if self._by_op:
            self._profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Runs after an error, too: an out-of-memory error is a common reason to want a profile."""
        if self._by_op:
            self._profiler.__exit__(None, None, None)
        watchers.remove(self._watch)
        self.seen, self.ops, self.stats, self.peak_reserved = tuple(self._calls.values()), (), {}, None
        self.allocated_before = self._before.get("allocated_bytes.all.current", 0)
        if self._by_op:
            tree = self._profiler.profiler.kineto_results.experimental_event_tree()
            self.ops, self.peak_allocated, self.allocated_after = replay(tree, self._device, self.allocated_before)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            # the allocator's figures in place of the replayed ones
            after = torch.cuda.memory_stats(self._device)
            self.allocated_after, self.peak_allocated = after["allocated_bytes.all.current"], after["allocated_bytes.all.peak"]
            self.peak_reserved = after["reserved_bytes.all.peak"]
            self.stats = {name: after[counter] - self._before[counter] for name, counter in _COUNTERS.items()}

    def _watch(self, requirement: MemoryRequirement) -> None:
        if requirement.device.type == self._device.type:
            kind = (requirement.op, requirement.pass_name, requirement.shapes)
            self._calls[kind] = (requirement, self._calls.get(kind, (requirement, 0))[1] + 1)

    @property
    def fragmentation(self) -> float | None:
        """Returns the peak of reserved memory divided by that of allocated memory; 1 is the minimum. None on a CPU."""
        return self.peak_reserved / self.peak_allocated if self.peak_reserved and self.peak_allocated else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as plain numbers, strings, lists and dicts."""
        found = {name: getattr(self, name) for name in MemoryProfile.__annotations__}
        found |= {"fragmentation": self.fragmentation, "advice": self.advice()}
        found["ops"] = [dataclasses.asdict(op) for op in self.ops]
        found["seen"] = [{"op": call.op, "pass": call.pass_name, "call": call.shapes, "count": count} for call, count in self.seen]
        return found

    def __str__(self) -> str:
        reserved = f", {size_text(self.peak_reserved or 0)} reserved: {self.fragmentation:.2f} times as much" if self.fragmentation else ""
        lines = [
            f"memory of {self.device}",
            f"  at the peak    {size_text(self.peak_allocated)} in tensors{reserved}",
            f"  before, after  {size_text(self.allocated_before)}, {size_text(self.allocated_after)} in tensors",
        ]
        if self.stats:
            asked, retried, refused = (self.stats[name] for name in ("device_allocs", "retries", "refused"))
            lines.append(f"  the allocator  asked the GPU {asked} times, retried {retried}, was refused {refused}")
        width = max((len(op.name) for op in self.ops[:_SHOWN]), default=0)
        rows = [["op", "calls", "allocated", "a call's most", "it leaves", "at the peak"]] if self.ops else []
        rows += [[op.name, str(op.calls), *map(size_text, (op.allocated, op.peak, op.kept, op.at_peak))] for op in self.ops[:_SHOWN]]
        lines += [f"  {name:<{width}}  {calls:>6}  {'  '.join(f'{size:>13}' for size in sizes)}" for name, calls, *sizes in rows]
        if rest := self.ops[_SHOWN:]:
            lines.append(f"  and {len(rest)} more that allocated {size_text(sum(op.allocated for op in rest))}")
        missed = abs(self.peak_allocated - self.allocated_before - sum(op.at_peak for op in self.ops))
        if self.ops and missed > _MISSED * self.peak_allocated:
            lines.append(f"  the profiler   missed frees: the ops' figures at the peak are {size_text(missed)} off")
        return "\n".join(lines)

    def advice(self) -> list[str]:
        """Returns advice on what would need less memory, each with its reason and the measured figures; [] where none applies."""
        found, peak = [], size_text(self.peak_allocated)
        if (self.fragmentation or 0) > _FRAGMENTED and "expandable_segments:True" not in allocator_settings():
            found.append(
                f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before the program starts: {self.fragmentation:.2f} times "
                f"as much was reserved, {size_text(self.peak_reserved or 0)} for {peak} in tensors (docs/memory.md, Fragmentation)"
            )
        waiting = sum(op.at_peak for op in self.ops if not op.name.endswith(_BACKWARD) and op.name != OUTSIDE)
        if waiting < _WAITING * self.peak_allocated:
            return found
        share = f"{size_text(waiting)} of {peak} at the peak are results of forwards"
        forwards = sum(count for call, count in self.seen if call.needs_grad and call.pass_name == "forward")
        if forwards and not any(op.name.endswith(_BACKWARD) for op in self.ops):
            found.append(f"torch.no_grad() if no backward follows: {forwards} attention calls prepared for one, and {share}")
        backwards = sum(count for call, count in self.seen if call.pass_name == "backward")
        recomputed = any(op.name.startswith("dilated_attention::") and op.name.endswith(" (backward)") for op in self.ops)
        if backwards >= 2 and not recomputed:
            found.append(
                f"checkpoint_activations=True of the models, or torch.utils.checkpoint around each block: {share} that wait for a "
                f"backward; with checkpoints: about {size_text(waiting / backwards)} for one block, and the blocks' inputs"
            )
        return found


def profile_memory(
    function: Callable[..., object] | None = None,
    /,
    *args: Any,
    device: torch.device | str | None = None,
    ops: bool = True,
    **kwargs: Any,
) -> MemoryProfile:
    """Measures where memory is used, in a block of code or in one call.

    On a GPU it first releases the allocator's unused memory, and resets the peaks of ``torch.cuda.memory_stats``.

    Args:
        function: called once with ``args`` and ``kwargs``; without it, the profile is a context manager, which measures its block.
        device: the device whose memory is measured; None for the current GPU if there is one, else the CPU.
        ops: also reports by op, from PyTorch's profiler, at a few microseconds per op. False: only the allocator's counters, on a GPU.

    Raises:
        ValueError: ``ops=False`` on a CPU, which has no allocator to query.
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
    if where.type == "cpu" and not ops:
        raise ValueError("ops=False on the CPU leaves nothing to measure: its allocator has no counters; leave ops=True")
    if function is None and (args or kwargs):
        raise TypeError(f"arguments {args or kwargs} without a function to call; pass it first: profile_memory(function, *args)")
    profile = MemoryProfile(where, ops)
    if function is not None:
        with profile:
            function(*args, **kwargs)
    return profile
