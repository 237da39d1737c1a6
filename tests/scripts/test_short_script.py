"""benchmarks/short.py without a GPU: its smoke run, what it refuses, and the float64 results that decide who gets a time."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.engine.reference import reference_attention
from dilated_attention.testing.oracle import keep_mask

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PATTERN = DilatedPattern((7, 16, 40), (1, 3, 4))
BLOCKED = DilatedPattern((7, 16, 40), (1, 3, 4), "blocked", tail="zero_keys")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "detached": {"pattern": BLOCKED, "mixture_grad": "detached"},
    "detached causal": {"pattern": BLOCKED, "mixture_grad": "detached", "is_causal": True},
    "zero keys": {"pattern": BLOCKED},
    "batch": {"batch": 2},
    "suffix": {"padding": ("suffix", 0.3), "batch": 2},
    "random": {"padding": ("random", 0.3), "pattern": None},
    "dropout": {"dropout_p": 0.2, "batch": 2},
    "documents": {"bounds": (0, 11, 12, 37), "pattern": BLOCKED},
    "dense documents": {"bounds": (0, 11, 37), "pattern": None, "is_causal": True},
    "window": {"window": (5, 0), "pattern": None, "is_causal": True},
    "both sides": {"window": (5, 2), "pattern": None},
    "rectangle": {"queries": 9, "is_causal": True},
    "grouped": {"kv_heads": 2, "is_causal": True},
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("short")


def problem_of(options: dict[str, Any]) -> Any:
    problem = importlib.import_module("_short_problem")
    options = {"pattern": PATTERN} | options
    pattern = options.pop("pattern") or problem.DENSE
    return problem.Problem(37, 6, 4, pattern, dtype=torch.float64, **options)


def true_results(data: Any, seed: int) -> list[torch.Tensor]:
    """out, dq, dk, dv by the definition."""
    problem, truth = data.problem, importlib.import_module("_short_truth")
    keep = None
    if problem.dropout_p:
        torch.manual_seed(truth.SEED)
        number = int(torch.randint(2**62, (), dtype=torch.int64))
        keys = torch.arange(problem.length).repeat(problem.batch, 1)
        dropout = truth.Dropout(problem.dropout_p, number, torch.arange(problem.batch), torch.arange(problem.heads), keys, keys)
        keep = keep_mask(dropout, slice(None))
    out, _ = reference_attention(
        *data.leaves,
        problem.pattern,
        is_causal=problem.is_causal,
        query_offset=problem.offset,
        window=problem.window,
        cu_seqlens=data.arguments.get("cu_seqlens"),
        key_padding_mask=data.padding,
        mixture_grad=problem.mixture_grad,
        keep=keep,
        dropout_p=problem.dropout_p,
    )
    return [out, *torch.autograd.grad(out, data.leaves, data.dout)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_its_truth_is_the_definition_whole_and_sampled(short: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool) -> None:
    truth = importlib.import_module("_short_truth")
    monkeypatch.setitem(truth.WHOLE, "cpu", 1000 if whole else 0)
    data = importlib.import_module("_short_problem").Data(problem_of(OPTIONS[name]), "cpu")
    out, *grads = true_results(data, truth.SEED)
    found = truth.Truth(data)
    errors = found.errors(out, tuple(grads))
    assert set(errors) == {"out", "dq", "dk", "dv"}
    assert found.wrong(errors) == []
    assert found.note == ""
    # each result is looked at, in either way
    for i, which in enumerate(errors):
        spoilt = [x.clone() for x in (out, *grads)]
        spoilt[i] *= 1.001
        errors = found.errors(spoilt[0], tuple(spoilt[1:]))
        assert found.wrong(errors) == [which]
        assert errors[which] == pytest.approx(0.001, rel=1e-3)


def test_rows_after_the_first_that_is_another_functions_do_not_count(short: ModuleType) -> None:
    truth = importlib.import_module("_short_truth")
    data = importlib.import_module("_short_problem").Data(problem_of({}), "cpu")
    out, *grads = true_results(data, truth.SEED)
    out = out.detach().clone()
    out[:, 20:] = math.nan
    found = truth.Truth(data)
    assert found.wrong(found.errors(out, tuple(grads))) == ["out"]
    errors = found.errors(out, tuple(grads), until=20)
    assert set(errors) == {"out", "dq"}
    assert found.wrong(errors) == []


@pytest.mark.parametrize(("left", "right", "is_causal"), [(5, 0, True), (5, 2, False), (None, 1, False)])
def test_pairs_of_a_window_are_counted(short: ModuleType, left: int | None, right: int, is_causal: bool) -> None:
    problem = replace(problem_of({"pattern": None}), window=(left, right), is_causal=is_causal, batch=2)
    expected = sum(1 for i in range(37) for j in range(37) if j >= i - (37 if left is None else left) and j <= i + right)
    assert problem.pairs == 2 * 6 * expected


def test_a_smoke_run_has_a_line_a_contender_and_a_row_a_case(short: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["module-512-x2", "gigapath-5308", "option-dropout", "option-documents", "option-float32", "option-query*"]
    path = tmp_path / "lines.jsonl"
    # the profiler takes longer than all the calls, so it looks at one case
    rows = []
    for more in (["--cases", cases[0]], ["--without-kernels", "--cases", *cases[1:]]):
        short.main(["--device", "cpu", "--seconds", "0.001", "--backends", "flash4", "--save", str(path), *more])
        out = capsys.readouterr().out
        assert "backend='flash4' cannot compute" in out
        rows += [line.split(" | ")[0] for line in out.splitlines() if line.startswith(("| gigapath", "| module", "| option"))]
    records = [json.loads(row) for row in path.read_text().splitlines()]
    cannot = {record["contender"] for record in records if "cannot" in record}
    assert {name for name in cannot if "flash4" not in name} == {"sdpa_cudnn", "sdpa_efficient", "fa4"}
    for record in records:
        assert "wrong" not in record
        if "cannot" not in record:
            assert set(record["errors"]) == {"out", "dq", "dk", "dv"}
            assert all(record[which][key] > 0 for which in ("forward", "both") for key in ("called", "single", "host", "tflops"))
    names = list(dict.fromkeys(record["case"] for record in records))
    assert len(names) == 6
    assert rows == [f"| {name}" for name in names]


def test_what_is_wrong_has_no_time(short: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = importlib.import_module("_short_cases")

    def half(data: Any) -> Any:
        return lambda q, k, v: data.call(q, k, v) / 2

    monkeypatch.setattr(cases, "_flash4", half)
    short.main(["--device", "cpu", "--seconds", "0.001", "--without-kernels", "--cases", "dense-4096"])
    lines = capsys.readouterr().out.splitlines()
    (row,) = (row for row in lines if row.startswith("dense-4096 ") and " fa4 " in row)
    assert "wrong: out 5.0e-01" in row
    assert "ms" not in row
    assert "fa4 wrong" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cases", "gigapath"], "there is no case 'gigapath'; expected FAMILY-LENGTH"),
        (["--cases", "apex-512"], "FAMILY one of longnet"),
        (["--torchscale", "no/such/folder"], "there is no torchscale/component/dilated_attention.py"),
    ],
)
def test_wrong_arguments_exit_with_2(short: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        short.main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_names_say_length_mask_and_batch(short: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cases = importlib.import_module("_short_cases")
    assert cases.parse("longnet-4096") == ("longnet", 4096, False, 1)
    assert cases.parse("longnet128-8192-full-x8") == ("longnet128", 8192, True, 8)
    assert cases.parse("gigapath-5308") == ("gigapath", 5308, True, 1)
    assert cases.parse("option-padding-suffix") == ("option-padding-suffix", 32768, False, 1)
    assert cases.parse("option-dropout-512") == ("option-dropout", 512, False, 1)
    short.main(["--list", "--million"])
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(cases.NAMES) + 3
    # dense attention is left out where it has too many pairs
    assert listed[3] == "gigapath-200000: ours, equal"
