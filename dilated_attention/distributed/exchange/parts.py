"""Computes a rank's queries on the keys of each step, with the engine of a single process.

A range of queries is a call with ``query_offset`` on the keys at hand, which are all that it sees. Block-sparse attention has parts of
its own (``block_exchange/parts.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call, Into
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.prepare import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
# host time in ms of the rest of a ring's forward and backward: 0.3 and 1.4 on one machine of two H200s, 0.6 and 1.7 on one of two H100s
# (bench scaling, 2,048 tokens a GPU). Where the host is slower than this, a library's launches cost more than its kernels gain
HOST_MS = {False: 0.6, True: 1.7}


class Masks(NamedTuple):
    """What differs from call to call: padding of all keys (B, N) bool or None, and the seed of dropout."""

    padding: torch.Tensor | None
    seed: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(ABC):
    """Some of a rank's query rows and heads on some rows of a step's memory.

    Args:
        rows: the rows, a slice or their indices.
        heads: the query heads, counted on this rank.
        key_rows: the rows of the memory.
        passes: how each pass runs, by the strides of the tensors it reads.
    """

    rows: slice | torch.Tensor
    heads: Range
    key_rows: slice
    passes: dict[Any, Any] = field(default_factory=dict)
    # whether it writes dk and dv where it is asked to, in the keys' dtype
    writes_keys: ClassVar[bool] = False

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks, into: Into | None = None) -> Pair:
        """Returns (out (B, rows, heads, D), lse (B, heads, rows)). ``q``: of all rows and the part's heads; ``k``, ``v``: the memory's.

        Args:
            into: where out goes, if the part can write there; otherwise it returns another tensor.
        """

    @abstractmethod
    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks, into: Into | None = None) -> Tensors:
        """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out, and lse (B, heads, n), as is ``dlse``; ``into`` as in ``forward``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryPart(Part):
    """Queries at positions ``queries`` on the keys of ``span``, which are a sequence of their own.

    Args:
        first_head: the first of this rank's heads, counted over the whole model.
    """

    rows: slice
    problem: RingProblem
    settings: CallSettings
    queries: Range
    span: KeySpan
    first_head: int
    writes_keys = True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks, into: Into | None = None) -> Pair:
        views = narrow(self.rows, 1, q)[0], *narrow(self.key_rows, 1, k, v)
        run, call = self._resolved(views, masks, strategy.choose_forward)
        out, lse = run(*views, call, None, into)
        return out, lse

    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks, into: Into | None = None) -> Tensors:
        dout, q, k, v, out, lse = tensors
        dout, q, out = narrow(self.rows, 1, dout, q, out)
        views = dout, q, *narrow(self.key_rows, 1, k, v), out
        lse = lse[:, :, self.rows].contiguous()
        dlse = None if dlse is None else dlse[:, :, self.rows].contiguous()
        run, call = self._resolved(views, masks, strategy.choose_backward)
        return run((*views, lse), call, dlse, None, into)  # type: ignore[no-any-return]

    def _resolved(self, views: Tensors, masks: Masks, choose: Any) -> tuple[Any, Call]:
        kind = (masks.padding is None, *[x.stride() for x in views])
        known = self.passes.get(kind)
        if known is None:
            known = self.passes[kind] = self._choose(views, masks, choose)
        run, call = known
        if masks.padding is None and not call.dropout_p:
            return run, call
        return run, replace(call, padding=self._padding(masks), seed=masks.seed)

    def _padding(self, masks: Masks) -> torch.Tensor | None:
        """Returns the padding mask of the positions that the call counts."""
        return masks.padding if masks.padding is None else masks.padding[:, self.span.start : self.span.end]

    def _choose(self, views: Tensors, masks: Masks, choose: Any) -> tuple[Any, Call]:
        span, pattern, is_backward = self.span, self.pattern, len(views) > 3
        q, k, v = views[1:4] if is_backward else views
        given = (q, k, v, views[0]) if is_backward else views
        settings = self.settings._replace(query_offset=self.queries[0] - span.start, seq_len=-1)
        num_keys = span.end - span.start
        shape, call = prepare(is_backward, given, pattern, settings, self._padding(masks), span.documents, None, num_keys)
        call = replace(call, first_head=self.first_head + self.heads[0], position_offset=span.start, host_ms=HOST_MS[is_backward])
        # the mask of this call must not stay in memory
        return choose(pattern, shape, views, call), replace(call, padding=None)

    @property
    def pattern(self) -> DilatedPattern:
        pattern = self.problem.pattern
        return pattern.with_heads(*self.heads, self.problem.num_heads) if pattern.branch_heads == "all" else pattern


def parts_of(
    problem: RingProblem, settings: CallSettings, step: StepPlan, rank: int, span: KeySpan, first_head: int = 0
) -> tuple[QueryPart, ...]:
    """Returns what a rank computes in a step on the keys of ``span``, the largest part first."""
    ratio = problem.num_heads // problem.num_kv_heads
    heads = step.kv_heads[0] * ratio, step.kv_heads[1] * ratio
    found = []
    for rows, queries in rows_of(problem.shards[rank]):
        mine = span.around(queries)
        mine = mine.before(queries[1]) if problem.is_causal else mine
        key_rows = slice(mine.start - span.start, mine.end - span.start)
        found.append(QueryPart(rows=rows, heads=heads, key_rows=key_rows, problem=problem, settings=settings, queries=queries, span=mine,
                               first_head=first_head))  # fmt: skip
    return tuple(sorted(found, key=lambda part: part.span.start - part.span.end))


def narrow(where: slice, dim: int, *tensors: torch.Tensor) -> Tensors:
    """Returns views of a range along a dimension; the tensors themselves if it is all of it, since a view takes the host time."""
    if where == slice(0, tensors[0].shape[dim]):
        return tensors
    return tuple([x.narrow(dim, where.start, where.stop - where.start) for x in tensors])


def rows_of(spans: tuple[Range, ...]) -> Iterator[tuple[slice, Range]]:
    """Yields (rows, positions) of ranges that are stored one after the other."""
    row = 0
    for start, end in spans:
        if start < end:
            yield slice(row, row + end - start), (start, end)
        row += end - start
