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
    NamedSkip("", r"is not installed", "an optional package of a backend; the reason says how to install it"),
    NamedSkip("tests/gpus/", r"^needs [234] GPUs$", "a world of more processes than there are GPUs"),
    NamedSkip("flash3_fp8", r"needs a Hopper GPU and fa3-fwd", "an optional package, and kernels of compute capability 9.0"),
    NamedSkip("gpu/test_tiles_gluon", r"needs a Hopper GPU", "kernels of compute capability 9.0"),
    NamedSkip(
        "test_estimated_times", r"^no rate was measured on", ("plans of GPUs without a table take assumed rates, which nothing is held to")
    ),
    NamedSkip("", r"^others hold|are free on this GPU", "another program holds this GPU's memory or time"),
    NamedSkip("", r"needs compute capability|on compute capability", "another generation of GPUs"),
)


def named(test: str, reason: str) -> NamedSkip | None:
    return next((skip for skip in SKIPS if re.search(skip.test, test) and re.search(skip.reason, reason)), None)
