"""Passes of a part of the queries over packed documents: as one launch of a library that takes their boundaries, and into given views."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends.flash import flash3
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.engine.ops.settings import DENSE
from dilated_attention.functional import arguments
from dilated_attention.functional.options import Options as CallOptions
from dilated_attention.testing import max_error
from tests.backends.test_libraries import Flash3Ops, put_on_cpu

WHOLE = DilatedPattern((2**40,), (1,), "zero")
TILES = pytest.param("tiles", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels"))


@pytest.fixture
def flash3_on_cpu(monkeypatch: pytest.MonkeyPatch) -> type[Flash3Ops]:
    """FlashAttention-3 stands for all that take boundaries of documents."""
    monkeypatch.setattr(flash3, "_ops", Flash3Ops)
    monkeypatch.setattr(Flash3Ops, "packed", 0)
    put_on_cpu(monkeypatch, "flash3")
    return Flash3Ops


def drawn(n: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and dout."""
    rng = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, n, h, 8, dtype=torch.float64, generator=rng) for h in (heads, kv_heads, kv_heads, heads)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory of NaN and a view of it of x's shape, with other rows and heads around."""
    B, n, heads, width = x.shape
    memory = torch.full((B, n + 5, heads + 2, width), torch.nan, dtype=x.dtype)
    return memory, memory[:, 2 : 2 + n, 1 : 1 + heads]


def check_a_range(backend: str, pattern: DilatedPattern, bounds: tuple[int, ...], rows: range, is_causal: bool, seed: int) -> None:
    """As on a rank of a ring: some queries and all keys; results go to new tensors or to given views, and nothing beside these."""
    n, heads = bounds[-1], 2 if backend == "tiles" else 4
    q, k, v, dout = drawn(n, heads, min(heads, (1, 2, 4)[seed % 3]), seed)
    some = slice(rows.start, rows.stop)
    options: dict[str, Any] = {"is_causal": is_causal, "head_offsets": "zero", "return_lse": True}
    branches = pattern.segment_lengths, pattern.dilation_rates
    whole = dilated_attention(q, k, v, *branches, cu_seqlens=torch.tensor(bounds), backend="math", **options)
    wanted_dq, *wanted = torch.autograd.grad((whole[0] * dout)[:, some].sum(), (q, k, v))
    wanted = [whole[0][:, some], whole[1][:, :, some], wanted_dq[:, some], *wanted]

    dtype, runner = torch.float64, None
    if backend == "tiles":
        # interpreted, the kernels run on a CPU, which no call chooses them for
        from dilated_attention.engine.branches import run_tiles as runner

        dtype, backend = torch.float32, "math"
    q, k, v, dout = (x.detach().to(dtype) for x in (q[:, some], k, v, dout[:, some]))
    settings = arguments.checked_settings(q, k, v, CallOptions(**options, backend=backend), DENSE[:2])
    settings = settings._replace(query_offset=some.start)
    about = {"documents": tuple(itertools.pairwise(bounds)), "pattern": pattern, "num_keys": n, "runner": runner}
    plan = make_plan(settings, (q, k, v), False, **about)
    out, lse = plan.runner.forward(plan, q, k, v, Masks(), None)
    memory, place = inside(out)
    same, same_lse = plan.runner.forward(plan, q, k, v, Masks(), None, (place,))
    assert same is place and torch.equal(place, out) and torch.equal(same_lse, lse) and int(memory.isfinite().sum()) == out.numel()
    plan = make_plan(settings, (q, k, v, dout, out), True, **about)
    tensors = dout, q, k, v, out, lse
    grads = plan.runner.backward(plan, tensors, Masks(), None, None)
    rooms = [inside(x) for x in grads]
    for chosen in ((0, 1, 2), (0,)):
        into = tuple(rooms[i][1] if i in chosen else None for i in range(3))
        for i, (x, y) in enumerate(zip(plan.runner.backward(plan, tensors, Masks(), None, None, into), grads, strict=True)):
            assert torch.equal(x, y) and (x is into[i]) == (i in chosen)
    assert all(int(memory.isfinite().sum()) == x.numel() for (memory, _), x in zip(rooms, grads, strict=True))
    for x, true in zip((out, lse, *grads), wanted, strict=True):
        assert max_error(x, true) <= (1e-12 if dtype is torch.float64 else 1e-5) * max(
            1.0, float(true.masked_fill(true.isinf(), 0).abs().max())
        )


@pytest.mark.parametrize("bounds", [(0, 40), (0, 12, 40)], ids=["one", "two"])
@pytest.mark.parametrize("pattern", [WHOLE, DilatedPattern((8, 40), (1, 3), "zero")], ids=["dense", "dilated"])
@pytest.mark.parametrize("backend", ["math", "sdpa_cpu", TILES])
def test_a_range_of_queries_goes_where_it_is_asked_to(backend: str, pattern: DilatedPattern, bounds: tuple[int, ...]) -> None:
    check_a_range(backend, pattern, bounds, range(9, 33), True, 0)


@pytest.mark.parametrize("seed", range(8))
def test_a_range_of_queries_on_their_documents_is_one_launch(flash3_on_cpu: type[Flash3Ops], seed: int) -> None:
    rng = random.Random(seed)
    bounds = (0, *sorted(rng.sample(range(1, 60), rng.randint(1, 6))), 60)
    first = rng.randrange(60)
    check_a_range("flash3", WHOLE, bounds, range(first, rng.randint(first + 1, 60)), rng.random() < 0.6, seed)
    # two forwards and three backwards
    assert flash3_on_cpu.packed == 5
