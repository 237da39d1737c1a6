"""The runner of the GPU tests: what it counts and what makes a run a failure, on a folder of small tests that need no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_suite.__main__ import dealt, most_processes, phases, visible
from tests.gpu_suite.plugin import __name__ as PLUGIN
from tests.gpu_suite.report import Outcome, read, summary, write
from tests.gpu_suite.skips import SKIPS, named

TESTS = """
import pytest, time, os

@pytest.mark.parametrize("backend", ["math", "flash4"])
def test_passes(backend):
    pass

def test_fails():
    assert 1 == 2, "one is not two"

def test_is_skipped():
    pytest.skip("flash-attn-4 is not installed: pip install it")

def test_is_skipped_for_no_good_reason():
    pytest.skip("I felt like it")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("the end is broken")

def test_ends_badly(broken):
    pass

@pytest.mark.xdist_group("a group")
def test_in_a_group():
    pass
"""


def run(folder: Path, *options: str) -> tuple[list[Outcome], list[str]]:
    (folder / "test_some.py").write_text(TESTS)
    log = folder / "log.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        PLUGIN,
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *options,
        str(folder / "test_some.py"),
    ]
    subprocess.run(command, cwd=Path(__file__).parents[2], env={**os.environ, "GPU_SUITE_LOG": str(log)}, capture_output=True, check=False)
    return read(log)


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadgroup")], ids=["one process", "two processes"])
def test_every_test_has_its_outcome(tmp_path: Path, options: tuple[str, ...]) -> None:
    outcomes, unfinished = run(tmp_path, *options)
    assert not unfinished
    found = {outcome.test.split("::")[1]: outcome for outcome in outcomes}
    assert {name: outcome.outcome for name, outcome in found.items()} == {
        "test_passes[math]": "passed",
        "test_passes[flash4]": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_is_skipped_for_no_good_reason": "skipped",
        "test_ends_badly": "failed",
        "test_in_a_group": "passed",
    }
    assert found["test_passes[flash4]"].backend == "flash4" and found["test_fails"].backend == ""
    assert "one is not two" in found["test_fails"].reason and "the end is broken" in found["test_ends_badly"].reason
    problems = write(tmp_path / "report", outcomes, [], {"side by side": 1.0})
    assert len(problems) == 3
    assert any(problem.startswith("skipped without a named reason") and "I felt like it" in problem for problem in problems)
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["counts"] == {"passed": 3, "failed": 2, "skipped": 2} and len(record["tests"]) == 7
    text = (tmp_path / "report.md").read_text()
    assert "| flash4 | 1 | 0 | 0 |" in text and "**not named**" in text and "| some | 3 | 2 | 2 |" in text


def test_what_was_stopped_or_crashed_is_no_success(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    report = {"outcome": "passed", "seconds": 1.0, "reason": "", "about": {}}
    lines: list[dict[str, object]] = [{"collected": f"a.py::test_{name}@group"} for name in "abc"]
    lines += [{"test": "a.py::test_a", "when": when, **report} for when in ("setup", "call", "teardown")]
    # under way
    lines.append({"test": "a.py::test_b", "when": "setup", **report})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes, unfinished = read(log)
    assert [outcome.test for outcome in outcomes] == ["a.py::test_a"] and unfinished == ["a.py::test_b", "a.py::test_c"]
    assert write(tmp_path / "report", outcomes, ["side by side: a.py::test_b has no outcome"], {}) == [
        "side by side: a.py::test_b has no outcome"
    ]
    assert write(tmp_path / "report", [], [], {}) == ["no test was run"]


def test_a_failed_import_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import a_module_that_is_nowhere\n")
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-q", "-p", "no:cacheprovider", str(tmp_path / "test_broken.py")]
    subprocess.run(command, cwd=Path(__file__).parents[2], env={**os.environ, "GPU_SUITE_LOG": str(log)}, capture_output=True, check=False)
    (outcome,), _ = read(log)
    assert outcome.outcome == "failed" and "a_module_that_is_nowhere" in outcome.reason


def test_skips_are_named_by_their_reasons() -> None:
    assert named("tests/gpu/test_backends.py::test_x[flash4]", "flash-attn-4 is not installed: pip install …") in SKIPS
    assert named("tests/test_x.py::test_y", "") is None
    assert named("tests/test_x.py::test_y", "needs a CUDA GPU") is None


def test_one_gpu_and_several_are_different_tests() -> None:
    one, several = phases(False, 16, ["0"]), phases(True, 16, ["0", "1"])
    assert list(one) == ["side by side", "alone"] and list(several) == ["pools", "processes"]
    folder = {f"tests/gpus/{path.name}" for path in Path(__file__).parents[1].glob("gpus/test_*.py")}
    assert folder == {
        argument[argument.index("tests/gpus") :] for phase in several.values() for argument in phase if argument.endswith(".py")
    }
    files = [argument for argument in one["alone"] if argument.endswith(".py")]
    assert len(files) > 20 and all("pytest.mark.gpu" in Path(file).read_text() for file in files)


def test_each_process_sees_one_of_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible(2) == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible(2) == ["0", "1"]
    alone = phases(False, 3, ["0", "1"])["alone"]
    assert [argument for argument in alone if "popen" in argument] == dealt(2, ["0", "1"])
    test = tmp_path / "test_seen.py"
    test.write_text("import os\ndef test_seen():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == '7'\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "load", *dealt(1, ["7", "8"]), str(test)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


def test_processes_are_as_many_as_cores_and_memory_allow() -> None:
    assert [most_processes(cores, 1, 141 << 30) for cores in (2, 16, 64)] == [2, 16, 16]
    assert [most_processes(32, gpus, 79 << 30) for gpus in (1, 2, 4)] == [9, 18, 32]
    assert most_processes(8, 1, 4 << 30) == 1


def test_outcomes_of_a_feature_are_counted_together() -> None:
    outcomes = [Outcome("tests/gpu/test_blocks.py::test_a", "passed", 1.0), Outcome("tests/gpu/test_blocks.py::test_b", "passed", 2.0)]
    assert "| blocks | 2 | 0 | 0 | 3 |" in summary(outcomes, {"alone": 3.0})
