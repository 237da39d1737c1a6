"""What calls on a sharded sequence of the same kind have in common: sharding, steps, and what each of them computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.distributed.comm.call_consistency import RingCall
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.comm.p2p import Lanes
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.exchange.computation import Computation, StepParts
from dilated_attention.distributed.exchange.crossing import crossing_of, home_parts
from dilated_attention.distributed.exchange.parts import Tensors, parts_of
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, key_span, needed_keys
from dilated_attention.distributed.exchange.rows.messages import Needed, StepPlan, gathering, hop
from dilated_attention.distributed.exchange.rows.sparse_rows import SparseRows
from dilated_attention.distributed.exchange.sharding_plan import ShardingPlan, make_sharding_plan
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

# the maximum bytes of the tables and lists of all cached setups; those that ``block_lists`` caches are not counted
MAX_CACHED_BYTES = 2**30
MOST_SETUPS = 512
# of keys and of their gradients, and how many multiprocessors an exchange may use: few if it is small next to the computation
LANES: tuple[Lanes, ...] = (("keys", "gradients", None), ("few keys", "few gradients", cost.FEW_CTAS))


@dataclass(frozen=True, eq=False, kw_only=True)
class RingSetup:
    """What calls of the same kind have in common. It is computed once, because the CPU time delays short calls.

    Args:
        steps: the steps of the exchange on this rank.
        depth: the number of steps whose keys are in memory at once.
        nbytes: bytes of its tables and lists.
        lanes: one of ``LANES``; None if no rank sends anything. All ranks must choose the same, so it does not depend on what this rank
            receives.
        compute: begins a pass; takes ``Masks``, q, and in a backward the ``rest`` of a ``Computation``.
        sharding: which rows and heads each rank has, as given and while it computes; None if they are the same.
        by_branch: a detached backward exchanges and computes the branches one by one.
        home: as ``compute``, on the rank's own rows; ``compute`` then covers every g-th row: ``query_rows``, and sparse steps.
        digest: see ``NeededBlocks``.
    """

    steps: tuple[StepPlan, ...]
    depth: int
    nbytes: int
    lanes: Lanes | None
    compute: Callable[..., Any]
    sharding: ShardingPlan | None = None
    by_branch: bool = False
    home: Callable[..., Any] | None = None
    query_rows: SparseRows | None = None
    digest: str = ""

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing and all its keys are read where they are."""
        return self.home is None and len(self.steps) == 1 and self.steps[0].in_place and not self.steps[0].sends


# in order of use
_setups: dict[Hashable, RingSetup] = {}


def cached_setup(kind: Hashable, make: Callable[[], RingSetup]) -> RingSetup:
    """Returns the setup of calls of this kind, and forgets the oldest ones: packed batches differ, so theirs are not used again."""
    setup = _setups.pop(kind, None)
    if setup is None:
        setup = make()
        # a copy, since threads of other groups may add theirs meanwhile: a dictionary's is made at once, a list of its items is not
        kept = list(_setups.copy().items())
        count, nbytes = len(kept), setup.nbytes + sum(one.nbytes for _, one in kept)
        for oldest, one in kept:
            if count < MOST_SETUPS and nbytes <= MAX_CACHED_BYTES:
                break
            _setups.pop(oldest, None)
            count, nbytes = count - 1, nbytes - one.nbytes
    _setups[kind] = setup
    return setup


