"""Watches exchanges that run on a GPU, where waiting does not block the CPU and a stall would go unnoticed.

A thread checks the exchanges in flight every half second. When an exchange has been ready to run for longer than the timeout, or its
communicator reports an error, as between machines when a peer's connection closes:

    1. this rank posts what it waits for, and for 2 s (COLLECT) reads what the others post, to find out who is to blame
    2. the group is marked as failed, and the error goes to the log and to stderr; a thread that comes to the group raises RingError
    3. the group's communicators are aborted, so that kernels that wait for a dead rank end and the GPU is free
    4. if nothing has raised by then, the thread that issued the exchange is made to raise as soon as it runs Python again, and a second
       later the main thread, too
    5. if no thread has raised within 10 s (GRACE), because it is stuck in a CUDA call, the process ends with exit code 1

So no rank outlives a dead one by more than timeout + 12 s and a few polling intervals. The thread also compares the calls that ranks make
(handshake.py); if they differ, what waits for a message on the group is ended in the same way, also on a CPU.

A thread that went on issuing work behind an exchange that never ends would fill the driver's queue and then wait inside the driver, where
even the watching thread could not query an event. So it stays at most AHEAD exchanges ahead of the GPU (``Queue.wait_for_gpu``).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention.distributed.errors import RingError

POLL = 0.5
COLLECT = 2.0
GRACE = 10.0
OWN = 0.2
# exchanges whose work may be queued on the GPU: a few hundred launches in a model, where the driver takes a thousand, and enough to keep
# the GPU busy. The thread looks after every fourth: asking an event before each took 25 µs of a forward of 0.6 ms
AHEAD = 8
NAP = 50e-6
# the driver's CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2

logger = logging.getLogger("dilated_attention")


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange in flight, not its tensors. ``number, what, peers``: as named in messages; ``work``: torch's handle, completed once the
    GPU has finished; ``ready``: an event that completes once the exchange can run, None if it could at once; ``thread``: issued it."""

    number: int
    what: str
    peers: tuple[int, ...]
    work: Any
    ready: Any
    thread: int


