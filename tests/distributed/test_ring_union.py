"""Dilated branches and blocks in one softmax over a sequence spread over processes: what the definition gives, in float64, to 1e-10."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import (
    BackendUnavailable,
    DilatedPattern,
    RingBlockSparseDilatedAttention,
    block_sparse_dilated_attention,
    create_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    ring_dilated_attention,
)
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.block_exchange.parts import make_block_steps
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, ascending_runs
from dilated_attention.distributed.comm.comm_volume import Bytes
from dilated_attention.distributed.exchange.plan import RingProblem
from dilated_attention.pattern import LocalWindow, PerHead, RandomBlocks, TopBlocks
from tests.distributed.test_ring_blocks import (
    N_BIG,
    OPTIONS,
    SHARED,
    Spread,
    case_of,
    check,
    check_bytes,
    measured,
    of_every_holder,
    of_every_length,
    of_every_option,
    of_every_pattern,
    some_spreads,
)
from tests.functional.test_block_sparse import call
from tests.helpers.op_settings import PLAIN
from tests.helpers.pool import here, patience, pool_of

WORLDS = (1, 2, 3, 4, 5, 8)
BRANCHES = (
    DilatedPattern((16, 64), (1, 4)),
    DilatedPattern((50, 2**40), (3, 2)),
    DilatedPattern((2**40, 100, 48), (1, 5, 2), "blocked"),
    DilatedPattern((32, 90), (2, 2), "zero"),
    DilatedPattern((40, 150), (1, 3), branch_heads="split"),
)


def beside_branches(spreads: Sequence[Spread], choices: Sequence[DilatedPattern] = BRANCHES) -> list[Spread]:
    return [replace(x, case=replace(x.case, branches=choices[index % len(choices)])) for index, x in enumerate(spreads)]


@pytest.mark.parametrize("world", [3])
def test_every_pattern(world: int) -> None:
    check(world, beside_branches(of_every_pattern(world)))


@pytest.mark.parametrize("world", [2, 3])
def test_every_option(world: int) -> None:
    check(world, beside_branches(of_every_option(world), BRANCHES[world % 5 :] + BRANCHES[: world % 5]))


@pytest.mark.parametrize("world", [1, 8])
def test_every_length(world: int) -> None:
    """Empty ranks, too: there are fewer positions than ranks, or none."""
    check(world, beside_branches(of_every_length(world)))


@pytest.mark.parametrize("world", [1, 3])
def test_zero_keys_of_a_tail_are_those_of_one_process(world: int) -> None:
    """The definition by a mask has none."""
    tails = [replace(branches, tail="zero_keys") for branches in BRANCHES]
    spreads = [Spread(case=case_of(SHARED, N_BIG, **OPTIONS[name])) for name in ("batch", "causal", "documents", "padding", "scale")]
    check(world, beside_branches(spreads, tails), call)


@settings(max_examples=25)
@given(st.sampled_from(WORLDS), some_spreads(with_branches=True))
def test_anything_with_anything(world: int, spread: Spread) -> None:
    check(world, [spread])


# --- what travels ----------------------------------------------------------------------------------------------------------------


# tests/distributed/test_ring_blocks.py has more worlds
@pytest.mark.parametrize("world", [3])
def test_bytes_on_the_wire_are_those_of_the_formula(world: int) -> None:
    whole = 64 * world
    branches = [((whole,), (1,)), ((24, whole), (1, 4)), ((whole - 5, 17), (3, 1)), ((8, 16), (1, 2)), ((whole, whole), (2, 3))]
    check_bytes(world, beside_branches(of_every_holder(world), [DilatedPattern(*x) for x in branches]))


def test_a_key_that_both_parts_need_travels_once() -> None:
    """By hand: two ranks of one block: the window keeps the whole other block, and so does the branch; K and V of 2 heads of 3 floats."""
    spread = Spread(case=case_of(LocalWindow(64, block_size=64), 128, head_dim=3))
    block = 2 * 64 * 2 * 3 * 4
    for found in pool_of(2).run(measured, beside_branches([spread] * 2, [DilatedPattern((128,), (r,)) for r in (1, 4)]), torch.float32):
        assert all(total == Bytes(block, block, 2 * block, 2 * block) for total, _ in found)


def test_branches_and_blocks_that_stay_at_home_move_nothing() -> None:
    spread = Spread(case=case_of(RandomBlocks(0.0, block_size=64), 512))
    for found in pool_of(4).run(measured, beside_branches([spread], [DilatedPattern((64, 128), (1, 2))]), torch.float32):
        assert all(total == Bytes(0, 0, 0, 0) and not sent for total, sent in found)


def test_a_rank_holds_the_keys_from_the_first_to_the_last_that_it_needs() -> None:
    """Not the whole sequence before it, where segments and blocks are counted alike from a later position."""
    N, world, rank = 64 * 64, 8, 5
    shards = tuple(ascending_runs(spans(N, r, world, "contiguous")) for r in range(world))
    blocks = RingBlockProblem(LocalWindow(40, block_size=64), ((0, N),), shards, 2, 2, False)
    for lengths, span in (((128, 256), (2304, 3136)), ((128, 1024), (2048, 3136)), ((100, 256), (0, 3136))):
        branches = RingProblem(DilatedPattern(lengths, (1, 4)), ((0, N),), shards, 2, 2, False, None, "all_gather", (2,))
        steps, _, keys = make_block_steps(blocks, rank, (1, 1), torch.device("cpu"), branches, PLAIN)
        assert (keys.start, keys.end) == span and all(step.keys == (span,) for step in steps)


# --- calls that are refused ------------------------------------------------------------------------------------------------------

DISAGREEMENTS = ("branches", "pattern", "blocks alone", "branches alone", "tail", "kernels")


def disagreeing(rank: int, world: int, which: str, length: int) -> str:
    # a length of its own for each case: what ranks have agreed on once is not compared again
    q = torch.zeros(1, length, 2, 4, device=here())
    odd = rank == world - 1
    pattern = LocalWindow(41 if odd and which == "pattern" else 40, block_size=64)
    rates = [2 if odd and which == "branches" else 1]
    options: dict[str, Any] = {"seq_len": length * world, "timeout": patience()}
    try:
        if odd and which == "blocks alone":
            ring_block_sparse_attention(q, q, q, pattern, **options)
        if odd and which == "branches alone":
            ring_dilated_attention(q, q, q, [16], rates, **options)
        tail, backend = "zero_keys" if odd and which == "tail" else "mask", "flash4" if odd and which == "kernels" else "auto"
        ring_block_sparse_dilated_attention(q, q, q, [16], rates, pattern, tail=tail, backend=backend, **options)
    except (ValueError, BackendUnavailable) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("branches", r"ring_block_sparse_dilated_attention: ranks disagree on branches: ranks 0, 1 have .*rank 2 has "),
        ("pattern", "ring_block_sparse_dilated_attention: ranks disagree on pattern: ranks 0, 1 have .*40.*, rank 2 has .*41"),
        ("blocks alone", "on function: ranks 0, 1 have ring_block_sparse_dilated_attention, rank 2 has ring_block_sparse_attention"),
        ("branches alone", "on function: ranks 0, 1 have ring_block_sparse_dilated_attention, rank 2 has ring_dilated_attention"),
        ("tail", "ranks disagree on branches: .*mask.*zero_keys"),
        ("kernels", "ring_block_sparse_dilated_attention: ranks disagree on kernels: ranks 0, 1 have available, rank 2 has unavailable"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same(which: str, words: str) -> None:
    texts = pool_of(3).run(disagreeing, which, 64 + DISAGREEMENTS.index(which))
    assert len(set(texts)) == 1, texts
    assert re.search(words, texts[0]), texts[0]
    # and the group goes on
    check(3, beside_branches([Spread(case=case_of(SHARED, 100))]))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"pattern": 3}, TypeError, "pattern is 3"),
        ({"pattern": TopBlocks(2, block_size=64)}, ValueError, "chosen by content; the processes of a ring find what to exchange"),
        ({"pattern": PerHead((LocalWindow(3),) * 3)}, ValueError, "PerHead got 3 patterns for 2 heads"),
        ({"segment_lengths": [16, 32]}, ValueError, "segment_lengths has 2 entries"),
        ({"dilation_rates": ["1"]}, TypeError, "dilation_rates"),
        ({"head_offsets": [[0, 0, 0]]}, ValueError, "3 integers per branch for 2 heads"),
        ({"tail": "cut"}, ValueError, "tail is 'cut'"),
        ({"layout": "striped"}, ValueError, "layout is 'striped', which spreads every block over all processes"),
        ({"layout": Layout(32, (((0, 32),),))}, ValueError, "layout is for 32 positions on 1 processes, the sequence has 64 on 1"),
        ({"head_steps": 0}, ValueError, "head_steps is 0; expected an integer ≥ 1"),
        ({"seq_len": 65}, ValueError, r"the group's ranks hold \[64\] positions; a contiguous sequence of 65 has \[65\]"),
        ({"backend": "flash4"}, BackendUnavailable, "flash4"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.zeros(1, 64, 2, 4)
    arguments: dict[str, Any] = {"q": x, "k": x, "v": x, "segment_lengths": [16], "dilation_rates": [1], "pattern": SHARED} | changes
    with pytest.raises(error, match=words):
        ring_block_sparse_dilated_attention(**arguments)


# --- the module ------------------------------------------------------------------------------------------------------------------


def of_module(rank: int, world: int) -> float:
    torch.manual_seed(0)
    layer = create_attention(
        "ring_block_sparse_dilated", segment_lengths=[16, 48], dilation_rates=[1, 3], pattern=LocalWindow(20, block_size=64)
    )
    assert isinstance(layer, RingBlockSparseDilatedAttention)
    assert "block_pattern=LocalWindow(" in repr(layer) and "layout='contiguous'" in repr(layer)
    q, k, v = torch.randn(3, 1, 48 * world, 2, 8, dtype=torch.float64)
    wanted = block_sparse_dilated_attention(q, k, v, [16, 48], [1, 3], layer.block_pattern, is_causal=True)
    rows = slice(48 * rank, 48 * rank + 48)
    return float((layer(q[:, rows], k[:, rows], v[:, rows], is_causal=True) - wanted[:, rows]).abs().max())


@pytest.mark.parametrize("world", [1, 2])
def test_the_module(world: int) -> None:
    assert max(pool_of(world).run(of_module)) <= 1e-12
