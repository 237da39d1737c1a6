"""Runs a forward or a backward over ranks: each rank receives the key rows that its queries see, computes with them, and sends the rows'
gradients back. This is done in steps, each for some of the heads.

Every rank works out which rows all ranks need (``plan.py``), so no rank asks another. A *step* brings the rows of some key/value heads into
a *memory* (rows, heads, B, 2·D), in order of position. K and V of a row and head are adjacent, so one rank sends another one message. While
one step is computed, the rows of the next are in flight. Gradients travel in the inputs' dtype; the rank that holds a row sums them in
float32 (float64) and rounds once. In short calls the GPU waits for the CPU, so each copy of a step is one launch.

A call is the merge of *terms*: each is attention to some of the keys, such as dilated branches or a block pattern. A term has *parts* in
each step: some queries and heads. Parts write to different rows of out and dq; their dk and dv are added. A ``QueryPart`` is a call of the
engine of a single process, with ``query_offset``, on the keys that its queries see. ``blocks.py`` has the parts of block patterns.
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
# how many steps have their keys in memory at once: the one that is computed and the next one
AHEAD = 2
# host time in ms that a ring's forward and backward take besides their launches: 0.3 and 1.4 on two H200s, 0.6 and 1.7 on two H100s
# (benchmarks scaling, 2,048 tokens a GPU). Kernels that take less than this gain nothing by being faster, and each launch adds to it
HOST_MS = 0.6, 1.7


def _wide(lines: torch.Tensor) -> torch.Tensor:
    """Returns the lines (see ``Step``) viewed as int64 where their size allows it: a library carries at most 2³¹ numbers."""
    return lines.view(torch.int64) if lines.shape[1] * lines.itemsize % 8 == 0 else lines


def views_of(memory: torch.Tensor) -> Pair:
    """Returns K and V (B, rows, heads, D) of a memory (rows, heads, B, 2·D)."""
    keys, D = memory.permute(2, 0, 1, 3), memory.shape[3] // 2
    return keys[..., :D], keys[..., D:]


class LocalKeys:
    """The keys of a step that needs no exchange. ``own``: the rank's own K and V (B, n, heads, D); ``keys``: K and V (B, rows, heads, D) of
    the step's memory, which here is ``own``."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.own = self.keys = k, v

    def wait(self) -> None:
        """Waits until all keys have come. A later call does nothing."""


