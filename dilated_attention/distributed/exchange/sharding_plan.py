"""Decides which rank holds which rows and heads while a call on a sharded sequence is computed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dilated_attention.distributed.sharding.layout import joined, spans
from dilated_attention.distributed.sharding.reshard import ShardSpec
from dilated_attention.engine.branches.problems import Range

# the last two run as "auto"
EXCHANGES = ("all_gather", "ring", "all_to_all", "2d")


@dataclass(frozen=True)
class ShardingPlan:
    """Holdings of (queries, keys) by rank in the caller's layout (``given``), and during the computation (``used``). ``by_heads``: each
    rank computes some heads of the whole sequence, so no keys are exchanged."""

    given: tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]
    used: tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]
    by_heads: bool

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Returns the position ranges of a rank's rows during the computation."""
        return tuple((start, stop) for start, stop, _ in self.used[0][rank].spans)


@functools.lru_cache(maxsize=256)
def make_sharding_plan(
    seq_len: int, size: int, layout: str, exchange: str, num_heads: int, num_kv_heads: int, is_causal: bool
) -> ShardingPlan:
    """Returns the sharding plan of ``exchange`` ``"all_gather"`` or ``"all_to_all"``."""

    def holdings(layout: str, by_heads: bool) -> tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]:
        queries, keys = [], []
        for rank in range(size):
            rows = ((0, seq_len, 1),) if by_heads else spans(seq_len, rank, size, layout)
            if layout != "striped":
                # neighbours as one
                rows = tuple((start, stop, 1) for start, stop in joined((start, stop) for start, stop, _ in rows))
            first, last = (num_heads // size * rank, num_heads // size * (rank + 1)) if by_heads else (0, num_heads)
            group = num_heads // num_kv_heads
            queries.append(ShardSpec(rows, (first, last)))
            keys.append(ShardSpec(rows, (first // group, -(-last // group))))
        return tuple(queries), tuple(keys)

    by_heads = exchange == "all_to_all"
    assert not by_heads or num_heads % size == 0, "some heads would belong to no rank"
    # kernels cannot process strided rows causally as ranges, so they are put in order first
    computed = ("zigzag" if is_causal else "contiguous") if layout == "striped" else layout
    return ShardingPlan(holdings(layout, False), holdings(computed, by_heads), by_heads)


def why_no_heads(num_heads: int, num_kv_heads: int, parts: int, branch_heads: str) -> str | None:
    """Returns why heads cannot be divided among ``parts`` ranks, or None if they can."""
    if num_heads % parts:
        return f"{num_heads} heads are not a multiple of {parts} ranks"
    if num_kv_heads % parts and parts % num_kv_heads:
        return f"{num_kv_heads} key/value heads and {parts} ranks: neither is a multiple of the other"
    if branch_heads == "split":
        return "branch_heads='split' gives heads branches of their own"
    return None
