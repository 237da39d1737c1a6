"""Counts the distinct pairs of a dilated pattern by inclusion and exclusion over its branches."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import combinations
from math import comb, lcm

import torch

from dilated_attention.pattern.checks import MAX_LENGTH, as_int
from dilated_attention.pattern.dilated import NOT_IN_BRANCH, DilatedPattern

# takes about ten minutes
_MOST_STEPS = 2**40


def distinct_pairs(pattern: DilatedPattern, num_positions: int, num_heads: int, *, is_causal: bool = False) -> int:
    """Returns the number of (head, query, key) triples with multiplicity ≥ 1."""
    return pairs_of_at_least(pattern, num_positions, num_heads, is_causal=is_causal)[0]


def pairs_of_at_least(pattern: DilatedPattern, num_positions: int, num_heads: int, *, is_causal: bool = False) -> tuple[int, ...]:
    """Returns the numbers of (head, query, key) triples with multiplicity ≥ 1, ≥ 2, … up to the number of branches."""
    num_positions = as_int("num_positions", num_positions, minimum=0, maximum=MAX_LENGTH)
    # where segments of all branches end together, the pattern repeats, and no pair crosses that boundary
    periods, rest = divmod(num_positions, lcm(*pattern.segment_lengths))
    if periods:
        part = pairs_of_at_least(pattern, rest, num_heads, is_causal=is_causal)
        period = _counted(pattern, lcm(*pattern.segment_lengths), num_heads, is_causal)
        return tuple(periods * x + y for x, y in zip(period, part, strict=True))
    return _counted(pattern, num_positions, num_heads, is_causal)


def _counted(pattern: DilatedPattern, num_positions: int, num_heads: int, is_causal: bool) -> tuple[int, ...]:
    offsets_of_head = Counter(zip(*pattern.offsets(num_heads), strict=True))
    running = 1 if pattern.branch_heads == "split" else pattern.num_branches
    if num_positions * len(offsets_of_head) << running > _MOST_STEPS:
        raise ValueError(
            f"segment_lengths has {pattern.num_branches} entries and num_positions {num_positions:,} up to where all segments end together, with "
            f"{len(offsets_of_head):,} different heads: which pairs several branches share is counted in 2**branches · positions · heads "
            f"steps, expected at most 2**{_MOST_STEPS.bit_length() - 1}: ask for a shorter sequence, fewer branches or heads"
        )
    positions = torch.arange(num_positions)
    boundaries = [positions % length == 0 for length, _ in pattern.branches]
    phases = [positions % length % rate for length, rate in pattern.branches]
    # pairs that a set of branches shares, summed over all sets of 1, 2, … branches
    shared = [0] * (pattern.num_branches + 1)
    for offsets, num_equal_heads in offsets_of_head.items():
        branches = [(phase == o, boundary) for phase, boundary, o in zip(phases, boundaries, offsets, strict=True) if o != NOT_IN_BRANCH]
        for size in range(1, len(branches) + 1):
            for subset in combinations(branches, size):
                shared[size] += num_equal_heads * _pairs_in_all(subset, is_causal)
    # a pair of multiplicity m is in C(m, size) of the sets; with these factors it counts 1 for every m from `least` on
    sizes = range(1, pattern.num_branches + 1)
    return tuple(
        sum((-1) ** (size - least) * comb(size - 1, least - 1) * shared[size] for size in range(least, sizes.stop)) for least in sizes
    )


def _pairs_in_all(branches: tuple[tuple[torch.Tensor, torch.Tensor], ...], is_causal: bool) -> int:
    """Counts the pairs that every branch of the set takes: squares of the counts between common segment boundaries.

    A branch is (positions taken, positions that begin a segment), both bool.
    """
    taken = functools.reduce(torch.logical_and, (taken for taken, _ in branches))
    boundary = functools.reduce(torch.logical_or, (boundary for _, boundary in branches))
    cell = boundary.cumsum(0)[taken]
    if not cell.numel():
        return 0
    count = torch.bincount(cell)
    return int((count * (count + 1) // 2).sum() if is_causal else (count * count).sum())
