"""Processes that measure together. All learn of a failure on one of them before any continues; times are those of the slowest."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dilated_attention.bench.measure.skip import Attempt, attempt
from dilated_attention.bench.measure.timing import Timing, synchronise
from dilated_attention.bench.suite import Session

T = TypeVar("T")
# seconds until a missing verdict of one process ends the others; longer than kernels take to compile
_PATIENCE = 300.0
# maximum number of calls of one function in one turn
_MOST_CALLS = 25


class Broken(RuntimeError):
    """A process failed during an exchange, or because of a bug, so the group is unusable. Raised on all processes with the same text."""


class RankSync:
    """The processes of a session, one or several. All of them make the same calls in the same order."""

    def __init__(self, session: Session) -> None:
        self.device, self.rank, self.size = session.device, session.rank, session.world_size
        self._control = _control() if self.size > 1 else None

    def everywhere(self, function: Callable[[], T]) -> Attempt[list[T]]:
        """Returns ``function()`` of every process, by rank. If one failed, returns on all of them a note that names the first that did.

        Results are sent between processes, so they must be plain figures.

        Raises:
            Broken: there are several processes, and one raised an error that is neither a refusal nor out of memory.
        """
        if self.size == 1:
            alone = attempt(lambda: self._done(function))
            return Attempt(None, alone.note) if alone.note else Attempt([alone.value])  # type: ignore[list-item]
        value, note, bug = None, "", ""
        cause: Exception | None = None
        try:
            found = attempt(lambda: self._done(function))
            value, note = found.value, found.note
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            bug, cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", error
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (value, note, bug), group=self._control)
        if any(bug for _, _, bug in answers):
            told = [f"process {rank}: {bug or note}" for rank, (_, note, bug) in enumerate(answers) if bug or note]
            raise Broken("; ".join(told)) from cause
        notes = [f"process {rank}: {note}" for rank, (_, note, _) in enumerate(answers) if note]
        return Attempt(None, notes[0]) if notes else Attempt([value for value, _, _ in answers])

    def _done(self, function: Callable[[], T]) -> T:
        value = function()
        synchronise(self.device)
        return value

    def timed(
        self, functions: Mapping[str, Callable[[], Any]], *, seconds: float, least: int = 3, most: int = 20
    ) -> Attempt[dict[str, Timing]]:
        """Returns {name: ``Timing`` of the slowest process} of functions that take turns, each for about ``seconds``.

        Like ``timing.interleaved``, with the same number of turns and calls on every process. An untimed call precedes each turn: processes
        start a turn at slightly different times, and an exchange synchronizes them.
        """
        firsts = self.everywhere(lambda: self._firsts(functions))
        if firsts.value is None:
            return Attempt(None, firsts.note)
        once: dict[str, float] = {name: max(found[name] for found in firsts.value) for name in functions}
        turns = max(least, min(most, int(seconds / max(*once.values(), 1e-9))))
        calls = {name: max(1, min(_MOST_CALLS, int(seconds / turns / max(each, 1e-9)))) for name, each in once.items()}
        times = self.everywhere(lambda: self._turns(functions, turns, calls))
        if times.value is None:
            return Attempt(None, times.note)
        of_all = {name: [Timing.of(found[name]) for found in times.value] for name in functions}
        return Attempt({name: max(timings, key=lambda timing: timing.ms) for name, timings in of_all.items()})

    def _firsts(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Returns the seconds of a third call: the first may compile, and the second may still have to allocate its blocks."""
        found = {}
        for name, function in functions.items():
            for _ in range(3):
                synchronise(self.device)
                start = time.perf_counter()
                function()
                synchronise(self.device)
                found[name] = time.perf_counter() - start
        return found

    def _turns(self, functions: Mapping[str, Callable[[], Any]], turns: int, calls: Mapping[str, int]) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(turns):
            for name, function in functions.items():
                function()
                samples[name] += self._calls(function, calls[name])
        return samples

    def _calls(self, function: Callable[[], Any], count: int) -> list[float]:
        """Returns the milliseconds of each of ``count`` consecutive calls."""
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(count):
                function()
                marks.append(time.perf_counter())
            return [1000 * (after - before) for before, after in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


_groups: dict[Any, Any] = {}


def _control() -> Any:
    """Returns a CPU process group for reporting failures: it works even while a GPU's exchange hangs."""
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=_PATIENCE))
    return _groups[world]
