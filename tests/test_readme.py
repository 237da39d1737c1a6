"""Code in the README and in docs/block_sparse.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_examples import run, torchrun

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_readme_has_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize("code", [code for code in BLOCKS if "torchrun" not in code and "from_pretrained(path" not in code])
def test_readme_code_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    expected = {"explain_backend": "forward: ", "BigBird": "% of all pairs", "collate_slides": "2010 tokens, slides (2, 768)"}
    assert [text for name, text in expected.items() if name in code and text in printed]


@pytest.mark.parametrize("code", [code for code in BLOCKS if "torchrun" in code])
def test_readme_code_for_several_processes_runs(code: str, tmp_path: Path) -> None:
    """On four processes, at a length that two CPU cores have time for."""
    file = tmp_path / "train.py"
    file.write_text(code.replace("100_00", "2_00"), encoding="utf-8")
    result = run(*torchrun(4), str(file))
    assert result.returncode == 0, result.stderr
    # not by lines: unbuffered processes write a line and its end apart, so two lines can come as one
    told = dict(re.findall(r"process (\d+): loss (\d+\.\d{3})", result.stdout))
    assert sorted(told) == ["0", "1", "2", "3"], result.stdout
    assert len(set(told.values())) == 1, result.stdout


def test_code_of_the_page_on_blocks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its pieces one after the other, as they are read."""
    page = (Path(__file__).parent.parent / "docs" / "block_sparse.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.S))
    names: dict[str, object] = {}
    exec(compile(code, "docs/block_sparse.md", "exec"), names)
    assert "of the pairs" in capsys.readouterr().out
    assert {"out", "y", "again"} <= set(names)


def test_readme_names_files_that_exist() -> None:
    root = Path(__file__).parent.parent
    for name in re.findall(
        r"`((?:dilated_attention|engine|backends|pattern|modules|factory|benchmarks|examples|tests)/[\w/.]*\w)`", README
    ):
        assert (root / name).exists() or (root / "dilated_attention" / name).exists(), name
