"""Watches a group: compares the calls of its ranks, and finds exchanges on a GPU that stall, where waiting does not block the CPU.

A thread looks every half second. When an exchange could run for longer than the timeout, or its communicator reports an error:

    1. this rank posts what it waits for, and for 2 s (COLLECT) reads what the others post, to find out who is to blame
    2. the group is marked as failed, and the error goes to stderr; a thread that comes to the group raises RingError
    3. the group's communicators are aborted, so that kernels that wait for a dead rank end and the GPU is free
    4. if nothing raises, the thread that issued the exchange is made to as soon as it runs Python again, and then the main thread, too
    5. if nothing has raised within 10 s (GRACE), because a thread is stuck in a CUDA call, the process ends with exit code 1

So no rank outlives a dead one by more than timeout + 12 s and a few looks. Different calls end in the same way, also on a CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref

import torch.distributed as dist

from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.session import COLLECT, Session, compare, sessions
from dilated_attention.distributed.errors import RingError

# seconds between looks, until the process ends, and in which a thread may raise by itself, else autograd's and the main thread would both
POLL, GRACE, OWN = 0.5, 10.0, 0.2


def session_of(members: Members, timeout: float) -> Session:
    """Returns the group's session. At its first use all ranks must call this together; RingError if some have not within the timeout."""
    assert members.group is not None, "one process has nobody to tell"
    session = sessions.get(members.group)
    if session is None:
        session = sessions[members.group] = Session(members, members.group, timeout)
        stopping = threading.Event()
        thread = threading.Thread(target=_run, args=(weakref.ref(session), stopping), name="dilated_attention exchanges", daemon=True)
        thread.start()
        # before the interpreter shuts down, when a daemon thread could only fail
        atexit.register(_stop, thread, stopping)
    return session


def _stop(thread: threading.Thread, stopping: threading.Event) -> None:
    # in a forked child it is not alive, and may have left its event locked
    if thread.is_alive():
        stopping.set()
        thread.join(2 * POLL)


def _run(watched: weakref.ref[Session], stopping: threading.Event) -> None:
    with contextlib.suppress(OSError):
        # CU_STREAM_CAPTURE_MODE_RELAXED: otherwise a query of an event would invalidate the CUDA graph that another thread captures
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))
    while not stopping.wait(POLL) and (session := watched()) is not None and session.failed is None:
        try:
            look(session)
        except Exception:
            if not stopping.is_set():
                logging.getLogger("dilated_attention").exception("watching exchanges failed; trying again")
        del session


def look(session: Session) -> None:
    """Ends what waits if the ranks make different calls, or an exchange on a GPU has stalled."""
    wire = session.wires.get("cuda")
    if session.count != session.equal and dist.is_initialized():
        compare(session)
    if session.failed is not None:
        # a GPU has computed with wrong keys; on a CPU the thread that waits raises by itself
        _end(session, None if wire is None else wire.pending[-1].thread if wire.pending else threading.main_thread().ident, 0.0)
    elif wire is not None and (stalled := wire.stalled()) is not None:
        exchange, trouble = stalled
        trouble = f": exchange {exchange.number} with {session.names(exchange.peers)} {trouble}"
        session.fail_waiting(exchange.what, exchange.number, exchange.peers, trouble, wire.timeout, COLLECT)
        _end(session, exchange.thread, OWN)


def _end(session: Session, thread: int | None, patience: float) -> None:
    """Frees what waits, and sees to it that a thread raises: ``thread`` after so many seconds, None if it will by itself, as on a CPU."""
    message, raised, began = str(session.failed), threading.Event(), time.monotonic()
    _tell(message)
    aborting = [one for wire in session.wires.values() for one in wire.abort()]

    def raise_it(self: RingError) -> None:
        raised.set()
        RingError.__init__(self, message)

    # Python takes a class here, so this one contains the message
    kind = type("RingError", (RingError,), {"__init__": raise_it, "__module__": RingError.__module__})
    if thread is not None:
        # an autograd thread that has nothing more to do never raises
        for seconds, threads in ((patience, {thread}), (patience + 1, {thread, threading.main_thread().ident}), (GRACE, set())):
            while not (has_raised := raised.is_set() or session.has_raised) and time.monotonic() - began < seconds:
                raised.wait(0.05)
            if has_raised:
                break
            if not threads:
                _tell(f"nothing raised within {GRACE:g} s of this error, so this process ends now: {message}")
                os._exit(1)
            for one in threads:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(one or 0), ctypes.py_object(kind))
    for one in aborting:
        one.join(max(0.0, began + GRACE - time.monotonic()))


def _tell(message: str) -> None:
    sys.stderr.write(f"dilated_attention: {message}\n")
    sys.stderr.flush()
    sys.stdout.flush()
