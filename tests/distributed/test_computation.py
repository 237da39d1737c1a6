"""What the parts of a step write, and what is added: against a plain sum, with parts that overlap and leave gaps."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention.distributed.exchange.computation import Computation, StepParts, key_shares

N, H, D = 12, 4, 2


@dataclass(frozen=True)
class Drawn:
    """A part whose results are random, and that writes them where it is asked to, or not."""

    rows: Any
    heads: tuple[int, int]
    key_rows: slice
    results: tuple[torch.Tensor, ...]
    writes: bool
    writes_keys: bool

    def forward(self, q: torch.Tensor, k: Any, v: Any, masks: Any, into: Any = None) -> Any:
        assert q.shape[2] == self.heads[1] - self.heads[0]
        out, lse = self.results[:2]
        return self._put((out,), into)[0], lse

    def backward(self, tensors: Any, dlse: Any, masks: Any, into: Any = None) -> Any:
        dout, q, _, _, out, lse = tensors
        assert self.writes_keys or into is None or into[1:] == (None, None)
        assert dout.shape == q.shape == out.shape and lse.shape[1] == q.shape[2] == self.heads[1] - self.heads[0]
        return self._put(self.results[2:], into)

    def _put(self, results: Any, into: Any) -> Any:
        places = (None,) * len(results) if into is None else into
        return tuple(place.copy_(x) if self.writes and place is not None else x for x, place in zip(results, places, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_shares_of_keys(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randint(1, 20)
    parts = []
    for _ in range(rng.randint(1, 5)):
        start = rng.randrange(rows)
        parts.append((start, rng.randint(start + 1, rows)))
    shares = key_shares(parts, rows)
    had: list[list[int]] = [[] for _ in range(rows)]
    for i, (start, end) in enumerate(parts):
        for row in range(start, end):
            had[row].append(i)
    for i in range(len(parts)):
        new, known = ({row for start, end in some[i] for row in range(start, end)} for some in (shares.new, shares.known))
        assert new == {row for row in range(rows) if had[row][:1] == [i]} and known == {row for row in range(rows) if i in had[row][1:]}
    assert {row for start, end in shares.gaps for row in range(start, end)} == {row for row in range(rows) if not had[row]}
    assert shares.most == max(map(len, had))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_results_of_parts(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read that no part has written: new memory is NaN."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    keys = rng.randint(3, 15)
    # the heads in one group or in steps of two, the rows in several runs
    groups = rng.choice(([(0, 4)], [(0, 2), (2, 4)]))
    cuts = [0, *sorted(rng.sample(range(1, N), rng.randint(0, 3))), N]
    steps = []
    # kernels of lists of blocks may return gradients of keys in float32, which stay so
    writes_keys = rng.random() < 0.6
    of_keys = dtype if writes_keys or rng.random() < 0.5 else torch.float32
    for heads in groups:
        parts, count = [], heads[1] - heads[0]
        for first, last in itertools.pairwise(cuts):
            start = rng.randrange(keys)
            stop, n = rng.randint(start + 1, keys), last - first
            shapes = (n, count), (count, n), (n, count), (stop - start, count), (stop - start, count)
            made = [torch.randn(1, *shape, *(() if i == 1 else (D,)), generator=generator) for i, shape in enumerate(shapes)]
            made = [x if i == 1 else x.to(dtype if i < 3 else of_keys) for i, x in enumerate(made)]
            indexed = rng.random() < 0.2
            rows = torch.arange(first, last) if indexed else slice(first, last)
            parts.append(Drawn(rows, heads, slice(start, stop), tuple(made), not indexed and rng.random() < 0.6, writes_keys))
        rng.shuffle(parts)
        steps.append(tuple(parts))
    q = torch.randn(1, N, H, D, generator=generator).to(dtype)
    of: Any = StepParts(steps, False, q)  # type: ignore[arg-type]
    masks: Any = SimpleNamespace(padding=None, seed=0)
    forward, backward = Computation(of, masks, q), Computation(of, masks, q, (q, q, torch.randn(1, H, N), None))
    for index, (given, heads) in enumerate(zip(steps, groups, strict=True)):
        k = torch.randn(1, keys, heads[1] - heads[0], D, generator=generator).to(dtype)
        forward.forward(index, k, k)
        grads = backward.backward(index, k, k)
        assert grads is not None
        for which, grad in zip((3, 4), grads, strict=True):
            wanted = torch.zeros(k.shape)
            for part in given:
                wanted[:, part.key_rows] += part.results[which].float()
            exact = of_keys is torch.float32
            assert grad.dtype is (of_keys if of.shares(index, keys).most <= 2 else torch.float32)
            torch.testing.assert_close(grad.float(), wanted, atol=1e-6, rtol=0 if exact else 2**-8)
    out, lse = forward.results()
    for given, heads in zip(steps, groups, strict=True):
        for part in given:
            chosen = slice(*heads)
            assert torch.equal(out[:, part.rows, chosen], part.results[0]) and torch.equal(lse[:, chosen][:, :, part.rows], part.results[1])
            assert torch.equal(backward.dq()[:, part.rows, chosen], part.results[2])
