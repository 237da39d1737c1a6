"""What a rank knows of a group: the calls made so far, what its ranks have agreed on, whether it has failed. Ranks tell each other through
the store of torch.distributed.

A call of a kind that the ranks have agreed on begins without asking the others. It leaves a number and a checksum of all calls so far,
which messages on gloo carry as their tag, so that those of different calls never match. Twice a second, while there are new calls, a thread
posts both (``compare``): a rank that finds a difference says so, and then all post their last calls and arrive at one message. Ranks that
give up waiting post that (``fail_waiting``), so the culprit is among the others.

The same thread finds exchanges on a GPU that stall, where waiting does not block the CPU. When an exchange could run for longer than the
timeout, or its communicator reports an error:

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
import json
import logging
import os
import re
import sys
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dilated_attention.distributed.comm.group import Members

# calls that a rank remembers; those that it posts when ranks disagree; kinds of calls that it remembers, before it forgets all of them
KEPT, POSTED, MOST_KINDS = 4096, 64, 4096
# seconds to wait for what the others post, since ranks of one stalled exchange time out together
COLLECT = 2.0
# seconds between looks, until the process ends, and in which a thread may raise by itself, else autograd's and the main thread would both
POLL, GRACE, OWN = 0.5, 10.0, 0.2


class RingError(RuntimeError):
    """Ranks that share a sequence could not exchange what they needed: one has died, stalled or made a different call.

    The group cannot be used afterwards: end the process; or, if all ranks are alive, make a new group on all of them.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's message, without its C++ location, its advice and its stack trace."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+\.\w+:\d+\] ", "", line).split(". This is typically caused")[0]


