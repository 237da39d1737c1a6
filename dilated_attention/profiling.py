"""``profile_memory``: where a block of code, or a call, uses memory, by torch's profiler and its allocator's counters."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dilated_attention.engine.memory import readable
from dilated_attention.validation import check_bool, check_factory

__all__ = ["MemoryProfile", "OpMemory", "profile_memory"]

_COUNTERS = {"retries": "num_alloc_retries", "refused": "num_ooms", "device_allocs": "num_device_alloc", "device_frees": "num_device_free"}


@dataclass
class OpMemory:
    """What all calls of one outermost op of torch allocated, in bytes.

    Args:
        name: such as ``"aten::mm"``; with "(backward)" where autograd called it.
        calls, allocated: number of calls, and bytes of all of them together, whether freed since or not.
        kept: the most bytes of one call alive at its end: results, and what is saved for the backward.
        at_peak: bytes alive when the whole profile was at its peak.
    """

    name: str
    calls: int = 0
    allocated: int = 0
    kept: int = 0
    at_peak: int = 0


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
    """

    def __init__(self, device: torch.device, by_op: bool = True) -> None:
        self.device, self._device, self._by_op = str(device), device, by_op
        self.peak_allocated = self.allocated_before = self.allocated_after = 0
        self.peak_reserved: int | None = None
        self.stats: dict[str, int] = {}
        self.ops: tuple[OpMemory, ...] = ()

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
            self.allocated_before = self._before["allocated_bytes.all.current"]
        if self._by_op:
            self._profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._by_op:
            self._profiler.__exit__(None, None, None)
            self._replay(self._profiler.profiler.kineto_results.experimental_event_tree())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            after = torch.cuda.memory_stats(self._device)
            self.allocated_after, self.peak_allocated = after["allocated_bytes.all.current"], after["allocated_bytes.all.peak"]
            self.peak_reserved = after["reserved_bytes.all.peak"]
            self.stats = {name: after[counter] - self._before[counter] for name, counter in _COUNTERS.items()}

    def _replay(self, tree: Iterable[Any]) -> None:
        """Follows every allocation and free that the profiler saw, scratch inside kernels and our own ops included."""
        found: dict[str, OpMemory] = {}
        live: Counter[str] = Counter()
        of_call: Counter[int] = Counter()
        owners: dict[int, tuple[str, int, int]] = {}
        at_peak: dict[str, int] = {}
        total = self.peak_allocated = self.allocated_before
        for _, address, size, name, call in sorted(_events(tree, self._device), key=lambda event: event[0]):
            op = found.setdefault(name, OpMemory(name))
            if size == 0:
                op.calls, op.kept = op.calls + 1, max(op.kept, of_call[call])
                continue
            # no two tensors share an address: an allocation at one that is taken means that the profiler missed a free
            owner, of, freed = owners.pop(address, (name, call, 0))
            live[owner] -= freed
            of_call[of] -= freed
            total += size - freed * (size > 0)
            if size > 0:
                owners[address] = name, call, size
                live[name] += size
                of_call[call] += size
                op.allocated += size
            if total > self.peak_allocated:
                self.peak_allocated, at_peak = total, dict(live)
        self.allocated_after = total
        for op in found.values():
            op.at_peak = at_peak.get(op.name, 0)
        self.ops = tuple(sorted((op for op in found.values() if op.allocated), key=lambda op: (-op.at_peak, -op.allocated, op.name)))

    @property
    def fragmentation(self) -> float | None:
        """Returns the peak of reserved memory divided by that of allocated memory; 1 is the minimum. None on a CPU."""
        return self.peak_reserved / self.peak_allocated if self.peak_reserved and self.peak_allocated else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as plain numbers, strings, lists and dicts."""
        found = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return found | {"fragmentation": self.fragmentation, "advice": self.advice(), "ops": [asdict(op) for op in self.ops]}

    def __str__(self) -> str:
        lines = [
            f"memory of {self.device}",
            f"  at the peak    {readable(self.peak_allocated)} in tensors"
            + (f", {readable(self.peak_reserved or 0)} reserved: {self.fragmentation:.2f} times as much" if self.fragmentation else ""),
            f"  before, after  {readable(self.allocated_before)}, {readable(self.allocated_after)} in tensors",
        ]
        if self.stats:
            lines.append(
                "  the allocator  asked the GPU {device_allocs} times, retried {retries}, was refused {refused}".format(**self.stats)
            )
        rows: list[tuple[str, ...]] = [("op", "calls", "allocated", "a call leaves", "at the peak")] if self.ops else []
        rows += [(op.name, str(op.calls), *map(readable, (op.allocated, op.kept, op.at_peak))) for op in self.ops[:12]]
        return "\n".join([*lines, *(f"  {row[0]:<48}  {row[1]:>6}" + "".join(f"  {size:>13}" for size in row[2:]) for row in rows)])

    def advice(self) -> list[str]:
        """Returns advice on what would need less memory, with the measured figures; [] where none applies."""
        found, peak = [], readable(self.peak_allocated)
        if (self.fragmentation or 0) > 1.2:
            found.append(
                f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before the program starts: {self.fragmentation:.2f} times "
                f"as much was reserved, {readable(self.peak_reserved or 0)} for {peak} in tensors (docs/memory.md, Fragmentation)"
            )
        waiting = sum(op.at_peak for op in self.ops if "backward" not in op.name and "::" in op.name)
        # one backward has nothing else to wait for; in a checkpoint autograd calls forwards again
        backwards = sum(op.calls for op in self.ops if op.name.startswith("dilated_attention::") and op.name.endswith("attention_backward"))
        again = any(op.name.startswith("dilated_attention::") and op.name.endswith("(backward)") for op in self.ops)
        if backwards >= 2 and not again and waiting >= 0.1 * self.peak_allocated:
            found.append(
                "checkpoint_activations=True of the models, or torch.utils.checkpoint around each block: "
                f"{readable(waiting)} of {peak} at the peak are results of forwards that wait for a backward"
            )
        return found


def _events(
    nodes: Iterable[Any], device: torch.device, name: str = "(outside of ops)", call: int = 0, backward: bool = False
) -> Iterator[Any]:
    """Yields (time, address, bytes, outermost op, its call). Bytes: < 0 for a free, 0 for the end of a call."""
    for node in nodes:
        if node.name == "[memory]":
            memory = node.extra_fields
            if memory.alloc_size and memory.device.type == device.type and (device.type == "cpu" or memory.device.index == device.index):
                yield node.start_time_ns, memory.ptr, memory.alloc_size, name, call
            continue
        below = backward or node.name.startswith("autograd::engine::")
        # "namespace::op"; not the events that autograd and the profiler wrap around ops
        is_op = "::" in node.name and not node.name.startswith(("autograd::", "torch::autograd::")) and " " not in node.name
        if call or not is_op:
            yield from _events(node.children, device, name, call, below)
        else:
            op = node.name + (" (backward)" if below and not node.name.endswith("_backward") else "")
            yield from _events(node.children, device, op, id(node), below)
            yield node.end_time_ns, 0, 0, op, id(node)


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
    if function is not None and not callable(function):
        raise TypeError(f"function is a {type(function).__name__}; expected a function, or none for a block of code")
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    where = check_factory(usual if device is None else device, None)["device"]
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {where}; expected a CUDA device or the CPU, for which torch reports allocations")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if not check_bool("ops", ops) and where.type == "cpu":
        raise ValueError("ops=False on the CPU leaves nothing to measure: its allocator has no counters; leave ops=True")
    if function is None and (args or kwargs):
        raise TypeError(f"arguments {args or kwargs} without a function to call; pass it first: profile_memory(function, *args)")
    profile = MemoryProfile(where, ops)
    if function is not None:
        with profile:
            function(*args, **kwargs)
    return profile
