"""Distinct pairs of a dilated pattern, by inclusion and exclusion over its branches."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import combinations

import torch

from dilated_attention.pattern.dilated import NOT_IN_BRANCH, DilatedPattern


def distinct_pairs(pattern: DilatedPattern, num_positions: int, num_heads: int, *, is_causal: bool = False) -> int:
    """Number of (head, query, key) triples with multiplicity ≥ 1."""
    offsets_of_head = Counter(zip(*pattern.offsets(num_heads), strict=True))
    positions = torch.arange(num_positions)
    boundaries = [positions % length == 0 for length, _ in pattern.branches]
    phases = [positions % length % rate for length, rate in pattern.branches]
    total = 0
    for offsets, num_equal_heads in offsets_of_head.items():
        branches = [(phase == o, boundary) for phase, boundary, o in zip(phases, boundaries, offsets, strict=True) if o != NOT_IN_BRANCH]
        for size in range(1, len(branches) + 1):
            for subset in combinations(branches, size):
                total += num_equal_heads * _pairs_in_all(subset, is_causal) * (1 if size % 2 else -1)
    return total


def _pairs_in_all(branches: tuple[tuple[torch.Tensor, torch.Tensor], ...], is_causal: bool) -> int:
    """Pairs that every branch of the set takes: squares of the counts between common segment boundaries.

    A branch is (positions taken, positions that begin a segment), both bool.
    """
    taken = functools.reduce(torch.logical_and, (taken for taken, _ in branches))
    boundary = functools.reduce(torch.logical_or, (boundary for _, boundary in branches))
    cell = boundary.cumsum(0)[taken]
    if not cell.numel():
        return 0
    count = torch.bincount(cell)
    return int((count * (count + 1) // 2).sum() if is_causal else (count * count).sum())
