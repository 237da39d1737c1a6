"""Finds the ranks that keep the others waiting: ranks that give up post this in the store, so the culprit is among the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dilated_attention.distributed.comm.session import Session, name, names, until
from dilated_attention.distributed.errors import first_line


@dataclass(frozen=True)
class Wait:
    """What a rank waited for when it gave up.

    Args:
        lane: the lane of the exchange; exchanges are numbered within their lane.
        exchange: the number of the exchange, counted in the same way on all ranks.
        what: a description such as "ring forward, hop 2: K and V".
        peers: the ranks of the group that the exchange needs.
    """

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
    """Posts this rank's wait, gives the others some time to post theirs, and returns a sentence that says who is to blame, and these ranks.

    Args:
        collect: seconds to wait for the other posts; the ranks of one stalled exchange time out at about the same moment. 0 if a broken
            connection already names the peer.
    """
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
