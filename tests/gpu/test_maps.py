"""Attention maps, received attention and XPOS on a GPU, against float64 on the CPU, and their memory at a million positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention import MultiheadDilatedAttention
from dilated_attention.functional import attention_map, attention_received
from dilated_attention.pattern import BigBird, BlockPattern, LocalWindow, PerHead, TopBlocks, with_sparsity

pytestmark = pytest.mark.gpu

N, H = 700, 4
BRANCHES = ([64, 300, 700], [1, 3, 4])
GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
DOCUMENTS = torch.tensor([0, 200, 201, N], dtype=torch.int32)
PADDING = torch.arange(N)[None] >= torch.tensor([[N], [333]])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "zero_keys": {"tail": "zero_keys", "head_offsets": "blocked"},
    "padding": {"key_padding_mask": PADDING},
    "documents": {"cu_seqlens": DOCUMENTS, "is_causal": True},
}
PATTERNS: dict[str, BlockPattern] = {
    "window": LocalWindow(70),
    "per_head": PerHead([LocalWindow(9)] * 3 + [BigBird(20, 5, 1)]),
    "density": with_sparsity(0.4, "random"),
    "chosen": TopBlocks(2),
}


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def to_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def compare(q: torch.Tensor, k: torch.Tensor, branches: tuple[Any, ...], options: dict[str, Any]) -> None:
    wide = q.double(), k.double()
    rows = [N - 1, 0, 350]
    got = attention_map(q.cuda(), k.cuda(), *branches, query_rows=rows, **to_gpu(options))
    assert got.dtype is torch.float32 and got.is_cuda
    torch.testing.assert_close(got.double().cpu(), attention_map(*wide, *branches, query_rows=rows, **options), rtol=1e-4, atol=1e-6)
    expected = attention_received(*wide, *branches, **options)
    received = attention_received(q.cuda(), k.cuda(), *branches, **to_gpu(options))
    torch.testing.assert_close(received.double().cpu(), expected, rtol=1e-4, atol=1e-4)
    if q.dtype is torch.bfloat16:
        native = attention_received(q.cuda(), k.cuda(), *branches, dtype=q.dtype, **to_gpu(options))
        torch.testing.assert_close(native.double().cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_dilated(case: str, dtype: torch.dtype) -> None:
    options = CASES[case]
    batch = 1 if "cu_seqlens" in options else 2
    compare(draw(batch, N, H, 64, seed=0, dtype=dtype), draw(batch, N, 2, 64, seed=1, dtype=dtype), BRANCHES, options)


@pytest.mark.parametrize("name", PATTERNS)
def test_blocks(name: str) -> None:
    q, k = draw(2, N, H, 64, seed=0, dtype=torch.float32), draw(2, N, 2, 64, seed=1, dtype=torch.float32)
    compare(q, k, (), {"pattern": PATTERNS[name], "is_causal": True})
    compare(q, k, BRANCHES, {"pattern": PATTERNS[name]})


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_xpos_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = MultiheadDilatedAttention(256, H, *BRANCHES, rotary=True, xpos_scale_base=64.0, num_kv_heads=2)
    x = draw(1, N, 256, seed=2, dtype=torch.float32)
    options: dict[str, Any] = {"is_causal": True, "cu_seqlens": DOCUMENTS}
    expected = layer.double()(x.double(), **options)[0]
    got = layer.to("cuda", dtype)(x.to("cuda", dtype), **to_gpu(options))[0]
    assert bool(got.isfinite().all())
    tolerance = 1e-3 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(got.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="XPOS overflows"):
        layer(torch.zeros(1, 9000, 256, device="cuda", dtype=dtype), is_causal=True)
