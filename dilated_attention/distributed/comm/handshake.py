"""Checks that all ranks of a group make the same call, and finds the ranks that keep the others waiting, through the store: ranks that
disagree would hang in a collective, or interpret one tensor as another.

A first call of a kind is compared before any tensor is sent. Afterwards, twice a second while there are new calls, a thread posts how many
calls its rank has made and their checksum, and compares those of the other ranks at the same number; the calls are not involved. A rank
that finds a difference announces it; then all ranks post their last calls, look for the first that differs, and arrive at one message.
Ranks that give up waiting post that, so the culprit is among the others.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.session import CallForm, Session, name, names, session_of, store_call, until
from dilated_attention.distributed.comm.watchdog import COLLECT, watch_calls
from dilated_attention.distributed.errors import RingError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Wait:
    """What a rank waited for when it gave up: exchange number ``exchange`` of its lane, alike on all ranks, described by ``what``, such as
    "ring forward, hop 2: K and V"; ``peers``: the ranks of the group that it needs."""

    lane: str
    exchange: int
    what: str
    peers: tuple[int, ...]


def culprits(waits: Mapping[int, Wait], rank: int) -> tuple[list[int], list[int]]:
    """Returns (ranks that posted nothing although someone waits for them, ranks that wait in an earlier exchange than this one).

    Starting from this rank, follows who waits for whom: a peer that has given up is a victim like this rank. The second list only
    matters if the first is empty, because a rank may be behind because of a silent one.
    """
    reached, front = {rank}, [rank]
    while front:
        for peer in waits[front.pop()].peers:
            if peer not in reached:
                reached.add(peer)
                if peer in waits:
                    front.append(peer)
    silent = sorted(reached - waits.keys())
    mine = waits[rank]
    behind = sorted(r for r, wait in waits.items() if wait.lane == mine.lane and wait.exchange < mine.exchange)
    return silent, behind


def explain(session: Session, wait: Wait, collect: float) -> tuple[str, list[int]]:
    """Posts this rank's wait, and returns a sentence that says who is to blame, and these ranks. ``collect``: seconds to wait for the
    others' posts, since ranks of one stalled exchange time out together; 0 if a broken connection already names the peer."""
    store = session.store
    keys = [f"waits/{rank}" for rank in range(session.size)]
    try:
        store.set(keys[session.rank], json.dumps(asdict(wait)))
        until(lambda: store.check(keys) or None, collect, session.size)
        texts = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
    except RuntimeError as error:
        ended = f"the store of torch.distributed does not answer either ({first_line(error)}): its server, usually global rank 0, has ended"
        return ended, list(wait.peers)
    waits = {rank: Wait(**json.loads(text)) for rank, text in texts.items()}
    waits[session.rank] = wait
    silent, behind = culprits(waits, session.rank)
    if silent:
        told = [_told(session, waits, peer) for peer in wait.peers if peer in waits]
        verdict = f"{names(session, silent)} {_has(silent)} not reported: dead, stalled or in another call"
        return "; ".join([*told, verdict]), silent
    if behind:
        return "; ".join(_told(session, waits, rank) + ", which comes earlier: it made fewer or more calls" for rank in behind), behind
    told = [_told(session, waits, rank) for rank in waits]
    return f"all ranks report that they wait or have given up: {'; '.join(told)}", list(wait.peers)


def _told(session: Session, waits: Mapping[int, Wait], rank: int) -> str:
    wait = waits[rank]
    return (
        f"{name(session, rank)} gave up waiting for {names(session, wait.peers)} in {wait.what!r} ({wait.lane}, exchange {wait.exchange})"
    )


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


ABSENT = "no such argument"
# the number of a rank's last calls that it posts when ranks disagree
POSTED = 64
# seconds after the timeout of a rank's last call for which it still compares the others
LINGER = 10.0


class Comparison:
    """Compares this rank's calls on a group, which may take ``timeout`` seconds, with those of the others. All ranks make it, before their
    first handshake ends."""

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

    def wire(self) -> Any:
        session = self._session()
        return None if session is None or session.wire is None else session.wire()

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
    """Formats how arguments, by rank, differ, e.g. "ring_attention: ranks disagree on scale: ranks 0, 1 have 0.5, rank 2 has 0.25; on …";
    "" if all are equal."""
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


def agree(members: Members, same: Mapping[str, object], own: Mapping[str, int], timeout: float) -> list[dict[str, int]]:
    """Returns every rank's ``own`` numbers in order of rank, once ``same`` is found equal on all. All ranks of the group must call it.

    Args:
        same: name and printable value of everything that must be equal; ``"function"``, if given, names the call in messages.
        own: numbers that may differ, such as each rank's rows.
        timeout: seconds to wait for the slowest rank, then RingError names those that posted nothing.

    Raises ValueError if arguments differ, with the same message on every rank: which argument, and which ranks have which value.
    """
    if members.group is None:
        return [dict(own)]
    session = session_of(members, timeout)
    session.check()
    call = session.calls
    session.calls += 1
    arguments = {key: str(value) for key, value in same.items()}
    mine = json.dumps([arguments, dict(own)])
    if session.comparison is None:
        session.comparison = Comparison(session, timeout)
    session.comparison.timeout = timeout
    session.order.enter_handshake(CallForm(call, arguments))
    what = f"{same.get('function', 'first use')}: check that all ranks make the same call"
    texts = gather(session, f"agree/{call}", what, timeout, mine)
    if call > 0:
        # all ranks have posted this call, so all have read the previous one
        store_call(session, lambda: session.store.delete_key(f"agree/{call - 1}/{session.rank}"))
    posts = [json.loads(text) for text in texts]
    found = differences(session, {rank: post[0] for rank, post in enumerate(posts)})
    if found:
        raise ValueError(f"{found}; all ranks must make the same call")
    return [post[1] for post in posts]


def gather(session: Session, place: str, what: str, timeout: float, mine: str = "") -> list[bytes]:
    """Gathers every rank's text, posted under ``place`` and the rank. Raises RingError, naming the ranks, if some posted nothing within the
    timeout, the store is gone, or the group failed before."""
    session.check()
    store = session.store
    keys = [f"{place}/{rank}" for rank in range(session.size)]

    def all_texts() -> list[bytes] | None:
        if session.failed is not None:
            # the watching thread has found a failure
            session.told = True
            raise RingError(session.failed)
        return store.multi_get(keys) if store.check(keys) else None

    store_call(session, lambda: store.set(keys[session.rank], mine))
    texts = store_call(session, lambda: until(all_texts, timeout, session.size))
    if texts is None:
        absent = store_call(session, lambda: [rank for rank, key in enumerate(keys) if not store.check([key])])
        if absent:
            raise _late(session, what, absent, timeout)
        # the last text arrived at the last moment
        texts = store_call(session, lambda: store.multi_get(keys))
    return texts


def _late(session: Session, what: str, absent: list[int], timeout: float) -> RingError:
    session.told = True
    if session.disagreement() is not None:
        return RingError(session.failed)
    # the others give up in their own time; report what is known by now
    blame, _ = explain(session, Wait("handshake", session.calls, what, tuple(absent)), collect=0.0)
    session.failed = (
        f"{name(session, session.rank)}: {what} failed after {timeout:.1f} s: {names(session, absent)} posted nothing; {blame}. All ranks "
        f"of a group make the same calls in the same order: look at the output of {names(session, absent)}, or raise timeout= "
        f"({timeout:g} s) if only late"
    )
    return RingError(session.failed)
