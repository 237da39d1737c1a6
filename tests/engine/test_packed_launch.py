"""Packed documents as one launch of a library that takes their boundaries, against the definition in float64."""

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
from dilated_attention.engine.branches import packed, strategy
from dilated_attention.engine.branches.plan import Shape
from dilated_attention.engine.ops.prepare import prepare
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
        queries, keys = _slices(bounds.queries, bounds.used_queries), _slices(bounds.keys, bounds.used_keys)
        assert bounds.most_queries == max(x.stop - x.start for x in queries) and bounds.most_keys == max(x.stop - x.start for x in keys)
        return list(zip(queries, keys, strict=True))

    def forward(self, q: Any, k: Any, v: Any, options: Options, keys: Any = None, **views: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if keys is None:
            return super().forward(q, k, v, options)
        _assert_finite(q, k, v)
        out = views["out"][0] if "out" in views else torch.empty_like(q)
        lse = torch.full((1, q.shape[2], q.shape[1]), torch.nan, dtype=torch.promote_types(q.dtype, torch.float32))
        for a, b in self._documents(keys):
            out[:, a], lse[:, :, a] = self.forward(q[:, a], k[:, b], v[:, b], options)
        return out, lse

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options, keys: Any = None, **more: Any) -> Any:
        if keys is None:
            return super().backward(dout, q, k, v, out, lse, options, **more)
        _assert_finite(dout, q, k, v, out)
        for a, b in self._documents(keys):
            shares = self.backward(dout[:, a], q[:, a], k[:, b], v[:, b], out[:, a], lse[:, :, a], options)
            for grad, rows, share in zip(more["grads"], (a, b, b), shares, strict=True):
                grad[:, rows] = share
        return more["grads"]


def _assert_finite(*tensors: torch.Tensor) -> None:
    """The library reads whole tiles, so rows between sequences, too."""
    assert all(bool(x.isfinite().all()) for x in tensors)


