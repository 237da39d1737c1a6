"""Who keeps the others waiting: ranks that give up say so in the store, and the one that all wait for is among the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dilated_attention.distributed.errors import first_line
from dilated_attention.distributed.session import Session, name, names, until


@dataclass(frozen=True)
class Wait:
    """What a rank waited for when it gave up.

    Args:
        lane: exchanges are numbered within it.
        exchange: its number, counted alike on all ranks.
        what: such as "ring forward, hop 2: K and V".
        peers: ranks of the group that the exchange needs.
    """

    lane: str
    exchange: int
    what: str
    peers: tuple[int, ...]


def culprits(waits: Mapping[int, Wait], rank: int) -> tuple[list[int], list[int]]:
    """(ranks that posted nothing though someone waits for them, ranks that wait in an earlier exchange than this one).

    Follows who waits for whom, from this rank on: a peer that has given up itself is a victim like this one. The second list counts
    only where the first is empty: a rank may be behind because of a silent one.
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
    """Posts this rank's wait, gives the others some seconds to post theirs, and says in a sentence who is to blame, and who they are.

    Args:
        collect: seconds; ranks of one stalled exchange time out at about the same moment. 0 where a broken connection names the peer.
    """
    store = session.store
    keys = [f"waits/{rank}" for rank in range(session.size)]
    try:
        store.set(keys[session.rank], json.dumps(asdict(wait)))
        until(lambda: store.check(keys) or None, collect, session.size)
        texts = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
    except RuntimeError as error:
        ended = f"the store of torch.distributed does not answer either ({first_line(error)}): its server, mostly global rank 0, has ended"
        return ended, list(wait.peers)
    waits = {rank: Wait(**json.loads(text)) for rank, text in texts.items()}
    waits[session.rank] = wait
    silent, behind = culprits(waits, session.rank)
    if silent:
        told = [_told(session, waits, peer) for peer in wait.peers if peer in waits]
        verdict = f"{names(session, silent)} {_has(silent)} not reported: dead, stalled or in another call"
        return "; ".join([*told, verdict]), silent
    if behind:
        return "; ".join(_told(session, waits, rank) + ", which comes earlier: it made another number of calls" for rank in behind), behind
    told = [_told(session, waits, rank) for rank in waits]
    return f"all ranks report that they wait or have given up: {'; '.join(told)}", list(wait.peers)


def _told(session: Session, waits: Mapping[int, Wait], rank: int) -> str:
    wait = waits[rank]
    return (
        f"{name(session, rank)} gave up waiting for {names(session, wait.peers)} in {wait.what!r} ({wait.lane}, exchange {wait.exchange})"
    )


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
