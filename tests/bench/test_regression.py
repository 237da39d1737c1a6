"""bench regression: what got slower is found, what did not is let be, and a baseline of another machine is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.measure.reference_timing import YARDSTICKS, Figures, change, figures_of, sampled, verdict
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import regression
from dilated_attention.bench.suites.regression import slug
from dilated_attention.bench.workloads.contenders import MODULES, STANDARD
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main

CPU = torch.device("cpu")
PAIR = (STANDARD, next(contender for contender in MODULES if contender.name == "DilatedAttention"))


def figures(product: float, copy: float, calls: float, noise: float = 0.02) -> Figures:
    per = dict(zip(YARDSTICKS, (product, copy, calls), strict=True))
    return Figures(ms=1.0, low_ms=1.0, samples=50, per=per, noise=dict.fromkeys(YARDSTICKS, noise))


def test_a_change_counts_only_where_every_yardstick_shows_it_beyond_the_noise() -> None:
    then = figures(2.0, 4.0, 1.0)
    assert verdict(then, figures(3.0, 6.0, 1.5), 0.2) == "slower"
    assert change(then, figures(3.0, 6.0, 1.4)) == pytest.approx(0.4)
    # a neighbour that takes the memory slows a call, and the copy with it
    assert verdict(then, figures(3.0, 4.1, 1.5), 0.2) == "same"
    assert verdict(then, figures(3.0, 6.0, 1.5, noise=0.6), 0.2) == "same"
    assert verdict(then, figures(2.2, 4.4, 1.1), 0.2) == "same"
    assert verdict(then, figures(2.2, 4.4, 1.1), 0.05) == "slower"
    assert verdict(then, figures(1.0, 2.0, 0.5), 0.2) == "faster"
    assert change(then, figures(1.0, 2.2, 0.5)) == pytest.approx(-0.45)
    assert change(then, figures(2.5, 3.5, 1.0)) == 0.0


def test_figures_are_of_the_fastest_calls_and_their_noise_of_blocks() -> None:
    rods = {name: [1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0] for name in YARDSTICKS}
    found = figures_of([2.0, 9.0, 2.0, 2.0, 2.4, 3.0, 2.0, 2.0, 2.0, 50.0], rods)
    assert found.per == dict.fromkeys(YARDSTICKS, 2.0)
    assert found.noise == pytest.approx(dict.fromkeys(YARDSTICKS, 0.1))
    assert (found.ms, found.low_ms, found.samples) == (2.0, 2.0, 10)
    assert Figures.of_values(found.values()) == found


def test_four_times_the_work_is_four_times_as_long_by_the_yardsticks() -> None:
    a = torch.randn(256, 256)

    def work(times: int) -> None:
        for _ in range(times):
            a @ a

    found = sampled({"once": lambda: work(1), "four": lambda: work(4)}, CPU, full=False, seconds=0.1, least=40)
    for rod in YARDSTICKS:
        # the first product finds cold caches
        assert 2 < found["four"].per[rod] / found["once"].per[rod] < 5


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contenders on one short problem."""
    monkeypatch.setattr(regression, "CONTENDERS", PAIR)
    monkeypatch.setattr(regression, "core_problems", lambda session: [Problem(num_positions=128, num_heads=2, head_dim=32)])


def command(folder: Path, *more: str) -> list[str]:
    files = ["--output", str(folder / "out"), "--baseline", str(folder / "base.json")]
    return ["bench", "regression", *files, "--seconds", "0.03", "--quiet", *more]


def slowed(times: int) -> Any:
    """The same result, computed so many times."""
    right = PAIR[1]

    def make(problem: Problem) -> Any:
        attend = right.make(problem)

        def slow(*leaves: torch.Tensor) -> torch.Tensor:
            for _ in range(times - 1):
                attend(*leaves)
            return attend(*leaves)

        return slow

    return replace(right, make=make)


@pytest.mark.slow
def test_a_slower_module_is_found_and_an_unchanged_one_let_be(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(tmp_path, "--save-baseline")) == 0
    base = Results.load(tmp_path / "base.json")
    assert sorted({row.name for row in base.rows}) == ["DilatedAttention", "standard"]
    assert len(base.rows) == 4 and all(row.values["ms"] > 0 for row in base.rows)
    capsys.readouterr()
    for _ in range(2):
        assert main(command(tmp_path)) == 0
        assert "slower      0" in capsys.readouterr().out

    monkeypatch.setattr(regression, "CONTENDERS", (PAIR[0], slowed(15)))
    assert main(command(tmp_path)) == 1
    rows = {(row.name, row.case["pass"]): row for row in Results.load(tmp_path / "out" / "regression.json").rows}
    for which in ("forward", "both"):
        slow = rows["DilatedAttention", which]
        assert slow.note == "slower" and slow.values["change"] > 0.3
        assert rows["standard", which].note != "slower"
    out = capsys.readouterr().out
    assert "slower      2" in out and "DilatedAttention, B=1 N=128, forward" in out
    # rows that are not asked for are not looked at
    assert main(command(tmp_path, "--rows", "standard")) == 0