class ArrivingKeys(LocalKeys):
    """The keys of a step that may still be in flight; ``keys`` is valid after ``wait``."""

    def __init__(self, step: Step, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's (B, n, Hk, D); ``what``: the pass."""
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
        # what came has been copied; this frees its memory for the step's results
        self._step = self._transfer = self._came = None


class ReturningGrads:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: Step, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Begins to send them. ``grads``: dK and dV of the step's memory (B, rows, heads, D), None for zeros."""
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

    def write_sums(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Waits for the other ranks' contributions, adds the own ones, and writes the sums to the step's heads of dk, dv (B, n, Hk, D)."""
        if self._transfer is not None:
            self._transfer.wait()
        to = self._step.of_heads(dk), self._step.of_heads(dv)
        add(to, self._grads, self._came, self._step)


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(ABC):
    """Attention of some of a rank's query ``rows`` and ``heads`` (numbers on this rank) to the rows ``key_rows`` of a step's memory.
    ``passes`` remembers how a forward and a backward run (a plan or a backend), by the kind of their inputs."""

    rows: slice
    heads: Range
    key_rows: slice
    passes: dict[Any, Any] = field(default_factory=dict)

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks, into: Into | None = None) -> Pair:
        """Returns (out (B, rows, heads, D), lse (B, heads, rows)). ``q`` has all rows, and the part's heads; ``k``, ``v`` are the memory's.
        ``into``: where to write out; a part that cannot write there returns another tensor."""

    @abstractmethod
    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks, into: Into | None = None) -> Tensors:
        """Returns (dq, dk, dv). ``tensors``: dout, q, k, v, out, and lse, of the shape (B, heads, n) of ``dlse``. ``into``: for dq."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryPart(Part):
    """The queries at positions ``queries``, computed with the keys of ``span`` as a sequence of its own. ``first_head``: the number of the
    rank's first head among the heads of all ranks."""

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
        """Returns the masks of the part's queries, keys and heads."""
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
    """Returns what a rank computes in a step for some query heads, the part with most keys first. ``span``: the keys in the memory; None:
    the keys are the rank's own rows, and each range of positions is a sequence of its own."""
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
    """Cuts the masks of a whole call to some queries, keys and heads. ``heads`` count from ``first_head``. A bias holds the places of all
    positions as its keys, so its queries are cut from those."""
    padding, bias = masks.padding, masks.bias
    if bias is not None:
        bias = bias._replace(queries=bias.keys).part((slice(None), queries), (slice(None), keys), slice(*(first_head + h for h in heads)))
    return masks if padding is None and bias is None else masks._replace(padding=None if padding is None else padding[:, keys], bias=bias)


def narrow(where: slice, dim: int, *tensors: torch.Tensor) -> Tensors:
    """Returns views of the range ``where`` of a dimension; the tensors themselves if that is all, since a view costs host time."""
    if where == slice(0, tensors[0].shape[dim]):
        return tensors
    return tuple([x.narrow(dim, where.start, where.stop - where.start) for x in tensors])


def rows_of(spans: tuple[Range, ...]) -> Iterator[tuple[slice, Range]]:
    """Yields (rows, positions) of each range of positions; their rows are stored one after the other."""
    row = 0
    for start, end in spans:
        if start < end:
            yield slice(row, row + end - start), (start, end)
        row += end - start


class SparseRows:
    """Index of every g-th row of each head: row i of head h is row g·i + offset(h) of a tensor (B, n, heads, …). ``step``: g; ``offsets``:
    of each query head, and of each key/value head; ``rows``: n."""

    def __init__(self, step: int, offsets: tuple[tuple[int, ...], tuple[int, ...]], rows: int, device: torch.device) -> None:
        every = torch.arange(0, rows, step, device=device)[:, None]
        (row, head), (key_row, key_head) = ((every + torch.tensor(x, device=device), torch.arange(len(x), device=device)) for x in offsets)
        self.count = len(row)
        # they take tensors (B, n, heads, D) to (B, n/g, heads, D), and statistics (B, heads, n) to (B, heads, n/g)
        self.queries, self.keys = (slice(None), row, head), (slice(None), key_row, key_head)
        self.stats = slice(None), head[:, None], row.T.contiguous()


class Term:
    """One term of a call, shared by all calls of the same kind. ``parts``: of each step; no two of a step write to the same row of a head.
    ``q``: a tensor like the term's queries; ``chosen_rows``: the rows of q, k and v that the term computes with, None for all; ``is_home``:
    it needs the rank's own keys alone, so it takes no steps and is computed while others' keys are in flight."""

    def __init__(
        self,
        parts: Sequence[Sequence[Part]],
        q: torch.Tensor,
        steps: Sequence[Step] = (),
        chosen_rows: SparseRows | None = None,
        *,
        is_home: bool = False,
    ) -> None:
        self.chosen_rows, self.is_home, self.acc_dtype = chosen_rows, is_home, accumulation_dtype(q.dtype)
        # of each step (part, the rows of the memory that are its keys, whether all of these are the rank's own). Parts on own keys come
        # first and read them where they are, without waiting
        self.parts: list[list[tuple[Part, slice, bool]]] = []
        for index, step_parts in enumerate(parts):
            local = [(part, part.key_rows if is_home else steps[index].local(part.key_rows)) for part in step_parts]
            placed = [(part if own is None else replace(part, key_rows=own), part.key_rows, own is not None) for part, own in local]
            self.parts.append(sorted(placed, key=lambda x: not x[2]))
        # of each step: rows of the memory, or of the rank's own keys
        self.key_rows = [q.shape[1]] if is_home else [step.rows for step in steps]
        only = parts[0][0] if len(parts) == 1 and len(parts[0]) == 1 else None
        # whether the results of a single part are those of the term
        self.has_one_part = only is not None and only.rows == slice(0, q.shape[1]) and only.heads == (0, q.shape[2])
        # in which dtype a step's dk and dv are added. A sum of two shares is rounded once in any dtype, a sum of more would be repeatedly
        self.grad_dtypes = [self.acc_dtype if _most_overlapping([part.key_rows for part in x]) > 2 else q.dtype for x in parts]

    def select(self, x: Any) -> Any:
        """Returns the term's rows of a tensor of queries (B, n, H, …) or of statistics (B, H, n); None for None."""
        if x is None or (rows := self.chosen_rows) is None:
            return x
        return x[rows.queries if x.dim() == 4 else rows.stats]

    def select_keys(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        return (k, v) if self.chosen_rows is None else (k[self.chosen_rows.keys], v[self.chosen_rows.keys])


def _most_overlapping(rows: Sequence[slice]) -> int:
    """Returns the largest number of ranges that have a row in common."""
    return max((sum(x.start <= first.start < x.stop for x in rows) for first in rows), default=0)


class TermPass:
    """A forward or a backward of one term, with its results. ``q`` (B, n, H, D) and, in a backward, ``saved``: dout, out, lse (B, H, n),
    dlse or None, have all rows."""

    def __init__(self, term: Term, masks: Masks, q: torch.Tensor, saved: tuple[Any, ...] = ()) -> None:
        self.term, self.masks, self.q, self.saved = term, masks, term.select(q), tuple(map(term.select, saved))
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    @property
    def out(self) -> torch.Tensor:
        """The tensor to which all parts write: out, or in a backward dq."""
        if self._out is None:
            self._out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        return self._out

    @property
    def lse(self) -> torch.Tensor:
        if self._lse is None:
            B, n, H, _ = self.q.shape
            self._lse = torch.empty((B, H, n), dtype=self.term.acc_dtype, device=self.q.device)
        return self._lse

    def _ready_parts(self, index: int, arrival: LocalKeys) -> Iterator[tuple[Part, slice, Pair, torch.Tensor]]:
        """Yields the parts of a step, waiting for keys when one needs them: (part, its rows of the memory, the K and V that it reads, where
        its rows of out or dq belong)."""
        for part, place, is_own in self.term.parts[index]:
            if not is_own:
                arrival.wait()
            to = self.q if self.term.has_one_part else narrow(part.rows, 1, *narrow(slice(*part.heads), 2, self.out))[0]
            yield part, place, arrival.own if is_own else arrival.keys, to

    def forward(self, index: int, arrival: LocalKeys) -> None:
        """Computes step ``index``."""
        for part, _, (keys, values), place in self._ready_parts(index, arrival):
            if self.term.has_one_part:
                self._out, self._lse = part.forward(self.q, keys, values, self.masks)
                break
            heads = slice(*part.heads)
            out, lse = part.forward(narrow(heads, 2, self.q)[0], keys, values, self.masks, (place,))
            if out is not place:
                place.copy_(out)
            narrow(part.rows, 2, *narrow(heads, 1, self.lse))[0].copy_(lse)
            # free them before the next part allocates its own
            del out, lse

    def backward(self, index: int, arrival: LocalKeys) -> Pair | None:
        """Returns the gradients of the keys and values of step ``index``; None if they are zero."""
        rows, dtype = self.term.key_rows[index], self.term.grad_dtypes[index]
        total: tuple[torch.Tensor, ...] = ()
        # shares that are not in the total yet, each with its rows of the memory
        waiting: list[tuple[slice, Pair]] = []

        def add_waiting() -> tuple[torch.Tensor, ...]:
            sums = total or tuple(x.new_zeros((x.shape[0], rows, *x.shape[2:]), dtype=dtype) for x in waiting[0][1])
            for place, shares in waiting:
                for to, x in zip(sums, shares, strict=True):
                    to[:, place].add_(x)
            waiting.clear()
            return sums

        for part, place, keys, to in self._ready_parts(index, arrival):
            shares = self._backward(part, keys, to)
            if not total and place == slice(0, rows):
                total = tuple([x.to(dtype) for x in shares])
                continue
            waiting.append((place, shares))
            # with two parts the first one waits: the second may have all rows, and then it is the total that the first is added to
            if total or len(self.term.parts[index]) > 2:
                total = add_waiting()
        return (add_waiting() if waiting else total) or None  # type: ignore[return-value]

    def _backward(self, part: Part, keys: Pair, place: torch.Tensor) -> Pair:
        """Computes a part, puts its dq where it belongs and returns (dk, dv)."""
        dout, out, lse, dlse = self.saved
        if self.term.has_one_part:
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
    terms: Sequence[Term], steps: Sequence[Step], tensors: Tensors, padding: torch.Tensor | None, *, exchanges: bool, needs_grad: bool
) -> None:
    """Plans a forward on q, k and v, which starts compiling its kernels, those of its backward and those that copy keys. For a first call,
    so that they compile while the ranks connect."""
    q, k, v = tensors
    for term in terms:
        of_q, of_k, of_v, chosen = q, k, v, term.chosen_rows
        if chosen is not None:
            of_q, of_k, of_v = (torch.empty((len(x), chosen.count, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in tensors)
        if term is terms[-1] and exchanges and has_kernels(k):
            from dilated_attention.distributed.exchange import copies_triton

            with on_device(k.device):
                to = None if not needs_grad else k.dtype if chosen is None else term.acc_dtype
                copies_triton.compile_ahead(steps[0], of_k, of_v, to)
        for step, parts in zip(steps, term.parts, strict=False):
            own = (k, v) if term.is_home else (step.of_heads(of_k), step.of_heads(of_v))
            size = step.rows, step.num_kv_heads, k.shape[0], 2 * k.shape[3]
            memory = own if term.is_home or step.is_own else views_of(torch.empty(size, dtype=k.dtype, device="meta"))
            for part, _, is_own in parts:
                if isinstance(part, QueryPart):
                    (of_heads,), keys = narrow(slice(*part.heads), 2, of_q), own if is_own else memory
                    part.plan_forward(of_heads, *keys, Masks(padding))


# --- a pass ----------------------------------------------------------------------------------------------------------------------
# The outputs of terms are merged by their lse, their gradients are added. The first term has all rows; the last one's keys are exchanged.


def forward(terms: Sequence[Term], steps: Sequence[Step], masks: Masks, tensors: Tensors, wire: Wire | None) -> Pair:
    """Returns (out, lse) of this rank's rows. Terms on the rank's own keys are computed while the first keys are in flight."""
    q, k, v = tensors
    keys = terms[-1].select_keys(k, v)
    arrivals = deque(ArrivingKeys(step, *keys, wire, "forward") for step in steps[:AHEAD])
    passes = [TermPass(term, masks, q) for term in terms]
    for term_pass in passes:
        if term_pass.term.is_home:
            term_pass.forward(0, LocalKeys(k, v))
    for index in range(len(steps)):
        for term_pass in passes:
            if not term_pass.term.is_home:
                term_pass.forward(index, arrivals[0])
        arrivals.popleft().wait()
        if index + AHEAD < len(steps):
            arrivals.append(ArrivingKeys(steps[index + AHEAD], *keys, wire, "forward"))
    out, lse = passes[0].out, passes[0].lse
    for term_pass in passes[1:]:
        term = term_pass.term
        seen, seen_lse = term.select(out), term.select(lse)
        merge_onto(seen, seen_lse.transpose(1, 2), term_pass.out, term_pass.lse.transpose(1, 2))
        if term.chosen_rows is not None:
            out[term.chosen_rows.queries], lse[term.chosen_rows.stats] = seen, seen_lse
    return out, lse


def backward(
    terms: Sequence[Term], steps: Sequence[Step], masks: Masks, tensors: Tensors, saved: tuple[Any, ...], wire: Wire | None
) -> Tensors:
    """Returns (dq, dk, dv) of this rank's rows. ``saved``: see ``TermPass``."""
    q, k, v = tensors
    keys, chosen, acc_dtype = terms[-1].select_keys(k, v), terms[-1].chosen_rows, terms[-1].acc_dtype
    arrivals = deque(ArrivingKeys(step, *keys, wire, "backward") for step in steps[:AHEAD])
    passes = [TermPass(term, masks, q, saved) for term in terms]
    home: Pair | None = None
    for term_pass in passes:
        if term_pass.term.is_home:
            # None on a rank without rows, which has no parts
            home = term_pass.backward(0, LocalKeys(k, v)) or (torch.zeros_like(k), torch.zeros_like(v))
    to: Pair | None = None
    returning: ReturningGrads | None = None
    for index, step in enumerate(steps):
        grads: Pair | None = None
        for term_pass in passes:
            shares = None if term_pass.term.is_home else term_pass.backward(index, arrivals[0])
            if grads is not None and shares is not None:
                grads = added(grads[0], shares[0]), added(grads[1], shares[1])
            else:
                grads = grads or shares
        arrivals.popleft().wait()
        if grads is not None and len(steps) == 1 and step.is_own and not len(step.send.numbers):
            # no other rank has a share of these gradients
            to = grads
            break
        # gradients of chosen rows are added to those of the home term, and rounded only then
        like: dict[str, Any] = {"dtype": k.dtype if chosen is None else acc_dtype, "memory_format": torch.contiguous_format}
        to = to or (torch.empty_like(keys[0], **like), torch.empty_like(keys[1], **like))
        begun = ReturningGrads(step, grads, keys[0], wire)
        # those of the step before came meanwhile; adding them frees their memory for the next step
        if returning is not None:
            returning.write_sums(*to)
        returning = begun
        if index + AHEAD < len(steps):
            arrivals.append(ArrivingKeys(steps[index + AHEAD], *keys, wire, "backward"))
    assert to is not None
    if returning is not None:
        returning.write_sums(*to)
    dq = passes[0].out
    for term_pass in passes[1:]:
        total = added(term_pass.term.select(dq), term_pass.out)
        if chosen is None:
            dq = total
        else:
            dq[chosen.queries] = total
    if chosen is not None:
        assert home is not None
        for x, more in zip(home, to, strict=True):
            x[chosen.keys] = (x[chosen.keys].to(acc_dtype) + more).to(x.dtype)
        to = home
    return dq, to[0].to(k.dtype), to[1].to(v.dtype)
