"""What a pass over the steps of an exchange computes: a rank's queries on the keys of each step, with the engine of a single process, and
where the results go. Block-sparse attention has parts of its own (``blocks.py``).

A range of queries is a call with ``query_offset`` on the keys at hand, which are all that it sees. A part writes its rows of out and dq
where they belong; what the parts contribute to the gradients of keys is added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.merge import merge_onto
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem
from dilated_attention.distributed.exchange.run import AtHand, views_of
from dilated_attention.distributed.exchange.step import Pair, Step
from dilated_attention.engine.branches.launches import Into
from dilated_attention.engine.branches.launches import Masks as Masks
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.plan import Plan
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# host time in ms of the rest of a ring's forward and backward: 0.3 and 1.4 on one machine of two H200s, 0.6 and 1.7 on one of two H100s
# (benchmarks scaling, 2,048 tokens a GPU). Where the host is slower than this, a library's launches cost more than its kernels gain
HOST_MS = 0.6, 1.7


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(ABC):
    """Some of a rank's query ``rows`` and ``heads`` (counted on this rank) on the rows ``key_rows`` of a step's memory. ``passes``: how
    each pass runs, by the strides of the tensors it reads."""

    rows: slice
    heads: Range
    key_rows: slice
    passes: dict[Any, Any] = field(default_factory=dict)

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks, into: Into | None = None) -> Pair:
        """Returns (out (B, rows, heads, D), lse (B, heads, rows)). ``q``: of all rows and the part's heads; ``k``, ``v``: the memory's;
        ``into``: where out goes, if the part can write there; otherwise it returns another tensor."""

    @abstractmethod
    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks, into: Into | None = None) -> Tensors:
        """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out, and lse (B, heads, n), as is ``dlse``; ``into`` as in ``forward``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryPart(Part):
    """Queries at positions ``queries`` on the keys of ``span``, which are a sequence of their own. ``first_head``: of this rank's heads,
    counted over the whole model."""

    problem: RingProblem
    settings: CallSettings
    queries: Range
    span: KeySpan
    first_head: int

    def plan_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks) -> tuple[Plan, Tensors]:
        """Returns the plan of ``forward`` and the rows that it reads."""
        rows = *narrow(self.rows, 1, q), *narrow(self.key_rows, 1, k, v)
        return self._plan(rows, masks), rows

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks, into: Into | None = None) -> Pair:
        plan, (q, k, v) = self.plan_forward(q, k, v, masks)
        return plan.runner.forward(plan, q, k, v, self._masks_of(masks), None, into)

    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks, into: Into | None = None) -> Tensors:
        dout, q, k, v, out, lse = tensors
        dout, q, out = narrow(self.rows, 1, dout, q, out)
        views = dout, q, *narrow(self.key_rows, 1, k, v), out
        lse = lse[:, :, self.rows].contiguous()
        dlse = None if dlse is None else dlse[:, :, self.rows].contiguous()
        plan = self._plan(views, masks)
        return plan.runner.backward(plan, (*views, lse), self._masks_of(masks), dlse, None, into)

    def _masks_of(self, masks: Masks) -> Masks:
        """Returns the masks of the positions that the call counts."""
        return masks_at(masks, slice(*self.queries), slice(self.span.start, self.span.end), self.heads, self.first_head)

    def _plan(self, views: Tensors, masks: Masks) -> Plan:
        kind = (masks.padding is None, *[x.stride() for x in views])
        plan = self.passes.get(kind)
        if plan is None:
            span, is_backward = self.span, len(views) > 3
            tensors = (*views[1:4], views[0], *views[4:]) if is_backward else views
            settings = self.settings._replace(query_offset=self.queries[0] - span.start, seq_len=-1)
            plan = self.passes[kind] = make_plan(
                settings, tensors, is_backward, has_padding=masks.padding is not None, documents=span.documents, pattern=self.pattern,
                num_keys=span.end - span.start, host_ms=HOST_MS, position_offset=span.start,
                first_head=self.first_head + self.heads[0],
            )  # fmt: skip
        return plan  # type: ignore[no-any-return]

    @property
    def pattern(self) -> DilatedPattern:
        pattern = self.problem.pattern
        return pattern.with_heads(*self.heads, self.problem.num_heads) if pattern.branch_heads == "all" else pattern


