"""What calls on a sharded sequence of the same kind have in common: sharding, steps, and what each of them computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.distributed.comm.call_consistency import RingCall
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.p2p import Lanes
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.exchange.computation import Computation, StepParts, Tensors, parts_of
from dilated_attention.distributed.exchange.crossing import SparseRows, crossing_of, home_parts
from dilated_attention.distributed.exchange.messages import StepPlan, gathering
from dilated_attention.distributed.exchange.plan import RingProblem, key_span, needed_keys
from dilated_attention.distributed.exchange.sharding_plan import ShardingPlan, make_sharding_plan
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.settings import CallSettings

# the maximum bytes of the tables and lists of all cached setups; those that ``block_lists`` caches are not counted
MAX_CACHED_BYTES = 2**30
MOST_SETUPS = 512
# of keys and of their gradients, and how many multiprocessors an exchange may use: few if it is small next to the computation
LANES: tuple[Lanes, ...] = (("keys", "gradients", None), ("few keys", "few gradients", cost.FEW_CTAS))


@dataclass(frozen=True, eq=False, kw_only=True)
class RingSetup:
    """What calls of the same kind have in common. It is computed once, because the CPU time delays short calls.

    Args:
        nbytes: bytes of its tables and lists.
        lanes: one of ``LANES``; None if no rank sends anything. All ranks must choose the same, so it does not depend on what this rank
            receives.
        compute: begins a pass; takes ``Masks``, q, and in a backward the ``rest`` of a ``Computation``.
        sharding: which rows and heads each rank has, as given and while it computes; None if they are the same.
        home: as ``compute``, on the rank's own rows; ``compute`` then covers every g-th row: ``query_rows``, and sparse steps.
        digest: see ``NeededBlocks``.
    """

    steps: tuple[StepPlan, ...]
    nbytes: int
    lanes: Lanes | None
    compute: Callable[..., Any]
    sharding: ShardingPlan | None = None
    home: Callable[..., Any] | None = None
    query_rows: SparseRows | None = None
    digest: str = ""

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing and all its keys are read where they are."""
        return self.home is None and len(self.steps) == 1 and self.steps[0].in_place and not self.steps[0].sends


_setups: dict[Hashable, RingSetup] = {}


def cached_setup(kind: Hashable, make: Callable[[], RingSetup]) -> RingSetup:
    """Returns the setup of calls of this kind; forgets all others where they are too many: those of packed batches are not used again."""
    setup = _setups.get(kind)
    if setup is None:
        setup = make()
        # a copy, since threads of other groups may add theirs meanwhile
        if len(_setups) >= MOST_SETUPS or setup.nbytes + sum(one.nbytes for one in _setups.copy().values()) > MAX_CACHED_BYTES:
            _setups.clear()
        _setups[kind] = setup
    return setup


def make_setup(
    members: Members, tensors: Tensors, documents: tuple[Range, ...], settings: CallSettings, ring: RingCall, padding: torch.Tensor | None
) -> RingSetup:
    """Makes the setup of calls of dilated or dense attention like this one."""
    (q, k, _), pattern = tensors, settings.pattern
    me, size, device, num_heads = members.rank, members.size, k.device, q.shape[2]
    ask = functools.partial(
        cost.exchange_request, size=size, layout=ring.layout, is_causal=settings.is_causal, needs_grad=settings.needs_grad
    )
    exchange = cost.choose(ask(q, k, pattern, ring.seq_len)) if ring.exchange == "auto" else ring.exchange
    sharding = make_sharding_plan(ring.seq_len, size, ring.layout, exchange, num_heads, k.shape[2], settings.is_causal)
    queries, keys = (sides[me] for sides in sharding.used)
    first, last = queries.heads
    # of the shapes while they compute, without memory
    q = q.new_empty((1, 1, 1, 1)).expand(q.shape[0], queries.rows, last - first, q.shape[3])
    k = k.new_empty((k.shape[0], 0, keys.heads[1] - keys.heads[0], k.shape[3]))
    pattern = pattern.with_heads(first, last, num_heads) if pattern.branch_heads == "all" else pattern
    # nothing here holds the group: the setup outlives groups, and another group may get the same name
    ranks, place = ((me,), 0) if sharding.by_heads else (range(size), me)
    shards = tuple(sharding.ranges(rank) for rank in ranks)
    problem = RingProblem(pattern, documents, shards, q.shape[2], k.shape[2], settings.is_causal, settings.window_sides)
    home: Callable[..., Any] | None = None
    query_rows = None
    # masks and dropout are by position, and detached mixing needs the outputs of all branches
    plain = padding is None and not settings.dropout_p and not settings.detached
    crossing = crossing_of(problem, 2 * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()) if plain and len(ranks) > 1 else None
    if crossing is not None:
        own = home_parts(problem, crossing.home, settings, place, first)
        home, problem = functools.partial(Computation, StepParts((own,), q)), crossing.problem
        query_rows = SparseRows(crossing.step, crossing.offsets, q.shape[1], device)
        q = q[:, :: crossing.step]
    count = cost.head_steps(ask(q, k, problem.pattern, problem.seq_len)) if len(ranks) > 1 else 1

    @functools.cache
    def needed(reader: int) -> torch.Tensor:
        return needed_keys(problem, reader, device)

    span, each = key_span(problem, place), k.shape[2] // count
    steps = tuple(
        gathering(problem.shards, place, needed, (i * each, (i + 1) * each), (span.start, span.end), f"heads {i + 1} of {count}")
        for i in range(count)
    )
    parts = tuple(parts_of(problem, settings, step, place, span, first) for step in steps)
    if crossing is not None:
        steps = tuple(step.on_sparse_rows(crossing.step, crossing.kv_offsets) for step in steps)
    tables = [message.units for step in steps for message in (*step.sends, *step.receives, *step.owed) if message.units is not None]
    exchanges = len(ranks) > 1 and any(bool(needed(rank).any()) for rank in ranks)
    return RingSetup(
        steps=steps,
        # the kernels that copy rows have tables as large as the messages'
        nbytes=2 * sum(units.nbytes for units in tables),
        # few multiprocessors suffice during a computation; what a rank waits for has all of them. Both are alike on all ranks
        lanes=LANES[crossing is not None or (count > 1 and not problem.is_dense)] if exchanges else None,
        compute=functools.partial(Computation, StepParts(parts, q)),
        sharding=None if sharding.given == sharding.used else sharding,
        home=home,
        query_rows=query_rows,
    )
