"""A rank's plan as a schedule: every message of every step is determined once, because its CPU time would delay short calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from dilated_attention.distributed.exchange.plan import Buffer, RingProblem, Source, Step, hop, rank_plan
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.branches.views import Rows


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Rows [at, at + count) of memory ``buffer``; a step's buffers are counted first, then its additional memory for packed rows."""

    buffer: int
    at: int
    count: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A part that the rank fills with rows of its own."""

    part: BufferSlice
    rows: Rows


@dataclass(frozen=True, slots=True)
class Owed:
    """Gradients of ``rows`` of this rank, summed at once: contributions of its own launches (launch, first row) and of peers."""

    rows: Rows
    own: tuple[tuple[int, int], ...]
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """One step on one rank.

    Args:
        sizes: (rows, heads) of each memory, buffers first; None for a buffer that is the rank's own rows, read in place.
        fills: which of its own rows the rank copies.
        sends, receives: (peer, part).
        returns: (peer, launch, first row, rows) of the gradients that are sent back.
        owed: gradients that come back or are the rank's own.
        arrivals: (peer, index into ``owed``, index among its peers), in the order in which each peer sends.
    """

    step: Step
    sizes: tuple[tuple[int, int] | None, ...]
    fills: tuple[Filled, ...]
    sends: tuple[tuple[int, BufferSlice], ...]
    receives: tuple[tuple[int, BufferSlice], ...]
    returns: tuple[tuple[int, int, int, int], ...]
    owed: tuple[Owed, ...]
    arrivals: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ByHeads:
    """Steps that differ only in their heads: (rows, heads) of the one buffer of each step, and the rank's own rows in it."""

    rows: int
    heads: int
    own: tuple[tuple[BufferSlice, slice], ...]


@dataclass(frozen=True, slots=True, eq=False)
class CommSchedule:
    """The schedule of one rank. ``local_ranges``, ``covered`` and ``single`` are those of its plan.

    Args:
        writes_once: whether the gradient of each key row is owed exactly once, so that gradients need no initial value.
        by_heads: how to fill all steps' buffers at once; None if this is not possible.
    """

    ring_problem: RingProblem
    local_ranges: tuple[Range, ...]
    steps: tuple[StepSchedule, ...]
    covered: bool
    single: bool
    writes_once: bool
    by_heads: ByHeads | None


@functools.lru_cache(maxsize=256)
def make_schedule(ring_problem: RingProblem, rank: int) -> CommSchedule:
    mine = rank_plan(ring_problem, rank)
    steps = tuple(_step_schedule(_meeting(ring_problem, index, rank), rank) for index in range(len(mine.steps)))
    held = sum(end - start for start, end in ring_problem.shards[rank]) * ring_problem.shape.num_kv_heads
    writes_once = not mine.local_ranges and _are_disjoint([owed.rows for step in steps for owed in step.owed], held)
    return CommSchedule(ring_problem, mine.local_ranges, steps, mine.covered, mine.single, writes_once, _by_heads(steps))


def _meeting(ring_problem: RingProblem, index: int, rank: int) -> dict[int, Step]:
    """Returns the steps of ``rank`` and of all ranks that may read its rows in this step, in order of rank."""
    if ring_problem.exchange == "ring":
        # in a hop a rank receives keys from one rank and sends keys to one
        return {member: hop(ring_problem, member, index) for member in sorted({rank, (rank + index) % ring_problem.size})}
    return {member: rank_plan(ring_problem, member).steps[index] for member in range(ring_problem.size)}


def _are_disjoint(rows: list[Rows], held: int) -> bool:
    """Whether the rows are plain runs of rows and heads without overlap, ``held`` in total."""
    if any(x.step != 1 or x.shift or (x.head_step != 1 and x.heads > 1) for x in rows):
        return False
    boxes = [(x.start, x.start + x.length, x.head_start, x.head_start + x.heads) for x in rows]
    meet = any(a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for index, a in enumerate(boxes) for b in boxes[index + 1 :])
    return not meet and sum((b - a) * (d - c) for a, b, c, d in boxes) == held


