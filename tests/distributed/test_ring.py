"""Dense and dilated attention of spread sequences against one process, in float64: random calls and chosen ones.

Over gloo, and over NCCL where GPUs are there (pytest -m gpus). ``gpus/test_ring.py`` has what only a GPU has.
"""

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dilated_attention import DilatedPattern, attention, ring_attention, ring_dilated_attention
from dilated_attention.backends.flash import flash3
from dilated_attention.distributed import Layout, ring_pass, shard_sequence
from dilated_attention.distributed.exchange import run
from dilated_attention.factory import EXAMPLES
from dilated_attention.pattern import BlockPattern
from dilated_attention.testing import (
    FLOAT64_TOLERANCE,
    Result,
    call,
    inputs,
    max_error,
    plain_attention,
    relative_bound,
    results,
)
from dilated_attention.testing.bounds import largest
from dilated_attention.testing.check import truth_and_bounds
from tests.backends.test_libraries import Flash3Ops, put_on_cpu
from tests.helpers import ring_cases
from tests.helpers.machine import ON_CPU, worlds
from tests.helpers.pool import Pool, here, pool_of
from tests.helpers.ring_cases import (
    WHOLE,
    Kernel,
    Spread,
    byte_limits_of_one,
    draw,
    positions,
    spread_of,
    together,
    with_changes,
)

# random calls of each world. Five are slow on two cores
CASES = {1: 25, 2: 125, 3: 100, 4: 50, 5: 25}
BATCH = 25


def judge(spread: Spread, parts: Sequence[Result], dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
    """Holds the ranks' results to the whole sequence's."""
    case = spread.case
    x = inputs(case, dtype, device)
    if dtype is torch.float64:
        truth = results(plain_attention, case, x)
        bounds = {name: relative_bound(truth[name], FLOAT64_TOLERANCE, case.dropout_p) for name in truth}
        if isinstance(case.pattern, BlockPattern):
            bounds = dict.fromkeys(truth, FLOAT64_TOLERANCE)
    else:
        truth, bounds = truth_and_bounds(case, x)
        for name in ("dk", "dv"):
            # every rank's share is rounded once, before they are summed in float32
            bounds[name] += len(parts) / 2 * torch.finfo(dtype).eps * largest(truth[name])
    for name, found in together(spread, parts).items():
        error, bound = max_error(found.to(device), truth[name]), bounds[name]
        assert error <= bound, f"E({name}) = {error:.3g} > {bound:.3g} in {dtype} on {len(parts)} ranks for\n{spread}"


def check(pool: Pool, spreads: Sequence[Spread], dtype: torch.dtype = torch.float64) -> None:
    ranks = pool.run(ring_cases.run, list(spreads), dtype)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[index][0] for rank in ranks], dtype, pool.device)


@pytest.mark.parametrize(("world", "first"), [(world, first) for world, count in CASES.items() for first in range(0, count, BATCH)])
def test_random_calls(world: int, first: int) -> None:
    check(pool_of(world), [draw(world, seed) for seed in range(first, first + BATCH)])


# --- chosen calls -----------------------------------------------------------------------------------------------------------------


def by_name(rank: int, world: int, name: str, spreads: Sequence[Spread], dtype: torch.dtype) -> tuple[list[list[Result]], int]:
    """The calls on a backend for GPUs: also on a CPU, where kernels are interpreted, and a stand-in counts its launches of documents."""
    with pytest.MonkeyPatch.context() as patch:
        if here().type == "cpu":
            put_on_cpu(patch, name)
            patch.setattr(flash3, "_ops", Flash3Ops)
            patch.setattr(Flash3Ops, "packed", 0)
        return ring_cases.run(rank, world, [with_changes(x, backend=name) for x in spreads], dtype), Flash3Ops.packed


@pytest.mark.skipif(ON_CPU and os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels")
@pytest.mark.parametrize("pool", worlds(2, gpus=(2,)))
def test_biases_by_kernels(pool: Pool) -> None:
    dtype, spreads = torch.bfloat16 if pool.on_gpus else torch.float32, ring_cases.biases()
    ranks = pool.run(by_name, "tiles", spreads, dtype)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[0][index][0] for rank in ranks], dtype, pool.device)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_of_packed_documents_is_one_launch(world: int, layout: str) -> None:
    """FlashAttention-3 stands for the libraries that take boundaries of documents, and for those that take no gradient of lse."""
    bounds = ((0, 60), (0, 12, 40, 60), (0, 1, 1, 25, 30, 60), (0, 7, 19, 33, 60), (0, 3, 59, 60))
    spreads = [
        spread_of(WHOLE, 60, batch=1, bounds=one, is_causal=is_causal, lse_grad=layout == "zigzag", layout=layout, exchange="all_gather")
        for one in bounds
        for is_causal in (False, True)
    ]
    ranks = pool_of(world).run(by_name, "flash3", spreads, torch.float64)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[0][index][0] for rank in ranks])
    for rank, (_, launches) in enumerate(ranks):
        low, high = 60 * rank // world, 60 * (rank + 1) // world
        held = [sum(max(a, low) < min(b, high) for a, b in itertools.pairwise(one)) for one in bounds]
        # causal or not, in both passes
        assert layout == "zigzag" or launches == 4 * sum(count > 1 for count in held)


