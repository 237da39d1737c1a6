"""Counts how much this process has exchanged, for tests and documentation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Traffic:
    """What this process has exchanged.

    Args:
        sent, received: number of bytes.
        exchanges: number of exchanges with at least one tensor.
        sent_to: bytes sent to each peer, by its rank within the group.
    """

    sent: int = 0
    received: int = 0
    exchanges: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)


counting: list[Traffic] = []


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what this process exchanges inside the ``with`` block, over all groups."""
    mine = Traffic()
    counting.append(mine)
    try:
        yield mine
    finally:
        # compared by identity, because dataclasses with equal counts are equal
        counting[:] = [other for other in counting if other is not mine]


def count(outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]) -> None:
    for one in counting:
        one.exchanges += bool(outgoing or incoming)
        one.received += sum(tensor.nbytes for _, tensor in incoming)
        for peer, tensor in outgoing:
            one.sent += tensor.nbytes
            one.sent_to[peer] += tensor.nbytes
