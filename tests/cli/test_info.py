"""``info``: the verdict first, what would be faster, the backends that can be used, and with ``--all`` every reason."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dilated_attention import factory
from dilated_attention.cli import main
from dilated_attention.factory import EXAMPLES, explain_backend

HOPPER = EXAMPLES["hopper"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["info", *arguments]) == 0
    return capsys.readouterr().out


def test_on_a_cpu_the_gpu_backends_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--for", "cpu")
    explanation = explain_backend(hardware=EXAMPLES["cpu"])
    verdict, faster, empty, *rest = text.splitlines()
    assert "with gradients: forward and backward run on sdpa_cpu, the first that can by " in verdict
    refused = [line.split()[1] for mark, _, line in explanation.lines() if mark == "✗"]
    assert faster == "faster: a CUDA GPU; info --for hopper shows what runs there."
    assert empty == ""
    usable = [line for mark, _, line in explanation.lines() if mark != "✗"]
    assert rest[: len(usable)] == usable
    assert rest[len(usable)] == f"cannot: {', '.join(refused)}; --all shows every reason."
    assert "✗" not in text and "not installed" not in text


def test_all_prints_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--for", "cpu", "--all")
    assert str(explain_backend(hardware=EXAMPLES["cpu"])) in text


def test_json_does_not_depend_on_all(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (json.loads(printed(capsys, "--for", "cpu", "--json", *more)) for more in ([], ["--all"]))
    assert short == whole
    assert {row["name"] for row in short["backends"] if row["reasons"]} >= {"flash4", "triton"}


def test_packages_that_would_be_preferred_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dataclasses.replace(HOPPER, packages=frozenset({"triton"}))
    monkeypatch.setattr(factory, "detect", lambda device=None: bare)
    text = printed(capsys)
    assert "forward and backward run on sdpa_flash, the first that can by the shipped table." in text
    (faster,) = [line for line in text.splitlines() if line.startswith("faster")]
    assert faster == 'faster by the shipped table: flash4; flash-attn-4 is not installed: pip install --pre "flash-attn-4[cu13]"'
    monkeypatch.setattr(factory, "detect", lambda device=None: HOPPER)
    assert "faster" not in printed(capsys)


def test_what_only_one_pass_can_do_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--for", "hopper", "--block-size", "64", "--head-dim", "128")
    assert "  → flash4          forward only: its backward with head_dim 128 takes blocks of 64x128 or 128x128, not 64x64" in text
    assert "sdpa_cpu" in text.partition("\ncannot: ")[2]
