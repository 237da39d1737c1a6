"""Block-sparse attention of spread sequences over NCCL: every pattern, option and length in float64, random calls in bfloat16.

Needs 2, 3 and 4 GPUs. The calls in float64 are those of ``test_ring_blocks.py``; nothing but the exchange can be wrong in them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dilated_attention.testing import low_precision_bound, max_error
from tests.distributed import test_ring_blocks as on_cpus
from tests.distributed.test_ring_blocks import DISAGREEMENTS, NAMES, Spread, case_of, disagreeing, together
from tests.functional.test_block_sparse import PATTERNS, RESULTS, TOLERANCE, inputs, plain, results
from tests.helpers.machine import DEVICE, ON_CPU, needs, pool, share, worlds

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(600)]

CHOSEN: dict[str, Callable[[int], list[Spread]]] = {
    "pattern": on_cpus.of_every_pattern,
    "option": on_cpus.of_every_option,
    "length": on_cpus.of_every_length,
}


@pytest.mark.parametrize("what", CHOSEN)
@pytest.mark.parametrize("world", worlds(2, 3, 4))
def test_chosen_calls_in_float64(world: int, what: str) -> None:
    spreads = CHOSEN[what](world)
    spreads = spreads[: share(len(spreads))]
    ranks = pool(world).run(on_cpus.run, spreads)
    for index, spread in enumerate(spreads):
        found = together(spread, [rank[index] for rank in ranks])
        truth = results(plain, spread.case, inputs(spread.case, device=DEVICE))
        for name in RESULTS:
            error = max_error(found[name].to(DEVICE), truth[name])
            assert error <= TOLERANCE, f"E({name}) = {error:.3g} on {world} GPUs: {spread}"


@dataclass(frozen=True)
class Kind:
    """What a sweep's kernels are compiled for; ``backend`` but for dropout, which it has not."""

    backend: str
    block: tuple[int, int]
    head_dim: int
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16


KINDS = {
    "triton, 64": Kind("triton", (64, 64), 64, 1),
    "auto, 128": Kind("auto", (128, 128), 128, 2),
}
# those that exist at one length only
OF_ONE_LENGTH = ("documents", "table", "table of heads")


def draw(world: int, seed: int, kind: Kind) -> Spread:
    rng = random.Random(world * 100_003 + seed)
    n = rng.choice([rng.randint(70, 200), rng.randint(200, 700), 128 * world * rng.randint(1, 2)])
    bounds = (0, *sorted(rng.randint(0, n) for _ in range(rng.randint(0, 3))), n) if rng.random() < 0.2 else None
    name = rng.choice([name for name in NAMES if bounds is None or name not in OF_ONE_LENGTH])
    dropout_p = 0.3 if rng.random() < 0.1 else 0.0
    case = case_of(
        PATTERNS[name](n, kind.block),
        n,
        heads=2,
        kv_heads=kind.kv_heads,
        head_dim=kind.head_dim,
        batch=1 if bounds else rng.choice([1, 2]),
        is_causal=rng.random() < 0.5,
        bounds=bounds,
        padding=rng.random() < 0.15,
        dropout_p=dropout_p,
        scale=rng.choice([None, None, 0.1]),
        seed=rng.randint(0, 2**16),
    )
    return Spread(
        case=case,
        layout=rng.choice(["contiguous", "zigzag", "balanced", "dealt"]),
        head_steps=rng.choice([None, 1, 2]),
        seq_len_given=rng.random() < 0.7,
        backend="auto" if dropout_p or ON_CPU else kind.backend,
    )


def bounds_of(spread: Spread, world: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(results in float64, what each is held to): 2·E(plain attention in this dtype) and roundings, as in ``testing.measure``."""
    case = spread.case
    x = inputs(case, dtype, DEVICE)
    truth, same, wide = (results(plain, case, x, kind) for kind in (torch.float64, dtype, torch.float32))
    bounds = {name: low_precision_bound(same[name], truth[name], dtype) for name in RESULTS}
    # an error of δ acts as a gradient of lse does: here that of the rounded out which every flash backward reads
    leaves = [y.double().requires_grad_() for y in (x.q, x.k, x.v)]
    out, lse = plain(case, x, *leaves)
    error = (x.dout.double() * (out.to(dtype).double() - out)).sum(-1).transpose(1, 2).detach()
    for name, grad in zip(("dq", "dk"), torch.autograd.grad(lse, leaves[:2], error), strict=True):
        bounds[name] += 2 * float(grad.abs().max())
    for name in ("dk", "dv"):
        # every rank's share is rounded once, before they are summed in float32
        bounds[name] += world / 2 * torch.finfo(dtype).eps * float(truth[name].abs().max())
    bounds["lse"] = low_precision_bound(wide["lse"], truth["lse"], torch.float32) + torch.finfo(dtype).eps / 8
    return truth, bounds


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", worlds(2, 3, 4))
def test_random_calls_in_half_precision(world: int, name: str) -> None:
    kind = KINDS[name]
    spreads = [draw(world, seed, kind) for seed in range(share(20))]
    ranks = pool(world).run(on_cpus.run, spreads, kind.dtype)
    for index, spread in enumerate(spreads):
        found = together(spread, [rank[index] for rank in ranks])
        truth, bounds = bounds_of(spread, world, kind.dtype)
        for what in RESULTS:
            error = max_error(found[what].to(DEVICE), truth[what])
            assert error <= bounds[what], f"E({what}) = {error:.3g} > {bounds[what]:.3g} on {world} GPUs: {spread}"


# --- what the ranks do together ---------------------------------------------------------------------------------------------------

WORDS = {
    "call": "ranks disagree on function: ranks 0, 1 have ring_block_sparse_attention, rank 2 has ring_attention",
    "pattern": "ring_block_sparse_attention: ranks disagree on pattern: ranks 0, 1 have .*40.*, rank 2 has .*41",
    "is_causal": "ranks disagree on is_causal: ranks 0, 1 have False, rank 2 has True",
    "layout": "ranks disagree on layout: ranks 0, 1 have contiguous, rank 2 has zigzag",
    "backend": "ranks disagree on kernels: ranks 0, 1 have available, rank 2 has unavailable: backend='flash4'",
}


@pytest.mark.parametrize("which", WORDS)
@pytest.mark.parametrize("world", worlds(3))
def test_ranks_that_disagree_all_raise_the_same_and_go_on(world: int, which: str) -> None:
    texts = pool(world).run(disagreeing, which, 64 + DISAGREEMENTS.index(which))
    assert len(set(texts)) == 1 and re.search(WORDS[which], texts[0]), texts
    spread = Spread(case=case_of(on_cpus.SHARED, 100))
    parts: list[Any] = [rank[0] for rank in pool(world).run(on_cpus.run, [spread])]
    truth = results(plain, spread.case, inputs(spread.case))
    assert all(max_error(x, truth[name]) <= TOLERANCE for name, x in together(spread, parts).items())


@pytest.mark.parametrize("world", [pytest.param(3, marks=needs(3), id="3 GPUs")])
def test_the_module(world: int) -> None:
    pool(world).run(on_cpus.module)
