"""Attention of sequences spread by a ``Layout``, whose runs begin and end anywhere, against one process, in float64, to 1e-10."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.distributed import Layout
from tests.distributed.test_ring import check
from tests.helpers.ring_cases import WHOLE, Spread, draw, with_changes
from tests.helpers.ring_chosen import spread_of

WORLDS = (1, 2, 3, 4, 5)


def random_layout(seq_len: int, world: int, seed: int) -> Layout:
    """Runs of random lengths, dealt at random: neighbours may go to one rank, and a rank may get none."""
    rng = random.Random(seed)
    cuts = sorted({0, seq_len, *(rng.randint(0, seq_len) for _ in range(rng.randint(0, 4 * world)))})
    runs: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for start, end in itertools.pairwise(cuts):
        runs[rng.randrange(world)].append((start, end))
    return Layout(seq_len, tuple(tuple(mine) for mine in runs))


def with_layout(spread: Spread, world: int, seed: int) -> Spread:
    return with_changes(spread, layout=random_layout(spread.case.num_keys, world, seed).name)


@pytest.mark.parametrize("world", WORLDS)
def test_random_calls(world: int) -> None:
    check(world, [with_layout(draw(world, seed), world, seed) for seed in range(1000, 1060)])


DOCUMENTS = (0, 3, 3, 40, 41, 96)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "bounds": DOCUMENTS, "batch": 1},
    {"bounds": DOCUMENTS, "batch": 1, "steps": True},
    {"is_causal": True, "padding": "some", "heads": 8, "kv_heads": 1},
    {"is_causal": True, "dropout_p": 0.4, "bounds": DOCUMENTS, "batch": 1},
)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_every_option(world: int) -> None:
    patterns = (
        WHOLE,
        DilatedPattern((16, 48, 96), (1, 2, 4)),
        DilatedPattern((31, 70), (3, 5), "blocked", tail="zero_keys"),
        DilatedPattern((24, 96), (1, 2), branch_heads="split"),
    )
    spreads = [
        with_layout(spread_of(pattern, 96, exchange=exchange, **options), world, index)
        for pattern in patterns
        for index, options in enumerate(OPTIONS)
        for exchange in ("all_gather", "ring")
    ]
    windows = [
        with_layout(spread_of(WHOLE, 96, window=window, exchange="all_gather", **options), world, 50 + index)
        for window in ((9, 0), (0, 4), (None, 20))
        for index, options in enumerate(OPTIONS)
    ]
    heads = [
        with_layout(spread_of(pattern, 96, heads=2 * world, kv_heads=world, exchange="all_to_all", **OPTIONS[2]), world, 90 + index)
        for index, pattern in enumerate(patterns[:3])
    ]
    check(world, [*spreads, *windows, *heads])
