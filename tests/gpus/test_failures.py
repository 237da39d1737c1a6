"""Ranks that die, stall, raise, disagree or are stuck, on real GPUs: every survivor ends in time and says why. Needs 2 and 4 GPUs.

Each mode is one launch of ``gpu_failures.py`` in processes of its own, which are killed after it, however it ends.
"""

from __future__ import annotations

import pytest

from tests.helpers.gpu_failures import MODES, launch
from tests.helpers.machine import COUNT

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(300)]

# no pool: any worker may take them
RANKS = [pytest.param(ranks, marks=pytest.mark.skipif(ranks > COUNT, reason=f"needs {ranks} GPUs"), id=f"{ranks} GPUs") for ranks in (2, 4)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_survivors_end_in_time_and_say_why(mode: str, ranks: int) -> None:
    good, text = launch(mode, ranks)
    print(text)
    assert good, text
