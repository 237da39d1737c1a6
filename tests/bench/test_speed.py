"""Suite ``speed``: figures that fit each other, gaps with a reason, named cases, competitors, and a GPU's file as tables."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Results, Row, Session
from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.measure.timing import call_figures
from dilated_attention.bench.models import torchscale as copies
from dilated_attention.bench.runner import write
from dilated_attention.bench.suites.speed import ALL, CONTENDERS, Speed
from dilated_attention.bench.workloads import cases, competitors
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, STANDARD, Contender, dense_pattern, equal_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.cli import main
from dilated_attention.factory.create import KINDS
from dilated_attention.pattern import DilatedPattern

CPU = torch.device("cpu")
H200 = {"device": "NVIDIA H200", "devices": 1, "memory_bytes": 150_000_000_000, "capability": "9.0"}
# TFLOP/s of the forward
RATES = {"standard": 60.0, "torch sdpa": 460.0, "flash3_fp8": 630.0, "flash4": 530.0}


def options(*arguments: str, **more: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    Speed().add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(arguments)) | {"dtypes": None, "seconds": None} | more)


def gpu_results(hardware: dict[str, Any] = H200) -> Results:
    """Times of an imagined GPU: to 1M positions, with what such a run leaves out."""
    rows: dict[str, list[Row]] = {}
    for n in [2**i for i in range(10, 21, 2)]:
        case = {"N": n, "B": 8 if n <= 8192 else 1, "H": 32, "D": 64, "dtype": "bfloat16", "causal": False, "family": "length", "at": n}
        rows[f"length {n}"] = [row for name, rate in RATES.items() for row in _rows(name, rate, case)]
        rows[f"length {n}"].append(Row(name="sdpa_cpu", case=case, note="runs on cpu, not on cuda"))
    for name in ("gigapath-5308", "gigapath-10001"):
        case = cases.make_case(name, CPU, torch.bfloat16).problem.case | {"family": "gigapath", "at": int(name[9:])}
        rows[name] = [row for name, rate in {"ours": 400.0, "torchscale": 100.0}.items() for row in _rows(name, rate, case, called=True)]
    machine = {"date": "2026-01-01", "hardware": hardware, "versions": {"torch": "2.11"}}
    return Results("speed", machine, {"size": "full", "longest": 0.4, "contenders": "all"}, rows)


def _rows(name: str, rate: float, case: dict[str, Any], called: bool = False) -> list[Row]:
    if name == "standard" and case["N"] > 8192:
        return [Row(name=name, case=case, note="out of memory")]
    pairs = case["B"] * case["H"] * case["N"] ** 2
    ms = 4 * pairs * case["D"] / rate / 1e9
    rows = []
    for which, factor in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
        if factor > 1.0 and "fp8" in name:
            continue
        if factor * ms > 400:
            rows.append(Row(name=name, case=case | {"pass": which}, note="longer than 0.4 s a call"))
            continue
        values = {"ms": factor * ms, "low_ms": 0.98 * factor * ms, "high_ms": 1.03 * factor * ms, "samples": 20, "tflops": rate}
        values |= {"called": 2 * factor * ms, "launches": 3, "peak_bytes": 2**20 * case["N"]} if called else {}
        rows.append(Row(name=name, case=case | {"pass": which}, values=values, errors={"out": 2e-3}))
    return rows


def test_a_gpus_file_becomes_tables(tmp_path: Path) -> None:
    suite, results = Speed(), gpu_results()
    tables = {table.title: table for table in suite.tables(results)}
    forward = tables["forward, length, bfloat16, full"]
    cells = {row[0]: dict(zip(forward.columns, row, strict=True)) for row in forward.rows}
    assert cells["torch sdpa, 4096"]["×"] == "1" and cells["flash4, 4096"]["×"] == "1.15"
    assert list(cells)[:4] == ["standard, 1024", "torch sdpa, 1024", "flash3_fp8, 1024", "flash4, 1024"]
    why = {(row[0], row[-1]) for row in forward.rows}
    assert {("standard, 16384", "out of memory"), ("sdpa_cpu, 1024", "runs on cpu, not on cuda")} <= why
    assert ("flash4, 1048576", "longer than 0.4 s a call") in why
    assert "8 × 32 × 64, 1 × 32 × 64" in forward.caption and "times as fast as torch sdpa" in forward.caption
    # 989 TFLOP/s in 16 bits and 1,979 in 8, as NVIDIA states for an H200
    assert [cells["flash4, 4096"][head] for head in ("TFLOP/s", "% of peak")] == ["530", "53.6"]
    assert [cells["flash3_fp8, 4096"][head] for head in ("TFLOP/s", "% of peak")] == ["630", "31.8"]
    assert not [row for row in tables["backward, length, bfloat16, full"].rows if row[0].startswith("flash3_fp8")]
    # named cases are compared with their first contender, and every way that a call was seen has a column
    both = tables["forward + backward, gigapath, bfloat16, full"]
    assert both.columns == ("", "ms", "×", "called, ms", "launches", "TFLOP/s", "% of peak", "peak, MiB", "")
    assert [(row[0], row[2], row[-2]) for row in both.rows] == [
        ("ours, 5308", "1", "5,308"), ("torchscale, 5308", "0.25", "5,308"),
        ("ours, 10001", "1", "10,001"), ("torchscale, 10001", "0.25", "10,001")]  # fmt: skip
    write(suite, results, tmp_path)
    # the same from the file alone
    again = Results.load(tmp_path / "speed.json")
    assert [(table.title, table.columns, len(table.rows)) for table in suite.tables(again)] == [
        (table.title, table.columns, len(table.rows)) for table in tables.values()
    ]
    unknown = suite.tables(gpu_results(H200 | {"device": "Abacus 9000"}))[0]
    assert "No utilisation: the peak rates of Abacus 9000 are not known" in unknown.caption


def test_the_suite_measures_checks_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "speed", "--output", str(tmp_path), "--seconds", "0.002", "--lengths", "64", "128", "--quiet"]
    command += ["--contenders", "sdpa_cpu", "flash4", "MultiheadDil*"]
    assert main([*command, "--cases", "length"]) == 0
    text = capsys.readouterr().out
    assert "forward + backward, length, float32, causal" in text and "sdpa_cpu" in text
    first = json.loads((tmp_path / "speed.json").read_text())["groups"]
    assert len(first) == 3
    rows = [row for group in first.values() for row in group]
    assert {row["note"] for row in rows if row["name"] == "flash4"} == {"runs on cuda, not on cpu; takes bfloat16, float16, not float32"}
    timed = [row for row in rows if row["name"] != "flash4"]
    assert all(row["values"]["ms"] > 0 and max(row["errors"].values()) < 1e-4 for row in timed)
    for row in timed:
        case, values = row["case"], row["values"]
        if row["name"] == "sdpa_cpu":
            pairs = 4 * (case["N"] * (case["N"] + 1) // 2 if case["causal"] else case["N"] ** 2)
            flops = {"forward": 4, "backward": 10, "both": 14}[case["pass"]] * pairs * 32
            assert values["tflops"] == pytest.approx(flops / values["ms"] / 1e9, rel=1e-3)
            assert values["tokens_per_s"] == pytest.approx(1000 * case["N"] / values["ms"], rel=1e-3)
    # another case is new, the lengths are not measured again
    assert main([*command, "--cases", "length", "cpu-16384", "--passes", "forward"]) == 0
    second = json.loads((tmp_path / "speed.json").read_text())["groups"]
    assert {label: second[label] for label in first} == first and len(second) == 4
    assert main([*command, "--longest", "0.5"]) == 1
    assert "made with other settings: longest 1.0 there, 0.5 here" in capsys.readouterr().err


def test_a_smoke_run_of_named_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["module-512-x2", "gigapath-5308", "option-documents", "option-float32", "option-query*", "chosen-131072"]
    command = ["bench", "speed", "--size", "small", "--output", str(tmp_path), "--seconds", "0.001", "--quiet", "--cases"]
    assert main([*command, *names, "--backends", "flash4", "--passes", "forward", "both", "--longest", "60"]) == 0
    rows = [row for group in json.loads((tmp_path / "speed.json").read_text())["groups"].values() for row in group]
    assert not [row for row in rows if row.get("note", "").startswith("wrong")]
    cannot = {row["name"] for row in rows if row.get("note")}
    assert cannot <= {"torch cudnn", "torch flash", "torch efficient", "fa4", "ours flash4", "attention flash4"}
    assert {"ours flash4", "fa4", "torch cudnn"} <= cannot
    measured = {(row["case"]["family"], row["name"]): row for row in rows if row.get("values")}
    for name in ("ours", "equal", "floor"):
        assert measured["gigapath", name]["values"]["ms"] > 0
    assert measured["gigapath", "floor"]["values"].keys().isdisjoint({"called"}) and "errors" not in measured["gigapath", "floor"]
    for (_, name), row in measured.items():
        if name not in ("floor", "choice"):
            assert all(row["values"][way] > 0 for way in ("called", "host")), name
            assert {"out", "dq", "dk", "dv"} <= set(row["errors"]) and "dx" not in row["errors"], name
    assert {("chosen", "choice"), ("chosen", "blocks")} <= set(measured) and ("option-documents", "single calls") in measured
    table = capsys.readouterr().out.split("forward, option\n")[1].split("Batch")[0]
    assert all(f"ours, {option} " in table for option in ("documents", "float32", "query-offset"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cases", "gigapath"], "there is no case 'gigapath'; expected FAMILY-LENGTH"),
        (["--cases", "apex-512"], "FAMILY one of gigapath"),
        (["--contenders", "apex*"], "--contenders apex*: there is none"),
        (["--torchscale", "no/such/folder"], "there is no torchscale/component/dilated_attention.py"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "speed", "--output", str(tmp_path), *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_names_say_length_mask_batch_and_head_dim(capsys: pytest.CaptureFixture[str]) -> None:
    def made(name: str, full: bool = True) -> Problem:
        return cases.make_case(name, CPU, torch.bfloat16, full=full).problem

    assert (made("longnet-4096").num_positions, made("longnet-4096").is_causal) == (4096, True)
    wide = made("longnet128-8192-full-x8-d96")
    assert (wide.num_heads, wide.head_dim, wide.batch_size, wide.is_causal) == (16, 96, 8, False)
    assert made("gigapath-5308").branches[0][1] == 5792 and made("gigapath-5308", full=False).branches[0][1] == 90
    assert made("option-padding-suffix").padding == ("suffix", 0.1) and made("option-dropout-512").num_positions == 512
    assert made("option-float32").dtype is torch.float32 and made("option-grouped").kv_heads == 4
    assert len(made("option-documents").bounds or ()) == 65 and made("option-query-offset").queries == 4096
    names = {contender for name in cases.NAMES for contender in cases.make_case(name, CPU, torch.float32).contenders}
    assert names - {"torchscale"} <= set(CONTENDERS)
    with pytest.raises(SystemExit):
        main(["bench", "speed", "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(cases.NAMES) and listed[0] == ("gigapath-5308: ours, equal, torchscale, floor, torch cudnn, torch flash, fa4")
    assert len(cases.names_of(["gigapath-*", "longnet-9"])) == 5


def test_the_floor_is_the_branches_flops_as_dense_problems() -> None:
    problem = cases.make_case("cpu-16384", CPU, torch.float32, full=False).problem
    floor = competitors.floor().make(problem)
    calls, factor = floor.calls, floor.factor
    out, _ = calls["forward"]()
    # w / r is 16 in all branches, and a branch of rate r has 256 / (16 r) of them for each head
    assert out.shape == (16 + 8 + 4 + 2, 16, 8, 64) and factor == 1.0
    assert set(calls) == {"forward", "backward", "both"}


def test_a_call_is_seen_in_several_ways() -> None:
    found = call_figures(lambda: time.sleep(0.002), CPU, seconds=0.02, ways=("called", "host", "kernels", "graph"))
    assert set(found) == {"called", "host"} and all(2 <= ms < 1000 for ms in found.values())


# TorchScale's modules: its own results to the first shifted position, another function's after it
TORCHSCALE = """
import torch
from dilated_attention import dilated_attention
from fairscale.nn import wrap


