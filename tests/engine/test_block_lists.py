"""block_lists against dense masks: every pattern and compositions of them; memory and time at a million positions."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention.engine.blocks import lists as module
from dilated_attention.engine.blocks.lists import block_lists, clear_block_lists, select_rows
from dilated_attention.pattern import (
    Axial,
    BigBird,
    BlockPattern,
    BlockTensor,
    Causal,
    GlobalLocal,
    LocalWindow,
    MaskFunction,
    RandomBlocks,
    Strided,
)
from dilated_attention.pattern.blocks import base
from dilated_attention.pattern.blocks import block_lists as pattern_lists
from dilated_attention.pattern.blocks.block_lists import BlockLists
from tests.helpers.largest import Largest
from tests.helpers.pattern_cases import BLOCK_SIZES, HEADS, compositions, expanded, expanded_by_interval, lattice

MILLION = 2**20
# bfloat16, 16 heads of 128
BYTES_OF_Q = MILLION * 16 * 128 * 2


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    clear_block_lists()


def check(pattern: BlockPattern, n: int, is_causal: bool, first_query: int = 0, num_queries: int | None = None) -> BlockLists:
    num_queries = n - first_query if num_queries is None else num_queries
    lists = block_lists(pattern, n, HEADS, first_query=first_query, num_queries=num_queries, is_causal=is_causal, device="cpu")
    wanted = pattern.dense_mask(n, n, HEADS, is_causal=is_causal)[:, first_query : first_query + num_queries]
    assert torch.equal(expanded(lists, HEADS), wanted)
    assert num_queries < n or pattern.pairs(n, HEADS, is_causal=is_causal) == int(wanted.sum())
    if lists.interval is not None:
        assert torch.equal(expanded_by_interval(lists, HEADS), wanted)
    ascending = (lists.columns[1:] > lists.columns[:-1]) | (lists.row_of_entry[1:] != lists.row_of_entry[:-1])
    assert bool(ascending.all())
    if lists.masks is not None:
        # every mask is used, is needed, and is different from the others
        used = lists.masks[lists.masks >= 0].unique()
        assert used.tolist() == list(range(len(lists.bits)))
        assert bool((lists.bits != 0).flatten(1).any(1).all())
    else:
        assert len(lists.bits) == 0 and lists.interval is None
    return lists


@given(
    data=st.data(),
    n=st.sampled_from((1, 63, 64, 65, 127, 190, 300, 515)),
    block_size=st.sampled_from(BLOCK_SIZES),
    is_causal=st.booleans(),
    in_pieces=st.booleans(),
)
@settings(max_examples=100)
def test_lists_are_the_dense_mask(data: st.DataObject, n: int, block_size: int | tuple[int, int], is_causal: bool, in_pieces: bool) -> None:
    """Of the whole sequence, and of rows to its end or within it."""
    pattern = data.draw(compositions(n, block_size))
    with pytest.MonkeyPatch.context() as patch:
        if in_pieces:
            clear_block_lists()
            patch.setattr(pattern_lists, "BLOCKS_AT_ONCE", 10)
            for owner in (pattern_lists, base):
                patch.setattr(owner, "PAIRS_AT_ONCE", 3 * 128 * 128)
        check(pattern, n, is_causal)
        if n > 256:
            check(pattern, n, is_causal, first_query=128, num_queries=data.draw(st.sampled_from((None, 100))))


def test_masks_are_an_interval_where_they_are_stretches() -> None:
    windows = LocalWindow(100), GlobalLocal(500, 128), Causal()
    some = LocalWindow(300) | Strided(5, 0), BigBird(300, 128, 2), RandomBlocks(0.3)
    for is_causal, others in ((False, (LocalWindow(300) & MaskFunction(lambda b, h, q, k: k >= 100),)), (True, some)):
        assert all(check(pattern, 2000, is_causal).mask_kind == "interval" for pattern in (*windows, *others))
    # masks with holes, and heads that differ
    holes = MaskFunction(lattice), GlobalLocal(0, 10), LocalWindow(3) | LocalWindow((300, 0)) & MaskFunction(lattice)
    for pattern in (*holes, MaskFunction(lambda b, h, q, k: k - q <= 10 * h, per_head=True)):
        assert check(pattern, 500, False).mask_kind == "bits"


def test_a_short_block_does_not_speak_for_whole_ones() -> None:
    n = 128 * 5 + 30
    # head 0 keeps the short last row or column only: its blocks come first, and have the distance of whole blocks of head 1
    for short in (slice(None), 5), (5, slice(None)):
        table = torch.zeros(HEADS, 6, 6, dtype=torch.bool)
        table[0][short] = True
        table[1] = True
        pattern = LocalWindow(100) & BlockTensor(table)
        check(pattern, n, False)


def test_cached_by_all_arguments() -> None:
    pattern = LocalWindow(100)
    lists = block_lists(pattern, 500, 2, device="cpu")
    assert block_lists(LocalWindow(100), 500, 2, device=torch.device("cpu")) is lists
    assert block_lists(pattern, 500, 2, num_queries=500, device="cpu") is lists
    changes = ({}, {"is_causal": True}, {"first_query": 128}, {"num_queries": 372}, {"num_queries": 100})
    assert len({id(block_lists(pattern, 500, 2, device="cpu", **changed)) for changed in changes}) == len(changes)
    # tables are equal to themselves only, whatever is in them
    table = torch.ones(1, 4, 4, dtype=torch.bool)
    full = block_lists(BlockTensor(table), 500, 2, device="cpu")
    assert block_lists(BlockTensor(~table), 500, 2, device="cpu").num_entries == 0 and full.num_entries == 16


def test_sequences_of_equally_many_blocks_share_lists() -> None:
    class Narrower(LocalWindow):
        """A class that derives from one that shares lists may keep other pairs."""

    sharing = LocalWindow(100), GlobalLocal(30, 10), BigBird(30, 3, 1), Strided(3), RandomBlocks(0.3), Axial(256), LocalWindow(9) | Causal()
    for pattern, shares in [*((x, True) for x in sharing), (Axial(100), False), (Narrower(100), False), (Causal() & Axial(100), False)]:
        longer, shorter = (check(pattern, n, False) for n in (600, 530))
        assert (longer.columns is shorter.columns) == shares == (longer.by_column is shorter.by_column)
        assert (longer.num_keys, shorter.num_keys) == (600, 530)


def test_lists_made_while_inferring_serve_training() -> None:
    with torch.inference_mode():
        lists = block_lists(GlobalLocal(30, 10), 500, 2, device="cpu")
    assert lists.masks is not None and not any(x.is_inference() for x in (lists.row_starts, lists.columns, lists.masks, lists.bits))


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 3 * block_lists(LocalWindow(1), 5000, 1, device="cpu").nbytes)
    for width in range(20):
        block_lists(LocalWindow(width), 5000, 1, device="cpu")
    assert 1 <= len(module._cache) <= 3
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 1)
    assert block_lists(LocalWindow(7), 5000, 1, device="cpu") is block_lists(LocalWindow(7), 5000, 1, device="cpu")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("pattern", "seconds", "ops"),
    [(LocalWindow(1024), 2, 130), (GlobalLocal(1024, 128), 6, 320), (BigBird(1024, 128, 3, seed=1), 20, 800)],
    ids=["window", "global_local", "big_bird"],
)
def test_a_million_positions(pattern: BlockPattern, is_causal: bool, seconds: float, ops: int) -> None:
    # of this thread, whoever else uses the machine
    begin = time.thread_time()
    with Largest() as count:
        lists = block_lists(pattern, MILLION, 16, is_causal=is_causal, device="cpu")
    taken = time.thread_time() - begin
    assert lists.nbytes <= 0.01 * BYTES_OF_Q
    assert taken <= seconds
    assert count.calls <= ops
    # nothing of rows × columns for each head, let alone N²
    assert count.elements < 0.2 * lists.num_heads * lists.num_rows * lists.num_columns
    assert lists.interval is not None


@given(pattern=compositions(700, 64), is_causal=st.booleans(), rows=st.lists(st.integers(0, 9), max_size=4), to_the_end=st.booleans())
@settings(max_examples=60)
def test_select_rows(pattern: BlockPattern, is_causal: bool, rows: list[int], to_the_end: bool) -> None:
    n, rows = 700, rows + [10] * to_the_end
    lists = block_lists(pattern, n, HEADS, is_causal=is_causal, device="cpu")
    chosen = select_rows(lists, torch.tensor(rows, dtype=torch.int64))
    positions = [p for row in rows for p in range(64 * row, min(64 * row + 64, n))]
    wanted = pattern.dense_mask(n, n, HEADS, is_causal=is_causal)[:, positions]
    assert torch.equal(expanded(chosen, HEADS), wanted)
    assert chosen.interval is None or torch.equal(expanded_by_interval(chosen, HEADS), wanted)
    assert (chosen.interval is None) == (lists.interval is None)
    with pytest.raises(ValueError, match="rows selects the short last query block, 10, before its end; select it last"):
        select_rows(lists, torch.tensor([10, 0]))