class Queue:
    """Exchanges of one wire, which run in order. The issuing thread appends, the watching thread removes."""

    def __init__(self) -> None:
        self.pending: deque[Exchange] = deque()
        self._head: Exchange | None = None
        self._since: float | None = None
        # events of the last exchanges: each completes once the GPU has reached its exchange
        self._last: deque[Any] = deque(maxlen=AHEAD // 2)
        self._issued = 0

    def append(self, exchange: Exchange) -> None:
        self.pending.append(exchange)
        self._last.append(exchange.ready)
        self._issued += 1

    def wait_for_gpu(self, has_failed: Callable[[], bool]) -> bool:
        """Before every fourth exchange, waits until the GPU has reached that four before it, so that ``AHEAD - 1`` exchanges at most wait
        for the GPU; returns False if the group has failed."""
        if self._issued and self._issued % (AHEAD // 2) == 0:
            oldest = self._last[0]
            while not oldest.query():
                if has_failed():
                    return False
                time.sleep(NAP)
        return True

    def stuck(self, now: float, timeout: float) -> tuple[Exchange, str] | None:
        """Returns the exchange that failed, or could run for longer than the timeout, and what became of it; None if none. One can run once
        those before it have finished and its inputs are computed, so work queued on the GPU is not a stall."""
        # a copy, since the issuing thread may append
        pending, some = self.pending, list(self.pending)
        completed = next((number for number, exchange in enumerate(some) if not exchange.work.is_completed()), len(some))
        # torch calls every exchange of a communicator that has failed completed
        if completed == len(some) > 0 and _has_failed(some[-1].work):
            return pending[0], "failed: torch logs NCCL's error"
        for _ in range(completed):
            pending.popleft()
        if not pending:
            self._head = None
            return None
        if pending[0] is not self._head:
            self._head, self._since = pending[0], None
        if self._since is None:
            if self._head.ready is None or self._head.ready.query():
                self._since = now
            return None
        waited = now - self._since
        return (self._head, f"is not done {waited:.1f} s after it could run") if waited > timeout else None


def _has_failed(work: Any) -> bool:
    """Whether an exchange that torch calls completed has failed. (Its exception cannot be read from Python.)"""
    result = work.get_future_result()
    return bool(result.done() and int(result.value()))


class Monitor:
    """Watches wires (``p2p.Wire``), compares the calls of groups (``handshake.Comparison``), and ends what has stalled. The exit function
    and the clock are arguments, for tests."""

    def __init__(self, leave: Callable[[int], Any] = os._exit, clock: Callable[[], float] = time.monotonic, grace: float = GRACE) -> None:
        self._wires: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._leave, self._clock, self._grace = leave, clock, grace
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, wire: Any) -> None:
        with self._lock:
            self._wires.add(wire)

    def add_calls(self, group: Any) -> None:
        with self._lock:
            self._calls.add(group)

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dilated_attention exchanges", daemon=True)
                self._thread.start()
                # before the interpreter shuts down, when a daemon thread could only fail
                atexit.register(self.stop)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * POLL)

    def _run(self) -> None:
        _allow_captures()
        while not self._stop.wait(POLL):
            try:
                self.look()
            except Exception:
                if self._stop.is_set() or sys.is_finalizing():
                    return
                logger.exception("watching exchanges failed; trying again")

    def look(self) -> None:
        with self._lock:
            wires, groups = list(self._wires), list(self._calls)
        for group in groups:
            message = group.look()
            if message is not None:
                self._refuse(group, message)
        for wire in wires:
            if wire.failed is not None or not wire.queue.pending:
                continue
            # a new thread uses GPU 0, and querying there would create a context that costs memory
            wire.enter()
            found = wire.queue.stuck(self._clock(), wire.timeout)
            if found is not None:
                self._give_up(wire, *found)

    def _give_up(self, wire: Any, exchange: Exchange, trouble: str) -> None:
        message = wire.describe(exchange, trouble)
        wire.fail(message)
        self._end(wire, exchange.thread, message, OWN)

    def _refuse(self, group: Any, message: str) -> None:
        """Ends everything that waits on a group whose ranks make different calls."""
        wire = group.wire()
        if wire is not None and wire.queue.pending:
            self._end(wire, wire.queue.pending[-1].thread, message, 0.0)
            return
        _report(message)
        if wire is not None:
            if wire.on_gpu:
                # the GPU has computed with wrong keys, and nothing else would report this before the next call
                raise_in([threading.main_thread().ident or 0], message)
            wire.abort()

    def _end(self, wire: Any, thread: int, message: str, own: float) -> None:
        """Frees what waits, and sees to it that a thread raises, first ``thread``, which issued the exchange. ``own``: seconds in which one
        may raise by itself; otherwise autograd's thread and the main thread, which waits for it, would raise one after the other."""
        wire.queue.pending.clear()
        _report(message)
        # in a thread of its own, because a communicator that does not shut down must not hold up the rest
        aborting = threading.Thread(target=wire.abort, name="dilated_attention abort", daemon=True)
        aborting.start()
        began, main = self._clock(), threading.main_thread().ident or 0
        # an autograd thread that has nothing more to do never raises
        orders = deque([(own, [thread]), *([(own + 1, [thread, main])] if thread != main else [])])
        raised = threading.Event()
        while not (raised.is_set() or wire.has_raised()):
            waited = self._clock() - began
            if waited >= self._grace:
                _tell(f"nothing raised within {self._grace:g} s of this error, so this process ends now: {message}")
                self._leave(1)
                return
            if orders and waited >= orders[0][0]:
                raised = raise_in(orders.popleft()[1], message)
            raised.wait(0.05)
        aborting.join(max(0.0, began + self._grace - self._clock()))


def raise_in(threads: Sequence[int], message: str) -> threading.Event:
    """Makes threads raise RingError at their next step of Python; the returned event is set when one has. Python takes a class here, so one
    is made that contains the message."""
    raised = threading.Event()

    class Raised(RingError):
        def __init__(self) -> None:
            raised.set()
            super().__init__(message)

    Raised.__name__, Raised.__qualname__, Raised.__module__ = "RingError", "RingError", RingError.__module__
    for thread in dict.fromkeys(threads):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Raised))
    return raised


def _report(message: str) -> None:
    if logger.hasHandlers():
        logger.error(message)
    _tell(message)


def _tell(message: str) -> None:
    sys.stderr.write(f"dilated_attention: {message}\n")
    sys.stderr.flush()
    sys.stdout.flush()


def _allow_captures() -> None:
    """Lets this thread query events while another thread captures a CUDA graph; otherwise a query would invalidate the capture."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


_monitor = Monitor()


def watch(wire: Any) -> None:
    """Adds a wire to those that the process's monitor watches."""
    _monitor.add(wire)
    _monitor.start()


def watch_calls(group: Any) -> None:
    """Adds a group to those whose calls the process's monitor compares."""
    _monitor.add_calls(group)
    _monitor.start()


def _forget() -> None:
    # a thread does not survive in a forked child, and may have left its event locked
    global _monitor
    atexit.unregister(_monitor.stop)
    _monitor = Monitor()


# Windows has no fork
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