class Session:
    """A group on this rank, as long as the group lives. All ranks make it together; RingError if some have not within the timeout.

    ``failed``: message of the first failure; nothing is exchanged after it. ``has_raised``: whether a thread has raised it.
    ``count``, ``forwards``, ``handshakes``: the numbers of all that the ranks have called so far, and of forwards and handshakes alone.
    ``entries``: the last calls by number, from 1: checksum of it and all before, name, such as "call 3", and arguments.
    ``equal``: ``count`` when all ranks were last known to have made the same calls. ``compares``: whether the store answers.
    ``agreed``: of each kind of call that the ranks have agreed on the number of the handshake, and the arguments. They make the same
    calls, so they forget at the same one. ``calls``: of each call of such a kind its length, number and arguments.
    ``wires``: what the ranks exchange by, by type of device."""

    def __init__(self, members: Members, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.size = members.rank, members.size
        self.global_ranks = dist.get_process_group_ranks(group)
        self.name = self.names([self.rank])
        self.failed: str | None = None
        self.has_raised, self.compares = False, True
        self.handshakes = self.count = self.forwards = self.checksum = self.equal = 0
        self.entries: dict[int, tuple[int, str, Mapping[str, str]]] = {0: (0, "", {})}
        self.agreed: dict[object, Any] = {}
        self.calls: dict[object, Any] = {}
        self.wires: dict[str, Any] = {}
        default: Any = _get_default_store()
        if default is _parents_store:
            raise RingError(
                f"{self.name}: this process was forked from one that had initialised torch.distributed, whose connections do not work in "
                "it; start processes that exchange by spawn or forkserver, or call init_process_group in this one with a store of its own"
            )
        with self.asking():
            # a connection of its own: torch waits inside the usual one for what a dead rank never posts
            self.store: Any = PrefixStore(f"dilated_attention/{group.group_name}", default.clone())
            self._meet(timeout)

    def _meet(self, timeout: float) -> None:
        """Posts a fresh name; done when all have posted under the names of all. A store still contains the keys of groups that a program
        has destroyed, but none under the fresh name of this rank."""
        store, names, orders = self.store, self.keys("name"), self.keys("order")
        store.set(names[self.rank], uuid.uuid4().hex)

        def absent() -> list[int]:
            if late := missing(store, names):
                return late
            self.store = PrefixStore(uuid.uuid5(uuid.NAMESPACE_OID, str(store.multi_get(names))).hex, store)
            self.store.set(orders[self.rank], "0 0")
            return missing(self.store, orders)

        if not self.until(lambda: not absent(), timeout) and (late := absent()):
            raise RingError(
                f"{self.name}: first use of the group failed after {timeout:.1f} s: {self.names(late)} did not join; dead, stalled or busy "
                "with another call: all ranks of the group must make the same calls. Look at their output, or raise timeout= "
                f"({timeout:g} s) if they are only late"
            )

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around calls to the store; a failure means that the process that serves it has ended, and raises RingError."""
        try:
            yield
        except RingError:
            raise
        except RuntimeError as error:
            raise RingError(
                f"{self.name}: the store of torch.distributed does not answer ({first_line(error)}); the process that serves it, usually "
                "global rank 0, has ended: look at its output"
            ) from error

    def until(self, found: Callable[[], Any], timeout: float) -> Any:
        """Returns the first result of ``found`` that is true, polled less and less often; None after the timeout. A wait inside the store
        would block the process's other threads there and ignore Ctrl-C, and torch writes a warning for each that times out."""
        began = time.monotonic()
        while not (result := found()):
            waited = time.monotonic() - began
            if waited > timeout:
                return None
            time.sleep(min(0.01 + 0.001 * self.size, 5e-5 + waited / 4))
        return result

    def posts(self, what: str, mine: object, timeout: float) -> dict[int, Any]:
        """Posts ``mine`` once, and returns by rank what has been posted, after so many seconds at the latest; at once if the group fails,
        which the watching thread may find meanwhile."""
        store, keys = self.store, self.keys(what)
        if not store.check([keys[self.rank]]):
            store.set(keys[self.rank], json.dumps(mine))
        self.until(lambda: self.failed or store.check(keys), timeout)
        absent = missing(store, keys)
        there = [rank for rank in range(self.size) if rank not in absent]
        return dict(zip(there, map(json.loads, store.multi_get([keys[rank] for rank in there])), strict=True))

    def keys(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self.size)]

    def names(self, ranks: Sequence[int]) -> str:
        """Formats "rank 1" · "ranks 0, 1, 3" · "ranks 0, 1 (global ranks 1, 3)"."""
        others = [self.global_ranks[rank] for rank in ranks]
        text, more = (f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, some))}" for some in (ranks, others))
        return text if others == list(ranks) else f"{text} (global {more})"

    def enter(self, what: str, number: int = 0, arguments: Mapping[str, str] | None = None) -> None:
        """Records a call before it exchanges anything. ``number``: what the ranks' calls of its kind and length have in common."""
        count = self.count + 1
        self.checksum = zlib.crc32(b"%s %d" % (what.encode(), number), self.checksum)
        self.entries[count] = self.checksum, what, arguments or {}
        self.entries.pop(count - KEPT, None)
        # set last, because the watching thread asks for no entry above it
        self.count = count

    def enter_forward(self, number: int, arguments: Mapping[str, str] | None) -> int:
        """Records a call; returns its number among the calls of this group, counted from 1."""
        self.forwards += 1
        self.enter(f"call {self.forwards}", number, arguments)
        return self.forwards

    def remember(self, kind: object, agreement: tuple[int, Mapping[str, str]]) -> None:
        if len(self.agreed) >= MOST_KINDS:
            self.agreed.clear()
            self.calls.clear()
        self.agreed[kind] = agreement

    def check(self) -> None:
        if self.failed is not None:
            raise self.error(f"{self.name}: this group failed before and cannot be used again; it failed with: ")

    def error(self, again: str = "") -> RingError:
        """Returns what the group failed with, to be raised."""
        self.has_raised = True
        return RingError(f"{again}{self.failed}")

    def fail_waiting(self, what: str, number: int, peers: Sequence[int], trouble: str, timeout: float, collect: float) -> None:
        """Marks the group as failed, because this rank has waited in vain for ``peers`` in its exchange ``number``, described by ``what``,
        such as "forward, heads 1 of 2: K and V"; or because ranks disagree on what they call, if that is why."""
        compare(self)
        if self.failed is not None:
            return
        blamed = list(peers)
        try:
            waits = self.posts("waits", [f"{what!r} (exchange {number})", blamed], collect)
        except RuntimeError as error:
            blame = f"the store of torch.distributed does not answer either ({first_line(error)}): "
            blame += "its server, usually global rank 0, has ended"
        else:
            # a peer that has given up is a victim like this rank: whom it waits for, whom these wait for, and so on
            reached, front = {self.rank}, [self.rank]
            while front:
                new = set(waits[front.pop()][1]) - reached
                reached |= new
                front += new & waits.keys()
            silent = sorted(reached - waits.keys())
            told = [
                f"{self.names([rank])} gave up waiting for {self.names(others)} in {place}"
                for rank, (place, others) in waits.items()
                if rank in peers or not silent
            ]
            blame = f"all ranks report that they wait or have given up: {'; '.join(told)}"
            if silent:
                has, blamed = "has" if len(silent) == 1 else "have", silent
                blame = "; ".join([*told, f"{self.names(silent)} {has} not reported: dead, stalled or in another call"])
        way = f"Look at the output of {self.names(blamed)}, or raise timeout= ({timeout:g} s) if only slow"
        self.failed = self.failed or f"{self.name}: {what}{trouble}; {blame}. {way}"


