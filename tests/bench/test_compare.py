"""bench speed --against: what got slower is found, what did not is let be, and a run of other hardware or settings is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.report.compare import REPEATS, Earlier
from dilated_attention.bench.report.rows import machine
from dilated_attention.cli import main

HERE = machine(torch.device("cpu"))


def rows(**ms: float) -> list[Row]:
    return [Row(name=name, case={"N": 64, "pass": "forward"}, values={"ms": x, "low_ms": x}) for name, x in ms.items()]


def earlier(external: tuple[str, ...] = ("torch", "fa4"), **ms: float) -> Earlier:
    return Earlier(Results("speed", HERE, {}, {"a": rows(**ms)}), external, ["forward"], 0.2)


def states(then: Earlier, now: list[Row]) -> tuple[bool, dict[str, str]]:
    failed, (table,) = then.verdict(Results("speed", HERE, {}, {"a": now, "new": now}))
    return failed, {row[0]: row[-1] for row in table.rows}


def test_a_slower_row_is_found_and_an_equal_one_is_not() -> None:
    then = earlier(ours=10.0, other=10.0, torch=4.0, fa4=2.0)
    assert states(then, rows(ours=11.9, other=10.0, torch=4.0, fa4=2.0)) == (False, {})
    assert states(then, rows(ours=15.0, other=8.0, torch=4.1, fa4=2.0)) == (
        True,
        {"a: ours, forward": "slower", "a: other, forward": "faster"},
    )
    # a busy machine slows the others, too, and one of theirs is no fault of this library's
    assert states(then, rows(ours=15.0, other=14.0, torch=5.6, fa4=2.8)) == (False, {})
    assert states(then, rows(ours=10.0, other=10.0, torch=4.0, fa4=4.0)) == (False, {"a: fa4, forward": "slower"})
    # a faster machine on which it is as slow as before: not slower in time
    assert states(then, rows(ours=10.0, other=5.0, torch=2.0, fa4=1.0))[0] is False
    now = [*rows(other=10.0, torch=4.0, fa4=2.0), Row(name="ours", case={"N": 64}, note="wrong: out off by 1")]
    assert states(then, now) == (True, {"a: ours, forward": "missing: wrong: out off by 1"})


def test_without_others_the_first_contender_is_what_counts() -> None:
    then = earlier((), ours=10.0, without=8.0)
    assert states(then, rows(ours=15.0, without=8.0)) == (True, {"a: ours, forward": "slower"})
    assert states(then, rows(ours=15.0, without=12.0)) == (False, {})
    assert states(earlier((), ours=10.0), rows(ours=15.0))[0] is True


def test_a_suspect_is_measured_again() -> None:
    then, measured = earlier(ours=10.0, torch=4.0), []

    def measure(times: list[float]) -> list[Row]:
        measured.append(times[len(measured)])
        return [*rows(ours=measured[-1], torch=4.0), Row(name="refused", case={"N": 64}, note="runs on cuda")]

    found = then.measured("a", lambda: measure([15.0, 11.0]))
    assert measured == [15.0, 11.0] and not states(then, found)[0] and len(found) == 3
    measured.clear()
    found = then.measured("a", lambda: measure([15.0, 14.0, 16.0, 17.0]))
    assert len(measured) == 1 + REPEATS and found[0].values["low_ms"] == 14.0 and states(then, found)[0]
    # so is what a busy machine left out
    late = [Row(name="ours", case={"N": 64, "pass": "forward"}, note="longer than 1 s a call"), *rows(torch=4.0)]
    turns = iter([late, rows(ours=10.0, torch=4.0)])
    found = then.measured("a", lambda: next(turns))
    assert not states(then, found)[0] and {row.note for row in found} == {""}


def test_the_command_compares_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "speed",
        "--lengths",
        "64",
        "--masks",
        "full",
        "--passes",
        "forward",
        "--contenders",
        "torch sdpa",
        "DilatedAttention",
    ]
    command += ["--seconds", "0.01", "--quiet", "--output"]
    assert main([*command, str(tmp_path / "a")]) == 0
    path = tmp_path / "a" / "speed.json"
    whole = json.loads(path.read_text())
    (group,) = whole["groups"].values()
    for row in group:
        row["values"]["low_ms"] /= 1e6 if row["name"] == "DilatedAttention" else 1.0
    path.write_text(json.dumps(whole))
    capsys.readouterr()
    assert main([*command, str(tmp_path / "b"), "--against", str(tmp_path / "a")]) == 1
    out = capsys.readouterr().out
    assert "DilatedAttention, forward" in out and out.count("  slower") == 1
    assert main([*command, str(tmp_path / "b"), "--against", str(tmp_path)]) == 1
    assert f"expected a folder with results of suite speed, such as {tmp_path / 'a'}" in capsys.readouterr().err
    for section, value, words in (("hardware", {"device": "an abacus"}, "other hardware: device 'an abacus' there"),
                                  ("settings", {"longest": 7}, "other settings: longest 7 there")):  # fmt: skip
        changed = json.loads(json.dumps(whole))
        (changed["machine"] if section == "hardware" else changed)[section].update(value)
        path.write_text(json.dumps(changed))
        assert main([*command, str(tmp_path / "b"), "--against", str(tmp_path / "a")]) == 1
        assert words in capsys.readouterr().err
