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
    """One call on a group, its backward, or a handshake.

    Args:
        checksum: of this and all before it.
        what: such as "call 3".
    """

    checksum: int
    what: str
    arguments: Mapping[str, str]


class CallOrder:
    """A rank's calls on one group: one thread makes them, another one reads about them."""

    def __init__(self) -> None:
        # of all that was noted, and of calls alone
        self.count = 0
        self.forwards = 0
        self.checksum = 0
        # time.monotonic() of the last one
        self.last = 0.0
        self._entries: dict[int, Entry] = {}

    def enter_handshake(self, form: Form) -> None:
        """Notes that this rank asks the others whether they make the same call."""
        self._enter("a handshake", form)

    def enter_forward(self, form: Form) -> int:
        """Notes a call before it exchanges anything; its number among the calls of this group, counted from 1."""
        self.forwards += 1
        self._enter(f"call {self.forwards}", form)
        return self.forwards

    def enter_backward(self, number: int) -> None:
        """Notes the backward of call ``number``."""
        self._enter(f"the backward of call {number}", Form(0, {}))

    def _enter(self, what: str, form: Form) -> None:
        number = self.count + 1
        self.checksum = zlib.crc32(b"%s %d" % (what.encode(), form.number), self.checksum)
        self._entries[number] = Entry(self.checksum, what, form.arguments)
        self._entries.pop(number - KEPT, None)
        self.last = time.monotonic()
        # last, for the reading thread asks for no entry above it
        self.count = number

    def entry(self, number: int) -> Entry | None:
        """Of all that was noted, the ``number``-th from 1 on; None where it is too long ago, or still to come."""
        return self._entries.get(number)
