"""What calls on a sharded sequence of the same kind have in common: sharding, steps, and what each of them computes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dilated_attention.distributed.comm.call_consistency import RingCall
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.exchange.crossing import crossing_of, home_parts
from dilated_attention.distributed.exchange.parts import QueryPart, parts_of
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, key_span, needed_keys
from dilated_attention.distributed.exchange.ring_pass import PassSetup
from dilated_attention.distributed.exchange.rows.messages import StepPlan, gathering, hop
from dilated_attention.distributed.exchange.rows.sparse_rows import SparseRows
from dilated_attention.distributed.exchange.run import is_fused
from dilated_attention.distributed.exchange.sharding_plan import ShardingPlan, make_sharding_plan
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True, eq=False, kw_only=True)
class RingSetup(PassSetup):
    """What calls of dilated or dense attention have in common.

    Args:
        sharding: which rows and heads each rank has, as given and while it computes.
        problem: with the pattern and the heads that this rank computes.
        parts: what is computed in each step.
        first_head: the first of this rank's heads, counted over the whole model.
        merges: whether a row's parts come from several steps.
        home: what the rank computes on its own rows; ``problem`` then covers every g-th row: ``query_rows``, ``key_rows``. Where kernels
            copy rows, they find the keys' rows themselves, and ``key_rows`` is None.
    """

    sharding: ShardingPlan
    problem: RingProblem
    parts: tuple[tuple[QueryPart, ...], ...]
    first_head: int
    merges: bool
    home: tuple[QueryPart, ...]
    query_rows: SparseRows | None
    key_rows: SparseRows | None


def make_setup(
    members: Members,
    q: torch.Tensor,
    k: torch.Tensor,
    pattern: DilatedPattern,
    documents: tuple[Range, ...],
    settings: CallSettings,
    ring: RingCall,
    has_padding: bool,
) -> RingSetup:
    """Makes the setup of calls with q and k like these, of a pattern that may be a part of that of the settings."""
    me, num_heads = members.rank, q.shape[2]
    sharding = _route_of(members, q, k, settings, ring)
    queries, keys = (sides[me] for sides in sharding.used)
    first, last = queries.heads
    q, k = (x.new_empty((x.shape[0], 0, own.heads[1] - own.heads[0], x.shape[3])) for x, own in ((q, queries), (k, keys)))
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
    home: tuple[QueryPart, ...] = ()
    query_rows, key_rows = None, None
    # masks and dropout are by position, and detached mixing needs the outputs of all branches
    plain = not has_padding and not settings.dropout_p and not settings.detached
    crossing = crossing_of(problem, 2 * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()) if plain and size > 1 else None
    if crossing is not None:
        home, problem = home_parts(problem, crossing.home, settings, place), crossing.problem
        query_rows, key_rows = (SparseRows(crossing.step, x, k.device) for x in (crossing.offsets, crossing.kv_offsets))
    if problem.exchange == "all_gather" and size > 1:
        question = _question(size, q, k, problem.pattern, settings, replace(ring, seq_len=problem.seq_len))
        count = cost.head_steps(question)
        problem = replace(problem, head_steps=(k.shape[2] // count,) * count)
    steps, span = make_steps(problem, place, k.device)
    parts = tuple(parts_of(problem, settings, step, place, span) for step in steps)
    if crossing is not None:
        sparse = tuple(step.on_sparse_rows(crossing.step, crossing.kv_offsets) for step in steps)
        if all(is_fused(step, k) for step in sparse):
            steps, key_rows = sparse, None
    held = max(step.rows * step.num_kv_heads for step in steps) * 2 * k.shape[0] * k.shape[3] * k.element_size()
    merges = problem.exchange == "ring" and size > 1
    small = not merges and not problem.is_dense
    lanes = ("few keys", "few gradients", cost.FEW_CTAS) if small else ("keys", "gradients", None)
    steps = tuple(step.among(ranks) for step in steps)
    tables = [message.units for step in steps for message in (*step.sends, *step.receives, *step.owed) if message.units is not None]
    return RingSetup(
        steps=steps,
        depth=cost.choose_prefetch_depth(held),
        # the kernels that copy rows have tables as large as the messages'
        nbytes=2 * sum(units.nbytes for units in tables),
        lanes=lanes if size > 1 else None,
        sharding=sharding,
        problem=problem,
        parts=parts,
        first_head=first,
        merges=merges,
        home=home,
        query_rows=query_rows,
        key_rows=key_rows,
    )


def make_steps(problem: RingProblem, rank: int, device: torch.device) -> tuple[tuple[StepPlan, ...], KeySpan | None]:
    """Returns a rank's steps, and in an all_gather the span of keys that it gathers."""

    @functools.cache
    def needed(reader: int) -> torch.Tensor:
        return needed_keys(problem, reader, device)

    everyone = (0, problem.num_kv_heads)
    if problem.exchange == "ring" and problem.size > 1:
        return tuple(hop(problem.shards, rank, needed, everyone, distance) for distance in range(problem.size)), None
    span = key_span(problem, rank)
    steps, first = [], 0
    for index, count in enumerate(problem.head_steps):
        what = "keys of other ranks" if len(problem.head_steps) == 1 else f"heads {index + 1} of {len(problem.head_steps)}"
        steps.append(gathering(problem.shards, rank, needed, (first, first + count), (span.start, span.end), what))
        first += count
    return tuple(steps), span


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
