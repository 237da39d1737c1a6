"""benchmarks/versus.py without its competitors: what it refuses, and the helpers that decide what its figures mean."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.engine.reference import reference_attention

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "versus.py"), *arguments]
    # a GPU would only make a mistake of this test slow
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


def normal(*shape: int, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "needs --torchscale PATH"),
        (["--torchscale", "no/such/folder"], "there is no torchscale/component/dilated_attention.py"),
        (["--against", "torchscale", "dense"], "git clone https://github.com/microsoft/torchscale"),
        (["--against", "dense", "--cases", "gigapath", "--masks", "causal"], "chooses nothing"),
        (["--against", "apex"], "invalid choice"),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_what_to_do(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert text in result.stderr
    assert result.stdout == ""


def test_without_a_gpu_it_exits_with_1() -> None:
    result = run("--against", "dense", "--cases", "longvit")
    assert result.returncode == 1
    assert "no CUDA GPU" in result.stderr


def test_list_needs_neither_a_gpu_nor_torchscale() -> None:
    result = run("--list", "--cases", "gigapath 10001", "longvit")
    assert result.returncode == 0
    assert [row.split()[:2] for row in result.stdout.splitlines()] == [["gigapath", "10001"], ["longvit", "1048576"]]


@pytest.mark.parametrize("module", ["_competitors"], indirect=True)
def test_torchscale_shifts_what_follows_a_segment_that_the_rate_does_not_divide(module: ModuleType) -> None:
    longnet = DilatedPattern([2048, 16384, 32768], [1, 6, 12])
    assert module.shifted_from(longnet, 2**20) == 16384
    # one segment a branch has nothing after it
    assert module.shifted_from(longnet, 16384) is None
    assert module.shifted_from(DilatedPattern([1024, 5792], [1, 2]), 45_681) is None
    assert module.shifted_from(DilatedPattern([1024, 185_363], [1, 8]), 200_000) == 185_363


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("module", ["_competitors"], indirect=True)
def test_detached_rows_are_those_of_the_reference(module: ModuleType, is_causal: bool) -> None:
    pattern = DilatedPattern([7, 16, 40], [1, 3, 4], "blocked", tail="zero_keys")
    q, k, v, dout = normal(1, 37, 6, 4)
    true, _ = reference_attention(q, k, v, pattern, is_causal=is_causal, mixture_grad="detached")
    (dq,) = torch.autograd.grad(true, q, dout)
    rows = [(position, head) for position in range(37) for head in range(6)]
    with torch.no_grad():
        found_out, found_dq = module.detached_rows(pattern, (dout, q, k, v), rows, is_causal=is_causal)
    torch.testing.assert_close(found_out, true[0].flatten(0, 1))
    torch.testing.assert_close(found_dq, dq[0].flatten(0, 1))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("module", ["_competitors"], indirect=True)
def test_what_stands_in_for_flash_attn_returns_lse_and_gradients(module: ModuleType, is_causal: bool) -> None:
    q, k, v, dout = normal(2, 9, 3, 4)
    out, lse = module.flash_attn_func("math", q, k, v, 0.0, None, None, is_causal)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    true = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, true)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert not lse.requires_grad
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(true, (q, k, v), dout))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("module", ["_competitors"], indirect=True)
def test_the_multiplicity_that_flex_is_given_is_the_patterns(module: ModuleType, is_causal: bool) -> None:
    pattern = DilatedPattern([8, 12, 40], [1, 3, 4])
    count = module.multiplicity(pattern, 6, is_causal, "cpu")
    h, i, j = torch.arange(6)[:, None, None], torch.arange(40)[:, None], torch.arange(40)
    assert torch.equal(count(h, i, j).long(), pattern.dense_mask(40, 40, 6, is_causal=is_causal))


@pytest.mark.parametrize("module", ["_cases"], indirect=True)
def test_ratios_are_competitor_over_ours_and_what_is_short_is_marked(module: ModuleType) -> None:
    case = module.Case("small", 2, 8, 64, (16, 64), (1, 2), False, {"forward": 3.0, "training": 3.0, "dense share": 0.85})
    assert case.dense_pairs == 2 * 64 * 64
    assert case.pairs == 2 * (64 * 16 + 32 * 32)
    results = {
        "ours": {"forward_ms": 1.0, "training_ms": 4.0, "training_peak": 2**30},
        "torchscale": {"forward_ms": 2.5, "training_ms": 13.0, "training_peak": 3 * 2**30},
        "flash4": {"forward_ms": 1.8},
        # a wrong result has no speed, however fast
        "sdpa_cudnn": {"forward_ms": 0.1, "wrong": True},
    }
    ratios = module.ratios(case, results)
    assert ratios == {"forward": 2.5, "training": 3.25, "memory": 3.0, "dense": 1.8, "dense share": pytest.approx(0.9)}
    text = module.line(case, results)
    assert "forward 2.50x (goal 3 !)" in text
    assert "training 3.25x (goal 3)" in text
    assert "sdpa_cudnn WRONG" in text
    assert "\n" not in text