def missing(store: Any, keys: list[str]) -> list[int]:
    """Returns the ranks whose key is not there."""
    return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]


def compare(session: Session) -> None:
    """Compares this rank's calls with those of the others, as far as they are known now, and marks the group as failed if they differ."""
    if session.failed is not None or not session.compares:
        return
    store, count, keys, calls = session.store, session.count, session.keys("order"), dict[int, Any]()
    try:
        store.set(keys[session.rank], f"{count} {session.entries[count][0]}")
        if not store.check(["disagree"]):
            orders = [tuple(map(int, text.split())) for text in store.multi_get(keys)]
            if all(session.entries.get(number, (checksum,))[0] == checksum for number, checksum in orders):
                if all(number == count for number, _ in orders):
                    session.equal = count
                return
            store.set("disagree", "1")
        posts = session.posts("calls", dict(list(session.entries.items())[-POSTED:]), COLLECT)
    except RuntimeError:
        # the store's server has ended, usually because the program has
        session.compares = False
        return
    for number in sorted({int(number) for post in posts.values() for number in post}):
        calls = {rank: post[str(number)] for rank, post in posts.items() if str(number) in post}
        if len({checksum for checksum, _, _ in calls.values()}) > 1:
            break
    session.failed = session.failed or (
        f"{_difference(session, calls)}; all ranks must make the same calls in the same order. Results of this call and of later ones on "
        "this group are void, and so is the group: end the process, or make a new group on all ranks (torch.distributed.new_group)"
    )


def _difference(session: Session, calls: Mapping[int, tuple[int, str, Mapping[str, str]]]) -> str:
    """Describes how calls, given by rank, differ."""
    kinds = {what for _, what, _ in calls.values()}
    text = differences(session, {rank: arguments for rank, (_, _, arguments) in calls.items()})
    if text and not any(what.startswith("the backward") for what in kinds):
        return text
    if len(kinds) < 2:
        return "ranks disagree on what they have called"
    named = {rank: f"{what} ({has.get('function', 'first use')})" if has else what for rank, (_, what, has) in calls.items()}
    return f"ranks disagree on what they call: {_sides(session, named)}"


def differences(session: Session, posts: Mapping[int, Mapping[str, str]]) -> str:
    """Formats how arguments, by rank, differ, e.g. "ring_attention: ranks disagree on scale: ranks 0, 1 have 0.5, rank 2 has 0.25; on …";
    "" if all are equal."""
    functions = {post.get("function") for post in posts.values()}
    # different functions have different arguments anyway
    arguments = ["function"] if len(functions) > 1 else dict.fromkeys(argument for post in posts.values() for argument in post)
    found = []
    for argument in arguments:
        values = {rank: post.get(argument, "no such argument") for rank, post in posts.items()}
        if len(set(values.values())) > 1:
            found.append(f"{argument}: {_sides(session, values)}")
    prefix = f"{functions.pop()}: " if len(functions) == 1 and None not in functions else ""
    return f"{prefix}ranks disagree on {'; on '.join(found)}" if found else ""


def _sides(session: Session, values: Mapping[int, str]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    # values of the most ranks come first, so that the exceptions are at the end
    sides = sorted(holders.items(), key=lambda side: (-len(side[1]), side[1]))
    return ", ".join(f"{session.names(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in sides)


sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
# the store of the groups that existed when this process was forked
_parents_store: Any = None


def _leave_parents_groups() -> None:
    global _parents_store
    sessions.clear()
    _parents_store = _get_default_store() if dist.is_initialized() else None


# Windows has no fork
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parents_groups)


# --- the watching thread ----------------------------------------------------------------------------------------------------------


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
