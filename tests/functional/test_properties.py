"""What no random case has: empty batches, runs that repeat, masks of any layout, numbers at the ends of what there is and of any type.

Rows and keys without a partner, inputs of any layout: tests/engine/test_oracle.py; what must not leak: tests/backends/test_nonfinite.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dilated_attention as da
from dilated_attention import DilatedPattern, attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import LocalWindow, Sparsity
from dilated_attention.testing import (
    Case,
    Space,
    call,
    inputs,
    measure,
    random_case,
    results,
)
from tests.helpers.forms import cpu_backends


@pytest.fixture(params=cpu_backends())
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- extremes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 7, 7), (2, 0, 0), (2, 0, 7), (0, 0, 0), (1, 1, 7)])
def test_empty_shapes(backend: str, batch: int, queries: int, keys: int) -> None:
    """Gradients of nothing, too, are zeros of the right shape. Other short sequences: tests/engine/test_oracle.py."""
    for pattern in (DilatedPattern((4, 8), (1, 2)), LocalWindow(3)):
        case = Case(pattern=pattern, batch=batch, num_queries=queries, num_keys=keys, heads=4, kv_heads=2)
        assert all(result.passes for result in measure(case, backend, torch.float32))


@pytest.mark.parametrize("reach", [1e2, 1e4, 1e6])
def test_weights_sum_to_one_however_large_the_scores_are(backend: str, reach: float) -> None:
    """Of an lse of 1e4 float32 holds few digits. Near ties make the weights more than one 1."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 64, 2, 8, generator=generator) * reach**0.5 for _ in range(2))
    k[:, 1::2], v = k[:, ::2], torch.ones_like(k)
    for is_causal in (False, True):
        found = (
            attention(q, k, v, is_causal=is_causal, backend=backend),
            dilated_attention(q, k, v, [16, 64], [1, 2], is_causal=is_causal, backend=backend),
            block_sparse_attention(q, k, v, LocalWindow(20), is_causal=is_causal, backend=backend),
        )
        for out in found:
            torch.testing.assert_close(out, v, rtol=0, atol=2e-6)
    torch.testing.assert_close(da.decode_attention(q[:, -1:], k, v, torch.tensor([63, 0])), v[:, -1:], rtol=0, atol=2e-6)


# --- determinism and layouts -------------------------------------------------------------------------------------------------------

USUAL = Case(pattern=DilatedPattern((6, 20), (2, 3)), batch=3, num_queries=50, num_keys=50, heads=4, kv_heads=2, lse_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeats_are_equal(backend: str, dtype: torch.dtype, two_threads: None) -> None:
    """By the option, and by torch's own switch, whose filling of fresh memory changes nothing."""
    case = replace(USUAL, is_causal=True, padding="some")
    x = inputs(case, dtype)
    first = results(call, case, x, backend=backend, deterministic=True)
    for _ in range(20):
        again = results(call, case, x, backend=backend, deterministic=True)
        assert all(torch.equal(again[name], first[name]) for name in first)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(call, case, x, backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[name], first[name]) for name in first)


def test_masks_of_any_layout(backend: str) -> None:
    """A mask transposed, expanded over the batch, or cut out of a larger one is read as what it says."""
    x, flags = inputs(USUAL, torch.float32), torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) < 0.4
    wide = torch.ones(3, 120, dtype=torch.bool)
    wide[:, 5:105:2] = flags
    for mask in (flags.t().contiguous().t(), wide[:, 5:105:2], flags[:1].expand(3, 50), flags[:, :1].expand(3, 50)):
        found, truth = (results(call, USUAL, replace(x, key_padding_mask=m), backend=backend) for m in (mask, mask.contiguous().clone()))
        assert all(torch.equal(found[name], truth[name]) for name in truth)


# --- numbers ------------------------------------------------------------------------------------------------------------------------


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
    assert torch.equal(*(attention(q, q, q, softcap=cap) for cap in (2**70, 2.0**70)))


@pytest.mark.parametrize("cap", [1.2e-38, 1e-30, 1, np.float64(50), 2.0**70, 1e31])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_softcap_at_the_ends_of_numbers_is_computed_right(blocks: bool, cap: float) -> None:
    for seed in range(10):
        case = replace(random_case(seed, Space(blocks=blocks, max_length=150 if blocks else 70)), softcap=cap)
        assert all(result.passes for result in measure(case, "auto", torch.float32)), case


def test_lengths_of_xpos_have_no_end_where_its_scale_has_none() -> None:
    layer = da.MultiheadDilatedAttention(16, 2, [16], [2], rotary=True, xpos_scale_base=1e308)
    assert bool(layer(torch.randn(1, 16, 16), is_causal=True)[0].isfinite().all())
