"""Computes ranges of a rank's queries on the keys of a step, with the engine of a single process.

A range of queries is a call with ``query_offset`` on the keys at hand: all of them (all_gather), or those of one rank (ring), whose
result is a part that the caller merges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, hull, sees_keys
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.merge import merge_onto
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.prepare import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# host time in ms of the rest of a ring's forward and backward, measured on H200s (bench scaling, 2,048 tokens a GPU)
HOST_MS = {False: 0.4, True: 1.2}
# larger results are written one by one, so that they are not in memory twice
JOINED_BYTES = 2**26


@dataclass(frozen=True)
class Masks:
    """What differs from call to call: padding of all keys (B, N) bool or None, the seed of dropout, and the first head of this rank."""

    padding: torch.Tensor | None
    seed: int
    first_head: int


@dataclass(frozen=True, eq=False)
class QueryPart:
    """Queries at positions ``queries``, which are ``rows`` of the rank, on keys at positions ``keys``, rows ``key_rows`` of the memory.

    Args:
        span: the keys as a sequence of their own, if the pattern allows it; None if ``keys`` are a part of the whole sequence.
        heads: the query heads, counted on this rank.
        passes: how each pass runs, by the strides of the tensors it reads.
    """

    problem: RingProblem
    settings: CallSettings
    rows: slice
    queries: Range
    keys: Range
    key_rows: slice
    span: KeySpan | None
    heads: Range
    passes: dict[Any, Any] = field(default_factory=dict)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out (B, rows, heads, D), lse (B, heads, rows)). ``q``: of all rows and the step's heads; ``k``, ``v``: the memory's."""
        views = _narrow(self.rows, 1, q)[0], *_narrow(self.key_rows, 1, k, v)
        run, call = self._resolved(views, masks, strategy.choose_forward)
        out, lse = run(*views, call, None)
        return out, lse

    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks) -> Tensors:
        """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out, and lse (B, heads, n), as is ``dlse``."""
        dout, q, k, v, out, lse = tensors
        dout, q, out = _narrow(self.rows, 1, dout, q, out)
        views = dout, q, *_narrow(self.key_rows, 1, k, v), out
        lse = lse[:, :, self.rows].contiguous()
        dlse = None if dlse is None else dlse[:, :, self.rows].contiguous()
        run, call = self._resolved(views, masks, strategy.choose_backward)
        return run((*views, lse), call, dlse, None)  # type: ignore[no-any-return]

    def _resolved(self, views: Tensors, masks: Masks, choose: Any) -> tuple[Any, Call]:
        kind = (masks.padding is None, masks.first_head, *(x.stride() for x in views))
        known = self.passes.get(kind)
        if known is None:
            known = self.passes[kind] = self._choose(views, masks, choose)
        run, call = known
        if masks.padding is None and not call.dropout_p:
            return run, call
        return run, replace(call, padding=self._padding(masks), seed=masks.seed)

    def _padding(self, masks: Masks) -> torch.Tensor | None:
        """Returns the padding mask of the positions that the call counts."""
        return masks.padding if masks.padding is None or self.span is None else masks.padding[:, slice(*self.keys)]

    def _choose(self, views: Tensors, masks: Masks, choose: Any) -> tuple[Any, Call]:
        problem, origin = self.problem, 0 if self.span is None else self.keys[0]
        documents = problem.documents if self.span is None else self.span.documents
        num_keys = problem.seq_len if self.span is None else self.keys[1] - origin
        is_backward = len(views) > 3
        q, k, v = views[1:4] if is_backward else views
        pattern = self.pattern
        given = (q, k, v, views[0]) if is_backward else views
        settings = self.settings._replace(query_offset=self.queries[0] - origin, seq_len=-1)
        shape, call = prepare(is_backward, given, pattern, settings, self._padding(masks), documents, None, num_keys)
        if self.span is None:
            shape = replace(shape, keys=self.keys)
        call = replace(call, first_head=masks.first_head + self.heads[0], position_offset=origin, key_offset=shape.keys[0])
        call = replace(call, host_ms=HOST_MS[is_backward])
        # the mask of this call must not stay in memory
        return choose(pattern, shape, views, call), replace(call, padding=None)

    @property
    def pattern(self) -> DilatedPattern:
        pattern = self.problem.pattern
        return pattern.with_heads(*self.heads, self.problem.num_heads) if pattern.branch_heads == "all" else pattern


def parts_of(problem: RingProblem, settings: CallSettings, step: StepPlan, rank: int, span: KeySpan | None) -> tuple[QueryPart, ...]:
    """Returns what a rank computes in a step, the largest part first. ``span``: of an all_gather, else None."""
    ratio = problem.num_heads // problem.num_kv_heads
    heads = (step.kv_heads[0] * ratio, step.kv_heads[1] * ratio)
    found = []
    for rows, queries in rows_of(problem.shards[rank]):
        if span is not None:
            mine = span.around(queries)
            mine = mine.before(queries[1]) if problem.is_causal else mine
            key_rows = slice(mine.start - span.start, mine.end - span.start)
            found.append(QueryPart(problem, settings, rows, queries, (mine.start, mine.end), key_rows, mine, heads))
            continue
        low, high = hull(problem, (queries,))
        for key_rows, keys in rows_of(step.keys):
            if keys[0] < high and keys[1] > low and sees_keys(problem, queries, keys):
                found.append(QueryPart(problem, settings, rows, queries, keys, key_rows, None, heads))
    return tuple(sorted(found, key=lambda part: part.keys[0] - part.keys[1])) if span is not None else tuple(found)


