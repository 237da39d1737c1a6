"""DilatedPattern's mask against the reference, its counts against its mask, and the branches of a context by LongNet's rule.

The reference, and offsets with it, against loops: tests/engine/test_oracle.py."""

import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.engine.reference import multiplicities
from dilated_attention.pattern import geometric_branches
from dilated_attention.testing import random_case

# Prov-GigaPath's slide encoder: segments of max_wsi_size 262144, 16 heads, TorchScale's offsets
GIGAPATH = DilatedPattern((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), "blocked")


def patterns(max_length: int = 40) -> st.SearchStrategy[tuple[DilatedPattern, int, int]]:
    """(pattern, heads, positions)."""

    def draw(seed: int) -> tuple[DilatedPattern, int, int]:
        case = random_case(seed)
        return case.pattern, case.heads, case.num_keys % (max_length + 1)

    return st.integers(0, 2**32).map(draw).filter(lambda drawn: max(drawn[0].segment_lengths) < 2**50)


@given(drawn=patterns(20), is_causal=st.booleans(), data=st.data())
@settings(max_examples=150)
def test_dense_mask_is_the_references(drawn: tuple[DilatedPattern, int, int], is_causal: bool, data: st.DataObject) -> None:
    pattern, heads, num_keys = drawn
    query_offset, num_queries = data.draw(st.integers(0, num_keys)), data.draw(st.integers(0, num_keys + 5))
    rows: dict[str, Any] = {"is_causal": is_causal, "query_offset": query_offset}
    found = pattern.dense_mask(num_queries, num_keys, heads, **rows)
    assert found.dtype is torch.int64
    # queries may lie behind all keys
    wanted, _ = multiplicities(pattern, num_queries, max(num_keys, query_offset + num_queries), heads, **rows)
    assert torch.equal(found.double(), wanted.sum((0, 1))[..., :num_keys])


@given(drawn=patterns(), is_causal=st.booleans())
@settings(max_examples=200)
def test_counts_are_those_of_the_mask(drawn: tuple[DilatedPattern, int, int], is_causal: bool) -> None:
    pattern, heads, n = drawn
    mask = pattern.dense_mask(n, n, heads, is_causal=is_causal)
    pairs = int(mask.sum())
    total = heads * n * n
    assert pattern.pairs(n, heads, is_causal=is_causal) == pairs == sum(pattern.branch_pairs(n, heads, is_causal=is_causal))
    assert pattern.density(n, heads, is_causal=is_causal) == (pairs / total if total else 0.0)
    assert pattern.keys_per_query(n, heads, is_causal=is_causal) == (pairs / (heads * n) if n else 0.0)
    assert pattern.flops(n, heads, 24, is_causal=is_causal) == (4 * 24 * pairs, 10 * 24 * pairs)


# --- large N: closed forms must not build masks ------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
def test_counts_at_a_million_positions() -> None:
    n = 2**20
    assert 0 < GIGAPATH.density(n, 2) < 0.02
    assert DilatedPattern((2**62,), (1,)).pairs(n, 2) == 2 * n * n
    assert DilatedPattern((2**62,), (1,)).pairs(n, 2, is_causal=True) == n * (n + 1)


# --- the record --------------------------------------------------------------------------------------------------------------------------


def test_a_pattern_is_a_record() -> None:
    one, two = DilatedPattern([4, 8], [1, 2], [[0, 0], [0, 1]]), DilatedPattern((4, 8), torch.tensor([1, 2]), ((0, 0), (0, 1)))
    assert one == two != DilatedPattern([4, 8], [1, 2]) and len({one, two}) == 1
    assert one.segment_lengths == (4, 8) and all(type(r) is int for r in two.dilation_rates)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.tail = "zero_keys"  # type: ignore[misc]
    for pattern in (random_case(seed).pattern for seed in range(30)):
        for again in (eval(repr(pattern)), pickle.loads(pickle.dumps(pattern)), copy.deepcopy(pattern), dataclasses.replace(pattern)):
            assert again == pattern and hash(again) == hash(pattern)


# --- branches of a context -------------------------------------------------------------------------------------------------------------


def test_branches_reach_the_length() -> None:
    assert geometric_branches(16_384, 512) == ((512, 2048, 8192, 16_384), (1, 4, 16, 32))
    assert geometric_branches(512, 2048) == ((512,), (1,))
    assert geometric_branches(3000) == ((2048, 3000), (1, 1))
    assert geometric_branches(100, 10, growth=2) == ((10, 20, 40, 80, 100), (1, 2, 4, 8, 10))


def test_what_is_no_context_is_refused() -> None:
    for wrong in ({"length": 0}, {"length": 8, "first": 0}, {"length": 8, "growth": 1}):
        name, value = list(wrong.items())[-1]
        with pytest.raises(ValueError, match=f"{name} is {value}; expected an integer ≥"):
            geometric_branches(**wrong)
    with pytest.raises(TypeError, match="expected an integer"):
        geometric_branches(1e6)  # type: ignore[arg-type]


# --- the picture -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_show_writes_what_the_mask_says(tmp_path: Path, is_causal: bool) -> None:
    pytest.importorskip("matplotlib")
    before, pattern = "matplotlib.pyplot" in sys.modules, DilatedPattern((8, 16, 32), (1, 2, 4))
    figure = pattern.show(32, 3, is_causal=is_causal, path=str(tmp_path / "pattern.png"))
    panels = [axes for axes in figure.axes if axes.images]
    mask = pattern.dense_mask(32, 32, 3, is_causal=is_causal)
    # the user's backend is left alone
    assert len(panels) == 3 and ("matplotlib.pyplot" in sys.modules) == before and (tmp_path / "pattern.png").stat().st_size > 1000
    for head, panel in enumerate(panels):
        assert torch.equal(torch.as_tensor(panel.images[0].get_array().data).long(), mask[head])
    assert len(list(tmp_path.iterdir())) == 1
    for folder in ("", str(tmp_path)):
        with pytest.raises(ValueError, match=r"a folder; expected a file, such as pattern\.png"):
            pattern.show(32, 3, path=folder)
    pattern.show(32, 3, path=str(tmp_path / "plain"))
    assert (tmp_path / "plain.png").is_file()
