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

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels, on_device
from dilated_attention.backends.merge import merge_onto
from dilated_attention.distributed.comm.p2p import Exchange, Wire
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, RowIndex, Step
from dilated_attention.engine.branches.launches import Masks
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.prepare import make_plan
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.plan import Plan
from dilated_attention.pattern import DilatedPattern

Tensors = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor]
# how many steps have their keys in memory at once: the one that is computed and the next one
AHEAD = 2
# host time in ms that a ring's forward and backward take besides their launches: 0.3 and 1.4 on two H200s, 0.6 and 1.7 on two H100s
# (benchmarks scaling, 2,048 tokens a GPU). Kernels that take less than this gain nothing by being faster, and each launch adds to it
HOST_MS = 0.6, 1.7


def _wide(lines: Tensor) -> Tensor:
    """Returns the lines (see ``Step``) viewed as int64 where their size allows it: a library carries at most 2³¹ numbers."""
    return lines.view(torch.int64) if lines.shape[1] * lines.itemsize % 8 == 0 else lines


def copy(to: Pair, of: Pair, places: Tensor, step: Step, arrived: Pair | None = None) -> None:
    """Sets each line of ``to`` to the line of ``of`` that ``places`` has for it, plus the lines that came.

    Args:
        to: K and V, or their gradients, (B, rows, heads, D).
        places: numbers of lines, as in ``Step.sources``.
        arrived: the lines that came, and their numbers for each line (peers, lines).
    """
    if has_kernels(of[0]) or of[0].is_meta:
        from dilated_attention.distributed.exchange import copies_triton

        copies_triton.copy(to, of, places, step, arrived)
        return
    B, _, _, D = of[0].shape
    dtype = accumulation_dtype(of[0].dtype)
    lines = torch.cat([x.permute(1, 2, 0, 3).to(dtype) for x in of], -1).view(-1, step.width * B * 2 * D)
    # the first line is zero
    sums = F.pad(lines, (0, 0, 1, 0))[(places + 1).clamp(min=0)]
    # peer by peer, so the order of the sums is always the same
    came, arrivals = arrived or (sums, ())
    for numbers in arrivals:
        sums += F.pad(came, (0, 0, 1, 0))[(-1 - numbers).clamp(min=0)]
    for x, some in zip(to, views_of(sums.view(-1, to[0].shape[2], B, 2 * D)), strict=True):
        x.copy_(some)


def views_of(memory: Tensor) -> Pair:
    """Returns K and V (B, rows, heads, D) of a memory (rows, heads, B, 2·D), or of lines and their heads."""
    keys, D = memory.permute(2, 0, 1, 3), memory.shape[3] // 2
    return keys[..., :D], keys[..., D:]


def begin(step: Step, of: Pair, sent: RowIndex, back: RowIndex, k: Tensor, wire: Wire | None, what: str) -> tuple[Tensor, Exchange | None]:
    """Begins an exchange of lines of K and V, or of their gradients; all ranks begin theirs in the same order. Returns what comes, in k's
    dtype, and the exchange, None if this rank has no part in it. ``sent``, ``back``: the lines that are sent, and that come."""
    line = step.width, k.shape[0], 2 * k.shape[3]
    came = k.new_empty((len(back.numbers), math.prod(line)))
    if not len(sent.numbers) and not len(back.numbers):
        return came, None
    assert wire is not None, "one process has nobody to exchange with"
    lines = k.new_empty((len(sent.numbers), *line))
    copy(views_of(lines), of, sent.numbers, step)
    return came, wire.start(_wide(lines.flatten(1)), sent.counts, _wide(came), back.counts, what)


