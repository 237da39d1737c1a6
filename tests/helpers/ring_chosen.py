"""Chosen calls on spread sequences, on CPUs and GPUs: where lengths, segments, heads and ranks meet at their edges."""

from __future__ import annotations

from typing import Any

from dilated_attention import DilatedPattern
from dilated_attention.distributed import LAYOUTS
from dilated_attention.testing import Case
from tests.helpers.ring_cases import WHOLE, Spread, with_changes


def spread_of(pattern: DilatedPattern = WHOLE, n: int = 48, **changes: Any) -> Spread:
    case = Case(pattern=pattern, batch=2, num_queries=n, num_keys=n, heads=4, kv_heads=2, lse_grad=True, seed=3)
    return with_changes(Spread(case=case), **changes)


def segments_and_ranks(world: int) -> list[Spread]:
    """Segments inside a rank, of two ranks, of all, longer than the sequence, and across bounds; rates that divide nothing."""
    n = 96
    share = n // world
    patterns = [
        DilatedPattern((share, 2 * share, n), (1, 2, 4)),
        DilatedPattern((share // 2, 2 * share, 4 * n), (1, 3, 5), "blocked"),
        DilatedPattern((share + 1, 31, 77), (1, 4, 9)),
        DilatedPattern((2 * share, n), (5, 7), "zero", tail="zero_keys"),
        DilatedPattern((2 * share, n), (2, 3), ((1, 0, 0, 1), (2, 2, 1, 0)), tail="zero_keys"),
        DilatedPattern((share, n, n), (2, 2, 2)),
        DilatedPattern((share, n), (1, 2), branch_heads="split"),
    ]
    return [
        spread_of(pattern, n, is_causal=is_causal, exchange=exchange, layout=layout)
        for pattern in patterns
        for exchange, layout, is_causal in (
            ("all_gather", "contiguous", False),
            ("all_gather", "contiguous", True),
            ("all_gather", "zigzag", True),
            ("auto", "striped", False),
        )
    ]


def biases() -> list[Spread]:
    """By position and by place, of branches and of all keys, where rows move, where heads do, and where neither does."""
    branches = DilatedPattern((16, 32, 100), (1, 2, 4))
    ways: list[dict[str, Any]] = [
        {"pattern": WHOLE, "layout": "zigzag", "is_causal": True, "bias": "alibi"},
        {"pattern": branches, "layout": "striped", "bias": "plane"},
        {"pattern": WHOLE, "exchange": "all_to_all", "bias": "line", "batch": 2},
        {"pattern": branches, "bounds": (0, 9, 31, 40), "bias": "plane"},
    ]
    return [spread_of(n=40, head_dim=32, **{"heads": 2, "kv_heads": 1, "batch": 1, **way}) for way in ways]


def of_each_kind() -> list[Spread]:
    """Of every exchange and layout one dense call and one dilated."""
    return [
        spread_of(pattern, 61, exchange=exchange, layout=layout, is_causal=True, steps=True)
        for pattern in (WHOLE, DilatedPattern((8, 40, 61), (1, 2, 3)))
        for exchange in ("all_gather", "all_to_all")
        for layout in LAYOUTS
    ]
