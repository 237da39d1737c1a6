"""Plans a call on a sharded sequence as steps, each an exchange of key rows and the launches that read them.

Every rank computes the plans of all ranks from what all of them know – N, the layout, the pattern, the documents – so no rank has to ask
another: rank s sends rank r exactly the rows that the launches of r's plan read and s holds.

    local part   a rank's queries on the keys of the same ranges, by the single-device engine; nothing is exchanged
    steps        its queries on keys gathered in *buffers*, one exchange per step; step t + 1 is exchanged while t is computed

Exchanges differ in how the needed keys are divided into steps:

    all_gather, one dense branch    no local part; one step per group of key/value heads, with all keys that the rank's queries see
    all_gather, several branches    the local part, then one step with all keys of other ranks
    ring                            the local part, then one step for each distance h: the keys of rank r − h

Positions are always those in the whole sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dilated_attention.engine.branches.plan import Problem, Range, Shape, make_plan
from dilated_attention.engine.branches.views import Rows
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True)
class RingProblem:
    """What is computed, and which rank holds what; equal on all ranks.

    Args:
        shape: the shape of the whole sequence; ``queries`` and ``keys`` are all of it.
        shards: the position ranges that each rank holds, in the order of its rows.
        exchange: ``"all_gather"`` or ``"ring"``.
        head_steps: the number of steps of an all_gather of one dense branch, a divisor of the key/value heads.
    """

    pattern: DilatedPattern
    shape: Shape
    shards: tuple[tuple[Range, ...], ...]
    exchange: str
    head_steps: int = 1

    @property
    def size(self) -> int:
        return len(self.shards)

    @property
    def is_fresh(self) -> bool:
        """Whether every row is written by one step alone, so that nothing is merged between steps."""
        return self.exchange == "all_gather" and self.is_dense

    @property
    def is_dense(self) -> bool:
        """Whether there is one branch with a single segment and dilation rate 1."""
        return self.pattern.dilation_rates == (1,) and self.pattern.segment_lengths[0] >= self.shape.keys[1]


@dataclass(frozen=True, slots=True)
class Source:
    """Rows [at, at + count) of a buffer are every step-th row of ``rank`` from its row ``start`` on."""

    rank: int
    at: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Key rows gathered in one buffer: row i of the g-th head is position first + shift·g + step·i.

    Args:
        heads: (first, step, count) of the key/value heads, counted over the whole model.
        sources: which ranks hold the rows, in order of rows.
    """

    heads: tuple[int, int, int]
    shift: int
    first: int
    step: int
    count: int
    sources: tuple[Source, ...]

    @property
    def owner(self) -> int | None:
        """The rank that holds all rows, evenly spaced, so that it can read them without a copy; None if there is none."""
        return self.sources[0].rank if len(self.sources) == 1 else None

    def local_rows(self, source: Source) -> Rows:
        """Returns the rows of a source on its rank."""
        start, step, count = self.heads
        return Rows(source.start, 1, 1, source.count, self.step, start, step, count, self.shift)


@dataclass(frozen=True, slots=True)
class RingLaunch:
    """One dense problem: ``queries`` are rows of the rank, ``keys`` rows of a buffer (the rank's own rows if it is the owner).

    Args:
        first_key: the buffer's row that is the first key.
    """

    problem: Problem
    buffer: int
    first_key: int
    queries: Rows
    keys: Rows


