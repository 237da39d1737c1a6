"""The command line starts without torch, and what it offers without torch is what there is; other programs import the whole package."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dilated_attention.bench.suites import SUITES
from dilated_attention.bench.workloads.problem import BOUNDS

from dilated_attention import __version__, start
from dilated_attention.backends import PRECISIONS
from dilated_attention.cli import choices
from dilated_attention.factory import EXAMPLES, MODEL_PRESETS
from dilated_attention.planning import USE_CASES
from dilated_attention.planning.advice.recommend import KINDS as RECOMMENDED_KINDS
from dilated_attention.planning.estimate.problem import KINDS

SCRIPT = """import sys
from dilated_attention.cli import main
{}
"""
WITHOUT_TORCH = [
    (["--help"], 0),
    (["--version"], 0),
    (["info", "--help"], 0),
    (["show", "--help"], 0),
    (["show", "longnet-125m", "--help"], 0),
    (["plan", "--help"], 0),
    (["recommend", "--help"], 0),
    (["bench", "--help"], 0),
    (["inform"], 2),
    (["plan", "dilated"], 2),
    (["plan", "dilated", "--length", "1x"], 2),
    ([], 2),
]


def python(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    # the package of this checkout, wherever the program runs
    variables = os.environ | {"PYTHONPATH": str(Path(start.__file__).parents[1])}
    # a shell lets what it starts in the background ignore SIGINT
    options: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, timeout=120, check=False, **options)


@pytest.mark.parametrize(("arguments", "code"), WITHOUT_TORCH, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_help_and_usage_errors_import_no_torch(arguments: list[str], code: int) -> None:
    result = python("-X", "importtime", "-m", "dilated_attention", *arguments)
    assert result.returncode == code
    imported = [line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")]
    assert "dilated_attention.cli.bench" in imported
    assert not [name for name in imported if name.partition(".")[0] in ("torch", "numpy", "rich")]


def test_help_comes_at_once() -> None:
    """0.1 s of a processor; torch takes seconds."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python("-m", "dilated_attention", "--help").returncode == 0
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime < 1.0


def test_version() -> None:
    result = python("-m", "dilated_attention", "--version")
    assert (result.returncode, result.stdout) == (0, f"dilated-attention {__version__}\n")


def test_the_script_imports_torch_when_a_command_runs(tmp_path: Path) -> None:
    """And then the package is whole, for contenders of ``bench`` say, which are modules of other people."""
    script = tmp_path / "dilated-attention"
    script.write_text(
        SCRIPT.format(
            """
assert "torch" not in sys.modules
assert main(["show", "longnet-tiny", "--json"]) == 0
import torch, dilated_attention
torch.ops.dilated_attention.ring_attention.default
assert {"attention", "DilatedAttention", "modules"} <= set(vars(dilated_attention))
"""
        )
    )
    result = python(str(script))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["torch", "argparse"])
def test_an_interrupt_is_not_lost_while_modules_are_imported(tmp_path: Path, name: str) -> None:
    """Torch's import swallowed it, and the command went on, or aborted in C++; argparse stands for what the parser needs."""
    (tmp_path / f"{name}.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise SystemExit(7)\n"
    )
    result = python("-m", "dilated_attention", "info", folder=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_other_programs_import_the_whole_package(tmp_path: Path) -> None:
    whole = "import torch, dilated_attention; torch.ops.dilated_attention.ring_attention.default; vars(dilated_attention)['attention']"
    (tmp_path / "program.py").write_text(SCRIPT.format(whole))
    for arguments in (["-m", "program", "-m", "dilated_attention"], ["-c", SCRIPT.format(whole)]):
        result = python(*arguments, folder=tmp_path)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("given", "whole", "is_command_line"),
    [
        (["-m", "--help"], ["python", "-m", "dilated_attention", "--help"], True),
        (["-m"], ["python", "-u", "-m", "dilated_attention"], True),
        (["/bin/dilated-attention", "info"], ["/bin/python", "/bin/dilated-attention", "info"], True),
        (["-m"], ["python", "-m", "dilated_attention.bench"], False),
        (["-m", "dilated_attention"], ["python", "-m", "pytest", "dilated_attention"], False),
        (["-c", "-m", "dilated_attention"], ["python", "-c", "import dilated_attention", "-m", "dilated_attention"], False),
        (["dilated-attention.py"], ["python", "dilated-attention.py"], False),
        # a child process that multiprocessing started, whose argv is its parent's
        (
            ["/bin/dilated-attention", "info"],
            ["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
            False,
        ),
        ([""], ["python"], False),
        ([], ["python"], False),
    ],
)
def test_what_the_command_line_is(given: list[str], whole: list[str], is_command_line: bool) -> None:
    assert start._is_command_line(given, whole) is is_command_line


def test_what_the_parser_offers_is_what_there_is() -> None:
    assert sorted(EXAMPLES) == list(choices.MACHINES)
    assert choices.PRECISIONS == PRECISIONS
    assert {f"torch.{name}" for name in choices.DTYPES} == set(map(str, BOUNDS))
    assert list(choices.MODEL_PRESETS) == list(MODEL_PRESETS)
    assert list(choices.PLAN_KINDS) == list(KINDS)
    assert choices.PATTERN_KINDS == RECOMMENDED_KINDS
    assert choices.USE_CASES == USE_CASES
    assert {name: suite.about for name, suite in SUITES.items()} == choices.SUITES