class Keys:
    """The keys of a step, which may still be in flight. ``own``: the rank's own K and V (B, n, heads, D)."""

    def __init__(self, step: Step, k: Tensor, v: Tensor, wire: Wire | None, what: str) -> None:
        """``k``, ``v``: the rank's (B, n, Hk, D); ``what``: the pass."""
        self.step, self.own = step, (step.of_heads(k), step.of_heads(v))
        self._keys: Pair | None = self.own if step.is_own else None
        self._came, self._transfer = begin(step, self.own, step.send, step.place, k, wire, f"{what}, {step.what}: K and V")

    def wait(self) -> Pair:
        """Waits until all keys have come, and returns K and V of the step's memory (B, rows, heads, D)."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        if self._keys is None:
            B, _, heads, D = self.own[0].shape
            self._keys = views_of(self._came.new_empty((self.step.rows, heads, B, 2 * D)))
            copy(self._keys, self.own, self.step.sources, self.step, (self._came, self.step.sources[None]))
            # it has been copied; this frees its memory for the step's results
            del self._came
        return self._keys


def send_back(step: Step, grads: Pair | None, k: Tensor, wire: Wire | None) -> Callable[[Pair], None]:
    """Begins to send gradients of a step's keys to the ranks that hold the keys. Returns what waits for the other ranks' shares, adds the
    own ones, and writes the sums to the step's heads of dk and dv (B, n, Hk, D).

    ``grads``: dK and dV of the step's memory (B, rows, heads, D), None for zeros."""
    B, _, _, D = k.shape
    own = grads or (k.new_zeros((1, 1, 1, D)).expand(B, step.rows, step.num_kv_heads, D),) * 2
    came, transfer = begin(step, own, step.place, step.send, k, wire, f"backward, {step.what}: dK and dV")

    def write_sums(to: Pair) -> None:
        if transfer is not None:
            transfer.wait()
        copy((step.of_heads(to[0]), step.of_heads(to[1])), own, step.own_places, step, (came, step.returned))

    return write_sums


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(ABC):
    """Attention of some of a rank's query ``rows`` and ``heads`` (numbers on this rank) to the rows ``key_rows`` of a step's memory.
    ``passes`` remembers how a forward and a backward run (a plan or a backend), by the kind of their inputs. Passes are given the part's
    rows and heads alone."""

    rows: slice
    heads: Range
    key_rows: slice
    passes: dict[Any, Any] = field(default_factory=dict)

    @abstractmethod
    def compute(self, tensors: Tensors, dlse: Tensor | None, masks: Masks, into: Tensor | None) -> Tensors:
        """Returns (out, lse (B, heads, rows)) of q, k and v, or (dq, dk, dv) of dout, q, k, v, out and lse. ``into``: where to write out or
        dq; a part that cannot write there returns another tensor."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryPart(Part):
    """The queries at positions ``queries``, computed with the keys of ``span`` as a sequence of its own. ``first_head``: the number of the
    rank's first head among the heads of all ranks."""

    pattern: DilatedPattern
    settings: CallSettings
    queries: Range
    span: KeySpan
    first_head: int

    def compute(self, tensors: Tensors, dlse: Tensor | None, masks: Masks, into: Tensor | None) -> Tensors:
        plan = self.plan(tensors[:5], masks)
        masks = masks_at(masks, slice(*self.queries), slice(self.span.start, self.span.end), self.heads, self.first_head)
        if len(tensors) == 3:
            q, k, v = tensors
            return plan.runner.forward(plan, q, k, v, masks, None, None if into is None else (into,))
        tensors, dlse = (*tensors[:5], tensors[5].contiguous()), None if dlse is None else dlse.contiguous()
        return plan.runner.backward(plan, tensors, masks, dlse, None, None if into is None else (into, None, None))

    def plan(self, views: Tensors, masks: Masks) -> Plan:
        """Returns the plan of a forward on q, k and v, or of a backward on dout, q, k, v and out."""
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


def parts_of(
    problem: RingProblem, settings: CallSettings, heads: Range, rank: int, span: KeySpan | None, first_head: int = 0
) -> tuple[QueryPart, ...]:
    """Returns what a rank computes in a step for some query heads, the part with most keys first. ``span``: the keys in the memory; None:
    the keys are the rank's own rows, and each range of positions is a sequence of its own."""
    pattern, row, parts = problem.pattern, 0, list[QueryPart]()
    assert pattern is not None
    pattern = pattern.with_heads(*heads, problem.num_heads) if pattern.branch_heads == "all" else pattern
    for start, end in problem.shards[rank]:
        rows, queries, row = slice(row, row + end - start), (start, end), row + end - start
        seen, key_rows = KeySpan(*queries, ((0, end - start),)), rows
        if span is not None:
            seen = span.seen_by(queries, problem.is_causal)
            key_rows = slice(seen.start - span.start, seen.end - span.start)
        parts.append(
            QueryPart(
                rows=rows, heads=heads, key_rows=key_rows, pattern=pattern, settings=settings, queries=queries, span=seen,
                first_head=first_head,
            )
        )  # fmt: skip
    return tuple(sorted(parts, key=lambda part: part.span.start - part.span.end))


