"""Determines which key rows each rank needs; every rank computes this for all ranks from what all of them know, so none asks another.

A rank needs a key if one of its queries may see it: both lie in one segment of some branch, the key at the offset of a head that shares
its key/value head, and causality and window allow it. Positions are always those in the whole sequence.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern

P = TypeVar("P", DilatedPattern, BlockPattern)


@dataclass(frozen=True)
class ShardedProblem(Generic[P]):
    """What is computed, and which rank holds what; equal on all ranks. ``documents``: (start, end) of each, which partition the sequence;
    ``shards``: each rank's position ranges in the order of its rows, ascending for a block pattern; ``window``: of dense attention."""

    pattern: P
    documents: tuple[Range, ...]
    shards: tuple[tuple[Range, ...], ...]
    num_heads: int
    num_kv_heads: int
    is_causal: bool
    window: tuple[int | None, int | None] | None = None

    @property
    def size(self) -> int:
        return len(self.shards)

    @property
    def seq_len(self) -> int:
        return self.documents[-1][1] if self.documents else 0

    @property
    def is_dense(self) -> bool:
        """Whether there is one branch with a single segment and dilation rate 1."""
        pattern = self.pattern
        return isinstance(pattern, DilatedPattern) and pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= self.seq_len


RingProblem = ShardedProblem[DilatedPattern]
RingBlockProblem = ShardedProblem[BlockPattern]


