"""The one merge: any split of the keys, in any order and bracketing, is the whole softmax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention.backends.merge import add_zero_keys, merge_
from dilated_attention.testing import max_error
from tests.helpers.merge_twin import merge


def softmax_part(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (D,), lse ()) of one row over some keys, each part rounded to float32 from float64 like a kernel's result."""
    if not len(scores):
        return torch.zeros(values.shape[1]), torch.tensor(-math.inf)
    lse = scores.logsumexp(0)
    return ((scores - lse).exp() @ values).float(), lse.float()


def combine(parts: list[tuple[torch.Tensor, torch.Tensor]], choose: Callable[[int], int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two parts at a time, whichever two ``choose`` names, until one is left: every order, every bracketing."""
    parts = list(parts)
    while len(parts) > 1:
        a = parts.pop(choose(len(parts)))
        b = parts.pop(choose(len(parts)))
        parts.append(merge(*a, *b))
    return parts[0]


@given(data=st.data())
@settings(max_examples=500)
def test_merge_law(data: st.DataObject) -> None:
    """Any split of the keys, merged in any order and bracketing, is the whole softmax, within 4 ulp of float32 per merge's path."""
    count = data.draw(st.integers(1, 24), "keys")
    spread = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]), "spread")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    scores = torch.randn(count, generator=generator, dtype=torch.float64) * spread
    # float32 holds the lse of a part to half an ulp of the lse: at 1e4 that is 5e-4 of a weight, so the grid is what float32 holds
    scores = scores.round() if spread > 1 else scores
    values = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6), "cuts"))
    bounds = [0, *cuts, count]
    parts = [softmax_part(scores[a:b], values[a:b]) for a, b in itertools.pairwise(bounds)]
    out, lse = combine(parts, lambda n: data.draw(st.integers(0, n - 1)))
    truth = scores.logsumexp(0)
    true_out = (scores - truth).exp() @ values
    ulp = torch.finfo(torch.float32).eps
    # each merge rounds lse once; an error of lse is a relative error of the weights that follow from it
    merges = max(1, len(parts) - 1)
    lse_error = 4 * ulp * merges * max(1.0, abs(float(truth)), float(scores.abs().max()))
    assert abs(float(lse) - float(truth)) <= lse_error
    assert max_error(out, true_out) <= (4 * ulp * merges + 2 * lse_error) * float(values.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merge_with_empty_parts(dtype: torch.dtype) -> None:
    out, lse = torch.randn(3, 5, 4, dtype=dtype), torch.randn(3, 5, dtype=dtype) * 50
    nothing, never = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (merge(out, lse, nothing, never), merge(nothing, never, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    both = merge(nothing, never, nothing, never)
    assert torch.equal(both[0], nothing) and torch.equal(both[1], never)


def test_merge_of_huge_and_tiny() -> None:
    out_1, out_2 = torch.full((1, 2), 3.0), torch.full((1, 2), 5.0)
    for low, high in ((-1e4, 1e4), (-3e38, 3e38), (-1e38, 0.0)):
        out, lse = merge(out_1, torch.tensor([low]), out_2, torch.tensor([high]))
        assert torch.equal(out, out_2) and float(lse) == torch.tensor(high).item()
    out, lse = merge(out_1, torch.tensor([1e4]), out_2, torch.tensor([1e4]))
    assert torch.equal(out, torch.full((1, 2), 4.0)) and float(lse) == pytest.approx(1e4 + math.log(2))


def test_merge_in_place_writes_through_strided_views() -> None:
    out, lse = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2)
    part, part_lse = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2)
    before = out.clone(), lse.clone()
    rows = out.as_strided((2, 3, 2, 8), (64, 128, 8, 1)), lse.as_strided((2, 3, 2), (8, 16, 1))
    merge_(*rows, part, part_lse)
    expected = merge(before[0].as_strided((2, 3, 2, 8), (64, 128, 8, 1)), before[1].as_strided((2, 3, 2), (8, 16, 1)), part, part_lse)
    assert torch.equal(rows[0], expected[0]) and torch.equal(rows[1], expected[1])
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched.as_strided((2, 3, 2, 8), (64, 128, 8, 1)).fill_(True)
    assert torch.equal(out[~touched], before[0][~touched])


def test_zero_keys_are_keys_of_score_and_value_zero() -> None:
    out, lse = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0.3, -4.0, 9.0, -math.inf], dtype=torch.float64)
    out[3] = 0
    found, found_lse = add_zero_keys(out, lse, 5)
    truth, truth_lse = merge(out, lse, torch.zeros_like(out), torch.full_like(lse, math.log(5)))
    assert max_error(found, truth) <= 1e-15 and max_error(found_lse, truth_lse) <= 1e-15
    assert not found[3].any() and float(found_lse[3]) == pytest.approx(math.log(5))
