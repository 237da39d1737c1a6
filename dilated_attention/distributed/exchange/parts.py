"""Computes a rank's queries on the keys of each step, with the engine of a single process.

A range of queries is a call with ``query_offset`` on the keys at hand: all of them (all_gather), or those of one rank (ring), whose
result is a part that is merged. Block-sparse attention has parts of its own (``block_exchange/parts.py``).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.merge import merge_onto
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, hull, sees_keys
from dilated_attention.distributed.exchange.rows.messages import StepPlan
from dilated_attention.engine.branches import strategy
from dilated_attention.engine.branches.launch_views import Call
from dilated_attention.engine.branches.plan import Range
from dilated_attention.engine.ops.prepare import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
# host time in ms of the rest of a ring's forward and backward: 0.3 and 1.4 on one machine of two H200s, 0.6 and 1.7 on one of two H100s
# (bench scaling, 2,048 tokens a GPU). Where the host is slower than this, a library's launches cost more than its kernels gain
HOST_MS = {False: 0.6, True: 1.7}
# larger results are written one by one, so that they are not in memory twice
JOINED_BYTES = 2**26


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

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> Pair:
        """Returns (out (B, rows, heads, D), lse (B, heads, rows)). ``q``: of all rows and the part's heads; ``k``, ``v``: the memory's."""

    @abstractmethod
    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks) -> Tensors:
        """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out, and lse (B, heads, n), as is ``dlse``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryPart(Part):
    """Queries at positions ``queries`` on keys at positions ``keys``.

    Args:
        span: the keys as a sequence of their own, if the pattern allows it; None if ``keys`` are a part of the whole sequence.
        first_head: the first of this rank's heads, counted over the whole model.
    """

    rows: slice
    problem: RingProblem
    settings: CallSettings
    queries: Range
    keys: Range
    span: KeySpan | None
    first_head: int

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> Pair:
        views = _narrow(self.rows, 1, q)[0], *_narrow(self.key_rows, 1, k, v)
        run, call = self._resolved(views, masks, strategy.choose_forward)
        out, lse = run(*views, call, None)
        return out, lse

    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks) -> Tensors:
        dout, q, k, v, out, lse = tensors
        dout, q, out = _narrow(self.rows, 1, dout, q, out)
        views = dout, q, *_narrow(self.key_rows, 1, k, v), out
        lse = lse[:, :, self.rows].contiguous()
        dlse = None if dlse is None else dlse[:, :, self.rows].contiguous()
        run, call = self._resolved(views, masks, strategy.choose_backward)
        return run((*views, lse), call, dlse, None)  # type: ignore[no-any-return]

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
        call = replace(call, first_head=self.first_head + self.heads[0], position_offset=origin, key_offset=shape.keys[0])
        call = replace(call, host_ms=HOST_MS[is_backward])
        # the mask of this call must not stay in memory
        return choose(pattern, shape, views, call), replace(call, padding=None)

    @property
    def pattern(self) -> DilatedPattern:
        pattern = self.problem.pattern
        return pattern.with_heads(*self.heads, self.problem.num_heads) if pattern.branch_heads == "all" else pattern


def parts_of(
    problem: RingProblem, settings: CallSettings, step: StepPlan, rank: int, span: KeySpan | None, first_head: int = 0
) -> tuple[QueryPart, ...]:
    """Returns what a rank computes in a step, the largest part first. ``span``: of an all_gather, else None."""
    ratio = problem.num_heads // problem.num_kv_heads
    common: dict[str, Any] = {"problem": problem, "settings": settings, "first_head": first_head}
    common["heads"] = (step.kv_heads[0] * ratio, step.kv_heads[1] * ratio)
    found = []
    for rows, queries in rows_of(problem.shards[rank]):
        if span is not None:
            mine = span.around(queries)
            mine = mine.before(queries[1]) if problem.is_causal else mine
            key_rows, keys = slice(mine.start - span.start, mine.end - span.start), (mine.start, mine.end)
            found.append(QueryPart(rows=rows, queries=queries, keys=keys, key_rows=key_rows, span=mine, **common))
            continue
        low, high = hull(problem, (queries,))
        for key_rows, keys in rows_of(step.keys):
            if keys[0] < high and keys[1] > low and sees_keys(problem, queries, keys):
                found.append(QueryPart(rows=rows, queries=queries, keys=keys, key_rows=key_rows, span=None, **common))
    return tuple(sorted(found, key=lambda part: part.keys[0] - part.keys[1])) if span is not None else tuple(found)


def _narrow(where: slice, dim: int, *tensors: torch.Tensor) -> Tensors:
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


