"""Packed documents by boundaries, on FlashAttention-3 where its library is named (FLASH3_LIBRARY), against float64."""

from __future__ import annotations

import os
import random

import pytest
import torch

from dilated_attention import attention
from dilated_attention.backends.flash import flash3

LIBRARY = os.environ.get("FLASH3_LIBRARY")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(LIBRARY is None, reason="flash3: FLASH3_LIBRARY names no library"),
]

if LIBRARY and torch.cuda.is_available():
    flash3.load_library(LIBRARY, os.environ.get("FLASH3_CUDART"))

BF16 = torch.bfloat16


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-20))


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes]


@pytest.mark.parametrize("seed", range(8))
def test_packed_documents(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    N, (H, K, D) = rng.choice((300, 1000, 2048)), rng.choice(((8, 2, 128), (4, 4, 64), (6, 3, 48), (8, 1, 128)))
    bounds = torch.tensor([0, *sorted(rng.sample(range(1, N), rng.randint(1, 12))), N], dtype=torch.int32, device="cuda")
    q, k, v, dout = drawn((1, N, H, D), (1, N, K, D), (1, N, K, D), (1, N, H, D))
    results = []
    for dtype, backend in ((BF16, "flash3"), (torch.float64, "math")):
        x = [y.to(dtype).requires_grad_() for y in (q, k, v)]
        out, lse = attention(*x, cu_seqlens=bounds, is_causal=seed % 3 > 0, return_lse=True, backend=backend)
        results.append([out, lse, *torch.autograd.grad(out, x, dout.to(dtype))])
    assert max(error(a, b) for a, b in zip(*results, strict=True)) < 1e-2
