"""The calls that a rank has made on a group, in order, so that ranks can tell whether they have made the same ones.

A call of a kind that the ranks have agreed on begins without asking the others. It leaves a number and a checksum of all calls so far:
messages on gloo carry the checksum as their tag, so that those of different calls never meet, and ``compare`` compares it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import NamedTuple

# calls whose checksums a rank still knows
KEPT = 4096


class Form(NamedTuple):
    """A kind of call that all ranks have agreed on.

    Args:
        number: of the handshake in which they did, the same on all ranks.
        arguments: what they found equal, by name.
    """

    number: int
    arguments: Mapping[str, str]


class Entry(NamedTuple):
    """One call on a group.

    Args:
        checksum: of this call and all before it.
        what: such as "the forward".
    """

    checksum: int
    what: str
    arguments: Mapping[str, str]


class CallOrder:
    """A rank's calls on one group: one thread makes them, another one reads about them."""

    def __init__(self) -> None:
        self.count = 0
        self.checksum = 0
        # time.monotonic() of the last one
        self.last = 0.0
        self._entries: dict[int, Entry] = {}

    def enter(self, what: str, form: Form) -> int:
        """Notes a call before it exchanges anything; its number, counted from 1."""
        number = self.count + 1
        self.checksum = zlib.crc32(b"%s %d" % (what.encode(), form.number), self.checksum)
        self._entries[number] = Entry(self.checksum, what, form.arguments)
        self._entries.pop(number - KEPT, None)
        self.last = time.monotonic()
        # last, for the reading thread asks for no entry above it
        self.count = number
        return number

    def enter_backward(self, number: int) -> None:
        """Notes the backward of the forward that was call ``number``."""
        forward = self.entry(number)
        self.enter(f"the backward of call {number}", Form(number, {} if forward is None else forward.arguments))

    def entry(self, number: int) -> Entry | None:
        """None where the call is too long ago, or still to come."""
        return self._entries.get(number)