def make_setup(
    members: Members, tensors: Tensors, documents: tuple[Range, ...], settings: CallSettings, ring: RingCall, padding: torch.Tensor | None
) -> RingSetup:
    """Makes the setup of calls of dilated or dense attention like this one."""
    (q, k, _), pattern = tensors, settings.pattern
    me, num_heads = members.rank, q.shape[2]
    # a head that runs one branch has no mixing weights, and where all keys are at hand the engine takes care of them
    mixes = settings.detached and pattern.num_branches > 1 and pattern.branch_heads == "all"
    sharding = _route_of(members, q, k, settings, ring)
    queries, keys = (sides[me] for sides in sharding.used)
    first, last = queries.heads
    # of the shapes while they compute, without memory
    q = q.new_empty((1, 1, 1, 1)).expand(q.shape[0], queries.rows, last - first, q.shape[3])
    k = k.new_empty((k.shape[0], 0, keys.heads[1] - keys.heads[0], k.shape[3]))
    pattern = pattern.with_heads(first, last, num_heads) if pattern.branch_heads == "all" else pattern
    ranks = sharding.team(me)
    problem = RingProblem(
        pattern,
        documents,
        tuple(sharding.ranges(rank) for rank in ranks),
        *(q.shape[2], k.shape[2], settings.is_causal, settings.window_sides, sharding.exchange),
        (k.shape[2],),
    )
    # nothing here holds the group: the setup outlives groups, and another group may get the same name
    place, size = ranks.index(me), len(ranks)
    # each step's part of a branch has an lse of its own, so a ring's mixing is undone branch by branch
    settings = settings._replace(detached=False) if problem.exchange == "ring" else settings
    home: Callable[..., Any] | None = None
    query_rows = None
    # masks and dropout are by position, and detached mixing needs the outputs of all branches
    plain = padding is None and not settings.dropout_p and not settings.detached
    crossing = crossing_of(problem, 2 * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()) if plain and size > 1 else None
    if crossing is not None:
        own = home_parts(problem, crossing.home, settings, place, first)
        home, problem = functools.partial(Computation, StepParts((own,), False, q)), crossing.problem
        query_rows = SparseRows(crossing.step, crossing.offsets, k.device)
        q = q[:, :: crossing.step]
    if problem.exchange == "all_gather" and size > 1:
        question = _question(size, q, k, problem.pattern, settings, replace(ring, seq_len=problem.seq_len))
        count = cost.head_steps(question)
        problem = replace(problem, head_steps=(k.shape[2] // count,) * count)
    steps, span, needed = make_steps(problem, place, k.device)
    parts = tuple(parts_of(problem, settings, step, place, span, first) for step in steps)
    if crossing is not None:
        steps = tuple(step.on_sparse_rows(crossing.step, crossing.kv_offsets) for step in steps)
    held = max(step.rows * step.num_kv_heads for step in steps) * 2 * k.shape[0] * k.shape[3] * k.element_size()
    merges = problem.exchange == "ring" and size > 1
    steps = tuple(step.among(ranks) for step in steps)
    tables = [message.units for step in steps for message in (*step.sends, *step.receives, *step.owed) if message.units is not None]
    # teams may differ in what they need, but all ranks of the group open the same lanes
    exchanges = size > 1 and (sharding.inner > 1 or any(bool(needed(rank).any()) for rank in range(size)))
    return RingSetup(
        steps=steps,
        depth=cost.choose_prefetch_depth(held),
        # the kernels that copy rows have tables as large as the messages'
        nbytes=2 * sum(units.nbytes for units in tables),
        # few multiprocessors suffice during a computation; what a rank waits for has all of them. Both are alike on all ranks
        lanes=LANES[crossing is not None or (len(steps) > 1 and not problem.is_dense and not merges)] if exchanges else None,
        compute=functools.partial(Computation, StepParts(parts, merges, q)),
        sharding=None if sharding.stays else sharding,
        by_branch=mixes and sharding.exchange == "ring",
        home=home,
        query_rows=query_rows,
    )


def make_steps(problem: RingProblem, rank: int, device: torch.device) -> tuple[tuple[StepPlan, ...], KeySpan | None, Needed]:
    """Returns a rank's steps, in an all_gather the span of keys that it gathers, and the keys that each rank needs."""

    @functools.cache
    def needed(reader: int) -> torch.Tensor:
        return needed_keys(problem, reader, device)

    everyone = (0, problem.num_kv_heads)
    if problem.exchange == "ring" and problem.size > 1:
        return tuple(hop(problem.shards, rank, needed, everyone, distance) for distance in range(problem.size)), None, needed
    span = key_span(problem, rank)
    steps, first = [], 0
    for index, count in enumerate(problem.head_steps):
        what = "keys of other ranks" if len(problem.head_steps) == 1 else f"heads {index + 1} of {len(problem.head_steps)}"
        steps.append(gathering(problem.shards, rank, needed, (first, first + count), (span.start, span.end), what))
        first += count
    return tuple(steps), span, needed


def _question(
    size: int, q: torch.Tensor, k: torch.Tensor, pattern: DilatedPattern, settings: CallSettings, ring: RingCall
) -> cost.ExchangeRequest:
    return cost.exchange_request(
        q,
        k,
        pattern,
        size=size,
        layout=ring.layout,
        seq_len=ring.seq_len,
        is_causal=settings.is_causal,
        has_window=bool(settings.window),
        needs_grad=settings.needs_grad,
    )


def _route_of(members: Members, q: torch.Tensor, k: torch.Tensor, settings: CallSettings, ring: RingCall) -> ShardingPlan:
    exchange = ring.exchange
    if exchange == "auto":
        exchange = cost.choose(_question(members.size, q, k, settings.pattern, settings, ring))
    heads = (q.shape[2], k.shape[2])
    return make_sharding_plan(ring.seq_len, members.size, ring.layout, exchange, *heads, ring.ranks_per_node, settings.is_causal)
