"""The one exchange, and what is computed on it: each rank gets the key rows that its queries see, computes, and sends the rows' gradients
back, some heads at a time.

Which rows these are, every rank works out for all ranks (``plan.py``), so nobody is asked for anything. A step brings the rows of some
key/value heads into a *memory* (rows, heads, B, 2·D), in order of position: K and V of a row and head are adjacent, so what one rank sends
another is one message. The next step's rows are in flight while one is computed. Gradients travel in the inputs' dtype; the rank that holds
a row sums what it gets in float32 (float64) and rounds once. Short calls wait for the CPU, so each copy of a step is one launch.

A range of queries is a call with ``query_offset`` on the keys at hand, which are all that it sees, by the engine of a single process. A
part writes its rows of out and dq where they belong; what the parts contribute to the gradients of keys is added. Block-sparse attention
has parts of its own (``blocks.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels, on_device
from dilated_attention.backends.merge import merge_onto
from dilated_attention.distributed.comm.p2p import Exchange, Wire
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem
from dilated_attention.distributed.exchange.step import Pair, Step, add, gather
from dilated_attention.engine.branches.launches import Into, Masks
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.plan import Plan
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[torch.Tensor, ...]
# steps whose keys are in memory at once: of one that is computed, and of the next one
AHEAD = 2
# host time in ms of the rest of a ring's forward and backward: 0.3 and 1.4 on one machine of two H200s, 0.6 and 1.7 on one of two H100s
# (benchmarks scaling, 2,048 tokens a GPU). Where the host is slower than this, a library's launches cost more than its kernels gain
HOST_MS = 0.6, 1.7


def _wide(lines: torch.Tensor) -> torch.Tensor:
    """Returns lines as wider numbers, since a library carries at most 2³¹ of them, where they can be read so."""
    return lines.view(torch.int64) if lines.shape[1] * lines.itemsize % 8 == 0 else lines


def views_of(memory: torch.Tensor) -> Pair:
    """Returns K and V (B, rows, heads, D) of a memory (rows, heads, B, 2·D)."""
    keys, D = memory.permute(2, 0, 1, 3), memory.shape[3] // 2
    return keys[..., :D], keys[..., D:]


class AtHand:
    """Keys that need no exchange; ``Arrival``: those that do. ``own``: the rank's K and V (B, n, heads, D); ``keys``: K and V (B, rows,
    heads, D) of the memory, once they are waited for."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.own = self.keys = k, v

    def wait(self) -> None:
        """Waits until all keys have come. A later call does nothing."""


