"""The program of docs/ring.md runs as it stands; a public forge runs targets of the Makefile. Other code, links, names: test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
PROGRAMS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if "torchrun" in code]


@pytest.mark.parametrize("code", PROGRAMS)
def test_the_program_for_several_processes_runs(code: str, tmp_path: Path) -> None:
    """On four processes, at a length that two CPU cores have time for."""
    file = tmp_path / "train.py"
    file.write_text(code.replace("100_00", "2_00"), encoding="utf-8")
    result = run_script(file, processes=4)
    assert result.returncode == 0, result.stderr
    # not by lines: unbuffered processes write a line and its end apart, so two lines can come as one
    losses = dict(re.findall(r"process (\d+): loss (\d+\.\d{3})", result.stdout))
    assert sorted(losses) == ["0", "1", "2", "3"], result.stdout
    assert len(set(losses.values())) == 1, result.stdout


def test_the_readme_is_short_and_the_page_has_a_program() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 130
    assert len(PROGRAMS) == 1


def test_continuous_integration_runs_targets_of_the_makefile() -> None:
    workflow, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in (".github/workflows/ci.yml", "Makefile"))
    runs = re.findall(r"run: (.*)", workflow)
    assert "make test" in runs
    assert all(re.fullmatch(r"make [\w-]+", run) and f"\n{run.split()[1]}:" in makefile for run in runs), runs
