"""The error of a rank that another rank has left alone."""

from __future__ import annotations

import re


class RingError(RuntimeError):
    """Ranks that share a sequence could not exchange what they needed: one has died, stalled or made another call.

    The group cannot be used after it: end the process; or, if all ranks live, make a new group on all of them.
    """


def first_line(error: BaseException) -> str:
    """What torch says, without its place in C++, its advice and its stack of frames."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+\.\w+:\d+\] ", "", line).split(". This is typically caused")[0]
