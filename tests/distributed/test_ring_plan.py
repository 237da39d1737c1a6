"""Plans of spread calls without processes: every rank asks for the keys that its queries see, and every row sent is awaited.

The plans of all ranks run here in one process on *codes* instead of keys: the code of (position p, key/value head g) is p·K + g.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.distributed import Layout
from dilated_attention.distributed.exchange.plan import RingProblem, key_span, needed_keys, sees_keys
from dilated_attention.distributed.exchange.rows.messages import MOST_RUNS, RowMessage, StepPlan
from dilated_attention.distributed.exchange.setup import make_steps
from dilated_attention.distributed.exchange.sharding_plan import make_sharding_plan

WHOLE = DilatedPattern((2**62,), (1,), "zero")
CPU = torch.device("cpu")


@st.composite
def problems(draw: st.DrawFn) -> RingProblem:
    size = draw(st.sampled_from([2, 3, 4, 5, 8]))
    n = draw(st.one_of(st.integers(0, 2 * size), st.integers(0, 40)))
    heads, kv_heads = draw(st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 2), (8, 1)]))
    is_causal = draw(st.booleans())
    exchange = draw(st.sampled_from(["all_gather", "ring"]))
    pattern = draw(st.one_of(st.just(WHOLE), patterns(n, size, heads)))
    window = None
    if pattern == WHOLE and exchange == "all_gather" and draw(st.booleans()):
        sides = st.one_of(st.none(), st.integers(0, n + 1))
        window = (draw(sides), draw(sides))
    bounds = sorted(draw(st.lists(st.integers(0, n), max_size=3))) if draw(st.booleans()) else []
    documents = tuple((a, b) for a, b in itertools.pairwise(sorted({0, *bounds, n})))
    layout = draw(st.one_of(st.sampled_from(["contiguous", "zigzag", "striped"]), layouts(n, size)))
    sharding = make_sharding_plan(n, size, layout, exchange, heads, kv_heads, 1, is_causal)
    shards = tuple(sharding.ranges(rank) for rank in range(size))
    steps = draw(st.sampled_from([d for d in range(1, kv_heads + 1) if kv_heads % d == 0]))
    steps = 1 if exchange == "ring" or pattern.branch_heads == "split" else steps
    return RingProblem(pattern, documents, shards, heads, kv_heads, is_causal, window, exchange, (kv_heads // steps,) * steps)


@st.composite
def layouts(draw: st.DrawFn, n: int, size: int) -> str:
    """The name of a layout whose runs begin and end anywhere and go to any rank."""
    bounds = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=12))})
    owned = [(draw(st.integers(0, size - 1)), run) for run in itertools.pairwise(bounds)]
    return Layout(n, tuple(tuple(run for owner, run in owned if owner == rank) for rank in range(size))).name


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


def pairs(problem: RingProblem) -> torch.Tensor:
    """bool (H, N, N): which query sees which key, from the pattern's definition, document by document."""
    n = problem.seq_len
    seen = torch.zeros(problem.num_heads, n, n, dtype=torch.bool)
    for start, end in problem.documents:
        seen[:, start:end, start:end] = (
            problem.pattern.dense_mask(end - start, end - start, problem.num_heads, is_causal=problem.is_causal) > 0
        )
    distance = torch.arange(n) - torch.arange(n)[:, None]
    left, right = problem.window or (None, None)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def own(problem: RingProblem, rank: int) -> torch.Tensor:
    """The positions of the rank's rows."""
    return torch.tensor([p for span in problem.shards[rank] for p in range(*span)], dtype=torch.int64)


