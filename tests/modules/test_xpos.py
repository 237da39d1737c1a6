"""XPOS in the modules: what its growing and shrinking factors need. What it computes: test_modules.py, integrations/test_torchscale.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import MultiheadDilatedAttention, RingMultiheadDilatedAttention, shard_sequence
from dilated_attention.modules.rotary import xpos_max_length
from tests.helpers.pool import pool_of

SHAPE: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "segment_lengths": [4, 8], "dilation_rates": [1, 2]}


def make_layer(kind: Any = MultiheadDilatedAttention, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(**{**SHAPE, "rotary": True, "xpos_scale_base": 6.0, "dtype": torch.float64, **settings})


def make_x(batch: int = 2, length: int = 14, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_longest_sequence_fits_its_dtype_and_longer_ones_are_refused(dtype: torch.dtype) -> None:
    base = 0.5
    longest = xpos_max_length(base, dtype)
    layer = make_layer(xpos_scale_base=base, dtype=dtype)
    for length in (longest, longest - 1):
        q = k = torch.full((1, length, 4, 8), 15.0, dtype=dtype)
        # the rotation may lengthen one component by √2
        q, k = (x / 2 for x in (q, k))
        assert all(bool(x.isfinite().all()) for x in layer.rotate(q, k, torch.arange(length), None))
    x = make_x(1, longest + 1).to(dtype)
    with pytest.raises(ValueError, match=rf"the sequence has {longest + 1} positions.*{dtype} beyond {longest}: use a larger"):
        layer(x)
    # packed, the documents count
    fits = torch.tensor([0, 4, longest + 1], dtype=torch.int32)
    assert bool(layer(x, cu_seqlens=fits, is_causal=True)[0].isfinite().all())
    with pytest.raises(ValueError, match=rf"a document has {longest + 1} positions.*beyond {longest}"):
        layer(x, cu_seqlens=torch.tensor([0, longest + 1], dtype=torch.int32))


def test_the_documented_limits_are_these() -> None:
    assert [xpos_max_length(512.0, dtype) for dtype in (torch.float16, torch.bfloat16)] == [6798, 70251]


def test_half_precision_factors_are_rounded_once() -> None:
    layer, x = make_layer(dtype=torch.bfloat16), make_x().bfloat16()
    q, k, _ = layer.project(x, x, x)
    wide = make_layer().rotate(q.double(), k.double(), torch.arange(14), None)
    for got, want in zip(layer.rotate(q, k, torch.arange(14), None), wide, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


def refused_by_the_whole_length(rank: int, world: int) -> None:
    (part,) = shard_sequence(dist.group.WORLD, [make_x()], [1])
    with pytest.raises(ValueError, match="the sequence has 14 positions"):
        make_layer(RingMultiheadDilatedAttention, xpos_scale_base=0.01)(part)


def test_all_processes_refuse_alike() -> None:
    """What they compute: tests/distributed/test_ring_modules.py."""
    pool_of(2).run(refused_by_the_whole_length)
