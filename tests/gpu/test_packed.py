"""Cut calls and packed documents by boundaries, on FlashAttention-3 where its library is named (FLASH3_LIBRARY), against float64."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.engine.branches import packed, strategy
from dilated_attention.engine.ops.prepare import prepare
from dilated_attention.functional import arguments
from dilated_attention.functional.options import Options

LIBRARY = os.environ.get("FLASH3_LIBRARY")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(LIBRARY is None, reason="flash3: FLASH3_LIBRARY names no library"),
]

BF16 = torch.bfloat16
BRANCHES = (
    ((64, 300, 9000), (1, 3, 8)),
    ((128, 512, 2048), (1, 4, 16)),
    ((100, 1000), (2, 5)),
    ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)),
)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-20))


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes]


@pytest.mark.parametrize("seed", range(16))
def test_a_range_of_queries(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    H, D, N = rng.choice((4, 6, 16)), rng.choice((48, 64, 128)), rng.randint(300, 4000)
    lengths, rates = BRANCHES[seed % len(BRANCHES)]
    tail = rng.choice(("mask", "zero_keys"))
    pattern, is_causal = DilatedPattern(lengths, rates, rng.choice(("cyclic", "zero")), "all", tail), rng.random() < 0.5
    first = rng.randrange(1, N)
    last = rng.randint(first + 1, N)
    q, k, v, dout = drawn(*[(1, N, H, D)] * 4)
    x = [y.double().requires_grad_() for y in (q, k, v)]
    options: dict[str, Any] = {"is_causal": is_causal, "head_offsets": pattern.head_offsets, "return_lse": True, "backend": "math"}
    options["tail"] = tail
    options["mixture_grad"] = mixing = rng.choice(("exact", "detached"))
    out, lse = dilated_attention(*x, list(lengths), list(rates), **options)
    wanted = torch.autograd.grad((out * dout)[:, first:last].sum(), x)
    if seed % 3 == 0:
        monkeypatch.setattr(packed, "_heads_at_once", lambda *_: 3)

    kv = torch.cat((k, v), -1).chunk(2, -1)
    some_dout, some_q, some_out = (y[:, first:last].to(BF16).contiguous() for y in (dout, q, out.detach()))
    given = Options(is_causal=is_causal, return_lse=True, head_offsets="zero", backend="flash3")
    settings = arguments.checked_settings(some_q, *kv, given, arguments.DENSE)._replace(query_offset=first, detached=mixing == "detached")
    shape, call = prepare(False, (some_q, *kv), pattern, settings, None, ((0, N),), None, N)
    forward: Any = strategy.choose_forward(pattern, shape, (some_q, *kv), call)
    assert forward.func is packed.forward
    found = list(forward(some_q, *kv, call, None))
    shape, call = prepare(True, (some_q, *kv, some_dout), pattern, settings, None, ((0, N),), None, N)
    views = some_dout, some_q, *kv, some_out
    backward: Any = strategy.choose_backward(pattern, shape, views, call)
    assert backward.func is packed.backward
    found += backward((*views, lse[:, :, first:last].detach().float().contiguous()), call, None, None)
    expected = (out[:, first:last], lse[:, :, first:last], wanted[0][:, first:last], *wanted[1:])
    assert max(error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-2


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
