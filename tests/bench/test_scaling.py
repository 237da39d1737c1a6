"""The scaling suite: laws of growth, and processes that measure together, fail together and are told together."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row, Session
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.measure.skip import Refused
from dilated_attention.bench.report.merge_results import joined
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites import SUITES
from dilated_attention.bench.suites.scaling import contenders
from dilated_attention.bench.suites.scaling_report import exponent
from dilated_attention.bench.workloads import sharded
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main
from dilated_attention.distributed.comm.comm_volume import CommSizes, dense_bytes
from tests.helpers.pool import pool_of

TINY = [
    "--lengths",
    "64",
    "128",
    "256",
    "--batches",
    "1",
    "2",
    "--positions",
    "64",
    "--strong",
    "256",
    "--weak",
    "128",
    "--masks",
    "causal",
]
TINY += ["--seconds", "0.001", "--no-plots", "--quiet"]


def command(folder: Path, *more: str) -> list[str]:
    return ["bench", "scaling", "--output", str(folder), *TINY, *more]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one process's run."""
    folder = tmp_path_factory.mktemp("one")
    assert main(command(folder)) == 0
    return folder


@pytest.mark.slow
def test_laws_of_growth_and_one_process(of_one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (of_one / "scaling.json").read_text()
    # nothing is measured again
    assert main(command(of_one)) == 0
    assert (of_one / "scaling.json").read_text() == before
    text = capsys.readouterr().out
    rows = Results.load(of_one / "scaling.json").rows
    assert not [row for row in rows if row.note]
    lengths = [row for row in rows if row.case["part"] == "length"]
    assert len(lengths) == 3 * 3 * 2
    for row in lengths:
        assert row.values["ns_per_token"] == pytest.approx(1e6 * row.values["ms"] / row.case["N"], rel=1e-3)
        # out alone, of 2 heads of 64 floats; backward also dq, dk and dv
        assert row.values["bytes_per_token"] >= 4 * 2 * 64 * (1 if row.case["pass"] == "forward" else 4)
    dense = {row.case["N"]: row.values["pairs"] for row in lengths if row.name == "dense"}
    assert dense == {n: 2 * n * n for n in (64, 128, 256)}
    assert "time per token, ns, by positions" in text and "memory per token, bytes" in text and "pairs ∝ N^" in text
    line = next(line for line in text.splitlines() if line.split()[:1] == ["dense"])
    assert line.split()[-1] == "2.00"

    batch = {(row.case["mode"], row.case["B"]): row.case["N"] for row in rows if row.case["part"] == "batch"}
    assert batch == {("weak", 1): 64, ("weak", 2): 64, ("strong", 1): 128, ("strong", 2): 64}

    shared = [row for row in rows if row.case["part"] == "processes"]
    assert {row.name for row in shared} == {"ring_attention", "ring_dilated_attention", "ring_block_sparse_attention"}
    for row in shared:
        values = row.values
        assert (row.case["W"], values["received_bytes"], values["sent_bytes"]) == (1, 0, 0)
        assert values["efficiency"] == pytest.approx(values["alone_ms"] / values["ms"], rel=1e-3)
        assert all(error < 1e-5 for error in row.errors.values())
    ring = next(row for row in shared if row.name == "ring_attention" and (row.case["N"], row.case["pass"]) == (256, "both"))
    assert ring.values["tflops"] == pytest.approx(14 * 2 * 256 * 257 / 2 * 64 / ring.values["ms"] / 1e9, rel=1e-3)


def test_an_exponent_is_fitted_to_the_longest_lengths() -> None:
    points = [(2.0**i, 3 * 2.0 ** (1.5 * i)) for i in range(8, 12)]
    assert exponent([(16.0, 1e9), *points]) == pytest.approx(1.5)
    assert exponent([(1024.0, 5.0)]) is None


def test_work_of_branches_and_window_grows_with_the_length() -> None:
    _, dilated, window = contenders(128)
    shorter, longer = (Problem(num_positions=n, num_heads=2, head_dim=16) for n in (4096, 16384))
    for contender in (dilated, window):
        found = [contender.pairs(problem) for problem in (shorter, longer)]
        assert found[0] is not None and found[1] is not None
        assert found[1] / found[0] == pytest.approx(4, rel=0.05)


def as_rank(rank: int, world: int, arguments: list[str], spoiled: bool = False) -> tuple[int, str]:
    """(exit code, error) of the command as one of ``world`` processes.

    ``spoiled``: rank 1 computes one thing wrong and fails at another.
    """
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and spoiled:
            _spoil(patch)
        try:
            return main(arguments), ""
        except Exception as error:  # noqa: BLE001 - told to the test
            return -1, str(error)
        finally:
            for name in names:
                os.environ.pop(name)


def _spoil(patch: pytest.MonkeyPatch) -> None:
    right = sharded.ring_attention

    def failed(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("while the other process waits for keys")

    patch.setattr(sharded, "ring_attention", lambda q, k, v, **options: right(1.5 * q, k, v, **options))
    patch.setattr(sharded, "ring_dilated_attention", failed)


def refused_by_one(rank: int, world: int) -> list[Any]:
    together = RankSync(session(rank, world))

    def refuse() -> int:
        if rank == 1:
            raise Refused("no room here")
        return rank

    return [together.everywhere(refuse).note, together.everywhere(lambda: rank).value]


def session(rank: int = 0, world: int = 1) -> Session:
    here = {"device": torch.device("cpu"), "dtypes": (torch.float32,), "options": argparse.Namespace()}
    return Session(full=False, seconds=0.01, rank=rank, world_size=world, **here)  # type: ignore[arg-type]


def _fails(patch: pytest.MonkeyPatch) -> None:
    def failed(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("not in the middle of an exchange")

    patch.setattr(sharded, "ring_dilated_attention", failed)


def test_two_processes_measure_fail_and_are_told_together(of_one: Path, tmp_path: Path) -> None:
    pool = pool_of(2)
    shutil.copy(of_one / "scaling.json", tmp_path)
    arguments = command(tmp_path, "--timeout", "20")
    assert pool.run(as_rank, arguments) == [(0, "")] * 2
    both = Results.load(tmp_path / "scaling-2.json")
    assert {row.case["part"] for row in both.rows} == {"processes"} and not [row for row in both.rows if row.note]
    sizes = CommSizes(heads=2, kv_heads=2, head_dim=64, batch=1, itemsize=4, sum_itemsize=4)
    for row in both.rows:
        assert row.case["W"] == 2 and row.values["efficiency"] > 0
        assert all(error < 1e-5 for error in row.errors.values()) and "dk" in row.errors
        if row.name == "ring_attention":
            counted = [dense_bytes(row.case["N"], 2, rank, "zigzag", sizes, is_causal=True) for rank in range(2)]
            forward = max(one.forward_received for one in counted)
            whole = max(one.forward_received + one.backward_received for one in counted)
            assert row.values["received_bytes"] == (forward if row.case["pass"] == "forward" else whole) > 0
    lengths = {(row.case["mode"], row.case["N"]) for row in both.rows}
    assert lengths == {("strong", 256), ("weak", 256)}

    # one table of both numbers of processes; lengths are those of one
    text = (tmp_path / "scaling.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| ring_attention | causal | forward | 2 |"))
    assert line.count("×") == 1 and "1, 2 processes on" in text and "time per token" in text

    assert pool.run(refused_by_one) == [["process 1: no room here", [0, 1]]] * 2

    # what is wrong on one process has no speed on any; where one fails while the other waits for it, none hangs, the file tells, and what
    # is left is measured by new processes
    codes = pool.run(as_rank, [*command(tmp_path, "--timeout", "1"), "--fresh"], True)
    assert [code for code, _ in codes] == [1, 1]
    pool.close()
    broken = Results.load(tmp_path / "scaling-2.json")
    dense = [row for row in broken.rows if row.name == "ring_attention"]
    assert len(dense) == 2 and all(row.note.startswith("wrong: out off by") and not row.values for row in dense)
    (failed,) = [row for row in broken.rows if row.name != "ring_attention"]
    assert "process 1: out of memory" in failed.note and "RingError" in failed.note
    assert "ring_dilated_attention strong W=2" in failed.case["group"]
    assert failed.note in (tmp_path / "scaling.md").read_text()
    assert pool.run(as_rank, arguments) == [(0, "")] * 2
    again = Results.load(tmp_path / "scaling-2.json")
    assert len(again.groups) == 6 and [row.note for row in again.rows if row.note and row not in dense] == [failed.note]


def test_suites_of_one_process_refuse_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "speed", "--output", str(tmp_path), "--no-plots"]) == 1
    assert "2 processes were started and suite speed runs on one" in capsys.readouterr().err


