"""Packed documents as one launch of a library that takes their boundaries, against the definition in float64."""

from __future__ import annotations

import itertools
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
from dilated_attention.engine.branches.problems import Shape
from dilated_attention.engine.ops.prepare import is_packed, make_plan
from dilated_attention.functional import arguments
from dilated_attention.functional.options import Options as CallOptions

WHOLE = DilatedPattern((2**40,), (1,), "zero")


class ByBounds(MathBackend):
    """Takes boundaries of documents, and computes one document after the other."""

    name = "by_bounds"
    capabilities = replace(MathBackend.capabilities, documents=True)

    def __init__(self) -> None:
        self.launches = 0

    def _documents(self, bounds: Bounds) -> Any:
        self.launches += 1
        queries, keys = _slices(bounds.queries), _slices(bounds.keys)
        assert bounds.most_queries == max(x.stop - x.start for x in queries) and bounds.most_keys == max(x.stop - x.start for x in keys)
        return list(zip(queries, keys, strict=True))

    def forward(self, q: Any, k: Any, v: Any, options: Options, keys: Any = None, **views: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if keys is None:
            return super().forward(q, k, v, options)
        out = views["out"][0]
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


def _slices(starts: torch.Tensor) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(starts.tolist())]


@pytest.fixture
def by_bounds(monkeypatch: pytest.MonkeyPatch) -> ByBounds:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    backend = ByBounds()
    registry.register(backend)
    return backend


def results(function: Any, x: list[torch.Tensor], dlse: torch.Tensor | None = None) -> list[torch.Tensor]:
    out, lse = function(*x[:3])
    loss = (out * x[3]).sum() if dlse is None else (out * x[3]).sum() + (lse * dlse).sum()
    return [out, lse, *torch.autograd.grad(loss, x[:3])]


def drawn(n: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, n, h, 8, dtype=torch.float64, generator=rng) for h in (heads, kv_heads, kv_heads, heads)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bounds", [(0, 5, 17), (0, 1, 2, 40), (0, 3, 3, 20, 33)], ids=str)
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
def test_documents_of_one_process(by_bounds: ByBounds, bounds: tuple[int, ...], is_causal: bool, with_lse: bool) -> None:
    x = drawn(bounds[-1], 4, 2, 0)
    dlse = torch.randn(1, 4, bounds[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(1)) if with_lse else None
    options = {"is_causal": is_causal, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "return_lse": True}
    found = results(lambda q, k, v: attention(q, k, v, backend="by_bounds", **options), x, dlse)
    # a gradient of lse goes problem by problem
    assert by_bounds.launches == (1 if with_lse else 2)
    wanted = results(lambda q, k, v: attention(q, k, v, backend="math", **options), x, dlse)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_a_range_of_queries_on_their_documents(by_bounds: ByBounds, seed: int) -> None:
    """As on a rank of a ring: queries [first, last), and all keys up to the end of the last document."""
    rng = random.Random(seed)
    inner = sorted(rng.sample(range(1, 60), rng.randint(1, 6)))
    bounds = (0, *inner, 60)
    documents = tuple(itertools.pairwise(bounds))
    first = rng.randrange(60)
    last, is_causal = rng.randint(first + 1, 60), rng.random() < 0.6
    q, k, v, dout = drawn(60, 4, rng.choice((1, 2, 4)), seed)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    out, lse = attention(q, k, v, cu_seqlens=cu_seqlens, is_causal=is_causal, return_lse=True, backend="math")
    wanted = torch.autograd.grad((out * dout)[:, first:last].sum(), (q, k, v))

    given = CallOptions(is_causal=is_causal, return_lse=True, head_offsets="zero", backend="by_bounds")
    settings = arguments.checked_settings(q, k, v, given, arguments.DENSE)._replace(query_offset=first)
    mine = [x[:, first:last].detach() for x in (dout, q, out)]
    keys = k.detach(), v.detach()
    plan = make_plan(settings, (mine[1], *keys), False, documents=documents, pattern=WHOLE, num_keys=60)
    assert plan.shape.queries == (first, last)
    place = torch.full_like(mine[1], torch.nan)
    some_out, some_lse = plan.runner.forward(plan, mine[1], *keys, Masks(), None, (place,))
    assert by_bounds.launches == 1 and some_out is place
    torch.testing.assert_close(some_out, out[:, first:last], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(some_lse, lse[:, :, first:last], atol=1e-12, rtol=1e-12)

    views = mine[0], mine[1], *keys, mine[2]
    plan = make_plan(settings, (*views[1:4], *views[::4]), True, documents=documents, pattern=WHOLE, num_keys=60)
    places = tuple(torch.full_like(x, torch.nan) for x in views[1:4])
    dq, dk, dv = plan.runner.backward(plan, (*views, lse[:, :, first:last].detach().contiguous()), Masks(), None, None, places)
    assert by_bounds.launches == 2 and dq is places[0] and dk is places[1] and dv is places[2]
    for a, b in zip((dq, dk, dv), (wanted[0][:, first:last], *wanted[1:]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_calls_that_take_more_than_one_launch(by_bounds: ByBounds) -> None:
    """Branches, windows, padding and dropout go problem by problem."""
    q, k, v, _ = drawn(24, 4, 2, 0)
    cu_seqlens = torch.tensor((0, 9, 24), dtype=torch.int32)
    options = {"cu_seqlens": cu_seqlens, "backend": "by_bounds"}
    attention(q, k, v, window=3, **options)
    attention(q, k, v, key_padding_mask=torch.zeros(1, 24, dtype=torch.bool), **options)
    attention(q, k, v, dropout_p=0.5, **options)
    dilated_attention(q, k, v, [8, 24], [1, 2], **options)
    dilated_attention(q, k, v, [8], [2], **options)
    assert by_bounds.launches == 0
    dilated_attention(q, k, v, [8], [1], **options)
    assert by_bounds.launches == 1
    size = by_bounds.capabilities, 1
    assert is_packed(WHOLE, Shape(4, 2, (0, 24), (0, 24), ((0, 9), (9, 24)), True), *size)
    assert not is_packed(WHOLE, Shape(4, 2, (0, 24), (0, 24), ((0, 24),), True), *size)
