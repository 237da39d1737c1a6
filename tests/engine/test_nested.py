"""Nested families: the rule, the tile tables through the plain-torch twin, the Hopper kernel on a GPU.

Gluon does not interpret: ``nested_gluon`` is compared with float64 on an H200 only.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention.backends import NESTED_CAPABILITIES, AttentionRequest, detect, reasons_of
from dilated_attention.engine.kernels.nested import nested_family, tile_table
from dilated_attention.engine.kernels.nested_selection import reasons_against_tensors
from dilated_attention.engine.reference import reference_attention
from dilated_attention.pattern import DilatedPattern
from tests.helpers.nested_twin import nested_attention_twin

LONGNET = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


@st.composite
def nested_patterns(draw: st.DrawFn) -> tuple[DilatedPattern, int, int]:
    """(pattern, heads, tile) of a random nested family whose tiles fit."""
    rates = [draw(st.sampled_from([1, 1, 2, 3]))]
    for _ in range(draw(st.integers(0, 2))):
        rates.append(rates[-1] * draw(st.sampled_from([1, 2, 2, 3])))
    tile = draw(st.sampled_from([1, 2, 4]))
    lengths = [rates[-1] * tile * draw(st.integers(1, 2))]
    for _ in rates[1:]:
        lengths.append(lengths[-1] * draw(st.sampled_from([1, 2, 3])))
    heads = draw(st.sampled_from([1, 2, 4]))
    offsets: list[list[int]] = [[draw(st.integers(0, rates[0] - 1)) for _ in range(heads)]]
    for below, rate in itertools.pairwise(rates):
        offsets.append([o + below * draw(st.integers(0, rate // below - 1)) for o in offsets[-1]])
    return DilatedPattern(lengths, rates, head_offsets=offsets), heads, tile  # type: ignore[arg-type]


def family_of(pattern: DilatedPattern, heads: int, num_positions: int):  # type: ignore[no-untyped-def]
    return nested_family(pattern.segment_lengths, pattern.dilation_rates, pattern.offsets(heads), num_positions)


@pytest.mark.slow
@given(case=nested_patterns(), is_causal=st.booleans(), group=st.sampled_from([1, 2]), rest=st.integers(0, 3), segments=st.integers(1, 2))
def test_twin_is_the_reference(case: tuple[DilatedPattern, int, int], is_causal: bool, group: int, rest: int, segments: int) -> None:
    pattern, heads, tile = case
    full = pattern.segment_lengths[-1] * segments
    if full > 160:
        full = pattern.segment_lengths[-1]
    rest = min(rest, pattern.segment_lengths[-1] - 1)
    family = family_of(pattern, heads, full + rest)
    assert family is not None and family.num_positions == full and family.has_tiles(tile, tile)
    torch.manual_seed(0)
    q = torch.randn(2, full + rest, heads, 5, dtype=torch.float64)
    k, v = torch.randn(2, 2, full + rest, max(heads // group, 1), 5, dtype=torch.float64)
    out, lse = nested_attention_twin(family, q, k, v, is_causal=is_causal, scale=0.7, tile_rows=tile, tile_keys=tile)
    expected, expected_lse = reference_attention(q[:, :full], k[:, :full], v[:, :full], pattern, is_causal=is_causal, scale=0.7)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-10)


@given(case=nested_patterns())
def test_pairs_are_those_of_the_pattern(case: tuple[DilatedPattern, int, int]) -> None:
    pattern, heads, _ = case
    num = pattern.segment_lengths[-1]
    family = family_of(pattern, heads, num)
    assert family is not None
    m = pattern.dense_mask(num, num, heads)
    assert family.pairs() * heads == int((m > 0).sum())
    assert family.branch_pairs() * heads == int(m.sum())


def test_longnet_visits_a_quarter_less() -> None:
    family = family_of(DilatedPattern(*LONGNET), 16, 2**20)
    assert family is not None
    assert (family.pairs() / 2**20, family.branch_pairs() / 2**20) == (3008, 3968)
    assert family.has_tiles(128, 128)
    assert [tile_table(family, level, 128, 128, False).counts[0, 2].item() for level in range(5)] == [16, 24, 32, 40, 48]
    for level in range(5):
        for rows in (False, True):
            assert tile_table(family, level, 128, 128, rows).shared.max() == level + 1


@pytest.mark.parametrize(
    ("lengths", "rates", "offsets"),
    [
        pytest.param([8, 12], [1, 2], [[0], [0]], id="length is no multiple"),
        pytest.param([12, 24], [2, 3], [[0], [0]], id="rate is no multiple"),
        pytest.param([8, 16], [2, 4], [[0], [1]], id="offsets disagree"),
        pytest.param([8, 16], [1, 3], [[0], [0]], id="rate divides no length"),
        pytest.param([8, 16], [1, 2], [[0], [-1]], id="a head is not in a branch"),
    ],
)
def test_what_is_not_nested(lengths: list[int], rates: list[int], offsets: list[list[int]]) -> None:
    assert nested_family(lengths, rates, offsets, 48) is None


def test_long_segments_are_the_sequence() -> None:
    family = nested_family([8, 1 << 40], [1, 2], [[0], [1]], 32)
    assert family is not None and family.lengths == (8, 32) and family.num_positions == 32
    assert nested_family([8, 1 << 40], [1, 2], [[0], [1]], 36) is None
    family = nested_family([64, 128], [1, 2], [[0], [1]], 128)
    assert family is not None and family.has_tiles(32, 32) and not family.has_tiles(128, 32)


def test_tensors_are_refused_with_every_reason() -> None:
    family = family_of(DilatedPattern(*LONGNET), 4, 32768)
    x = torch.empty(1, 32768, 4, 64, dtype=torch.bfloat16)
    assert reasons_against_tensors(family, x, x, x) == []
    assert "scale" in reasons_against_tensors(family, x, x, x, scale=-1.0)[0]
    assert "strides" in reasons_against_tensors(family, x, x, x.transpose(1, 3).contiguous().transpose(1, 3))[0]


HALVES = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


# every option with every other once, as each case compiles its kernels
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "rates", "is_causal", "head_dim", "dtype"),
    [
        (*LONGNET, True, 64, torch.float16),
        (*LONGNET, False, 128, torch.bfloat16),
        ([1536, 3072], [2, 6], False, 64, torch.bfloat16),
        ([1536, 3072], [2, 6], True, 128, torch.float16),
        ([2048, 8192], [1, 8], True, 64, torch.bfloat16),
        ([2048, 8192], [1, 8], False, 128, torch.float16),
        ([2048], [1], True, 64, torch.float16),
    ],
)
def test_hopper_kernel_is_the_definition(lengths: list[int], rates: list[int], is_causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    hopper = pytest.importorskip("dilated_attention.engine.kernels.nested_hopper")
    B, H, Hk, n = 2, 4, 2, 2 * lengths[-1] + 40
    pattern = DilatedPattern(lengths, rates)
    family = family_of(pattern, H, n)
    torch.manual_seed(2)
    q = torch.randn(B, H, n, head_dim, device="cuda", dtype=dtype).transpose(1, 2)  # heads outside, as torch has them
    kv = torch.randn(B, n, 2, Hk, head_dim, device="cuda", dtype=dtype)  # packed
    k, v = kv.unbind(2)
    request = AttentionRequest(hardware=detect("cuda"), dtype=dtype, head_dim=head_dim)
    if reasons := reasons_of(NESTED_CAPABILITIES, request) + reasons_against_tensors(family, q, k, v):
        pytest.skip("; ".join(reasons))
    out, lse = torch.full((B, n, H, head_dim), torch.nan, device="cuda", dtype=dtype), torch.full((B, H, n), torch.nan, device="cuda")
    hopper.nested_forward(family, q, k, v, is_causal, head_dim**-0.5, out, lse)
    full = family.num_positions
    assert out[:, full:].isnan().all() and not out[:, :full].isnan().any() and not lse[:, :, :full].isnan().any()
    rows = torch.randint(full, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    got, expected = [], []
    for number, p in enumerate(rows):
        b, h = number % B, number // B % H
        keys = torch.arange(full, device="cuda")
        m = torch.zeros(full, device="cuda", dtype=torch.float64)
        for w, r in pattern.branches:
            m += ((keys // w == p // w) & (keys % r == h % r)) * float(p % r == h % r)
        m *= ~(is_causal & (keys > p))
        if m.sum() == 0:
            assert lse[b, h, p] == -torch.inf and (out[b, p, h] == 0).all()
            continue
        scores = k[b, :full, h // 2].double() @ q[b, p, h].double() * head_dim**-0.5 + m.log()
        torch.testing.assert_close(lse[b, h, p].double(), scores.logsumexp(0), rtol=0, atol=2e-5)
        got.append(out[b, p, h].double())
        expected.append(scores.softmax(0) @ v[b, :full, h // 2].double())
    error = (torch.stack(got) - torch.stack(expected)).norm() / torch.stack(expected).norm()
    assert error < HALVES[dtype]
