"""bench bandwidth: ceilings, and what each pass must move and compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import bandwidth
from dilated_attention.bench.workloads.contenders import STANDARD
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main

CPU = torch.device("cpu")


@pytest.mark.slow
def test_figures_are_flops_and_least_bytes_over_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(batch_size=2, num_positions=64, num_heads=4, num_kv_heads=2, head_dim=16)
    monkeypatch.setattr(bandwidth.Bandwidth, "problems", lambda self, session: [problem])
    names = ["standard", "DilatedAttention", "BlockSparseAttention 10%"]
    command = ["bench", "bandwidth", "--output", str(tmp_path), "--seconds", "0.01", "--quiet", "--contenders", *names]
    assert main(command) == 0
    results = Results.load(tmp_path / "bandwidth.json")
    ceilings = {(row.name, row.case["dtype"]): row.values for row in results.groups["ceilings"]}
    assert 0.1 < ceilings["copy", "bytes"]["gb_s"] < 1000 and 1e-4 < ceilings["matrix product", "float32"]["tflops"] < 100
    rows = {(row.name, row.case.get("pass")): row for row in results.rows if row.case["part"] == "attention"}
    q, k, lse = 2 * 64 * 4 * 16 * 4, 2 * 64 * 2 * 16 * 4, 2 * 64 * 4 * 4
    moved = {"forward": 2 * q + 2 * k + lse, "backward": 3 * q + 2 * k + lse + q + 2 * k}
    moved["both"] = moved["forward"] + moved["backward"]
    factors = {"forward": 4, "backward": 10, "both": 14}
    for which, factor in factors.items():
        v = rows["standard", which].values
        assert (v["flops"], v["least_bytes"]) == (factor * 2 * 4 * 64 * 64 * 16, moved[which])
        assert v["intensity"] == pytest.approx(v["flops"] / v["least_bytes"], rel=1e-3)
        assert v["tflops"] == pytest.approx(v["flops"] / v["ms"] / 1e9, rel=1e-3)
        assert v["gb_s"] == pytest.approx(v["least_bytes"] / v["ms"] / 1e6, rel=1e-3)
        assert rows["DilatedAttention", which].values["flops"] < v["flops"]
    # a tenth of one block is none
    assert rows["BlockSparseAttention 10%", None].note == "keeps no pair of so few blocks"
    out = capsys.readouterr().out
    assert "share of roof" in out and "of a copy" not in out and "keeps no pair" in out

    monkeypatch.setattr(bandwidth, "measure", lambda *args, **options: pytest.fail("measured twice"))
    assert main(command) == 0


def test_the_roof_is_the_lower_of_both_ceilings(tmp_path: Path) -> None:
    hardware = {"part": "ceilings"}
    rows = [
        Row(name="copy", case=hardware | {"dtype": "bytes"}, values={"gb_s": 4000.0, "datasheet": 4800.0, "reached": 0.83}),
        Row(name="matrix product", case=hardware | {"dtype": "bfloat16"}, values={"tflops": 800.0}),
    ]
    attention = []
    for n in (16384, 256):
        problem = Problem(num_positions=n, num_heads=16, head_dim=128, dtype=torch.bfloat16)
        for which in bandwidth.PASSES:
            case = problem.case | {"part": "attention", "pass": which}
            attention.append(
                bandwidth._placed(Row(name="a", case=case, values={"ms": 1.0, "tflops": 50.0}), problem, STANDARD.pairs(problem) or 0)
            )
    attention.append(Row(name="b", case={"part": "attention", "dtype": "float64", "N": 256}, note="out of memory"))
    results = Results("bandwidth", machine(CPU), {}, {"ceilings": rows, "attention a": attention})
    found = {(row.name, row.case["N"], row.case.get("pass")): row for row in bandwidth._with_roof(results, attention)}
    long, short = found["a", 16384, "forward"], found["a", 256, "forward"]
    assert (long.values["roof"], long.note) == (800.0, "products")
    assert short.values["roof"] == pytest.approx(4 * short.values["intensity"]) and short.note == "memory"
    assert short.values["share"] == pytest.approx(50 / short.values["roof"])
    assert found["b", 256, None].note == "out of memory"
    write(bandwidth.Bandwidth(), results, tmp_path)
    text = (tmp_path / "bandwidth.md").read_text()
    assert "| copy, bytes | 4,000 |" in text and "| a, forward | 1 |" in text and "out of memory" in text
