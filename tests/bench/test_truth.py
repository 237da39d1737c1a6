"""The float64 results that decide who gets a figure: whole and sampled rows, under every option, are the definition's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention.backends import Dropout
from dilated_attention.bench.accuracy import SEED, Truth, sampled_errors, wrong
from dilated_attention.bench.workloads.contenders import STANDARD, dense_pattern
from dilated_attention.bench.workloads.problem import BOUNDS, Problem
from dilated_attention.engine.reference import reference_attention
from dilated_attention.pattern import BigBird, DilatedPattern, LocalWindow, RandomBlocks
from dilated_attention.testing.oracle import keep_mask

PATTERN = DilatedPattern((7, 16, 40), (1, 3, 4))
BLOCKED = DilatedPattern((7, 16, 40), (1, 3, 4), "blocked", tail="zero_keys")
DENSE = DilatedPattern((37,), (1,), "zero")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "detached": {"pattern": BLOCKED, "mixture_grad": "detached"},
    "detached causal": {"pattern": BLOCKED, "mixture_grad": "detached", "is_causal": True},
    "zero keys": {"pattern": BLOCKED, "batch_size": 2},
    "suffix": {"padding": ("suffix", 0.3), "batch_size": 2},
    "random": {"padding": ("random", 0.3), "pattern": DENSE},
    "dropout": {"dropout_p": 0.2, "batch_size": 2},
    "documents": {"bounds": (0, 11, 12, 37), "pattern": BLOCKED},
    "dense documents": {"bounds": (0, 11, 37), "pattern": DENSE, "is_causal": True},
    "window": {"window": (5, 0), "pattern": DENSE, "is_causal": True},
    "both sides": {"window": (5, 2), "pattern": DENSE},
    "rectangle": {"queries": 9, "is_causal": True},
    "grouped": {"num_kv_heads": 2, "is_causal": True},
}


def make(options: dict[str, Any]) -> tuple[Problem, DilatedPattern, str]:
    options = dict(options)
    pattern, mixture = options.pop("pattern", PATTERN), options.pop("mixture_grad", "exact")
    return Problem(num_positions=37, num_heads=6, head_dim=4, dtype=torch.float64, **options), pattern, mixture


def true_results(problem: Problem, pattern: DilatedPattern, mixture: str) -> list[torch.Tensor]:
    """out, dq, dk, dv by the definition."""
    leaves, keep = problem.qkv(7), None
    if problem.dropout_p:
        torch.manual_seed(SEED)
        number = int(torch.randint(2**62, (), dtype=torch.int64))
        keys = torch.arange(problem.num_positions).repeat(problem.batch_size, 1)
        batch, heads = torch.arange(problem.batch_size), torch.arange(problem.num_heads)
        keep = keep_mask(Dropout(problem.dropout_p, number, batch, heads, keys, keys), slice(None))
    out, _ = reference_attention(
        *leaves,
        pattern,
        is_causal=problem.is_causal,
        query_offset=problem.offset,
        window=problem.window,
        cu_seqlens=problem.arguments.get("cu_seqlens"),
        key_padding_mask=problem.key_padding_mask,
        mixture_grad=mixture,
        keep=keep,
        dropout_p=problem.dropout_p,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.dout(101))]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_definition_whole_and_sampled(name: str, whole: bool) -> None:
    problem, pattern, mixture = make(OPTIONS[name])
    found = Truth(problem, pattern, mixture, whole=whole)
    out, *grads = true_results(problem, pattern, mixture)
    errors = found.errors(out, grads)
    assert set(errors) == {"out", "dq", "dk", "dv"}
    assert wrong(errors, BOUNDS[torch.float64]) == ""
    # each result is looked at, in either way
    for i, which in enumerate(errors):
        spoilt = [x.clone() for x in (out, *grads)]
        spoilt[i] *= 1.001
        errors = found.errors(spoilt[0], spoilt[1:])
        assert errors[which] == pytest.approx(0.001, rel=1e-3)
        assert wrong(errors, BOUNDS[torch.float64]).startswith(f"wrong: {which} off by 1.0e-03")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        RandomBlocks(0.5, per_head=True, own_block=True, block_size=64),
        BigBird(16, 8, random_blocks=1, block_size=64),
        LocalWindow((20, 3), block_size=64),
    ],
)
def test_blocks_are_the_masks_pairs(pattern: Any, is_causal: bool) -> None:
    problem = Problem(num_positions=200, num_heads=3, head_dim=4, dtype=torch.float64, is_causal=is_causal)
    leaves, dout = problem.qkv(7), problem.dout(101)
    mask = pattern.dense_mask(200, 200, 3).bool()
    mask = mask.tril() if is_causal else mask
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, dout)
    for whole in (True, False):
        errors = Truth(problem, pattern, whole=whole).errors(out, grads)
        assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-12


def test_rows_after_the_first_that_is_another_functions_do_not_count() -> None:
    problem, pattern, mixture = make({})
    out, *grads = true_results(problem, pattern, mixture)
    out[:, 20:] = math.nan
    found = Truth(problem, pattern)
    assert wrong(found.errors(out, grads), 1e-3).startswith("wrong: out off by nan")
    errors = found.errors(out, grads, until=20)
    assert set(errors) == {"out", "dq"} and max(errors.values()) < 1e-12


@pytest.mark.parametrize(("left", "right", "is_causal"), [(5, 0, True), (5, 2, False), (None, 1, False)])
def test_pairs_of_a_window_are_counted(left: int | None, right: int, is_causal: bool) -> None:
    problem = replace(make({})[0], window=(left, right), is_causal=is_causal, batch_size=2)
    expected = sum(1 for i in range(37) for j in range(37) if j >= i - (37 if left is None else left) and j <= i + right)
    assert problem.pairs(DENSE) == 2 * 6 * expected


def whole_errors(attend: Any, pattern: Any, problem: Problem) -> dict[str, float]:
    truth = Truth(problem, pattern, whole=True)
    out = attend(*truth.leaves)
    return truth.errors(out, torch.autograd.grad(out, truth.leaves, truth.dout))


def test_sampled_and_whole_errors_see_a_shifted_row() -> None:
    problem = Problem(num_positions=96, num_heads=2, head_dim=16)
    right, leaves, pattern = STANDARD.make(problem), problem.qkv(), dense_pattern(problem)
    out = right(*leaves).detach()
    lse = (torch.einsum("bihd,bjhd->bhij", *leaves[:2]) / 4).logsumexp(-1)
    assert sampled_errors(pattern, problem, leaves, [out, lse])["out"] < 1e-6
    assert sampled_errors(pattern, problem, leaves, [out.roll(1, 1), lse])["out"] > 0.1
    assert math.isnan(sampled_errors(pattern, problem, leaves, [out, lse.masked_fill(lse > 0, math.nan)])["lse"])
    assert max(whole_errors(right, pattern, problem).values()) < 1e-5
    # rows without keys are 0 and have no gradient, here and there
    gaps = DilatedPattern((96,), (4,), "zero")
    from dilated_attention import dilated_attention

    errors = whole_errors(lambda q, k, v: dilated_attention(q, k, v, (96,), (4,), head_offsets="zero"), gaps, problem)
    assert max(errors.values()) < 1e-5