class Arrival(AtHand):
    """A step whose keys are in flight."""

    def __init__(self, step: Step, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        super().__init__(step.of_heads(k), step.of_heads(v))
        self._step: Step | None = None if step.is_own else step
        self._transfer: Exchange | None = None
        k = self.own[0]
        width = step.width * k.shape[0] * 2 * k.shape[3]
        self._came: torch.Tensor | None = k.new_empty((len(step.place.numbers), width))
        if len(step.send.numbers) or len(step.place.numbers):
            assert wire is not None, "one process has nobody to exchange with"
            sent = k.new_empty((len(step.send.numbers), width))
            gather(sent, self.own, None, step.send.numbers, step)
            what = f"{what}, {step.what}: K and V"
            self._transfer = wire.start(_wide(sent), step.send.counts, _wide(self._came), step.place.counts, what)

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        step, k = self._step, self.own[0]
        if step is not None:
            B, _, heads, D = k.shape
            memory = k.new_empty((step.rows, heads, B, 2 * D))
            gather(memory, self.own, self._came, step.sources, step)
            self.keys = views_of(memory)
        # what came is copied: its memory is free for the step's results
        self._step = self._transfer = self._came = None


class Returning:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: Step, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Sends back the gradients of the keys that came: ``grads`` of the step's memory, (B, rows, heads, D), None for zeros."""
        B, _, _, D = k.shape
        if grads is None:
            grads = (k.new_zeros((1, 1, 1, D)).expand(B, step.rows, step.num_kv_heads, D),) * 2
        width = step.width * B * 2 * D
        self._step, self._grads, self._transfer = step, grads, None
        self._came = k.new_empty((len(step.send.numbers), width))
        if len(step.place.numbers) or len(step.send.numbers):
            assert wire is not None, "one process has nobody to exchange with"
            sent = k.new_empty((len(step.place.numbers), width))
            gather(sent, grads, None, step.place.numbers, step)
            what = f"backward, {step.what}: dK and dV"
            self._transfer = wire.start(_wide(sent), step.place.counts, _wide(self._came), step.send.counts, what)

    def add_to(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Writes the sums of all contributions, once they have come, into the step's heads of dk and dv (B, n, Hk, D)."""
        if self._transfer is not None:
            self._transfer.wait()
        to = self._step.of_heads(dk), self._step.of_heads(dv)
        add(to, self._grads, self._came, self._step)


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
    problem: RingProblem, settings: CallSettings, heads: Range, rank: int, span: KeySpan | None, first_head: int = 0
) -> tuple[QueryPart, ...]:
    """Returns what a rank computes in a step, for some query heads, on the keys of ``span``, the largest part first; None: on its own rows,
    of which each range is a sequence of its own."""
    common: dict[str, Any] = {"heads": heads, "problem": problem, "settings": settings, "first_head": first_head}
    parts = []
    for rows, queries in rows_of(problem.shards[rank]):
        seen, key_rows = KeySpan(*queries, ((0, queries[1] - queries[0]),)), rows
        if span is not None:
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


class SparseRows:
    """Every g-th row of each head: row i of head h is row g·i + offset(h) of a tensor (B, n, heads, …). ``offsets``: of the query heads,
    and of the key/value heads."""

    def __init__(self, step: int, offsets: tuple[tuple[int, ...], tuple[int, ...]], rows: int, device: torch.device) -> None:
        """``rows``: n of the tensors."""
        every = torch.arange(0, rows, step, device=device)[:, None]
        (row, head), (key_row, key_head) = ((every + torch.tensor(x, device=device), torch.arange(len(x), device=device)) for x in offsets)
        self.count = len(row)
        # of tensors (B, n, heads, D) as (B, n/g, heads, D), and of statistics (B, heads, n) as (B, heads, n/g)
        self.queries, self.keys = (slice(None), row, head), (slice(None), key_row, key_head)
        self.stats = slice(None), head[:, None], row.T.contiguous()


class Layer:
    """What calls alike compute in each step, on keys that are some of a softmax's: for all rows of q (B, n, H, D), k and v, or those that
    ``chosen_rows`` names; ``is_home``: on the rank's own keys alone, while others' are in flight. ``parts``: of each step (part, the rows
    of the memory that are its keys, whether these are all the rank's own). No two parts of a step share a row of a head; those on own keys
    come first, since they need not wait, and read these where they are (``key_rows``)."""

    def __init__(
        self,
        parts: Sequence[Sequence[Part]],
        q: torch.Tensor,
        steps: Sequence[Step] = (),
        chosen_rows: SparseRows | None = None,
        *,
        is_home: bool = False,
    ) -> None:
        self.chosen_rows, self.is_home, self.acc = chosen_rows, is_home, accumulation_dtype(q.dtype)
        self.parts: list[list[tuple[Part, slice, bool]]] = []
        for index, some in enumerate(parts):
            local = [(part, part.key_rows if is_home else steps[index].local(part.key_rows)) for part in some]
            placed = [(part if own is None else replace(part, key_rows=own), part.key_rows, own is not None) for part, own in local]
            self.parts.append(sorted(placed, key=lambda x: not x[2]))
        # of the memory, or of the rank's own keys
        self.rows = [q.shape[1]] if is_home else [step.rows for step in steps]
        only = parts[0][0] if len(parts) == 1 and len(parts[0]) == 1 else None
        # whether one part's results are all there are
        self.is_one = only is not None and only.rows == slice(0, q.shape[1]) and only.heads == (0, q.shape[2])
        # the sum of two shares in a key's gradient is rounded once, whatever its dtype; that of more must not be at each of them
        self.sums = [self.acc if _most_at_once([part.key_rows for part in some]) > 2 else q.dtype for some in parts]

    def chosen(self, x: Any) -> Any:
        """Returns the layer's rows of a tensor of all queries (B, n, H, …) or of their statistics (B, H, n), or None."""
        if x is None or (rows := self.chosen_rows) is None:
            return x
        return x[rows.queries if x.dim() == 4 else rows.stats]

    def chosen_keys(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        return (k, v) if self.chosen_rows is None else (k[self.chosen_rows.keys], v[self.chosen_rows.keys])


def _most_at_once(rows: Sequence[slice]) -> int:
    """Returns how many of the ranges the row has that most of them have."""
    return max((sum(x.start <= one.start < x.stop for x in rows) for one in rows), default=0)


class Computation:
    """What a pass computes of a layer, and its results. ``q``, and in a backward ``rest``: dout, out, lse (B, H, n), dlse or None, are of
    all rows."""

    def __init__(self, layer: Layer, masks: Masks, q: torch.Tensor, rest: tuple[Any, ...] = ()) -> None:
        self.layer, self.masks, self.q, self.rest = layer, masks, layer.chosen(q), tuple(map(layer.chosen, rest))
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    @property
    def out(self) -> torch.Tensor:
        """out of all parts, or in a backward dq."""
        if self._out is None:
            self._out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        return self._out

    @property
    def lse(self) -> torch.Tensor:
        if self._lse is None:
            B, n, H, _ = self.q.shape
            self._lse = torch.empty((B, H, n), dtype=self.layer.acc, device=self.q.device)
        return self._lse

    def _ready(self, index: int, arrival: AtHand) -> Iterator[tuple[Part, slice, Pair, torch.Tensor]]:
        """Yields (part, its rows of the memory, the K and V that it reads, where its rows of out or dq belong) of a step, those that wait
        for keys last."""
        for part, place, is_own in self.layer.parts[index]:
            if not is_own:
                arrival.wait()
            to = self.q if self.layer.is_one else narrow(part.rows, 1, *narrow(slice(*part.heads), 2, self.out))[0]
            yield part, place, arrival.own if is_own else arrival.keys, to

    def forward(self, index: int, arrival: AtHand) -> None:
        """Computes step ``index`` on its keys."""
        for part, _, (keys, values), place in self._ready(index, arrival):
            if self.layer.is_one:
                self._out, self._lse = part.forward(self.q, keys, values, self.masks)
                break
            heads = slice(*part.heads)
            out, lse = part.forward(narrow(heads, 2, self.q)[0], keys, values, self.masks, (place,))
            if out is not place:
                place.copy_(out)
            narrow(part.rows, 2, *narrow(heads, 1, self.lse))[0].copy_(lse)
            # before memory for the next part's is allocated
            del out, lse

    def backward(self, index: int, arrival: AtHand) -> Pair | None:
        """Returns the gradients of the keys and values of step ``index``; None if they are zero."""
        rows, dtype = self.layer.rows[index], self.layer.sums[index]
        total: tuple[torch.Tensor, ...] = ()
        late: list[tuple[slice, Pair]] = []

        def add_late() -> tuple[torch.Tensor, ...]:
            sums = total or tuple(x.new_zeros((x.shape[0], rows, *x.shape[2:]), dtype=dtype) for x in late[0][1])
            for place, shares in late:
                for to, x in zip(sums, shares, strict=True):
                    to[:, place].add_(x)
            late.clear()
            return sums

        for part, place, keys, to in self._ready(index, arrival):
            shares = self._backward(part, keys, to)
            if not total and place == slice(0, rows):
                total = tuple([x.to(dtype) for x in shares])
                continue
            late.append((place, shares))
            # of two, the second one may have all rows
            if total or len(self.layer.parts[index]) > 2:
                total = add_late()
        return (add_late() if late else total) or None  # type: ignore[return-value]

    def _backward(self, part: Part, keys: Pair, place: torch.Tensor) -> Pair:
        """Computes a part, puts its dq where it belongs and returns (dk, dv)."""
        dout, out, lse, dlse = self.rest
        if self.layer.is_one:
            self._out, dk, dv = part.backward((dout, self.q, *keys, out, lse), dlse, self.masks)
            return dk, dv
        heads = slice(*part.heads)
        dout, q, out = narrow(heads, 2, dout, self.q, out)
        lse, dlse = narrow(heads, 1, lse)[0], None if dlse is None else narrow(heads, 1, dlse)[0]
        dq, dk, dv = part.backward((dout, q, *keys, out, lse), dlse, self.masks, (place, None, None))
        if dq is not place:
            place.copy_(dq)
        return dk, dv


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the sum, rounded once."""
    return (one.to(accumulation_dtype(one.dtype)) + other).to(one.dtype)


def compile_ahead(
    layers: Sequence[Layer], steps: Sequence[Step], tensors: Tensors, padding: torch.Tensor | None, *, exchanges: bool, needs_grad: bool
) -> None:
    """Plans a forward on q, k and v: its kernels, those of its backward, and those that copy, compile while the ranks connect."""
    q, k, v = tensors
    for layer in layers:
        of_q, of_k, of_v, chosen = q, k, v, layer.chosen_rows
        if chosen is not None:
            of_q, of_k, of_v = (torch.empty((len(x), chosen.count, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in tensors)
        if layer is layers[-1] and exchanges and has_kernels(k):
            from dilated_attention.distributed.exchange import copies_triton

            with on_device(k.device):
                to = None if not needs_grad else k.dtype if chosen is None else layer.acc
                copies_triton.compile_ahead(steps[0], of_k, of_v, to)
        for step, parts in zip(steps, layer.parts, strict=False):
            own = (k, v) if layer.is_home else (step.of_heads(of_k), step.of_heads(of_v))
            size = step.rows, step.num_kv_heads, k.shape[0], 2 * k.shape[3]
            memory = own if layer.is_home or step.is_own else views_of(torch.empty(size, dtype=k.dtype, device="meta"))
            for part, _, is_own in parts:
                if isinstance(part, QueryPart):
                    (of_heads,), keys = narrow(slice(*part.heads), 2, of_q), own if is_own else memory
                    part.plan_forward(of_heads, *keys, Masks(padding))


# --- a pass ----------------------------------------------------------------------------------------------------------------------
# Layers' results are merged by their log-sum-exps, their gradients added. The first layer has all rows.


def forward(layers: Sequence[Layer], steps: Sequence[Step], masks: Masks, tensors: Tensors, wire: Wire | None) -> Pair:
    """Returns (out, lse) of all steps; what needs the rank's own keys alone is computed while the first keys are in flight."""
    q, k, v = tensors
    keys = layers[-1].chosen_keys(k, v)
    arrivals = deque(Arrival(step, *keys, wire, "forward") for step in steps[:AHEAD])
    work = [Computation(layer, masks, q) for layer in layers]
    for one in work:
        if one.layer.is_home:
            one.forward(0, AtHand(k, v))
    for index in range(len(steps)):
        for one in work:
            if not one.layer.is_home:
                one.forward(index, arrivals[0])
        arrivals.popleft().wait()
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], *keys, wire, "forward"))
    out, lse = work[0].out, work[0].lse
    for one in work[1:]:
        layer = one.layer
        seen, seen_lse = layer.chosen(out), layer.chosen(lse)
        merge_onto(seen, seen_lse.transpose(1, 2), one.out, one.lse.transpose(1, 2))
        if layer.chosen_rows is not None:
            out[layer.chosen_rows.queries], lse[layer.chosen_rows.stats] = seen, seen_lse
    return out, lse


