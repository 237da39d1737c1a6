"""What a rank knows of a group: the calls made so far, what its ranks have agreed on, whether it has failed. Ranks tell each other through
the store of torch.distributed.

A call of a kind that the ranks have agreed on begins without asking the others. It adds to a count and a checksum of all calls so far;
messages on gloo carry the checksum as their tag, so that those of different calls never match. Twice a second, while there are new calls, a
thread posts count and checksum (``compare``): a rank that finds a difference says so. Then all post their last calls, and each makes the
same message of them. Ranks that give up waiting post that (``fail_waiting``), so the culprit is among the others.

The same thread finds exchanges on a GPU that stall, where waiting does not block the CPU. When an exchange could run for longer than the
timeout, or its communicator reports an error:

    1. this rank posts what it waits for, and for 2 s (COLLECT) reads what the others post, to find out who is to blame
    2. the group is marked as failed, and the error goes to stderr; a thread that comes to the group raises RingError
    3. the group's communicators are aborted, so that kernels that wait for a dead rank end and the GPU is free
    4. if nothing raises by itself, RingError is injected into the thread that issued the last exchange, which raises it when it runs Python
       again; a second later into the main thread, too
    5. if nothing has raised within 10 s (GRACE), because a thread is stuck in a CUDA call, the process ends with exit code 1

So no rank outlives a dead one by more than timeout + COLLECT + GRACE and a few times POLL. Different calls end by steps 2 to 5, too. On a
CPU steps 2 and 3 are enough, since the thread that waits raises by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dilated_attention.distributed.comm.group import Members

# the largest number of calls that a rank remembers, each as an ``Entry``
MOST_ENTRIES = 4096
# how many of them, the last ones, it posts when ranks disagree
POSTED_ENTRIES = 64
# seconds to wait for what the others post, since ranks of one stalled exchange time out together
COLLECT = 2.0
# seconds between looks of the watching thread
POLL = 0.5
# seconds from a failure until the process ends, if no thread has raised
GRACE = 10.0
# the key in ``Entry.arguments`` that says which call it is; messages print it: "ranks disagree on what they call: …"
CALLED = "what they call"
# seconds from a failure for the thread that waits to raise by itself; without them autograd's thread and the main thread would both raise
RAISES_ITSELF = 0.2


class RingError(RuntimeError):
    """Ranks that share a sequence could not exchange what they needed: one has died, stalled or made a different call.

    The group cannot be used afterwards: end the process; or, if all ranks are alive, make a new group on all of them.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's message, without its C++ location, its advice and its stack trace."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+\.\w+:\d+\] ", "", line).split(". This is typically caused")[0]


class Entry(NamedTuple):
    """A call that a rank has made.

    Args:
        checksum: of all calls up to this one.
        arguments: by name, for messages; ``CALLED`` is which call it is, such as "call 3 (ring_attention)". Empty before the first call.
    """

    checksum: int
    arguments: Mapping[str, object]


