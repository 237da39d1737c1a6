"""Comparison with users' own copies of TorchScale and Prov-GigaPath, without them: what is refused, and the exit code of a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import copies as torchscale
from benchmarks.__main__ import main
from benchmarks.report import Row


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "expected --torchscale PATH, --gigapath PATH or both"),
        (["--gigapath", "no/such"], 2, "there is no gigapath/slide_encoder.py in it; git clone https://github.com/prov-gigapath"),
        (["--gigapath", ".", "--tiles", "101", "--grid", "10"], 2, "do not fit on a grid of 10"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    command = ["train-infer", "--tasks", "parity", "--output", str(tmp_path), *arguments]
    try:
        found = main(command)
    except SystemExit as ended:
        found = int(str(ended.code))
    assert found == code and text in capsys.readouterr().err


@pytest.mark.parametrize(("note", "code"), [("wrong: output differs by 1.0e-03", 1), ("", 0)])
def test_a_difference_is_the_exit_code(note: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="encoder", case={"task": "parity"}, errors={"output": 1e-3}, note=note)
    monkeypatch.setattr(torchscale, "check_parity", lambda options: None)
    monkeypatch.setattr(torchscale, "measure_parity", lambda options: [row])
    assert main(["train-infer", "--tasks", "parity", "--output", str(tmp_path)]) == code
