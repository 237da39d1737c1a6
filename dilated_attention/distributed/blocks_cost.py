"""How many heads' keys travel at a time, by a model of a forward's time: the first step's keys are waited for, the others travel
beside what is computed, and each step has a launch of its own.

All ranks must come to the same answer without asking each other, so it depends on what all know.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from dilated_attention.distributed.blocks_plan import BlockJob, Needs, columns_of
from dilated_attention.distributed.cost import AHEAD_BYTES, FLOPS, LATENCY, SHARE, WIRE

MOST_STEPS = 8
# of a launch, beside what its last blocks of queries leave idle: seconds, and multiprocessors of an H200
LAUNCH, PROCESSORS = 20e-6, 132
# bytes/s of an exchange that may take but few multiprocessors; it may if it takes less than this share of what is computed meanwhile
FEW_WIRE, FEW_SHARE = 60e9, 0.5


@dataclass(frozen=True)
class Load:
    """What one key/value head costs the slowest rank.

    Args:
        heads: key/value heads.
        compute, wire: seconds of arithmetic, and of receiving keys.
        launch: seconds that a step's launch costs.
        bytes_held: of keys brought together.
    """

    heads: int
    compute: float
    wire: float
    launch: float
    bytes_held: int

    @property
    def is_small(self) -> bool:
        """Whether exchanges may take few multiprocessors."""
        return self.wire * WIRE / FEW_WIRE < FEW_SHARE * self.compute


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
    return Load(job.num_kv_heads, flops / FLOPS, brought * row / WIRE, LAUNCH + tail, int(held * row))


def head_steps(load: Load, memory: int) -> tuple[int, ...]:
    """Key/value heads of each step.

    Args:
        memory: of each device, in bytes.
    """
    if load.wire == 0:
        return (load.heads,)
    candidates = sorted(
        {_grown(load, first) for first in range(1, load.heads + 1)} | {even(load.heads, n) for n in range(1, load.heads + 1)}
    )
    room = [steps for steps in candidates if 2 * max(steps) * load.bytes_held <= SHARE * memory]
    return min(room or [even(load.heads, load.heads)], key=lambda steps: (_seconds(load, steps), len(steps)))


def even(heads: int, steps: int) -> tuple[int, ...]:
    """Heads in so many steps, the first ones being the larger ones; no step without any."""
    size, larger = divmod(heads, min(steps, heads))
    return tuple(size + (index < larger) for index in range(min(steps, heads)))


def _grown(load: Load, first: int) -> tuple[int, ...]:
    """Steps that grow as fast as their keys can travel beside what is computed before."""
    steps, done = [first], first
    while done < load.heads:
        left = load.heads - done
        fits = int((load.wire * first + load.compute * done) / load.wire) - done
        steps.append(left if len(steps) == MOST_STEPS - 1 else min(left, max(1, fits)))
        done += steps[-1]
    return tuple(steps)


def _seconds(load: Load, steps: tuple[int, ...]) -> float:
    """Of a forward."""
    end = 0.0
    for count, total in zip(steps, itertools.accumulate(steps), strict=True):
        end = max(end, LATENCY + load.wire * total) + load.compute * count + load.launch
    return end


def steps_ahead(load: Load, steps: tuple[int, ...]) -> int:
    """Steps whose keys may be in memory at once: two, or all that fit into a small budget, so that none waits for memory to be free."""
    return max(2, AHEAD_BYTES // max(1, load.bytes_held * max(steps)))
