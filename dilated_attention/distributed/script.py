"""A rank's plan as a script to run: every message of every step worked out once, since short calls wait for the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dilated_attention.distributed.plan import Buffer, Job, Source, Step, rank_plan
from dilated_attention.engine.plan import Range
from dilated_attention.engine.views import Rows


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [at, at + count) of memory ``buffer``: a step's buffers are counted first, then its ``extra`` ones."""

    buffer: int
    at: int
    count: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A part that the rank fills with its own rows."""

    part: Part
    rows: Rows


@dataclass(frozen=True, slots=True)
class Owed:
    """Gradients of this rank's rows that come from ``peer``; None for those the rank computes itself, in a buffer's ``part``."""

    peer: int | None
    part: Part | None
    rows: Rows
    count: int


@dataclass(frozen=True, slots=True)
class StepScript:
    """One step on one rank.

    Args:
        sizes: (rows, heads) of each memory, buffers first; None for a buffer that is read where the rank's own rows lie.
        fills: what the rank copies of its own rows.
        sends, receives: (peer, part).
        returns: (peer, part) of the gradients that go back.
        owed: gradients to add to the rank's own.
    """

    step: Step
    sizes: tuple[tuple[int, int] | None, ...]
    fills: tuple[Filled, ...]
    sends: tuple[tuple[int, Part], ...]
    receives: tuple[tuple[int, Part], ...]
    returns: tuple[tuple[int, Part], ...]
    owed: tuple[Owed, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """``home``, ``covered`` and ``single`` are those of the rank's plan."""

    home: tuple[Range, ...]
    steps: tuple[StepScript, ...]
    covered: bool
    single: bool


@functools.lru_cache(maxsize=256)
def make_script(job: Job, rank: int) -> Script:
    plans = [rank_plan(job, member) for member in range(job.size)]
    mine = plans[rank]
    steps = tuple(_step_script([plan.steps[index] for plan in plans], rank) for index in range(len(mine.steps)))
    return Script(mine.home, steps, mine.covered, mine.single)


def _step_script(steps: list[Step], me: int) -> StepScript:
    mine = steps[me]
    sizes: list[tuple[int, int] | None] = []
    fills: list[Filled] = []
    packed: list[tuple[Buffer, Source, Part]] = []
    sends, receives, returns = [], [], []
    owed: list[Owed] = []
    for index, buffer in enumerate(mine.buffers):
        if buffer.owner == me:
            sizes.append(None)
            continue
        sizes.append((buffer.count, buffer.heads[2]))
        for source in buffer.sources:
            part = Part(index, source.at, source.count)
            if source.rank == me:
                fills.append(Filled(part, buffer.local_rows(source)))
                packed.append((buffer, source, part))
                owed.append(Owed(None, part, buffer.local_rows(source), source.count))
            else:
                receives.append((source.rank, part))
                returns.append((source.rank, part))
    for peer, step in enumerate(steps):
        if peer == me:
            continue
        for buffer in step.buffers:
            for source in buffer.sources:
                if source.rank != me or buffer.owner == peer:
                    continue
                owed.append(Owed(peer, None, buffer.local_rows(source), source.count))
                found = _among(packed, buffer, source)
                if found is None:
                    found = Part(len(sizes), 0, source.count)
                    sizes.append((source.count, buffer.heads[2]))
                    fills.append(Filled(found, buffer.local_rows(source)))
                    packed.append((buffer, source, found))
                sends.append((peer, found))
    return StepScript(mine, tuple(sizes), tuple(fills), tuple(sends), tuple(receives), tuple(returns), tuple(owed))


def _among(packed: list[tuple[Buffer, Source, Part]], buffer: Buffer, source: Source) -> Part | None:
    """The rows where they are packed already, as a part of what is."""
    for other, have, part in packed:
        if (other.heads, other.shift, other.step) != (buffer.heads, buffer.shift, buffer.step):
            continue
        ahead, rest = divmod(source.start - have.start, buffer.step)
        if rest == 0 and ahead >= 0 and ahead + source.count <= have.count:
            return Part(part.buffer, part.at + ahead, source.count)
    return None
