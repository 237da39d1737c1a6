"""Output fits a terminal's width and its encoding, and is the same text everywhere."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from dilated_attention.cli import common, main

INFO = ("info", "--for", "cpu", "--all")
SHOW = ("show", "dilated", "--segment-lengths", "8", "32", "--dilation-rates", "1", "4", "--length", "32", "--heads", "1")


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"} | more


@functools.cache
def piped(*arguments: str, **more: str) -> str:
    command = [sys.executable, "-m", "dilated_attention", *arguments]
    result = subprocess.run(command, env=environment(**more), capture_output=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


@pytest.fixture(scope="module")
def plain() -> str:
    return piped(*INFO)


def test_a_pipe_gets_plain_lines_that_are_whole(plain: str) -> None:
    (flash4,) = [line for line in plain.splitlines() if "✗ flash4 " in line]
    assert flash4.endswith("runs on cuda, not on cpu; takes bfloat16, float16, not float32")
    assert not any(line != line.rstrip() for line in plain.splitlines())


def test_columns_sets_the_width_everywhere(plain: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recommend = ("recommend", "encoder", "--length", "64k", "--gpu", "H200")
    whole = piped(*recommend)
    for columns, line, text in ((70, INFO, plain), (40, SHOW, None), (50, recommend, whole)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(list(line)) == 0
        found = capsys.readouterr().out
        # the code stays in lines that can be pasted
        assert max(len(row) for row in found.splitlines() if line is not recommend or not row.startswith("    ")) <= columns
        # a word that is longer than a line is broken
        assert text is None or "".join(found.split()) == "".join(text.split())
        assert line is not recommend or found.splitlines()[-1] == whole.splitlines()[-1]


def test_what_ascii_lacks_becomes_a_question_mark(plain: str) -> None:
    for arguments, whole in ((INFO, plain), (SHOW, piped(*SHOW))):
        text = piped(*arguments, PYTHONIOENCODING="ascii")
        assert text == whole.encode("ascii", "replace").decode() and "?" in text
    command = [sys.executable, "-m", "dilated_attention", "show", "dilated", "--length", "4x"]
    result = subprocess.run(command, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, timeout=120, check=False)
    assert result.returncode == 2 and result.stderr.isascii() and b"Traceback" not in result.stderr


def test_json_has_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"reason": "blocks of 64 × 64 → triton", "a file's name that is no text": "caf\udce9"}
    common.put_json(value)
    text = capsys.readouterr().out
    assert text.isascii() and json.loads(text) == value