@pytest.mark.parametrize("world", [2, 4])
def test_branches_that_cross_ranks(world: int) -> None:
    """Segments within ranks beside sparse ones across ranks."""
    n = 64 * world
    branches = (((8, 2 * n), (1, 4)), ((4, 8, n // 2), (1, 2, 8)), ((4, 2**40), (1, 4)), ((8, n, n), (1, 4, 8)))
    spreads = [
        spread_of(DilatedPattern(lengths, rates, ("cyclic", "zero")[index % 2]), n, heads=heads, kv_heads=kv_heads, is_causal=is_causal,
                  steps=True, layout=("contiguous", "zigzag")[(index + heads // 4 + is_causal + world // 2) % 2], exchange="all_gather")
        for index, (lengths, rates) in enumerate(branches)
        for heads, kv_heads in ((4, 4), (4, 2), (8, 1))
        for is_causal in (False, True)
    ]  # fmt: skip
    # heads of one key/value head at one offset, other key/value heads at others
    spreads.append(spread_of(DilatedPattern((8, 2 * n), (1, 4), "blocked"), n, heads=8, kv_heads=4, exchange="all_gather", steps=True))
    check(pool_of(world), spreads)


def test_a_world_of_one_is_the_single_process_bit_for_bit() -> None:
    for spread in (spread_of(DilatedPattern((8, 48), (1, 3))), spread_of(is_causal=True), spread_of(exchange="2d", layout="striped")):
        x = inputs(spread.case, torch.float32)
        truth = results(call, spread.case, x)
        # torch.distributed is not initialised in this process
        mine = results(ring_cases.ring_call(spread), spread.case, x)
        (pooled,) = pool_of(1).run(ring_cases.run, [spread], torch.float32)
        for name in truth:
            assert torch.equal(mine[name], truth[name]) and torch.equal(pooled[0][0][name], truth[name])


@pytest.mark.parametrize("pool", worlds(2, gpus=(2, 4)))
def test_deterministic_runs_repeat_bit_for_bit(pool: Pool) -> None:
    spreads = [with_changes(x, head_dim=64, heads=4, kv_heads=4) if pool.on_gpus else x for x in ring_cases.of_each_kind()]
    for rank in pool.run(ring_cases.run, spreads, torch.bfloat16 if pool.on_gpus else torch.float32, 3, pool.on_gpus):
        for first, *others in rank:
            assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_errors_in_low_precision_are_those_of_plain_attention() -> None:
    """On GPUs: gpus/test_ring.py."""
    check(pool_of(2), [draw(2, seed, Kernel(dtype=torch.bfloat16)) for seed in range(2000, 2050)], torch.bfloat16)


def errors_of_key_gradients(rank: int, world: int, runs: int) -> list[float]:
    """Of dk and dv in bfloat16, relative to float64 in one process; each rank has so many runs of the sequence."""
    n = 1024
    size = n // (world * runs)
    layout = Layout(n, tuple(tuple((i * size, i * size + size) for i in range(r, world * runs, world)) for r in range(world)))
    mine = torch.cat([torch.arange(*run) for run in layout.runs[rank]])
    rng = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, 16, generator=rng).to(torch.bfloat16) * scale for scale in (0.1, 0.1, 1, 1))
    leaves = [x[:, mine].requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, seq_len=n, layout=layout, exchange="all_gather")
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*exact), exact, dout.double())
    found = torch.autograd.grad(out, leaves, dout[:, mine])
    return [float((a - b[:, mine]).norm() / b[:, mine].norm()) for a, b in zip(found[1:], expected[1:], strict=True)]


def test_sums_over_many_runs_are_not_rounded_at_each_of_them() -> None:
    of_one, of_many = (max(map(max, pool_of(2).run(errors_of_key_gradients, runs))) for runs in (1, 32))
    assert of_many < 1.2 * of_one < 0.01


# --- groups -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_mesh", [False, True])
@pytest.mark.parametrize("pool", worlds(4, gpus=(4,)))
def test_groups_that_are_a_part_of_the_world(pool: Pool, as_mesh: bool) -> None:
    """Ranks 1 and 3 of four as a group; columns of a mesh, each a sequence of its own."""
    spreads = ring_cases.of_each_kind()
    ranks = pool.run(ring_cases.in_subgroup, [1, 3], spreads, as_mesh)
    for members in ([ranks[0], ranks[2]], [ranks[1], ranks[3]]):
        if not as_mesh and members[0] is ranks[0]:
            assert members == [None, None]
            continue
        for index, spread in enumerate(spreads):
            judge(spread, [parts[index] for parts in members], device=pool.device)


@pytest.mark.parametrize("pool", worlds(3, gpus=(3,)))
def test_processes_may_have_different_numbers_of_groups(pool: Pool) -> None:
    """torch names a communicator by how many groups a process has, so ranks waited for each other under different names."""
    spread = spread_of(is_causal=True)
    judge(spread, pool.run(ring_cases.part_first, [0, 2], spread), device=pool.device)


def planned_for_hopper(rank: int, world: int, spreads: Sequence[Spread], dtype: torch.dtype) -> list[list[Result]]:
    with mock.patch.object(ring_pass, "detect", lambda device: EXAMPLES["hopper"]):
        return ring_cases.run(rank, world, spreads, dtype)


@pytest.mark.parametrize("pool", worlds(2, gpus=(2,)))
def test_a_sequence_of_no_positions(pool: Pool) -> None:
    """Ranks compared kernels for it, and a GPU's plan counts tiles."""
    spreads = [spread_of(DilatedPattern((2, 8), (1, 2)), 0, batch=1, bounds=bounds) for bounds in (None, (0, 0, 0))]
    spreads += [spread_of(n=0, is_causal=True, layout=layout) for layout in ("zigzag", "contiguous")]
    ranks = pool.run(planned_for_hopper, spreads, torch.float32)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[index][0] for rank in ranks], torch.float32, pool.device)


