"""Block-sparse attention of spread sequences, alone and beside dilated branches: what the definition gives, in float64, to 1e-10.

Over gloo, and over NCCL where GPUs are there (pytest -m gpus), also in half precision.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, balanced_layout
from dilated_attention.distributed import Layout
from dilated_attention.pattern import BlockPattern, LocalWindow, with_sparsity
from dilated_attention.testing import Case, Space
from dilated_attention.testing.cases import random_blocks
from tests.distributed.test_ring import check as check_spreads
from tests.helpers.forms import FORMS
from tests.helpers.machine import ON_CPU, share, worlds
from tests.helpers.pool import Pool, pool_of
from tests.helpers.ring_cases import Spread
from tests.helpers.strategies import cases


def laid_out(spreads: Sequence[Spread], world: int) -> list[Spread]:
    """With the layouts "balanced" and "dealt", blocks dealt at random, by the names of their runs."""
    found = []
    for spread in spreads:
        case, N = spread.case, spread.case.num_keys
        if spread.layout == "balanced":
            spread = replace(spread, layout=balanced_layout(case.pattern, N, world, case.heads, is_causal=case.is_causal).name)
        if spread.layout == "dealt":
            size = max(case.pattern.block_size)
            runs: list[list[tuple[int, int]]] = [[] for _ in range(world)]
            for start, owner in zip(range(0, N, size), random.Random(case.seed).choices(range(world), k=-(-N // size)), strict=True):
                runs[owner].append((start, min(start + size, N)))
            spread = replace(spread, layout=Layout(N, tuple(map(tuple, runs))).name)
        found.append(spread)
    return found


def check(pool: Pool, spreads: Sequence[Spread], dtype: torch.dtype = torch.float64) -> None:
    check_spreads(pool, laid_out(spreads, pool.world), dtype)


def case_of(pattern: BlockPattern, N: int, **changes: Any) -> Case:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 3, "lse_grad": True} | changes
    return Case(pattern=pattern, num_queries=N, num_keys=N, **options)


def test_documents_of_which_only_the_long_one_differs_between_heads() -> None:
    pattern = with_sparsity(0.3, "big_bird", block_size=64)
    assert pattern.at(1000).per_head and not pattern.at(300).per_head
    case = case_of(pattern, 1300, heads=2, bounds=(0, 300, 1300))
    check(pool_of(2), [Spread(case=case), Spread(case=case, head_steps=2)])


def test_a_segment_that_begins_within_a_block_is_counted_from_its_own_first_position() -> None:
    """The last rank's memory begins with that block, 32 positions before the segment, and is shorter than a segment."""
    case = case_of(LocalWindow(0, block_size=64), 240, is_causal=True, branches=DilatedPattern((160,), (1,)))
    check(pool_of(3), [Spread(case=case)])


# chosen by content, some cases are of branches alone: test_ring.py
WITH_BLOCKS = cases(Space(blocks=True, softcap=True, bias=True, max_length=500, head_dims=(3,))).map(FORMS["ring"][1])


@pytest.mark.parametrize("pool", worlds(1, 2, 3, 4, gpus=(2, 3, 4)))
@settings(max_examples=share(20))
@given(
    case=WITH_BLOCKS.filter(lambda case: isinstance(case.pattern, BlockPattern)),
    layout=st.sampled_from(["contiguous", "zigzag", "balanced", "dealt"]),
    head_steps=st.none() | st.integers(1, 3),
    seq_len_given=st.booleans(),
)
def test_anything_with_anything(pool: Pool, case: Case, **ways: Any) -> None:
    check(pool, [Spread(case=case, **ways)])


# --- half precision on GPUs -------------------------------------------------------------------------------------------------------


# backend, but for dropout, which it has not; blocks, head dim, key heads: what a sweep's kernels are compiled for
KERNELS: dict[str, tuple[str, tuple[int, int], int, int]] = {
    "triton, 64": ("triton", (64, 64), 64, 1),
    "auto, 128": ("auto", (128, 128), 128, 2),
}


def draw(world: int, seed: int, backend: str, block: tuple[int, int], head_dim: int, kv_heads: int) -> Spread:
    rng = random.Random(world * 100_003 + seed)
    n = rng.choice([rng.randint(70, 200), rng.randint(200, 700), 128 * world * rng.randint(1, 2)])
    bounds = (0, *sorted(rng.randint(0, n) for _ in range(rng.randint(0, 3))), n) if rng.random() < 0.2 else None
    dropout_p = 0.3 if rng.random() < 0.1 else 0.0
    case = case_of(
        random_blocks(rng, 2, n, block, any_length=bounds is not None),
        n,
        heads=2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=1 if bounds else rng.choice([1, 2]),
        is_causal=rng.random() < 0.5,
        bounds=bounds,
        padding="some" if rng.random() < 0.15 else "none",
        dropout_p=dropout_p,
        scale=rng.choice([None, None, 0.1]),
        seed=rng.randint(0, 2**16),
    )
    return Spread(
        case=case,
        layout=rng.choice(["contiguous", "zigzag", "balanced", "dealt"]),
        head_steps=rng.choice([None, 1, 2]),
        seq_len_given=rng.random() < 0.7,
        backend="auto" if dropout_p or ON_CPU else backend,
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("pool", worlds(gpus=(2, 3, 4)))
def test_random_calls_in_half_precision(pool: Pool, name: str) -> None:
    check(pool, [draw(pool.world, seed, *KERNELS[name]) for seed in range(share(20))], torch.bfloat16)
