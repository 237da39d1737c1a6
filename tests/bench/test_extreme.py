"""bench extreme: the longest sequence that fits, each length under a limit of memory, rows checked against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilated_attention import dilated_attention
from dilated_attention.bench import Results, Row
from dilated_attention.bench.accuracy import sampled_errors
from dilated_attention.bench.measure.limits import counted
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import extreme
from dilated_attention.bench.workloads import contenders
from dilated_attention.bench.workloads.contenders import dense_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main
from dilated_attention.functional import attention, block_sparse_attention
from dilated_attention.pattern import DilatedPattern, LocalWindow

MIB = 2**20


def test_a_peak_is_that_of_a_tensor_that_is_gone_at_the_end() -> None:
    torch.ones(MIB // 4 * 64)
    with counted(torch.device("cpu")) as peak:
        x = torch.ones(MIB // 4 * 16)
        del x
        torch.ones(MIB // 4 * 8)
    assert peak.bytes == 16 * MIB
    # an error ends the count, and the next begins anew
    with pytest.raises(KeyError), counted(torch.device("cpu")):
        raise KeyError
    with counted(torch.device("cpu")) as peak:
        pass
    assert peak.bytes == 0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["dilated", "window"])
def test_sampled_errors_find_a_wrong_row_of_each_result(kind: str, is_causal: bool) -> None:
    problem = Problem(num_positions=200, num_heads=2, head_dim=16, is_causal=is_causal)
    pattern = DilatedPattern((32, 256), (1, 2)) if kind == "dilated" else LocalWindow(40, block_size=64)
    leaves, dout = problem.qkv(), problem.draw(2, 9)
    if isinstance(pattern, DilatedPattern):
        out, lse = dilated_attention(*leaves, pattern.segment_lengths, pattern.dilation_rates, is_causal=is_causal, return_lse=True)
    else:
        out, lse = block_sparse_attention(*leaves, pattern, is_causal=is_causal, return_lse=True)
    results = [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]
    names = ("out", "lse", "dq", "dk", "dv")
    errors = sampled_errors(pattern, problem, [*leaves, dout], results)
    assert set(errors) == set(names)
    assert max(errors.values()) < 1e-5
    for i, name in enumerate(names):
        changed = [x.clone() for x in results]
        # the last position is always looked at
        row = changed[i][0, :, -1] if name == "lse" else changed[i][0, -1]
        row += 0.1
        assert sampled_errors(pattern, problem, [*leaves, dout], changed)[name] > 0.01, name
    assert set(sampled_errors(pattern, problem, leaves, results[:2])) == {"out", "lse"}


def test_sampled_errors_sum_pieces_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(num_positions=300, num_heads=1, head_dim=16)
    leaves = problem.qkv()
    results = [x.detach() for x in attention(*leaves, return_lse=True)]
    whole = sampled_errors(dense_pattern(problem), problem, leaves, results)
    monkeypatch.setattr("dilated_attention.bench.accuracy._STRETCH", 7)
    assert sampled_errors(dense_pattern(problem), problem, leaves, results) == pytest.approx(whole, rel=1e-6)


def small_run(folder: Path, *more: str) -> list[str]:
    command = ["bench", "extreme", "--output", str(folder), "--quiet", "--first", "512", "--heads", "4", "--limit", "20"]
    return [*command, "--memory-gib", "0.04", "--kinds", "dilated", *more]


@pytest.mark.slow
def test_lengths_double_until_memory_is_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(small_run(tmp_path, "--passes", "forward")) == 0
    rows = Results.load(tmp_path / "extreme.json").rows
    lengths = [row.case["N"] for row in rows]
    fits = [row for row in rows if row.values]
    misses = [row.case["N"] for row in rows if row.note]
    assert [row.note for row in rows if row.note] == ["out of memory"]
    most = max(row.case["N"] for row in fits)
    assert misses == [2 * most] and lengths == [512 * 2**i for i in range(len(lengths))]
    for row in fits:
        v = row.values
        # q, k, v and out in float32, and no more than three times that
        assert 4 * 4 * 64 * 4 < v["bytes_per_token"] < 3 * 4 * 4 * 64 * 4
        assert v["peak_bytes"] == pytest.approx(v["bytes_per_token"] * row.case["N"], rel=1e-3)
        assert v["peak_bytes"] < 0.04 * 2**30
        assert v["tokens_per_s"] == pytest.approx(1000 * row.case["N"] / v["ms"], rel=1e-3)
        assert max(row.errors.values()) < 1e-4
    assert f"{most:,}" in capsys.readouterr().out

    monkeypatch.setattr(extreme, "within", lambda *args, **options: pytest.fail("measured twice"))
    assert main(small_run(tmp_path, "--passes", "forward")) == 0


def test_given_lengths_are_all_that_is_measured(tmp_path: Path) -> None:
    assert main(small_run(tmp_path, "--passes", "both", "--lengths", "700", "512", "--causal")) == 0
    rows = Results.load(tmp_path / "extreme.json").rows
    assert [row.case["N"] for row in rows] == [700, 512] and all(row.case["causal"] and row.values for row in rows)
    for row in rows:
        assert row.values["planned_longest"] > 1024 and row.values["off"] > -0.5


def test_a_length_that_takes_too_long_ends_the_search_with_time(tmp_path: Path) -> None:
    assert main(small_run(tmp_path, "--passes", "both", "--limit", "1e-9")) == 0
    first, second = Results.load(tmp_path / "extreme.json").rows
    assert (first.note, second.note) == ("", "time, not memory")
    assert second.case["N"] == 2 * first.case["N"]
    assert set(first.errors) == {"out", "lse", "dq", "dk", "dv"}


def test_a_wrong_kind_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "our_call", lambda problem, pattern, q, k, v, **options: (v, v[..., 0].transpose(1, 2)))
    problem = Problem(num_positions=512, num_heads=2, head_dim=16)
    (row,) = extreme.search("dilated", "forward", problem, 128, None, 1.0, [512])
    assert row.note.startswith("wrong: out off by") and not row.values and row.errors["out"] > 0.5


def test_a_gpus_result_is_drawn(tmp_path: Path) -> None:
    rows = []
    for kind, which, limit in (
        ("dilated", "forward", 2**25),
        ("dilated", "both", 2**24),
        ("block-sparse", "forward", 2**25),
        ("dense", "forward", 2**21),
    ):
        for power in range(18, limit.bit_length() + 1):
            case = {"pass": which, "N": 2**power, "B": 1, "H": 8, "D": 64, "dtype": "bfloat16", "causal": False}
            values = {"ms": 2**power / 1e5, "tokens_per_s": 1e8, "peak_bytes": 4200 * 2**power, "bytes_per_token": 4200.0}
            fits = 2**power <= limit
            rows.append(
                Row(
                    name=kind,
                    case=case,
                    values=values if fits else {},
                    errors={"out": 2e-3} if fits else {},
                    note="" if fits else "out of memory",
                )
            )
    hardware = {"device": "NVIDIA H200", "devices": 1}
    settings = {"heads": 8, "head_dim": 64, "causal": False, "dtype": "bfloat16"}
    results = Results("extreme", {"date": "2026-01-01", "hardware": hardware, "versions": {"torch": "2.11"}}, settings, {"all": rows})
    write(extreme.Extreme(), results, tmp_path)
    text = (tmp_path / "extreme.md").read_text()
    assert "33,554,432" in text and "out of memory at 67,108,864" in text


def test_options_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(small_run(tmp_path, "--memory-gib", "0"))
    assert caught.value.code == 2
    assert "--memory-gib is 0; expected more than 0" in capsys.readouterr().err