class Session:
    """A group on this rank, as long as the group lives. All ranks make it together; RingError if some have not within the timeout.

    Attributes:
        label: this rank as messages name it, such as "rank 1".
        timeout: seconds that the last call lets others wait.
        failed: message of the first failure; nothing is exchanged after it.
        has_raised: whether a thread has raised it.
        count: how many calls this rank has made so far: forwards, backwards and handshakes.
        forwards, handshakes: how many of these there were.
        entries: the last calls, by ``count`` at each. 0 stands for no call.
        count_when_equal: ``count`` when all ranks were last known to have made the same calls; infinite if nobody can be asked.
        agreed: kind of call → (``handshakes`` when the ranks agreed on it, arguments). ``call_consistency.py`` adds kinds, and forgets all
            when there are too many: on all ranks at the same call, since they make the same calls.
        agreed_calls: for this rank's last calls, all that an agreement depends on → (N, arguments, a text that is equal on all ranks if
            kind and length are).
        wires: type of device → the ``p2p.Wire`` that exchanges rows of its tensors.
    """

    def __init__(self, members: Members, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.size, self.timeout = members.rank, members.size, timeout
        self.global_ranks = dist.get_process_group_ranks(group)
        self.label = self.ranks_text([self.rank])
        self.failed: str | None = None
        self.has_raised = False
        self.handshakes = self.count = self.forwards = 0
        self.count_when_equal: float = 0
        self.entries = {0: Entry(0, {})}
        self.agreed: dict[object, tuple[int, Mapping[str, object]]] = {}
        self.agreed_calls: dict[object, Any] = {}
        self.wires: dict[str, Any] = {}
        default: Any = _get_default_store()
        # of the process that this one was forked from, see _leave_parents_groups
        if default is _parents_store:
            raise RingError(
                f"{self.label}: this process was forked from one that had initialised torch.distributed, whose connections do not work in "
                "it; start processes that exchange by spawn or forkserver, or call init_process_group in this one with a store of its own"
            )
        with self.asking():
            # a second connection: torch blocks the usual one while it waits for what a dead rank never posts
            self.store: Any = PrefixStore(f"dilated_attention/{group.group_name}", default.clone())
            absent = self._meet()
        if absent:
            raise RingError(
                f"{self.label}: first use of the group failed after {timeout:.1f} s: {self.ranks_text(absent)} did not join; dead, stalled "
                "or busy with another call: all ranks of the group must make the same calls. Look at their output, or raise timeout= "
                f"({timeout:g} s) if they are only late"
            )

    def _meet(self) -> list[int]:
        """Waits for all ranks, and replaces the store by one for this session alone. Returns the ranks that are absent.

        Every rank posts a fresh name. The session's store has a prefix made of the names of all, so it has none of the keys that a
        destroyed group of this name has left behind. All ranks have come when all have posted there: all have then read the same names.
        """
        store, name_keys, order_keys = self.store, self.keys("name"), self.keys("order")
        store.set(name_keys[self.rank], uuid.uuid4().hex)

        def join() -> list[int]:
            """Posts in the session's store, if all names are there; returns the ranks still absent. Called until there are none."""
            if late := missing(store, name_keys):
                return late
            # a name that a destroyed group has left behind may be read before its rank replaces it, so names are read anew each time
            self.store = PrefixStore(uuid.uuid5(uuid.NAMESPACE_OID, str(store.multi_get(name_keys))).hex, store)
            # what ``compare`` reads: count and checksum; there are no calls yet
            self.store.set(order_keys[self.rank], "0 0")
            return missing(self.store, order_keys)

        self.until(lambda: not join())
        return join()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """A context for calls to the store: raises RingError if one fails, since then the process that serves it has ended."""
        try:
            yield
        except RuntimeError as error:
            raise RingError(
                f"{self.label}: the store of torch.distributed does not answer ({first_line(error)}); the process that serves it, usually "
                "global rank 0, has ended: look at its output"
            ) from error

    def until(self, condition: Callable[[], object], timeout: float | None = None) -> None:
        """Waits until ``condition`` returns something true, or the timeout; asks less and less often.

        A wait inside the store would block the process's other threads there and ignore Ctrl-C, and torch writes a warning for each that
        times out.
        """
        began, timeout = time.monotonic(), self.timeout if timeout is None else timeout
        while not condition() and (waited := time.monotonic() - began) <= timeout:
            time.sleep(min(0.01 + 0.001 * self.size, 5e-5 + waited / 4))

    def post_and_collect(self, what: str, mine: object, timeout: float | None = None) -> dict[int, Any]:
        """Posts ``mine`` in the store as this rank's ``what``, and returns rank → what it has posted, for the ranks that have posted.

        It waits for all of them, until the timeout, or until the watching thread finds that the group has failed.
        """
        store, keys = self.store, self.keys(what)
        # only if nothing is there (""): the watching thread and one that waits may both come here, and all ranks must read the same
        store.compare_set(keys[self.rank], "", json.dumps(mine, default=str))
        self.until(lambda: self.failed or store.check(keys), timeout)
        posted = sorted({*range(self.size)} - {*missing(store, keys)})
        return dict(zip(posted, map(json.loads, store.multi_get([keys[rank] for rank in posted])), strict=True))

    def keys(self, what: str) -> list[str]:
        """Returns for each rank the key in the store under which it posts its ``what``."""
        return [f"{what}/{rank}" for rank in range(self.size)]

    def ranks_text(self, ranks: Sequence[int]) -> str:
        """Formats "rank 1" · "ranks 0, 1, 3" · "ranks 0, 1 (global ranks 1, 3)"."""
        global_ranks = [self.global_ranks[rank] for rank in ranks]
        text, global_text = (f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, numbers))}" for numbers in (ranks, global_ranks))
        return text if global_ranks == list(ranks) else f"{text} (global {global_text})"

    def enter(self, what: str, arguments: Mapping[str, object] | None = None, shared: str = "") -> None:
        """Records a call before it exchanges anything.

        Args:
            what: which call it is.
            arguments: what messages say of it, by name.
            shared: a text that is equal on all ranks if the call's kind and length are. It enters the checksum with ``what``.
        """
        count = self.count + 1
        checksum = zlib.crc32(f"{what} {shared}".encode(), self.entries[self.count].checksum)
        self.entries[count] = Entry(checksum, {**(arguments or {}), CALLED: what})
        self.entries.pop(count - MOST_ENTRIES, None)
        # set last, because the watching thread asks for no entry above it
        self.count = count

    def raise_if_failed(self) -> None:
        if self.failed is not None:
            raise self.error_to_raise(f"{self.label}: this group failed before and cannot be used again; it failed with: ")

    def error_to_raise(self, prefix: str = "") -> RingError:
        """Returns what the group failed with. The caller raises it at once: it counts as raised (``has_raised``)."""
        self.has_raised = True
        return RingError(f"{prefix}{self.failed}")

    def fail_waiting(self, what: str, exchange: int, peers: Sequence[int], trouble: str) -> None:
        """Marks the group as failed, because this rank has waited in vain for ``peers`` in an exchange. If the ranks disagree on what they
        call, that is why, and the message says it instead.

        Args:
            what, exchange: its description, such as "forward, heads 1 of 2: K and V", and its number.
            trouble: how it failed, for the message.
        """
        compare(self)
        if self.failed is not None:
            return
        try:
            with self.asking():
                # rank → (the exchange in which it gave up, for whom it waited)
                waits = self.post_and_collect("waits", [f"{what!r} (exchange {exchange})", peers], COLLECT)
        except RingError as error:
            blame = str(error)
        else:
            # a peer that has given up is a victim like this rank, so the culprit is among those that it waits for, or that these wait for,
            # and so on: the ranks reached that have posted nothing. The list grows in the loop
            waited_for = {rank: others for rank, (_, others) in waits.items()}
            reached = [self.rank]
            for rank in reached:
                reached += [peer for peer in waited_for.get(rank, ()) if peer not in reached]
            silent = sorted(set(reached) - waits.keys())
            told = [
                f"{self.ranks_text([rank])} gave up waiting for {self.ranks_text(others)} in {exchange_text}"
                for rank, (exchange_text, others) in waits.items()
                if rank != self.rank
            ]
            if silent:
                told.append(
                    f"{self.ranks_text(silent)} {'has' if len(silent) == 1 else 'have'} not reported: dead, stalled or in another call"
                )
            advice = f"Look at the output of {self.ranks_text(silent or peers)}, or raise timeout= ({self.timeout:g} s) if only slow"
            blame = f"{'' if silent else 'all ranks report that they wait or have given up: '}{'; '.join(told)}. {advice}"
        # the first failure stays: the watching thread may have found another one in the meantime
        self.failed = self.failed or f"{self.label}: {what}{trouble}; {blame}"


