"""Suite ``accuracy``: the truth is the definition's, the yardstick plain PyTorch's, and what is wrong, drifts or depends is told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.accuracy import repeatability
from dilated_attention.bench.accuracy.dense_float64 import RESULTS, softmax_attention
from dilated_attention.bench.accuracy.repeatability import KINDS, PLAIN, Call, errors, errors_in_8_bits, invariances, relative, repeats
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites.accuracy import Accuracy
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.tiny_loss import losses
from dilated_attention.cli import main
from dilated_attention.engine.reference import reference_attention
from dilated_attention.pattern import DilatedPattern

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "pattern", [DilatedPattern((20, 70), (2, 3)), DilatedPattern((48,), (4,), "zero"), DilatedPattern((50,), (1,), "zero")]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_truth_is_the_definition(pattern: DilatedPattern, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # a few rows at a time, so that parts are joined
    monkeypatch.setattr("dilated_attention.bench.accuracy.dense_float64._PLACES", 50 * 7)
    problem = Problem(num_positions=50, num_heads=3, head_dim=8, batch_size=2, dtype=torch.float64)
    leaves, dout = problem.qkv(), problem.draw(3, 500)
    found = softmax_attention(pattern, *(x.detach() for x in leaves), dout, is_causal=is_causal, dtype=torch.float64)
    out, lse = reference_attention(*leaves, pattern, is_causal=is_causal)
    true = dict(zip(RESULTS, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))
    assert all(relative(found[name], true[name]) < 1e-12 for name in RESULTS)


def test_the_yardstick_rounds_as_plain_torch_does() -> None:
    problem = Problem(num_positions=128, num_heads=2, head_dim=32, dtype=torch.bfloat16)
    leaves, dout = problem.qkv(), problem.draw(2, 500)
    values = [x.detach() for x in leaves]
    pattern = KINDS["dense"](problem)
    truth = softmax_attention(pattern, *values, dout, is_causal=False, dtype=torch.float64, rounds_out=torch.bfloat16)
    mine = softmax_attention(pattern, *values, dout, is_causal=False, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = ((q @ k.transpose(-1, -2) * 32**-0.5).softmax(-1) @ v).transpose(1, 2)
    theirs = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))
    for name, x in theirs.items():
        assert mine[name].dtype is torch.bfloat16
        assert relative(mine[name], truth[name]) == pytest.approx(relative(x, truth[name]), rel=0.3)
    assert 0 < float(truth["dq of rounding"].abs().max()) < 0.1 * float(truth["dq"].abs().max())


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_keep_their_bounds_and_a_wrong_one_is_seen(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(num_positions=96, num_heads=4, head_dim=16, dtype=dtype)
    monkeypatch.setattr(repeatability, "backends", lambda chosen: ["auto", "math", "flash4"])
    rows = {row.name: row for row in errors(kind, problem, {})}
    assert set(rows) == {PLAIN, "auto", "math", "flash4"} and rows["flash4"].note.startswith("runs on cuda")
    for name in ("auto", "math"):
        assert set(rows[name].errors) == set(RESULTS)
        assert all(0 <= rows[name].values[f"{key}_share"] <= 1 for key in RESULTS)
    right = Call.__call__

    def off(self: Call, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(self, *qkv)
        return out * (1.05 if self.backend == "math" else 1.0), lse

    monkeypatch.setattr(Call, "__call__", off)
    rows = {row.name: row for row in errors(kind, problem, {})}
    assert rows["math"].values["out_share"] > 1 >= rows["auto"].values["out_share"]
    results = Results("accuracy", {}, {}, {"g": list(rows.values())})
    table = Accuracy().tables(results)[0]
    assert {row[0]: row[-1].endswith("!") for row in table.rows} == {PLAIN: False, "auto": False, "math": True}


def test_eight_bits_err_by_their_own_measure() -> None:
    problem = Problem(num_positions=128, num_heads=4, head_dim=32, dtype=torch.bfloat16)
    plain, fp8 = errors_in_8_bits("dense", problem, {})
    # three bits of mantissa: half of 2^-3 at most, less on average
    assert 0.01 < plain.errors["out"] < 0.0625 and set(plain.errors) == {"out", "lse"}
    assert fp8.name == "flash3_fp8" and fp8.note.startswith("runs on cuda") and plain.case["dtype"] == "fp8"


def test_runs_that_differ_and_changes_that_matter_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(num_positions=64, num_heads=4, head_dim=16, batch_size=2)
    monkeypatch.setattr(repeatability, "backends", lambda chosen: ["auto", "math"])
    assert all(row.values["dk_equal_runs"] == row.values["runs"] == 4 for row in repeats("dilated", problem, 4, {}))
    assert all(row.values["equal"] == 1 for kind in KINDS for row in invariances(kind, problem, {}))
    right = Call.__call__
    runs = itertools.count(1)

    def drifting(self: Call, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(self, *qkv)
        # atomics that add in another order each time; and what looks at its neighbours
        return out * (1 + 5e-7 * (next(runs) % 16) * (not self.deterministic)) + 1e-3 * qkv[2].mean(), lse

    monkeypatch.setattr(Call, "__call__", drifting)
    rows = repeats("dense", problem, 4, {})
    for row in rows:
        assert (row.values["out_equal_runs"] == 4) == row.case["deterministic"]
        assert (0 < row.values["dq_spread"] < 1e-5) == (not row.case["deterministic"])
    changed = {row.case["change"]: row.values for row in invariances("dense", problem, {}) if row.name == "auto"}
    assert changed["a sequence alone or in a batch"]["equal"] == 0 < changed["a sequence alone or in a batch"]["difference"]
    tables = {table.title.split(",")[0]: table for table in Accuracy().tables(Results("accuracy", {}, {}, {"g": rows}))}
    assert (
        tables["4 runs of the same inputs"].rows[0][1].startswith("1 of 4, ") and tables["4 runs of the same inputs"].rows[0][5] == "equal"
    )


@pytest.mark.slow
def test_losses_of_dtypes_begin_alike_and_fall() -> None:
    rows = losses(64, 4, CPU, {})
    by_dtype = {
        name: [row.values["loss"] for row in rows if row.name == name and row.values] for name in ("float32", "float64", "bfloat16")
    }
    assert by_dtype["float32"][-1] < by_dtype["float32"][0] - 0.5
    assert by_dtype["float64"] == pytest.approx(by_dtype["float32"], abs=1e-4) and by_dtype["float64"] != by_dtype["float32"]
    assert 1e-6 < abs(by_dtype["bfloat16"][0] - by_dtype["float32"][0]) < 0.02
    (fp8,) = [row for row in rows if row.name == "fp8"]
    assert "precision" in fp8.note


def test_backends_can_be_chosen(tmp_path: Path) -> None:
    given = ["--lengths", "32", "--head-dim", "16", "--kinds", "dense", "--masks", "full", "--dtypes", "bfloat16", "--backends", "math"]
    command = ["bench", "accuracy", "--output", str(tmp_path), *given, "--parts", "error", "repeat", "invariance", "--quiet", "--no-plots"]
    assert main(command) == 0
    groups = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    rows = [row for rows in groups.values() for row in rows]
    names = {part: {row["name"] for row in rows if row["case"]["part"] == part} for part in ("repeat", "invariance")}
    assert names == {"repeat": {"math"}, "invariance": {"math"}}
    # beside what is measured apart, in 8 bits
    assert {row["name"] for row in rows if row["case"]["part"] == "error" and row["case"]["dtype"] == "bfloat16"} == {PLAIN, "math"}


@pytest.mark.slow
def test_the_suite_measures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "accuracy",
        "--output",
        str(tmp_path),
        "--lengths",
        "32",
        "64",
        "--head-dim",
        "16",
        "--steps",
        "1",
        "--quiet",
        "--no-plots",
    ]
    command += ["--dtypes", "bfloat16", "--masks", "full"]
    assert main([*command, "--parts", "error"]) == 0
    first = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    assert len(first) == 2 * 2 * 2
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().out
    second = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    assert {label: second[label] for label in first} == first and len(second) == 8 + 1 + 2 + 2
    for text in (
        "relative error at 64 positions, dilated, bfloat16",
        "loss by dtype, 256 tokens",
        "20 runs of the same inputs",
        "order of heads",
    ):
        assert text in printed
    rows = [row for group in second.values() for row in group]
    assert all(value <= 1 for row in rows for key, value in row.get("values", {}).items() if key.endswith("_share"))


def gpu_results() -> Results:
    rows: list[Row] = []
    names = (PLAIN, "auto", "flash4", "flash3", "flash2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "xformers", "math")
    for i, name in enumerate(names):
        for n in (256, 1024, 4096, 16384, 65536):
            for kind in KINDS:
                for dtype, eps in (("float32", 1e-7), ("float16", 4e-4), ("bfloat16", 3e-3)):
                    case: dict[str, Any] = {"N": n, "B": 1, "H": 4, "D": 64, "dtype": dtype, "causal": False, "part": "error", "kind": kind}
                    if name == "math" and n > 16384:
                        rows.append(Row(name=name, case=case, note="materialises scores: measured to 16,384 positions"))
                        continue
                    off = dict.fromkeys(RESULTS, eps * (1 + 0.1 * i) * (n / 256) ** 0.1)
                    rows.append(Row(name=name, case=case, values={"out_max": 1e-3, "out_share": 0.5 + 0.1 * i}, errors=off))
    for kind in KINDS:
        for n in (256, 65536):
            case = {"N": n, "B": 1, "H": 4, "D": 64, "dtype": "fp8", "causal": False, "part": "error", "kind": kind}
            rows.append(Row(name="flash3_fp8", case=case, values={"out_max": 0.1}, errors={"out": 0.05, "lse": 0.01}))
    for step in range(30):
        for dtype, off in (("float32", 0.0), ("bfloat16", 1e-3), ("fp8", -1e-2)):
            values = {"loss": 6 - 0.1 * step, "difference": off * (1 + step)}
            rows.append(Row(name=dtype, case={"part": "loss", "dtype": dtype, "N": 4096, "step": step}, values=values))
    machine = {
        "date": "2026-01-01",
        "hardware": {"device": "NVIDIA H200", "devices": 1, "capability": "9.0"},
        "versions": {"torch": "2.11"},
    }
    return Results("accuracy", machine, {"size": "full"}, {"all": rows})


@pytest.mark.slow
def test_a_gpus_file_becomes_tables_and_plots(tmp_path: Path) -> None:
    suite, results = Accuracy(), gpu_results()
    tables = {table.title: table for table in suite.tables(results)}
    longest = tables["relative error at 65,536 positions, dense, bfloat16"]
    assert {row[0] for row in longest.rows} == {
        row.name for row in results.rows if row.case.get("dtype") == "bfloat16" and row.case["part"] == "error"
    } - {"math"}
    assert {row[0]: row[-1] for row in longest.rows}["xformers"] == "1.4 !"
    assert "[1] materialises scores" in tables["relative error of out by positions, dense, bfloat16"].caption
    assert [row[-1] for row in tables["relative error at 65,536 positions, dilated, fp8"].rows] == ["–"]
    loss = {row[0]: row for row in tables["loss by dtype, 4,096 tokens"].rows}
    assert loss["fp8"][-1] == "0.3" and loss["float32"][1] == "6.00000"
    names = {path.stem.removeprefix("accuracy-") for path in write(suite, results, tmp_path) if path.suffix == ".png"}
    kinds = [
        f"{plot}-{kind}{what}" for kind in KINDS for plot, what in (("growth", "-out"), ("growth", "-dk"), ("dtypes", ""), ("backends", ""))
    ]
    assert names == {"loss", *kinds}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "options",
    [
        # each backend, dtype and mask is compiled anew: few of them
        ["speed", "--lengths", "512", "1k", "--masks", "causal", "--parts", "length"],
        ["implementations", "--lengths", "1k"],
        [
            "accuracy",
            "--backends",
            "auto",
            "sdpa_cudnn",
            "triton",
            "math",
            "--masks",
            "causal",
            "--lengths",
            "64",
            "256",
            "--parts",
            "error",
        ],
        ["accuracy", "--backends", "auto", "sdpa_cudnn", "--kinds", "dilated", "--steps", "2", "--parts", "loss", "repeat", "invariance"],
    ],
    ids=lambda options: f"{options[0]}, {options[-1]}",
)
def test_suites_run_on_a_gpu(options: list[str], tmp_path: Path) -> None:
    suite = options[0]
    assert main(["bench", *options, "--output", str(tmp_path), "--size", "small", "--seconds", "0.01", "--quiet", "--no-plots"]) == 0
    rows = [Row.from_dict(row) for group in json.loads((tmp_path / f"{suite}.json").read_text())["groups"].values() for row in group]
    assert not [row for row in rows if row.note.startswith(("wrong", "raised"))]
    assert sum(bool(row.values) for row in rows) > 8
