"""bench memory: measured peaks and predicted ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import memory
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main

CPU = torch.device("cpu")


def command(folder: Path, *more: str) -> list[str]:
    return ["bench", "memory", "--output", str(folder), "--quiet", *more]


@pytest.mark.slow
def test_peaks_of_attention_are_as_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["standard", "DilatedAttention", "flash4"]
    given = command(tmp_path, "--lengths", "1k", "2k", "--contenders", *names)
    assert main(given) == 0
    rows = {(row.name, row.case["pass"], row.case["N"]): row for row in Results.load(tmp_path / "memory.json").rows}
    for name in names[:2]:
        for which in memory.PASSES:
            for n in (1024, 2048):
                v = rows[name, which, n].values
                tensor = n * 8 * 64 * 4
                # q, k, v, out; and dout, dq, dk, dv
                assert v["peak_bytes"] > (8 if which == "training" else 4) * tensor
                assert v["off"] == pytest.approx(v["peak_bytes"] / v["predicted_bytes"] - 1, abs=1e-3)
                assert abs(v["off"]) < 0.1, (name, which, n, v)
            growth = rows[name, which, 2048].values["peak_bytes"] / rows[name, which, 1024].values["peak_bytes"]
            assert growth > 3.5 if name == "standard" else 1.8 < growth < 2.2
    assert rows["flash4", "forward", 1024].note and not rows["flash4", "forward", 1024].values
    out = capsys.readouterr().out
    assert "less than standard" in out and "off the plan, %" in out

    monkeypatch.setattr(memory, "within", lambda *args: pytest.fail("measured twice"))
    assert main(given) == 0


def test_a_wrong_contender_and_one_too_large_have_no_figure() -> None:
    right = memory.CONTENDERS["standard"]
    shifted = replace(right, make=lambda problem: lambda q, k, v: right.make(problem)(q * 1.5, k, v))
    problem = Problem(num_positions=64, num_heads=2, head_dim=16)
    (row,) = memory._attention([shifted], problem, "forward")
    assert row.note.startswith("wrong: out off by") and not row.values
    (row,) = memory._attention([right], replace(problem, num_positions=2**16), "forward")
    assert row.note == "not run: it would take 64.1 GiB, on a CPU at most 2"


def test_only_what_a_plan_describes_is_held_to_it() -> None:
    """Other dense kernels may copy their results."""
    problem = Problem(num_positions=256, num_heads=4, head_dim=64)
    predicted = {name: memory.predicted_bytes(contender, problem, "forward") for name, contender in memory.CONTENDERS.items()}
    assert all(predicted[name] for name in ("standard", "torch sdpa", "DilatedAttention", "BlockSparseAttention window"))
    assert not any(predicted[name] for name in ("sdpa_flash", "flash3", "flex", "flash3_fp8"))


def test_a_gpus_result_becomes_tables(tmp_path: Path) -> None:
    attention = []
    for i, name in enumerate(memory.CONTENDERS):
        for n in (4096, 8192, 2**18):
            case = {"pass": "training", "N": n}
            values = {"peak_bytes": n * 16384 * (1 + i), "predicted_bytes": n * 16000, "off": 0.02}
            too_long = name == "standard" and n > 8192
            attention.append(Row(name=name, case=case, values={} if too_long else values, note="out of memory" if too_long else ""))
    failed = Row(name="all", case={"group": "attention N=1G"}, note="out of memory")
    results = Results("memory", machine(CPU), {}, {"a": attention, "x": [failed]})
    write(memory.Memory(), results, tmp_path)
    text = (tmp_path / "memory.md").read_text()
    for part in ("| standard | 262,144 | – | – | – | out of memory |", "| attention N=1G | out of"):
        assert part in text
