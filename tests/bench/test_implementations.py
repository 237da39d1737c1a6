"""Suite ``implementations``: every public module and other people's, right or without figures; spread over processes too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row, Session
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites.implementations import CONTENDERS, PASSES, PROJECTED, Implementations
from dilated_attention.bench.workloads.external import foreign
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main
from dilated_attention.factory.create import KINDS
from tests.helpers.pool import pool_of

HERE = "tests.bench.test_implementations"


def right(problem: Problem) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal).transpose(1, 2)

    return attend


def unscaled(problem: Problem) -> Any:
    attend = right(problem)
    return lambda q, k, v: attend(3 * q, k, v)


def inference_only(problem: Problem) -> Any:
    attend = right(problem)
    return lambda q, k, v: attend(q.detach(), k.detach(), v.detach())


def dilated(problem: Problem) -> Any:
    from dilated_attention import dilated_attention

    return lambda q, k, v: dilated_attention(q, k, v, *problem.branches, is_causal=problem.is_causal)


def of_another_shape(problem: Problem) -> Any:
    return lambda q, k, v: q.flatten(2)


def fails(problem: Problem) -> Any:
    raise NotImplementedError("only for even days")


def test_every_public_module_is_compared() -> None:
    classes = {kind.__name__ for kind in KINDS.values()}
    assert classes <= {name.split(" ")[0] for name in CONTENDERS}
    assert {"nn.MultiheadAttention", "torch sdpa", "attention"} <= set(CONTENDERS)
    assert len(PROJECTED) == 7


@pytest.mark.slow
def test_all_are_right_and_others_are_held_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "implementations",
        "--output",
        str(tmp_path),
        "--seconds",
        "0.001",
        "--lengths",
        "192",
        "--heads",
        "2",
        "--head-dim",
        "16",
    ]
    for name in ("right", "unscaled", "inference_only", "dilated", "of_another_shape", "fails"):
        command += ["--contender", f"{name}={HERE}:{name}"]
    assert main([*command, "--quiet", "--no-plots"]) == 0
    printed = capsys.readouterr().out
    (rows,) = json.loads((tmp_path / "implementations.json").read_text())["groups"].values()
    timed = {(row["name"], row["case"].get("pass")): row["values"] for row in rows if "values" in row}
    for name in CONTENDERS:
        for which in PASSES:
            assert timed[name, which]["ms"] > 0, name
    assert timed["DilatedAttention", "both"]["pairs_share"] < 0.7 < timed["RingAttention", "both"]["pairs_share"] == 1
    assert timed["dilated", "both"]["pairs_share"] == timed["DilatedAttention", "both"]["pairs_share"]
    assert timed["right", "forward"]["pairs_share"] == 1 and ("inference_only", "both") not in timed
    assert timed["inference_only", "forward"]["ms"] > 0
    notes = {row["name"]: row["note"] for row in rows if "note" in row}
    assert notes["unscaled"].startswith("wrong: out off by") and notes["fails"] == "raised NotImplementedError: only for even days"
    assert "returned (2, 192, 32); expected a tensor of q's shape (2, 192, 2, 16)" in notes["of_another_shape"]
    assert not {name for name, _ in timed} & set(notes)
    assert "192 positions, batch 2, 2 heads of 16, float32, full" in printed and "wrong: out off by" in printed
    line = next(line for line in printed.splitlines() if line.split()[:2] == ["torch", "sdpa"] and "%" in line).split()
    # forward ms and the tokens/s behind it
    assert float(line[5].replace(",", "")) == pytest.approx(1000 * 2 * 192 / float(line[4]), rel=0.01)


@pytest.mark.parametrize("text", ["mine", "=a:b", "mine=a", "mine=no.such.module:f", f"mine={HERE}:nothing"])
def test_a_contender_that_cannot_be_found_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"not a contender|importable here|has no function"):
        foreign(text)
    with pytest.raises(SystemExit) as caught:
        main(["bench", "implementations", "--contender", text])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_names_are_not_taken_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "implementations", "--output", str(tmp_path), "--contender", f"torch sdpa={HERE}:right", "--no-plots"])
    assert caught.value.code == 2
    assert "--contender is named 'torch sdpa'" in capsys.readouterr().err


def _spread(rank: int, world: int, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    from dilated_attention.bench import run

    suite = Implementations()
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    chosen = ["--modules", *(name for name in CONTENDERS if name.startswith("Ring")), "torch sdpa"]
    options = parser.parse_args(["--lengths", "193", "--heads", "2", "--head-dim", "16", *chosen])
    session = Session(
        device=torch.device("cpu"), full=False, dtypes=(torch.float32,), seconds=0.002, options=options, rank=rank, world_size=world
    )
    outcome = run(suite, session, output=Path(folder), plots=False)
    return [row.as_dict() for row in outcome.results.rows], [table.text() for table in suite.tables(outcome.results)]


def test_rings_share_the_sequence_and_are_right(tmp_path: Path) -> None:
    for rows, tables in pool_of(2).run(_spread, str(tmp_path)):
        timed = {(row["name"], row["case"].get("pass")) for row in rows if row.get("values")}
        assert timed == {(name, which) for name in CONTENDERS if name.startswith("Ring") or name == "torch sdpa" for which in PASSES}
        assert all(max(row["errors"].values()) < 1e-4 and row["case"]["processes"] == 2 for row in rows)
        assert "2 processes share each sequence" in tables[1]


@pytest.mark.slow
def test_a_gpus_file_becomes_tables_and_plots(tmp_path: Path) -> None:
    rows: dict[str, list[Row]] = {}
    for n in (4096, 8192, 2**15, 2**16, 2**17):
        case = {"N": n, "B": 2, "H": 12, "D": 64, "dtype": "bfloat16", "causal": False}
        group = rows.setdefault(f"N={n}", [])
        for i, name in enumerate([*CONTENDERS, "theirs"]):
            if name == "theirs" and n > 8192:
                group.append(Row(name=name, case=case, note="out of memory"))
                continue
            for which, factor in (("forward", 1.0), ("both", 3.5)):
                if name == "torch sdpa" and n == 2**17 and which == "both":
                    group.append(Row(name=name, case=case | {"pass": which}, note="would take about 1.6 s"))
                    continue
                ms = factor * (0.01 * i + (n / 4096) ** (2 if i < 3 else 1))
                values = {
                    "ms": ms,
                    "low_ms": ms,
                    "high_ms": ms,
                    "samples": 20,
                    "peak_bytes": int(factor * n * (10**6 + i)),
                    "pairs_share": 0.1,
                }
                group.append(Row(name=name, case=case | {"pass": which}, values=values, errors={"out": 1e-3}))
    machine = {
        "date": "2026-01-01",
        "hardware": {"device": "NVIDIA H200", "devices": 1, "capability": "9.0"},
        "versions": {"torch": "2.11"},
    }
    results = Results("implementations", machine, {"size": "full", "contenders": {"theirs": "their.package:attend"}}, rows)
    suite = Implementations()
    last = suite.tables(results)[-1]
    cells = {row[0]: row for row in last.rows}
    assert cells["torch sdpa"][5] == "≈ 1.6 s" and cells["theirs"][2].startswith("[") and "out of memory" in last.caption
    assert cells["DilatedAttention"][4] == f"{2**17 * (10**6 + 3) / 2**20:,.0f}"
    assert "not counted" not in last.caption
    written = write(suite, results, tmp_path)
    names = {path.stem for path in written if path.suffix == ".png"}
    assert names == {f"implementations-{what}" for what in ("tokens-attention-forward", "tokens-projected-forward", "tokens-attention-both",
                                                            "tokens-projected-both", "memory-attention", "memory-projected")}  # fmt: skip
    assert "their.package:attend, yours" in (tmp_path / "implementations.md").read_text()
