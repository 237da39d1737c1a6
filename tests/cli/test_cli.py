"""``python -m dilated_attention``: ``info``, ``show`` of models, where ``bench`` points, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from dilated_attention import factory
from dilated_attention.cli import main
from dilated_attention.cli.arguments import count, size
from dilated_attention.factory import EXAMPLES


@pytest.mark.parametrize("machine", sorted(EXAMPLES))
def test_info_answers_for_other_machines(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--for", machine, "--json", "--head-dim", "48", "--causal"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["forward"]
    assert {row["name"] for row in answer["backends"]} >= {"math", "flash4"}
    assert all(row["usable"] == (not row["reasons"]) for row in answer["backends"])


def test_what_no_backend_can_do_exits_with_1_and_says_so_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--for", "hopper", "--precision", "fp8", "--dtype", "float32"]) == 1
    captured = capsys.readouterr()
    assert "no backend can compute" in captured.err
    assert "takes bfloat16, float16, not float32" in captured.out


def test_wrong_usage_exits_with_2() -> None:
    result = subprocess.run([sys.executable, "-m", "dilated_attention", "inform"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "invalid choice" in result.stderr
    assert result.stdout == ""


def test_errors_of_functions_are_shown_as_they_are_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["info", "--for", "cpu", "--heads", "8", "--kv-heads", "3"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error: num_kv_heads is 3; expected a divisor of num_heads = 8" in captured.err


def test_bench_says_where_measuring_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench"], ["bench", "speed", "--cases", "longnet-4096"]):
        assert main(arguments) == 0
        assert "python -m benchmarks speed" in capsys.readouterr().out


def test_show_tells_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "longnet-125m", "--positions", "32768", "--memory", "80"]) == 0
    text = capsys.readouterr().out
    assert "162,160,896" in text and "32,768" in text and "a device with 80 GiB trains" in text
    assert main(["show", "longnet-tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 631_680
    with pytest.raises(SystemExit):
        main(["show", "longnet-huge"])


def test_info_tells_who_takes_lists_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--for", "hopper", "--block-size", "128", "--head-dim", "128"]) == 0
    assert "forward and backward run on flash4, the first that can by the shipped table" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["info", "--for", "hopper", "--block-masks", "bits"])
    assert caught.value.code == 2
    assert "give block_size=128" in capsys.readouterr().err


def test_info_tells_who_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--for", "hopper", "--decode", "sparse"]) == 0
    printed = capsys.readouterr().out
    assert "→ triton" in printed and "✗ flash3" in printed
    assert main(["info", "--for", "cpu", "--decode", "dense", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == "torch" and [row["name"] for row in told["decoders"] if row["usable"]] == ["torch"]


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("65536", 65536), ("64k", 65536), ("1M", 2**20), ("2G", 2**31), ("3K", 3072)])
def test_sizes_are_powers_of_two(text: str, number: int) -> None:
    assert size(text) == count(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "1.5k", "1 k", "1kk", "١", "0M", "many"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="64k is 65536"):
        size(text)
    assert count("0") == 0


def test_an_interrupt_ends_without_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(factory, "detect", interrupted)
    assert main(["info"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_has_gone_ends_it_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-m", "dilated_attention", "info"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("info", "show", "plan", "recommend", "bench"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert f"dilated_attention {command}" in capsys.readouterr().out
