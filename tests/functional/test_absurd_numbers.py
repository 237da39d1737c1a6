"""Numbers at the ends of what there is, and of types that are numbers, too: answered right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dilated_attention as da
from dilated_attention import DilatedPattern, attention, block_sparse_attention, dilated_attention
from dilated_attention.models import Sampling
from dilated_attention.pattern import LocalWindow, Sparsity


@pytest.mark.parametrize("huge", [2**63, 10**24, 10**400], ids=["2**63", "10**24", "10**400"])
def test_a_window_beyond_the_sequence_is_unbounded(huge: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 24, 2, 8)
    assert torch.equal(attention(q, q, q, window=huge), attention(q, q, q))
    assert torch.equal(attention(q, q, q, window=(huge, 2)), attention(q, q, q, window=(None, 2)))
    assert LocalWindow(huge) == LocalWindow((None, None))
    assert torch.equal(block_sparse_attention(q, q, q, LocalWindow(huge)), block_sparse_attention(q, q, q, LocalWindow(24)))


def test_numbers_of_any_kind_are_taken() -> None:
    """What is an integer is not refused for its type: numpy's, torch's, a range."""
    for lengths in (np.array([4, 8]), torch.tensor([4, 8]), (np.int32(4), np.int64(8)), range(4, 9, 4), [torch.tensor(4), 8]):
        assert DilatedPattern(lengths, [1, 2]) == DilatedPattern([4, 8], [1, 2])
    q, documents = torch.randn(1, 300, 2, 8), torch.tensor([0, 3, 300])
    for scale in (1, 0.5, np.float64(0.5)):
        options: dict[str, Any] = {"scale": scale, "cu_seqlens": documents, "query_offset": np.int64(0)}
        assert dilated_attention(q, q, q, np.array([4, 8]), torch.tensor([1, 2]), **options).shape == q.shape
    drawn = [block_sparse_attention(q, q, q, Sparsity(0.5, seed=seed)) for seed in (np.int64(3), 3)]
    assert torch.equal(*drawn)


WINDOW = LocalWindow(16)
BRANCHES: dict[str, Any] = {"segment_lengths": [16], "dilation_rates": [2]}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "attention": {},
    "dilated_attention": BRANCHES,
    "block_sparse_attention": {"pattern": WINDOW},
    "block_sparse_dilated_attention": BRANCHES | {"pattern": WINDOW},
    "ring_attention": {},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_softcap_at_the_ends_of_numbers_is_computed_right(name: str) -> None:
    def with_gradients(dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = [torch.randn(1, 64, 2, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]
        out = getattr(da, name)(*x, **ATTENTIONS[name], **options)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    for cap in (1.2e-38, 1e-30, 1, np.float64(50), 2**70, 1e31):
        for x, y in zip(*(with_gradients(dtype, softcap=cap) for dtype in (torch.float32, torch.float64)), strict=True):
            assert float((x - y).abs().max()) < 1e-5, cap
    # the quotient that kernels multiply q·k by
    with pytest.raises(ValueError, match="softcap is 1e-30 and scale is 1e"):
        with_gradients(torch.float32, softcap=1e-30, scale=1e10)


def test_sampling_at_its_limits_draws_by_its_definition() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, -torch.inf]])
    for options in ({"top_p": 1e-46}, {"top_p": 5e-324}, {"temperature": 1e-46}, {"temperature": -0.0}, {"temperature": 1e-3}):
        assert int(Sampling(**options).draw(logits)) == 1, options
    torch.manual_seed(0)
    flat = [int(Sampling(temperature=2**64, top_k=3).draw(logits)) for _ in range(100)]
    assert set(flat) == {0, 1, 2}


def test_lengths_of_xpos_have_no_end_where_its_scale_has_none() -> None:
    layer = da.MultiheadDilatedAttention(16, 2, [16], [2], rotary=True, xpos_scale_base=1e308)
    assert bool(layer(torch.randn(1, 16, 16), is_causal=True)[0].isfinite().all())
