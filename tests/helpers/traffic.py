"""What this process exchanges with others, in bytes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dilated_attention.distributed.comm.p2p import Wire


@dataclass
class Traffic:
    """Bytes."""

    sent: int = 0
    received: int = 0


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what this process exchanges inside the ``with`` block, over all groups."""
    seen, start = Traffic(), Wire.start

    def counting(wire: Wire, sent: Any, send_counts: Any, came: Any, counts: Any, what: str) -> Any:
        seen.received += sum(part.nbytes for part in came.split(counts))
        seen.sent += sum(part.nbytes for part in sent.split(send_counts))
        return start(wire, sent, send_counts, came, counts, what)

    with mock.patch.object(Wire, "start", counting):
        yield seen