def missing(store: Any, keys: list[str]) -> list[int]:
    """Returns the ranks whose key is not there."""
    return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]


def compare(session: Session) -> None:
    """Compares this rank's calls with those of the others, as far as they are known now, and marks the group as failed if they differ."""
    if session.failed is not None:
        return
    store, count, keys = session.store, session.count, session.keys("order")
    try:
        store.set(keys[session.rank], f"{count} {session.entries[count].checksum}")
        # whoever finds a difference sets this key, so that all ranks go on, also those that see none themselves
        if not store.check(["disagree"]):
            orders = [tuple(map(int, text.split())) for text in store.multi_get(keys)]
            # a rank that has made more calls than this one, or so few that this one has forgotten their entry, is compared when both have
            # made equally many
            known = [(session.entries.get(their_count), checksum) for their_count, checksum in orders]
            if all(entry is None or entry.checksum == checksum for entry, checksum in known):
                if all(their_count == count for their_count, _ in orders):
                    session.count_when_equal = count
                return
            store.set("disagree", "1")
        posts = session.post_and_collect("calls", dict(list(session.entries.items())[-POSTED_ENTRIES:]), COLLECT)
    except RuntimeError:
        # the store's server has ended, usually because the program has
        session.count_when_equal = math.inf
        return
    # rank → [checksum, arguments], of the first call that differs among those posted; of the last one if none of these do
    calls: dict[int, Any] = {}
    for number in sorted({int(key) for post in posts.values() for key in post}):
        calls = {rank: post[str(number)] for rank, post in posts.items() if str(number) in post}
        if len({checksum for checksum, _ in calls.values()}) > 1:
            break
    arguments = {rank: arguments for rank, (_, arguments) in calls.items()}
    if not all("function" in some for some in arguments.values()):
        # some ranks run a backward, which has no arguments, so the message compares only which call it is
        arguments = {rank: {CALLED: some.get(CALLED, "no call")} for rank, some in arguments.items()}
    session.failed = session.failed or (
        f"{differences(session, arguments) or 'ranks disagree on what they have called'}; all ranks must make the same calls in the same "
        "order. Results of this call and of later ones on this group are void, and so is the group: end the process, or make a new group "
        "on all ranks (torch.distributed.new_group)"
    )


