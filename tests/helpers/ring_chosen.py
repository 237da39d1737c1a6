"""Chosen calls on spread sequences, on CPUs and GPUs."""

from __future__ import annotations

from typing import Any

from dilated_attention import DilatedPattern
from dilated_attention.distributed import LAYOUTS
from dilated_attention.testing import Case
from tests.helpers.ring_cases import WHOLE, Spread, with_changes


def spread_of(pattern: DilatedPattern = WHOLE, n: int = 48, **changes: Any) -> Spread:
    case = Case(pattern=pattern, batch=2, num_queries=n, num_keys=n, heads=4, kv_heads=2, lse_grad=True, seed=3)
    return with_changes(Spread(case=case), **changes)


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
