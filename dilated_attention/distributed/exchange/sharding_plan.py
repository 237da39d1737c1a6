"""Decides how a call on a sharded sequence runs: which rank holds which rows and heads during the computation, and whose keys move."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from dilated_attention.distributed.sharding.layout import Span, joined, spans
from dilated_attention.distributed.sharding.reshard import ShardSpec
from dilated_attention.engine.branches.plan import Range

EXCHANGES = ("all_gather", "ring", "all_to_all", "2d")


@dataclass(frozen=True)
class ShardingPlan:
    """The division of queries and keys over the group's ranks, as given and during the computation, and the teams that exchange keys.

    Args:
        given: holdings of (queries, keys) in the caller's layout.
        used: holdings during the computation.
        inner: the number of ranks that divide the heads among themselves; a team consists of every ``inner``-th rank.
        exchange: how keys are exchanged inside a team: ``"all_gather"`` or ``"ring"``; a team of one has nothing to exchange.
    """

    given: tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]
    used: tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]
    inner: int
    exchange: str

    @functools.cached_property
    def stays(self) -> bool:
        """Whether no rows or heads move between ranks before and after the computation."""
        return self.given == self.used

    def team(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank % self.inner, len(self.given[0]), self.inner))

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Returns the position ranges of a rank's rows during the computation."""
        return tuple((start, stop) for start, stop, _ in self.used[0][rank].spans)


@functools.lru_cache(maxsize=256)
def make_sharding_plan(
    seq_len: int, size: int, layout: str, exchange: str, num_heads: int, num_kv_heads: int, inner: int, is_causal: bool
) -> ShardingPlan:
    """Returns the sharding plan of a resolved ``exchange``; ``inner`` is the number of ranks that divide the heads in ``"2d"``."""
    given = [spans(seq_len, rank, size, layout) for rank in range(size)]
    # kernels cannot process strided rows causally as ranges, so they are put in order first
    computed = ("zigzag" if is_causal else "contiguous") if layout == "striped" else layout
    inner = {"all_to_all": size, "2d": inner}.get(exchange, 1)
    assert num_heads % inner == 0, "some heads would belong to no rank"
    used = []
    for rank in range(size):
        first = rank - rank % inner
        held = sorted(span for r in range(first, first + inner) for span in spans(seq_len, r, size, computed))
        used.append(_as_spans(held))
    queries, keys = [], []
    for rank in range(size):
        heads = head_range(num_heads, inner, rank % inner)
        group = num_heads // num_kv_heads
        queries.append(ShardSpec(used[rank], heads))
        keys.append(ShardSpec(used[rank], (heads[0] // group, -(-heads[1] // group))))
    if layout != "striped":
        given = [_as_spans(rows) for rows in given]
    everything = [ShardSpec(rows, (0, num_heads)) for rows in given], [ShardSpec(rows, (0, num_kv_heads)) for rows in given]
    return ShardingPlan(
        (tuple(everything[0]), tuple(everything[1])), (tuple(queries), tuple(keys)), inner, "ring" if exchange == "ring" else "all_gather"
    )


def head_range(num_heads: int, parts: int, index: int) -> Range:
    size = num_heads // parts
    return index * size, (index + 1) * size


def why_no_heads(num_heads: int, num_kv_heads: int, parts: int, branch_heads: str) -> str | None:
    """Returns why heads cannot be divided among ``parts`` ranks, or None if they can."""
    if num_heads % parts:
        return f"{num_heads} heads are not a multiple of {parts} ranks"
    if num_kv_heads % parts and parts % num_kv_heads:
        return f"{num_kv_heads} key/value heads and {parts} ranks: neither is a multiple of the other"
    if branch_heads == "split":
        return "branch_heads='split' gives heads branches of their own"
    return None


def _as_spans(rows: Sequence[Span]) -> tuple[Span, ...]:
    """Returns runs with neighbours as one."""
    return tuple((start, stop, 1) for start, stop in joined((start, stop) for start, stop, _ in rows))
