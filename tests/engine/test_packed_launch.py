"""Parts of the queries over packed documents, as ranks of a ring have them: in one launch of a library that takes bounds; own kernels."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.backends import registry
from dilated_attention.backends.flash import flash3
from dilated_attention.testing import Case, Result, inputs, max_error
from dilated_attention.testing.check import truth_and_bounds
from tests.backends.test_libraries import Flash3Ops, put_on_cpu
from tests.helpers import ring_cases
from tests.helpers.pool import pool_of
from tests.helpers.ring_cases import WHOLE, Spread

DTYPES = {"flash3": torch.float64, "tiles": torch.float32}


def spreads(backend: str) -> list[Spread]:
    cases = []
    for seed in range(12):
        rng = random.Random(seed)
        bounds = (0, *sorted(rng.sample(range(1, 60), rng.randint(1, 2))), 60)
        pattern = DilatedPattern((8, 40), (1, 3), "zero") if backend == "tiles" and seed % 2 else WHOLE
        case = Case(pattern=pattern, num_queries=60, num_keys=60, heads=4, kv_heads=(1, 2, 4)[seed % 3], bounds=bounds)
        cases.append(replace(case, is_causal=rng.random() < 0.6, lse_grad=seed % 4 == 0, seed=seed))
    return [Spread(case=case, backend=backend, exchange="all_gather") for case in cases[: 3 if backend == "tiles" else None]]


def run(rank: int, world: int, backend: str) -> tuple[list[list[Result]], int]:
    """FlashAttention-3 stands for all that take boundaries of documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash3, "_ops", Flash3Ops)
        patch.setattr(Flash3Ops, "packed", 0)
        put_on_cpu(patch, backend)
        found = ring_cases.run(rank, world, spreads(backend), DTYPES[backend]), Flash3Ops.packed
    registry.cached.clear()
    return found


@pytest.mark.parametrize(
    "backend",
    ["flash3", pytest.param("tiles", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels"))],
)
def test_ranks_attend_from_their_queries_to_all_keys(backend: str) -> None:
    ranks = pool_of(2).run(run, backend)
    for index, spread in enumerate(spreads(backend)):
        truth, bounds = truth_and_bounds(spread.case, inputs(spread.case, DTYPES[backend]))
        for name, x in ring_cases.together(spread, [results[index][0] for results, _ in ranks]).items():
            assert max_error(x, truth[name]) <= bounds[name], (name, spread)
    # others are cut into problems, since no rank needs all keys
    assert backend == "tiles" or all(packed >= 12 for _, packed in ranks), ranks[0][1]
