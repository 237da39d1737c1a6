"""The rule by which branches follow the length of the context."""

from __future__ import annotations

from dilated_attention.pattern.checks import as_int


def geometric_branches(length: int, first: int = 2048, growth: int = 4) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns LongNet's branches for a context (arXiv 2307.02486, section 2.2): w_i = first · growth^i, r_i = w_i // first.

    The last segment is the context itself, w = length with r = length // first, so that positions at any distance can see each other. A
    query that a branch takes has w / r ≈ ``first`` keys in it: exactly ``first`` where w is a multiple of it, else fewer than 2·first. A
    head takes every r-th position, so a branch costs first / r keys per query and head in the mean (half if causal), and all of them
    together about first · growth / (growth − 1), 4/3 · first: the same for every context, but for those below 2 · first, whose branches
    are both dense.

    Args:
        length: positions of the context, ≥ 1.
        first: the shortest segment, which is attended densely, ≥ 1; a shorter context is one dense branch.
        growth: from one segment to the next, ≥ 2.

    Returns:
        (segment_lengths, dilation_rates), for ``DilatedPattern`` and everything that takes branches.

    Raises:
        ValueError, TypeError: if a number is not an integer of its range.

    >>> geometric_branches(65536)
    ((2048, 8192, 32768, 65536), (1, 4, 16, 32))
    """
    length, first = as_int("length", length, minimum=1), as_int("first", first, minimum=1)
    growth = as_int("growth", growth, minimum=2)
    segments = []
    segment = first
    while segment < length:
        segments.append(segment)
        segment *= growth
    segments.append(length)
    return tuple(segments), tuple(max(1, w // first) for w in segments)
