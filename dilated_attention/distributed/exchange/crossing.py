"""Separates the branches whose segments stay within a rank from those that cross ranks.

A rank computes the former by the engine on its own rows, while the keys of the latter are in flight. Branches that cross ranks are usually
the sparse ones: if all of them take every g-th position of each head, they are a pattern (w/g, r/g) on N/g positions, which is computed as
a ring of its own, on every g-th row of each head of a rank's tensors, and merged into the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dilated_attention.distributed.exchange.computation import QueryPart, rows_of
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

# keys and values of a rank for which the separation costs as much as it saves. On H200s, host time of two such calls and a merge over one:
# 0.1 ms forward and 0.3 ms in training; a memory of all ranks' keys of this size is filled in 0.03 ms (benchmarks/results)
SMALL_BYTES = 2**24


@dataclass(frozen=True)
class Crossing:
    """The branches that cross ranks (``problem``), on every g-th position (``step``), and those that stay within (``home``), on all
    positions. ``offsets``: the position, below g, of each query head's first row; ``kv_offsets`` of each key/value head's."""

    home: DilatedPattern
    problem: RingProblem
    step: int
    offsets: tuple[int, ...]
    kv_offsets: tuple[int, ...]


def crossing_of(problem: RingProblem, row_bytes: int) -> Crossing | None:
    """Returns how a call is separated; None if no branch stays within ranks, none crosses them, those that do are not so sparse, or keys
    and values, of ``row_bytes`` a position, are so few that the host takes longer to issue two calls."""
    pattern, H = problem.pattern, problem.num_heads
    if problem.seq_len // problem.size * row_bytes < SMALL_BYTES:
        return None
    if pattern.branch_heads != "all" or len(problem.documents) != 1 or problem.window:
        return None
    if pattern.tail != "mask" and not problem.is_causal:
        return None
    N, bounds = problem.seq_len, {bound for spans in problem.shards for span in spans for bound in span}
    stays = [all(bound % length == 0 or bound == N for bound in bounds) for length, _ in pattern.branches]
    others = [b for b, inside in enumerate(stays) if not inside]
    if all(stays) or not any(stays):
        return None
    # a segment that is longer than the sequence is as good as one of its length
    branches = [(min(length, N), rate) for length, rate in pattern.branches]
    step = math.gcd(N, *(x for b in others for x in branches[b]), *bounds)
    offsets = pattern.offsets(H)
    heads = [{offsets[b][h] % step for b in others} for h in range(H)]
    group = H // problem.num_kv_heads
    of_keys = [set().union(*heads[h : h + group]) for h in range(0, H, group)]
    if step == 1 or any(len(x) > 1 for x in of_keys):
        return None
    first = [x.pop() for x in of_keys]
    firsts = tuple(first[h // group] for h in range(H))
    rows = tuple(tuple((offsets[b][h] - firsts[h]) // step for h in range(H)) for b in others)
    lengths, rates = zip(*((length // step, rate // step) for length, rate in (branches[b] for b in others)), strict=True)
    sparse = RingProblem(
        DilatedPattern(lengths, rates, rows, "all", pattern.tail),
        ((0, N // step),),
        tuple(tuple((start // step, end // step) for start, end in spans) for spans in problem.shards),
        *(H, problem.num_kv_heads, problem.is_causal),
    )
    home = pattern.with_branches([b for b, inside in enumerate(stays) if inside], H)
    return Crossing(home, sparse, step, firsts, tuple(first))


def home_parts(problem: RingProblem, home: DilatedPattern, settings: CallSettings, rank: int, first_head: int) -> tuple[QueryPart, ...]:
    """Returns what a rank computes on its own rows: each of its ranges is a sequence of its own."""
    alone = replace(problem, pattern=home, window=None)
    common: dict[str, Any] = {"problem": alone, "settings": settings, "heads": (0, problem.num_heads), "first_head": first_head}
    return tuple(
        QueryPart(rows=rows, queries=span, key_rows=rows, span=KeySpan(*span, ((0, span[1] - span[0]),)), **common)
        for rows, span in rows_of(problem.shards[rank])
    )
