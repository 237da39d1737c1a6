"""Bytes on the wire: what is measured equals the closed formulas, and the formulas the numbers that one works out by hand."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.distributed.exchange.setup import even_steps
from dilated_attention.pattern import BigBird, GlobalLocal, LocalWindow, PerHead, RandomBlocks
from dilated_attention.planning.memory import Bytes
from dilated_attention.testing import inputs
from tests.distributed import test_ring_blocks as blocks
from tests.helpers.comm_volume import CommSizes, block_bytes, dense_bytes, dilated_bytes, heads_bytes
from tests.helpers.pool import pool_of
from tests.helpers.ring_cases import WHOLE, Spread, byte_limits_of_one, local_inputs, positions, random_layout, ring_call
from tests.helpers.ring_chosen import spread_of
from tests.helpers.traffic import traffic

D = 8
Count = tuple[Bytes, dict[int, int]]


def counted(function: Any, case: Any, x: Any, needs_grad: bool = True, **options: Any) -> Count:
    """Bytes of forward and backward, and of the forward those sent to each peer: keys, their gradients and what changes hands alone."""
    leaves = [y.detach().requires_grad_(needs_grad) for y in (x.q, x.k, x.v)]
    with traffic() as forward:
        out, lse = function(case, x, *leaves, **options)
    with traffic() as backward:
        if needs_grad:
            outputs, grads = ([out, lse], [x.dout, x.dlse]) if getattr(case, "lse_grad", True) else ([out], [x.dout])
            torch.autograd.grad(outputs, leaves, grads)
    return Bytes(forward.sent, forward.received, backward.sent, backward.received), dict(forward.sent_to)


def measured(rank: int, world: int, spreads: list[Spread], dtype: torch.dtype, needs_grad: bool) -> list[Count]:
    found = []
    for spread in spreads:
        x = local_inputs(inputs(spread.case, dtype), positions(spread.case.num_keys, rank, world, spread.layout))
        with byte_limits_of_one() if spread.steps else nullcontext():
            found.append(counted(ring_call(spread), spread.case, x, needs_grad))
    return found


@dataclass(frozen=True)
class Expected:
    """A call, and the name and arguments of its formula."""

    spread: Spread
    formula: str
    arguments: tuple[Any, ...] = ()


def dense(world: int) -> list[Expected]:
    return [
        Expected(spread_of(WHOLE, n, layout=layout, exchange=exchange, is_causal=is_causal, window=window, steps=steps), "dense")
        for n in (16 * world + 3, world - 1)
        for layout in ("contiguous", "zigzag")
        for is_causal in (False, True)
        for exchange, window, steps in (
            ("all_gather", None, False),
            ("all_gather", None, True),
            ("all_gather", (5, 2), False),
            ("all_gather", (0, None), False),
            ("all_gather", (30, 30), True),
        )
    ]


def dilated(world: int) -> list[Expected]:
    whole = 24 * world
    found = []
    # heads of a key/value head: fewer than offsets, as many, more
    for heads, kv_heads in ((4, 4), (4, 2), (8, 2), (8, 1)):
        for lengths, rates in (
            ((12, 24), (1, 4)),
            ((24, 48, whole), (1, 2, 4)),
            ((whole,), (4,)),
            ((8, whole), (2, 2)),
            ((whole, whole), (1, 4)),
            # aligned with no rank, and rows that two branches take
            ((whole - 5, 17), (3, 1)),
            ((whole - 7, 31), (4, 2)),
        ):
            pattern = DilatedPattern(lengths, rates)
            found += [
                Expected(
                    spread_of(pattern, whole, heads=heads, kv_heads=kv_heads, is_causal=c, exchange="all_gather"),
                    "dilated",
                    (lengths, rates),
                )
                for c in (False, True)
            ]
    return found


def by_heads(world: int) -> list[Expected]:
    return [
        Expected(spread_of(pattern, n, heads=heads, kv_heads=kv_heads, layout=layout, exchange="all_to_all", lse_grad=lse_grad), "heads")
        for pattern in (WHOLE, DilatedPattern((8, 32), (1, 4)))
        for n in (8 * world, 29)
        for heads, kv_heads in ((2 * world, 2 * world), (world, 1))
        for layout in ("contiguous", "zigzag", "striped")
        # without a gradient of lse, too, zeros travel: another rank may have one
        for lse_grad in (False, True)
    ]


DOCUMENTS = (0, 7, 8, 50, 96)


def of_layouts(world: int) -> list[Expected]:
    """Runs that begin and end anywhere, with and without packed documents."""
    found = []
    for seed, bounds in enumerate((None, DOCUMENTS) * 2):
        options: dict[str, Any] = {"layout": random_layout(96, world, seed).name}
        options |= {} if bounds is None else {"bounds": bounds, "batch": 1}
        for is_causal in (False, True):
            for window in (None, (5, 2)):
                found.append(Expected(spread_of(WHOLE, 96, exchange="all_gather", is_causal=is_causal, window=window, **options), "dense"))
            for lengths, rates in (((12, 24), (1, 4)), ((24, 48, 96), (1, 2, 4)), ((91, 17), (3, 1))):
                spread = spread_of(DilatedPattern(lengths, rates), 96, is_causal=is_causal, exchange="all_gather", **options)
                found.append(Expected(spread, "dilated", (lengths, rates)))
    return found


def formula(one: Expected, world: int, rank: int, dtype: torch.dtype) -> Bytes:
    case = one.spread.case
    sizes = CommSizes(case.heads, case.kv_heads, D, case.batch, dtype.itemsize, max(4, dtype.itemsize))
    documents = None if case.bounds is None else list(itertools.pairwise(case.bounds))
    if one.formula == "dense":
        options: dict[str, Any] = {"is_causal": case.is_causal, "window": case.window, "documents": documents}
        return dense_bytes(case.num_keys, world, rank, one.spread.layout, sizes, **options)
    if one.formula == "dilated":
        options = {"is_causal": case.is_causal, "layout": one.spread.layout, "documents": documents}
        return dilated_bytes(case.num_keys, world, rank, *one.arguments, sizes, **options)
    held = len(positions(case.num_keys, rank, world, one.spread.layout))
    return heads_bytes(case.num_keys, world, held, sizes, lse_grad=True)


@pytest.mark.parametrize("make", [dense, dilated, by_heads, of_layouts])
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (4, torch.float64), (8, torch.float32)])
def test_what_is_exchanged_is_what_the_formulas_say(make: Any, world: int, dtype: torch.dtype) -> None:
    calls = make(world)
    assert len(calls) >= 20
    # each call is made by two processes or by four, and every third one by eight, which take long
    order = random.Random(0).sample(calls, len(calls))
    calls = {2: order[::2], 4: order[1::2], 8: order[::3]}[world]
    needs_grad = world < 8
    for rank, found in enumerate(pool_of(world).run(measured, [one.spread for one in calls], dtype, needs_grad, timeout=120.0)):
        for one, (count, _) in zip(calls, found, strict=True):
            wanted = formula(one, world, rank, dtype)
            assert count.forward_sent == wanted.forward_sent and count.forward_received == wanted.forward_received, (rank, one)
            if needs_grad:
                assert count == wanted, (rank, one)


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


@pytest.mark.parametrize(("kind", "world"), [("blocks", 2), ("blocks", 3), ("union", 3)])
def test_blocks_exchange_what_the_formula_says(kind: str, world: int) -> None:
    whole = 64 * world
    branches = [((whole,), (1,)), ((24, whole), (1, 4)), ((whole - 5, 17), (3, 1)), ((8, 16), (1, 2)), ((whole, whole), (2, 3))]
    spreads = blocks.laid_out(blocks.of_kind(kind, of_every_holder(world), [DilatedPattern(*x) for x in branches]), world)
    dtype = torch.float32 if world % 2 else torch.float64
    ranks = pool_of(world).run(measured, spreads, dtype, True)
    for index, spread in enumerate(spreads):
        case = spread.case
        sizes = CommSizes(case.heads, case.kv_heads, case.head_dim, case.batch, dtype.itemsize, dtype.itemsize)
        beside = None if case.branches is None else (case.branches.segment_lengths, case.branches.dilation_rates)
        options: dict[str, Any] = {
            "is_causal": case.is_causal,
            "head_steps": even_steps(case.kv_heads, spread.head_steps or 1),
            "branches": beside,
        }
        for rank in range(world):
            want = block_bytes(case.pattern, case.num_keys, world, rank, spread.layout, sizes, **options)
            assert ranks[rank][index][0] == want, f"rank {rank} of {world}: {spread}"


def test_blocks_by_hand() -> None:
    """Windows of 64 on four shards of two blocks: one block of each neighbour, K and V of 2 heads of 3 floats; others move nothing."""
    block = 2 * 64 * 2 * 3 * 4
    window = Spread(case=blocks.case_of(LocalWindow(64, block_size=64), 512, head_dim=3))
    nothing = Spread(case=blocks.case_of(RandomBlocks(0.0, block_size=64), 512))
    at_home = [
        Spread(case=blocks.case_of(LocalWindow(500, block_size=64), 512, bounds=(0, 128, 256, 384, 512))),
        nothing,
        *blocks.of_kind("union", [nothing], [DilatedPattern((64, 128), (1, 2))]),
    ]
    spreads = [window, replace(window, case=replace(window.case, is_causal=True)), *at_home]
    ranks = pool_of(4).run(measured, spreads, torch.float32, True)
    assert [found[0][1] for found in ranks] == [{1: block}, {0: block, 2: block}, {1: block, 3: block}, {2: block}]
    assert [found[1][1] for found in ranks] == [{1: block}, {2: block}, {3: block}, {}]
    assert all(count == (Bytes(0, 0, 0, 0), {}) for found in ranks for count in found[2:])
