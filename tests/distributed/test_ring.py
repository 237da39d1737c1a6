"""Attention of spread sequences against one process: random calls and chosen ones, over live gloo processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends import registry
from dilated_attention.distributed import spans
from dilated_attention.distributed.comm.call_consistency import ring_call
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.exchange import cost, crossing, setup
from dilated_attention.distributed.exchange.crossing import crossing_of
from dilated_attention.distributed.exchange.plan import RingProblem
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.testing import (
    FLOAT64_TOLERANCE,
    RESULTS,
    Result,
    call,
    inputs,
    largest,
    max_error,
    plain_attention,
    reference,
    relative_bound,
    results,
)
from tests.helpers import ring_cases, ring_chosen
from tests.helpers.pool import pool_of
from tests.helpers.ring_cases import HEADS, WHOLE, Spread, draw, together
from tests.helpers.ring_chosen import spread_of

# 600 calls in all; test_random_calls_reach_everything checks that they draw every option. Worlds of five and eight are slow on two cores
CASES = {1: 25, 2: 225, 3: 175, 4: 125, 5: 25, 8: 25}
BATCH = 25


def judge(spread: Spread, parts: Sequence[Result], truth: Result | None = None) -> Result:
    """Holds the ranks' results to the whole sequence's. Small sequences are also held to the definition, row by row."""
    case = spread.case
    x = inputs(case, torch.float64)
    if truth is None:
        truth = results(plain_attention, case, x)
        if case.num_keys <= 12:
            definition = results(reference, case, x)
            assert all(max_error(truth[name], definition[name]) <= 1e-10 for name in truth)
    found = together(spread, parts)
    for name in truth:
        error, bound = max_error(found[name], truth[name]), relative_bound(truth[name], FLOAT64_TOLERANCE, case.dropout_p)
        assert error <= bound, f"E({name}) = {error:.3g} > {bound:.3g} on {len(parts)} ranks for\n{spread}"
    return found


def check(world: int, spreads: Sequence[Spread]) -> None:
    ranks = pool_of(world).run(ring_cases.run, list(spreads), timeout=120.0)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[index][0] for rank in ranks])


@pytest.mark.parametrize(("world", "first"), [(world, first) for world, count in CASES.items() for first in range(0, count, BATCH)])
def test_random_calls(world: int, first: int) -> None:
    check(world, [draw(world, seed) for seed in range(first, first + BATCH)])


def test_random_calls_reach_everything() -> None:
    """A draw that misses an option would test nothing of it."""
    spreads = {world: [draw(world, seed) for seed in range(count)] for world, count in CASES.items()}
    every = [spread for world in spreads for spread in spreads[world]]
    cases = [spread.case for spread in every]
    dilated = [case for case in cases if case.pattern != WHOLE]
    assert {(s.layout, s.exchange) for s in every} == {
        (a, b) for a in ring_cases.LAYOUTS for b in ("auto", "all_gather", "ring", "all_to_all", "2d")
    }
    assert {(case.heads, case.kv_heads) for case in cases} >= set(HEADS)
    assert {case.padding for case in cases} == {"none", "some", "row", "all"}
    assert {case.pattern.tail for case in dilated} == {"mask", "zero_keys"} and {case.mixture_grad for case in dilated} == {
        "exact",
        "detached",
    }
    assert {case.pattern.branch_heads for case in dilated} == {"all", "split"} and {case.pattern.num_branches for case in dilated} == {
        1,
        2,
        3,
    }
    for world in (2, 3, 4, 5, 8):
        lengths = {spread.case.num_keys for spread in spreads[world]}
        assert {0, 1} <= lengths and min(lengths - {0, 1}) < world + 1 < max(lengths)
    wanted = (
        sum(case.window is not None for case in cases),
        sum(case.bounds is not None for case in cases),
        sum(case.dropout_p > 0 and case.pattern == WHOLE for case in cases),
        sum(case.dropout_p > 0 and case.pattern != WHOLE for case in cases),
        sum(case.mixture_grad == "detached" and case.pattern.branch_heads == "split" for case in cases),
        sum(
            spread.steps and spread.case.dropout_p > 0 and spread.exchange == "all_gather" and spread.case.kv_heads > 1 for spread in every
        ),
    )
    assert min(wanted) >= 5, wanted


# --- chosen calls -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "dropout_p"), [(2, 0.5), (4, 0.0)])
def test_steps_of_heads(world: int, dropout_p: float) -> None:
    check(world, ring_chosen.steps_of_heads(dropout_p))


@pytest.mark.parametrize("world", [2, 4])
def test_segments_and_ranks(world: int) -> None:
    check(world, ring_chosen.segments_and_ranks(world))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_without_rows(world: int) -> None:
    """Zeros and −inf, never NaN."""
    check(world, ring_chosen.ranks_without_rows(world))


CROSSING = (((8, 2), (1, 4)), ((4, 8, 0.5), (1, 2, 8)), ((4, 2**40), (1, 4)), ((8, 1, 1), (1, 4, 8)))


def separate_from(rank: int, world: int, nbytes: int) -> None:
    """Sets the size from which calls are separated; setups of another size are forgotten."""
    crossing.SMALL_BYTES = nbytes
    registry.cached.clear()
    setup._setups.clear()


@pytest.mark.parametrize("world", [2, 4])
def test_branches_that_cross_ranks_are_computed_on_every_gth_row(world: int) -> None:
    """Segments within ranks beside sparse ones across ranks, whose lengths are given as fractions of the sequence where below 4."""
    spreads, N = [], 64 * world
    for index, (lengths, rates) in enumerate(CROSSING):
        pattern = DilatedPattern(tuple(x if x >= 4 else int(x * N) for x in lengths), rates, ("cyclic", "zero")[index % 2])
        for heads, kv_heads in ((4, 4), (4, 2), (8, 8), (8, 1)):
            for is_causal in (False, True):
                # the other layout in the other world
                layout = ("contiguous", "zigzag")[(index + heads // 4 + is_causal + world // 2) % 2]
                options = {"is_causal": is_causal, "layout": layout, "exchange": "all_gather"}
                spreads.append(spread_of(pattern, N, heads=heads, kv_heads=kv_heads, **options))
    found = 0
    for spread in spreads:
        case = spread.case
        shards = tuple(tuple((a, b) for a, b, _ in spans(N, rank, world, spread.layout)) for rank in range(world))
        problem = RingProblem(case.pattern, ((0, N),), shards, case.heads, case.kv_heads, case.is_causal, None, "all_gather", ())
        found += crossing_of(problem, crossing.SMALL_BYTES) is not None
    # heads that share a key/value head and differ in offset are gathered whole
    assert len(spreads) > found >= len(spreads) // 2
    pool_of(world).run(separate_from, 0)
    try:
        check(world, spreads)
    finally:
        pool_of(world).run(separate_from, crossing.SMALL_BYTES)


@pytest.mark.parametrize(("lengths", "rates", "lanes"), [((16, 64), (1, 4), setup.LANES[1]), ((24, 64), (1, 4), setup.LANES[0])])
def test_only_exchanges_beside_a_computation_leave_multiprocessors_to_it(
    lengths: tuple[int, ...], rates: tuple[int, ...], lanes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of 16 stay within ranks, and are computed meanwhile; those of 24 do not, so a rank waits for all keys."""
    monkeypatch.setattr(crossing, "SMALL_BYTES", 0)
    pattern, N = DilatedPattern(lengths, rates, "zero"), 64
    branches = pattern.segment_lengths, pattern.dilation_rates, pattern.head_offsets, pattern.branch_heads, pattern.tail
    sharding = ("", "contiguous", "all_gather", 1, 60.0, False, 0)
    plain = {"window": (), "is_causal": False, "detached": False, "deterministic": False, "needs_grad": True, "backend": "auto"}
    of_kernels = {"precision": "native", "strategy": "auto", "softcap": 0.0, "has_sinks": False, "scale": 1.0, "dropout_p": 0.0}
    settings = CallSettings(branches=branches, blocks="", sharding=sharding, seq_len=N, **plain, **of_kernels)  # type: ignore[arg-type]
    x = torch.zeros(1, N // 2, 2, 8)
    made = setup.make_setup(Members(None, 0, 2), (x, x, x), ((0, N),), settings, ring_call(settings), None)
    assert made.lanes == lanes and (made.home is None) == (lanes == setup.LANES[0])


def test_a_world_of_one_is_the_single_process_bit_for_bit() -> None:
    for spread in (spread_of(DilatedPattern((8, 48), (1, 3))), spread_of(is_causal=True), spread_of(exchange="ring", layout="striped")):
        x = inputs(spread.case, torch.float32)
        truth = results(call, spread.case, x)
        # torch.distributed is not initialised in this process
        mine = results(ring_cases.ring_call(spread), spread.case, x)
        (pooled,) = pool_of(1).run(ring_cases.run, [spread], torch.float32)
        for name in truth:
            assert torch.equal(mine[name], truth[name]) and torch.equal(pooled[0][0][name], truth[name])


@pytest.mark.parametrize("world", [2, 4])
def test_runs_repeat_bit_for_bit(world: int) -> None:
    spreads = ring_chosen.repeated(world)
    for rank in pool_of(world).run(ring_cases.run, spreads, torch.float32, 2):
        for first, second in rank:
            assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_errors_in_low_precision_are_those_of_one_process(world: int, dtype: torch.dtype) -> None:
    spreads = [
        spread_of(pattern, 90, kv_heads=4, exchange=exchange, layout=layout, is_causal=(row + index + world // 2) % 2 == 0)
        for pattern in (WHOLE, DilatedPattern((16, 64, 90), (1, 2, 4)))
        for row, exchange in enumerate(("all_gather", "ring", "all_to_all"))
        for index, layout in enumerate(ring_cases.LAYOUTS)
    ]
    ranks = pool_of(world).run(ring_cases.run, spreads, dtype)
    for index, spread in enumerate(spreads):
        x = inputs(spread.case, dtype)
        truth, single = results(plain_attention, spread.case, x, torch.float64), results(call, spread.case, x)
        found = together(spread, [rank[index][0] for rank in ranks])
        for name in RESULTS:
            assert found[name].dtype is single[name].dtype
            # one rounding of a result; where that is the dtype of sums, too, one for each part, of which a rank has two runs' of each rank
            roundings = 2 * world if single[name].dtype is torch.float32 else 1
            band = roundings * torch.finfo(single[name].dtype).eps * largest(truth[name])
            assert max_error(found[name], truth[name]) <= 1.25 * max_error(single[name], truth[name]) + band, (name, spread)


# --- groups -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_mesh", [False, True])
def test_groups_that_are_a_part_of_the_world(as_mesh: bool) -> None:
    """Ranks 1 and 3 of four as a group; columns of a mesh, each a sequence of its own."""
    spreads = ring_chosen.of_parts()
    ranks = pool_of(4).run(ring_cases.in_subgroup, [1, 3], spreads, as_mesh)
    for members in ([ranks[0], ranks[2]], [ranks[1], ranks[3]]):
        if not as_mesh and members[0] is ranks[0]:
            assert members == [None, None]
            continue
        for index, spread in enumerate(spreads):
            judge(spread, [parts[index] for parts in members])


def test_processes_may_have_different_numbers_of_groups() -> None:
    """torch names a communicator by how many groups a process has, so ranks waited for each other under different names."""
    spread = spread_of(is_causal=True)
    judge(spread, pool_of(3).run(ring_cases.part_first, [0, 2], spread))


def test_autocast_and_a_loss_that_is_a_sum() -> None:
    """A sum's gradient is one number for all of out: a tensor of strides 0."""
    ranks = pool_of(2).run(ring_cases.sums_under_autocast)
    x = inputs(ring_cases.AUTOCAST, torch.float32)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = dilated_attention(*leaves, [8, 24], [1, 2], is_causal=True, backend="sdpa")
    grads = torch.autograd.grad(out.float().sum(), leaves)
    for index, whole in enumerate((out, *grads)):
        found = torch.cat([rank[index] for rank in ranks], 1)
        assert found.dtype is whole.dtype
        torch.testing.assert_close(found, whole, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "all_to_all"])
@pytest.mark.parametrize(("at", "window"), [(11, None), (15, None), (5, 3)])
def test_nan_stays_with_the_queries_that_see_it(exchange: str, at: int, window: int | None) -> None:
    if exchange == "ring" and window is not None:
        pytest.skip("a window's keys come in one exchange")
    found = pool_of(2).run(ring_cases.rows_with_nan, at, exchange, window)
    assert [row for rows in found for row in rows] == list(range(at, 16 if window is None else at + window + 1))


@pytest.mark.parametrize(("exchange", "layout"), [("all_to_all", "contiguous"), ("all_gather", "striped"), ("all_gather", "zigzag")])
def test_a_gradient_of_lse_on_one_rank_alone(exchange: str, layout: str) -> None:
    assert max(pool_of(2).run(ring_cases.lse_gradient_of_the_last, exchange, layout)) <= 1e-10


def test_auto_never_takes_what_cannot_be() -> None:
    """Keys that are too big, a window and heads that do not divide: of three reasons one is but a preference."""
    question = cost.ExchangeRequest(
        size=8,
        layout="contiguous",
        seq_len=2**25,
        batch=1,
        num_heads=12,
        num_kv_heads=12,
        head_dim=128,
        itemsize=2,
        is_causal=True,
        is_dense=True,
        branch_heads="all",
        has_window=True,
        needs_grad=True,
        memory=10**10,
    )
    offers = {offer.exchange: offer for offer in cost.exchange_estimates(question)}
    assert offers["all_gather"].reason is not None and offers["all_gather"].possible
    assert not offers["ring"].possible and not offers["all_to_all"].possible
    assert cost.choose(question) == "all_gather"
