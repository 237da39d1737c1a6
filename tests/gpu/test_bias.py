"""Biases by formula on a GPU take memory in proportion to N. What they compute: test_backends.py, test_blocks.py."""

import pytest
import torch

import dilated_attention as da

pytestmark = pytest.mark.gpu


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
