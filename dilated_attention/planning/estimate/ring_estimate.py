"""A sequence shared by several processes: what a rank holds, receives and sends, read from the plans that the ranks would follow."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.block_exchange import cost as block_cost
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, columns_of, joined, needs_of
from dilated_attention.distributed.comm.comm_volume import Bytes, CommSizes, heads_bytes
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.exchange.comm_schedule import CommSchedule, make_schedule
from dilated_attention.distributed.exchange.plan import RingProblem
from dilated_attention.distributed.exchange.sharding_plan import make_sharding_plan, why_no_heads
from dilated_attention.distributed.sharding.layout import local_length, spans
from dilated_attention.engine.branches.plan import Shape
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.estimate.block_counts import MOST_FOR_SIZE, block_counts, num_blocks
from dilated_attention.planning.estimate.problem import Problem

Terms = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How keys are exchanged in a call, and the cost on the rank that receives the most.

    Args:
        name: ``"all_gather"``, ``"ring"``, ``"all_to_all"``, ``"blocks"``, or ``"none"`` for one process.
        bytes: bytes that this rank sends and receives.
        steps: number of steps in which the keys arrive.
        held: bytes of received keys in memory at a time: in the forward, and in the backward together with gradient shares in transit.
        is_exact: whether the figures were read from the plans rather than extrapolated from shorter sequences.
    """

    name: str
    bytes: Bytes
    steps: int
    held: tuple[int, int]
    is_exact: bool = True


NO_EXCHANGE = Exchange(name="none", bytes=Bytes(0, 0, 0, 0), steps=0, held=(0, 0))


def exchange_of(problem: Problem) -> Exchange:
    if problem.world_size == 1:
        return NO_EXCHANGE
    if problem.computes == "block_sparse":
        return _of_blocks(problem)
    return _of_branches(problem)


def local_rows(problem: Problem) -> int:
    """Returns the number of positions of the rank that holds the most."""
    return max(local_length(problem.num_positions, rank, problem.world_size, problem.layout) for rank in _ranks(problem))


