"""Suite ``accuracy``: errors next to plain PyTorch's, and what is wrong, drifts or depends is reported."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.accuracy import repeatability
from dilated_attention.bench.accuracy.repeatability import KINDS, invariances, repeats
from dilated_attention.bench.accuracy.tiny_loss import losses
from dilated_attention.bench.accuracy.truth import RESULTS
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import accuracy
from dilated_attention.bench.suites.accuracy import PLAIN, Accuracy, errors
from dilated_attention.bench.workloads import contenders
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_keep_their_bounds_and_a_wrong_one_is_seen(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(num_positions=96, num_heads=4, head_dim=16, dtype=dtype)
    rows = {row.name: row for row in errors(kind, problem, ["auto", PLAIN, "flash4"])}
    assert rows["flash4"].note.startswith("runs on cuda")
    for name in ("auto", PLAIN):
        assert set(rows[name].values) == set(RESULTS) and not rows[name].note
    right = contenders.our_call

    def off(*args: Any, **options: Any) -> Any:
        out = right(*args, **options)
        return out * 1.05 if options.get("backend") == PLAIN else out

    monkeypatch.setattr(contenders, "our_call", off)
    rows = {row.name: row for row in errors(kind, problem, ["auto", PLAIN])}
    assert rows[PLAIN].note.startswith("wrong: out off by") and rows[PLAIN].values["out"] > 0.04 > rows["auto"].values["out"]
    table = Accuracy().tables(Results("accuracy", {}, {}, {"g": list(rows.values())}))[0]
    # more than one: nearer to float64 than plain softmax
    cells = {row[0]: row[1].split("(")[1].replace(",", "").split(" ")[0] for row in table.rows}
    assert {name: float(cell) > 1 for name, cell in cells.items()} == {"auto": True, PLAIN: False}


def test_eight_bits_are_compared_where_they_exist() -> None:
    rows = errors("dense", Problem(num_positions=64, num_heads=2, head_dim=32, dtype=torch.bfloat16), None)
    assert rows[-1].name == "flash3_fp8" or any(row.name == "flash3_fp8" and row.note.startswith("runs on cuda") for row in rows)
    assert {row.name for row in rows if row.values} >= {"auto", PLAIN}


def test_runs_that_differ_and_changes_that_matter_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(num_positions=64, num_heads=4, head_dim=16, batch_size=2)
    chosen = ["auto", "math"]
    assert all(row.values["dk_equal_runs"] == row.values["runs"] == 4 for row in repeats("dilated", problem, 4, chosen=chosen))
    assert all(row.values["equal"] == 1 for kind in KINDS for row in invariances(kind, problem, chosen=chosen))
    right = contenders.our_call
    runs = itertools.count(1)

    def drifting(problem: Problem, pattern: Any, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        out = right(problem, pattern, *qkv, **options)
        # atomics that add in another order each time; and what looks at its neighbours
        return out * (1 + 5e-7 * (next(runs) % 16) * (not options.get("deterministic"))) + 1e-3 * qkv[2].mean()

    monkeypatch.setattr(contenders, "our_call", drifting)
    rows = repeats("dense", problem, 4, chosen=chosen)
    for row in rows:
        assert (row.values["out_equal_runs"] == 4) == row.case["deterministic"]
        assert (0 < row.values["dq_spread"] < 1e-5) == (not row.case["deterministic"])
    changed = {row.case["change"]: row.values for row in invariances("dense", problem, chosen=chosen) if row.name == "auto"}
    assert changed["a sequence alone or in a batch"]["equal"] == 0 < changed["a sequence alone or in a batch"]["difference"]
    table = Accuracy().tables(Results("accuracy", {}, {}, {"g": rows}))[0]
    assert table.columns[1:3] == ["out", "dq"] and table.title.startswith("of 4 runs, equal to the first")
    assert (table.rows[0][1], table.rows[0][table.columns.index("out, deterministic")]) == ("1", "4")


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


@pytest.mark.slow
def test_the_suite_measures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "accuracy", "--output", str(tmp_path), "--lengths", "32", "64", "--head-dim", "16", "--steps", "1", "--quiet"]
    command += ["--dtypes", "bfloat16", "--masks", "full", "--backends", "auto", "math", "--no-plots"]
    assert main([*command, "--parts", "error"]) == 0
    first = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    assert len(first) == 2 * 2
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().out
    second = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    assert {label: second[label] for label in first} == first and len(second) == 4 + 1 + 2 + 2
    for text in ("relative error of dk against float64, dilated, bfloat16", "loss by dtype, 256 tokens", "of 20 runs", "order of heads"):
        assert text in printed
    rows = [row for group in second.values() for row in group]
    assert {row["name"] for row in rows if row["case"]["part"] != "loss"} == {"auto", "math"}


def test_a_gpus_file_becomes_tables_and_plots(tmp_path: Path) -> None:
    rows: list[Row] = []
    for i, name in enumerate((PLAIN, "auto", "flash4", "xformers")):
        for n in (256, 1024, 65536):
            for kind in KINDS:
                case: dict[str, Any] = {
                    "N": n,
                    "B": 1,
                    "H": 4,
                    "D": 64,
                    "dtype": "bfloat16",
                    "causal": False,
                    "part": "error",
                    "kind": kind,
                }
                if name != PLAIN or n <= accuracy._MOST_PLAIN_POSITIONS:
                    off = dict.fromkeys(RESULTS, 3e-3 * (1 + 0.1 * i) * (n / 256) ** 0.1)
                    rows.append(Row(name=name, case=case, values=off, errors=off))
    for step in range(30):
        for dtype, apart in (("float32", 0.0), ("bfloat16", 1e-3), ("fp8", -1e-2)):
            values = {"loss": 6 - 0.1 * step, "difference": apart * (1 + step)}
            rows.append(Row(name=dtype, case={"part": "loss", "dtype": dtype, "N": 4096, "step": step}, values=values))
    hardware = {"device": "NVIDIA H200", "devices": 1, "capability": "9.0"}
    machine = {"date": "2026-01-01", "hardware": hardware, "versions": {"torch": "2.11"}}
    suite, results = Accuracy(), Results("accuracy", machine, {"size": "full"}, {"all": rows})
    tables = {table.title: table for table in suite.tables(results)}
    table = tables["relative error of dk against float64, dense, bfloat16, full"]
    assert {row[0]: row[-1] for row in table.rows}[PLAIN] == "–" and table.rows[2][1] == "0.0036 (0.833 ×)"
    loss = {row[0]: row for row in tables["loss by dtype, 4,096 tokens"].rows}
    assert loss["fp8"][-1] == "0.3" and loss["float32"][1] == "6.00000"
    names = {path.stem.removeprefix("accuracy-") for path in write(suite, results, tmp_path) if path.suffix == ".png"}
    assert names == {"loss", *(f"growth-{kind}-bfloat16-full-{key}" for kind in KINDS for key in ("out", "dk"))}


def test_every_backend_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeatability.backends()[0] == "auto" and "flash3_fp8" not in repeatability.backends() and PLAIN in repeatability.backends()
    assert repeatability.backends(["math"]) == ["math"]
