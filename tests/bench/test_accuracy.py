"""Suite ``accuracy``: errors next to plain PyTorch's, and what is wrong is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.bench.accuracy import RESULTS
from dilated_attention.bench.suites import accuracy
from dilated_attention.bench.suites.accuracy import KINDS, PLAIN, Accuracy, backends, errors
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
    cells = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert float(cells["auto"]["×"].replace(",", "")) > 1 == float(cells[PLAIN]["×"])


def test_eight_bits_are_compared_where_they_exist() -> None:
    rows = errors("dense", Problem(num_positions=64, num_heads=2, head_dim=32, dtype=torch.bfloat16), None)
    assert rows[-1].name == "flash3_fp8" or any(row.name == "flash3_fp8" and row.note.startswith("runs on cuda") for row in rows)
    assert {row.name for row in rows if row.values} >= {"auto", PLAIN}


@pytest.mark.slow
def test_the_suite_measures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "accuracy", "--output", str(tmp_path), "--lengths", "32", "64", "--head-dim", "16", "--quiet"]
    command += ["--dtypes", "bfloat16", "--masks", "full", "--backends", "auto", "math"]
    assert main([*command, "--kinds", "dense"]) == 0
    first = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    assert len(first) == 2
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().out
    second = json.loads((tmp_path / "accuracy.json").read_text())["groups"]
    assert {label: second[label] for label in first} == first and len(second) == 4
    assert "relative errors against float64, dilated, bfloat16" in printed
    rows = [row for group in second.values() for row in group]
    assert {row["name"] for row in rows} == {"auto", "math"}


def test_a_gpus_file_becomes_tables() -> None:
    rows: list[Row] = []
    for i, name in enumerate((PLAIN, "auto", "flash4", "xformers")):
        for n in (256, 1024, 65536):
            for kind in KINDS:
                case: dict[str, Any] = {"N": n, "B": 1, "dtype": "bfloat16", "causal": False, "kind": kind}
                if name != PLAIN or n <= accuracy._MOST_PLAIN_POSITIONS:
                    off = dict.fromkeys(RESULTS, 3e-3 * (1 + 0.1 * i) * (n / 256) ** 0.1)
                    rows.append(Row(name=name, case=case, values=off, errors=off))
    hardware = {"device": "NVIDIA H200", "devices": 1, "capability": "9.0"}
    machine = {"date": "2026-01-01", "hardware": hardware, "versions": {"torch": "2.11"}}
    suite, results = Accuracy(), Results("accuracy", machine, {"size": "full"}, {"all": rows})
    tables = {table.title: table for table in suite.tables(results)}
    table = tables["relative errors against float64, dense, bfloat16, causal=False"]
    assert table.columns == ("", "positions", "out", "dq", "dk", "dv", "×", "")
    lines = {(row[0], row[1]): list(row[2:]) for row in table.rows}
    assert lines["flash4", "256"] == [*["0.0036"] * 4, "0.833", ""] and lines["flash4", "65,536"][4] == "–"


def test_every_backend_is_asked() -> None:
    assert backends()[0] == "auto" and "flash3_fp8" not in backends() and PLAIN in backends()
    assert backends(["math"]) == ["math"]
