"""``python -m dilated_attention generate``: characters as they are drawn, of bytes and bases, and everything that it refuses."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention.cli import main
from dilated_attention.models import BASES, BYTES, kmers
from tests.cli.checkpoints import saved

Capture = pytest.CaptureFixture[str]


def test_bytes_are_those_of_the_models_generate(tmp_path: Path, capsys: Capture) -> None:
    model = saved("bytes", tmp_path / "run" / "checkpoint")
    prompt = "naïve"
    options = ["--max-new-tokens", "40", "--temperature", "0.9", "--top-k", "200", "--top-p", "0.9", "--seed", "7", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "run"), "--prompt", prompt, *options]) == 0
    text = capsys.readouterr().out
    tokens = BYTES.encode(prompt)[None]
    made = model.generate(tokens, 40, temperature=0.9, top_k=200, top_p=0.9, generator=torch.Generator().manual_seed(7))
    assert text == BYTES.decode(made[0, tokens.shape[1] :])
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    assert main(["generate", str(tmp_path / "run" / "checkpoint"), "--prompt-file", str(tmp_path / "prompt.txt"), *options]) == 0
    assert capsys.readouterr().out == text


def test_bases_are_letters(tmp_path: Path, capsys: Capture) -> None:
    model = saved("bases", tmp_path / "model")
    (tmp_path / "x.fa").write_bytes(b">one\nGATT\nACA\n")
    (tmp_path / "x.txt").write_bytes(b"gatt aca\n")
    codes = kmers(BASES.encode("GATTACA"), 4, False)[None]
    expected = BASES.decode(model.generate(codes, 50, generator=torch.Generator().manual_seed(1))[0, 7:] % 5)
    for prompt in (["--prompt", "gattaca"], ["--prompt-file", str(tmp_path / "x.fa")], ["--prompt-file", str(tmp_path / "x.txt")]):
        assert main(["generate", str(tmp_path / "model"), *prompt, "--max-new-tokens", "50", "--seed", "1"]) == 0
        assert capsys.readouterr().out == expected
    stop = expected[20:23].lower()
    assert main(["generate", str(tmp_path / "model"), "--prompt", "gattaca", "--max-new-tokens", "50", "--seed", "1", "--stop", stop]) == 0
    assert capsys.readouterr().out == expected[: expected.index(stop.upper()) + 3]


def test_a_stop_may_be_bytes_that_are_no_text(tmp_path: Path, capsys: Capture) -> None:
    """As --prompt may; the shell's bytes come as surrogates."""
    saved("bytes", tmp_path / "model")
    options = ["--prompt", "x", "--max-new-tokens", "400", "--seed", "1", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "model"), *options]) == 0
    whole = capsys.readouterr().out
    assert main(["generate", str(tmp_path / "model"), *options, "--stop", b"\xff".decode(errors="surrogateescape")]) == 0
    text = capsys.readouterr().out
    assert whole.startswith(text) and text.endswith("\ufffd") and len(text) < len(whole)


def test_characters_are_written_when_they_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each byte is asked for only once the text before it is out; a character of three bytes waits for its last."""
    saved("bytes", tmp_path / "model")
    raw = "aé→b".encode() + b"\xff" + b"c\xe2"
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    seen: list[str] = []

    def tokens(*arguments: object, **options: object) -> object:
        for value in raw:
            seen.append(out.buffer.getvalue().decode())  # type: ignore[attr-defined]
            yield torch.tensor([[value]])

    monkeypatch.setattr("dilated_attention.models.generate_stream", tokens)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--device", "cpu"]) == 0
    assert seen == ["", "a", "a", "aé", "aé", "aé", "aé→", "aé→b", "aé→b\ufffd", "aé→b\ufffdc"]
    assert out.buffer.getvalue().decode() == "aé→b\ufffdc\ufffd"  # type: ignore[attr-defined]


def test_output_that_cannot_hold_a_character_replaces_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("bytes", tmp_path / "model")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("dilated_attention.models.generate_stream", lambda *_, **__: (torch.tensor([[byte]]) for byte in "a→b".encode()))
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--device", "cpu"]) == 0
    assert out.buffer.getvalue() == b"a?b"  # type: ignore[attr-defined]


def test_runs_without_a_seed_differ(tmp_path: Path, capsys: Capture) -> None:
    saved("bytes", tmp_path / "model")
    texts = set()
    for _ in range(2):
        assert main(["generate", str(tmp_path / "model"), "--prompt", "x", "--max-new-tokens", "30"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("kind", "options", "code", "text"),
    [
        ("masked bytes", ["--prompt", "x"], 1, "config.is_causal is False"),
        ("bytes", ["--prompt", ""], 2, "the prompt is empty"),
        ("bases", ["--prompt", " \n"], 1, "the prompt has no bases"),
        ("bytes", ["--prompt-file", "none"], 1, "No such file or directory: 'none'"),
        ("bytes", ["--prompt-file", "."], 1, "Is a directory: '.'"),
        ("bytes", ["--prompt-file", "empty"], 2, "the prompt is empty"),
        ("bases", ["--prompt-file", "two.fa"], 1, "--prompt-file two.fa holds 2 records; expected one"),
        ("bytes", [], 2, "one of the arguments --prompt --prompt-file is required"),
        ("bytes", ["--prompt", "x", "--prompt-file", "y"], 2, "not allowed with argument --prompt"),
        ("bytes", ["--prompt", "x", "--temperature", "-1"], 2, "temperature is -1.0; expected a number from 0"),
        ("bytes", ["--prompt", "x", "--top-p", "2"], 2, "top_p is 2.0; expected a number in (0, 1]"),
        ("bytes", ["--prompt", "x", "--top-k", "0"], 2, "argument --top-k: '0' is not a size"),
        ("bytes", ["--prompt", "x", "--max-new-tokens", "0"], 2, "argument --max-new-tokens: '0' is not a size"),
        ("bytes", ["--prompt", "x", "--stop", ""], 2, "--stop has no bytes"),
        ("bases", ["--prompt", "A", "--stop", " "], 2, "--stop has no bases"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    kind: str, options: list[str], code: int, text: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(kind, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "two.fa").write_bytes(b">a\nACGT\n>b\nACGT\n")
    try:
        found = main(["generate", "model", *options])
    except SystemExit as error:
        found = int(error.code or 0)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and len(lines) == (1 if found == 1 else 2), captured.err
    assert found == code and text in lines[-1], lines[-1]
