"""Chooses how many heads' keys are sent at a time, using a model of a forward's time.

In the model the first step's keys are waited for, the others are transferred while earlier steps are computed, and each step has a
launch of its own. All ranks must come to the same answer without asking each other, so it depends only on what all of them know.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from dilated_attention.distributed.block_exchange.plan import NeededBlocks, columns_of
from dilated_attention.distributed.exchange.cost import FEW_CTAS, FLOPS, LATENCY, SHARE
from dilated_attention.distributed.exchange.plan import RingBlockProblem, RingProblem, needed_keys

MOST_STEPS = 8
# the cost of a launch in seconds, in addition to the time its last query blocks leave idle; and the multiprocessors of an H200
LAUNCH, PROCESSORS = 20e-6, 132


@dataclass(frozen=True)
class TransferLane:
    """A way to send keys.

    Args:
        most_ctas: how many multiprocessors NCCL may use; None to let NCCL decide.
        takes: how many it then uses.
        rate: bytes/s received.
    """

    most_ctas: int | None
    takes: int
    rate: float


# seconds until the host has issued a forward, and for each step of it: measured on H100s, in 3 steps of 16 heads 3.0 ms, and 0.5 of a ring
# without them (bench scaling, random blocks)
HOST, HOST_STEP = 0.5e-3, 0.7e-3
# measured on four H200s; with few multiprocessors each brings about 15 GB/s
LANES = (TransferLane(None, 24, 235e9), TransferLane(FEW_CTAS, FEW_CTAS, 60e9))


@dataclass(frozen=True)
class TransferLoad:
    """What one key/value head costs the slowest rank.

    Args:
        heads: the number of key/value heads.
        compute, launch: seconds of arithmetic, and the additional cost of a step's launch in seconds.
        brought, held: bytes of the keys it receives, and of these together with its own.
    """

    heads: int
    compute: float
    launch: float
    brought: int
    held: int


@dataclass(frozen=True)
class TransferPlan:
    """How keys are sent: the number of key/value heads in each step, and the lane."""

    steps: tuple[int, ...]
    lane: TransferLane


def load_of(
    ring_problem: RingBlockProblem, needs: NeededBlocks, batch: int, head_dim: int, itemsize: int, branches: RingProblem | None = None
) -> TransferLoad:
    """Returns the load of a call's blocks, and of ``branches`` on the same keys. Keys that both need count twice."""
    columns, row = columns_of(ring_problem), 2 * batch * head_dim * itemsize
    sizes = (columns.ends - columns.starts).double()
    # a block that two ranks hold counts as received in full, which is accurate enough for the model
    low, high = columns.holders()
    brought = held = 0.0
    for rank in range(ring_problem.size):
        rows = needs.kept[rank].double() * sizes
        elsewhere = (low != rank) | (high != rank)
        more = 0.0 if branches is None else float(needed_keys(branches, rank, needs.kept.device).sum(1).double().mean())
        brought = max(brought, float(rows[:, elsewhere].sum(1).mean()) + more)
        held = max(held, float(rows.sum(1).mean()) + more)
    pairs = float(needs.pairs.mean(1).max())
    if branches is not None:
        lengths = (end - start for start, end in branches.documents)
        whole = sum(branches.pattern.pairs(length, branches.num_heads, is_causal=branches.is_causal) for length in lengths)
        pairs += whole / ring_problem.size / ring_problem.num_kv_heads
    flops = 4 * batch * head_dim * pairs
    rows_of_queries = max(1, max(len(x) for x in columns.positions)) * ring_problem.num_heads // ring_problem.num_kv_heads
    # the last wave of query blocks fills half of the multiprocessors on average
    tail = flops / (FLOPS / PROCESSORS) * ring_problem.pattern.q_block / rows_of_queries / 2
    return TransferLoad(ring_problem.num_kv_heads, flops / FLOPS, LAUNCH + tail, math.ceil(brought * row), math.ceil(held * row))


def choose(load: TransferLoad, memory: int, forced: int = 0) -> TransferPlan:
    """Returns the fastest way according to the model.

    Args:
        memory: bytes of memory of each device; the keys of two steps may take the fraction ``SHARE`` of it.
        forced: the number of steps, of sizes as equal as possible; 0 for any.
    """
    if not load.brought:
        return TransferPlan(even(load.heads, forced or 1), LANES[0])
    candidates = {even(load.heads, n) for n in ([forced] if forced else range(1, load.heads + 1))}
    ways = [TransferPlan(steps, lane) for lane in LANES for steps in sorted(candidates)]
    if not forced:
        ways += [TransferPlan(_grown(load, lane, first), lane) for lane in LANES for first in range(1, load.heads + 1)]
    room = [way for way in ways if 2 * max(way.steps) * load.held <= SHARE * memory]
    return min(
        room or [way for way in ways if len(way.steps) == max(len(other.steps) for other in ways)], key=lambda way: seconds(load, way)
    )


def even(heads: int, steps: int) -> tuple[int, ...]:
    """Splits the heads into this many steps, the larger ones first; no step is empty."""
    size, larger = divmod(heads, min(steps, heads))
    return tuple(size + (index < larger) for index in range(min(steps, heads)))


def _grown(load: TransferLoad, lane: TransferLane, first: int) -> tuple[int, ...]:
    """Returns steps that grow as fast as their keys can be transferred during the computation before them."""
    steps, done, wire = [first], first, load.brought / lane.rate
    while done < load.heads:
        left = load.heads - done
        fits = int((wire * first + load.compute * done) / wire) - done
        steps.append(left if len(steps) == MOST_STEPS - 1 else min(left, max(1, fits)))
        done += steps[-1]
    return tuple(steps)


def seconds(load: TransferLoad, way: TransferPlan) -> float:
    """Returns the modelled seconds of a forward. Transfers that overlap with arithmetic take multiprocessors away from it.

    Short calls last until the host has issued them.
    """
    wire = load.brought / way.lane.rate
    end = 0.0
    for count, total in zip(way.steps, itertools.accumulate(way.steps), strict=True):
        end = max(end, LATENCY + wire * total) + load.compute * count + load.launch
    return max(end + wire * (load.heads - way.steps[0]) * way.lane.takes / PROCESSORS, HOST + HOST_STEP * len(way.steps))
