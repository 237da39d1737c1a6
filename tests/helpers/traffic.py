"""What this process exchanges with others, in bytes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from dilated_attention.distributed.comm.p2p import Wire


@dataclass
class Traffic:
    """Bytes; ``sent_to`` by the peer's rank within the group."""

    received: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return self.sent_to.total()


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what this process exchanges inside the ``with`` block, over all groups."""
    seen, start = Traffic(), Wire.start

    def counting(wire: Wire, sent: Any, send_counts: Any, came: Any, counts: Any, what: str) -> Any:
        seen.received += sum(part.nbytes for part in came.split(counts))
        seen.sent_to.update({peer: part.nbytes for peer, part in enumerate(sent.split(send_counts)) if len(part)})
        return start(wire, sent, send_counts, came, counts, what)

    with mock.patch.object(Wire, "start", counting):
        yield seen
