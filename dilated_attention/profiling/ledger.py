"""Replays what PyTorch's profiler recorded of its allocators: which op held what, and what was alive at the peak.

The profiler sees every allocation, including scratch memory inside a kernel and inside custom ops, which a dispatch mode cannot see into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

OUTSIDE = "(outside of ops)"


@dataclass(kw_only=True)
class OpMemory:
    """What all calls of one op allocated, in bytes; allocations of nested ops count towards the outermost op.

    Args:
        name: such as ``"aten::mm"``; with "(backward)" where autograd called it.
        calls: number of calls.
        allocated: by all calls together, whether freed since or not.
        peak: the most bytes of one call's own allocations alive at once.
        kept: the most bytes of one call's own allocations alive at its end: results, and what is saved for the backward.
        at_peak: bytes alive when the whole profile was at its peak.
    """

    name: str
    calls: int = 0
    allocated: int = 0
    peak: int = 0
    kept: int = 0
    at_peak: int = 0


@dataclass
class _Call:
    """One call of an outermost op, and the bytes alive that it allocated itself."""

    name: str
    live: int = 0


def replay(tree: Iterable[Any], device: torch.device, before: int) -> tuple[tuple[OpMemory, ...], int, int]:
    """Returns the ops of a profile's event tree, those with the most bytes at the peak first, and the bytes alive at the peak and the end.

    Args:
        before: bytes alive when the profile began; 0 where that is not known, so that only later allocations count.
    """
    ops: dict[str, OpMemory] = {}
    live: Counter[str] = Counter()
    owners: dict[int, tuple[_Call, int]] = {}
    total = peak = before
    at_peak: dict[str, int] = {}
    for _, _, address, size, call in sorted(_events(tree, device), key=lambda event: event[:2]):
        op = ops.setdefault(call.name, OpMemory(name=call.name))
        if size == 0:
            op.calls, op.kept = op.calls + 1, max(op.kept, call.live)
            continue
        # no two tensors share an address: an allocation at one that is taken means that the profiler missed a free
        owner, freed = owners.pop(address, (call, 0))
        owner.live -= freed
        live[owner.name] -= freed
        total += size
        if size > 0:
            total -= freed
            owners[address] = call, size
            call.live += size
            live[call.name] += size
            op.allocated, op.peak = op.allocated + size, max(op.peak, call.live)
        if total > peak:
            peak, at_peak = total, dict(live)
    for op in ops.values():
        op.at_peak = at_peak.get(op.name, 0)
    found = sorted(ops.values(), key=lambda op: (-op.at_peak, -op.allocated, op.name))
    return tuple(op for op in found if op.allocated), peak, total


def _events(tree: Iterable[Any], device: torch.device) -> Iterator[tuple[int, int, int, int, _Call]]:
    """Yields (time, order, address, bytes, outermost op). Bytes: < 0 for a free, 0 for the end of a call."""
    outside, order = _Call(OUTSIDE), 0
    # node, the call that contains it, whether it is below autograd's engine
    stack: list[tuple[Any, _Call, bool]] = [(node, outside, False) for node in reversed(list(tree))]
    while stack:
        node, call, backward = stack.pop()
        order += 1
        if node.name == "[memory]":
            found = node.extra_fields
            if found.alloc_size and found.device.type == device.type and (device.type == "cpu" or found.device.index == device.index):
                yield node.start_time_ns, order, found.ptr, found.alloc_size, call
            continue
        backward = backward or node.name.startswith("autograd::engine::")
        # "namespace::op"; not the events that autograd and the profiler wrap around ops
        is_op = "::" in node.name and not node.name.startswith(("autograd::", "torch::autograd::")) and " " not in node.name
        if is_op and call is outside:
            call = _Call(node.name + (" (backward)" if backward and not node.name.endswith("_backward") else ""))
            yield node.end_time_ns, order, 0, 0, call
        stack += [(child, call, backward) for child in reversed(node.children)]
