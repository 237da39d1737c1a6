"""The scaling suite: what is counted, and processes that measure, fail and resume together."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention.bench import Results, Row
from dilated_attention.bench.measure.limits import Refused
from dilated_attention.bench.measure.sharded import RankSync, row_errors
from dilated_attention.bench.models import torchscale
from dilated_attention.bench.report.rows import UNDER_WAY
from dilated_attention.bench.suites import SUITES, scaling
from dilated_attention.bench.workloads.contenders import dense_pattern, of_backend
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import CASES
from dilated_attention.cli import main
from dilated_attention.distributed.comm.comm_volume import CommSizes
from tests.helpers.comm_volume import dense_bytes
from tests.helpers.pool import pool_of
from tests.helpers.scripts import free_port

TINY = ["--heads", "2", "2", "16", "--seconds", "0.001", "--quiet"]
NAMED = {case.name: case for case in CASES}
# a package of ring-flash-attention's name: its zigzag forgets all other ranks, its ring raises
WRONG_PACKAGE = """
import torch
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from .adapters import substitute_hf_flash_attn


class Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        given = {"dropout_p": 0, "softmax_scale": q.shape[-1] ** -0.5, "causal": True}
        out, lse, _, _ = _flash_attn_forward(q=q, k=k, v=v, **given)
        ctx.given = given
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = dict(zip(("dq", "dk", "dv"), map(torch.empty_like, (q, k, v))))
        _flash_attn_backward(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, **grads, **ctx.given)
        return tuple(grads.values())


def zigzag_ring_flash_attn_func(q, k, v, causal, group):
    return Local.apply(q, k, v)


def ring_flash_attn_func(q, k, v, causal, group):
    raise RuntimeError("no ring here")
