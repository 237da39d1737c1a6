"""Turns a pattern and the shape of one call into dense problems on strided views, each exact on its own keys.

Every problem is a full rectangle, a causal square, or a band (sliding window), so that kernels cannot disagree on how to align its
mask. The exception is a causal rectangle, for backends that declare how they align it (``aligned_last``). A query range or key range
(decoding, a chunk, a rank's shard) cuts problems only at its edges.

Positions are those of the whole sequence; ``launches.py`` turns them into strides.

One launch takes heads with evenly spaced indices whose rows are shifted by a constant from head to head: a kernel reads
heads through a single stride. Suppose that head h takes the positions o_h, o_h + r, … Then heads of equal offset are one view with stride
s_H. Heads whose offsets grow evenly – the paper's o_h = h mod r, r heads at a time – are one view too, with
stride s_H + shift · s_N: the head stride carries the offset. So a branch takes min(r, H/r) launches instead of r.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern

# (head, offset, kind) of a head that runs a branch. Heads of equal kind have problems of the same shape
Member = tuple[int, int, Any]


class HeadGroup(NamedTuple):
    """Query heads start, start + step, … (``size`` of them) and the key/value heads kv_start, kv_start + kv_step, … that they read.

    Each of these key/value heads is read by equally many of the query heads.

    Args:
        shift: number of positions by which each head's rows are shifted from those of the previous head. If it is not 0, no two
            query heads share their keys, and kv_count is size (kv_step may be 0).
    """

    start: int
    step: int
    size: int
    kv_start: int
    kv_step: int
    kv_count: int
    shift: int = 0


# (group, head and offset of its first member)
Groups = list[tuple[HeadGroup, int, int]]


def head_groups(members: Sequence[Member], group_size: int, shifted: bool) -> Groups:
    """Divides members into few groups, and returns these.

    Args:
        members: in the order of their heads.
        group_size: number of query heads that read one key/value head.
        shifted: whether groups may hold heads with different offsets.
    """
    # plans of other lengths, or of a ring's steps, differ in their rows but not in their heads: once numbers replace the kinds, such plans
    # find their groups in the cache
    kinds: dict[Any, int] = {}
    return _grouped(tuple([(head, offset, kinds.setdefault(kind, len(kinds))) for head, offset, kind in members]), group_size, shifted)


@functools.lru_cache(maxsize=1024)
def _grouped(members: tuple[Member, ...], group_size: int, shifted: bool) -> Groups:
    best: Groups = []
    indices = [head for head, _, _ in members]
    span = indices[-1] - indices[0] if indices else 0
    # between contiguous heads every step occurs; computing all differences takes seconds from a thousand heads on
    is_contiguous = span == len(indices) - 1
    steps: Sequence[int] = range(1, span + 1) if is_contiguous else sorted({b - a for a in indices for b in indices if b > a})
    for same_offset in (True, False) if shifted else (True,):
        # fewer groups are impossible: a group never holds two kinds, nor two offsets unless it is shifted
        fewest = len({(kind, offset if same_offset else 0) for _, offset, kind in members})
        for step in steps or (1,):
            if best and len(best) <= fewest:
                break
            best = _deal(members, step, group_size, same_offset, len(best) or len(members) + 1) or best
    return best


def _deal(members: Sequence[Member], step: int, group_size: int, same_offset: bool, fewer_than: int) -> Groups:
    """Returns groups of heads ``step`` apart, each as long as one launch can read; an empty list if that takes ``fewer_than`` or more."""
    waiting = {member[0]: member for member in members}
    groups: Groups = []
    for member in members:
        head, offset, _ = member
        if head not in waiting:
            continue
        if len(groups) + 1 == fewer_than:
            return []
        run = [waiting.pop(head)]
        while (after := waiting.get(run[-1][0] + step)) is not None and _joins(run, after, same_offset):
            del waiting[after[0]]
            run.append(after)
        # a launch may not be able to read the whole run: its last heads wait for other groups
        while (group := _as_group(run, group_size)) is None:
            last = run.pop()
            waiting[last[0]] = last
        groups.append((group, head, offset))
    return groups


def _joins(run: list[Member], after: Member, same_offset: bool) -> bool:
    """Whether a head can follow a run of heads in one group: it is of their kind and continues the shift of their offsets."""
    (_, first_offset, first_kind), (_, last_offset, _), (_, offset, kind) = run[0], run[-1], after
    shift = offset - last_offset
    # torch has no negative strides, and a head stride of shift · s_N may outweigh s_H
    if kind != first_kind or shift < 0 or (shift == 0) != same_offset:
        return False
    return len(run) == 1 or shift == run[1][1] - first_offset


def _as_group(run: list[Member], group_size: int) -> HeadGroup | None:
    """Returns the run as one group, or None if the key/value heads it reads are not evenly spaced."""
    heads = [head for head, _, _ in run]
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    shift = run[1][1] - run[0][1] if len(run) > 1 else 0
    kv_of = [head // group_size for head in heads]
    # shifted heads have keys of their own, also where they share a key/value head
    kv_heads = kv_of if shift else sorted(set(kv_of))
    kv_step = kv_heads[1] - kv_heads[0] if len(kv_heads) > 1 else 1
    per_kv, rest = divmod(len(heads), len(kv_heads))
    if rest or kv_of != [kv_heads[0] + kv_step * (i // per_kv) for i in range(len(heads))]:
        return None
    return HeadGroup(heads[0], step, len(heads), kv_heads[0], kv_step, len(kv_heads), shift)


Range = tuple[int, int]
Band = tuple[int | None, int | None]


class Problem(NamedTuple):
    """``segments`` equal attention problems, ``stride`` positions apart, on every ``step``-th position of each.

    Args:
        branch: index of the branch in the pattern.
        heads: the query heads that one launch takes together.
        q_start, q_len: first query position, and number of queries per segment.
        k_start, k_len: first key position, and number of keys per segment.
        causal: query i of q_len sees keys up to i + k_len − q_len, so the last query sees the last key. The problem is square unless
            the backend aligns its causal mask this way.
        band: allowed range of (key index − query index), for windows.
        zero_keys: z of ``tail="zero_keys"``.
        opens: no earlier problem of the same branch wrote results for these (query, head) rows.
        first: no earlier problem of any branch did.
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
    band: Band | None
    zero_keys: int
    opens: bool
    first: bool

    @property
    def pairs(self) -> int:
        """The number of (query, key) products, over all heads and segments, without the zero keys."""
        rows = self.segments * self.heads.size
        if self.causal:
            return rows * (self.q_len * (self.q_len + 1) // 2 + self.q_len * (self.k_len - self.q_len))
        return rows * self.q_len * self.k_len


class Problems(NamedTuple):
    """The problems of a call in the order they are merged.

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

    def branches(self) -> Iterator[tuple[Problems, Problems]]:
        """Yields (separate, part) for each branch: its problems as if there were no other branch, and as they are in this call."""
        for index in sorted({problem.branch for problem in self.problems}):
            part = tuple([problem for problem in self.problems if problem.branch == index])
            separate = tuple([problem._replace(first=problem.opens) for problem in part])
            yield Problems(separate, False, all(problem.first for problem in separate)), self._replace(problems=part)


class Shape(NamedTuple):
    """What problems depend on in addition to the pattern. ``documents`` are (start, end) pairs that partition the keys."""

    num_heads: int
    num_kv_heads: int
    queries: Range
    keys: Range
    documents: tuple[Range, ...]
    is_causal: bool
    window: Band | None = None
    # most queries of one problem under a window: a kernel without native windows computes and masks all of the problem's rectangle
    window_block: int | None = None
    # take only these query heads, and number them from the first one; those of one key/value head are all among them, or none is
    heads: Range | None = None
    # whether one problem may hold heads of several offsets; masks by position need a single offset per problem
    shifted_heads: bool = True
    # causal problems may have more keys than queries, since the backend aligns the last query with the last key
    aligned_last: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether some position has no query or no key."""
        return self.queries != self.keys


def whole_shape(num_heads: int, num_kv_heads: int, num_positions: int, is_causal: bool) -> Shape:
    """Returns the shape of the self-attention of one sequence."""
    whole = 0, num_positions
    return Shape(num_heads, num_kv_heads, whole, whole, (whole,), is_causal)


# cached apart from the problems, since offsets do not depend on the length: the plan of a new length is made while the GPU waits
@functools.lru_cache(maxsize=256)
def offsets_of(pattern: DilatedPattern, num_heads: int) -> tuple[tuple[int, ...], ...]:
    """Returns the offset of each branch and query head."""
    return pattern.offsets(num_heads)


@functools.lru_cache(maxsize=128)
def problems_of(pattern: DilatedPattern, shape: Shape) -> Problems:
    """Returns the dense problems whose merged result is the attention of ``pattern``."""
    problems: list[Problem] = []
    seen_heads: set[int] = set()
    rows_written = 0
    first_head, last_head = shape.heads or (0, shape.num_heads)
    branch_offsets = offsets_of(pattern, shape.num_heads)
    for branch, (length, rate) in enumerate(pattern.branches):
        offsets = branch_offsets[branch][first_head:last_head]
        runs = {o: _runs(length, rate, o, shape) for o in set(offsets) if o != NOT_IN_BRANCH}
        # heads that differ only in their offset have the same runs, apart from where these start
        kinds = {o: tuple([(run.start - o, *run[1:]) for run in of_offset]) for o, of_offset in runs.items()}
        members = [(head, o, (kinds[o], head not in seen_heads)) for head, o in enumerate(offsets) if o != NOT_IN_BRANCH]
        for heads, leader, offset in head_groups(members, shape.num_heads // shape.num_kv_heads, shape.shifted_heads):
            is_first = leader not in seen_heads
            for run, (q0, q1), (k0, k1), causal, opens, band in _cut(runs[offset], shape):
                zero_keys = 0
                # only the part with the segment's first key adds the zero keys, so that a cut does not add them twice
                if not shape.is_causal and run.keys[0] == 0:
                    zero_keys = pattern.zero_keys(branch, run.document_length, run.num_taken)
                # with a single row the step is unused, and it may exceed what a stride can hold
                step = rate if max(q1 - q0, k1 - k0) > 1 else 1
                # from ``stride`` to ``k_len``
                rows = min(length, run.document_length), step, run.start + rate * q0, q1 - q0, run.start + rate * k0, k1 - k0
                problems.append(Problem(branch, heads, run.segments, *rows, causal, band, zero_keys, opens, opens and is_first))
                if opens and is_first:
                    rows_written += run.segments * (q1 - q0) * heads.size
        seen_heads.update([member[0] for member in members])
    covered = rows_written == (last_head - first_head) * (shape.queries[1] - shape.queries[0])
    return Problems(tuple(problems), covered, all(problem.first for problem in problems))


class _Run(NamedTuple):
    """Equal consecutive segments of one document.

    Args:
        start: position that the first segment takes first. Index i of a segment is its i-th taken position, start + rate · i.
        segments: number of segments.
        num_taken: number of positions that a segment takes, with or without a query or key in this call.
        queries, keys: the indices that have a query, and those that have a key.
    """

    start: int
    segments: int
    num_taken: int
    queries: Range
    keys: Range
    document_length: int


def _runs(length: int, rate: int, offset: int, shape: Shape) -> list[_Run]:
    """Returns the segments of all documents that have both queries and keys, with equal neighbours joined into one run."""
    (q_first, q_last), (k_first, k_last) = shape.queries, shape.keys
    runs = []
    for start, end in shape.documents:
        # from the later of the two first segments to the earlier of the two last ones; no other segment holds both
        low, high = max(start, q_first, k_first), min(end, q_last, k_last)
        index, last = (low - start) // length, (high - 1 - start) // length
        while index <= last:
            begin = start + index * length
            segments = (high - begin) // length if begin >= low and begin + length <= high else 1
            first = begin + offset
            # ceil((positions − offset) / rate)
            count = -((offset - min(length, end - begin)) // rate)
            # indices of the positions that have a query, and of those that have a key
            q0, q1 = max(0, -((first - q_first) // rate)), min(count, -((first - q_last) // rate))
            k0, k1 = max(0, -((first - k_first) // rate)), min(count, -((first - k_last) // rate))
            if q0 < q1 and k0 < k1:
                runs.append(_Run(first, segments, count, (q0, q1), (k0, k1), end - start))
            index += segments
    return runs


def _cut(runs: list[_Run], shape: Shape) -> Iterator[tuple[_Run, Range, Range, bool, bool, Band | None]]:
    """Cuts runs into problems whose masks all kernels interpret in the same way, and yields (run, queries, keys, causal, opens, band)."""
    left, right = shape.window or (None, None)
    if shape.is_causal:
        right = 0
    for run in runs:
        (q0, q1), (k0, k1) = run.queries, run.keys
        if shape.window is not None:
            block = shape.window_block or (q1 - q0)
            for low in range(q0, q1, block):
                high = min(low + block, q1)
                first_key = k0 if left is None else max(k0, low - left)
                last_key = k1 if right is None else min(k1, high + right)
                if first_key < last_key:
                    shift = low - first_key
                    band = None if left is None else shift - left, None if right is None else shift + right
                    yield run, (low, high), (first_key, last_key), False, True, band
        elif not shape.is_causal:
            yield run, (q0, q1), (k0, k1), False, True, None
        elif q1 - q0 == 1:
            # a single query, as in decoding, sees a contiguous range of keys: one launch and no merge
            if k0 < min(k1, q1):
                yield run, (q0, q1), (k0, min(k1, q1)), False, True, None
        elif shape.aligned_last and k0 < q0 and q1 <= k1:
            yield run, (q0, q1), (k0, q1), True, True, None
        else:
            # queries [q0, q1) see keys up to their own position: a rectangle for the keys before q0, then the square on the diagonal,
            # then a rectangle of the square's keys for queries beyond the last key
            opens = k0 >= min(k1, q0)
            if not opens:
                yield run, (q0, q1), (k0, min(k1, q0)), False, True, None
            s0, s1 = max(q0, k0), min(q1, k1)
            if s0 < s1:
                # one query and one key need no mask, and more kernels take a 1 × 1 problem without a causal mask
                yield run, (s0, s1), (s0, s1), s1 - s0 > 1, opens, None
                if s1 < q1:
                    yield run, (s1, q1), (s0, s1), False, opens, None
