"""bench bandwidth: ceilings, what each pass must move and compute, and the kernels that only move memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import bandwidth
from dilated_attention.bench.suites import bandwidth_kernels as kernels
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
    roof = bandwidth.Roof.of(results)
    assert 0.1 < roof.copy < 1000 and 1e-4 < roof.product("float32") < 100
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
    merged = next(row for row in results.rows if row.name == "merge of two")
    assert merged.values["gb_s"] == pytest.approx(merged.values["least_bytes"] / merged.values["ms"] / 1e6, rel=1e-3)
    assert merged.values["gb_s"] < 3 * roof.copy and merged.errors["out"] < 1e-5
    assert [row.note[:15] for row in results.rows if row.name == "sum of layers"] == ["a Triton kernel"]
    out = capsys.readouterr().out
    assert "share of roof" in out and "of a copy" in out
    assert (tmp_path / "bandwidth-roofline-both.png").stat().st_size > 2500

    monkeypatch.setattr(bandwidth, "measure", lambda *args, **options: pytest.fail("measured twice"))
    assert main(command) == 0


def test_the_roof_is_the_lower_of_both_ceilings() -> None:
    rows = [
        Row(name="copy", case={"dtype": "bytes"}, values={"gb_s": 4000.0}),
        Row(name="matrix product", case={"dtype": "bfloat16"}, values={"tflops": 800.0}),
    ]
    roof = bandwidth.Roof(rows)
    assert roof.at(100.0, "bfloat16") == pytest.approx(400.0)
    assert roof.at(1000.0, "bfloat16") == 800.0
    assert roof.at(1000.0, "float64") == 0.0


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "_need_triton", lambda device, dtype: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is compiled here; the suite itself checks its kernels")
@pytest.mark.parametrize("name", [kernel.name for kernel in kernels.KERNELS])
def test_every_kernel_is_right_before_it_is_timed(name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # a hundredth of the positions and rows that are timed
    buffers = kernels._buffers
    monkeypatch.setattr(kernels, "_buffers", lambda n, heads, *rest: buffers(min(n, 256), min(heads, 2), *rest))
    monkeypatch.setattr(kernels, "_NORM_ELEMENTS", {False: 2**16, True: 2**28})
    kernel = next(kernel for kernel in kernels.KERNELS if kernel.name == name)
    call, moved, errors = kernel.prepare(CPU, torch.float32, False)
    assert errors and max(errors.values()) < 1e-5
    assert kernels.wrong(errors, torch.float32) == ""
    assert moved > 2**16
    call()


def test_a_wrong_kernel_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from dilated_attention.bench.suite import Session

    def wrong(device: torch.device, dtype: torch.dtype, full: bool) -> kernels.Prepared:
        return lambda: None, 1000, {"out": 0.5}

    monkeypatch.setattr(kernels, "KERNELS", (kernels.Kernel("lazy", wrong),))
    session = Session(device=CPU, full=False, dtypes=(torch.float32,), seconds=0.01, options=None)  # type: ignore[arg-type]
    (row,) = bandwidth._kernels(session)
    assert row.note.startswith("wrong: out off by") and not row.values


@pytest.mark.slow
def test_a_gpus_result_is_drawn(tmp_path: Path) -> None:
    bf16 = {"part": "ceilings", "dtype": "bfloat16"}
    rows = [
        Row(name="copy", case=bf16 | {"dtype": "bytes"}, values={"ms": 0.5, "gb_s": 4100.0, "datasheet": 4800.0}),
        Row(name="matrix product", case=bf16, values={"ms": 1.0, "tflops": 760.0, "datasheet": 989.0}),
    ]
    attention = []
    for n, tflops in ((16384, 500.0), (256, 90.0)):
        problem = Problem(num_positions=n, num_heads=16, head_dim=128, dtype=torch.bfloat16)
        for i, name in enumerate(bandwidth.CONTENDERS):
            for which in bandwidth.PASSES:
                row = Row(
                    name=name, case=problem.case | {"part": "attention", "pass": which}, values={"ms": 1.0, "tflops": tflops - 20 * i / 3}
                )
                pairs = STANDARD.pairs(problem)
                attention.append(bandwidth._placed(row, problem, pairs // (i // 5 + 1) if pairs else pairs))
    moving = [
        Row(name=kernel.name, case={"part": "kernels"}, values={"ms": 1.0, "least_bytes": 10**9, "gb_s": 3000.0})
        for kernel in kernels.KERNELS
    ]
    results = Results("bandwidth", machine(CPU), {}, {"ceilings": rows, "attention a": attention, "kernels": moving})
    written = write(bandwidth.Bandwidth(), results, tmp_path)
    assert [path.name for path in written if path.suffix == ".png"] == [
        "bandwidth-roofline-forward.png",
        "bandwidth-roofline-backward.png",
        "bandwidth-roofline-both.png",
        "bandwidth-kernels.png",
    ]
    text = (tmp_path / "bandwidth.md").read_text()
    assert "(reached 77%)" in text and "| layer norm, backward |" in text