@settings(max_examples=150)
@given(problem=problems())
def test_what_is_needed_is_what_is_seen(problem: RingProblem) -> None:
    """No key that a query sees is missing. None is asked for that no position of the same segments could see."""
    seen = pairs(problem)
    group = problem.num_heads // problem.num_kv_heads
    for rank in range(problem.size):
        mine = own(problem, rank)
        keys = seen[:, mine].any(1).unflatten(0, (problem.num_kv_heads, group)).any(1)
        keys[:, mine] = False
        needed = needed_keys(problem, rank, CPU).expand(problem.num_kv_heads, -1)
        assert not (keys & ~needed).any() and not needed[:, mine].any()
        if max(problem.pattern.dilation_rates) == 1:
            assert torch.equal(keys, needed)
        span = key_span(problem, rank)
        assert all(span.start <= p < span.end for p in (keys.any(0).nonzero()[:, 0].tolist() + mine.tolist()))
        for queries in problem.shards[rank]:
            for other in problem.shards[(rank + 1) % problem.size]:
                assert sees_keys(problem, queries, other) or not seen[:, slice(*queries), slice(*other)].any()


def steps_of(problem: RingProblem) -> list[tuple[StepPlan, ...]]:
    found = [make_steps(problem, rank, CPU)[0] for rank in range(problem.size)]
    assert len({len(steps) for steps in found}) == 1, "all ranks have as many steps"
    return found


def units(message: RowMessage, memory: torch.Tensor) -> list[torch.Tensor]:
    """The parts of the memory (rows, heads) that the message is, one after the other."""
    flat = memory[:, :, None, None]
    if message.units is None:
        assert 0 < len(message.runs) <= MOST_RUNS
        return [flat[start:end] for start, end in message.runs]
    assert len(message.units) == len(set(message.units.tolist())), "no unit twice"
    return [message.flat(flat)[message.units]]


@settings(max_examples=150)
@given(problem=problems())
def test_messages_match_and_bring_every_key_where_it_is_read(problem: RingProblem) -> None:
    plans = steps_of(problem)
    kv_heads = problem.num_kv_heads
    for index in range(len(plans[0])):
        wires: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        memories = []
        for rank, steps in enumerate(plans):
            step = steps[index]
            codes = own(problem, rank)[:, None] * kv_heads + torch.arange(*step.kv_heads)
            memory = torch.full((step.rows, step.num_kv_heads), -1)
            for row, place, count in step.fills:
                memory[place : place + count] = codes[row : row + count]
            source = codes if step.from_own else memory
            for message, owed in zip(step.sends, step.owed, strict=True):
                sent = units(message, source)
                assert message.peer == owed.peer != rank
                # the rows whose gradients come back are those that were sent
                assert all(torch.equal(a, b) for a, b in zip(sent, units(owed, codes), strict=True))
                wires[rank, message.peer].extend(sent)
            memories.append(codes if step.in_place else memory)
        for rank, steps in enumerate(plans):
            step, memory = steps[index], memories[rank]
            for message in step.receives:
                for place in units(message, memory):
                    came = wires[message.peer, rank].popleft()
                    assert came.shape == place.shape, "what is sent is what is waited for"
                    assert (place == -1).all(), "no row arrives twice, or where the rank's own are"
                    if message.units is None:
                        place.copy_(came)
                    else:
                        message.flat(memory[:, :, None, None]).index_copy_(0, message.units, came)
            # rows of memory are the positions that the step says, and everything needed is there
            where = torch.tensor([p for keys in step.keys for p in range(*keys)], dtype=torch.int64)
            wanted = where[:, None] * kv_heads + torch.arange(*step.kv_heads)
            there = memory >= 0
            assert torch.equal(memory[there], wanted[there])
            mask = needed_keys(problem, rank, CPU).expand(kv_heads, -1)[slice(*step.kv_heads)][:, where].T
            assert not (mask & ~there).any() and bool(there.all()) == step.is_full
        assert not any(wires.values()), "what is sent is waited for"


@settings(max_examples=60)
@given(problem=problems())
def test_steps_have_all_heads_once(problem: RingProblem) -> None:
    for rank in range(problem.size):
        steps, *_ = make_steps(problem, rank, CPU)
        heads = [step.kv_heads for step in steps]
        if problem.exchange == "ring":
            assert heads == [(0, problem.num_kv_heads)] * problem.size
        else:
            assert [h for pair in heads for h in range(*pair)] == list(range(problem.num_kv_heads))
