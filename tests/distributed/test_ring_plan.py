"""Plans and scripts of spread calls without processes: every pair is computed where it should be, and every row sent is awaited.

The scripts of all ranks run here in one process on *codes* instead of keys: the code of (position p, key/value head g) is p·K + g.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.distributed.exchange.comm_schedule import BufferSlice, CommSchedule, StepSchedule, make_schedule
from dilated_attention.distributed.exchange.local_attention import local_shape
from dilated_attention.distributed.exchange.plan import RingLaunch, RingProblem, rank_plan
from dilated_attention.distributed.exchange.sharding_plan import make_sharding_plan
from dilated_attention.engine.branches.plan import Problem, Range, Shape, make_plan

WHOLE = DilatedPattern((2**62,), (1,), "zero")


@st.composite
def jobs(draw: st.DrawFn) -> RingProblem:
    size = draw(st.sampled_from([2, 3, 4, 5, 8]))
    n = draw(st.one_of(st.integers(0, 2 * size), st.integers(0, 40)))
    heads, kv_heads = draw(st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 2), (8, 1)]))
    is_causal = draw(st.booleans())
    exchange = draw(st.sampled_from(["all_gather", "ring"]))
    pattern = draw(st.one_of(st.just(WHOLE), patterns(n, size, heads)))
    is_dense = pattern == WHOLE
    window = None
    if is_dense and exchange == "all_gather" and draw(st.booleans()):
        sides = st.one_of(st.none(), st.integers(0, n + 1))
        window = (draw(sides), draw(sides))
    bounds = sorted(draw(st.lists(st.integers(0, n), max_size=3))) if draw(st.booleans()) else []
    edges = sorted({0, *bounds, n})
    documents = tuple(itertools.pairwise(edges))
    shape = Shape(
        heads,
        kv_heads,
        (0, n),
        (0, n),
        documents,
        is_causal,
        window,
        window_block=draw(st.sampled_from([None, 3])),
        shifted_heads=draw(st.booleans()),
        aligned_last=draw(st.booleans()),
    )
    layout = draw(st.sampled_from(["contiguous", "zigzag", "striped"]))
    sharding = make_sharding_plan(n, size, layout, exchange, heads, kv_heads, 1, is_causal)
    shards = tuple(sharding.ranges(rank) for rank in range(size))
    steps = draw(st.sampled_from([d for d in range(1, kv_heads + 1) if kv_heads % d == 0])) if exchange == "all_gather" and is_dense else 1
    return RingProblem(pattern, shape, shards, exchange, steps)


@st.composite
def patterns(draw: st.DrawFn, n: int, size: int, heads: int) -> DilatedPattern:
    share = max(1, n // size)
    lengths = draw(
        st.lists(st.one_of(st.sampled_from([share, 2 * share, share * size]), st.integers(1, 2 * n + 2)), min_size=1, max_size=3)
    )
    rates = [draw(st.integers(1, min(length, 7))) for length in lengths]
    kind = draw(st.sampled_from(["cyclic", "blocked", "zero", "lists", "split"]))
    offsets: Any = "cyclic" if kind == "split" else kind
    if kind == "lists":
        offsets = tuple(tuple(draw(st.integers(0, rate - 1)) for _ in range(heads)) for rate in rates)
    tail = draw(st.sampled_from(["mask", "zero_keys"]))
    return DilatedPattern(tuple(lengths), tuple(rates), offsets, "split" if kind == "split" else "all", tail)


# --- what is computed -------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How often each (head, query, key) was computed, and the zero keys of each (head, query)."""

    pairs: torch.Tensor
    zero: torch.Tensor

    def add(self, problem: Problem, first_head: int = 0, origin: int = 0) -> None:
        group = problem.heads
        i, j = torch.arange(problem.q_len), torch.arange(problem.k_len)
        seen = torch.ones(problem.q_len, problem.k_len, dtype=torch.bool)
        if problem.causal:
            seen &= j <= i[:, None] + problem.k_len - problem.q_len
        if problem.band is not None:
            low, high = problem.band
            seen &= (j - i[:, None] >= (-(2**62) if low is None else low)) & (j - i[:, None] <= (2**62 if high is None else high))
        for place in range(group.count):
            for segment in range(problem.segments):
                shift = origin + place * group.shift + segment * problem.stride
                rows, keys = problem.q_start + problem.step * i + shift, problem.k_start + problem.step * j + shift
                head = first_head + group.start + place * group.step
                self.pairs[head, rows[:, None], keys] += seen
                self.zero[head, rows] += problem.zero_keys


