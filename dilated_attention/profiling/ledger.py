"""Replays allocations and frees, as recorded by PyTorch's profiler, in order: which op held what, and what was alive at the peak.

The profiler sees every call of PyTorch's allocators on any device, including scratch memory inside a kernel and inside this library's
custom ops, which are opaque to a dispatch mode. In its event tree, each allocation is below the operations that were running.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

OUTSIDE = "(outside of ops)"
_BACKWARD = "autograd::engine::"


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


@dataclass
class _Call:
    """One call of an outermost torch op: what it allocated itself."""

    name: str
    live: int = 0
    peak: int = 0
    kept: int = 0


@dataclass
class _Sums:
    """The totals of all calls with one name."""

    calls: int = 0
    allocated: int = 0
    largest: int = 0
    peak: int = 0
    kept: int = 0
    live: int = 0
    inner: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Event:
    """``size`` bytes allocated (> 0) or freed (< 0) at ``address`` by a call; 0: the call has ended."""

    time: int
    order: int
    address: int
    size: int
    call: _Call
    inner: str


@dataclass(frozen=True)
class Ledger:
    """The result of the replay.

    Args:
        ops: by name, those with the most bytes alive at the peak first.
        peak: most bytes alive at once.
        end: bytes alive at the end.
    """

    ops: tuple[OpMemory, ...]
    peak: int
    end: int


def replay(tree: Iterable[Any], device: torch.device, before: int) -> Ledger:
    """Returns the ledger of a profile's event tree.

    Args:
        device: the device whose memory is counted.
        before: bytes alive when the profile began; 0 where that is not known, so that only later allocations count.
    """
    events = sorted(_events(tree, device), key=lambda event: (event.time, event.order))
    sums: dict[str, _Sums] = {}
    total, peak, place = before, before, -1
    for index, change in enumerate(_replayed(events, sums)):
        total += change
        if total > peak:
            peak, place = total, index
    at_peak: dict[str, _Sums] = {}
    for _ in zip(range(place + 1), _replayed(events, at_peak), strict=False):
        pass
    ops = [_op(name, found, at_peak[name].live if name in at_peak else 0) for name, found in sums.items()]
    ops.sort(key=lambda op: (-op.at_peak, -op.allocated, op.name))
    return Ledger(tuple(op for op in ops if op.allocated), peak, total)


def _op(name: str, found: _Sums, at_peak: int) -> OpMemory:
    inner = tuple(sorted(found.inner.items(), key=lambda item: (-item[1], item[0])))
    return OpMemory(
        name=name, calls=found.calls, allocated=found.allocated, largest=found.largest, peak=found.peak, kept=found.kept,
        at_peak=at_peak, inner=inner,
    )  # fmt: skip


def _replayed(events: list[_Event], sums: dict[str, _Sums]) -> Iterator[int]:
    """Yields, for each event, the change in live bytes, after adding the event's effect to ``sums``."""
    live: dict[int, _Event] = {}
    for call in {id(event.call): event.call for event in events}.values():
        call.live = call.peak = call.kept = 0
        sums.setdefault(call.name, _Sums()).calls += call.name != OUTSIDE
    for event in events:
        call, of_name, change = event.call, sums[event.call.name], event.size
        if event.size > 0:
            before = live.get(event.address)
            if before is not None:
                # two live tensors never share an address: the profiler missed a free, such as those by threads that it does not watch
                before.call.live -= before.size
                sums[before.call.name].live -= before.size
                change -= before.size
            live[event.address] = event
            call.live += event.size
            call.peak = max(call.peak, call.live)
            of_name.live += event.size
            of_name.allocated += event.size
            of_name.largest = max(of_name.largest, event.size)
            of_name.peak = max(of_name.peak, call.peak)
            of_name.inner[event.inner] = of_name.inner.get(event.inner, 0) + event.size
        elif event.size < 0:
            # memory allocated before the profile has no allocation in it
            taken = live.pop(event.address, None)
            if taken is not None:
                taken.call.live -= taken.size
                sums[taken.call.name].live -= taken.size
        else:
            of_name.kept = max(of_name.kept, call.live)
        yield change


def _events(tree: Iterable[Any], device: torch.device) -> Iterator[_Event]:
    """Yields allocations on the device, each with the outermost op that it happened in, and the ends of those ops."""
    outside = _Call(OUTSIDE)
    order = 0
    # node, the call that contains it, whether it is below autograd's engine, the torch op directly inside the call
    stack: list[tuple[Any, _Call, bool, str]] = [(node, outside, False, "") for node in reversed(list(tree))]
    while stack:
        node, call, backward, inner = stack.pop()
        order += 1
        if node.name == "[memory]":
            found = node.extra_fields
            if found.alloc_size and _same(found.device, device):
                yield _Event(node.start_time_ns, order, found.ptr, found.alloc_size, call, inner or call.name)
            continue
        backward = backward or node.name.startswith(_BACKWARD)
        if call is outside and _is_op(node.name):
            suffix = " (backward)" if backward and not node.name.endswith("_backward") else ""
            call = _Call(node.name + suffix)
            yield _Event(node.end_time_ns, order, 0, 0, call, "")
        elif call is not outside and not inner and _is_op(node.name):
            inner = node.name
        stack += [(child, call, backward, inner) for child in reversed(node.children)]


def _is_op(name: str) -> bool:
    """ "namespace::op"; excludes the events that autograd and the profiler wrap around ops."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::")) and " " not in name


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)
