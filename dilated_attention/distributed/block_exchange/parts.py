"""Computes a rank's query blocks on the keys of a step, with the block lists of a single process, whose key blocks are counted from the
memory's first.

A rank may hold a part of a query block: the launch then has whole blocks, and rows that the rank does not hold count for nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import Backend, Dropout, Mask, Options
from dilated_attention.distributed.block_exchange.plan import (
    ascending_runs,
    block_steps,
    key_span,
    lists_of,
    needed_keys,
    needs_of,
    query_blocks,
)
from dilated_attention.distributed.comm.call_consistency import RingCall, device_memory
from dilated_attention.distributed.comm.group import Members
from dilated_attention.distributed.exchange.computation import Layer, Masks, Part, StepParts, Tensors, parts_of
from dilated_attention.distributed.exchange.plan import KeySpan, Needed, RingBlockProblem, RingProblem, aligned_span
from dilated_attention.distributed.exchange.plan import key_span as branch_span
from dilated_attention.distributed.exchange.setup import RingSetup, check_branches, heads_of
from dilated_attention.distributed.exchange.step import Pair, Step, make_step
from dilated_attention.distributed.sharding.layout import spans
from dilated_attention.engine.blocks.documents import request_of
from dilated_attention.engine.blocks.launch import backward_lists, forward_lists
from dilated_attention.engine.blocks.lists import select_rows
from dilated_attention.engine.branches.launches import Into
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.prepare import select_backend
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.pattern import pattern_from_spec
from dilated_attention.pattern.blocks.block_lists import BlockLists


def lists_of_heads(lists: BlockLists, heads: Range) -> BlockLists:
    """Returns the lists of query heads [first, last); lists that all heads share stay as they are."""
    if lists.num_heads == 1:
        return lists
    assert lists.num_batch == 1
    first, last = heads[0] * lists.num_rows, heads[1] * lists.num_rows
    starts = lists.row_starts[first : last + 1]
    low, high = (int(x) for x in starts[[0, -1]].tolist())
    masks = None if lists.masks is None else lists.masks[low:high]
    found = replace(lists, num_heads=heads[1] - heads[0], row_starts=starts - low, columns=lists.columns[low:high], masks=masks)
    return _without_unused_masks(found)


def _without_unused_masks(lists: BlockLists) -> BlockLists:
    """Drops masks that only other rows or heads have, because more kernels support lists without masks."""
    if lists.masks is None or bool((lists.masks >= 0).any()):
        return lists
    return replace(lists, masks=None, bits=lists.bits[:0], interval=None)


def lists_of_memory(lists: BlockLists, keys: Range) -> BlockLists:
    """Returns the lists over the keys at positions [low, high) of the document alone, which begin with a block. A last block that goes on
    beyond them is dropped; lists that serve several lengths may also name others, of which no pair is left."""
    size, (low, high) = lists.k_block, keys
    last = -(-high // size) if high == lists.num_keys else high // size
    inside = (lists.columns >= low // size) & (lists.columns < last)
    moved = replace(
        lists,
        num_keys=high - low,
        row_starts=torch.nn.functional.pad(inside.cumsum(0, dtype=torch.int32), (1, 0))[lists.row_starts.long()],
        columns=lists.columns[inside] - low // size,
        masks=None if lists.masks is None else lists.masks[inside],
        interval=None if lists.interval is None else tuple((x - low).clamp(0, high - low) for x in lists.interval),
    )
    return _without_unused_masks(moved)


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockPart(Part):
    """One document's query blocks and some heads of them, on rows of a step's memory that begin at position ``first_key``. ``place``: of
    the launch's rows (whole blocks) those that the rank holds, None for all; ``positions``: (L,) of the launch's rows, in the whole."""

    settings: CallSettings
    place: torch.Tensor | None
    positions: torch.Tensor
    first_key: int
    lists: BlockLists

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Masks, into: Into | None = None) -> Pair:
        q, k, v = self._launched(q, 1), k[:, self.key_rows], v[:, self.key_rows]
        backend = self.backend(q, k, masks.padding is not None, False)
        to = None if into is None else into[0]
        assert to is None or self.place is None, "rows that are not adjacent have no view"
        out, lse = forward_lists(backend, self.lists, q, k, v, self._options(q, masks), into=to)  # type: ignore[arg-type]
        return (out, lse) if self.place is None else (out.index_select(1, self.place), lse.index_select(2, self.place))

    def backward(self, tensors: Tensors, dlse: torch.Tensor | None, masks: Masks, into: Into | None = None) -> Tensors:
        dout, q, k, v, out, lse = tensors
        # for rows that the rank does not hold, weights and gradients are 0
        dout, q, out = (self._launched(x, 1) for x in (dout, q, out))
        k, v = k[:, self.key_rows], v[:, self.key_rows]
        dlse = None if dlse is None else self._launched(dlse, 2)
        backend, options = self.backend(q, k, masks.padding is not None, True), self._options(q, masks)
        tensors = (dout, q, k, v, out, self._launched(lse, 2, torch.inf))
        to = None if into is None else into[0]
        dq, dk, dv = backward_lists(backend, self.lists, tensors, options, dlse, into=to)  # type: ignore[arg-type]
        return dq if self.place is None else dq.index_select(1, self.place), dk, dv

    def _launched(self, x: torch.Tensor, dim: int, value: float = 0.0) -> torch.Tensor:
        """Gathers the launch's rows of the rank's x along ``dim``; rows that the rank does not hold are ``value``."""
        if self.place is None:
            assert isinstance(self.rows, slice)
            return x.narrow(dim, self.rows.start, self.rows.stop - self.rows.start)
        shape = list(x.shape)
        shape[dim] = len(self.positions)
        return x.new_full(shape, value).index_copy_(dim, self.place, x.index_select(dim, self.rows))  # type: ignore[arg-type]

    def _options(self, q: torch.Tensor, masks: Masks) -> Options:
        settings, first, count = self.settings, self.first_key, self.key_rows.stop - self.key_rows.start
        padding = None if masks.padding is None else masks.padding[:, first : first + count]
        dropout = None
        if settings.dropout_p:
            batch, device = q.shape[0], q.device
            positions = torch.arange(first, first + count, device=device)
            queries, keys = (x.expand(batch, -1) for x in (self.positions, positions))
            entries, heads = torch.arange(batch, device=device), torch.arange(*self.heads, device=device)
            dropout = Dropout(settings.dropout_p, masks.seed, entries, heads, queries, keys)
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        return Options(settings.scale, mask=Mask(padding), dropout=dropout, deterministic=deterministic, softcap=settings.softcap)

    def backend(self, q: torch.Tensor, k: torch.Tensor, has_padding: bool, is_backward: bool) -> Backend | None:
        """Returns the backend of a pass on tensors like these, or raises BackendUnavailable; None if no key is kept."""
        if not self.lists.num_entries or not q.shape[0]:
            return None
        kind = (is_backward, has_padding, q.stride(), k.stride())
        if kind not in self.passes:
            request = request_of(self.lists, (q, k), self.settings, has_padding, is_backward)
            self.passes[kind] = select_backend(request, self.settings)
        return self.passes[kind]  # type: ignore[no-any-return]


def make_block_steps(
    ring_problem: RingBlockProblem,
    rank: int,
    head_steps: tuple[int, ...],
    device: torch.device,
    branches: RingProblem | None,
    settings: CallSettings,
) -> tuple[tuple[Step, ...], tuple[tuple[BlockPart, ...], ...], KeySpan]:
    """Returns a rank's steps, what it computes of the blocks in each, and the span of keys that it gathers. ``head_steps``: key/value heads
    of each step; ``branches``: dilated branches on the same keys; ``settings``: of the blocks alone."""
    assert sum(head_steps) == ring_problem.num_kv_heads
    needs, ratio = needs_of(ring_problem, device), ring_problem.num_heads // ring_problem.num_kv_heads
    low, high = key_span(ring_problem, needs, rank)
    if branches is not None and high:
        other = branch_span(branches, rank)
        low, high = aligned_span(branches, (min(low, other.start), max(high, other.end)), ring_problem.pattern.k_block)
    documents = tuple((max(a, low) - low, min(b, high) - low) for a, b in ring_problem.documents if a < high and b > low)

    steps, parts = [], [list[BlockPart]() for _ in head_steps]
    for index, kv_heads in enumerate(heads_of(head_steps)):

        @functools.cache
        def needed(reader: int, kv_heads: Range = kv_heads) -> Needed:
            return needed_keys(ring_problem, needs, reader, kv_heads, branches)

        steps.append(make_step(ring_problem.shards, rank, needed, kv_heads, (low, high), f"heads {index + 1} of {len(head_steps)}", device))
    own = torch.cat([torch.arange(0), *(torch.arange(*run) for run in ring_problem.shards[rank])])
    for document in ring_problem.documents:
        rows = query_blocks(ring_problem, rank, document)
        if not len(rows):
            continue
        lists, (start, end), block = lists_of(ring_problem, document, device), document, ring_problem.pattern.q_block
        if len(rows) < lists.num_rows:
            lists = select_rows(lists, rows)
        positions = (rows[:, None] * block + torch.arange(block)).flatten() + start
        positions = positions[positions < end]
        at = torch.searchsorted(own, positions)
        place = (own[at.clamp(max=len(own) - 1)] == positions).nonzero()[:, 0]
        held, is_whole = at[place], len(place) == len(positions)
        keys = max(start, low), min(end, high)
        common: dict[str, Any] = {
            # whole blocks of one document lie side by side
            "rows": slice(int(held[0]), int(held[-1]) + 1) if is_whole else held.to(device),
            "place": None if is_whole else place.to(device),
            "key_rows": slice(keys[0] - low, keys[1] - low),
            "positions": positions.to(device),
            "first_key": keys[0],
            "settings": settings,
        }
        for some, step in zip(parts, steps, strict=True):
            heads = step.kv_heads[0] * ratio, step.kv_heads[1] * ratio
            of_step = lists_of_heads(lists, heads)
            if keys != document:
                of_step = lists_of_memory(of_step, (keys[0] - start, keys[1] - start))
            some.append(BlockPart(heads=heads, lists=of_step if of_step.columns.device == device else of_step.on(device), **common))
    return tuple(steps), tuple(map(tuple, parts)), KeySpan(low, high, documents)


def make_block_setup(
    members: Members, tensors: Tensors, documents: tuple[Range, ...], settings: CallSettings, ring: RingCall, padding: torch.Tensor | None
) -> RingSetup:
    """Makes the setup of calls like this one; raises BackendUnavailable if this rank has no kernels for some pass."""
    q, k, _ = tensors
    me, device = members.rank, q.device
    held = tuple(ascending_runs(spans(ring.seq_len, rank, members.size, ring.layout)) for rank in range(members.size))
    heads = q.shape[2], k.shape[2]
    ring_problem = RingBlockProblem(pattern_from_spec(settings.blocks), documents, held, *heads, settings.is_causal)
    needs = needs_of(ring_problem, device)
    branches: RingProblem | None = None
    if settings.branches is not None:
        check_branches(settings, tensors, ring.seq_len, has_padding=padding is not None)
        branches = RingProblem(settings.pattern, documents, held, *heads, settings.is_causal)
    # heads that run different branches are not divided
    forced = 1 if branches is not None and branches.pattern.branch_heads != "all" else ring.head_steps
    sizes, training = (k.shape[0], k.shape[3], k.element_size()), settings.needs_grad
    way = block_steps(ring_problem, needs, sizes, device_memory(device), branches, needs_grad=training, forced=forced)
    steps, parts, span = make_block_steps(ring_problem, me, way, device, branches, settings)
    everyone = (needed_keys(ring_problem, needs, rank, (0, k.shape[2]), branches) for rank in range(members.size))
    for step, some in zip(steps, parts, strict=True):
        for part in some:
            _check_backends(part, step, q, k, padding is not None)
    layers = [Layer(StepParts(parts, q, steps))]
    if branches is not None:
        layers.insert(0, Layer(StepParts([parts_of(branches, settings, step, me, span) for step in steps], q, steps)))
    return RingSetup(
        steps=steps,
        nbytes=sum({id(part.lists): part.lists.nbytes for some in parts for part in some}.values()),
        exchanges=any(x.pieces for x in everyone),
        layers=tuple(layers),
        digest=needs.digest,
    )


def _check_backends(part: BlockPart, step: Step, q: torch.Tensor, k: torch.Tensor, has_padding: bool) -> None:
    """Chooses the backends of a part before any rank sends anything."""
    keys, rows, (B, _, _, D) = step.of_heads(k), step.local(part.key_rows), k.shape
    if rows is None:
        memory = torch.empty((step.rows, step.num_kv_heads, B, 2 * D), dtype=k.dtype, device="meta")
        keys, rows = memory.permute(2, 0, 1, 3)[..., :D], part.key_rows
    for is_backward in (False, True) if part.settings.needs_grad else (False,):
        part.backend(q[:, :, slice(*part.heads)], keys[:, rows], has_padding, is_backward)
