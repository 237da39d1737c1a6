"""A group's state: the calls that its ranks have made, and small messages between them through the store of torch.distributed.

A call of a kind that the ranks have agreed on begins without asking the others. It leaves a number and a checksum of all calls so far,
which messages on gloo carry as their tag, so that those of different calls never match, and ``handshake.py`` compares. A store outlives
groups, and still contains the keys of those that a program has destroyed. So the ranks meet once per group object, each with a fresh unique
name, and all later keys contain those names.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.errors import RingError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# the number of calls whose checksums a rank keeps
KEPT = 4096


class CallForm(NamedTuple):
    """A kind of call that all ranks have agreed on, in the handshake of this ``number``, and its equal ``arguments`` by name."""

    number: int
    arguments: Mapping[str, str]


class CallEntry(NamedTuple):
    """One call on a group, its backward, or a handshake: the ``checksum`` of it and all before it, and its name, such as "call 3"."""

    checksum: int
    what: str
    arguments: Mapping[str, str]


class CallOrder:
    """A rank's calls on one group. One thread makes them, another one reads them."""

    def __init__(self) -> None:
        # the numbers of all entries, and of calls alone
        self.count = 0
        self.forwards = 0
        self.checksum = 0
        # time.monotonic() of the last entry
        self.last = 0.0
        self._entries: dict[int, CallEntry] = {}

    def enter_handshake(self, form: CallForm) -> None:
        """Records that this rank asks the others whether they make the same call."""
        self._enter("a handshake", form)

    def enter_forward(self, form: CallForm) -> int:
        """Records a call before it exchanges anything; returns its number among the calls of this group, counted from 1."""
        self.forwards += 1
        self._enter(f"call {self.forwards}", form)
        return self.forwards

    def enter_backward(self, number: int) -> None:
        """Records the backward of call ``number``."""
        self._enter(f"the backward of call {number}", CallForm(0, {}))

    def _enter(self, what: str, form: CallForm) -> None:
        number = self.count + 1
        self.checksum = zlib.crc32(b"%s %d" % (what.encode(), form.number), self.checksum)
        self._entries[number] = CallEntry(self.checksum, what, form.arguments)
        self._entries.pop(number - KEPT, None)
        self.last = time.monotonic()
        # set last, because the reading thread asks for no entry above it
        self.count = number

    def entry(self, number: int) -> CallEntry | None:
        """Returns the ``number``-th entry, counted from 1; None if it is too old or does not exist yet."""
        return self._entries.get(number)


T = TypeVar("T")
# kinds of calls remembered per group as agreed on by its ranks; at this many, all of them are forgotten
MOST_KINDS = 4096


@dataclass
class Session:
    """One group's section of the store, and its state.

    Args:
        store: the store, with keys that belong to this group and this meeting only.
        calls: the number of handshakes made so far; the same on all ranks.
        failed: message of the first failure; nothing is exchanged after it. ``told``: whether a thread has raised it.
        order: the calls made so far; ``comparison`` compares them with those of the other ranks, once it exists.
        wire: what the ranks exchange by, once it exists.
        agreed: the kinds of calls that the ranks have agreed on. The ranks make the same calls, so they forget them at the same call.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]
    store: Store
    calls: int = 0
    failed: str | None = None
    told: bool = False
    order: CallOrder = field(default_factory=CallOrder)
    comparison: Any = None
    wire: weakref.ref[Any] | None = None
    agreed: dict[object, CallForm] = field(default_factory=dict)

    def remember(self, kind: object, form: CallForm) -> None:
        if len(self.agreed) >= MOST_KINDS:
            self.agreed = {}
        self.agreed[kind] = form

    def check(self) -> None:
        if self.failed is not None:
            self.told = True
            raise RingError(f"{name(self, self.rank)}: this group failed before and cannot be used again; it failed with: {self.failed}")

    def disagreement(self) -> str | None:
        """Returns what ranks are known to disagree on, which may be why a thread of this rank waits in vain."""
        return None if self.comparison is None else self.comparison.verdict()


def name(session: Session, rank: int) -> str:
    """Formats "rank 1", with its global rank if that is a different number."""
    other = session.global_ranks[rank]
    return f"rank {rank}" if other == rank else f"rank {rank} (global rank {other})"


def names(session: Session, ranks: Sequence[int]) -> str:
    """Formats "rank 1" · "ranks 0, 1, 3" · "ranks 0, 1 (global ranks 1, 3)"."""
    if len(ranks) == 1:
        return name(session, ranks[0])
    others = [session.global_ranks[rank] for rank in ranks]
    text = f"ranks {', '.join(map(str, ranks))}"
    return text if others == list(ranks) else f"{text} (global ranks {', '.join(map(str, others))})"


sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
# the store of the groups that existed when this process was forked
_parents_store: Store | None = None
_FORKED = (
    "this process was forked from one that had initialised torch.distributed, whose connections do not work in it; start processes that "
    "exchange by spawn or forkserver, or call init_process_group in this one with a store of its own"
)


def _leave_parents_groups() -> None:
    global _parents_store
    for session in list(sessions.values()):
        session.failed = _FORKED
    if dist.is_available() and dist.is_initialized():
        _parents_store = dist.distributed_c10d._get_default_store()


# Windows has no fork
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parents_groups)


def session_of(members: Members, timeout: float) -> Session:
    """Returns the group's session. At its first use all ranks must call this together; RingError if some have not within the timeout."""
    assert members.group is not None, "one process has nobody to tell"
    session = sessions.get(members.group)
    if session is None:
        session = sessions[members.group] = _meet(members, members.group, timeout)
    return session


