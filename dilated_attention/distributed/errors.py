"""The error that a rank raises when another rank has failed it."""

from __future__ import annotations

import re


class RingError(RuntimeError):
    """Ranks that share a sequence could not exchange what they needed: one has died, stalled or made a different call.

    The group cannot be used afterwards: end the process; or, if all ranks are alive, make a new group on all of them.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of torch's message, without its C++ location, its advice and its stack trace."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+\.\w+:\d+\] ", "", line).split(". This is typically caused")[0]
