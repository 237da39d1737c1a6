"""Suite ``speed``: figures that fit each other, gaps with a reason, and what a GPU's file looks like as tables and plots."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.measure import contest as measure_module
from dilated_attention.bench.measure.contest import duration, expected_seconds, measure
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites.speed import CONTENDERS, GRID, Speed
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, MULTIHEAD, STANDARD, Contender, dense_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main
from dilated_attention.pattern import DilatedPattern

H200 = {"device": "NVIDIA H200", "devices": 1, "memory_bytes": 150_000_000_000, "capability": "9.0"}
# TFLOP/s of the forward
RATES = {"standard": 60.0, "flash2": 305.0, "sdpa_cudnn": 460.0, "flash3": 500.0, "flash3_fp8": 630.0, "flash4": 530.0}


def gpu_results(hardware: dict[str, Any] = H200) -> Results:
    """Times of an imagined GPU: to 1M positions, with what such a run leaves out."""
    rows: dict[str, list[Row]] = {}
    for n in [2**i for i in range(9, 21)]:
        for causal in (False, True):
            case = {"N": n, "B": 8 if n <= 8192 else 1, "H": 32, "D": 64, "dtype": "bfloat16", "causal": causal, "part": "length"}
            case["shape"] = f"{case['B']}x{n}x32x64"
            group = rows.setdefault(f"length N={n} {causal}", [])
            for name, contender in CONTENDERS.items():
                group += _rows(name, contender, case)
    for b, n, h, d in GRID:
        case = {"N": n, "B": b, "H": h, "D": d, "dtype": "bfloat16", "causal": False, "part": "grid", "shape": f"{b}x{n}x{h}x{d}"}
        rows[f"grid {case['shape']}"] = [row for name, contender in CONTENDERS.items() for row in _rows(name, contender, case)]
    machine = {"date": "2026-01-01", "hardware": hardware, "versions": {"torch": "2.11"}}
    return Results("speed", machine, {"size": "full", "longest": 0.4, "contenders": "all"}, rows)


def _rows(name: str, contender: Contender, case: dict[str, Any]) -> list[Row]:
    if name == "sdpa_cpu" or (name == "flash4" and case["D"] == 16):
        return [Row(name=name, case=case, note="runs on cpu, not on cuda" if name == "sdpa_cpu" else "head_dim is 32 to 256, not 16")]
    if name == "standard" and case["N"] > 8192:
        return [Row(name=name, case=case, note="out of memory")]
    problem = Problem(num_positions=case["N"], num_heads=case["H"], head_dim=case["D"], batch_size=case["B"], is_causal=case["causal"])
    pairs = contender.pairs(problem) if contender.pattern(problem) is None or "BlockSparse" not in name else problem.dense_pairs // 8
    counted = pairs or problem.dense_pairs // 10
    rate = RATES.get(name, 300.0)
    ms = 0.02 + 4 * counted * case["D"] / rate / 1e9
    rows = []
    for which, factor in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
        if factor > 1.0 and not contender.trains:
            continue
        if factor * ms > 400:
            rows.append(Row(name=name, case=case | {"pass": which}, note=f"would take about {duration(factor * ms / 1000)}"))
        else:
            values = {"ms": factor * ms, "low_ms": 0.98 * factor * ms, "high_ms": 1.03 * factor * ms, "samples": 20}
            values |= {"tflops": 4 * pairs * case["D"] / ms / 1e9} if pairs else {}
            rows.append(Row(name=name, case=case | {"pass": which}, values=values, errors={"out": 2e-3}))
    return rows


@pytest.mark.slow
def test_a_gpus_file_becomes_tables_and_plots(tmp_path: Path) -> None:
    suite, results = Speed(), gpu_results()
    tables = {table.title: table for table in suite.tables(results)}
    forward = tables["ms, forward, bfloat16, full, by positions"]
    cells = {row[0]: dict(zip(forward.columns, row, strict=True)) for row in forward.rows}
    assert cells["flash4"]["8,192"].endswith("(1 ×)")
    assert cells["standard"]["16,384"].startswith("[") and "out of memory" in forward.caption
    # 4 · 32 · 64 · 2^40 FLOPs at 530 TFLOP/s
    assert cells["flash4"]["1,048,576"] == "≈ 17 s"
    assert {row[0]: row[-1] for row in tables["ms, backward, bfloat16, full, by positions"].rows}["flash4"] == "≈ 42 s"
    assert "estimated" in forward.caption and "sdpa_cpu (runs on cpu, not on cuda)" in forward.caption
    assert "batch 8 up to N = 8,192, then 1" in forward.caption
    rates = tables["TFLOP/s, forward, bfloat16, full, by positions"]
    by_name = {row[0]: row[-4] for row in rates.rows}
    # 989 TFLOP/s in 16 bits and 1,979 in 8, as NVIDIA states for an H200
    assert by_name["flash4"].startswith("530 (53.6 %)") and by_name["flash3_fp8"].startswith("630 (31.8 %)")
    over = {row[0]: row for row in tables["times as fast as standard attention, forward, bfloat16, full, by positions"].rows}
    assert float(over["flash4"][5]) == pytest.approx(530 / 60, rel=0.03)
    assert "flash3_fp8" not in {row[0] for row in tables["ms, backward, bfloat16, full, by positions"].rows}
    assert "64x1024x64x128" in tables["ms, forward + backward, bfloat16, full, by shape"].columns
    written = write(suite, results, tmp_path)
    pictures = [path for path in written if path.suffix == ".png"]
    assert {path.stem for path in pictures} >= {"speed-time-forward", "speed-dense-backward", "speed-speedup-both"}
    assert all(path.stat().st_size > 6_000 for path in pictures)
    assert all(len(plot.lines) <= 12 for plot in suite.plots(results))
    # the same from the file alone
    again = Results.load(tmp_path / "speed.json")
    assert [(table.title, table.columns, len(table.rows)) for table in suite.tables(again)] == [
        (table.title, table.columns, len(table.rows)) for table in tables.values()
    ]


def test_a_device_whose_peak_is_not_known_has_no_utilisation() -> None:
    results = gpu_results(H200 | {"device": "Abacus 9000"})
    table = next(table for table in Speed().tables(results) if table.title.startswith("TFLOP/s"))
    assert "No utilisation: the peak rates of Abacus 9000 are not known" in table.caption
    assert not any("%" in cell for row in table.rows for cell in row[1:])


@pytest.mark.slow
def test_the_suite_measures_checks_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "speed", "--output", str(tmp_path), "--seconds", "0.002", "--lengths", "64", "128", "--quiet"]
    command += ["--contenders", "sdpa_cpu", "flash4", "MultiheadDilatedAttention"]
    assert main([*command, "--parts", "length", "--no-plots"]) == 0
    text = capsys.readouterr().out
    assert "ms, forward + backward, float32, causal, by positions" in text and "sdpa_cpu" in text
    first = json.loads((tmp_path / "speed.json").read_text())["groups"]
    assert len(first) == 3
    rows = [row for group in first.values() for row in group]
    assert {row["note"] for row in rows if row["name"] == "flash4"} == {"runs on cuda, not on cpu; takes bfloat16, float16, not float32"}
    timed = [row for row in rows if row["name"] != "flash4"]
    assert all(row["values"]["ms"] > 0 and max(row["errors"].values()) < 1e-4 for row in timed)
    for row in timed:
        case, values = row["case"], row["values"]
        if row["name"] == "sdpa_cpu":
            pairs = 4 * (case["N"] * (case["N"] + 1) // 2 if case["causal"] else case["N"] ** 2)
            flops = {"forward": 4, "backward": 10, "both": 14}[case["pass"]] * pairs * 32
            assert values["tflops"] == pytest.approx(flops / values["ms"] / 1e9, rel=1e-3)
    # the grid is new, the lengths are not measured again
    assert main(command) == 0
    second = json.loads((tmp_path / "speed.json").read_text())["groups"]
    assert {label: second[label] for label in first} == first and len(second) == 6
    assert (tmp_path / "speed-time-both.png").stat().st_size > 4_000
    assert main([*command, "--longest", "0.5"]) == 1
    assert "made with other settings: longest 1.0 there, 0.5 here" in capsys.readouterr().err


def test_what_takes_too_long_is_left_out_with_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(problem: Problem) -> Any:
        right = STANDARD.make(problem)

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            # 15 ms at 512 positions, so 64 times that at 4096
            time.sleep(0.015 * (problem.num_positions / 512) ** 2)
            return right(*qkv)

        return attend

    problem = Problem(num_positions=4096, num_heads=1, head_dim=8)
    contender = Contender(name="slow", what="", make=slow, pattern=dense_pattern)
    monkeypatch.setitem(measure_module._WORTH_A_PROBE, "cpu", 1e6)
    expected = expected_seconds(contender, problem)
    assert expected is not None and 0.96 <= expected < 20
    rows = measure([contender], problem, passes=("forward", "backward"), seconds=0.001, longest=0.9)
    assert [(row.name, row.case["pass"]) for row in rows] == [("slow", "forward"), ("slow", "backward")]
    assert all(row.note.startswith("would take about") and not row.values for row in rows)
    # what is short is not probed, and neither is anything where there is no limit
    assert expected_seconds(contender, replace(problem, num_positions=2048)) is None
    dilated = next(contender for contender in MODULES if contender.name == "DilatedAttention")
    (row,) = measure([dilated], problem, passes=("forward",), seconds=0.001, longest=1e3)
    assert row.values["ms"] > 0 and not row.note
    assert [duration(x) for x in (0.0123, 0.5, 18.4, 250.0, 9000.0)] == ["12 ms", "500 ms", "18 s", "4.2 min", "2.5 h"]


def test_a_kernel_that_raises_has_a_note_and_the_others_their_figures() -> None:
    def broken(problem: Problem) -> Any:
        def attend(*_: torch.Tensor) -> torch.Tensor:
            raise AssertionError("head_dim 16 is odd\nsecond line")

        return attend

    problem = Problem(num_positions=64, num_heads=2, head_dim=16)
    rows = measure([Contender(name="broken", what="", make=broken, pattern=dense_pattern), STANDARD], problem, seconds=0.001)
    assert rows[0].note == "raised AssertionError: head_dim 16 is odd"
    assert all(row.values for row in rows[1:]) and len(rows) == 4

    def dead(problem: Problem) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure([Contender(name="dead", what="", make=dead, pattern=dense_pattern)], problem, seconds=0.001)


def test_the_defaults_are_the_published_ones() -> None:
    import argparse

    from dilated_attention.bench import Session

    parser = argparse.ArgumentParser()
    suite = Speed()
    suite.add_arguments(parser)
    session = Session(
        device=torch.device("cpu"), full=True, dtypes=(torch.float16, torch.bfloat16), seconds=0.2, options=parser.parse_args([])
    )
    problems = [problem for part, problem in suite.problems(session) if part == "length" and not problem.is_causal]
    assert [p.num_positions for p in problems] == [2**i for i in range(9, 21)] * 2
    assert {(p.batch_size, p.num_heads, p.head_dim) for p in problems if p.num_positions <= 8192} == {(8, 32, 64)}
    assert {p.dtype for p in problems} == {torch.float16, torch.bfloat16}
    labels = [group.label for group in suite.groups(session)]
    assert len(labels) == len(set(labels)) == 2 * (12 + 6 + 7)
    assert {*RATES} <= {contender.name for contender in DENSE} and len(MULTIHEAD) == 4
    assert DilatedPattern(*problems[-1].branches).pairs(2**20, 32) > 0
