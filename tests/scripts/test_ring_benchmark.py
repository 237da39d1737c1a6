"""benchmarks/ring.py at tiny sizes on two gloo processes: that it measures, and that a wrong or failing competitor is told as such."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention
from dilated_attention import DilatedPattern
from dilated_attention.engine.reference import reference_attention
from tests.helpers.scripts import run_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--heads", "4/2", "--head-dim", "16", "--tokens", "32", "--check-tokens", "16", "--settings", "tiny", "--dilated-tokens", "32"]
TINY += ["--segment-unit", "8", "--accuracy-tokens", "64", "--accuracy-heads", "4/2", "--seconds", "0.01"]
TINY += ["--masks", "causal", "--exchange", "auto", "--kernels", "auto"]
# a package of ring-flash-attention's name: its zigzag forgets all other ranks, its ring raises
WRONG_PACKAGE = """
import torch
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from .adapters import substitute_hf_flash_attn


class Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse, _, _ = _flash_attn_forward(q, k, v, dropout_p=0, softmax_scale=q.shape[-1] ** -0.5, causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, dropout_p=0, softmax_scale=q.shape[-1] ** -0.5, causal=True)
        return tuple(grads)


def zigzag_ring_flash_attn_func(q, k, v, causal, group):
    return Local.apply(q, k, v)


def ring_flash_attn_func(q, k, v, causal, group):
    raise RuntimeError("no ring here")
"""


def launch(tmp_path: Path, *arguments: str, script: str = "ring.py") -> tuple[str, dict[str, dict[str, Any]]]:
    """(the output, which is rank 0's, the JSON lines by key) of two processes, started as torchrun would."""
    path = tmp_path / "ring.jsonl"
    options = ["--json", str(path), *(TINY if script == "ring.py" else []), *arguments]
    done = run_script(BENCHMARKS / script, *options, processes=2, timeout=120, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return done.stdout, {record["key"]: record for record in records if "key" in record}


def test_every_part_measures_and_a_wrong_competitor_has_no_speed(tmp_path: Path) -> None:
    package = tmp_path / "ring_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(WRONG_PACKAGE)
    text, found = launch(tmp_path, "--ring-flash-attention", str(tmp_path))
    for which in ("forward", "training"):
        for key in (f"dense-4/2-32-causal {which} | alone auto n", f"dilated-tiny-32-causal {which} | alone"):
            assert found[key]["seconds"] > 0
            assert found[key]["tflops"] > 0
            assert found[key]["torch"] == torch.__version__
    for key in ("check W=1 4/2x16 causal | alone auto #0", "accuracy-tiny W=1 4x8 causal | alone auto #0"):
        assert all(0 < error < 0.01 for error in found[key]["errors"].values())

    kernel = "sdpa_cpu"
    assert found[f"check W=2 4/2x16 causal | rfa zigzag ({kernel}) #0"]["errors"]["out"] > 0.1
    assert "no ring here" in found[f"check W=2 4/2x16 causal | rfa ring ({kernel}) #0"]["failed"]
    assert not any(key.startswith("dense") and "rfa" in key for key in found)
    assert "WRONG: out" in text
    assert "torch cp allgather unavailable: torch's context_parallel dispatches CUDA kernels only" in text

    for part, name in (("dense-4/2-32-causal training", "ring_attention"), ("dilated-tiny-32-causal training", "ring_dilated_attention")):
        if hasattr(dilated_attention, name):
            assert found[f"{part} | ours auto auto"]["seconds"] > 0
        else:
            assert "ours auto auto unavailable: this version of dilated_attention has no such function" in text


def test_a_spent_budget_starts_nothing_more(tmp_path: Path) -> None:
    text, found = launch(tmp_path, "--parts", "dense", "--budget", "0")
    assert "budget of 0 s used up" in text
    assert found == {}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", [None, ((4, 12), (2, 3))])
def test_its_float64_result_is_the_oracle_s(monkeypatch: pytest.MonkeyPatch, is_causal: bool, pattern: Any) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cases = importlib.import_module("_ring_cases")
    problem = cases.Problem(4, 2, 8, 12, is_causal, pattern)
    q, k, v, dout = cases.tensors(problem, torch.device("cpu"), torch.float64, seed=0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    true, _ = reference_attention(*leaves, DilatedPattern(*(pattern or ((12,), (1,)))), is_causal=is_causal)
    grads = torch.autograd.grad(true, leaves, dout)
    with torch.no_grad():
        for found, expected in zip(cases.reference(problem, [q, k, v, dout]), (true, *grads), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_work_is_counted_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cases = importlib.import_module("_ring_cases")
    problem = cases.Problem(4, 2, 8, 10, True)
    assert problem.flops("forward") == 4 * 55 * 4 * 8
    assert problem.flops("training") == 3.5 * problem.flops("forward")
    # one segment of rate 1 over everything is dense attention
    assert cases.Problem(4, 4, 8, 10, True, ((10,), (1,))).flops("forward") == problem.flops("forward")


def test_blocks_are_checked_and_measured_beside_one_process(tmp_path: Path) -> None:
    tiny = ["--patterns", "window", "random", "--density", "0.4", "--tokens", "256", "--check-tokens", "200", "--heads", "2/1"]
    text, found = launch(tmp_path, *tiny, "--head-dim", "8", "--dtype", "float32", "--seconds", "0.01", script="ring_blocks.py")
    for name in ("window", "random"):
        title = f"{name} balanced 0.4 2/1x8 n=256"
        for which in ("forward", "training"):
            assert all(found[f"{title} | {which} | {side}"]["tflops"] > 0 for side in ("alone", "ring"))
    assert "FAILED" not in text and text.count(" of alone") == 4
    # float32 errors against float64
    assert len(re.findall(r"out \d\.\d+e-0[78]  dq \d\.\d+e-0[78]  dk \d\.\d+e-0[78]  dv \d\.\d+e-0[78]", text)) == 2
