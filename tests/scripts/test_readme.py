"""The README's program for several processes runs as it stands. Its other code, links and names: tests/scripts/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PROGRAMS = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.S) if "torchrun" in code]


def test_readme_has_one() -> None:
    assert PROGRAMS


@pytest.mark.parametrize("code", PROGRAMS)
def test_readme_code_for_several_processes_runs(code: str, tmp_path: Path) -> None:
    """On four processes, at a length that two CPU cores have time for."""
    file = tmp_path / "train.py"
    file.write_text(code.replace("100_00", "2_00"), encoding="utf-8")
    result = run_script(file, processes=4)
    assert result.returncode == 0, result.stderr
    # not by lines: unbuffered processes write a line and its end apart, so two lines can come as one
    told = dict(re.findall(r"process (\d+): loss (\d+\.\d{3})", result.stdout))
    assert sorted(told) == ["0", "1", "2", "3"], result.stdout
    assert len(set(told.values())) == 1, result.stdout