def _narrow(where: slice, dim: int, *tensors: torch.Tensor) -> Tensors:
    """Returns views of a range along a dimension; the tensors themselves if it is all of it, since a view takes the host time."""
    if where == slice(0, tensors[0].shape[dim]):
        return tensors
    return tuple(x.narrow(dim, where.start, where.stop - where.start) for x in tensors)


def rows_of(spans: tuple[Range, ...]) -> Iterator[tuple[slice, Range]]:
    """Yields (rows, positions) of ranges that are stored one after the other."""
    row = 0
    for start, end in spans:
        if start < end:
            yield slice(row, row + end - start), (start, end)
        row += end - start


class Branches:
    """Dilated and dense attention on the keys of each step.

    Args:
        parts: what is computed in each step.
        merges: a row's parts come from several steps: they are merged, and their dq summed, in float32 (float64).
        rest: in a backward dout, out, and lse (B, H, n) and its gradient or None.
    """

    def __init__(
        self,
        parts: tuple[tuple[QueryPart, ...], ...],
        merges: bool,
        masks: Masks,
        q: torch.Tensor,
        rest: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
    ) -> None:
        self.parts, self.merges, self.masks, self.q, self.rest = parts, merges, masks, q, rest
        self.acc = accumulation_dtype(q.dtype)
        # whether each row's result is that of one part: then they are joined, which takes the host less time than copying them one by one
        self.joins = len(parts) == 1 and not merges and all(part.heads == (0, q.shape[2]) for part in parts[0])
        self.joins = self.joins and sum(part.rows.stop - part.rows.start for part in parts[0]) == q.shape[1]
        self.joins = self.joins and (len(parts[0]) == 1 or q.numel() * q.element_size() <= JOINED_BYTES)
        self.done: set[tuple[int, int]] = set()
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    @staticmethod
    def _joined(results: list[tuple[int, torch.Tensor]], dim: int) -> torch.Tensor:
        """Returns results in order of their first row, one after the other."""
        return results[0][1] if len(results) == 1 else torch.cat([x for _, x in sorted(results, key=lambda result: result[0])], dim)

    def _room(self) -> torch.Tensor:
        """Returns out, or dq, of all parts."""
        if self._out is None:
            self._out = torch.empty(self.q.shape, dtype=self.acc if self.merges else self.q.dtype, device=self.q.device)
        return self._out

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._room()
        if self._lse is None:
            self._lse = out.new_empty((out.shape[0], out.shape[2], out.shape[1]), dtype=self.acc)
        return out.to(self.q.dtype), self._lse

    def dq(self) -> torch.Tensor:
        return self._room()

    def _is_first(self, part: QueryPart) -> bool:
        key = (part.rows.start, part.heads[0])
        first = key not in self.done
        self.done.add(key)
        return first

    def forward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.joins and self.parts[0]:
            found = [(part.rows.start, part.forward(self.q, keys, values, self.masks)) for part in self.parts[0]]
            self._out, self._lse = (self._joined([(row, results[i]) for row, results in found], dim) for i, dim in ((0, 1), (1, 2)))
            return
        for part in self.parts[index]:
            heads = slice(*part.heads)
            out, lse = part.forward(self.q[:, :, heads], keys, values, self.masks)
            room = self._room()[:, part.rows, heads]
            if self._lse is None:
                B, n, H, _ = self.q.shape
                self._lse = torch.empty((B, H, n), dtype=self.acc, device=self.q.device)
            if self._is_first(part):
                room.copy_(out)
                self._lse[:, heads, part.rows].copy_(lse)
            else:
                merge_onto(room, self._lse[:, heads, part.rows].transpose(1, 2), out, lse.transpose(1, 2))

    def backward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        assert self.rest is not None
        dout, out, lse, dlse = self.rest
        parts = self.parts[index]
        of_rows: list[tuple[int, torch.Tensor]] = []
        grads: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in parts:
            heads = slice(*part.heads)
            dout_, q_, out_ = _narrow(heads, 2, dout, self.q, out)
            lse_, *dlse_ = _narrow(heads, 1, lse, *(() if dlse is None else (dlse,)))
            dq, dk, dv = part.backward((dout_, q_, keys, values, out_, lse_), dlse_[0] if dlse_ else None, self.masks)
            if self.joins:
                of_rows.append((part.rows.start, dq))
            else:
                room = self._room()[:, part.rows, heads]
                (room.copy_ if self._is_first(part) else room.add_)(dq)
            if grads is None and dk.shape[1] == keys.shape[1]:
                grads = dk, dv
                continue
            if grads is None:
                grads = keys.new_zeros(keys.shape, dtype=self.acc), keys.new_zeros(keys.shape, dtype=self.acc)
            for total, share in zip(grads, (dk, dv), strict=True):
                total[:, part.key_rows] += share
        if of_rows:
            self._out = self._joined(of_rows, 1)
        return grads
