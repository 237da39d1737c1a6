"""Turns a pattern and the shapes of one call into a Plan: dense problems on strided views, each exact on its own keys.

Every problem is a full rectangle, a causal square, or a band (sliding window), so that kernels cannot disagree on how to align its
mask. The exception is a causal rectangle, for backends that declare how they align it (``aligned_last``). A query range or key range
(decoding, a chunk, a rank's shard) cuts problems only at its edges.

Positions are those of the whole sequence; ``views.py`` turns them into strides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dilated_attention.engine.branches.heads import HeadGroup, Member, head_groups
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern, taken

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """``segments`` equal attention problems, ``stride`` positions apart, on every ``step``-th position of each.

    Args:
        branch: index of the branch in the pattern.
        q_start, q_len: first query position, and number of queries per segment.
        k_start, k_len: first key position, and number of keys per segment.
        causal: query i of q_len sees keys up to i + k_len − q_len, so the last query sees the last key. The problem is square unless
            the backend aligns its causal mask this way.
        band: allowed range of (key index − query index), for windows.
        zero_keys: z of ``tail="zero_keys"``.
        opens: no earlier problem of the same branch wrote these (query, head) rows.
        first: no earlier problem of the whole plan did.
    """

    branch: int
    heads: HeadGroup
    segments: int
    stride: int
    step: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    causal: bool
    band: tuple[int | None, int | None] | None
    zero_keys: int
    opens: bool
    first: bool

    @property
    def pairs(self) -> int:
        """Number of (query, key) products computed, not counting the zero keys."""
        rows = self.segments * self.heads.count
        if self.causal:
            return rows * (self.q_len * (self.q_len + 1) // 2 + self.q_len * (self.k_len - self.q_len))
        return rows * self.q_len * self.k_len


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Problems in the order they are merged. A plan is equal to itself alone, which makes it a quick key of what is made once from it.

    Args:
        covered: every (query, head) row is written by some problem, so outputs need no initial value.
        single: no row is written twice, so nothing is merged.
    """

    problems: tuple[Problem, ...]
    covered: bool
    single: bool

    @property
    def pairs(self) -> int:
        return sum(problem.pairs for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan depends on in addition to the pattern. ``documents`` are (start, end) pairs that partition the keys."""

    num_heads: int
    num_kv_heads: int
    queries: Range
    keys: Range
    documents: tuple[Range, ...]
    is_causal: bool
    window: tuple[int | None, int | None] | None = None
    # most queries of one problem under a window: a kernel without native windows computes and masks its whole problem
    window_block: int | None = None
    # plan only these heads, numbered from the first of them; groups that share a key/value head must be whole
    heads: Range | None = None
    # whether one problem may hold heads of several offsets; masks by position need a single offset per problem
    shifted_heads: bool = True
    # causal problems may have more keys than queries, since the backend aligns the last query with the last key
    aligned_last: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether some position has no query or no key."""
        return self.queries != self.keys


@functools.lru_cache(maxsize=128)
def make_plan(pattern: DilatedPattern, shape: Shape) -> Plan:
    """Returns the dense problems whose merged result is the attention of ``pattern``."""
    problems: list[Problem] = []
    seen_heads: set[int] = set()
    rows_written = 0
    first_head, last_head = shape.heads or (0, shape.num_heads)
    branch_offsets = pattern.offsets(shape.num_heads)
    for branch, (length, rate) in enumerate(pattern.branches):
        offsets = branch_offsets[branch][first_head:last_head]
        runs = {o: tuple(_all_runs(length, rate, o, shape)) for o in set(offsets) if o != NOT_IN_BRANCH}
        shapes = {o: tuple(_relative(run, o) for _, run in found) for o, found in runs.items()}
        members = [Member(head, o, (shapes[o], head not in seen_heads)) for head, o in enumerate(offsets) if o != NOT_IN_BRANCH]
        for heads, leader in head_groups(members, shape.num_heads // shape.num_kv_heads, shape.shifted_heads):
            first = leader.head not in seen_heads
            for (start, end), run in runs[leader.offset]:
                zero = 0
                # only the part with the segment's first key adds the zero keys, so that a cut does not add them twice
                if not shape.is_causal and run.keys[0] == 0:
                    zero = pattern.zero_keys(branch, end - start, run.num_keys)
                for problem in _cut(run, branch, rate, min(length, end - start), heads, zero, first, shape):
                    problems.append(problem)
                    if problem.first:
                        rows_written += problem.segments * problem.q_len * heads.count
        seen_heads.update(member.head for member in members)
    covered = rows_written == (last_head - first_head) * (shape.queries[1] - shape.queries[0])
    single = all(problem.first for problem in problems)
    return Plan(tuple(problems), covered, single)


@functools.lru_cache(maxsize=128)
def branch_plans(plan: Plan) -> tuple[tuple[Plan, Plan], ...]:
    """Returns the problems of each branch twice: as a separate plan, and as a part of the whole."""
    found = []
    for index in sorted({problem.branch for problem in plan.problems}):
        problems = tuple(problem for problem in plan.problems if problem.branch == index)
        own = tuple(replace(problem, first=problem.opens) for problem in problems)
        separate = Plan(own, covered=False, single=all(problem.first for problem in own))
        found.append((separate, replace(plan, problems=problems)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal consecutive segments. Index i of a segment is its i-th taken position, first + step · i."""

    first: int
    segments: int
    num_keys: int
    queries: Range
    keys: Range


def _all_runs(length: int, rate: int, offset: int, shape: Shape) -> Iterator[tuple[Range, _Run]]:
    """Yields (document, run) for one offset, over all documents."""
    for document in shape.documents:
        for run in _segment_runs(length, rate, offset, *document, shape):
            yield document, run


def _relative(run: _Run, offset: int) -> _Run:
    """Returns the run with the offset removed, so that runs of heads that differ only in their offset compare equal."""
    return replace(run, first=run.first - offset)


def _segment_runs(length: int, rate: int, offset: int, start: int, end: int, shape: Shape) -> Iterator[_Run]:
    """Yields the segments of one document that hold both queries and keys, with equal neighbors joined into one run."""
    # from the later of the two first segments to the earlier of the two last ones; no other segment holds both
    whole = range(max(start, shape.queries[0], shape.keys[0]), min(end, shape.queries[1], shape.keys[1]))
    index = (whole.start - start) // length
    last = (whole.stop - 1 - start) // length
    while index <= last:
        first = start + index * length
        segments = 1
        if first >= whole.start and first + length <= whole.stop:
            segments = (whole.stop - first) // length
        num_keys = taken(min(length, end - first), rate, offset)
        queries = _indices(first + offset, rate, num_keys, shape.queries)
        keys = _indices(first + offset, rate, num_keys, shape.keys)
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield _Run(first + offset, segments, num_keys, queries, keys)
        index += segments


def _indices(first: int, step: int, count: int, positions: Range) -> Range:
    low = max(0, -(-(positions[0] - first) // step))
    high = min(count, max(0, -(-(positions[1] - first) // step)))
    return low, max(low, high)


def _cut(run: _Run, branch: int, step: int, stride: int, heads: HeadGroup, zero_keys: int, first: bool, shape: Shape) -> Iterator[Problem]:
    """Cuts one run into problems whose masks all kernels interpret in the same way."""

    def problem(queries: Range, keys: Range, causal: bool, opens: bool, band: tuple[int | None, int | None] | None = None) -> Problem:
        return Problem(
            branch=branch,
            heads=heads,
            segments=run.segments,
            stride=stride,
            # with a single row the step is unused, and it may exceed what a stride can hold
            step=step if max(queries[1] - queries[0], keys[1] - keys[0]) > 1 else 1,
            q_start=run.first + step * queries[0],
            q_len=queries[1] - queries[0],
            k_start=run.first + step * keys[0],
            k_len=keys[1] - keys[0],
            causal=causal,
            band=band,
            zero_keys=zero_keys,
            opens=opens,
            first=opens and first,
        )

    q0, q1 = run.queries
    k0, k1 = run.keys
    if shape.window is not None:
        assert step == 1, "windows are a special case of dense attention"
        yield from _cut_window(run, shape, problem)
    elif not shape.is_causal:
        yield problem((q0, q1), (k0, k1), False, True)
    elif q1 - q0 == 1:
        # a single query, as in decoding, sees a contiguous range of keys: one launch and no merge
        if k0 < min(k1, q1):
            yield problem((q0, q1), (k0, min(k1, q1)), False, True)
    else:
        # queries [q0, q1) see keys up to their own position: a rectangle for the keys before q0, then the square on the diagonal,
        # then a rectangle of the square's keys for queries beyond the last key
        opens = True
        if shape.aligned_last and k0 < q0 and q1 <= k1:
            yield problem((q0, q1), (k0, q1), True, True)
            return
        if k0 < min(k1, q0):
            yield problem((q0, q1), (k0, min(k1, q0)), False, True)
            opens = False
        s0, s1 = max(q0, k0), min(q1, k1)
        if s0 < s1:
            # one query and one key need no mask, and more kernels take a 1 × 1 problem without a causal mask
            yield problem((s0, s1), (s0, s1), s1 - s0 > 1, opens)
            if s1 < q1:
                yield problem((s1, q1), (s0, s1), False, opens)


def _cut_window(run: _Run, shape: Shape, problem: object) -> Iterator[Problem]:
    assert callable(problem) and shape.window is not None
    left, right = shape.window
    if shape.is_causal:
        right = 0 if right is None else min(right, 0)
    (q0, q1), (k0, k1) = run.queries, run.keys
    block = shape.window_block or (q1 - q0)
    for low in range(q0, q1, block):
        high = min(low + block, q1)
        first_key = k0 if left is None else max(k0, low - left)
        last_key = k1 if right is None else min(k1, high + right)
        if first_key < last_key:
            shift = low - first_key
            band = (None if left is None else shift - left, None if right is None else shift + right)
            yield problem((low, high), (first_key, last_key), False, True, band)