@pytest.mark.parametrize(("exchange", "layout"), [("all_to_all", "contiguous"), ("all_gather", "striped"), ("all_gather", "zigzag")])
@pytest.mark.parametrize("pool", worlds(2, gpus=(2, 4)))
def test_a_gradient_of_lse_on_one_rank_alone(pool: Pool, exchange: str, layout: str) -> None:
    spread = spread_of(n=8 * pool.world, kv_heads=4, exchange=exchange, layout=layout)
    x = inputs(spread.case, torch.float64, pool.device)
    for rank in range(pool.world - 1):
        x.dlse[..., positions(8 * pool.world, rank, pool.world, layout)] = 0
    truth = results(plain_attention, spread.case, x)
    for name, found in together(spread, pool.run(ring_cases.lse_of_the_last, spread)).items():
        assert_close(found, truth[name].cpu(), atol=1e-10, rtol=0, msg=name)


def by_single_heads(rank: int, world: int, spreads: Sequence[Spread]) -> list[list[Result]]:
    """The calls where no memory holds the keys of two heads."""
    ring_pass._setups.clear()
    with mock.patch.object(ring_pass, "MEMORY_SHARE", 1e-12):
        return ring_cases.run(rank, world, spreads)


def test_heads_that_take_other_positions_come_one_after_the_other() -> None:
    spreads = [spread_of(DilatedPattern((8, 48), (1, 3)), heads=heads, kv_heads=4, is_causal=True) for heads in (4, 8)]
    ranks = pool_of(2).run(by_single_heads, spreads)
    for index, spread in enumerate(spreads):
        judge(spread, [rank[index][0] for rank in ranks])


FIRST_CALLS: dict[str, dict[str, Any]] = {
    "dense": {"is_causal": True, "layout": "zigzag"},
    "striped": {"is_causal": True, "layout": "striped"},
    "heads": {"is_causal": True, "exchange": "all_to_all"},
    "padded": {"key_padding_mask": torch.arange(96)[None] >= 90},
    "branches": {"branches": ([20, 40, 192], [1, 2, 4])},
    # those within ranks apart from those across
    "crossing": {"branches": ([8, 192], [1, 4])},
}


def planned(rank: int, world: int, name: str) -> tuple[int, int]:
    """How many plans of a first call are made before the ranks connect, and how many after; the group is new."""
    group, made, options = dist.new_group(), [0, 0], dict(FIRST_CALLS[name])
    layout = options.setdefault("layout", "contiguous")
    if (padding := options.get("key_padding_mask")) is not None:
        options["key_padding_mask"] = shard_sequence(group, [padding], [1], layout=layout)[0]
    q, k, v = shard_sequence(group, [torch.randn(1, 96, 4, 8) for _ in range(3)], [1, 1, 1], layout=layout)
    make, compile_ahead, connected = run.make_plan, run.compile_ahead, [1]

    def counted(*args: Any, **kwargs: Any) -> Any:
        made[connected[0]] += 1
        return make(*args, **kwargs)

    def ahead(*args: Any, **kwargs: Any) -> None:
        connected[0] = 0
        assert any(term.chosen_rows is not None for term in args[0]) == (name == "crossing")
        compile_ahead(*args, **kwargs)
        connected[0] = 1

    changes = ((run, "make_plan", counted), (run, "compile_ahead", ahead))
    with byte_limits_of_one(), contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        if branches := options.pop("branches", None):
            ring_dilated_attention(q, k, v, *branches, group=group, **options)
        else:
            ring_attention(q, k, v, group=group, **options)
    return made[0], made[1]


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_a_first_call_has_its_plans_before_the_ranks_connect(name: str) -> None:
    """On a GPU they start compiling; the call finds them by the strides of what it computes on."""
    assert all(before > 0 and after == 0 for before, after in pool_of(2).run(planned, name))