def ring_memory(problem: Problem) -> MemoryEstimate:
    exchange, n = exchange_of(problem), local_rows(problem)
    assert isinstance(problem.pattern, DilatedPattern)
    B, H, Hk, D = problem.batch_size, problem.num_heads, problem.num_kv_heads, problem.head_dim
    e, a = problem.itemsize, accumulation_dtype(problem.dtype).itemsize
    Q, K, R = B * n * H * D, B * n * Hk * D, B * n * H
    inputs = (Q + 2 * K) * e
    if exchange.name == "all_to_all":
        return _by_heads(problem, exchange, n)
    dense = problem.computes == "dense"
    if dense and exchange.name == "all_gather":
        # each step computes its rows in one launch and writes them directly: nothing is merged
        forward: Terms = [("q, k, v", inputs), ("out", Q * e), ("lse", R * a)]
        backward: Terms = [("q, k, v", inputs), ("out, dout", 2 * Q * e), ("lse, as saved and with +inf", 2 * R * a)]
        backward.append(("dq, dk, dv", (Q + 2 * K) * e if problem.device_type == "cuda" else Q * a + 2 * K * a))
        rows = -(-n // 128) * 128 * B * H // (exchange.steps if problem.device_type == "cuda" else 1)
        launch = 4 * rows * (D + 2) if problem.device_type == "cuda" else 0
        if Hk < H and launch:
            launch += 8 * problem.num_positions * B * Hk * D // exchange.steps
    else:
        # the engine runs on the rank's own rows; then the parts are merged into its results
        local_ranges = attention_memory(
            problem.pattern, n, H, D, batch_size=B, num_kv_heads=Hk, dtype=problem.dtype, device_type=problem.device_type,
            is_causal=problem.is_causal, needs_grad=problem.training,
        )  # fmt: skip
        forward, backward = list(local_ranges.forward), list(local_ranges.backward)
        if exchange.name == "ring":
            forward.append(("out in the dtype of sums", Q * a if e != a else 0))
            backward.append(("dq, dk, dv in the dtype of sums", (Q + 2 * K) * a if e != a else 0))
        launch = 0
    forward.append(("keys from elsewhere", exchange.held[0]))
    if not problem.training:
        return MemoryEstimate(inputs=inputs, forward=_non_zero(forward))
    backward += [("keys from elsewhere, shares of gradients", exchange.held[1]), ("sums of kernels in float32", launch)]
    return MemoryEstimate(inputs=inputs, forward=_non_zero(forward), backward=_non_zero(backward))


def _by_heads(problem: Problem, exchange: Exchange, n: int) -> MemoryEstimate:
    """all_to_all: some heads of the whole sequence, computed as on one process, in addition to the caller's rows of all heads."""
    W = problem.world_size
    heads, kv_heads = problem.num_heads // W, max(1, problem.num_kv_heads // W)
    assert isinstance(problem.pattern, DilatedPattern)
    pattern = problem.pattern if problem.pattern.branch_heads == "split" else problem.pattern.with_heads(0, heads, problem.num_heads)
    whole = attention_memory(
        pattern, problem.num_positions, heads, problem.head_dim, batch_size=problem.batch_size, num_kv_heads=kv_heads,
        dtype=problem.dtype, device_type=problem.device_type, is_causal=problem.is_causal, needs_grad=problem.training,
    )  # fmt: skip
    e, D = problem.itemsize, problem.head_dim
    Q, K = problem.batch_size * n * problem.num_heads * D, problem.batch_size * n * problem.num_kv_heads * D
    inputs = (Q + 2 * K) * e
    forward = [("q, k, v in the caller's rows", inputs), *whole.forward]
    backward: Terms = []
    if problem.training:
        own = inputs + 2 * Q * e + 4 * Q // D
        backward = [("q, k, v, out, dout in the caller's rows", own), *whole.backward]
    return MemoryEstimate(inputs=inputs, forward=_non_zero(forward), backward=_non_zero(backward))


def ring_blocks_memory(problem: Problem) -> MemoryEstimate:
    exchange, n = exchange_of(problem), local_rows(problem)
    assert isinstance(problem.pattern, BlockPattern)
    B, H, Hk, D = problem.batch_size, problem.num_heads, problem.num_kv_heads, problem.head_dim
    e, a = problem.itemsize, accumulation_dtype(problem.dtype).itemsize
    Q, K, R = B * n * H * D, B * n * Hk * D, B * n * H
    inputs = (Q + 2 * K) * e
    counts = block_counts(problem.pattern, problem.num_positions, H, problem.is_causal, MOST_FOR_SIZE)
    lists = counts.list_bytes // problem.world_size
    common: Terms = [("q, k, v", inputs), ("lists of blocks", lists)]
    forward = [*common, ("out", Q * e), ("lse", R * a), ("keys from elsewhere", exchange.held[0])]
    if exchange.steps > 1:
        forward.append(("results of a step", (Q * e + R * a) // exchange.steps))
    backward: Terms = []
    if problem.training:
        backward = [*common, ("out, dout", 2 * Q * e), ("lse", R * a), ("dq, dk, dv", (Q + 2 * K) * e)]
        backward.append(("keys from elsewhere, shares of gradients", exchange.held[1]))
        # sums of dq, and of dk and dv where several query heads share them
        sums = 4 * (Q + 2 * R) + (8 * K if Hk < H else 0) if problem.device_type == "cuda" else 0
        backward.append(("sums of kernels in float32", sums // max(1, exchange.steps)))
        backward.append(("gradients of a step", Q * e // exchange.steps if exchange.steps > 1 else 0))
    return MemoryEstimate(inputs=inputs, forward=_non_zero(forward), backward=_non_zero(backward))


def _question(problem: Problem) -> cost.ExchangeRequest:
    assert isinstance(problem.pattern, DilatedPattern)
    memory = 2**36 if problem.gpu is None else problem.gpu.memory >> 30 << 30
    return cost.ExchangeRequest(
        size=problem.world_size, layout=problem.layout, seq_len=problem.num_positions, batch=problem.batch_size,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads, head_dim=problem.head_dim, itemsize=problem.itemsize, is_causal=problem.is_causal,
        is_dense=problem.computes == "dense", branch_heads=problem.pattern.branch_heads, has_window=False, needs_grad=problem.training,
        memory=memory,
    )  # fmt: skip


def _ranks(problem: Problem) -> tuple[int, ...]:
    """Returns the ranks that are examined: all if there are few, else those at the ends and in the middle."""
    W = problem.world_size
    return tuple(range(W)) if W <= 4 else (0, 1, W // 2 - 1, W // 2, W - 2, W - 1)


@functools.lru_cache(maxsize=256)
def _of_branches(problem: Problem) -> Exchange:
    question = _question(problem)
    name = problem.exchange if problem.exchange != "auto" else cost.exchange_estimates(question)[0].exchange
    a = accumulation_dtype(problem.dtype).itemsize
    sizes = CommSizes(problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.batch_size, problem.itemsize, a)
    if name == "all_to_all":
        assert isinstance(problem.pattern, DilatedPattern)
        reason = why_no_heads(problem.num_heads, problem.num_kv_heads, problem.world_size, problem.pattern.branch_heads)
        if reason:
            raise ValueError(f"exchange is 'all_to_all' and {reason}; use exchange='auto'")
        found = [heads_bytes(problem.num_positions, problem.world_size, rank, problem.layout, sizes) for rank in _ranks(problem)]
        return Exchange(name=name, bytes=_most(found), steps=1, held=(0, 0))
    sharding = make_sharding_plan(
        problem.num_positions, problem.world_size, problem.layout, name, problem.num_heads, problem.num_kv_heads, 1, problem.is_causal
    )
    whole = (0, problem.num_positions)
    steps = cost.head_steps(question) if name == "all_gather" else 1
    # steps over equal groups of heads are alike: two of them represent all
    alike = steps // 2 if steps % 2 == 0 else 1
    shape = Shape(problem.num_heads // alike, problem.num_kv_heads // alike, whole, whole, (whole,), problem.is_causal)
    assert isinstance(problem.pattern, DilatedPattern)
    ranges = tuple(sharding.ranges(rank) for rank in range(problem.world_size))
    ring_problem = RingProblem(problem.pattern, shape, ranges, sharding.exchange, steps // alike)
    prefetch_depth = cost.choose_prefetch_depth(ring_problem, problem.batch_size, problem.head_dim, problem.itemsize)
    times = _rows_alike(problem, name)
    if times > 1:
        # in dense attention, every hop of a longer sequence matches that of a shorter one, scaled in its rows
        unit = make_sharding_plan(
            problem.num_positions // times,
            problem.world_size,
            problem.layout,
            name,
            problem.num_heads,
            problem.num_kv_heads,
            1,
            problem.is_causal,
        )
        part = (0, problem.num_positions // times)
        shape = replace(shape, queries=part, keys=part, documents=(part,))
        ring_problem = replace(ring_problem, shape=shape, shards=tuple(unit.ranges(r) for r in range(problem.world_size)))
    schedules = [make_schedule(ring_problem, rank) for rank in _ranks(problem)]
    moved = [Bytes(*(times * alike * x for x in astuple(_bytes_of(schedule, problem, a)))) for schedule in schedules]
    held = [tuple(times * x for x in _held(schedule, problem, prefetch_depth, a, alike)) for schedule in schedules]
    most = _most(moved)
    if not sharding.stays:
        # striped rows are put in order and back; the number of bytes is the same for every rank
        own = (most.forward_sent, most.forward_received, most.backward_sent, most.backward_received)
        most = Bytes(*(x + y for x, y in zip(own, _in_order(problem), strict=True)))
    return Exchange(name=name, bytes=most, steps=alike * len(schedules[0].steps), held=(max(x[0] for x in held), max(x[1] for x in held)))


def _rows_alike(problem: Problem, exchange: str) -> int:
    """Returns the factor by which a ring's sequence can be shortened along with every rank's runs; 1 where it cannot."""
    unit = 4 * problem.world_size
    return problem.num_positions // unit if problem.computes == "dense" and exchange == "ring" and problem.num_positions % unit == 0 else 1


def _in_order(problem: Problem) -> tuple[int, int, int, int]:
    """Returns the bytes for putting a striped sequence in order and back: all rows but one in W move to another rank."""
    rows = local_rows(problem) * (problem.world_size - 1) // problem.world_size * problem.batch_size
    D, e = problem.head_dim, problem.itemsize
    inputs = (problem.num_heads + 2 * problem.num_kv_heads) * D * e
    out = problem.num_heads * (D * e + accumulation_dtype(problem.dtype).itemsize)
    forward = rows * (inputs + out)
    backward = rows * (2 * inputs + out + problem.num_heads * D * e)
    return forward, forward, backward, backward


def _most(found: list[Bytes]) -> Bytes:
    return max(found, key=lambda x: (x.forward_received, x.backward_received, x.forward_sent))


def _share_size(problem: Problem, a: int) -> int:
    return problem.itemsize if problem.device_type == "cuda" else a


def _bytes_of(schedule: CommSchedule, problem: Problem, a: int) -> Bytes:
    row = 2 * problem.batch_size * problem.head_dim
    sent = received = back_sent = back_received = 0
    for step in schedule.steps:
        heads = {index: size[1] for index, size in enumerate(step.sizes) if size is not None}
        sent += sum(part.count * heads[part.buffer] for _, part in step.sends)
        received += sum(part.count * heads[part.buffer] for _, part in step.receives)
        launches = step.step.launches
        back_sent += sum(count * launches[launch].keys.heads for _, launch, _, count in step.returns)
        back_received += sum(step.owed[index].rows.length * step.owed[index].rows.heads for _, index, _ in step.arrivals)
    size, share = row * problem.itemsize, row * _share_size(problem, a)
    return Bytes(sent * size, received * size, sent * size + back_sent * share, received * size + back_received * share)


def _held(schedule: CommSchedule, problem: Problem, prefetch_depth: int, a: int, times: int) -> tuple[int, int]:
    """Returns the bytes of buffers alive at the same time, forward and backward; the schedule's steps are repeated ``times`` times."""
    row = 2 * problem.batch_size * problem.head_dim
    buffers, shares = [], []
    for step in schedule.steps:
        buffers.append(sum(size[0] * size[1] for size in step.sizes if size is not None) * row * problem.itemsize)
        parts = sum(launch.problem.k_len * launch.keys.heads for launch in step.step.launches)
        came = sum(len(owed.peers) * owed.rows.length * owed.rows.heads for owed in step.owed)
        shares.append((parts + came) * row * _share_size(problem, a))
    buffers, shares = buffers * times, shares * times
    at_once = len(buffers) if len(buffers) <= prefetch_depth else prefetch_depth
    forward = max(sum(buffers[i : i + at_once]) for i in range(len(buffers)))
    backward = max(sum(buffers[i : i + at_once]) + sum(shares[max(0, i - 1) : i + 1]) for i in range(len(buffers)))
    return forward, backward


# the most blocks that are listed to determine which rank needs whose keys
_MOST_LISTED = 2**17


@functools.lru_cache(maxsize=64)
def _of_blocks(problem: Problem) -> Exchange:
    """Returns the exchange from the ranks' plans.

    That of a long sequence is extrapolated linearly from two shorter ones: the edges of a window stay constant, and whatever is spread over
    the sequence grows with it.
    """
    pattern = problem.pattern
    assert isinstance(pattern, BlockPattern)
    if num_blocks(pattern, problem.num_positions, problem.num_heads) <= _MOST_LISTED:
        return _of_listed_blocks(problem)
    block = max(pattern.q_block, pattern.k_block) * problem.world_size
    longest = 8 * block
    while num_blocks(pattern, 2 * longest, problem.num_heads) <= _MOST_LISTED:
        longest *= 2
    one, two = (_of_listed_blocks(problem.of_length(n)) for n in (longest // 2, longest))

    def told(a: int, b: int) -> int:
        return max(b, b + (b - a) * (problem.num_positions - longest) * 2 // longest)

    fields = ("forward_sent", "forward_received", "backward_sent", "backward_received")
    moved = Bytes(*(told(getattr(one.bytes, name), getattr(two.bytes, name)) for name in fields))
    held = (told(one.held[0], two.held[0]), told(one.held[1], two.held[1]))
    return Exchange(name="blocks", bytes=moved, steps=two.steps, held=held, is_exact=False)


@functools.lru_cache(maxsize=64)
def _of_listed_blocks(problem: Problem) -> Exchange:
    pattern, W = problem.pattern, problem.world_size
    assert isinstance(pattern, BlockPattern)
    N, Hk = problem.num_positions, problem.num_kv_heads
    shards = tuple(joined(spans(N, rank, W, problem.layout)) for rank in range(W))
    ring_problem = RingBlockProblem(pattern, ((0, N),), shards, problem.num_heads, Hk, problem.is_causal)
    needs, columns = needs_of(ring_problem, torch.device("cpu")), columns_of(ring_problem)
    load = block_cost.load_of(ring_problem, needs, problem.batch_size, problem.head_dim, problem.itemsize)
    memory = 2**36 if problem.gpu is None else problem.gpu.memory
    way = block_cost.choose(load, memory)
    prefetch_depth = min(len(way.steps), block_cost.choose_prefetch_depth(load, way.steps))
    # rows (reader, holder) of each block, for the heads of each step
    counts = torch.zeros((W, columns.starts.shape[0]), dtype=torch.int64)
    for rank, positions in enumerate(columns.positions):
        counts[rank] = torch.bincount(columns.of_position[positions], minlength=counts.shape[1])
    row = 2 * problem.batch_size * problem.head_dim
    matrix = torch.zeros((W, W), dtype=torch.int64)
    held, shares, first = [], [], 0
    for heads in way.steps:
        kept = needs.of_heads((first, first + heads))
        first += heads
        rows = kept.long() @ counts.T
        matrix += rows * heads
        brought = rows.sum(1) * heads
        own = rows.diagonal() * heads
        is_own = brought == own
        held.append(torch.where(is_own, 0, brought + (rows.sum(0) - rows.diagonal()) * heads).max().item() * row * problem.itemsize)
        shares.append((brought + (rows.sum(0) - rows.diagonal()) * heads).max().item() * row)
    received = matrix.sum(1) - matrix.diagonal()
    sent = matrix.sum(0) - matrix.diagonal()
    share = _share_size(problem, accumulation_dtype(problem.dtype).itemsize)
    size = row * problem.itemsize
    found = [
        Bytes(int(s) * size, int(r) * size, int(s) * size + int(r) * row * share, int(r) * size + int(s) * row * share)
        for s, r in zip(sent.tolist(), received.tolist(), strict=True)
    ]
    forward = max(sum(held[i : i + prefetch_depth]) for i in range(len(held)))
    backward = max(sum(held[i : i + prefetch_depth]) + share * sum(shares[max(0, i - 1) : i + 1]) for i in range(len(held)))
    return Exchange(name="blocks", bytes=_most(found), steps=len(way.steps), held=(int(forward), int(backward)))


def _non_zero(terms: Terms) -> tuple[tuple[str, int], ...]:
    return tuple((what, int(size)) for what, size in terms if size)
