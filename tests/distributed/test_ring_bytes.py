"""Bytes on the wire: what is measured equals the closed formulas, and the formulas the numbers that one works out by hand."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.distributed import ring_pass
from dilated_attention.pattern import BigBird, GlobalLocal, LocalWindow, PerHead, RandomBlocks
from dilated_attention.planning.memory import Bytes
from dilated_attention.testing import inputs
from tests.distributed import test_ring_blocks as blocks
from tests.helpers.comm_volume import heads_bytes, rows_bytes
from tests.helpers.pool import pool_of
from tests.helpers.ring_cases import (
    WHOLE,
    Spread,
    byte_limits_of_one,
    draw,
    local_inputs,
    positions,
    random_layout,
    ring_call,
    with_changes,
)
from tests.helpers.traffic import traffic

D = 8


def counted(function: Any, case: Any, x: Any) -> Bytes:
    """Of forward and backward: of keys, their gradients and what changes hands alone."""
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    with traffic() as forward:
        out, lse = function(case, x, *leaves)
    with traffic() as backward:
        outputs, grads = ([out, lse], [x.dout, x.dlse]) if case.lse_grad else ([out], [x.dout])
        torch.autograd.grad(outputs, leaves, grads)
    return Bytes(forward.sent, forward.received, backward.sent, backward.received)


def measured(rank: int, world: int, spreads: list[Spread], dtype: torch.dtype) -> list[Bytes]:
    found = []
    for spread in spreads:
        x = local_inputs(inputs(spread.case, dtype), positions(spread.case.num_keys, rank, world, spread.layout))
        with byte_limits_of_one() if spread.steps else nullcontext():
            found.append(counted(ring_call(spread), spread.case, x))
    return found


def by_heads(spread: Spread, world: int) -> bool:
    case, pattern = spread.case, spread.case.pattern
    is_dense = pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= case.num_keys
    # a window that is no longer than a shard
    is_dense = is_dense and (case.window is None or case.window[0] is None or case.window[0] > case.num_keys // world)
    sizes = world, case.heads, case.kv_heads
    return ring_pass.exchange_of(spread.exchange, spread.layout, *sizes, is_dense=is_dense, is_causal=case.is_causal) == "all_to_all"


def of_kind(kind: str, spreads: Sequence[Spread], choices: Sequence[DilatedPattern]) -> list[Spread]:
    if kind == "blocks":
        return list(spreads)
    return [replace(x, case=replace(x.case, branches=choices[index % len(choices)])) for index, x in enumerate(spreads)]


def calls_of(world: int, count: int) -> list[Spread]:
    """Random calls with nothing but keys to exchange, by heads, or with offsets h mod r on rows that stay where they are."""
    found: list[Spread] = []
    for seed in range(20_000, 20_000 + 10 * count):
        spread = draw(world, seed)
        case, pattern = spread.case, spread.case.pattern
        if seed % 3 == 0:
            spread = with_changes(spread, layout=random_layout(random.Random(seed), case.num_keys, world).name)
        cyclic = (pattern.head_offsets, pattern.branch_heads, pattern.tail) == ("cyclic", "all", "mask") or pattern == WHOLE
        if (case.padding, case.bias, case.mixture_grad) == ("none", "none", "exact"):
            found += [spread] * (by_heads(spread, world) or (cyclic and spread.layout != "striped"))
    return found[:count]


def formula(spread: Spread, world: int, rank: int, dtype: torch.dtype) -> Bytes:
    if by_heads(spread, world):
        # without a gradient of lse, too, zeros travel: another rank may have one
        return heads_bytes(spread, world, rank, dtype.itemsize, max(4, dtype.itemsize), lse_grad=True)
    return rows_bytes(spread, world, rank, dtype.itemsize)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (4, torch.float64)])
def test_what_is_exchanged_is_what_the_formulas_say(world: int, dtype: torch.dtype) -> None:
    calls = calls_of(world, 120)
    kinds = [[by_heads(x, world), x.case.pattern == WHOLE, x.case.bounds is not None, x.steps] for x in calls]
    # by heads or not, dense or dilated, with documents, in many steps
    assert all(15 <= sum(kind) <= 105 for kind in zip(*kinds, strict=True))
    for rank, found in enumerate(pool_of(world).run(measured, calls, dtype)):
        for spread, count in zip(calls, found, strict=True):
            assert count == formula(spread, world, rank, dtype), (rank, spread)


# --- blocks, alone and beside branches --------------------------------------------------------------------------------------------


def of_every_holder(world: int) -> list[Spread]:
    spreads = []
    for N in (64 * world, 64 * world + 37, world - 1):
        patterns = [
            LocalWindow(40, block_size=64),
            GlobalLocal(20, 70, block_size=64),
            RandomBlocks(0.3, block_size=(64, 128)),
            BigBird(30, 3, 1, block_size=(128, 64)),
            PerHead((LocalWindow(1), LocalWindow(150), RandomBlocks(0.2, seed=1), RandomBlocks(0.4, seed=2))),
        ]
        for index, pattern in enumerate(patterns):
            for layout in ("contiguous", "zigzag", "balanced", "dealt")[index % 2 :: 2]:
                case = blocks.case_of(pattern, N, batch=2, is_causal=index % 2 == 0, head_dim=3)
                spreads.append(Spread(case=case, layout=layout, head_steps=1 + index % 2))
    return spreads


@pytest.mark.parametrize(("kind", "world"), [("blocks", 2), ("union", 3)])
def test_blocks_exchange_what_the_formula_says(kind: str, world: int) -> None:
    whole = 64 * world
    branches = [((whole,), (1,)), ((24, whole), (1, 4)), ((whole - 5, 17), (3, 1)), ((8, 16), (1, 2)), ((whole, whole), (2, 3))]
    spreads = blocks.laid_out(of_kind(kind, of_every_holder(world), [DilatedPattern(*x) for x in branches]), world)
    dtype = torch.float32 if world % 2 else torch.float64
    ranks = pool_of(world).run(measured, spreads, dtype)
    for index, spread in enumerate(spreads):
        for rank in range(world):
            want = rows_bytes(spread, world, rank, dtype.itemsize)
            assert ranks[rank][index] == want, f"rank {rank} of {world}: {spread}"


def test_blocks_of_documents_within_ranks_move_nothing() -> None:
    nothing = Spread(case=blocks.case_of(RandomBlocks(0.0, block_size=64), 512))
    at_home = [
        Spread(case=blocks.case_of(LocalWindow(500, block_size=64), 512, bounds=(0, 128, 256, 384, 512))),
        nothing,
        *of_kind("union", [nothing], [DilatedPattern((64, 128), (1, 2))]),
    ]
    assert pool_of(4).run(measured, at_home, torch.float32) == [[Bytes(0, 0, 0, 0)] * 3] * 4