class DilatedAttention:
    def __init__(self, args, embed_dim, num_heads, self_attention):
        self.segments, self.rates = args.segment_length, args.dilated_ratio

    def gathering(self, x, rate, length, is_kv, seq_parall, is_causal):
        return x

    def attention_ops(self, q, k, v, is_causal):
        return q, (k, v)

    def scattering(self, outs, lses, length, batch):
        options = {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": "detached"}
        out = dilated_attention(outs[0], *lses[0], self.segments, self.rates, **options)
        return torch.cat((out[:, :16], 2 * out[:, 16:]), 1) if length > 16 else out
"""


def test_torchscale_is_called_as_it_is_and_checked_before_its_shift(tmp_path: Path) -> None:
    component = tmp_path / copies.TORCHSCALE.parent
    component.mkdir(parents=True)
    for file, text in {"../__init__.py": "", "__init__.py": "", "multihead_attention.py": "", "dilated_attention.py": TORCHSCALE}.items():
        (component / file).write_text(text)
    longnet = DilatedPattern((2048, 16384, 32768), (1, 6, 12))
    assert competitors.shifted_from(longnet, 2**20) == 16384
    # one segment a branch has nothing after it
    assert competitors.shifted_from(longnet, 16384) is None
    assert competitors.shifted_from(DilatedPattern((1024, 185_363), (1, 8)), 200_000) == 185_363
    contender = competitors.torchscale(str(tmp_path), "math")
    shifted = Problem(num_positions=48, num_heads=6, head_dim=4, given_branches=((8, 16, 64), (1, 3, 4)))
    (row,) = measure([contender], shifted, passes=("both",), seconds=0.001)
    # dk and dv of an earlier key come from rows that are another function's
    assert not row.note and row.values["ms"] > 0 and set(row.errors) == {"out", "dq"}
    (row,) = measure([contender], replace(shifted, given_branches=((8, 64), (1, 4))), passes=("both",), seconds=0.001)
    assert row.note.startswith("wrong: out off by")
    assert equal_pattern(shifted).tail == "zero_keys"


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_stands_in_for_flash_attn_returns_lse_and_gradients(is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 9, 3, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4))
    out, lse = copies.flash_attn_func("math", q, k, v, 0.0, None, None, is_causal)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    true = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, true)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert not lse.requires_grad
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(true, (q, k, v), dout))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_multiplicity_that_flex_is_given_is_the_patterns(is_causal: bool) -> None:
    pattern = DilatedPattern([8, 12, 40], [1, 3, 4])
    count = competitors.multiplicity(pattern, 6, is_causal, "cpu")
    h, i, j = torch.arange(6)[:, None, None], torch.arange(40)[:, None], torch.arange(40)
    assert torch.equal(count(h, i, j).long(), pattern.dense_mask(40, 40, 6, is_causal=is_causal))


def test_every_public_module_of_one_process_is_compared() -> None:
    # rings compute the same; the suite scaling measures them
    classes = {kind.__name__ for kind in KINDS.values() if not kind.__name__.startswith("Ring")}
    assert classes <= {name.split(" ")[0] for name in CONTENDERS}
    assert {"nn.MultiheadAttention", "torch sdpa", "attention"} <= set(CONTENDERS)


def test_what_takes_too_long_is_left_out() -> None:
    def slow(problem: Problem) -> Any:
        right = STANDARD.make(problem)

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return right(*qkv)

        return attend

    # by its FLOPs: nothing of it runs
    long = Problem(num_positions=2**20, num_heads=1, head_dim=64, is_causal=True)
    (row,) = measure([CONTENDERS["torch sdpa"]], long, seconds=0.001, longest=0.9)
    assert row.note == "longer than 0.9 s a call" and not row.values and "pass" not in row.case
    # by its forward
    contender = Contender(name="slow", what="", make=slow, pattern=dense_pattern)
    problem = Problem(num_positions=64, num_heads=1, head_dim=8)
    rows = measure([contender], problem, passes=("forward", "backward"), seconds=0.001, longest=0.2)
    assert [(row.case["pass"], row.note) for row in rows] == [("forward", ""), ("backward", "longer than 0.2 s a call")]
    dilated = next(contender for contender in MODULES if contender.name == "DilatedAttention")
    (row,) = measure([dilated], problem, passes=("forward",), seconds=0.001, longest=1e3)
    assert row.values["ms"] > 0 and not row.note


def test_a_kernel_that_raises_has_a_note_and_the_others_their_figures() -> None:
    def broken(problem: Problem) -> Any:
        def attend(*_: torch.Tensor) -> torch.Tensor:
            raise AssertionError("head_dim 16 is odd\nsecond line")

        return attend

    problem = Problem(num_positions=64, num_heads=2, head_dim=16)
    rows = measure([Contender(name="broken", what="", make=broken, pattern=dense_pattern), STANDARD], problem, seconds=0.001)
    assert rows[0].note == "raised AssertionError: head_dim 16 is odd"
    assert all(row.values for row in rows[1:]) and len(rows) == 4

    def no_gradient(problem: Problem) -> Any:
        attend = STANDARD.make(problem)

        def forward_only(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return attend(q, k, v)

        return forward_only

    rows = measure([Contender(name="half", what="", make=no_gradient, pattern=dense_pattern)], problem, seconds=0.001)
    assert [(row.case["pass"], row.note, bool(row.values)) for row in rows] == [
        ("forward", "", True), ("backward", "out of memory", False), ("both", "out of memory", False)]  # fmt: skip

    def dead(problem: Problem) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure([Contender(name="dead", what="", make=dead, pattern=dense_pattern)], problem, seconds=0.001)


def test_the_defaults_are_the_published_ones() -> None:
    suite = Speed()
    given = options(dtypes=["float16", "bfloat16"])
    session = Session(device=CPU, full=True, dtypes=(torch.float16, torch.bfloat16), seconds=0.2, options=given)
    problems = [case.problem for case in suite.cases(session) if case.family == "length" and not case.problem.is_causal]
    assert [p.num_positions for p in problems] == [2**i for i in range(9, 21)] * 2
    assert {(p.batch_size, p.num_heads, p.head_dim) for p in problems if p.num_positions <= 8192} == {(8, 32, 64)}
    assert {p.dtype for p in problems} == {torch.float16, torch.bfloat16}
    labels = [group.label for group in suite.groups(session)]
    assert len(labels) == len(set(labels)) == 2 * (12 + 6)
    assert set(RATES) <= {contender.name for contender in DENSE} and len(ALL) == 21


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "given",
    [
        # each backend, dtype and mask is compiled anew: few of them
        ["speed", "--lengths", "512", "1k", "--masks", "causal", "--cases", "length"],
        ["speed", "--cases", "gigapath-5308", "option-*", "blocks10-32768", "--ways", "called", "host", "kernels", "graph"],
        ["accuracy", "--backends", "auto", "sdpa_cudnn", "triton", "math", "--masks", "causal", "--lengths", "64", "256"],
    ],
    ids=lambda given: f"{given[0]}, {given[-1]}",
)
def test_suites_run_on_a_gpu(given: list[str], tmp_path: Path) -> None:
    suite = given[0]
    assert main(["bench", *given, "--output", str(tmp_path), "--size", "small", "--seconds", "0.01", "--quiet"]) == 0
    rows = [Row.from_dict(row) for group in json.loads((tmp_path / f"{suite}.json").read_text())["groups"].values() for row in group]
    # FlashAttention-4 called as its users do has wrong gradients at GigaPath's head dim of 48, which this library refuses
    assert not [row for row in rows if row.note.startswith("wrong") and (row.name, row.case["D"]) != ("fa4", 48)]
    assert sum(bool(row.values) for row in rows) > 8
