"""How many heads' keys travel at a time, by a model of a forward's time: the first step's keys are waited for, the others travel
beside what is computed, and each step has a launch of its own.

All ranks must come to the same answer without asking each other, so it depends on what all know.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from dilated_attention.distributed.blocks_plan import BlockJob, Needs, columns_of
from dilated_attention.distributed.cost import AHEAD_BYTES, FEW_CTAS, FLOPS, LATENCY, SHARE

MOST_STEPS = 8
# of a launch, beside what its last blocks of queries leave idle: seconds, and multiprocessors of an H200
LAUNCH, PROCESSORS = 20e-6, 132


@dataclass(frozen=True)
class Lane:
    """How keys may travel: multiprocessors that NCCL may take (None: as it likes), what it then takes, bytes/s received."""

    most_ctas: int | None
    takes: int
    rate: float


# on four H200s; of few multiprocessors about 15 GB/s each
LANES = (Lane(None, 24, 235e9), Lane(FEW_CTAS, FEW_CTAS, 60e9))


@dataclass(frozen=True)
class Load:
    """What one key/value head costs the slowest rank.

    Args:
        heads: key/value heads.
        compute, launch: seconds of arithmetic, and what a step's launch costs beside it.
        brought, held: bytes of keys received, and brought together with its own.
    """

    heads: int
    compute: float
    launch: float
    brought: int
    held: int


@dataclass(frozen=True)
class Way:
    """How keys travel: key/value heads of each step, and the lane."""

    steps: tuple[int, ...]
    lane: Lane


def load_of(job: BlockJob, needs: Needs, batch: int, head_dim: int, itemsize: int) -> Load:
    columns, row = columns_of(job), 2 * batch * head_dim * itemsize
    sizes = (columns.ends - columns.starts).double()
    # of a block on two ranks both parts are counted as brought: a model needs no more
    low, high = columns.holders()
    brought = held = 0.0
    for rank in range(job.size):
        rows = needs.kept[rank].double() * sizes
        elsewhere = (low != rank) | (high != rank)
        brought = max(brought, float(rows[:, elsewhere].sum(1).mean()))
        held = max(held, float(rows.sum(1).mean()))
    flops = 4 * batch * head_dim * float(needs.pairs.mean(1).max())
    rows_of_queries = max(1, max(len(x) for x in columns.positions)) * job.num_heads // job.num_kv_heads
    # its last wave of query blocks fills half of the multiprocessors on the mean
    tail = flops / (FLOPS / PROCESSORS) * job.pattern.q_block / rows_of_queries / 2
    return Load(job.num_kv_heads, flops / FLOPS, LAUNCH + tail, int(brought * row), int(held * row))


def choose(load: Load, memory: int, forced: int = 0) -> Way:
    """The fastest way by the model.

    Args:
        memory: of each device, in bytes; two steps' keys may take a share of it.
        forced: so many steps, as equal as can be; 0 for any.
    """
    if not load.brought:
        return Way(even(load.heads, forced or 1), LANES[0])
    candidates = {even(load.heads, n) for n in ([forced] if forced else range(1, load.heads + 1))}
    ways = [Way(steps, lane) for lane in LANES for steps in sorted(candidates)]
    if not forced:
        ways += [Way(_grown(load, lane, first), lane) for lane in LANES for first in range(1, load.heads + 1)]
    room = [way for way in ways if 2 * max(way.steps) * load.held <= SHARE * memory]
    return min(
        room or [way for way in ways if len(way.steps) == max(len(other.steps) for other in ways)], key=lambda way: seconds(load, way)
    )


def even(heads: int, steps: int) -> tuple[int, ...]:
    """Heads in so many steps, the first ones being the larger ones; no step without any."""
    size, larger = divmod(heads, min(steps, heads))
    return tuple(size + (index < larger) for index in range(min(steps, heads)))


def _grown(load: Load, lane: Lane, first: int) -> tuple[int, ...]:
    """Steps that grow as fast as their keys can travel beside what is computed before."""
    steps, done, wire = [first], first, load.brought / lane.rate
    while done < load.heads:
        left = load.heads - done
        fits = int((wire * first + load.compute * done) / wire) - done
        steps.append(left if len(steps) == MOST_STEPS - 1 else min(left, max(1, fits)))
        done += steps[-1]
    return tuple(steps)


def seconds(load: Load, way: Way) -> float:
    """Of a forward. What travels beside arithmetic takes multiprocessors away from it."""
    wire = load.brought / way.lane.rate
    end = 0.0
    for count, total in zip(way.steps, itertools.accumulate(way.steps), strict=True):
        end = max(end, LATENCY + wire * total) + load.compute * count + load.launch
    return end + wire * (load.heads - way.steps[0]) * way.lane.takes / PROCESSORS


def steps_ahead(load: Load, steps: tuple[int, ...]) -> int:
    """Steps whose keys may be in memory at once: two, or all that fit into a small budget, so that none waits for memory to be free."""
    return max(2, AHEAD_BYTES // max(1, load.held * max(steps)))