def _step_schedule(steps: dict[int, Step], me: int) -> StepSchedule:
    mine = steps[me]
    sizes: list[tuple[int, int] | None] = []
    fills: list[Filled] = []
    packed: list[tuple[Buffer, Source, BufferSlice]] = []
    sends, receives = [], []
    for index, buffer in enumerate(mine.buffers):
        if buffer.owner == me:
            sizes.append(None)
            continue
        sizes.append((buffer.count, buffer.heads[2]))
        for source in buffer.sources:
            part = BufferSlice(index, source.at, source.count)
            if source.rank == me:
                fills.append(Filled(part, buffer.local_rows(source)))
                packed.append((buffer, source, part))
            else:
                receives.append((source.rank, part))
    for peer, step in steps.items():
        if peer == me:
            continue
        for buffer in step.buffers:
            for source in buffer.sources:
                if source.rank != me or buffer.owner == peer:
                    continue
                found = _among(packed, buffer, source)
                if found is None:
                    found = BufferSlice(len(sizes), 0, source.count)
                    sizes.append((source.count, buffer.heads[2]))
                    fills.append(Filled(found, buffer.local_rows(source)))
                    packed.append((buffer, source, found))
                sends.append((peer, found))
    returns = tuple((source, launch, at, rows.length) for launch, source, at, rows in _shares_of(mine) if source != me)
    own: dict[Rows, list[tuple[int, int]]] = {}
    peers: dict[Rows, list[int]] = {}
    arrivals = []
    for rank, step in steps.items():
        for launch, holder, at, rows in _shares_of(step):
            if holder != me:
                continue
            own.setdefault(rows, [])
            peers.setdefault(rows, [])
            if rank == me:
                own[rows].append((launch, at))
            else:
                arrivals.append((rank, list(own).index(rows), len(peers[rows])))
                peers[rows].append(rank)
    owed = tuple(Owed(rows, tuple(own[rows]), tuple(peers[rows])) for rows in own)
    return StepSchedule(mine, tuple(sizes), tuple(fills), tuple(sends), tuple(receives), returns, owed, tuple(arrivals))


def _shares_of(step: Step) -> Iterator[tuple[int, int, int, Rows]]:
    """Yields (launch, rank that holds the rows, their first index in the launch's gradients, the rows on that rank), launch by launch."""
    for index, launch in enumerate(step.launches):
        buffer = step.buffers[launch.buffer]
        first = launch.first_key
        end = first + launch.problem.k_len
        for source in buffer.sources:
            low, high = max(first, source.at), min(end, source.at + source.count)
            if low < high:
                held = Source(source.rank, low, high - low, source.start + (low - source.at) * buffer.step)
                yield index, source.rank, low - first, buffer.local_rows(held)


def _among(packed: list[tuple[Buffer, Source, BufferSlice]], buffer: Buffer, source: Source) -> BufferSlice | None:
    """Returns the part of packed memory that already holds these rows, or None."""
    for other, have, part in packed:
        if (other.heads, other.shift, other.step) != (buffer.heads, buffer.shift, buffer.step):
            continue
        ahead, rest = divmod(source.start - have.start, buffer.step)
        if rest == 0 and ahead >= 0 and ahead + source.count <= have.count:
            return BufferSlice(part.buffer, part.at + ahead, source.count)
    return None


def _by_heads(steps: tuple[StepSchedule, ...]) -> ByHeads | None:
    first = steps[0]
    if len(steps) == 1 or not first.fills or any(step.sizes != first.sizes or len(step.sizes) != 1 for step in steps):
        return None
    size, heads = first.sizes[0], first.fills[0].rows.heads
    for index, step in enumerate(steps):
        for filled, alike in zip(step.fills, first.fills, strict=True):
            rows = filled.rows
            if (rows.head_start, rows.heads, rows.step, rows.shift) != (index * heads, heads, 1, 0) or (rows.head_step != 1 and heads > 1):
                return None
            if (filled.part, rows.start) != (alike.part, alike.rows.start):
                return None
    if size is None:
        return None
    own = tuple((filled.part, slice(filled.rows.start, filled.rows.start + filled.rows.length)) for filled in first.fills)
    return ByHeads(size[0], heads, own)
