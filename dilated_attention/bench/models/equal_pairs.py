"""Patterns that keep equally many pairs: of each kind the one whose number of causal pairs is nearest to a share of dense attention's."""

from __future__ import annotations

import bisect
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dilated_attention import pattern as patterns
from dilated_attention.bench.measure.limits import Refused
from dilated_attention.pattern import DilatedPattern, GlobalLocal, Pattern, RandomBlocks, TopBlocks

# positions of a block: larger ones have too few rows and columns to keep a twentieth of a short sequence
BLOCK = 64
# a share of pairs that is farther from the target than this part of it is not equal
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """What a pattern is made for: ``length`` positions, ``heads`` query heads, a ``share`` of the causal pairs, above 0 and below 1."""

    length: int
    heads: int
    share: float

    @property
    def first(self) -> int:
        """First tokens that all queries see: a quarter of what a query keeps in the mean, at most 64."""
        return max(1, min(64, int(self.share * self.length / 8)))


# the pattern of a kind for a case and a number from 1 to ``length``, of which a density is a share; the pairs grow or fall with it
Family = Callable[[Case, int], Pattern]


def _big_bird(case: Case, x: int) -> Pattern:
    # random blocks take a quarter of the pairs; half of those drawn are later than the query
    return patterns.BigBird(x, case.first, max(1, int(case.share * case.length / (4 * BLOCK))), block_size=BLOCK)


def _prefix_dilated(case: Case, x: int) -> Pattern:
    # at each rate as many blocks as the window has on one side
    far = (patterns.DilatedBlocks(rate, 2 * max(1, x // (2 * BLOCK)), block_size=BLOCK) for rate in (2, 4, 8))
    return functools.reduce(operator.or_, far, GlobalLocal(x, case.first, block_size=BLOCK))


def _prefix_strided(case: Case, x: int) -> Pattern:
    # far blocks take half of the pairs
    return GlobalLocal(x, case.first, block_size=BLOCK) | patterns.Strided(max(2, round(2 / case.share)), block_size=BLOCK)


def _dilated(case: Case, x: int) -> Pattern:
    # from the share of two branches on, branches that grow slower come closer to the target
    return DilatedPattern(*patterns.geometric_branches(case.length, x, 4 if case.share < 1 / 3 else 2))


def _dilated_near(case: Case, x: int) -> Pattern:
    return DilatedPattern(tuple(max(rate, min(x * rate, case.length)) for rate in (1, 2, 4, 8)), (1, 2, 4, 8))


# name → (family, what it keeps)
METHODS: dict[str, tuple[Family, str]] = {
    "window": (lambda case, x: patterns.LocalWindow(x, block_size=BLOCK), "the last keys"),
    "global-local": (lambda case, x: GlobalLocal(x, case.first, block_size=BLOCK), "the first keys and the last ones"),
    "big-bird": (_big_bird, "first, last and random blocks"),
    "random-blocks": (
        lambda case, x: RandomBlocks(x / case.length, own_block=True, block_size=BLOCK),
        "random blocks and the own one",
    ),
    "prefix-strided": (_prefix_strided, "the first keys, the last ones and every n-th block"),
    "prefix-dilated": (_prefix_dilated, "the first keys, the last ones, and before those every 2nd block, then every 4th, then every 8th"),
    "top-blocks": (lambda case, x: TopBlocks(density=x / case.length, block_size=BLOCK), "blocks chosen by content"),
    "dilated": (_dilated, "branches up to the whole length, each 4 times as long and dilated (2 times from a third of the pairs on)"),
    "dilated-near": (_dilated_near, "branches of rates 1, 2, 4, 8 with segments in proportion"),
}


def family_of(spec: str) -> Family:
    """Reads a pattern's ``spec()`` with one number written as ``"?"``. Raises ValueError where there is none, or no such pattern."""
    unknown = re.findall(r'"(\w+)"\s*:\s*"\?"', spec)
    if len(unknown) != 1 or unknown == ["mass"]:
        raise ValueError(
            f'the pattern is {spec!r}; expected what spec() returns, with one number written as "?" that decides how many pairs are kept, '
            'and no mass, whose share depends on the text: {"pattern":"TopBlocks","density":"?"}'
        )

    def family(case: Case, x: int) -> Pattern:
        return patterns.pattern_from_spec(spec.replace('"?"', str(x / case.length if unknown[0] in ("density", "ratio") else x)))

    family(Case(1024, 1, 0.5), 8)
    return family


def share_of(pattern: Pattern, length: int, heads: int) -> float:
    """Returns the pairs of a causal call over those of dense attention, H · N · (N + 1) / 2; a pair of several branches counts in each.

    Of a pattern chosen by content these are the pairs of random q and k: with a given number of blocks only the choice differs.
    """
    if isinstance(pattern, TopBlocks):
        draw = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, length, heads, 8, generator=draw) for _ in range(2))
        pattern = pattern.choose(q, k, is_causal=True)
    return 2 * length / (length + 1) * pattern.density(length, heads, is_causal=True)


def solve(family: Family, case: Case) -> Pattern:
    """Returns the pattern whose share of pairs is nearest to ``case.share``.

    Raises:
        Refused: the nearest one differs by more than ``TOLERANCE``; blocks are too large for so short a sequence, or first tokens too many.
    """

    @functools.cache
    def off(x: int) -> float:
        return share_of(family(case, x), case.length, case.heads) / case.share - 1

    sign = 1 if off(1) <= off(case.length) else -1
    # the numbers on both sides of the target
    at = bisect.bisect_left(range(1, case.length + 1), True, key=lambda x: sign * off(x) >= 0)
    best = min((x for x in (at, at + 1) if 1 <= x <= case.length), key=lambda x: abs(off(x)))
    if abs(off(best)) > TOLERANCE:
        nearest = 100 * case.share * (1 + off(best))
        raise Refused(f"none keeps {100 * case.share:g} % of the pairs of {case.length:,} positions; the nearest keeps {nearest:.1f} %")
    return family(case, best)
