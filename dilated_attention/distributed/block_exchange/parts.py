"""Computes a rank's query blocks on the keys of a step, with the lists of blocks of a single process.

A rank may hold a part of a query block: the launch then has whole blocks, and rows that the rank does not hold count for nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dilated_attention.backends import Backend, Dropout, Mask, Options
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.block_lists import BlockLists
from dilated_attention.distributed.block_exchange.lists import RankLists, lists_of_buffer, lists_of_heads, rank_lists
from dilated_attention.distributed.block_exchange.plan import Columns, RingBlockProblem, columns_of, key_span, needed_keys, needs_of
from dilated_attention.distributed.exchange.parts import Branches
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem, aligned_span
from dilated_attention.distributed.exchange.plan import key_span as branch_span
from dilated_attention.distributed.exchange.plan import needed_keys as branch_keys
from dilated_attention.distributed.exchange.rows.messages import StepPlan, gathering
from dilated_attention.engine.blocks.launch import backward_lists, forward_lists
from dilated_attention.engine.branches.merge import merge_onto
from dilated_attention.engine.branches.plan import Range

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Queries:
    """The query rows of a launch: whole blocks, of which the rank may hold only a part.

    Args:
        rows: the range [first, last) of the rank's rows if these are all of the launch's rows; else None.
        held, place: the rank's rows, and their indices among the launch's rows.
        positions: (L,) positions in the whole sequence.
    """

    rows: slice | None
    held: torch.Tensor
    place: torch.Tensor
    positions: torch.Tensor

    def of(self, x: torch.Tensor, dim: int, value: float = 0.0) -> torch.Tensor:
        """Gathers the launch's rows of the rank's x along ``dim``; rows that the rank does not hold are ``value``."""
        if self.rows is not None:
            return x.narrow(dim, self.rows.start, self.rows.stop - self.rows.start)
        shape = list(x.shape)
        shape[dim] = len(self.positions)
        return x.new_full(shape, value).index_copy_(dim, self.place, x.index_select(dim, self.held))

    def put(self, x: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Writes the launch's rows to the rank's x."""
        if self.rows is not None:
            self.of(x, dim).copy_(values)
        else:
            x.index_copy_(dim, self.held, values.index_select(dim, self.place).to(x.dtype))


def queries_of(ring_problem: RingBlockProblem, rank: int, columns: Columns, part: RankLists, device: torch.device) -> Queries:
    positions = part.positions + ring_problem.documents[part.document][0]
    place = (columns.rank_of_position[positions] == rank).nonzero()[:, 0]
    held = columns.row_of_position[positions[place]]
    rows = slice(int(held[0]), int(held[-1]) + 1) if len(place) == len(positions) else None
    return Queries(rows, held.to(device), place.to(device), positions.to(device))


