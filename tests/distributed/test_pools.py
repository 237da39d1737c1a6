"""The processes that tests of several processes run in leave nothing behind, however the process of the tests ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.pool import Pool


def number(rank: int, world: int) -> int:
    return os.getpid()


def left(numbers: list[int]) -> list[int]:
    """Those processes that have not ended; one that nobody has waited for is in state Z."""
    there = []
    for one in numbers:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                there.append(one)
    return there


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
@pytest.mark.parametrize("how", ["is killed", "ends without a word"])
def test_processes_end_with_the_one_that_started_them(how: str) -> None:
    program = [sys.executable, "-m", "tests.distributed.test_pools", how]
    result = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == (-signal.SIGKILL if how == "is killed" else 0), result.stderr
    numbers = list(map(int, result.stdout.split()))
    assert len(numbers) == 2
    deadline = time.monotonic() + 20
    while left(numbers):
        assert time.monotonic() < deadline, f"{left(numbers)} stand still or wait"
        time.sleep(0.05)


if __name__ == "__main__":
    print(*Pool(2).run(number), flush=True)
    if sys.argv[1] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
