"""geometric_branches: the branches of a context by LongNet's rule, and what they cost."""

from __future__ import annotations

import pytest

from dilated_attention.pattern import DilatedPattern, geometric_branches


def test_branches_reach_the_length() -> None:
    assert geometric_branches(16_384, 512) == ((512, 2048, 8192, 16_384), (1, 4, 16, 32))
    assert geometric_branches(512, 2048) == ((512,), (1,))
    assert geometric_branches(3000) == ((2048, 3000), (1, 1))
    assert geometric_branches(100, 10, growth=2) == ((10, 20, 40, 80, 100), (1, 2, 4, 8, 10))


@pytest.mark.parametrize("length", [64, 256, 1000, 4096])
def test_a_query_has_first_keys_in_each_branch_that_takes_it(length: int) -> None:
    lengths, rates = geometric_branches(length, 64)
    pattern = DilatedPattern(lengths, rates)
    # heads for every offset
    heads = max(rates)
    for keys, (w, r) in zip(pattern.branch_pairs(length, heads), pattern.branches, strict=True):
        # of the queries that a branch takes, which are every r-th
        keys_of_a_query = keys / (length * heads) * r
        assert keys_of_a_query < 2 * 64
        # the last segment may be cut off
        assert length % w or keys_of_a_query >= 64
    assert lengths[-1] == length
    assert pattern.pairs(length, heads) / (length * heads) < 4 / 3 * 2 * 64


def test_what_is_no_context_is_refused() -> None:
    for wrong in ({"length": 0}, {"length": 8, "first": 0}, {"length": 8, "growth": 1}):
        name, value = list(wrong.items())[-1]
        with pytest.raises(ValueError, match=f"{name} is {value}; expected an integer ≥"):
            geometric_branches(**wrong)
    with pytest.raises(TypeError, match="expected an integer"):
        geometric_branches(1e6)  # type: ignore[arg-type]