def needed_keys(problem: RingProblem, rank: int, device: torch.device) -> torch.Tensor:
    """Returns bool (Hk, N): the keys of other ranks that this rank needs, for each key/value head; (1, N) if all heads need the same."""
    pattern, H, Hk = problem.pattern, problem.num_heads, problem.num_kv_heads
    offsets = pattern.offsets(H)
    alike = all(len(set(row)) == 1 for row in offsets)
    mask = torch.zeros((1 if alike else Hk, problem.seq_len), dtype=torch.bool, device=device)
    group = H if alike else H // Hk
    for branch, (length, rate) in enumerate(pattern.branches):
        # which of r neighbours each key/value head takes
        taken = torch.zeros((mask.shape[0], rate), dtype=torch.bool)
        for head in range(H):
            if offsets[branch][head] != NOT_IN_BRANCH:
                taken[head // group, offsets[branch][head]] = True
        takes_all, taken = bool(taken.all()), taken.to(device)
        for start, low, high in keys_beyond(problem, length, problem.shards[rank]):
            if takes_all:
                mask[:, low:high] = True
                continue
            # windows, which alone cut the begin of a segment off, have no dilation
            assert low == start or rate == 1
            whole = low + (high - low) // rate * rate
            mask[:, low:whole].unflatten(1, (-1, rate)).logical_or_(taken[:, None])
            if whole < high:
                mask[:, whole:high].logical_or_(taken[:, : high - whole])
    for start, end in problem.shards[rank]:
        mask[:, start:end] = False
    return mask


def keys_beyond(problem: RingProblem, length: int, shard: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Returns (start of the segment, low, high) of the keys that a rank's queries may see in segments that reach beyond its ranges. Keys
    that overlap are one entry for several ranges in one segment, since ranges may be many."""
    found: list[tuple[int, int, int]] = []
    seen = (
        (first, *keys)
        for queries in shard
        for first, keys in segments_across(problem, length, queries)
        if keys[0] < queries[0] or keys[1] > queries[1]
    )
    for first, low, high in sorted(seen):
        if found and found[-1][0] == first and low <= found[-1][2]:
            found[-1] = (first, found[-1][1], max(high, found[-1][2]))
        else:
            found.append((first, low, high))
    return found


def segments_across(problem: RingProblem, length: int, queries: Range) -> Iterator[tuple[int, Range]]:
    """Yields (start of the segment, range of its keys that the queries may see) for the segments of the first and of the last query: the
    keys of the others are the rank's own."""
    start, end = queries
    if start >= end:
        return
    found = {_segment(problem.documents, length, position) for position in (start, end - 1)}
    left, right = problem.window or (None, None)
    if problem.is_causal:
        right = 0 if right is None else min(right, 0)
    for first, last in sorted(found):
        low, high = first, last
        if left is not None:
            low = max(low, max(start, first) - left)
        if right is not None:
            high = min(high, min(end, last) + right)
        if low < high:
            yield first, (low, high)


def _segment(documents: tuple[Range, ...], length: int, position: int) -> Range:
    """Returns the segment of a branch that holds a position, cut at the end of its document."""
    # the last document that starts at the position or before; one without positions ends where the next one starts
    start, end = documents[bisect.bisect_right(documents, position, key=_start) - 1]
    first = start + (position - start) // length * length
    return first, min(first + length, end)


def _start(document: Range) -> int:
    return document[0]


@dataclass(frozen=True)
class KeySpan:
    """The positions [start, end) whose keys a rank gathers, and the documents on them, counted from ``start``."""

    start: int
    end: int
    documents: tuple[Range, ...]

    def before(self, end: int) -> KeySpan:
        """Returns the span without the keys from position ``end`` on, which causal queries before it do not see."""
        high = min(end, self.end) - self.start
        count = bisect.bisect_left(self.documents, high, key=_start)
        return KeySpan(self.start, self.start + high, tuple((a, min(b, high)) for a, b in self.documents[:count]))

    def around(self, queries: Range) -> KeySpan:
        """Returns the span of the documents that the queries lie in: they see no keys of others."""
        low, high = (position - self.start for position in queries)
        first = bisect.bisect_right(self.documents, low, key=_start) - 1
        documents = self.documents[first : bisect.bisect_left(self.documents, high, key=_start)]
        start, end = documents[0][0], documents[-1][1]
        return KeySpan(self.start + start, self.start + end, tuple((a - start, b - start) for a, b in documents))


def key_span(problem: RingProblem, rank: int) -> KeySpan:
    """Returns a short range that holds a rank's own and needed keys and on which the pattern is the same as on the whole sequence."""
    own = [span for span in problem.shards[rank] if span[0] < span[1]]
    if not own:
        return KeySpan(0, 0, ())
    low, high = hull(problem, own)
    documents = [(a, b) for a, b in problem.documents if a < high and b > low]
    if problem.pattern.tail != "mask" and not problem.is_causal:
        # the number of zero keys of a segment depends on what comes after it
        high = documents[-1][1]
    if len(documents) > 1 or not _begins_alike(problem.pattern, documents[0][0], (low, high)):
        low = documents[0][0]
    return KeySpan(low, high, tuple((max(a, low) - low, min(b, high) - low) for a, b in documents))


def hull(problem: RingProblem, shard: Iterable[Range]) -> Range:
    """Returns the range of positions from the first to the last that some queries hold or may see; there must be queries."""
    # what the first and the last query of a range see reaches farther than what those between them do
    reach = [
        *shard,
        *(keys for length, _ in problem.pattern.branches for span in shard for _, keys in segments_across(problem, length, span)),
    ]
    return min(a for a, _ in reach), max(b for _, b in reach)


def _begins_alike(pattern: DilatedPattern, start: int, span: Range) -> bool:
    """Whether the pattern of a document that begins at ``start`` is the same when it is counted from the span's first position: every
    branch begins a segment there, or has the whole span in one segment and takes its positions at the same offsets."""
    low, high = span[0] - start, span[1] - start
    if pattern.tail != "mask" and low:
        return False
    return all(
        low % length == 0 or (low // length == (high - 1) // length and low % length % rate == 0) for length, rate in pattern.branches
    )


def aligned_span(problem: RingProblem, span: Range, block: int) -> Range:
    """Returns the span with an earlier start, from which branches and blocks of ``block`` positions are counted as in the document."""
    low, high = span
    start, end = next((start, end) for start, end in problem.documents if start <= low < end)
    if high > end or problem.pattern.tail != "mask":
        return start, high
    # a segment that holds the whole span need not begin with it, but its offsets must be the same
    step = math.lcm(block, *(length if length < high - start else rate for length, rate in problem.pattern.branches))
    return low - (low - start) % step, high
