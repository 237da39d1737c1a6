"""bench memory: measured peaks beside predicted ones, what fits, models told from a few of their layers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention.bench import Results, Row, Session
from dilated_attention.bench.measure.subprocess_runner import why_no_children
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import memory
from dilated_attention.bench.workloads import model_memory
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main
from dilated_attention.models.summary import USABLE

pytestmark = pytest.mark.skipif(bool(why_no_children()), reason=why_no_children() or "-")
CPU = torch.device("cpu")


def command(folder: Path, *more: str) -> list[str]:
    return ["bench", "memory", "--output", str(folder), "--quiet", *more]


@pytest.mark.slow
def test_peaks_of_attention_are_as_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["standard", "DilatedAttention", "flash4"]
    given = command(tmp_path, "--parts", "attention", "--lengths", "1k", "2k", "--contenders", *names)
    assert main(given) == 0
    rows = {(row.name, row.case["pass"], row.case["N"]): row for row in Results.load(tmp_path / "memory.json").rows}
    for name in names[:2]:
        for which in memory.PASSES:
            for n in (1024, 2048):
                v = rows[name, which, n].values
                tensor = n * 8 * 64 * 4
                # q, k, v, out; and dout, dq, dk, dv
                assert v["peak_bytes"] > (8 if which == "training" else 4) * tensor
                assert v["bytes_per_token"] == pytest.approx(v["peak_bytes"] / n, rel=1e-3)
                assert v["off"] == pytest.approx(v["peak_bytes"] / v["predicted_bytes"] - 1, abs=1e-3)
                assert abs(v["off"]) < 0.1, (name, which, n, v)
            growth = rows[name, which, 2048].values["peak_bytes"] / rows[name, which, 1024].values["peak_bytes"]
            assert growth > 3.5 if name == "standard" else 1.8 < growth < 2.2
    assert rows["flash4", "forward", 1024].note and not rows["flash4", "forward", 1024].values
    out = capsys.readouterr().out
    assert "less than standard" in out and "measured against predicted" in out
    assert (tmp_path / "memory-peak-training.png").stat().st_size > 2500

    monkeypatch.setattr(memory, "in_child", lambda *args: pytest.fail("measured twice"))
    assert main(given) == 0


def test_a_wrong_contender_and_one_too_large_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = memory.CONTENDERS["standard"]
    shifted = replace(right, make=lambda problem: lambda q, k, v: right.make(problem)(q * 1.5, k, v))
    monkeypatch.setitem(memory.CONTENDERS, "standard", shifted)
    memory._wrong.cache_clear()
    problem = Problem(num_positions=64, num_heads=2, head_dim=16)
    (row,) = memory._attention([shifted], problem, "forward")
    assert row.note.startswith("wrong: out off by") and not row.values
    monkeypatch.setitem(memory.CONTENDERS, "standard", right)
    memory._wrong.cache_clear()
    (row,) = memory._attention([right], replace(problem, num_positions=2**16), "forward")
    assert row.note == "not run: it would take 64.1 GiB, on a CPU at most 2"
    memory._wrong.cache_clear()


def test_what_fits_uses_nine_tenths_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FITS", {name: memory._FITS[name] for name in ("dense kernel", "DilatedAttention")})
    session = Session(device=CPU, full=False, dtypes=(torch.float32,), seconds=0.01, options=argparse.Namespace(limit=1.0))
    rows = {(row.name, row.case["GB"], row.case["pass"]): row.values for gib in (8, 80) for row in memory._fits(gib, session)}
    for (name, gib, which), v in rows.items():
        budget = USABLE * gib * 2**30
        # one position is 32 heads of 128 in bfloat16 of q, k, v and out, a few times that in training
        assert budget - 2**20 < v["predicted_bytes"] <= budget, (name, gib, which)
        assert 8 < rows[name, 80, which]["longest"] / rows[name, 8, which]["longest"] < 11
        assert "peak_bytes" not in v
    assert rows["DilatedAttention", 8, "forward"]["longest"] < 8 * 2**30 * USABLE / (4 * 32 * 128 * 2)


@pytest.mark.slow
def test_a_model_is_told_from_a_few_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "WORK", {name: model_memory.WORK[name] for name in ("training", "generating")})
    monkeypatch.setattr(model_memory, "ATTENTION", {"dense": model_memory.ATTENTION["dense"]})
    monkeypatch.setattr(
        memory, "_models_fit", lambda: [Row(name="dense", case={"part": "model fits", "GB": 8, "work": "training"}, values={"longest": 0})]
    )
    assert main(command(tmp_path, "--parts", "model", "--model-lengths", "512")) == 0
    rows = {row.case["work"]: row for row in Results.load(tmp_path / "memory.json").rows if row.case["part"] == "model"}
    embed, inner = model_memory.SMALL["embed_dim"], model_memory.SMALL["ffn_dim"]
    parameters = 4 * embed**2 + 3 * embed * inner
    for work, each in (("training", 16 * parameters), ("generating", 4 * parameters)):
        v = rows[work].values
        # weights, gradients and two moments of float32; and activations, or keys and values
        assert each < v["layer_bytes"] < 2 * each
        assert v["all_bytes"] == pytest.approx(v["few_bytes"] + 28 * v["layer_bytes"], rel=1e-3)
        assert abs(v["off"]) < 0.15
    assert (tmp_path / "memory-model-512-4.png").exists()


@pytest.mark.slow
def test_the_longest_of_a_model_is_0_where_its_weights_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "ATTENTION", {"dense": model_memory.ATTENTION["dense"]})
    monkeypatch.setattr(model_memory, "WORK", {name: model_memory.WORK[name] for name in ("training", "generating")})
    monkeypatch.setattr(memory, "SIZES_GIB", (8, 24, 141))
    rows = {(row.case["work"], row.case["GB"]): row.values["longest"] for row in memory._models_fit()}
    assert rows["generating", 8] == 0 < rows["generating", 24] < rows["generating", 141]
    assert rows["training", 24] == 0 < rows["training", 141] < rows["generating", 141]


@pytest.mark.slow
def test_a_gpus_result_is_drawn(tmp_path: Path) -> None:
    attention, fits, models = [], [], []
    for i, name in enumerate(memory.CONTENDERS):
        for which in memory.PASSES:
            for power in range(12, 21):
                case = {"part": "attention", "pass": which, "N": 2**power, "B": 1, "H": 16, "D": 128, "dtype": "bfloat16", "causal": True}
                values = {
                    "peak_bytes": 2**power * 16384 * (1 + i),
                    "bytes_per_token": 16384.0 * (1 + i),
                    "predicted_bytes": 2**power * 16000,
                    "off": 0.02,
                }
                too_long = name == "standard" and power > 15
                attention.append(Row(name=name, case=case, values={} if too_long else values, note="out of memory" if too_long else ""))
    for name in memory._FITS:
        for gib in memory.SIZES_GIB:
            for which in memory.PASSES:
                values = {"longest": gib * 30000, "predicted_bytes": gib * 2**30}
                values |= {"peak_bytes": gib * 2**30, "off": 0.01} if gib < 100 else {}
                note = "not tried: time, not memory" if gib > 100 else ""
                fits.append(Row(name=name, case={"part": "fits", "GB": gib, "pass": which}, values=values, note=note))
    for kind in model_memory.ATTENTION:
        for work in model_memory.WORK:
            values = {"few_bytes": 2e10, "layer_bytes": 3.5e9, "all_bytes": 1.2e11, "predicted_few_bytes": 2.1e10, "off": -0.05}
            values |= {"predicted_bytes": 1.25e11, "off_all": -0.04}
            models.append(Row(name=kind, case={"part": "model", "N": 4096, "work": work, "full": True}, values=values))
            for gib in memory.SIZES_GIB:
                models.append(Row(name=kind, case={"part": "model fits", "GB": gib, "work": work}, values={"longest": gib * 100}))
    results = Results("memory", machine(CPU), {}, {"a": attention, "f": fits, "m": models})
    written = write(memory.Memory(), results, tmp_path)
    pictures = [path.name for path in written if path.suffix == ".png"]
    assert pictures == [
        "memory-peak-forward.png",
        "memory-peak-training.png",
        "memory-fits-forward.png",
        "memory-fits-training.png",
        "memory-model-4096-4.png",
        "memory-model-4096-32.png",
    ]
    # of dense kernels, which all have about the same, one is drawn
    (plot, *_) = memory.Memory().plots(results)
    assert [line.label for line in plot.lines][:2] == ["standard", "torch sdpa (least of 10 dense kernels)"] and len(plot.lines) == 8
    text = (tmp_path / "memory.md").read_text()
    assert "16 of 20 were run under that memory limit" in text
    assert "[1] out of memory" in text and "| dense, training, checkpointed |" in text


def test_kernels_that_copy_their_results_are_not_held_to_a_plan() -> None:
    """Which is of the backend that is chosen, and writes where it is told."""
    problem = Problem(num_positions=4096, num_heads=4, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda"))
    copies = {name for name, contender in memory.CONTENDERS.items() if memory._copies(contender, problem)}
    assert {"sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"} <= copies
    assert not {"standard", "torch sdpa", "flash3", "flash4", "DilatedAttention", "BlockSparseAttention window"} & copies
    assert not any(memory._copies(contender, replace(problem, device=torch.device("cpu"))) for contender in memory.CONTENDERS.values())