def differences(session: Session, arguments_of: Mapping[int, Mapping[str, object]]) -> str:
    """Formats how the arguments of each rank's call differ, e.g. "ring_attention: ranks disagree on scale: ranks 0, 1 have 0.5, rank 2 has
    0.25; on …"; "" if all are equal."""
    functions = {arguments.get("function") for arguments in arguments_of.values()}
    # different functions have different arguments anyway
    names = ["function"] if len(functions) > 1 else dict.fromkeys(name for arguments in arguments_of.values() for name in arguments)
    found = []
    for name in names:
        ranks_of_value: dict[str, list[int]] = {}
        for rank, arguments in arguments_of.items():
            ranks_of_value.setdefault(str(arguments.get(name, "no such argument")), []).append(rank)
        # values of the most ranks come first, so that the exceptions are at the end
        groups = sorted(ranks_of_value.items(), key=lambda group: (-len(group[1]), group[1]))
        if len(groups) > 1:
            texts = (f"{session.ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in groups)
            found.append(f"{name}: {', '.join(texts)}")
    # the message begins with the function if all ranks call the same one
    function = functions.pop() if len(functions) == 1 else None
    prefix = "" if function is None else f"{function}: "
    return f"{prefix}ranks disagree on {'; on '.join(found)}" if found else ""


sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
# the store of the groups that existed when this process was forked
_parents_store: Any = None


def _leave_parents_groups() -> None:
    """Forgets, in a forked child, the groups of its parent, whose connections it must not use."""
    global _parents_store
    sessions.clear()
    _parents_store = _get_default_store() if dist.is_initialized() else None


# Windows has no fork
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parents_groups)


# --- sessions and their watching threads ------------------------------------------------------------------------------------------


