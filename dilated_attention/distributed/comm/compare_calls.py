"""Detects ranks that make different calls of kinds they had agreed on: at once if one waits for another, else soon afterwards.

Twice a second, while there are new calls, a thread posts how many calls its rank has made and their checksum, and compares those of the
other ranks with its own at the same number. The calls themselves are not involved. A rank that finds a difference announces it in the
store; then all ranks post their last calls, look for the first one that differs, and thus arrive at the same message.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dilated_attention.distributed.comm.session import Session, names, store_call, until
from dilated_attention.distributed.comm.watchdog import COLLECT, Watched, watch_calls

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ABSENT = "no such argument"
# the number of a rank's last calls that it posts when ranks disagree
POSTED = 64
# seconds after the timeout of a rank's last call for which it still compares the others
LINGER = 10.0


class Comparison:
    """Compares this rank's calls on a group with those of the other ranks. All ranks make it, before their first handshake ends.

    Args:
        timeout: seconds that the calls may take.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self.timeout = timeout
        # a weak reference, because sessions own their comparisons
        self._session = weakref.ref(session)
        self._keys = [f"order/{rank}" for rank in range(session.size)]
        self._all_there = False
        self._posted = 0
        # the number of calls up to which all ranks are known to have made the same, and no more
        self._equal = 0
        self._lost = False
        self._lock = threading.RLock()
        store_call(session, lambda: session.store.set(self._keys[session.rank], "0 0"))
        # a connection of its own, because the calling thread may be waiting inside the other; made now, while the server answers
        clone: Any = getattr(session.store, "clone", None)
        self.store: Store = session.store if clone is None else store_call(session, clone)
        watch_calls(self)

    def wires(self) -> list[Watched]:
        session = self._session()
        wires = [] if session is None else [wire() for wire in session.wires]
        return [wire for wire in wires if wire is not None]

    def look(self) -> str | None:
        """Returns what ranks disagree on, once. For the watching thread; does not query the store if there is nothing new."""
        session = self._session()
        if session is None or session.failed is not None or not dist.is_initialized():
            return None
        order = session.order
        if order.count == self._equal or time.monotonic() - order.last > self.timeout + LINGER:
            return None
        return self.verdict()

    def verdict(self) -> str | None:
        """Returns what ranks disagree on, as far as it is known now, and marks the group as failed; None if no difference is known."""
        session = self._session()
        if session is None or self._lost:
            return None
        with self._lock:
            try:
                message = self._compare(session)
            except RuntimeError:
                # the store's server has ended, usually because the program has
                self._lost = True
                return None
        if message is not None and session.failed is None:
            session.failed = message
        return message

    def _compare(self, session: Session) -> str | None:
        order = session.order
        store, count = self.store, order.count
        mine = order.entry(count)
        if mine is not None and count > self._posted:
            store.set(self._keys[session.rank], f"{count} {mine.checksum}")
            self._posted = count
        if not store.check(["disagree"]):
            # the store would block on a missing key
            self._all_there = self._all_there or store.check(self._keys)
            if not self._all_there:
                return None
            posts = [tuple(map(int, text.split())) for text in store.multi_get(self._keys)]
            entries = [order.entry(number) for number, _ in posts]
            if all(entry is None or entry.checksum == checksum for entry, (_, checksum) in zip(entries, posts, strict=True)):
                if all(number == count for number, _ in posts):
                    self._equal = count
                return None
            store.set("disagree", "1")
        return _message(session, store)


def _message(session: Session, store: Store) -> str:
    order = session.order
    last = range(max(1, order.count - POSTED + 1), order.count + 1)
    entries = {number: entry for number in last if (entry := order.entry(number)) is not None}
    keys = [f"calls/{rank}" for rank in range(session.size)]
    if not store.check([keys[session.rank]]):
        store.set(keys[session.rank], json.dumps({number: [*entry[:2], dict(entry.arguments)] for number, entry in entries.items()}))
    until(lambda: store.check(keys) or None, COLLECT, session.size)
    posts = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    for number in sorted({number for post in posts.values() for number in post}, key=int):
        calls = {rank: post[number] for rank, post in posts.items() if number in post}
        if len({checksum for checksum, _, _ in calls.values()}) > 1:
            break
    else:
        calls = {}
    return (
        f"{_difference(session, calls)}; all ranks must make the same calls in the same order. Results of this call and of later ones on "
        "this group are void, and so is the group: end the process, or make a new group on all ranks (torch.distributed.new_group)"
    )


def _difference(session: Session, calls: Mapping[int, tuple[int, str, Mapping[str, str]]]) -> str:
    """Describes how the first calls that differ, given by rank, differ."""
    found = differences(session, {rank: arguments for rank, (_, _, arguments) in calls.items()})
    kinds = {rank: what for rank, (_, what, _) in calls.items()}
    if found and not any(what.startswith("the backward") for what in kinds.values()):
        return found
    if len(set(kinds.values())) > 1:
        told = {
            rank: f"{what} ({arguments.get('function', 'first use')})" if arguments else what
            for rank, (_, what, arguments) in calls.items()
        }
        return f"ranks disagree on what they call: {_sides(session, told)}"
    return "ranks disagree on what they have called"


def differences(session: Session, posts: Mapping[int, Mapping[str, str]]) -> str:
    """Formats how arguments, given by rank, differ; "" if all are equal.

    For example "ring_attention: ranks disagree on scale: ranks 0, 1 have 0.5, rank 2 has 0.25; on …".
    """
    arguments = list(dict.fromkeys(argument for post in posts.values() for argument in post))
    functions = {post.get("function") for post in posts.values()}
    if len(functions) > 1:
        # different functions have different arguments anyway
        arguments = ["function"]
    found = []
    for argument in arguments:
        values = {rank: post.get(argument, ABSENT) for rank, post in posts.items()}
        if len(set(values.values())) > 1:
            found.append(f"{argument}: {_sides(session, values)}")
    (function,) = functions if len(functions) == 1 else (None,)
    prefix = f"{function}: " if function is not None else ""
    return f"{prefix}ranks disagree on {'; on '.join(found)}" if found else ""


def _sides(session: Session, values: Mapping[int, str]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    # values of the most ranks come first, so that the exceptions are at the end
    sides = sorted(holders.items(), key=lambda side: (-len(side[1]), side[1]))
    return ", ".join(f"{names(session, ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in sides)