def tally(ring_problem: RingProblem) -> Tally:
    heads, n = ring_problem.shape.num_heads, ring_problem.shape.keys[1]
    total = Tally(torch.zeros(heads, n, n, dtype=torch.int64), torch.zeros(heads, n, dtype=torch.int64))
    for rank in range(ring_problem.size):
        plan = rank_plan(ring_problem, rank)
        for span in plan.local_ranges:
            for problem in make_plan(ring_problem.pattern, local_shape(ring_problem, span)).problems:
                total.add(problem, origin=span[0])
        for step in plan.steps:
            for launch in step.launches:
                total.add(launch.problem, launch.queries.head_start - launch.problem.heads.start)
                held = {position for span in ring_problem.shards[rank] for position in range(*span)}
                shifts = [launch.problem.heads.shift * place for place in range(launch.problem.heads.count)]
                ends = [launch.problem.q_start, launch.problem.q_start + launch.problem.step * (launch.problem.q_len - 1)]
                assert all(end + shift in held for end in ends for shift in shifts), "a rank computes its own queries only"
    return total


def expected(ring_problem: RingProblem) -> Tally:
    """From the pattern's definition, document by document."""
    shape, n = ring_problem.shape, ring_problem.shape.keys[1]
    pairs = torch.zeros(shape.num_heads, n, n, dtype=torch.int64)
    zero = torch.zeros(shape.num_heads, n, dtype=torch.int64)
    for start, end in shape.documents:
        pairs[:, start:end, start:end] = ring_problem.pattern.dense_mask(
            end - start, end - start, shape.num_heads, is_causal=shape.is_causal
        )
        if shape.is_causal or ring_problem.pattern.tail == "mask":
            continue
        for (length, rate), offsets in zip(ring_problem.pattern.branches, ring_problem.pattern.offsets(shape.num_heads), strict=True):
            for head, offset in enumerate(offsets):
                for i in range(end - start):
                    if offset >= 0 and i % length % rate == offset:
                        segment = range(i // length * length, min(i // length * length + length, end - start))
                        real = sum(j % length % rate == offset for j in segment)
                        zero[head, start + i] += -(-min(length, end - start) // rate) - real
    distance = torch.arange(n) - torch.arange(n)[:, None]
    left, right = shape.window or (None, None)
    if left is not None:
        pairs *= distance >= -left
    if right is not None:
        pairs *= distance <= right
    return Tally(pairs, zero)


@settings(max_examples=120)
@given(ring_problem=jobs())
def test_every_pair_is_computed_as_often_as_the_pattern_says(ring_problem: RingProblem) -> None:
    found, wanted = tally(ring_problem), expected(ring_problem)
    assert torch.equal(found.pairs, wanted.pairs)
    assert torch.equal(found.zero, wanted.zero)


@settings(max_examples=120)
@given(ring_problem=jobs())
def test_rows_are_written_before_anything_is_merged_into_them(ring_problem: RingProblem) -> None:
    for rank in range(ring_problem.size):
        plan = rank_plan(ring_problem, rank)
        if not ring_problem.is_fresh:
            assert plan.covered and not plan.single
            continue
        written: set[tuple[int, int]] = set()
        again = False
        for launch in (launch for step in plan.steps for launch in step.launches):
            rows = {(x, h) for h in _heads(launch) for x in range(launch.problem.q_start, launch.problem.q_start + launch.problem.q_len)}
            assert launch.problem.step == 1
            assert not rows & written if launch.problem.first else rows <= written
            again |= not launch.problem.first
            written |= rows
        held = ring_problem.shape.num_heads * sum(end - start for start, end in ring_problem.shards[rank])
        assert plan.covered == (len(written) == held)
        assert plan.single == (not again)


def _heads(launch: RingLaunch) -> range:
    rows = launch.queries
    return range(rows.head_start, rows.head_start + rows.head_step * rows.heads, rows.head_step)


# --- what travels -----------------------------------------------------------------------------------------------------------------


def held_codes(ring_problem: RingProblem, rank: int) -> torch.Tensor:
    """(1, n, K, 1): the codes of the rank's keys."""
    kv_heads = ring_problem.shape.num_kv_heads
    positions = torch.tensor([p for span in ring_problem.shards[rank] for p in range(*span)], dtype=torch.int64)
    return (positions[:, None] * kv_heads + torch.arange(kv_heads))[None, ..., None]


def part_of(memory: list[torch.Tensor | None], part: BufferSlice) -> torch.Tensor:
    whole = memory[part.buffer]
    assert whole is not None and part.at >= 0 and part.count > 0 and part.at + part.count <= len(whole)
    return whole[part.at : part.at + part.count]


def exchanged(
    ring_problem: RingProblem, index: int, scripts: list[CommSchedule]
) -> Iterator[tuple[StepSchedule, list[torch.Tensor | None], torch.Tensor]]:
    """Every rank's (step, buffers with what came, own codes) once the messages of step ``index`` are through."""
    codes = [held_codes(ring_problem, rank) for rank in range(ring_problem.size)]
    memories: list[list[torch.Tensor | None]] = []
    wires: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    for rank, schedule in enumerate(scripts):
        step = schedule.steps[index]
        memory = [None if size is None else torch.full(size, -1, dtype=torch.int64) for size in step.sizes]
        for filled in step.fills:
            part_of(memory, filled.part).copy_(filled.rows.of(codes[rank])[0, 0, ..., 0])
        for peer, part in step.sends:
            assert peer != rank
            sent = part_of(memory, part)
            assert (sent >= 0).all(), "what is sent has been filled in"
            wires[rank, peer].append(sent.clone())
        memories.append(memory)
    for rank, schedule in enumerate(scripts):
        for peer, part in schedule.steps[index].receives:
            place = part_of(memories[rank], part)
            assert (place == -1).all(), "no row arrives twice, or where the rank's own lie"
            came = wires[peer, rank].popleft()
            assert came.shape == place.shape, "what is sent is what is waited for"
            place.copy_(came)
    assert not any(wires.values()), "what is sent is waited for"
    for rank, schedule in enumerate(scripts):
        yield schedule.steps[index], memories[rank][: len(schedule.steps[index].step.buffers)], codes[rank]


def scripts_of(ring_problem: RingProblem) -> list[CommSchedule]:
    scripts = [make_schedule(ring_problem, rank) for rank in range(ring_problem.size)]
    assert len({len(schedule.steps) for schedule in scripts}) == 1, "all ranks have as many steps"
    return scripts


@settings(max_examples=120)
@given(ring_problem=jobs())
def test_messages_match_and_bring_every_launch_its_keys(ring_problem: RingProblem) -> None:
    scripts = scripts_of(ring_problem)
    kv_heads = ring_problem.shape.num_kv_heads
    received = [0] * ring_problem.size
    for index in range(len(scripts[0].steps)):
        for rank, (step, memory, own) in enumerate(exchanged(ring_problem, index, scripts)):
            received[rank] += sum(part_of(memory, part).numel() for _, part in step.receives)
            for launch in step.step.launches:
                buffer = memory[launch.buffer]
                x = own if buffer is None else buffer[None, ..., None]
                problem = launch.problem
                # the first key/value head of the step's heads
                first = launch.queries.head_start - problem.heads.start
                group = problem.heads
                head = first * kv_heads // ring_problem.shape.num_heads + group.kv_start + group.kv_step * torch.arange(group.kv_count)
                at = problem.k_start + problem.step * torch.arange(problem.k_len)[:, None] + group.shift * torch.arange(group.kv_count)
                assert torch.equal(launch.keys.of(x)[0, 0, ..., 0], at * kv_heads + head)
    # the plan's own count of rows and heads from elsewhere
    for rank in range(ring_problem.size):
        buffers = [buffer for step in rank_plan(ring_problem, rank).steps for buffer in step.buffers]
        assert received[rank] == sum(part.count * buffer.heads[2] for buffer in buffers for part in buffer.sources if part.rank != rank)


@settings(max_examples=120)
@given(ring_problem=jobs())
def test_every_share_of_a_gradient_comes_back_to_its_row(ring_problem: RingProblem) -> None:
    """A launch's share of a key row gets the number of the launch; owners add up the codes they are sent."""
    scripts = scripts_of(ring_problem)
    n, kv_heads = ring_problem.shape.keys[1], ring_problem.shape.num_kv_heads
    wanted = torch.zeros(n * kv_heads, dtype=torch.int64)
    sums = [torch.zeros_like(held_codes(ring_problem, rank)) for rank in range(ring_problem.size)]
    written = [torch.zeros_like(total) for total in sums]
    number = 0
    for index in range(len(scripts[0].steps)):
        wires: dict[tuple[int, int], deque[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(deque)
        shares: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for rank, (step, memory, own) in enumerate(exchanged(ring_problem, index, scripts)):
            mine = []
            for launch in step.step.launches:
                number += 1
                buffer = memory[launch.buffer]
                codes = launch.keys.of(own if buffer is None else buffer[None, ..., None])[0, 0, ..., 0]
                wanted.index_add_(0, codes.flatten(), torch.full((codes.numel(),), number))
                mine.append((codes, torch.full_like(codes, number)))
            shares.append(mine)
            for peer, place, at, count in step.returns:
                wires[rank, peer].append((mine[place][0][at : at + count], mine[place][1][at : at + count]))
        for rank, schedule in enumerate(scripts):
            step = schedule.steps[index]
            came: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
            for peer, owed, place in step.arrivals:
                assert step.owed[owed].peers[place] == peer and (owed, place) not in came
                came[owed, place] = wires[peer, rank].popleft()
            assert len(came) == sum(len(owed.peers) for owed in step.owed)
            for at, owed in enumerate(step.owed):
                codes = owed.rows.of(held_codes(ring_problem, rank))[0, 0, ..., 0]
                own_parts = [tuple(x[first : first + len(codes)] for x in shares[rank][place]) for place, first in owed.own]
                for of, value in [*own_parts, *(came[at, place] for place in range(len(owed.peers)))]:
                    assert torch.equal(of, codes), "a share comes to the rows that it belongs to"
                    owed.rows.of(sums[rank])[0, 0, ..., 0] += value
                owed.rows.of(written[rank])[0, 0, ..., 0] += 1
        assert not any(wires.values())
    for rank, schedule in enumerate(scripts):
        assert torch.equal(sums[rank].flatten(), wanted[held_codes(ring_problem, rank).flatten()])
        if schedule.writes_once:
            assert (written[rank] == 1).all(), "what needs no initial value is written once"


# --- what need not travel ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    size=st.sampled_from([2, 3, 4, 8]),
    inside=st.integers(1, 3),
    lengths=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3),
    is_causal=st.booleans(),
    tail=st.sampled_from(["mask", "zero_keys"]),
    exchange=st.sampled_from(["all_gather", "ring"]),
)
def test_segments_inside_ranks_need_no_exchange(
    size: int, inside: int, lengths: list[int], is_causal: bool, tail: str, exchange: str
) -> None:
    n = 12 * inside
    pattern = DilatedPattern(tuple(lengths), tuple(1 + length // 2 for length in lengths), tail=tail)
    shards: tuple[tuple[Range, ...], ...] = tuple(((rank * n, rank * n + n),) for rank in range(size))
    whole = (0, size * n)
    ring_problem = RingProblem(pattern, Shape(4, 2, whole, whole, (whole,), is_causal), shards, exchange)
    for schedule in scripts_of(ring_problem):
        assert not any(step.sends or step.receives or step.returns or step.arrivals or step.step.launches for step in schedule.steps)
    # one position longer, and there is something to bring
    longer = replace(ring_problem, pattern=DilatedPattern((n + 1,), (1,)))
    assert any(step.receives for schedule in scripts_of(longer) for step in schedule.steps)