def session_of(members: Members, timeout: float) -> Session:
    """Returns the group's session, with this timeout from now on. At its first use all ranks must call this together; RingError if some
    have not within the timeout, or if the group has failed."""
    assert members.group is not None, "one process has nobody to tell"
    session = sessions.get(members.group)
    if session is None:
        session = sessions[members.group] = Session(members, members.group, timeout)
        stopping = threading.Event()
        thread = threading.Thread(target=_watch, args=(weakref.ref(session), stopping), name="dilated_attention exchanges", daemon=True)
        thread.start()
        # before the interpreter shuts down, when a daemon thread could only fail
        atexit.register(_stop, thread, stopping)
    session.timeout = timeout
    session.raise_if_failed()
    return session


def _stop(thread: threading.Thread, stopping: threading.Event) -> None:
    # in a forked child it is not alive, and may have left its event locked
    if thread.is_alive():
        stopping.set()
        thread.join(2 * POLL)


def _watch(watched: weakref.ref[Session], stopping: threading.Event) -> None:
    """Runs in the watching thread, until the session has failed or is gone, or the interpreter ends."""
    with contextlib.suppress(OSError):
        # CU_STREAM_CAPTURE_MODE_RELAXED: otherwise a query of an event would invalidate the CUDA graph that another thread captures
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))
    while not stopping.wait(POLL) and (session := watched()) is not None and session.failed is None:
        try:
            look(session)
        except Exception:
            if not stopping.is_set():
                logging.getLogger("dilated_attention").exception("watching exchanges failed; trying again")
        # while this thread waits, it must not keep the session alive
        del session


def look(session: Session) -> None:
    """Looks once whether the ranks make different calls or an exchange on a GPU has stalled, and then ends what waits."""
    wire = session.wires.get("cuda")
    if session.count > session.count_when_equal and dist.is_initialized():
        compare(session)
    if session.failed is None and wire is not None and (stalled := wire.stalled()) is not None:
        exchange, trouble = stalled
        trouble = f": exchange {exchange.number} with {session.ranks_text(exchange.peers)} {trouble}"
        session.fail_waiting(exchange.what, exchange.number, exchange.peers, trouble)
    if session.failed is not None:
        _end(session)


def _end(session: Session) -> None:
    """Does steps 2 to 5 of the module docstring, for a session that has failed.

    On a CPU the thread that waits raises by itself once its wait is aborted. On a GPU perhaps no thread waits, although results are wrong:
    if none raises, the error is injected into the thread that issued the last exchange, and a second later into the main thread, too.
    """
    began = time.monotonic()
    _tell(f"{session.failed}")
    aborters = [thread for wire in session.wires.values() for thread in wire.abort()]

    def init_with_message(self: RingError) -> None:
        session.has_raised = True
        RingError.__init__(self, session.failed)

    # PyThreadState_SetAsyncExc takes a class, which Python calls without arguments when the thread runs, so this one contains the message
    error_class = type("RingError", (RingError,), {"__init__": init_with_message, "__module__": RingError.__module__})
    if (wire := session.wires.get("cuda")) is not None:
        main = threading.main_thread().ident
        thread = wire.pending[-1].thread if wire.pending else main
        # (seconds after the failure, threads into which the error is then injected, unless one has raised it). No threads: the process
        # ends. An autograd thread that has nothing more to do never raises, hence the main thread
        for deadline, threads in (RAISES_ITSELF, {thread}), (RAISES_ITSELF + 1, {thread, main}), (GRACE, set[int]()):
            while not session.has_raised and time.monotonic() - began < deadline:
                time.sleep(0.05)
            if session.has_raised:
                break
            if not threads:
                _tell(f"nothing raised within {GRACE:g} s of this error, so this process ends now: {session.failed}")
                os._exit(1)
            for thread_id in threads:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id or 0), ctypes.py_object(error_class))
    for aborter in aborters:
        aborter.join(max(0.0, began + GRACE - time.monotonic()))


def _tell(message: str) -> None:
    sys.stderr.write(f"dilated_attention: {message}\n")
    sys.stderr.flush()
    sys.stdout.flush()