def _meet(members: Members, group: dist.ProcessGroup, timeout: float) -> Session:
    """Posts a fresh name and the names seen so far; done when all other ranks have seen this rank's name. What an earlier group left under
    these keys cannot contain a fresh name, so it is never mistaken for an answer."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    if _get_default_store() is _parents_store:
        raise RingError(f"rank {members.rank}: {_FORKED}")
    ranks = tuple(dist.get_process_group_ranks(group))
    store = PrefixStore(f"dilated_attention/{group.group_name}", _get_default_store())
    session = Session(members.rank, members.size, ranks, store)
    keys = [f"meet/{rank}" for rank in range(members.size)]
    seen = [""] * members.size
    seen[members.rank] = uuid.uuid4().hex
    store_call(session, lambda: store.set(keys[members.rank], json.dumps(seen)))

    def read() -> list[list[str] | None]:
        present = [True] * members.size if store.check(keys) else [store.check([key]) for key in keys]
        texts = iter(store.multi_get([key for key, here in zip(keys, present, strict=True) if here]))
        return [json.loads(next(texts)) if here else None for here in present]

    def absent() -> list[int]:
        posts = read()
        fresh = [post[rank] if post is not None else "" for rank, post in enumerate(posts)]
        if fresh != seen:
            seen[:] = fresh
            store.set(keys[members.rank], json.dumps(seen))
        return [rank for rank, post in enumerate(posts) if post is None or post[members.rank] != seen[members.rank]]

    if store_call(session, lambda: until(lambda: not absent() or None, timeout, members.size)) is None and (
        late := store_call(session, absent)
    ):
        raise RingError(
            f"{name(session, members.rank)}: first use of the group failed after {timeout:.1f} s: {names(session, late)} did not join; "
            "dead, stalled or busy with another call: all ranks of the group must make the same calls. "
            f"Look at their output, or raise timeout= ({timeout:g} s) if they are only late"
        )
    joint = hashlib.sha256("".join(seen).encode()).hexdigest()[:16]
    session.store = PrefixStore(joint, store)
    return session


def until(found: Callable[[], T | None], timeout: float, size: int) -> T | None:
    """Returns the first result of ``found`` that is not None, polled less and less often; None after the timeout. A wait inside the store
    would block the process's other threads there and ignore Ctrl-C, and torch writes a warning for each that times out."""
    began = time.monotonic()
    while (result := found()) is None:
        waited = time.monotonic() - began
        if waited > timeout:
            return None
        time.sleep(min(0.01 + 0.001 * size, 5e-5 + waited / 4))
    return result


def store_call(session: Session, call: Callable[[], T]) -> T:
    """Makes a call to the store; a failure means that the process that serves it has ended, and raises RingError."""
    try:
        return call()
    except RingError:
        raise
    except RuntimeError as error:
        raise RingError(
            f"{name(session, session.rank)}: the store of torch.distributed does not answer ({first_line(error)}); the process that "
            f"serves it, usually global rank 0, has ended: look at its output"
        ) from error