def test_only_equal_machines_come_together(tmp_path: Path) -> None:
    here = machine(torch.device("cpu"))
    one = Results("scaling", here, {"size": "small"}, {"a": []})
    for processes, changes in ((2, {}), (4, {"device": "an abacus"}), (8, {})):
        hardware = here["hardware"] | {"devices": processes} | changes
        Results("scaling", here | {"hardware": hardware}, {"size": "small"}, {"a": []}, tmp_path / f"scaling-{processes}.json").save()
    (tmp_path / "scaling-16.json").write_text("{")
    (tmp_path / "scaling-notes.json").write_text("{}")
    whole, left_out = joined(one, tmp_path)
    assert list(whole.groups) == ["a (1)", "a (2)", "a (8)"] and whole.machine["hardware"]["devices"] == "1, 2, 8"
    assert left_out[1] == "scaling-4.json is left out: made with other hardware."
    assert len(left_out) == 2 and left_out[0].startswith("scaling-16.json is left out: ")
    assert joined(one, None) == (one, [])


def test_one_process_alone_goes_on_or_raises() -> None:
    together = RankSync(session())

    def refuse() -> int:
        raise Refused("not here")

    assert together.everywhere(lambda: 3).value == [3]
    assert together.everywhere(refuse).note == "not here"
    timings = together.timed({"a": lambda: sum(range(1000)), "b": lambda: None}, seconds=0.01).value
    assert timings is not None and timings["a"].ms > timings["b"].ms >= 0
    with pytest.raises(ZeroDivisionError):
        together.everywhere(lambda: 1 // 0)


def synthetic() -> Results:
    """What four numbers of H200s could leave."""
    here = {
        "date": "2026-11-21",
        "hardware": {"device": "NVIDIA H200", "devices": "1, 2, 4, 8", "memory_bytes": 2**37},
        "versions": {"torch": "2.11"},
    }
    shape = {"B": 1, "H": 16, "D": 128, "dtype": "bfloat16", "causal": False}
    rows = []
    for which, factor in (("forward", 1.0), ("both", 3.5)):
        for name, power in (("dense", 2.0), ("DilatedAttention", 1.0), ("BlockSparseAttention window", 1.0)):
            for n in (2**i for i in range(12, 21, 2)):
                case = shape | {"N": n, "part": "length", "pass": which}
                if name == "dense" and n == 2**20:
                    rows.append(Row(name=name, case=case, note="left out beyond 262,144 positions"))
                    continue
                ms = factor * (0.05 + n**power / 1e9)
                values = {
                    "ms": ms,
                    "ns_per_token": 1e6 * ms / n,
                    "pairs": 16 * int(n**power),
                    "peak_bytes": 8192 * n,
                    "bytes_per_token": 8192.0,
                }
                rows.append(Row(name=name, case=case, values=values))
            for mode in ("weak", "strong"):
                for b in (1, 2, 4, 8, 16, 32):
                    case = shape | {"N": 4096 if mode == "weak" else 131072 // b, "B": b, "part": "batch", "mode": mode, "pass": which}
                    rows.append(Row(name=name, case=case, values={"ms": factor * b, "tokens_per_s": 1e8 / factor * b**0.1}))
        for kind in sharded.kinds(2048):
            for mode in ("strong", "weak"):
                for world in (1, 2, 4, 8):
                    for causal in (False, True):
                        case = shape | {
                            "causal": causal,
                            "N": 2**17 * (world if mode == "weak" else 1),
                            "part": "processes",
                            "mode": mode,
                            "W": world,
                        }
                        if world == 8 and kind.name == "ring_attention" and causal:
                            rows.append(Row(name=kind.name, case=case, note="process 3: out of memory"))
                            continue
                        values = {
                            "ms": 9.0 / world,
                            "tflops": 600.0,
                            "alone_tflops": 640.0,
                            "efficiency": 0.99**world,
                            "tokens_per_s": 1e7 * world,
                        }
                        values |= {"received_bytes": 2**24 * (world - 1), "sent_bytes": 2**24 * (world - 1), "peak_bytes": 2**33}
                        rows.append(Row(name=kind.name, case=case | {"pass": which}, values=values))
    failed = Row(name="all", case={"group": "ring_attention weak W=8 B=1"}, note="process 1: out of memory; process 2: RingError: …")
    return Results("scaling", here, {}, {"all": rows, "ring_attention weak W=8 B=1": [failed]})


@pytest.mark.slow
def test_results_of_gpus_are_told_and_drawn(tmp_path: Path) -> None:
    results = synthetic()
    suite = SUITES["scaling"]()
    tables = suite.tables(results)
    assert len(tables) == 2 + 2 + 4 + 2
    assert tables[0].rows[0][-2:] == ["2.00", "2.00"] or tables[0].rows[0][-1] == "2.00"
    assert "[1] left out beyond" in tables[0].caption
    strong, weak = tables[-2:]
    assert next(row for row in strong.rows if row[:4] == ["ring_dilated_attention", "full", "forward", "4"])[9] == "4.00 ×"
    assert "ring_attention, W=8, causal: process 3: out of memory" in strong.caption
    assert "ring_attention weak W=8 B=1: process 1" in weak.caption
    results.machine["hardware"]["devices"] = 1
    written = write(suite, results, tmp_path)
    pictures = [path for path in written if path.suffix == ".png"]
    assert len(pictures) == 2 + 2 + 2 + 4 + 2 and all(path.stat().st_size > 5000 for path in pictures)
    assert json.loads((tmp_path / "scaling.json").read_text())["suite"] == "scaling"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_gpu(tmp_path: Path) -> None:
    tiny = ["--lengths", "2048", "4096", "--batches", "1", "2", "--positions", "1024", "--strong", "4096", "--weak", "2048"]
    assert main(["bench", "scaling", "--output", str(tmp_path), "--seconds", "0.01", "--quiet", *tiny]) == 0
    rows = Results.load(tmp_path / "scaling.json").rows
    assert not [row for row in rows if row.note.startswith("wrong")]
    assert all(row.values["bytes_per_token"] > 0 for row in rows if row.case["part"] == "length")
    assert all(row.values["peak_bytes"] > 0 for row in rows if row.case["part"] == "processes")
