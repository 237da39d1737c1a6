"""Attention maps and received attention on a GPU, against float64 on the CPU, and their memory at a million positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention.functional import attention_map, attention_received
from dilated_attention.pattern import TopBlocks
from dilated_attention.testing import Space, inputs, random_case
from tests.functional.test_attention_map import mapped
from tests.helpers.forms import static

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
USUAL = Space(window=False, dropout=False, lse_grad=False, max_length=700, head_dims=(64,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [False, True], ids=["branches", "blocks"])
def test_any_case(blocks: bool, dtype: torch.dtype) -> None:
    for seed in range(16):
        # sinks of an even seed are float32
        case = static(replace(random_case(seed, replace(USUAL, blocks=blocks)), mixture_grad="exact"))
        if blocks and seed == 0:
            case = replace(case, pattern=TopBlocks(8), padding="none", bounds=None)
        x, exact = inputs(case, dtype, DEVICE), inputs(case, dtype)
        exact = replace(exact, q=exact.q.double(), k=exact.k.double(), sinks=None if exact.sinks is None else exact.sinks.double())
        (tensors, options), (wide, of_wide) = mapped(case, x), mapped(case, exact)
        rows = [case.num_queries - 1, 0, case.num_queries // 2] if case.num_queries else []
        got = attention_map(**tensors, query_rows=rows, **options)
        assert got.dtype is torch.float32 and got.device.type == DEVICE
        torch.testing.assert_close(got.double().cpu(), attention_map(**wide, query_rows=rows, **of_wide), rtol=1e-4, atol=1e-6)
        expected = attention_received(**wide, **of_wide)
        torch.testing.assert_close(attention_received(**tensors, **options).double().cpu(), expected, rtol=1e-4, atol=1e-4)
        if dtype is torch.bfloat16:
            native = attention_received(**tensors, dtype=dtype, **options)
            torch.testing.assert_close(native.double().cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.xdist_group("large")
def test_a_million_positions_need_memory_for_the_result_and_a_chunk() -> None:
    length = 2**20
    q, k = (torch.randn(1, length, 16, 48, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    options: dict[str, Any] = {"head_offsets": "blocked", "tail": "zero_keys"}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = attention_map(q, k, *GIGAPATH, query_rows="cls", **options)
    assert weights.shape == (1, 16, 1, length)
    assert torch.cuda.max_memory_allocated() - before <= weights.numel() * 4 + 2**30
    # heads ≥ 1 of the last branch do not take position 0, but the first branch's do
    assert bool((weights.sum(-1) <= 1 + 1e-4).all())
    heat = attention_received(q, k, *GIGAPATH, average_heads=True, dtype=torch.bfloat16, **options)
    assert heat.shape == (1, length)
    assert 0 < float(heat.sum()) <= length * 1.01