def masks_at(masks: Masks, queries: slice | Tensor, keys: slice, heads: Range, first_head: int = 0) -> Masks:
    """Cuts the masks of a whole call to some queries, keys and heads. ``heads`` count from ``first_head``. A bias holds the places of all
    positions as its keys, so its queries are cut from those."""
    padding, bias = masks.padding, masks.bias
    if bias is not None:
        bias = bias._replace(queries=bias.keys).part((slice(None), queries), (slice(None), keys), slice(*(first_head + h for h in heads)))
    return masks if padding is None and bias is None else masks._replace(padding=None if padding is None else padding[:, keys], bias=bias)


def narrow(where: slice, dim: int, *tensors: Tensor) -> Tensors:
    """Returns views of the range ``where`` of a dimension; the tensors themselves if that is all, since a view costs host time."""
    if where == slice(0, tensors[0].shape[dim]):
        return tensors
    return tuple([x.narrow(dim, where.start, where.stop - where.start) for x in tensors])


class SparseRows:
    """Index of every g-th row of each head: row i of head h is row g·i + offset(h) of a tensor (B, n, heads, …). ``step``: g; ``offsets``:
    of each key/value head; ``q``: a tensor like all queries."""

    def __init__(self, step: int, offsets: tuple[int, ...], q: Tensor, device: torch.device) -> None:
        _, n, H, _ = q.shape
        key_row = torch.arange(0, n, step, device=device)[:, None] + torch.tensor(offsets, device=device)
        row, head = key_row.repeat_interleave(H // len(offsets), 1), torch.arange(H, device=device)
        # they take tensors (B, n, heads, D) to (B, n/g, heads, D), and statistics (B, heads, n) to (B, heads, n/g)
        self.queries, self.keys = (slice(None), row, head), (slice(None), key_row, head[: len(offsets)])
        self.stats = slice(None), head[:, None], row.T.contiguous()


class Term:
    """One term of a call, shared by all calls of the same kind. ``parts``: of each step; no two of a step write to the same row of a head.
    ``q``: a tensor like the term's queries; ``steps``: none if the term needs the rank's own keys alone: it is computed (``is_home``) while
    others' keys are in flight; ``chosen_rows``: the rows of q, k and v that the term computes with, None for all."""

    def __init__(
        self, parts: Sequence[Sequence[Part]], q: Tensor, steps: Sequence[Step] = (), chosen_rows: SparseRows | None = None
    ) -> None:
        self.chosen_rows, self.is_home, self.acc_dtype = chosen_rows, not steps, accumulation_dtype(q.dtype)
        # gradients of chosen rows are added to those of the home term, and rounded only then
        self.share_dtype = q.dtype if chosen_rows is None else self.acc_dtype
        # of each step (part, the rank's own rows that are its keys, None if some are not). Parts on own keys come first and read them where
        # they are, without waiting
        self.parts: list[list[tuple[Part, slice | None]]] = []
        for index, step_parts in enumerate(parts):
            local = [(part, steps[index].local(part.key_rows) if steps else part.key_rows) for part in step_parts]
            self.parts.append(sorted(local, key=lambda x: x[1] is None))
        # whether the results of a single part are those of the term
        self.has_one_part = [(part.rows, part.heads) for some in parts for part in some] == [(slice(0, q.shape[1]), (0, q.shape[2]))]
        # in which dtype a step's dk and dv are added. A sum of two shares is rounded once in any dtype, a sum of more would be repeatedly
        rows = [[part.key_rows for part in step_parts] for step_parts in parts]
        overlap = [any(sum(x.start <= first.start < x.stop for x in some) > 2 for first in some) for some in rows]
        self.grad_dtypes = [self.acc_dtype if is_sum else q.dtype for is_sum in overlap]

    def select(self, x: Any) -> Any:
        """Returns the term's rows of a tensor of queries (B, n, H, …) or of statistics (B, H, n); None for None."""
        if x is None or (rows := self.chosen_rows) is None:
            return x
        return x[rows.queries if x.dim() == 4 else rows.stats]

    def select_keys(self, k: Tensor, v: Tensor) -> Pair:
        return (k, v) if self.chosen_rows is None else (k[self.chosen_rows.keys], v[self.chosen_rows.keys])

    def views(self, index: int, q: Tensor, own: Pair, keys: Any) -> Iterator[tuple[Part, Tensors]]:
        """Yields each part of step ``index`` and the q, k and v that it reads, and waits for keys when one needs them. ``q``, ``own``: the
        term's queries, and the rank's K and V; ``keys``: those of the step (``Keys``)."""
        # parts on the rank's own keys are computed with the first step
        for part, rows in self.parts[index] if not self.is_home or index == 0 else ():
            k, v = narrow(rows or part.key_rows, 1, *(own if self.is_home else keys.own if rows else keys.wait()))
            yield part, (part_of(part, q), k, v)


class TermPass:
    """A forward or a backward of one term. ``tensors``: q, k, v and, in a backward, ``saved``: dout, out, lse (B, H, n), dlse or None, have
    all rows. ``out``, to which all parts write, is out, or in a backward dq; it and ``lse`` are the part's own if there is one alone."""

    out: Tensor
    lse: Tensor

    def __init__(self, term: Term, masks: Masks, tensors: Tensors, saved: tuple[Any, ...] = ()) -> None:
        q, k, v = tensors
        self.term, self.masks, self.own, self.q, self.saved = term, masks, (k, v), term.select(q), tuple(map(term.select, saved))
        if not term.has_one_part:
            B, n, H, _ = self.q.shape
            self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
            if not saved:
                self.lse = self.q.new_empty((B, H, n), dtype=term.acc_dtype)

    def compute(self, index: int, keys: Keys) -> Pair | None:
        """Computes step ``index``. In a backward it returns the gradients of the step's keys and values; None if they are zero."""
        total: Tensors = ()
        # shares that are not in the total yet, each with its rows of the memory
        waiting: list[tuple[slice, list[Tensor]]] = []
        rows = self.own[0].shape[1] if self.term.is_home else keys.step.rows
        for part, (q, k, v) in self.term.views(index, self.q, self.own, keys):
            place, dlse = None if self.term.has_one_part else part_of(part, self.out), None
            dtype = self.term.grad_dtypes[index]
            tensors: Any = (q, k, v)
            if self.saved:
                saved = self.saved if place is None else [None if x is None else part_of(part, x) for x in self.saved]
                dout, out, lse, dlse = saved
                tensors = dout, q, k, v, out, lse
            out, *shares = part.compute(tensors, dlse, self.masks, place)
            if place is None:
                self.out = out
            elif out is not place:
                place.copy_(out)
            if not self.saved:
                if place is None:
                    (self.lse,) = shares
                else:
                    part_of(part, self.lse).copy_(shares[0])
            elif not total and part.key_rows == slice(0, rows):
                total = tuple([x.to(dtype) for x in shares])
            else:
                waiting.append((part.key_rows, shares))
            # with two parts the first one waits: the second may have all rows, and then it is the total that the first is added to
            if waiting and (total or len(waiting) == 2 or len(self.term.parts[index]) != 2):
                total = total or tuple([x.new_zeros((x.shape[0], rows, *x.shape[2:]), dtype=dtype) for x in shares])
                for key_rows, some in waiting:
                    for sums, x in zip(total, some, strict=True):
                        sums[:, key_rows].add_(x)
                waiting.clear()
                del some, sums, x
            # free them before the next part allocates its own
            del out, shares
        return total or None  # type: ignore[return-value]


def part_of(part: Part, x: Tensor) -> Tensor:
    """Returns a part's rows and heads of a tensor of queries (B, n, H, …) or of statistics (B, H, n)."""
    row_dim, head_dim = (1, 2) if x.dim() == 4 else (2, 1)
    return narrow(part.rows, row_dim, *narrow(slice(*part.heads), head_dim, x))[0]


def added(one: Tensor, other: Tensor) -> Tensor:
    """Returns the sum, rounded once."""
    return (one.to(accumulation_dtype(one.dtype)) + other).to(one.dtype)


def dry_run(terms: Sequence[Term], steps: Sequence[Step], tensors: Tensors) -> Iterator[tuple[Part, Tensors]]:
    """Yields each part with tensors like those that it reads in a forward; keys from elsewhere have no memory. ``tensors``: q, k and v."""
    for term in terms:
        q, (k, v) = term.select(tensors[0]), term.select_keys(*tensors[1:])
        for index, step in enumerate(steps):
            memory = torch.empty((step.rows, step.num_kv_heads, len(k), 2 * k.shape[3]), dtype=k.dtype, device="meta")
            own = step.of_heads(k), step.of_heads(v)
            there = own if step.is_own else views_of(memory)
            yield from term.views(index, q, (k, v), SimpleNamespace(own=own, wait=lambda there=there: there))


def compile_ahead(
    terms: Sequence[Term], steps: Sequence[Step], tensors: Tensors, padding: Tensor | None, *, exchanges: bool, needs_grad: bool
) -> None:
    """Plans a forward on q, k and v, which starts compiling its kernels, those of its backward and those that copy keys. For a first call,
    so that they compile while the ranks connect."""
    term = terms[-1]
    k, v = term.select_keys(*tensors[1:])
    if exchanges and has_kernels(k):
        with on_device(k.device):
            compile_copies(steps[0], k, v, term.share_dtype if needs_grad else None)
    for part, views in dry_run(terms, steps, tensors):
        if isinstance(part, QueryPart):
            part.plan(views, Masks(padding))


def compile_copies(step: Step, k: Tensor, v: Tensor, dtype: torch.dtype | None) -> None:
    """Starts compiling the copies of steps like this one: copies of meta tensors do. ``dtype``: of the sums of gradients, if any."""
    wire: Any = SimpleNamespace(start=lambda *_: SimpleNamespace(wait=lambda: None))
    own_k, own_v = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (k, v))
    Keys(step, own_k, own_v, wire, "").wait()
    if dtype is not None:
        grads, sums = own_k.new_empty((len(k), step.rows, step.num_kv_heads, k.shape[3])), torch.empty(k.shape, dtype=dtype, device="meta")
        send_back(step, (grads, grads), own_k, wire)((sums, sums))


