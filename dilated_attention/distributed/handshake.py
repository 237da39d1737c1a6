"""One cheap check that all ranks make the same call, before any tensor travels.

It goes through the store, not through a collective: ranks that disagree would hang in a collective, or read one tensor as another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dilated_attention.distributed.blame import Wait, explain
from dilated_attention.distributed.errors import RingError
from dilated_attention.distributed.group import Members
from dilated_attention.distributed.session import Session, name, names, session_of, store_call, until

ABSENT = "no such argument"


def agree(members: Members, same: Mapping[str, object], own: Mapping[str, int], timeout: float) -> list[dict[str, int]]:
    """Every rank's ``own`` numbers in the order of ranks, once ``same`` is found equal on all. All ranks of the group call it.

    Args:
        members: the ranks; one process agrees with itself.
        same: name and printable value of what must not differ; ``"function"``, where given, names the call in messages.
        own: numbers that may differ, such as each rank's rows.
        timeout: seconds to wait for the slowest rank.

    Raises:
        ValueError: the same text on every rank: which argument differs, and which ranks have which value.
        RingError: some ranks posted nothing within the timeout.
    """
    if members.group is None:
        return [dict(own)]
    session = session_of(members, timeout)
    session.check()
    call = session.calls
    session.calls += 1
    mine = json.dumps([{key: str(value) for key, value in same.items()}, dict(own)])
    what = f"{same.get('function', 'first use')}: check that all ranks make the same call"
    texts = gather(session, f"agree/{call}", what, timeout, mine)
    if call > 0:
        # all have posted this call, so all have read the one before
        store_call(session, lambda: session.store.delete_key(f"agree/{call - 1}/{session.rank}"))
    posts = [json.loads(text) for text in texts]
    _compare(session, [post[0] for post in posts])
    return [post[1] for post in posts]


def gather(session: Session, place: str, what: str, timeout: float, mine: str = "") -> list[bytes]:
    """Every rank's text, posted under ``place`` and the rank. Names the ranks that posted none within the timeout.

    Raises:
        RingError: some ranks are late, the store has gone, or the group failed before.
    """
    session.check()
    store = session.store
    keys = [f"{place}/{rank}" for rank in range(session.size)]

    def all_texts() -> list[bytes] | None:
        return store.multi_get(keys) if store.check(keys) else None

    store_call(session, lambda: store.set(keys[session.rank], mine))
    texts = store_call(session, lambda: until(all_texts, timeout, session.size))
    if texts is None:
        absent = store_call(session, lambda: [rank for rank, key in enumerate(keys) if not store.check([key])])
        if absent:
            raise _late(session, what, absent, timeout)
        # the last one came at the last moment
        texts = store_call(session, lambda: store.multi_get(keys))
    return texts


def _compare(session: Session, posts: list[dict[str, str]]) -> None:
    if all(post == posts[0] for post in posts):
        return
    arguments = list(dict.fromkeys(argument for post in posts for argument in post))
    if len({post.get("function") for post in posts}) > 1:
        # the arguments of another function differ anyway
        arguments = ["function"]
    differences = []
    for argument in arguments:
        holders: dict[str, list[int]] = {}
        for rank, post in enumerate(posts):
            holders.setdefault(post.get(argument, ABSENT), []).append(rank)
        if len(holders) > 1:
            # what most ranks have first, so that the odd ones stand at the end
            sides = sorted(holders.items(), key=lambda side: (-len(side[1]), side[1]))
            told = [f"{names(session, ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in sides]
            differences.append(f"{argument}: {', '.join(told)}")
    function = posts[0].get("function")
    prefix = f"{function}: " if function is not None and arguments != ["function"] else ""
    raise ValueError(f"{prefix}ranks disagree on {'; on '.join(differences)}; all ranks must make the same call")


def _late(session: Session, what: str, absent: list[int], timeout: float) -> RingError:
    # the others give up at their own time; what is known by now is told
    blame, _ = explain(session, Wait("handshake", session.calls, what, tuple(absent)), collect=0.0)
    session.failed = (
        f"{name(session, session.rank)}: {what} failed after {timeout:.1f} s: {names(session, absent)} posted nothing; {blame}. All ranks "
        f"of a group make the same calls in the same order: look at the output of {names(session, absent)}, or raise timeout= "
        f"({timeout:g} s) if only late"
    )
    session.told = True
    return RingError(session.failed)