"""


def command(folder: Path, *more: str) -> list[str]:
    return ["bench", "scaling", "--output", str(folder), *TINY, *more]


def problem_of(name: str, N: int) -> Problem:
    return NAMED[name].problem(N, unit=16, heads=(2, 2, 16))


def test_one_process_measures_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = command(tmp_path, "--cases", "dense-*", "longnet-*")
    assert main(wanted) == 0
    text = capsys.readouterr().out
    before = (tmp_path / "scaling.json").read_text()
    # nothing is measured again
    assert main(wanted) == 0
    assert (tmp_path / "scaling.json").read_text() == before
    rows = Results.load(tmp_path / "scaling.json").rows
    assert not [row for row in rows if row.note] and {row.name for row in rows} == {"one process", "ring"}
    assert all(0 <= error < 1e-5 for row in rows for error in row.errors.values())
    alone = [row for row in rows if row.name == "one process" and row.case["case"].startswith("dense")]
    assert {row.case["N"]: row.values["pairs"] for row in alone}[512] == 2 * 512 * 513 / 2
    for row in rows:
        assert row.values["tokens_per_s"] == pytest.approx(1000 * row.case["N"] / row.values["ms"], rel=1e-3)
        assert row.values["tflops"] == pytest.approx(
            (4 if row.case["pass"] == "forward" else 14) * row.values["pairs"] * 16 / row.values["ms"] / 1e9, rel=1e-3
        )
    assert "of the kernel" not in text and "efficiency, %: time of one process on the whole sequence" in text


def test_work_is_counted_by_pairs() -> None:
    for name, kind in (("longnet", "dilated"), ("local", "blocks")):
        shorter, longer = (of_backend("auto", kind).pairs(problem_of(name, n)) or 0 for n in (4096, 16384))
        assert longer / shorter == pytest.approx(4, rel=0.05)
    packed, whole = problem_of("packed", 500), problem_of("dense", 500)
    bounds, dense = packed.bounds or (), dense_pattern(packed)
    assert bounds[0] == 0 and bounds[-1] == 500 and max(b - a for a, b in itertools.pairwise(bounds)) <= 125
    assert packed.pairs(dense) == 2 * sum((b - a) * (b - a + 1) // 2 for a, b in itertools.pairwise(bounds))
    assert sum(packed.pairs(dense, rows) for rows in ((0, 77), (77, 300), (300, 500))) == packed.pairs(dense) < whole.pairs(dense)


def test_sampled_rows_find_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem_of("extreme-training", 256)
    assert all(0 < error < 1e-5 for error in row_errors(of, True).values())
    right = da.ring_dilated_attention
    monkeypatch.setattr(da, "ring_dilated_attention", lambda q, k, v, *x, **options: right(q, k, 1.1 * v, *x, **options))
    errors = row_errors(of, True)
    assert errors["out"] == pytest.approx(0.1, rel=1e-3) and errors["dv"] == pytest.approx(0.1, rel=1e-3)


def test_the_stand_in_runs_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(qkv: list[torch.Tensor], bounds: Any, options: Any) -> torch.Tensor:
        parts = [[x[:, a:b] for x in qkv] for a, b in itertools.pairwise(bounds.queries.tolist())]
        return torch.cat([da.attention(*part, is_causal=options.causal, scale=options.scale) for part in parts], 1)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, options: Any, out: torch.Tensor) -> torch.Tensor:
        out.copy_(attend([q, k, v], bounds, options))
        return out.new_zeros(1, q.shape[2], q.shape[1])

    def backward(dout: torch.Tensor, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, options: Any, grads: Any) -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            for grad, found in zip(grads, torch.autograd.grad(attend(leaves, bounds, options), leaves, dout), strict=True):
                grad.copy_(found)

    backend = SimpleNamespace(forward_packed=forward, backward_packed=backward)
    monkeypatch.setattr(torchscale, "registry", SimpleNamespace(get=lambda name: backend))
    ends = torch.tensor([0, 10, 24], dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 14, "max_seqlen_k": 14, "dropout_p": 0, "alibi_slopes": None}
    given |= {"softmax_scale": 0.25, "causal": True, "window_size_left": -1, "window_size_right": -1}
    q, k, v, dout = (torch.randn(24, 2, 16) for _ in range(4))
    out, lse, _, _ = torchscale.forward(q=q, k=k, v=v, **given)
    leaves = [x[None].requires_grad_() for x in (q, k, v)]
    true = da.attention(*leaves, is_causal=True, cu_seqlens=ends)
    torch.testing.assert_close(out, true[0])
    grads = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    torchscale.backward(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, **grads, **given)
    for found, wanted in zip(grads.values(), torch.autograd.grad(true, leaves, dout[None]), strict=True):
        torch.testing.assert_close(found, wanted[0])
    with pytest.raises(AssertionError, match="no dropout"):
        torchscale.forward(q=q, k=k, v=v, **given | {"dropout_p": 0.5})


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
        except Exception as error:  # noqa: BLE001 - the test sees it
            return -1, str(error)
        finally:
            for name in names:
                os.environ.pop(name)


def _spoil(patch: pytest.MonkeyPatch) -> None:
    right = da.ring_attention

    def failed(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("while the other process waits for keys")

    patch.setattr(da, "ring_attention", lambda q, k, v, **options: right(1.5 * q, k, v, **options))
    patch.setattr(da, "ring_dilated_attention", failed)


def refused_by_one(rank: int, world: int) -> list[Any]:
    together = RankSync(torch.device("cpu"), rank, world)

    def refuse() -> int:
        if rank == 1:
            raise Refused("no memory here")
        return rank

    with pytest.raises(Refused) as refused:
        together.everywhere(refuse)
    return [str(refused.value), together.everywhere(lambda: rank), together.everywhere(lambda: rank, ranks=1)]


def test_two_processes_measure_fail_and_resume_together(tmp_path: Path) -> None:
    pool, cases = pool_of(2), ["--cases", "dense-*", "longnet-*", "--tokens", "64", "--exchange", "auto", "ring"]
    package = tmp_path / "ring_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(WRONG_PACKAGE)
    assert main(command(tmp_path, *cases)) == 0
    arguments = command(tmp_path, "--timeout", "20", "--ring-flash-attention", str(tmp_path), *cases)
    assert pool.run(as_rank, arguments) == [(0, "")] * 2
    rows = [row for row in Results.load(tmp_path / "scaling.json").rows if row.case["W"] == 2]
    noted = {row.name: row.note for row in rows if row.note}
    assert noted.pop("ring-flash-attention zigzag (sdpa_cpu)").startswith("wrong: out off by")
    assert "no ring here" in noted.pop("ring-flash-attention ring (sdpa_cpu)")
    assert noted and all("context_parallel dispatches CUDA kernels only" in note for note in noted.values())
    timed = [row for row in rows if not row.note]
    assert {row.name for row in timed} == {"one process", "kernel", "ring", "ring by ring"}
    sizes = CommSizes(heads=2, kv_heads=2, head_dim=16, batch=1, itemsize=4, sum_itemsize=4)
    for row in timed:
        assert row.case["W"] == 2 and 0 < row.values["ms"] <= row.values["high_ms"] and row.values["host_ms"] > 0
        assert all(error < 1e-5 for error in row.errors.values()) and set(row.errors) == {"out", "dq", "dk", "dv"}
        if row.name == "ring" and row.case["case"] == "dense-64":
            counted = [dense_bytes(128, 2, rank, "zigzag", sizes, is_causal=True) for rank in range(2)]
            forward = max(one.forward_received for one in counted)
            whole = max(one.forward_received + one.backward_received for one in counted)
            assert row.values["received_bytes"] == (forward if row.case["pass"] == "forward" else whole) > 0
    # one table of both numbers of processes
    text = (tmp_path / "scaling.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| dense-64 causal ring | 2 | 128 | forward |"))
    assert line.count("|") == 14 and "efficiency by processes" in text

    assert pool.run(refused_by_one) == [["process 1: no memory here", [0, 1], [0]]] * 2

    # what is wrong on one process has no speed on any; where one fails while the other waits for it, none hangs, the file names it, and
    # what is left is measured by new processes
    rings = ["--cases", "dense-*", "longnet-*", "--tokens", "128", "--contenders", "ring"]
    codes = pool.run(as_rank, [*command(tmp_path, "--timeout", "1"), *rings, "--fresh"], True)
    assert [code for code, _ in codes] == [1, 1]
    pool.close()
    dense, failed = Results.load(tmp_path / "scaling.json").rows
    assert dense.note.startswith("wrong: out off by") and not dense.values
    assert failed.case["group"] == "longnet-128 causal W=2 ring"
    assert "process 1: out of memory" in failed.note and "RingError" in failed.note
    assert failed.note in (tmp_path / "scaling.md").read_text()
    few = ["longnet-128", "gigapath-128", "random-128", "packed-128", "extreme-training-128", "slide-128"]
    assert pool.run(as_rank, command(tmp_path, "--cases", *few, "--tokens", "128", "--contenders", "ring*")) == [(0, "")] * 2
    again = Results.load(tmp_path / "scaling.json").rows
    assert [row.note for row in again if row.note] == [dense.note, failed.note]
    shown = {(row.case["case"], row.name) for row in again if row.values}
    assert shown >= {(few[1], "ring"), (few[2], "ring balanced"), (few[3], "ring zigzag"), (few[4], "ring"), (few[5], "ring")}
    assert all(error < 1e-4 for row in again if row.values for error in row.errors.values())


def test_what_ended_a_process_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torchrun with one process
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    arguments = command(tmp_path, "--cases", "dense-64", "--tokens", "64", "--contenders", "ring", "one process")

    def ended(entry: Any, *given: Any, **options: Any) -> list[Row]:
        if entry.contender.name == "ring":
            raise SystemExit(13)
        return right(entry, *given, **options)

    right = scaling.measure
    try:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(scaling, "measure", ended)
            main(arguments)
        assert main(arguments) == 0
    finally:
        # the process that ended would have taken its group along
        torch.distributed.destroy_process_group()
    rows = Results.load(tmp_path / "scaling.json").rows
    assert [(row.case, row.note) for row in rows if row.note] == [({"group": "dense-64 causal W=1 ring"}, UNDER_WAY)]
    assert [row.name for row in rows] == ["one process", "one process", "all"]


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "scaling", "--list", "--size", "full", "--cases", "gigapath-*", "packed-*", "extreme-of-*", "--output", "none"])
    lines = capsys.readouterr().out.splitlines()
    assert "gigapath-25000 full W=1 one process" in lines and "packed-32768 causal W=1 ring balanced" in lines
    assert "extreme-of-1073741824 full W=1 ring" in lines and len(lines) == 2 * 2 + 4 + 1


def test_suites_of_one_process_refuse_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "memory", "--output", str(tmp_path)]) == 1
    assert "2 processes were started and suite memory runs on one" in capsys.readouterr().err


def test_one_process_alone_goes_on_or_raises() -> None:
    together = RankSync(torch.device("cpu"))

    def refuse() -> int:
        raise Refused("not here")

    assert together.everywhere(lambda: 3) == [3]
    with pytest.raises(Refused, match=r"^not here$"):
        together.everywhere(refuse)
    slow, fast = (together.called(call, seconds=0.01) for call in (lambda: sum(range(10000)), lambda: None))
    assert slow["ms"] > fast["ms"] >= 0 and slow["host_ms"] <= slow["high_ms"]
    with pytest.raises(ZeroDivisionError):
        together.everywhere(lambda: 1 // 0)


def test_results_of_gpus_are_shown() -> None:
    here = {"date": "2026-11-21", "hardware": {"device": "NVIDIA H200", "devices": 1, "memory_bytes": 2**37}, "versions": {}}
    rows = []
    for which, factor in (("forward", 1.0), ("both", 3.5)):
        for W in (1, 2, 4):
            for name, kind, ms in (("one process", "one process", 8.0), ("kernel", "kernel", 2.0 * W), ("ring", "ring", 9.0 / W)):
                case = {
                    "case": "dense-of-65536",
                    "mask": "causal",
                    "W": W,
                    "kernel": "auto",
                    "kind": kind,
                    "N": 65536,
                    "B": 1,
                    "pass": which,
                }
                rows.append(Row(name=name, case=case, values={"ms": factor * ms, "host_ms": 0.5, "tflops": 600.0, "peak_bytes": 2**33}))
    rows.append(Row(name="ring", case=rows[2].case | {"W": 8}, note="process 3: out of memory"))
    failed = Row(name="all", case={"group": "dense-of-65536 causal W=8 torch"}, note="process 2: RingError: …")
    results = Results("scaling", here, {}, {"all": rows, "dense-of-65536 causal W=8 torch": [failed]})
    suite = SUITES["scaling"]()
    tables = {table.title: table for table in suite.tables(results)}
    assert ["dense-of-65536 causal ring", "88.9", "88.9", "88.9", "process 3: out of memory"] in [
        list(row) for row in tables["forward: efficiency by processes, %"].rows
    ]
    lines = {(row[0], row[1], row[3]): row for row in tables["dense"].rows}
    shown = dict(zip(tables["dense"].columns, lines["dense-of-65536 causal ring", "4", "forward"], strict=True))
    assert (shown["called, ms"], shown["efficiency, %"], shown["of the kernel, %"], shown["peak, GiB"]) == ("2.25", "88.9", "100", "8")
    assert lines["dense-of-65536 causal ring", "8", "forward"][-1] == "process 3: out of memory"
    assert tables["Groups that failed"].rows == [("dense-of-65536 causal W=8 torch", "process 2: RingError: …")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_one_gpu(tmp_path: Path) -> None:
    tiny = [
        "--cases",
        "dense-*",
        "longnet-*",
        "random-*",
        "packed-*",
        "--tokens",
        "2048",
        "4096",
        "--graphs",
        "--seconds",
        "0.01",
        "--quiet",
    ]
    assert main(["bench", "scaling", "--output", str(tmp_path), *tiny]) == 0
    rows = Results.load(tmp_path / "scaling.json").rows
    assert not [row for row in rows if row.note]
    assert all(row.values["peak_bytes"] > 0 and row.values["graph_ms"] > 0 for row in rows)
