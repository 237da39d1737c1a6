"""The runner of the GPU tests: its table of what passed, failed, was skipped or never ended, on tests that need no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest, time

@pytest.mark.parametrize("backend", ["math", "flash4"])
def test_passes(backend):
    pass

def test_fails():
    assert 1 == 2, "one is not two"

def test_is_skipped():
    pytest.skip("flash-attn-4 is not installed")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("the end is broken")

@pytest.mark.xdist_group("a group")
def test_ends_badly(broken):
    pass
"""
HANGS = "\ndef test_hangs():\n    time.sleep(600)\n"


def run(folder: Path, tests: str, limit: float) -> tuple[int, str]:
    file = folder / "test_some.py"
    file.write_text(tests)
    phase = ["-p", "no:cacheprovider", "--rootdir", str(folder), "-n", "2", "--dist", "loadgroup", str(file)]
    code = f"import pathlib, tests.gpu_suite as suite; raise SystemExit(not suite.run([{phase}], pathlib.Path('{folder}/table'), {limit}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    return done.returncode, (folder / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "limit", "counts", "words"),
    [
        (TESTS, 100.0, "2 | 2 | 1 | 0", ("one is not two", "the end is broken", "- skipped 1: flash-attn-4 is not installed", "FAILED")),
        (TESTS + HANGS, 12.0, "2 | 2 | 1 | 1", ("- cut off after 12 s", "no outcome: test_some.py::test_hangs", "FAILED")),
        ("import a_module_that_is_nowhere", 100.0, "0 | 1 | 0 | 0", ("a_module_that_is_nowhere", "FAILED")),
        ("def test_passes():\n    pass\n", 100.0, "1 | 0 | 0 | 0", ("PASSED",)),
    ],
    ids=["whole", "cut off", "broken", "passed"],
)
def test_the_table_says_what_came_of_every_test(tmp_path: Path, tests: str, limit: float, counts: str, words: tuple[str, ...]) -> None:
    code, text = run(tmp_path, tests, limit)
    assert f"| all | {counts} |" in text and all(word in text for word in words), text
    assert code == ("PASSED" not in text)