def _slices(starts: torch.Tensor, used: torch.Tensor | None) -> list[slice]:
    if used is None:
        return [slice(a, b) for a, b in itertools.pairwise(starts.tolist())]
    found = [slice(a, a + count) for a, count in zip(starts[:-1].tolist(), used.tolist(), strict=True)]
    # as in the library, sequences do not overlap
    assert all(count > 0 for count in used.tolist()) and all(x.stop <= b for x, b in zip(found, starts[1:].tolist(), strict=True))
    return found


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
    shape, call = prepare(False, (mine[1], *keys), WHOLE, settings, None, documents, None, 60)
    assert isinstance(shape, Shape) and shape.queries == (first, last)
    run = strategy.choose_forward(WHOLE, shape, (mine[1], *keys), call)
    place = torch.full_like(mine[1], torch.nan)
    some_out, some_lse = run(mine[1], *keys, call, None, (place,))
    assert by_bounds.launches == 1 and some_out is place
    torch.testing.assert_close(some_out, out[:, first:last], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(some_lse, lse[:, :, first:last], atol=1e-12, rtol=1e-12)

    views = mine[0], mine[1], *keys, mine[2]
    shape, call = prepare(True, (mine[1], *keys, mine[0]), WHOLE, settings, None, documents, None, 60)
    backward = strategy.choose_backward(WHOLE, shape, views, call)
    places = tuple(torch.full_like(x, torch.nan) for x in views[1:4])
    dq, dk, dv = backward((*views, lse[:, :, first:last].detach().contiguous()), call, None, None, places)
    assert by_bounds.launches == 2 and dq is places[0] and dk is places[1] and dv is places[2]
    for a, b in zip((dq, dk, dv), (wanted[0][:, first:last], *wanted[1:]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("bounds", [(0, 20), (13, 37), (33, 37), (0, 37)], ids=str)
@pytest.mark.parametrize("mixing", ["exact", "detached"])
def test_zero_keys_of_a_single_branch(by_bounds: ByBounds, bounds: tuple[int, int], mixing: str) -> None:
    """The last segment of 16 has 5 of 37 positions and 11 zero keys."""
    pattern, N, (first, last) = DilatedPattern((16,), (1,), "zero", tail="zero_keys"), 37, bounds
    q, k, v, dout = drawn(N, 4, 4, 3)
    out, lse = dilated_attention(q, k, v, [16], [1], tail="zero_keys", return_lse=True, backend="math", mixture_grad=mixing)
    wanted = torch.autograd.grad((out * dout)[:, first:last].sum(), (q, k, v))
    given = CallOptions(is_causal=False, return_lse=True, head_offsets="zero", backend="by_bounds")
    settings = arguments.checked_settings(q, k, v, given, arguments.DENSE)
    settings = settings._replace(query_offset=first, detached=mixing == "detached")
    mine, keys = [x[:, first:last].detach() for x in (dout, q, out)], (k.detach(), v.detach())
    shape, call = prepare(False, (mine[1], *keys), pattern, settings, None, ((0, N),), None, N)
    some_out, some_lse = strategy.choose_forward(pattern, shape, (mine[1], *keys), call)(mine[1], *keys, call, None)
    views = mine[0], mine[1], *keys, mine[2]
    shape, call = prepare(True, (mine[1], *keys, mine[0]), pattern, settings, None, ((0, N),), None, N)
    backward = strategy.choose_backward(pattern, shape, views, call)
    grads = backward((*views, lse[:, :, first:last].detach().contiguous()), call, None, None)
    assert by_bounds.launches == (2 if len(range(first, last)) < N else 0)
    expected = out[:, first:last], lse[:, :, first:last], wanted[0][:, first:last], *wanted[1:]
    for a, b in zip((some_out, some_lse, *grads), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


BRANCHES = (
    ((8, 20, 64), (1, 2, 4)),
    ((7, 23, 1000), (1, 3, 8)),
    ((16, 64), (2, 4)),
    ((5, 5), (1, 2)),
)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels")
# each of the four kinds of branches with each third seed, whose heads are grouped
@pytest.mark.parametrize("seed", range(16))
def test_a_range_of_queries_of_several_branches(by_bounds: ByBounds, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All segments of branches with dilation take one launch, in one group of heads or in several."""
    monkeypatch.setattr(packed, "has_kernels", lambda q: True)
    rng = random.Random(seed)
    lengths, rates = BRANCHES[seed % len(BRANCHES)]
    tail = rng.choice(("mask", "zero_keys"))
    pattern, N, H = DilatedPattern(lengths, rates, rng.choice(("cyclic", "zero")), "all", tail), rng.randint(30, 70), 4
    is_causal = rng.random() < 0.5
    mixing = rng.choice(("exact", "detached"))
    if seed // 4 % 2:
        # the slide encoder's: each branch's own output has the zero keys of its branch alone
        pattern, is_causal, mixing = replace(pattern, tail="zero_keys"), False, "detached"
        tail = pattern.tail
    # so many that every head has a query in a branch
    first = rng.randrange(1, N - 20)
    last = rng.randint(first + 20, N)
    q, k, v, dout = (x.detach().float().requires_grad_() for x in drawn(N, H, H, seed))
    options = {"is_causal": is_causal, "head_offsets": pattern.head_offsets, "tail": tail, "backend": "math", "mixture_grad": mixing}
    x = [y.detach().double().requires_grad_() for y in (q, k, v)]
    out, lse = dilated_attention(*x, list(lengths), list(rates), return_lse=True, **options)
    wanted = torch.autograd.grad((out * dout)[:, first:last].sum(), x)
    if seed % 3 == 0:
        monkeypatch.setattr(packed, "_heads_at_once", lambda *_: 3)

    given = CallOptions(is_causal=is_causal, return_lse=True, head_offsets="zero", backend="by_bounds")
    settings = arguments.checked_settings(q, k, v, given, arguments.DENSE)._replace(query_offset=first, detached=mixing == "detached")
    kv = torch.cat((k, v), -1).detach()
    mine = [x[:, first:last].detach().float() for x in (dout, q, out)]
    keys = kv.chunk(2, -1)
    shape, call = prepare(False, (mine[1], *keys), pattern, settings, None, ((0, N),), None, N)
    run = strategy.choose_forward(pattern, shape, (mine[1], *keys), call)
    some_out, some_lse = run(mine[1], *keys, call, None)
    groups = 2 if seed % 3 == 0 else 1
    direct = int(1 in rates)
    assert by_bounds.launches == groups + direct
    torch.testing.assert_close(some_out.double(), out[:, first:last], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(some_lse.double(), lse[:, :, first:last], atol=2e-6, rtol=2e-6)

    views = mine[0], mine[1], *keys, mine[2]
    shape, call = prepare(True, (mine[1], *keys, mine[0]), pattern, settings, None, ((0, N),), None, N)
    backward = strategy.choose_backward(pattern, shape, views, call)
    grads = backward((*views, lse[:, :, first:last].detach().float().contiguous()), call, None, None)
    # detached mixing recomputes the branches' outputs
    assert by_bounds.launches == (3 if call.detached and pattern.num_branches > 1 else 2) * (groups + direct)
    for a, b in zip(grads, (wanted[0][:, first:last], *wanted[1:]), strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-6, rtol=5e-6)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels")
@pytest.mark.parametrize(("lengths", "rates", "launches"), [((9,), (5,), 0), ((9, 9), (5, 1), 2), ((9, 9), (5, 4), 2)], ids=str)
def test_queries_in_no_branch(
    by_bounds: ByBounds, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], rates: tuple[int, ...], launches: int
) -> None:
    """A last query that no head's branches take, where other positions are taken."""
    monkeypatch.setattr(packed, "has_kernels", lambda q: True)
    q, k, v, dout = (x.detach().float().requires_grad_() for x in drawn(9, 2, 2, 0))
    results = []
    for name in ("by_bounds", "math"):
        x = [q[:, 8:].detach().requires_grad_(), k, v]
        out, lse = dilated_attention(
            *x, list(lengths), list(rates), head_offsets="zero", is_causal=True, query_offset=8, return_lse=True, backend=name
        )
        results.append([out, lse, *torch.autograd.grad((out * dout[:, 8:]).sum(), x)])
    assert by_bounds.launches == launches
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


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
    size = by_bounds.capabilities, 1, 8, torch.float64, False
    assert packed.is_packed(WHOLE, Shape(4, 2, (0, 24), (0, 24), ((0, 9), (9, 24)), True), *size)
    assert not packed.is_packed(WHOLE, Shape(4, 2, (0, 24), (0, 24), ((0, 24),), True), *size)
