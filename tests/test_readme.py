"""Code in the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_readme_has_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize("code", BLOCKS)
def test_readme_code_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert "forward: " in capsys.readouterr().out


def test_readme_names_files_that_exist() -> None:
    root = Path(__file__).parent.parent
    for name in re.findall(
        r"`((?:dilated_attention|engine|backends|pattern|modules|factory|benchmarks|examples|tests)/[\w/.]*\w)`", README
    ):
        assert (root / name).exists() or (root / "dilated_attention" / name).exists(), name