def backward(
    layers: Sequence[Layer], steps: Sequence[Step], masks: Masks, tensors: Tensors, rest: tuple[Any, ...], wire: Wire | None
) -> Tensors:
    """Returns dq, dk and dv of this rank's rows, the last two in the keys' dtype. ``rest``: see ``Computation``."""
    q, k, v = tensors
    keys, chosen, acc = layers[-1].chosen_keys(k, v), layers[-1].chosen_rows, layers[-1].acc
    arrivals = deque(Arrival(step, *keys, wire, "backward") for step in steps[:AHEAD])
    work = [Computation(layer, masks, q, rest) for layer in layers]
    home: Pair | None = None
    for one in work:
        if one.layer.is_home:
            # a rank without rows has no parts
            home = one.backward(0, AtHand(k, v)) or (torch.zeros_like(k), torch.zeros_like(v))
    to: Pair | None = None
    last: Returning | None = None
    for index, step in enumerate(steps):
        grads: Pair | None = None
        for one in work:
            shares = None if one.layer.is_home else one.backward(index, arrivals[0])
            if grads is not None and shares is not None:
                grads = added(grads[0], shares[0]), added(grads[1], shares[1])
            else:
                grads = grads or shares
        arrivals.popleft().wait()
        if grads is not None and len(steps) == 1 and step.is_own and not len(step.send.numbers):
            # no other rank has a share of these gradients
            to = grads
            break
        # what is added to other shares is not rounded before
        like: dict[str, Any] = {"dtype": k.dtype if chosen is None else acc, "memory_format": torch.contiguous_format}
        to = to or (torch.empty_like(keys[0], **like), torch.empty_like(keys[1], **like))
        back = Returning(step, grads, keys[0], wire)
        # add what came back during this step before memory for the next step is allocated
        if last is not None:
            last.add_to(*to)
        last = back
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], *keys, wire, "backward"))
    assert to is not None
    if last is not None:
        last.add_to(*to)
    dq = work[0].out
    for one in work[1:]:
        total = added(one.layer.chosen(dq), one.out)
        if chosen is None:
            dq = total
        else:
            dq[chosen.queries] = total
    if chosen is not None:
        assert home is not None
        for x, more in zip(home, to, strict=True):
            x[chosen.keys] = (x[chosen.keys].to(acc) + more).to(x.dtype)
        to = home
    return dq, to[0].to(k.dtype), to[1].to(v.dtype)
