"""Distinct pairs of a dilated pattern, by inclusion and exclusion over its branches."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import torch

from dilated_attention.pattern.dilated import NOT_IN_BRANCH, DilatedPattern


def distinct_pairs(pattern: DilatedPattern, num_positions: int, num_heads: int, *, is_causal: bool = False) -> int:
    """Number of (head, query, key) triples with multiplicity ≥ 1."""
    offsets_of_head = Counter(zip(*pattern.offsets(num_heads), strict=True))
    positions = torch.arange(num_positions)
    total = 0
    for offsets, num_equal_heads in offsets_of_head.items():
        branches = [(w, r, o) for (w, r), o in zip(pattern.branches, offsets, strict=True) if o != NOT_IN_BRANCH]
        for size in range(1, len(branches) + 1):
            for subset in combinations(branches, size):
                shared = _pairs_in_all(positions, subset, is_causal)
                total += num_equal_heads * shared * (1 if size % 2 else -1)
    return total


def _pairs_in_all(positions: torch.Tensor, branches: tuple[tuple[int, int, int], ...], is_causal: bool) -> int:
    """Pairs that every branch of the set takes: squares of the counts between common segment boundaries."""
    taken = torch.ones_like(positions, dtype=torch.bool)
    boundary = torch.zeros_like(positions, dtype=torch.bool)
    for length, rate, offset in branches:
        taken &= positions % length % rate == offset
        boundary |= positions % length == 0
    cell = boundary.cumsum(0)[taken]
    if not cell.numel():
        return 0
    count = torch.bincount(cell)
    return int((count * (count + 1) // 2).sum() if is_causal else (count * count).sum())