def parts_of(
    problem: RingProblem, settings: CallSettings, heads: Range, rank: int, span: KeySpan, first_head: int = 0
) -> tuple[QueryPart, ...]:
    """Returns what a rank computes in a step, for some query heads, on the keys of ``span``, the largest part first."""
    common: dict[str, Any] = {"heads": heads, "problem": problem, "settings": settings, "first_head": first_head}
    parts = []
    for rows, queries in rows_of(problem.shards[rank]):
        seen = span.seen_by(queries, problem.is_causal)
        key_rows = slice(seen.start - span.start, seen.end - span.start)
        parts.append(QueryPart(rows=rows, key_rows=key_rows, queries=queries, span=seen, **common))
    return tuple(sorted(parts, key=lambda part: part.span.start - part.span.end))


def masks_at(masks: Masks, queries: slice | torch.Tensor, keys: slice, heads: Range, first_head: int = 0) -> Masks:
    """Returns the masks of a part of the whole sequence: of some positions and of heads, counted from ``first_head``. A bias has the places
    of all positions."""
    padding, bias = masks.padding, masks.bias
    if bias is not None:
        bias = bias._replace(queries=bias.keys).part((slice(None), queries), (slice(None), keys), slice(*(first_head + h for h in heads)))
    return masks if padding is None and bias is None else masks._replace(padding=None if padding is None else padding[:, keys], bias=bias)


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


class StepParts:
    """What a rank computes in each step, for calls alike; q is (B, n, H, D). ``parts``: of each step (part, the rows of the memory that are
    its keys, whether these are all the rank's own). No two parts of a step share a row of a head; those on own keys come first, since they
    need not wait, and read these where they are (``key_rows``)."""

    def __init__(self, parts: Sequence[Sequence[Part]], q: torch.Tensor, steps: Sequence[Step] = ()) -> None:
        self.acc = accumulation_dtype(q.dtype)
        self.parts: list[list[tuple[Part, slice, bool]]] = []
        for index, some in enumerate(parts):
            local = [(part, steps[index].local(part.key_rows) if steps else part.key_rows) for part in some]
            placed = [(part if own is None else replace(part, key_rows=own), part.key_rows, own is not None) for part, own in local]
            self.parts.append(sorted(placed, key=lambda x: not x[2]))
        # of the memory; of the rank's own rows, if these are all
        self.rows = [step.rows for step in steps]
        only = parts[0][0] if len(parts) == 1 and len(parts[0]) == 1 else None
        # whether one part's results are all there are
        self.is_one = only is not None and only.rows == slice(0, q.shape[1]) and only.heads == (0, q.shape[2])
        # the sum of two shares in a key's gradient is rounded once, whatever its dtype; that of more must not be at each of them
        self.sums = [self.acc if _most_at_once([part.key_rows for part in some]) > 2 else q.dtype for some in parts]

    def ready(self, index: int, arrival: AtHand) -> Iterator[tuple[Part, slice, Pair]]:
        """Yields (part, its rows of the memory, the K and V that it reads) of a step, those that wait for keys last."""
        for part, place, is_own in self.parts[index]:
            if not is_own:
                arrival.wait()
            yield part, place, arrival.own if is_own else arrival.keys


def _most_at_once(rows: Sequence[slice]) -> int:
    """Returns how many of the ranges the row has that most of them have."""
    return max((sum(x.start <= one.start < x.stop for x in rows) for one in rows), default=0)


