"""The command line as a process: its version, what other programs import, Ctrl-C while modules are imported; and its output, which fits
a terminal's width and its encoding and is the same text everywhere."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dilated_attention
from dilated_attention.cli import common, main

WHOLE = "import dilated_attention, torch; torch.ops.dilated_attention.ring_attention.default; vars(dilated_attention)['attention']\n"
HELD = "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"


def python(*arguments: str, folder: Path | None = None, ignored: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    # the package of this checkout, wherever the program runs
    variables = os.environ | {"PYTHONPATH": str(Path(dilated_attention.__file__).parents[1])} | more
    variables.pop("COLUMNS", None)
    # a shell lets what it starts in the background ignore SIGINT
    held = signal.SIG_IGN if ignored else signal.SIG_DFL
    options: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, held), "capture_output": True, "encoding": "utf-8"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, timeout=120, check=False, **options)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"dilated-attention {dilated_attention.__version__}\n")


@pytest.mark.parametrize("name", ["torch", "argparse"])
def test_an_interrupt_is_not_lost_while_modules_are_imported(tmp_path: Path, name: str) -> None:
    """Torch's import swallowed it, and the command went on, or aborted in C++; argparse stands for what the parser needs."""
    interrupted = "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise SystemExit(7)\n"
    (tmp_path / f"{name}.py").write_text(interrupted)
    (tmp_path / "dilated-attention").write_text("from dilated_attention.cli import main\nmain(['info'])\n")
    for program in (["-m", "dilated_attention", "info"], ["dilated-attention", "info"]):
        result = python(*program, folder=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
    # one that is ignored stays ignored: the module is imported, and lacks what the package needs
    assert "interrupted" not in python("-m", "dilated_attention", folder=tmp_path, ignored=True).stderr


def test_other_programs_import_the_whole_package_and_keep_their_interrupts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WHOLE + HELD)
    for arguments in (
        ["-m", "program", "-m", "dilated_attention"],
        ["-c", WHOLE + HELD, "-m", "dilated_attention"],
        ["program.py", "dilated-attention"],
    ):
        result = python(*arguments, folder=tmp_path)
        assert result.returncode == 0, result.stderr


def test_an_interpreter_that_was_started_without_arguments_imports_the_package() -> None:
    """As one that is embedded in another program may be."""
    result = python("-c", "import sys; sys.orig_argv = sys.argv = []; import dilated_attention")
    assert result.returncode == 0, result.stderr


def test_a_command_raises_keyboard_interrupt_again(tmp_path: Path) -> None:
    script = tmp_path / "dilated-attention"
    script.write_text(f"from dilated_attention.cli import main\nassert main(['show', 'longnet-tiny', '--json']) == 0\n{HELD}")
    result = python(str(script))
    assert result.returncode == 0, result.stderr


# ---- output

INFO = ("info", "--for", "cpu", "--all")
SHOW = ("show", "dilated", "--segment-lengths", "8", "32", "--dilation-rates", "1", "4", "--length", "32", "--heads", "1")


@functools.cache
def printed(*arguments: str, **more: str) -> str:
    result = python("-m", "dilated_attention", *arguments, **more)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_pipe_gets_plain_lines_that_are_whole() -> None:
    plain = printed(*INFO)
    (flash4,) = [line for line in plain.splitlines() if "✗ flash4 " in line]
    assert flash4.endswith("runs on cuda, not on cpu; takes bfloat16, float16, not float32")
    assert not any(line != line.rstrip() for line in plain.splitlines())


def test_columns_sets_the_width_everywhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recommend = ("recommend", "encoder", "--length", "64k", "--gpu", "H200")
    whole = printed(*recommend)
    for columns, line, text in ((70, INFO, printed(*INFO)), (40, SHOW, None), (50, recommend, whole)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(list(line)) == 0
        found = capsys.readouterr().out
        # the code stays in lines that can be pasted
        assert max(len(row) for row in found.splitlines() if line is not recommend or not row.startswith("    ")) <= columns
        # a word that is longer than a line is broken
        assert text is None or "".join(found.split()) == "".join(text.split())
        assert line is not recommend or found.splitlines()[-1] == whole.splitlines()[-1]


def test_what_ascii_lacks_becomes_a_question_mark(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(list(SHOW)) == 0
    plain, streams = capsys.readouterr().out, {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert main(list(SHOW)) == 0
    with pytest.raises(SystemExit) as end:
        main(["show", "dilated", "--length", "4×"])
    for stream in streams.values():
        stream.seek(0)
    out, error = (stream.read() for stream in streams.values())
    assert out == plain.encode("ascii", "replace").decode() and "?" in out
    assert end.value.code == 2 and "'4?'" in error


def test_json_has_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"reason": "blocks of 64 × 64 → triton", "a file's name that is no text": "caf\udce9"}
    common.put_json(value)
    text = capsys.readouterr().out
    assert text.isascii() and json.loads(text) == value
