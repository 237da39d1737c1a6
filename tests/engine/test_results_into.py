"""Passes that write their results into given views, as a rank's parts do: equal to the results they return, and nothing beside them."""

from __future__ import annotations

import os

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.functional import arguments
from dilated_attention.functional.options import Options

N, H, D, FIRST, LAST = 40, 2, 16, 9, 33
PATTERNS = {"dense": DilatedPattern((2**40,), (1,), "zero"), "dilated": DilatedPattern((8, 40), (1, 3))}
TILES = pytest.param("tiles", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels"))


def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory of NaN and a view of it of x's shape, with other rows and heads around."""
    B, n, heads, width = x.shape
    memory = torch.full((B, n + 5, heads + 2, width), torch.nan, dtype=x.dtype)
    return memory, memory[:, 2 : 2 + n, 1 : 1 + heads]


@pytest.mark.parametrize("documents", [((0, N),), ((0, 12), (12, N))], ids=["one", "two"])
@pytest.mark.parametrize("kind", sorted(PATTERNS))
@pytest.mark.parametrize("backend", ["math", "sdpa_cpu", TILES])
def test_results_go_where_they_are_asked_to(backend: str, kind: str, documents: tuple[tuple[int, int], ...]) -> None:
    pattern, rng = PATTERNS[kind], torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, N, h, D, generator=rng) for h in (H, 1, 1, H))
    given = Options(is_causal=True, return_lse=True, head_offsets="zero", backend="math" if backend == "tiles" else backend)
    settings = arguments.checked_settings(q, k, v, given, arguments.DENSE)._replace(query_offset=FIRST)
    q, dout = q[:, FIRST:LAST], dout[:, FIRST:LAST]
    runner = None
    if backend == "tiles":
        # interpreted, the kernels run on a CPU, which no call chooses them for
        from dilated_attention.engine.kernels import tiles as runner
    plan = make_plan(settings, (q, k, v), False, documents=documents, pattern=pattern, num_keys=N, runner=runner)
    out, lse = plan.runner.forward(plan, q, k, v, Masks(), None)
    memory, place = inside(out)
    same, same_lse = plan.runner.forward(plan, q, k, v, Masks(), None, (place,))
    assert same is place and torch.equal(place, out) and torch.equal(same_lse, lse)
    assert int(memory.isfinite().sum()) == out.numel()

    views = dout, q, k, v, out
    plan = make_plan(settings, (q, k, v, dout, out), True, documents=documents, pattern=pattern, num_keys=N, runner=runner)
    grads = plan.runner.backward(plan, (*views, lse), Masks(), None, None)
    rooms = [inside(x) for x in grads]
    # some of them
    for some in ((0, 1, 2), (1, 2), (0,)):
        into = tuple(rooms[i][1] if i in some else None for i in range(3))
        found = plan.runner.backward(plan, (*views, lse), Masks(), None, None, into)
        for i, (x, y) in enumerate(zip(found, grads, strict=True)):
            assert torch.equal(x, y) and (x is into[i]) == (i in some)
    assert all(int(memory.isfinite().sum()) == x.numel() for (memory, _), x in zip(rooms, grads, strict=True))
