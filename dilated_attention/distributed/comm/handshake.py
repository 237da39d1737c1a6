"""A cheap check that all ranks make the same call, before any tensor is sent.

It uses the store, not a collective: ranks that disagree would hang in a collective, or interpret one tensor as another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dilated_attention.distributed.comm.call_order import CallForm
from dilated_attention.distributed.comm.compare_calls import Comparison, differences
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.session import Session, name, names, session_of, store_call, until
from dilated_attention.distributed.comm.stall_diagnosis import Wait, explain
from dilated_attention.distributed.errors import RingError


def agree(members: Members, same: Mapping[str, object], own: Mapping[str, int], timeout: float) -> list[dict[str, int]]:
    """Returns every rank's ``own`` numbers in order of rank, once ``same`` is found equal on all. All ranks of the group must call it.

    Args:
        members: the ranks; one process agrees with itself.
        same: name and printable value of everything that must be equal; ``"function"``, if given, names the call in messages.
        own: numbers that may differ, such as each rank's rows.
        timeout: seconds to wait for the slowest rank.

    Raises:
        ValueError: if arguments differ; the same message on every rank says which argument differs and which ranks have which value.
        RingError: if some ranks posted nothing within the timeout.
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
    """Gathers every rank's text, posted under ``place`` and the rank.

    Raises:
        RingError: if some ranks posted nothing within the timeout (the message names them), the store is gone, or the group failed before.
    """
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