class Computation:
    """What a pass computes on the keys of its steps, and its results. ``rest``: in a backward dout, out, lse (B, H, n), dlse or None."""

    def __init__(self, of: StepParts, masks: Masks, q: torch.Tensor, rest: tuple[Any, ...] = ()) -> None:
        self.of, self.masks, self.q, self.rest = of, masks, q, rest
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def dq(self) -> torch.Tensor:
        """Returns dq of all parts, or in a forward out."""
        if self._out is None:
            self._out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        return self._out

    def results(self) -> Pair:
        return self.dq(), self._all_lse()

    def _all_lse(self) -> torch.Tensor:
        if self._lse is None:
            B, n, H, _ = self.q.shape
            self._lse = torch.empty((B, H, n), dtype=self.of.acc, device=self.q.device)
        return self._lse

    def _place(self, part: Part) -> torch.Tensor:
        """Returns where a part's rows of out or dq belong."""
        return narrow(part.rows, 1, *narrow(slice(*part.heads), 2, self.dq()))[0]

    def forward(self, index: int, arrival: AtHand) -> None:
        """Computes step ``index`` on its keys."""
        for part, _, (keys, values) in self.of.ready(index, arrival):
            if self.of.is_one:
                self._out, self._lse = part.forward(self.q, keys, values, self.masks)
                break
            heads, place = slice(*part.heads), self._place(part)
            out, lse = part.forward(narrow(heads, 2, self.q)[0], keys, values, self.masks, (place,))
            if out is not place:
                place.copy_(out)
            narrow(part.rows, 2, *narrow(heads, 1, self._all_lse()))[0].copy_(lse)
            # before memory for the next part's is allocated
            del out, lse

    def backward(self, index: int, arrival: AtHand) -> Pair | None:
        """Returns the gradients of the keys and values of step ``index``; None if they are zero."""
        rows = self.of.rows[index] if self.of.rows else arrival.own[0].shape[1]
        total: tuple[torch.Tensor, ...] = ()
        late: list[tuple[slice, Pair]] = []
        for part, place, keys in self.of.ready(index, arrival):
            shares = self._backward(part, *keys)
            if not total and place == slice(0, rows):
                total = tuple([x.to(self.of.sums[index]) for x in shares])
                continue
            late.append((place, shares))
            # of two, the second one may have all rows
            if total or len(self.of.parts[index]) > 2:
                total = self._add(index, rows, total, late)
        return self._add(index, rows, total, late) if total or late else None  # type: ignore[return-value]

    def _add(self, index: int, rows: int, total: tuple[torch.Tensor, ...], late: list[tuple[slice, Pair]]) -> tuple[torch.Tensor, ...]:
        """Adds shares in rows of the memory to the total of all its rows, and forgets them."""
        for place, shares in late:
            total = total or tuple(x.new_zeros((x.shape[0], rows, *x.shape[2:]), dtype=self.of.sums[index]) for x in shares)
            for to, x in zip(total, shares, strict=True):
                to[:, place].add_(x)
        late.clear()
        return total

    def _backward(self, part: Part, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Computes a part, puts its dq where it belongs and returns (dk, dv)."""
        dout, out, lse, dlse = self.rest
        if self.of.is_one:
            self._out, dk, dv = part.backward((dout, self.q, keys, values, out, lse), dlse, self.masks)
            return dk, dv
        heads, place = slice(*part.heads), self._place(part)
        dout, q, out = narrow(heads, 2, dout, self.q, out)
        lse, dlse = narrow(heads, 1, lse)[0], None if dlse is None else narrow(heads, 1, dlse)[0]
        dq, dk, dv = part.backward((dout, q, keys, values, out, lse), dlse, self.masks, (place, None, None))
        if dq is not place:
            place.copy_(dq)
        return dk, dv


class SparseRows:
    """Every g-th row of each head: row i of head h is row g·i + offset(h) of a tensor (B, n, heads, …)."""

    def __init__(self, step: int, offsets: tuple[int, ...], rows: int, device: torch.device) -> None:
        """``rows``: n of the tensors."""
        row = torch.arange(0, rows, step, device=device)[:, None] + torch.tensor(offsets, device=device)
        self.count, head = len(row), torch.arange(len(offsets), device=device)
        # in tensors (B, n, heads, D), and in statistics (B, heads, n)
        self._index, self._of_stats = (slice(None), row, head), (slice(None), head[:, None], row.T.contiguous())

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the rows: (B, n/g, heads, D), or of statistics (B, heads, n) as (B, heads, n/g)."""
        return x[self._index if x.dim() == 4 else self._of_stats]

    def put(self, x: torch.Tensor, part: torch.Tensor) -> None:
        x[self._index if x.dim() == 4 else self._of_stats] = part


@dataclass(frozen=True, eq=False)
class Layer:
    """Parts whose keys are some of a softmax's: for all rows of q, or those that ``rows`` chooses; ``is_home``: on the rank's own keys
    alone, while others' are in flight."""

    parts: StepParts
    rows: SparseRows | None = None
    is_home: bool = False

    def chosen(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the layer's rows of a tensor of all."""
        return x if self.rows is None or x is None else self.rows.of(x)


def plan_ahead(layers: Sequence[Layer], steps: Sequence[Step], tensors: Tensors, padding: torch.Tensor | None) -> None:
    """Plans a forward on q, k and v: its kernels, and those of its backward, compile while the ranks connect."""
    q, k, v = tensors
    for layer in layers:
        rows = q if layer.rows is None else q.new_empty((q.shape[0], layer.rows.count, *q.shape[2:]))
        for step, parts in zip(steps, layer.parts.parts, strict=False):
            own = (k, v) if layer.is_home else (step.of_heads(k), step.of_heads(v))
            size = step.rows, step.num_kv_heads, k.shape[0], 2 * k.shape[3]
            memory = own if layer.is_home or step.is_own else views_of(torch.empty(size, dtype=k.dtype, device="meta"))
            for part, _, is_own in parts:
                if isinstance(part, QueryPart):
                    (of_heads,), keys = narrow(slice(*part.heads), 2, rows), own if is_own else memory
                    part.plan_forward(of_heads, *keys, Masks(padding))


class Work:
    """What a pass computes, in layers: their results are merged by their log-sum-exps, their gradients added. ``rest``: see
    ``Computation``. The first layer has all rows."""

    def __init__(self, layers: Sequence[Layer], masks: Masks, q: torch.Tensor, rest: tuple[Any, ...] = ()) -> None:
        self.layers = [(x, Computation(x.parts, masks, x.chosen(q), tuple(map(x.chosen, rest)))) for x in layers]  # type: ignore[arg-type]

    def results(self) -> Pair:
        """Returns (out, lse)."""
        (_, first), *others = self.layers
        out, lse = first.results()
        for layer, work in others:
            seen, seen_lse = layer.chosen(out), layer.chosen(lse)
            part, part_lse = work.results()
            merge_onto(seen, seen_lse.transpose(1, 2), part, part_lse.transpose(1, 2))  # type: ignore[arg-type,union-attr]
            if layer.rows is not None:
                layer.rows.put(out, seen)  # type: ignore[arg-type]
                layer.rows.put(lse, seen_lse)  # type: ignore[arg-type]
        return out, lse

    def dq(self) -> torch.Tensor:
        (_, first), *others = self.layers
        dq = first.dq()
        for layer, work in others:
            total = added(layer.chosen(dq), work.dq())  # type: ignore[arg-type]
            if layer.rows is None:
                dq = total
            else:
                layer.rows.put(dq, total)
        return dq

    def home(self, keys: AtHand, is_backward: bool) -> Pair | None:
        """Computes the layer that needs no other rank's keys, if there is one; in a backward returns the gradients of the rank's keys."""
        for layer, work in self.layers:
            if layer.is_home and not is_backward:
                work.forward(0, keys)
            elif layer.is_home:
                # a rank without rows has no parts
                return work.backward(0, keys) or (torch.zeros_like(keys.own[0]), torch.zeros_like(keys.own[1]))
        return None

    def forward(self, index: int, arrival: AtHand) -> None:
        """Computes step ``index`` on its keys."""
        for layer, work in self.layers:
            if not layer.is_home:
                work.forward(index, arrival)

    def backward(self, index: int, arrival: AtHand) -> Pair | None:
        """Returns the gradients of the keys and values of step ``index``; None if they are zero."""
        total: Pair | None = None
        for layer, work in self.layers:
            shares = None if layer.is_home else work.backward(index, arrival)
            if total is not None and shares is not None:
                total = added(total[0], shares[0]), added(total[1], shares[1])
            else:
                total = total or shares
        return total


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the sum, rounded once."""
    return (one.to(accumulation_dtype(one.dtype)) + other).to(one.dtype)
