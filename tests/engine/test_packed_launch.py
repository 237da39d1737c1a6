"""Passes of a part of the queries over packed documents: as one launch of a library that takes their boundaries, and into given views."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.backends import Options, registry
from dilated_attention.backends.base import Bounds
from dilated_attention.backends.torch_ops.math import MathBackend
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.functional import arguments
from dilated_attention.functional.options import Options as CallOptions
from dilated_attention.testing import max_error

WHOLE = DilatedPattern((2**40,), (1,), "zero")
TILES = pytest.param("tiles", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels"))


class ByBounds(MathBackend):
    """Takes boundaries of documents, and computes one document after the other."""

    name = "by_bounds"
    capabilities = replace(MathBackend.capabilities, documents=True)

    def __init__(self) -> None:
        self.launches = 0

    def _documents(self, bounds: Bounds) -> list[tuple[slice, slice]]:
        self.launches += 1
        sides = [[slice(a, b) for a, b in itertools.pairwise(x.tolist())] for x in (bounds.queries, bounds.keys)]
        assert [bounds.most_queries, bounds.most_keys] == [max(x.stop - x.start for x in side) for side in sides]
        return list(zip(*sides, strict=True))

    def forward(self, q: Any, k: Any, v: Any, options: Options, keys: Any = None, **views: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if keys is None:
            return super().forward(q, k, v, options)
        out = torch.empty_like(q) if views["out"][0] is None else views["out"][0]
        lse = torch.full((1, q.shape[2], q.shape[1]), torch.nan, dtype=torch.promote_types(q.dtype, torch.float32))
        for a, b in self._documents(keys):
            out[:, a], lse[:, :, a] = self.forward(q[:, a], k[:, b], v[:, b], options)
        return out, lse

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options, keys: Any = None, **more: Any) -> Any:
        if keys is None:
            return super().backward(dout, q, k, v, out, lse, options, **more)
        for a, b in self._documents(keys):
            shares = self.backward(dout[:, a], q[:, a], k[:, b], v[:, b], out[:, a], lse[:, :, a], options)
            for grad, rows, share in zip(more["grads"], (a, b, b), shares, strict=True):
                grad[:, rows] = share
        return more["grads"]


@pytest.fixture
def by_bounds(monkeypatch: pytest.MonkeyPatch) -> ByBounds:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    backend = ByBounds()
    registry.register(backend)
    return backend


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
        from dilated_attention.engine.kernels import tiles as runner

        dtype, backend = torch.float32, "math"
    q, k, v, dout = (x.detach().to(dtype) for x in (q[:, some], k, v, dout[:, some]))
    settings = arguments.checked_settings(q, k, v, CallOptions(**options, backend=backend), arguments.DENSE)
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


@pytest.mark.parametrize("seed", range(30))
def test_a_range_of_queries_on_their_documents_is_one_launch(by_bounds: ByBounds, seed: int) -> None:
    rng = random.Random(seed)
    bounds = (0, *sorted(rng.sample(range(1, 60), rng.randint(1, 6))), 60)
    first = rng.randrange(60)
    check_a_range("by_bounds", WHOLE, bounds, range(first, rng.randint(first + 1, 60)), rng.random() < 0.6, seed)
    # two forwards and three backwards
    assert by_bounds.launches == 5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bounds", [(0, 5, 17), (0, 3, 3, 20, 33)], ids=str)
def test_documents_of_one_process(by_bounds: ByBounds, bounds: tuple[int, ...], is_causal: bool) -> None:
    *x, dout = drawn(bounds[-1], 4, 2, 0)
    dlse = dout[..., 0].transpose(1, 2)
    for outputs, launches in ((1, 2), (2, 3)):
        both = []
        for backend in ("by_bounds", "math"):
            result = attention(*x, is_causal=is_causal, cu_seqlens=torch.tensor(bounds), return_lse=True, backend=backend)
            both.append([*result, *torch.autograd.grad(result[:outputs], x, [dout, dlse][:outputs])])
        # a gradient of lse goes problem by problem
        assert by_bounds.launches == launches
        torch.testing.assert_close(*both, atol=1e-12, rtol=1e-12)


def test_calls_that_take_more_than_one_launch(by_bounds: ByBounds) -> None:
    """Branches, windows, padding and dropout go problem by problem."""
    q, k, v, _ = drawn(24, 4, 2, 0)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor((0, 9, 24), dtype=torch.int32), "backend": "by_bounds"}
    for more in ({"window": 3}, {"key_padding_mask": torch.zeros(1, 24, dtype=torch.bool)}, {"dropout_p": 0.5}):
        attention(q, k, v, **more, **options)
    for branches, launches in ((([8, 24], [1, 2]), 0), (([8], [2]), 0), (([8], [1]), 1)):
        dilated_attention(q, k, v, *branches, **options)
        assert by_bounds.launches == launches