def test_what_is_gone_wrong_or_new_is_told(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regression, "CONTENDERS", PAIR[1:])
    assert main(command(tmp_path, "--save-baseline", "--rounds", "1")) == 0
    monkeypatch.setattr(regression, "CONTENDERS", PAIR)
    assert main(command(tmp_path)) == 0
    assert "new         2" in capsys.readouterr().out
    monkeypatch.setattr(regression, "CONTENDERS", PAIR[:1])
    assert main(command(tmp_path)) == 1
    assert "missing: in the baseline only" in capsys.readouterr().out
    wrong = replace(PAIR[1], make=lambda problem: lambda q, k, v: 1.1 * PAIR[1].make(problem)(q, k, v))
    monkeypatch.setattr(regression, "CONTENDERS", (wrong,))
    assert main(command(tmp_path)) == 1
    assert "missing: wrong: out off by" in capsys.readouterr().out
    # a problem that is measured no longer
    monkeypatch.setattr(regression, "CONTENDERS", PAIR)
    monkeypatch.setattr(regression, "core_problems", lambda session: [])
    assert main(command(tmp_path)) == 1


def test_a_baseline_that_cannot_be_compared_is_refused(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 1
    assert "base.json does not exist" in capsys.readouterr().err
    assert main(command(tmp_path, "--save-baseline", "--rounds", "1")) == 0
    capsys.readouterr()
    whole = json.loads((tmp_path / "base.json").read_text())
    for section, key, value, told in (
        ("hardware", "device", "an abacus", "differs in its hardware, {'device': 'an abacus'"),
        ("settings", "dtypes", ["float16"], "differs in its settings, {'size': 'small', 'dtypes': ['float16']"),
        (None, "suite", "speed", "differs in its suite, 'speed'"),
    ):
        changed = json.loads(json.dumps(whole))
        place = changed["machine"][section] if section == "hardware" else changed[section] if section else changed
        place[key] = value
        (tmp_path / "base.json").write_text(json.dumps(changed))
        assert main(command(tmp_path)) == 1
        assert told in capsys.readouterr().err
    # another number of threads is no other hardware: one is used
    whole["machine"]["hardware"]["threads"] = 99
    (tmp_path / "base.json").write_text(json.dumps(whole))
    assert main(command(tmp_path)) == 0
    for wrong in (["--save-baseline", "--rows", "x"], ["--rows", "("], ["--threshold", "0"]):
        with pytest.raises(SystemExit) as caught:
            main(command(tmp_path, *wrong))
        assert caught.value.code == 2


def test_hardware_makes_a_file_name() -> None:
    assert slug({"device": "NVIDIA H200", "devices": 1}) == "nvidia-h200"
    assert slug({"device": "NVIDIA H200", "devices": 4}) == "nvidia-h200-x4"
    assert slug({"device": "AMD EPYC (Milan)", "devices": 1, "cores": 2}) == "amd-epyc-milan-2-cores"


def test_a_gpus_result_is_tabled(tmp_path: Path) -> None:
    rows = []
    for i, contender in enumerate(regression.CONTENDERS):
        for n in (8192, 2**20):
            case = {"N": n, "B": 1, "causal": True, "pass": "both"}
            values = figures(1.0, 2.0, 3.0).values() | {"then_ms": n / 1e4 + i, "change": (i - 4) / 10}
            rows.append(Row(name=contender.name, case=case, values=values, note=("faster", "same", "slower")[i % 3]))
    rows.append(Row(name="gone", case={"N": 1, "B": 1}, note="missing: out of memory"))
    results = Results("regression", machine(CPU), {}, {"core": rows})
    suite = regression.Regression()
    assert suite.verdict(results) == 1
    assert suite.verdict(replace(results, groups={"core": [row for row in rows if row.note == "same"]})) == 0
    write(suite, results, tmp_path)
    text = (tmp_path / "regression.md").read_text()
    assert "### slower" in text and "### missing" in text and "missing: out of memory" in text
