"""Who needs whose keys: a call on a spread sequence as steps, each an exchange of key rows and the launches that read them.

Every rank works out the plans of all ranks from what all know – N, the layout, the pattern, the documents – so nobody is asked
for anything: rank s sends rank r exactly the rows that the launches of r's plan read and s holds.

    home    a rank's queries on the keys that lie around them, by the single-device engine; nothing travels
    steps   its queries on keys brought together in *buffers*, one exchange a step; step t + 1 travels while t is computed

Exchanges differ in how needs are dealt out to steps:

    all_gather, one dense branch    no home; a step for each group of key/value heads, with all keys that the rank's queries see
    all_gather, several branches    home, then one step with all keys from elsewhere
    ring                            home, then a step for each distance h: the keys of rank r − h

Positions are those of the whole sequence throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dilated_attention.engine.plan import Problem, Range, Shape, make_plan
from dilated_attention.engine.views import Rows
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True)
class Job:
    """What is computed, and who holds what: equal on all ranks.

    Args:
        shape: of the whole sequence; ``queries`` and ``keys`` are all of it.
        holdings: the position ranges that each rank holds, in the order of its rows.
        exchange: ``"all_gather"`` or ``"ring"``.
        head_steps: steps that an all_gather of one dense branch is cut into, a divisor of the key/value heads.
    """

    pattern: DilatedPattern
    shape: Shape
    holdings: tuple[tuple[Range, ...], ...]
    exchange: str
    head_steps: int = 1

    @property
    def size(self) -> int:
        return len(self.holdings)

    @property
    def is_fresh(self) -> bool:
        """Rows are written by one step alone, so nothing is merged between steps."""
        return self.exchange == "all_gather" and self.is_dense

    @property
    def is_dense(self) -> bool:
        """One branch of one segment and rate 1."""
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
    """Key rows brought together: row i of the g-th head is position first + shift·g + step·i.

    Args:
        heads: (first, step, count) of the key/value heads, counted in the whole model.
        sources: who holds them, in the order of rows.
    """

    heads: tuple[int, int, int]
    shift: int
    first: int
    step: int
    count: int
    sources: tuple[Source, ...]

    @property
    def owner(self) -> int | None:
        """The rank on which the rows lie evenly spaced already, so that nothing need be brought there."""
        return self.sources[0].rank if len(self.sources) == 1 else None

    def local_rows(self, source: Source) -> Rows:
        """The rows of a source on its rank."""
        start, step, count = self.heads
        return Rows(source.start, 1, 1, source.count, self.step, start, step, count, self.shift)


@dataclass(frozen=True, slots=True)
class Launch:
    """One dense problem: ``queries`` of the rank's rows, ``keys`` of a buffer's rows (of the rank's own where it is the owner).

    Args:
        first_key: the buffer's row that is the first of them.
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
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does.

    Args:
        home: the ranges of its queries that the engine first computes on their own keys.
        covered: without a home, every row is written by some launch.
        single: without a home, no row is written twice.
    """

    home: tuple[Range, ...]
    steps: tuple[Step, ...]
    covered: bool
    single: bool


@functools.lru_cache(maxsize=256)
def rank_plan(job: Job, rank: int) -> RankPlan:
    spans = job.holdings[rank]
    if job.is_fresh:
        steps = [_step(job, rank, f"heads {i + 1} of {job.head_steps}", [(span, job.shape.keys) for span in spans], heads)
                 for i, heads in enumerate(_head_ranges(job))]  # fmt: skip
        rows = sum(launch.problem.q_len * launch.problem.heads.count for step in steps for launch in step.launches if launch.problem.first)
        covered = rows == job.shape.num_heads * sum(end - start for start, end in spans)
        single = all(launch.problem.first for step in steps for launch in step.launches)
        return RankPlan((), tuple(steps), covered, single)
    N = job.shape.keys[1]
    if job.exchange == "ring":
        # every rank has as many steps as the others, empty ones too
        steps = [hop(job, rank, index) for index in range(job.size)]
    else:
        # nobody's queries are in the way between the keys before them and those after them, so these are two ranges
        pairs = [(span, keys) for span in spans for keys in ((0, span[0]), (span[1], N)) if keys[0] < keys[1]]
        steps = [_step(job, rank, "keys of longer branches", pairs)]
    return RankPlan(spans, tuple(steps), covered=True, single=False)


@functools.lru_cache(maxsize=1024)
def hop(job: Job, rank: int, index: int) -> Step:
    """Of a ring: the keys of the rank ``index`` places before; with 0 the rank's own runs, each for the others."""
    spans, others = job.holdings[rank], job.holdings[(rank - index) % job.size]
    pairs = [(span, other) for span in spans for other in others if index or other != span]
    return _step(job, rank, f"hop {index}" if index else "own keys", pairs)


def _head_ranges(job: Job) -> Iterator[Range]:
    size = job.shape.num_heads // job.head_steps
    return ((i * size, (i + 1) * size) for i in range(job.head_steps))


def _step(job: Job, rank: int, what: str, pairs: Iterable[tuple[Range, Range]], heads: Range | None = None) -> Step:
    """A step of some (query range, key range) pairs, of ``heads`` alone where given."""
    wanted = [(span, problem) for span, keys in pairs for problem in _problems(job, span, keys, heads)]
    head, kv_head = (0, 0) if heads is None else (heads[0], heads[0] * job.shape.num_kv_heads // job.shape.num_heads)
    buffers, places = _buffers(job, [problem for _, problem in wanted], kv_head)
    launches = []
    for (span, problem), place in zip(wanted, places, strict=True):
        buffer = buffers[place]
        group = problem.heads
        row = row_of(job.holdings[rank], problem.q_start) if problem.q_len else 0
        assert span[0] <= problem.q_start and problem.q_start + (problem.q_len - 1) * problem.step < span[1]
        queries = Rows(row, 1, 1, problem.q_len, problem.step, group.start + head, group.step, group.count, group.shift)
        index = (problem.k_start - buffer.first) // buffer.step
        if buffer.owner == rank:
            rows = buffer.local_rows(buffer.sources[0])
            keys = Rows(rows.start + index * buffer.step, 1, 1, problem.k_len, buffer.step, *buffer.heads, buffer.shift)
        else:
            keys = Rows(index, 1, 1, problem.k_len, 1, 0, 1, buffer.heads[2])
        launches.append(Launch(problem, place, index, queries, keys))
    # what writes rows before what merges into them; then the longest, which leave short ones to fill the end
    launches.sort(key=lambda launch: (not launch.problem.first, -launch.problem.k_len))
    return Step(what, tuple(buffers), tuple(launches))


def _problems(job: Job, queries: Range, keys: Range, heads: Range | None) -> tuple[Problem, ...]:
    if queries[0] >= queries[1] or keys[0] >= keys[1]:
        return ()
    whole = job.shape
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
        shifted_heads=whole.shifted_heads and has_even_cuts(job),
        aligned_last=whole.aligned_last,
    )
    problems = make_plan(job.pattern, shape).problems
    assert all(problem.segments == 1 for problem in problems), "ranges that do not meet share no whole segment"
    return problems


@functools.lru_cache(maxsize=256)
def has_even_cuts(job: Job) -> bool:
    """Every head finds as many of its positions on either side of every rank's bounds, counted from its own offset."""
    if len(job.shape.documents) > 1:
        return max(job.pattern.dilation_rates) == 1
    bounds = {bound for spans in job.holdings for span in spans for bound in span}
    return all((bound % length) % rate == 0 for length, rate in job.pattern.branches for bound in bounds if bound < job.shape.keys[1])


def _buffers(job: Job, problems: list[Problem], kv_head: int) -> tuple[list[Buffer], list[int]]:
    """The fewest buffers that hold every problem's keys in a row, and each problem's place among them."""
    families: dict[object, list[int]] = {}
    for index, problem in enumerate(problems):
        group = problem.heads
        where = None if problem.step == 1 else (problem.branch, problem.k_start % problem.step, _segment(job, problem))
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
            buffers.append(Buffer(heads, group.shift, first, step, count, _sources(job, first, step, count)))
    return buffers, places


def _segment(job: Job, problem: Problem) -> tuple[int, int]:
    length = job.pattern.segment_lengths[problem.branch]
    for index, (start, end) in enumerate(job.shape.documents):
        if start <= problem.k_start < end:
            return index, (problem.k_start - start) // length
    raise AssertionError("every key lies in a document")


def _sources(job: Job, first: int, step: int, count: int) -> tuple[Source, ...]:
    found = []
    for rank, spans in enumerate(job.holdings):
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
