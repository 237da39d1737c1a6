"""Every reason for which a GPU test may be skipped, and on what it depends. A skip that no line here names fails the run."""

from __future__ import annotations

import re
from typing import NamedTuple


class NamedSkip(NamedTuple):
    """``test`` and ``reason`` are regular expressions, searched for in a test's name and in the reason that it gives."""

    test: str
    reason: str
    why: str


SKIPS = (
    NamedSkip("", r"flash-attn-2|flash_attn_2|flash-attn is not installed", "flash-attn is compiled for one torch release; tests drive a stand-in on the CPU"),
    NamedSkip("", r"xformers is not installed", "an optional package"),
)


def named(test: str, reason: str) -> NamedSkip | None:
    return next((skip for skip in SKIPS if re.search(skip.test, test) and re.search(skip.reason, reason)), None)