@dataclass(frozen=True, slots=True)
class Step:
    what: str
    buffers: tuple[Buffer, ...]
    launches: tuple[RingLaunch, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does.

    Args:
        local_ranges: the ranges of its queries that the engine first computes on the keys of the same ranges.
        covered: whether every row is written by some launch; only meaningful without a local part.
        single: whether no row is written twice; only meaningful without a local part.
    """

    local_ranges: tuple[Range, ...]
    steps: tuple[Step, ...]
    covered: bool
    single: bool


@functools.lru_cache(maxsize=256)
def rank_plan(ring_problem: RingProblem, rank: int) -> RankPlan:
    spans = ring_problem.shards[rank]
    if ring_problem.is_fresh:
        pairs = [(span, ring_problem.shape.keys) for span in spans]
        steps = [
            _step(ring_problem, rank, f"heads {i + 1} of {ring_problem.head_steps}", pairs, heads)
            for i, heads in enumerate(_head_ranges(ring_problem))
        ]
        rows = sum(launch.problem.q_len * launch.problem.heads.count for step in steps for launch in step.launches if launch.problem.first)
        covered = rows == ring_problem.shape.num_heads * sum(end - start for start, end in spans)
        single = all(launch.problem.first for step in steps for launch in step.launches)
        return RankPlan((), tuple(steps), covered, single)
    N = ring_problem.shape.keys[1]
    if ring_problem.exchange == "ring":
        # every rank has the same number of steps, including empty ones
        steps = [hop(ring_problem, rank, index) for index in range(ring_problem.size)]
    else:
        # the keys before a rank's queries and those after them are two separate ranges
        pairs = [(span, keys) for span in spans for keys in ((0, span[0]), (span[1], N)) if keys[0] < keys[1]]
        steps = [_step(ring_problem, rank, "keys of longer branches", pairs)]
    return RankPlan(spans, tuple(steps), covered=True, single=False)


@functools.lru_cache(maxsize=1024)
def hop(ring_problem: RingProblem, rank: int, index: int) -> Step:
    """Returns a ring's step with the keys of the rank ``index`` places before; for 0, the rank's own runs, each with the others."""
    spans, others = ring_problem.shards[rank], ring_problem.shards[(rank - index) % ring_problem.size]
    pairs = [(span, other) for span in spans for other in others if index or other != span]
    return _step(ring_problem, rank, f"hop {index}" if index else "own keys", pairs)


def _head_ranges(ring_problem: RingProblem) -> Iterator[Range]:
    size = ring_problem.shape.num_heads // ring_problem.head_steps
    return ((i * size, (i + 1) * size) for i in range(ring_problem.head_steps))


def _step(ring_problem: RingProblem, rank: int, what: str, pairs: Iterable[tuple[Range, Range]], heads: Range | None = None) -> Step:
    """Returns a step of some (query range, key range) pairs, of ``heads`` alone if given."""
    wanted = [(span, problem) for span, keys in pairs for problem in _problems(ring_problem, span, keys, heads)]
    head, kv_head = (0, 0) if heads is None else (heads[0], heads[0] * ring_problem.shape.num_kv_heads // ring_problem.shape.num_heads)
    buffers, places = _buffers(ring_problem, [problem for _, problem in wanted], kv_head)
    launches = []
    for (span, problem), place in zip(wanted, places, strict=True):
        buffer = buffers[place]
        group = problem.heads
        row = row_of(ring_problem.shards[rank], problem.q_start) if problem.q_len else 0
        assert span[0] <= problem.q_start and problem.q_start + (problem.q_len - 1) * problem.step < span[1]
        queries = Rows(row, 1, 1, problem.q_len, problem.step, group.start + head, group.step, group.count, group.shift)
        index = (problem.k_start - buffer.first) // buffer.step
        if buffer.owner == rank:
            rows = buffer.local_rows(buffer.sources[0])
            keys = Rows(rows.start + index * buffer.step, 1, 1, problem.k_len, buffer.step, *buffer.heads, buffer.shift)
        else:
            keys = Rows(index, 1, 1, problem.k_len, 1, 0, 1, buffer.heads[2])
        launches.append(RingLaunch(problem, place, index, queries, keys))
    # launches that write rows come before those that merge into them; then the longest first, so that short ones fill the end
    launches.sort(key=lambda launch: (not launch.problem.first, -launch.problem.k_len))
    return Step(what, tuple(buffers), tuple(launches))


def _problems(ring_problem: RingProblem, queries: Range, keys: Range, heads: Range | None) -> tuple[Problem, ...]:
    if queries[0] >= queries[1] or keys[0] >= keys[1]:
        return ()
    whole = ring_problem.shape
    shape = Shape(
        num_heads=whole.num_heads,
        num_kv_heads=whole.num_kv_heads,
        queries=queries,
        keys=keys,
        documents=whole.documents,
        is_causal=whole.is_causal,
        window=whole.window,
        window_block=whole.window_block,
        heads=heads,
        shifted_heads=whole.shifted_heads and has_even_cuts(ring_problem),
        aligned_last=whole.aligned_last,
    )
    problems = make_plan(ring_problem.pattern, shape).problems
    assert all(problem.segments == 1 for problem in problems), "ranges that do not meet share no whole segment"
    return problems


@functools.lru_cache(maxsize=256)
def has_even_cuts(ring_problem: RingProblem) -> bool:
    """Whether every head, counting from its own offset, has the same number of positions on either side of every rank's bounds."""
    if len(ring_problem.shape.documents) > 1:
        return max(ring_problem.pattern.dilation_rates) == 1
    bounds = {bound for spans in ring_problem.shards for span in spans for bound in span}
    return all(
        (bound % length) % rate == 0
        for length, rate in ring_problem.pattern.branches
        for bound in bounds
        if bound < ring_problem.shape.keys[1]
    )


def _buffers(ring_problem: RingProblem, problems: list[Problem], kv_head: int) -> tuple[list[Buffer], list[int]]:
    """Returns the fewest buffers that hold every problem's keys in consecutive rows, and the index of each problem's buffer."""
    families: dict[object, list[int]] = {}
    for index, problem in enumerate(problems):
        group = problem.heads
        where = None if problem.step == 1 else (problem.branch, problem.k_start % problem.step, _segment(ring_problem, problem))
        families.setdefault((group.kv_start, group.kv_step, group.kv_count, group.shift, problem.step, where), []).append(index)
    buffers: list[Buffer] = []
    places = [0] * len(problems)
    for members in families.values():
        members.sort(key=lambda index: problems[index].k_start)
        joined: list[list[int]] = []
        end = None
        for index in members:
            problem = problems[index]
            if end is None or problem.k_start > end:
                joined.append([])
                end = problem.k_start
            joined[-1].append(index)
            end = max(end, problem.k_start + problem.k_len * problem.step)
        for together in joined:
            first = problems[together[0]].k_start
            step = problems[together[0]].step
            count = max((problems[i].k_start - first) // step + problems[i].k_len for i in together)
            group = problems[together[0]].heads
            heads = (group.kv_start + kv_head, group.kv_step, group.kv_count)
            for index in together:
                places[index] = len(buffers)
            buffers.append(Buffer(heads, group.shift, first, step, count, _sources(ring_problem, first, step, count)))
    return buffers, places


def _segment(ring_problem: RingProblem, problem: Problem) -> tuple[int, int]:
    length = ring_problem.pattern.segment_lengths[problem.branch]
    for index, (start, end) in enumerate(ring_problem.shape.documents):
        if start <= problem.k_start < end:
            return index, (problem.k_start - start) // length
    raise AssertionError("every key is in a document")


def _sources(ring_problem: RingProblem, first: int, step: int, count: int) -> tuple[Source, ...]:
    found = []
    for rank, spans in enumerate(ring_problem.shards):
        row = 0
        for start, end in spans:
            low = min(count, max(0, -(-(start - first) // step)))
            high = min(count, max(0, -(-(end - first) // step)))
            if low < high:
                found.append(Source(rank, low, high - low, row + first + step * low - start))
            row += end - start
    found.sort(key=lambda source: source.at)
    assert sum(source.count for source in found) == count, "every position is held by one rank"
    return tuple(found)


def row_of(spans: tuple[Range, ...], position: int) -> int:
    row = 0
    for start, end in spans:
        if start <= position < end:
            return row + position - start
        row += end - start
    raise AssertionError(f"position {position} is not held here")
