"""Records the calls that a rank has made on a group, in order, so that ranks can find out whether they have made the same ones.

A call of a kind that the ranks have agreed on begins without asking the others. It leaves a number and a checksum of all calls so far.
Messages on gloo carry the checksum as their tag, so that messages of different calls never match, and ``compare_calls.py`` compares it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import NamedTuple

# the number of calls whose checksums a rank keeps
KEPT = 4096


class CallForm(NamedTuple):
    """A kind of call that all ranks have agreed on.

    Args:
        number: the number of the handshake in which they agreed, the same on all ranks.
        arguments: the arguments that they found equal, by name.
    """

    number: int
    arguments: Mapping[str, str]


class CallEntry(NamedTuple):
    """One call on a group, its backward, or a handshake.

    Args:
        checksum: checksum of this entry and all before it.
        what: a name such as "call 3".
    """

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
