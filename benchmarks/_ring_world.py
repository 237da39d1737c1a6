"""Processes that measure together: what fails on one rank fails on all, times are the slowest rank's, and a journal outlives a crash."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from _timing import machine
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
_LEAST, _MOST = 3, 100
# a call of so many seconds is not repeated to warm up further
_LONG = 0.1
RESTARTS = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Failed(Exception):
    """What some rank could not do; raised on every rank with the same text."""


class World:
    """All processes of the run, one a GPU over NCCL, or on CPU over gloo.

    Args:
        timeout: seconds until a collective that some rank never joins ends the process, so that torchrun can start all again.
    """

    def __init__(self, timeout: float) -> None:
        self.is_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        wait = datetime.timedelta(seconds=timeout)
        store, self.rank, self.size = next(rendezvous("env://", timeout=wait))
        # torchrun's store outlives its processes: after a restart their old addresses are still in it
        store = PrefixStore(f"attempt {RESTARTS}", store)
        backend = "nccl" if self.is_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=wait)
        # verdicts travel over CPU: a GPU whose NCCL hangs can still say so
        self.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout + 240))
        # the first 2, 4, … ranks; every rank takes part in making each group
        self.groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in range(2, self.size) if size & (size - 1) == 0}
        self.groups |= {1: None, self.size: dist.group.WORLD}
        self.sizes = sorted(size for size in self.groups if size > 1)
        # the communicator is made here, not inside what is timed
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.synchronize()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def everywhere(self, function: Callable[[], T], ranks: int | None = None) -> list[T]:
        """function() of the first ``ranks`` ranks (None: all) while the others wait: its results by rank.

        Raises:
            Failed: on every rank, if it failed on any.
        """
        value, problem = None, ""
        if self.rank < (ranks or self.size):
            try:
                value = function()
                self.synchronize()
            except Exception as error:  # noqa: BLE001 – other people's code runs here; whatever it throws is its result
                problem = f"rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                # frames of the traceback keep tensors alive
                del error
                self._after_failure(problem)
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (value, problem), group=self.control)
        if problems := [text for _, text in answers if text]:
            raise Failed(problems[0])
        return [value for value, _ in answers[: ranks or self.size]]

    def _after_failure(self, problem: str) -> None:
        gc.collect()
        if not self.is_cuda:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            # the CUDA context is lost: only a new process can go on
            print(f"{problem}; this process cannot go on", file=sys.stderr, flush=True)
            os._exit(13)

    def agree(self, value: T) -> T:
        """Rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def measure(self, call: Callable[[], Any], *, seconds: float, ranks: int | None = None) -> dict[str, Any]:
        """Seconds of one call: the median of each rank, of the slowest rank. All start together, after warm-up."""

        def once() -> float:
            start = time.perf_counter()
            kept = call()
            self.synchronize()
            elapsed = time.perf_counter() - start
            del kept
            return elapsed

        def first() -> tuple[float, int]:
            # compiles
            once()
            before = self._memory()
            elapsed = once()
            return elapsed, torch.cuda.max_memory_allocated() - before if self.is_cuda else 0

        firsts = self.everywhere(first, ranks)
        longest = max(elapsed for elapsed, _ in firsts)
        if longest < _LONG:
            # a replay recorded by the first call, an allocator that now has its blocks; on all ranks, as they exchange with each other
            longest = max(self.everywhere(once, ranks))
        repeats = max(_LEAST, min(_MOST, int(seconds / longest)))
        times = self.everywhere(lambda: self._times(call, repeats), ranks)
        medians = [statistics.median(found) for found, _ in times]
        slowest = max(range(len(medians)), key=lambda rank: medians[rank])
        ordered = sorted(times[slowest][0])
        high, low = ordered[int(0.9 * (repeats - 1))], ordered[int(0.1 * (repeats - 1))]
        return {
            "seconds": medians[slowest],
            "spread": (high - low) / medians[slowest],
            "mean": max(total for _, total in times) / repeats,
            "repeats": repeats,
            "ranks_seconds": medians,
            "peak_bytes": max(peak for _, peak in firsts),
        }

    def _memory(self) -> int:
        if not self.is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _times(self, call: Callable[[], Any], repeats: int) -> tuple[list[float], float]:
        """Seconds of each call, and of all together."""
        if repeats > _LEAST:
            # once more untimed: ranks leave the wait before at slightly different times
            call()
        if not self.is_cuda:
            marks = [time.perf_counter()]
            for _ in range(repeats):
                call()
                marks.append(time.perf_counter())
            return [b - a for a, b in itertools.pairwise(marks)], marks[-1] - marks[0]
        events = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in events], events[0][0].elapsed_time(events[-1][1]) / 1e3


class Journal:
    """The JSON lines of a run. After torchrun --max-restarts it knows what is measured, and what the processes died of.

    Every key is written before it is measured and again with its result. A restarted run takes results from the file, and a key
    without one is what was under way when a process died: it is told and not tried again.
    """

    def __init__(self, path: Path | None, world: World) -> None:
        self.path, self.world = path, world
        restarted = RESTARTS != "0"
        if restarted and path is None:
            raise SystemExit("a process died, and without --json nobody knows of what: not going on")
        found = world.agree(self._read() if restarted and world.rank == 0 else ({}, None))
        self.known: dict[str, dict[str, Any]] = found[0]
        self.began: float = world.agree(found[1] or time.time())
        self.facts: dict[str, Any] = {}
        if not restarted:
            self._write({"began": self.began})
        for key, record in self.known.items():
            if not record:
                self.known[key] = {"failed": "a process died of it, or it hung"}
                world.say(f"# restarted: {key}: a process died of it, or it hung")
                self._write({"key": key} | self.known[key])

    def _read(self) -> tuple[dict[str, dict[str, Any]], float | None]:
        known: dict[str, dict[str, Any]] = {}
        began = None
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                record = json.loads(line)
                if "began" in record:
                    known, began = {}, record["began"]
                elif "start" in record:
                    known[record["start"]] = {}
                elif "key" in record:
                    known[record["key"]] = record
        return known, began

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is not None and self.world.rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def run(self, key: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """function()'s record, or one with ``failed``; from the file if it is there already."""
        if key in self.known:
            return self.known[key]
        self._write({"start": key})
        try:
            record = function()
        except Failed as failed:
            record = {"failed": str(failed)}
        record = {"key": key} | record | self.facts
        self.known[key] = record
        self._write(record)
        return record


def facts(world: World, commit: str | None) -> dict[str, Any]:
    """Hardware, versions and commit, for every line of the file."""
    if commit is None:
        folder = Path(__file__).resolve().parent
        try:
            done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
            commit = done.stdout.strip() or "unknown"
        except OSError:
            commit = "unknown"
    found: dict[str, Any] = {**machine(), "commit": commit, "python": platform.python_version(), "world": world.size}
    if world.is_cuda:
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


@contextlib.contextmanager
def freed(world: World) -> Iterator[None]:
    """Leaves no cached memory to the next case, which may need all of it."""
    try:
        yield
    finally:
        gc.collect()
        if world.is_cuda:
            torch.cuda.empty_cache()
