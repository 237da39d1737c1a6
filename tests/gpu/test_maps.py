"""Memory of attention maps and received attention at a million positions. That they are right: functional/test_attention_map.py."""

from typing import Any

import pytest
import torch

from dilated_attention.functional import attention_map, attention_received

pytestmark = pytest.mark.gpu

GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])


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
