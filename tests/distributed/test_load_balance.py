"""Layouts for packed documents: pairs counted against masks, positions held once, pairs even for several patterns at once."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, balanced_layout
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.load_balance import pairs_of
from dilated_attention.engine.ops.settings import DENSE, pattern_of
from dilated_attention.pattern import BigBird, BlockPattern, Causal, Document, LocalWindow, RandomBlocks, Strided, TopBlocks
from dilated_attention.testing.cases import random_branches
from tests.helpers.pattern_cases import listed

CPU = torch.device("cpu")
N = 131072
SEVERAL = [None, DilatedPattern((2048, 8192, 32768), (1, 4, 16)), LocalWindow((1024, 0))]


def drawn_documents(seed: int, seq_len: int = N, median: float = 400.0, sigma: float = 1.5) -> list[int]:
    """Boundaries of documents of log-normal lengths: most short, a few long, none above a quarter of the sequence."""
    rng, bounds = random.Random(seed), [0]
    while bounds[-1] < seq_len:
        length = min(max(1, int(rng.lognormvariate(math.log(median), sigma))), seq_len // 4)
        bounds.append(min(seq_len, bounds[-1] + length))
    return bounds


@st.composite
def bounds_of(draw: st.DrawFn, most: int = 60) -> list[int]:
    inner = draw(st.lists(st.integers(0, most), max_size=5))
    return sorted({0, *inner, draw(st.integers(1, most))})


def pairs_of_rows(pattern: DilatedPattern, bounds: list[int], heads: int, is_causal: bool) -> torch.Tensor:
    """Pairs of each position's query, from the pattern's definition: the mean over heads."""
    found = [
        pattern.dense_mask(b - a, b - a, heads, is_causal=is_causal).sum((0, 2)).double() / heads for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(found)


@settings(max_examples=80)
@given(data=st.data(), bounds=bounds_of(), heads=st.integers(1, 5), is_causal=st.booleans())
def test_pairs_are_those_of_the_masks(data: st.DataObject, bounds: list[int], heads: int, is_causal: bool) -> None:
    pattern = data.draw(
        st.one_of(st.just(pattern_of(DENSE)), st.integers().map(lambda seed: random_branches(random.Random(seed), heads, 35, None)))
    )
    pairs = pairs_of(pattern, list(itertools.pairwise(bounds)), heads, is_causal=is_causal, device=CPU)
    torch.testing.assert_close(pairs, pairs_of_rows(pattern, bounds, heads, is_causal), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        LocalWindow(100, block_size=64),
        BigBird(70, 1, 2, block_size=(64, 128)),
        RandomBlocks(0.5, block_size=(128, 64)),
        Causal(),
        Causal(block_size=(128, 64)),
    ],
)
def test_pairs_of_blocks_are_those_of_the_lists(pattern: BlockPattern, is_causal: bool) -> None:
    """Each block of keys counts whole."""
    rows, documents = [], list(itertools.pairwise([0, 500, 501, 650, 1300]))
    for start, end in documents:
        length = end - start
        _, row, *_ = listed(pattern, length, 3, is_causal)
        blocks = torch.bincount(row, minlength=-(-length // pattern.q_block)) / (3 if pattern.per_head else 1)
        rows.append(blocks.double().repeat_interleave(pattern.q_block)[:length] * pattern.k_block)
    torch.testing.assert_close(pairs_of(pattern, documents, 3, is_causal=is_causal, device=CPU), torch.cat(rows), check_dtype=False)


def held(layout: Layout) -> list[int]:
    return [sum(end - start for start, end in mine) for mine in layout.runs]


@settings(max_examples=60, deadline=None)
@given(
    bounds=bounds_of(2000),
    size=st.integers(1, 7),
    is_causal=st.booleans(),
    kinds=st.lists(st.sampled_from([None, SEVERAL[1], DilatedPattern((20, 300), (2, 3))]), min_size=1, max_size=3),
)
def test_every_process_holds_as_many_positions(bounds: list[int], size: int, is_causal: bool, kinds: list[Any]) -> None:
    """That each position is held once the layout itself makes sure of."""
    layout = balanced_layout(kinds, bounds[-1], size, 4, is_causal=is_causal, cu_seqlens=bounds)
    assert layout.size == size and max(held(layout)) - min(held(layout)) <= 1
    assert layout.imbalance >= 1 and layout == balanced_layout(kinds, bounds[-1], size, 4, is_causal=is_causal, cu_seqlens=bounds)


@settings(max_examples=30, deadline=None)
@given(bounds=bounds_of(3000), size=st.integers(1, 5), is_causal=st.booleans())
def test_blocks_are_not_cut(bounds: list[int], size: int, is_causal: bool) -> None:
    layout = balanced_layout([None, LocalWindow(200)], bounds[-1], size, is_causal=is_causal, cu_seqlens=bounds)
    starts = {start - max(x for x in bounds if x <= start) for mine in layout.runs for start, _ in mine}
    assert max(held(layout)) - min(held(layout)) < 2 * 128 and not any(start % 128 for start in starts)


@pytest.mark.parametrize(("seed", "world"), [(0, 4), (1, 8), (2, 8), (3, 4)])
def test_packed_documents_are_balanced_for_several_patterns_at_once(seed: int, world: int) -> None:
    bounds = drawn_documents(seed, median=(100.0, 400.0, 400.0, 2000.0)[seed], sigma=(2.0, 1.2, 1.8, 1.0)[seed])
    layout = balanced_layout(SEVERAL, N, world, 16, is_causal=True, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    assert layout.imbalance <= 1.03
    # counted here, position by position: of the dilated pattern from the offsets h mod r of 16 heads
    x = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
    dense = x + 1
    dilated = torch.stack([(x % w // r + 1) * (16 // r) for w, r in ((2048, 1), (8192, 4), (32768, 16))]).sum(0)
    for pairs in (dense, dilated):
        loads = [sum(int(pairs[start:end].sum()) for start, end in mine) for mine in layout.runs]
        assert max(loads) * world / sum(loads) <= 1.03
    assert max(held(layout)) - min(held(layout)) <= 128
    # no naive layout is
    for name in ("contiguous", "zigzag"):
        loads = [sum(int(dense[slice(*run)].sum()) for run in spans(N, rank, world, name)) for rank in range(world)]
        assert max(loads) * world / sum(loads) > layout.imbalance
    # keys of short documents do not travel, but for a few that are cut to even out the positions; and runs are few
    short = [(a, b) for a, b in itertools.pairwise(bounds) if b - a <= N // (16 * world)]
    whole = [run for run in short if any(a <= run[0] and run[1] <= b for mine in layout.runs for a, b in mine)]
    assert len(short) - len(whole) < world and max(len(mine) for mine in layout.runs) <= 30


def test_one_document_gets_the_layouts_that_are_known() -> None:
    assert [len(mine) for mine in balanced_layout(None, 4096, 4).runs] == [1] * 4
    causal = balanced_layout(None, 4096, 4, is_causal=True)
    assert causal.runs == (((0, 512), (3584, 4096)), ((512, 1024), (3072, 3584)), ((1024, 1536), (2560, 3072)), ((1536, 2560),))
    assert causal.imbalance < 1.001
    short = balanced_layout(DilatedPattern((64, 128), (1, 2)), 4096, 4, 2, is_causal=True)
    assert [len(mine) for mine in short.runs] == [1] * 4 and short.imbalance == pytest.approx(1)
    assert balanced_layout([None], 0, 3).runs == ((), (), ()) and sum(held(balanced_layout(None, 2, 5))) == 2


@pytest.mark.parametrize(
    ("pattern", "n", "world", "is_causal", "kind"),
    [
        (LocalWindow(300), 128 * 256, 4, False, "contiguous"),
        (LocalWindow(300), 128 * 256, 4, True, "contiguous"),
        (Causal(), 128 * 64, 4, False, "zigzag"),
        (RandomBlocks(0.4), 128 * 192 + 5, 2, True, "zigzag"),
        (Document((128 * 320, 128 * 80, 128 * 80, 128 * 32)), 128 * 512, 4, False, "dealt"),
        (Strided(7) & Causal(), 128 * 61, 5, False, "any"),
        (LocalWindow(5), 100, 4, False, "any"),
        (LocalWindow(5), 0, 3, False, "contiguous"),
    ],
)
def test_layouts_of_blocks_are_even_and_of_few_runs(pattern: BlockPattern, n: int, world: int, is_causal: bool, kind: str) -> None:
    layout = balanced_layout(pattern, n, world, is_causal=is_causal)
    blocks = [sum(-(-(end - start) // 128) for start, end in runs) for runs in layout.runs]
    assert layout.size == world and max(blocks) - min(blocks) <= 1
    assert all(start % 128 == 0 for runs in layout.runs for start, _ in runs)
    if kind != "any":
        assert layout.imbalance <= 1.02
        # by the definition: pairs of kept blocks, here all of 128
        _, rows, *_ = listed(pattern, n, 1, is_causal)
        loads = [sum(int(((rows >= a // 128) & (rows < -(-b // 128))).sum()) for a, b in runs) for runs in layout.runs]
        assert n == 0 or max(loads) * world / sum(loads) == pytest.approx(layout.imbalance, rel=0.01)
    longest = max(len(runs) for runs in layout.runs)
    assert longest <= {"contiguous": 1, "zigzag": 2}.get(kind, 64)
    if kind == "dealt":
        assert longest > 1
    assert Layout(n, layout.runs).name == layout.name and spans(n, 0, world, layout.name) == spans(n, 0, world, layout)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"pattern": []}, ValueError, "pattern is an empty list; expected a pattern for each kind of layer"),
        ({"pattern": 512}, TypeError, r"pattern is 512 \(int\); expected a block pattern, e.g. LocalWindow\(512\), a DilatedPattern, None"),
        ({"pattern": [None, TopBlocks(4)]}, ValueError, "whose blocks are chosen by content in each call"),
        ({"cu_seqlens": [0, 60, 50, 64]}, ValueError, r"cu_seqlens is \[0, 60, 50, 64\]; expected bounds that start at 0"),
        ({"cu_seqlens": [0, 60]}, ValueError, "end at N = 64"),
        ({"cu_seqlens": torch.zeros(2)}, ValueError, r"cu_seqlens has shape \(2,\) and dtype torch.float32; expected integers"),
        ({"is_causal": 1}, TypeError, "is_causal"),
        ({"world_size": 0}, ValueError, "world_size"),
        ({"seq_len": 2**62}, ValueError, "seq_len is 4611686018427387904; expected an integer ≤ 2,147,483,648"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        balanced_layout(**({"pattern": None, "seq_len": 64, "world_size": 2} | changes))


def test_a_pattern_of_no_pairs_is_even() -> None:
    assert balanced_layout(DilatedPattern((8,), (8,), ((7,),)), 5, 2).imbalance == 1.0


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device is 'abc'; expected a torch\.device or its name"):
        balanced_layout(None, 64, 2, device="abc")