class StepParts:
    """What a rank computes in each step, for calls alike.

    Args:
        parts: of each step.
        merges: a row's parts come from several steps: they are merged, and their dq summed, in float32 (float64).
        q: the queries of a call, (B, n, H, D).
    """

    def __init__(self, parts: Sequence[Sequence[Part]], merges: bool, q: torch.Tensor) -> None:
        self.parts, self.merges, self.acc = parts, merges, accumulation_dtype(q.dtype)
        # whether each row's result is that of one part: then they are joined, which takes the host less time than copying them one by one
        only = parts[0] if len(parts) == 1 and not merges else ()
        rows = [part.rows.stop - part.rows.start if isinstance(part.rows, slice) else 0 for part in only]
        self.joins = bool(only) and sum(rows) == q.shape[1] and all(part.heads == (0, q.shape[2]) for part in only)
        self.joins = self.joins and (len(only) == 1 or q.numel() * q.element_size() <= JOINED_BYTES)
        # the parts by row
        self.order = sorted(range(len(only)), key=lambda i: only[i].rows.start) if self.joins else []  # type: ignore[union-attr]
        read = [sorted((part.key_rows.start, part.key_rows.stop) for part in some) for some in parts]
        # whether several parts of a step contribute to the gradients of one key
        self.sums = any(a[1] > b[0] for some in read for a, b in itertools.pairwise(some))


class Computation:
    """What a pass computes on the keys of its steps, and its results.

    Args:
        rest: in a backward dout, out, and lse (B, H, n) and its gradient or None.
    """

    def __init__(self, of: StepParts, masks: Masks, q: torch.Tensor, rest: tuple[Any, ...] = ()) -> None:
        self.of, self.masks, self.q, self.rest = of, masks, q, rest
        self._done: set[tuple[int, int]] = set()
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def dq(self) -> torch.Tensor:
        """Returns dq of all parts, or in a forward out."""
        if self._out is None:
            self._out = torch.empty(self.q.shape, dtype=self.of.acc if self.of.merges else self.q.dtype, device=self.q.device)
        return self._out

    def results(self) -> Pair:
        return self.dq().to(self.q.dtype), self._all_lse()

    def _all_lse(self) -> torch.Tensor:
        if self._lse is None:
            B, n, H, _ = self.q.shape
            self._lse = torch.empty((B, H, n), dtype=self.of.acc, device=self.q.device)
        return self._lse

    def _put(self, to: torch.Tensor, dim: int, part: Part, x: torch.Tensor) -> None:
        if isinstance(part.rows, slice):
            to.narrow(dim, part.rows.start, x.shape[dim]).copy_(x)
        else:
            to.index_copy_(dim, part.rows, x.to(to.dtype))

    def _is_first(self, part: Part) -> bool:
        """Whether no earlier step had these rows."""
        if not self.of.merges:
            return True
        assert isinstance(part.rows, slice)
        key = (part.rows.start, part.heads[0])
        first = key not in self._done
        self._done.add(key)
        return first

    def forward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Computes step ``index`` on its keys and values (B, rows, heads, D)."""
        parts = self.of.parts[index]
        if self.of.joins:
            found = [part.forward(self.q, keys, values, self.masks) for part in parts]
            if len(found) == 1:
                self._out, self._lse = found[0]
            else:
                self._out, self._lse = (torch.cat([found[i][which] for i in self.of.order], which + 1) for which in (0, 1))
            return
        for part in parts:
            heads = slice(*part.heads)
            out, lse = part.forward(self.q[:, :, heads], keys, values, self.masks)
            all_out, all_lse = self.dq()[:, :, heads], self._all_lse()[:, heads]
            if self._is_first(part):
                self._put(all_out, 1, part, out)
                self._put(all_lse, 2, part, lse)
            else:
                merge_onto(all_out[:, part.rows], all_lse[:, :, part.rows].transpose(1, 2), out, lse.transpose(1, 2))
            # before memory for the next part's is allocated
            del out, lse

    def backward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Pair | None:
        """Returns the gradients of the keys and values of step ``index``; None if they are zero."""
        dout, out, lse, dlse = self.rest
        joined: list[torch.Tensor] = []
        grads: Pair | None = None
        for part in self.of.parts[index]:
            if self.of.joins:
                dq, dk, dv = part.backward((dout, self.q, keys, values, out, lse), dlse, self.masks)
                joined.append(dq)
            else:
                heads = slice(*part.heads)
                tensors = (dout[:, :, heads], self.q[:, :, heads], keys, values, out[:, :, heads], lse[:, heads])
                dq, dk, dv = part.backward(tensors, None if dlse is None else dlse[:, heads], self.masks)
                if self._is_first(part):
                    self._put(self.dq()[:, :, heads], 1, part, dq)
                else:
                    self.dq()[:, part.rows, heads].add_(dq)
            # two parts' sum is rounded once, whatever its dtype; that of more must not be at each of them
            if grads is None and dk.shape[1] == keys.shape[1] and (len(self.of.parts[index]) <= 2 or not self.of.sums):
                grads = dk, dv
                continue
            if grads is None:
                dtype = self.of.acc if self.of.sums else dk.dtype
                grads = keys.new_zeros(keys.shape, dtype=dtype), keys.new_zeros(keys.shape, dtype=dtype)
            for total, share in zip(grads, (dk, dv), strict=True):
                total[:, part.key_rows].add_(share)
        if joined:
            self._out = joined[0] if len(joined) == 1 else torch.cat([joined[i] for i in self.of.order], 1)
        return grads
