"""Biases by formula on a GPU: this project's kernels against float64, and memory in proportion to N."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import dilated_attention as da
from dilated_attention.pattern import BigBird
from dilated_attention.testing import Case, Space, measure, random_case

pytestmark = pytest.mark.gpu

KINDS = ("alibi", "line", "plane")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 48), (torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)]
)  # fmt: skip
def test_random_cases_match_float64(dtype: torch.dtype, head_dim: int, kind: str) -> None:
    """With 128, where Hopper's kernels would be taken without a bias, too."""
    space = Space(head_dims=(head_dim,), max_length=500, heads_per_kv=(1, 2), layouts=("contiguous", "packed"))
    for seed in range(12):
        case = replace(random_case(4000 + seed, space), bias=kind)
        assert not [result for result in measure(case, "tiles", dtype, "cuda") if not result.passes], case


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_blocks_match_float64(kind: str) -> None:
    for offset, causal in ((0, False), (130, True)):
        case = Case(
            pattern=BigBird(100, 64, 1), batch=2, num_queries=600 - offset, num_keys=600, query_offset=offset, heads=4, kv_heads=2,
            head_dim=64, is_causal=causal, lse_grad=True, bias=kind,
        )  # fmt: skip
        assert not [result for result in measure(case, "math", torch.bfloat16, "cuda") if not result.passes], case


@pytest.mark.alone
@pytest.mark.no_poison
@pytest.mark.parametrize("is_dilated", [False, True])
def test_twenty_thousand_positions_take_less_than_a_gibibyte(is_dilated: bool) -> None:
    """Forward and backward of 12 heads of 64, as a slide encoder has them: all N² numbers of one head would take 1.6 GB."""
    n, heads = 20_000, 12
    q, k, v = (torch.randn(1, n, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    slopes = torch.nn.Parameter(2.0 ** -torch.arange(1.0, heads + 1, device="cuda"))
    bias = da.Distance(torch.randint(0, 200, (n, 2), device="cuda"), slopes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = da.dilated_attention(q, k, v, [1024, 4096, n], [1, 2, 4], bias=bias) if is_dilated else da.attention(q, k, v, bias=bias)
    out.backward(torch.randn_like(out))
    assert torch.cuda.max_memory_allocated() < 2**30
    assert slopes.grad is not None and bool(slopes.grad.isfinite().all()) and bool(slopes.grad.any())