@dataclass(frozen=True, eq=False)
class BlockPart:
    """One document's query blocks and some heads of them, on the rows ``keys`` of a step's memory, which begin at position ``first_key``.

    Args:
        forward_backend, backward_backend: None if no key is kept, or the pass is not needed.
    """

    queries: Queries
    heads: Range
    keys: slice
    first_key: int
    lists: BlockLists
    forward_backend: Backend | None = None
    backward_backend: Backend | None = None

    def views(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys[:, self.keys], values[:, self.keys]


def make_block_steps(
    ring_problem: RingBlockProblem, rank: int, head_steps: tuple[int, ...], device: torch.device, branches: RingProblem | None = None
) -> tuple[tuple[StepPlan, ...], tuple[tuple[BlockPart, ...], ...], KeySpan]:
    """Returns a rank's steps, what it computes of the blocks in each, without backends, and the span of keys that it gathers.

    Args:
        head_steps: the number of key/value heads in each step.
        branches: dilated branches that are computed on the same keys.
    """
    assert sum(head_steps) == ring_problem.num_kv_heads
    needs, columns = needs_of(ring_problem, device), columns_of(ring_problem)
    lists = rank_lists(ring_problem, rank, device)
    queries = [queries_of(ring_problem, rank, columns, part, device) for part in lists]
    span, ratio = key_span(ring_problem, needs, rank), ring_problem.num_heads // ring_problem.num_kv_heads
    if branches is not None and span[1]:
        other = branch_span(branches, rank)
        span = aligned_span(branches, (min(span[0], other.start), max(span[1], other.end)), ring_problem.pattern.k_block)
    low, high = span
    documents = tuple((max(a, low) - low, min(b, high) - low) for a, b in ring_problem.documents if a < high and b > low)

    @functools.cache
    def of_branches(reader: int) -> torch.Tensor:
        assert branches is not None
        return branch_keys(branches, reader, device)

    steps, parts, first = [], [], 0
    for index, count in enumerate(head_steps):
        kv_heads, heads = (first, first + count), (first * ratio, (first + count) * ratio)
        first += count

        def needed(reader: int, kv_heads: Range = kv_heads) -> torch.Tensor:
            of_blocks = needed_keys(ring_problem, needs, kv_heads, device, reader)
            return of_blocks if branches is None else of_blocks | of_branches(reader)

        steps.append(gathering(ring_problem.shards, rank, needed, kv_heads, span, f"heads {index + 1} of {len(head_steps)}"))
        parts.append(tuple(_part_of(ring_problem, part, rows, span, heads) for part, rows in zip(lists, queries, strict=True)))
    return tuple(steps), tuple(parts), KeySpan(*span, documents)


def _part_of(ring_problem: RingBlockProblem, part: RankLists, queries: Queries, span: Range, heads: Range) -> BlockPart:
    """Returns what is computed of a document on the keys at positions ``span``, which begin with a block of the document."""
    start, end = ring_problem.documents[part.document]
    lists, size = lists_of_heads(part.lists, heads), ring_problem.pattern.k_block
    low, high = max(start, span[0]), min(end, span[1])
    if (low, high) != (start, end):
        place = torch.arange(-(-(end - start) // size)) - (low - start) // size
        # branches may end the keys inside a block, which no query of the rank keeps then
        place[(place * size + size).clamp(max=end - low) > high - low] = -1
        lists = lists_of_buffer(lists, place.clamp(min=-1), high - low)
    return BlockPart(queries, heads, slice(low - span[0], high - span[0]), low, lists)


@dataclass(frozen=True)
class BlockOptions:
    """What launches need in addition to tensors and lists.

    Args:
        padding: (B, N) bool of the whole sequence, True = padding.
        seed: the dropout seed; dropout depends on positions in the whole sequence.
    """

    scale: float
    deterministic: bool
    dropout_p: float
    softcap: float
    padding: torch.Tensor | None = None
    seed: int = 0

    def of(self, part: BlockPart, batch: int, device: torch.device) -> Options:
        first, count = part.first_key, part.keys.stop - part.keys.start
        padding = None if self.padding is None else self.padding[:, first : first + count]
        dropout = None
        if self.dropout_p:
            positions = torch.arange(first, first + count, device=device)
            queries, keys = (x.expand(batch, -1) for x in (part.queries.positions, positions))
            entries, heads = torch.arange(batch, device=device), torch.arange(*part.heads, device=device)
            dropout = Dropout(self.dropout_p, self.seed, entries, heads, queries, keys)
        return Options(self.scale, mask=Mask(padding), dropout=dropout, deterministic=self.deterministic, softcap=self.softcap)


class Blocks:
    """Block-sparse attention on the keys of each step (``exchange/run.py``); nothing is merged.

    Args:
        parts: what is computed in each step.
        rest: in a backward dout, out, and lse (B, H, n) and its gradient or None.
    """

    def __init__(
        self,
        parts: tuple[tuple[BlockPart, ...], ...],
        options: BlockOptions,
        q: torch.Tensor,
        rest: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
    ) -> None:
        self.parts, self.options, self.q, self.rest = parts, options, q, rest
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def _is_only(self, part: BlockPart) -> bool:
        """Whether a part's results are the rank's, so that nothing need be copied."""
        return part.queries.rows == slice(0, self.q.shape[1]) and part.heads == (0, self.q.shape[2])

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        B, n, H, _ = self.q.shape
        if self._lse is None:
            self._lse = self.q.new_empty((B, H, n), dtype=accumulation_dtype(self.q.dtype))
        return self.dq(), self._lse

    def dq(self) -> torch.Tensor:
        """Returns dq of all parts, or in a forward out."""
        if self._out is None:
            self._out = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        return self._out

    def forward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for part in self.parts[index]:
            heads = slice(*part.heads)
            options = self.options.of(part, self.q.shape[0], self.q.device)
            rows = part.queries.of(self.q, 1)[:, :, heads]
            k, v = part.views(keys, values)
            out, lse = forward_lists(part.forward_backend, part.lists, rows, k, v, options)  # type: ignore[arg-type]
            if self._is_only(part):
                self._out, self._lse = out, lse
                return
            all_out, all_lse = self.results()
            part.queries.put(all_out[:, :, heads], 1, out)
            part.queries.put(all_lse[:, heads], 2, lse)

    def backward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        assert self.rest is not None
        dout, out, lse, dlse = self.rest
        grads: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in self.parts[index]:
            heads, queries = slice(*part.heads), part.queries
            options = self.options.of(part, self.q.shape[0], self.q.device)
            # for rows that the rank does not hold, weights and gradients are 0
            dout_, q_, out_ = (queries.of(x, 1)[:, :, heads] for x in (dout, self.q, out))
            tensors = (dout_, q_, *part.views(keys, values), out_, queries.of(lse, 2, torch.inf)[:, heads])
            some_dlse = None if dlse is None else queries.of(dlse, 2)[:, heads]
            dq, dk, dv = backward_lists(part.backward_backend, part.lists, tensors, options, some_dlse)  # type: ignore[arg-type]
            if self._is_only(part):
                self._out = dq.to(self.q.dtype)
            else:
                queries.put(self.dq()[:, :, heads], 1, dq)
            if part.keys == slice(0, keys.shape[1]):
                return dk, dv
            if grads is None:
                # a document's keys that no query of this rank sees have none
                grads = keys.new_zeros(keys.shape, dtype=dk.dtype), keys.new_zeros(keys.shape, dtype=dk.dtype)
            for whole, share in zip(grads, (dk, dv), strict=True):
                whole[:, part.keys] = share
        return grads


class BlocksAndBranches:
    """A block pattern and dilated branches on the same keys: one softmax over the keys of both, merged by their log-sum-exps."""

    def __init__(self, blocks: Blocks, branches: Branches) -> None:
        self.blocks, self.branches = blocks, branches

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        (out, lse), (part, part_lse) = self.branches.results(), self.blocks.results()
        merge_onto(out, lse.transpose(1, 2), part, part_lse.transpose(1, 2))
        return out, lse

    def dq(self) -> torch.Tensor:
        return _sum(self.branches.dq(), self.blocks.dq())

    def forward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.blocks.forward(index, keys, values)
        self.branches.forward(index, keys, values)

    def backward(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        shares = self.blocks.backward(index, keys, values)
        more = self.branches.backward(index, keys, values)
        if shares is None or more is None:
            return more if shares is None else shares
        (dk, dv), (more_dk, more_dv) = shares, more
        return _sum(dk, more_dk), _sum(dv, more_dv)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the sum, rounded once."""
    return (one.to(accumulation_dtype(one.dtype)) + other).to(one.dtype)