# --- a pass ----------------------------------------------------------------------------------------------------------------------
# The outputs of terms are merged by their lse, their gradients are added. The first term has all rows; the last one's keys are exchanged,
# and it has ``chosen_rows`` where, and only where, the first is a home term (``ring_pass.crossing_of``).


def compute(
    terms: Sequence[Term], steps: Sequence[Step], masks: Masks, tensors: Tensors, saved: tuple[Any, ...], wire: Wire | None
) -> Tensors:
    """Returns (out, lse) of this rank's rows, or with what a backward has ``saved`` (see ``TermPass``) (dq, dk, dv)."""
    _, k, v = tensors
    own, chosen, what = terms[-1].select_keys(k, v), terms[-1].chosen_rows, "backward" if saved else "forward"
    arriving = deque(Keys(step, *own, wire, what) for step in steps[:AHEAD])
    first, *others = passes = [TermPass(term, masks, tensors, saved) for term in terms]
    # gradients of all of the rank's keys: of the home term, and of the one whose keys are exchanged
    home: Any = None
    to: Any = None
    write_sums: Callable[[Pair], None] | None = None
    for index, step in enumerate(steps):
        grads: Pair | None = None
        for term_pass in passes:
            shares = term_pass.compute(index, arriving[0])
            if term_pass.term.is_home:
                home = home or shares
            elif shares is not None:
                grads = shares if grads is None else (added(grads[0], shares[0]), added(grads[1], shares[1]))
        arriving.popleft().wait()
        if grads is not None and len(steps) == 1 and step.is_own and not len(step.send.numbers):
            # no other rank has a share of these gradients
            to = grads
        elif saved:
            to = to or tuple([x.new_empty(x.shape, dtype=terms[-1].share_dtype) for x in own])
            begun = send_back(step, grads, own[0], wire)
            # those of the step before came meanwhile; adding them frees their memory for the next step
            if write_sums is not None:
                write_sums(to)
            write_sums = begun
        if index + AHEAD < len(steps):
            arriving.append(Keys(steps[index + AHEAD], *own, wire, what))
    if not saved:
        for term_pass in others:
            seen, seen_lse = term_pass.term.select(first.out), term_pass.term.select(first.lse)
            merge_onto(seen, seen_lse.transpose(1, 2), term_pass.out, term_pass.lse.transpose(1, 2))
            if chosen is not None:
                first.out[chosen.queries], first.lse[chosen.stats] = seen, seen_lse
        return first.out, first.lse
    if write_sums is not None:
        write_sums(to)
    dq = first.out
    for term_pass in others:
        total = added(term_pass.term.select(dq), term_pass.out)
        if chosen is None:
            dq = total
        else:
            dq[chosen.queries] = total
    if chosen is not None:
        # None on a rank without rows, which has no parts
        home = home or (torch.zeros_like(k), torch.zeros_like(v))
        for x, more in zip(home, to, strict=True):
            x[chosen.keys] = added(x[chosen.keys], more)
        to = home
    return dq, to[0].to(k.dtype), to[1].to(v.dtype)
