"""A sequence shared by several processes: what a rank holds, receives and sends, read from the plans that the ranks would follow."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.block_exchange import cost as block_cost
from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, ascending_runs, columns_of, needs_of
from dilated_attention.distributed.block_exchange.plan import key_span as block_span
from dilated_attention.distributed.comm.comm_volume import Bytes, CommSizes, heads_bytes
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.exchange.crossing import crossing_of
from dilated_attention.distributed.exchange.parts import rows_of
from dilated_attention.distributed.exchange.plan import RingProblem, key_span, keys_beyond, needed_keys
from dilated_attention.distributed.exchange.sharding_plan import make_sharding_plan, why_no_heads
from dilated_attention.distributed.sharding.layout import local_length, spans
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern
from dilated_attention.planning.estimate.block_counts import num_blocks
from dilated_attention.planning.estimate.problem import Problem

# the most positions, of all heads and ranks, that are marked one by one to count what ranks need, and the most blocks that are listed
_MOST_MASKED, _MOST_LISTED = 2**26, 2**17


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How keys are exchanged in a call, and the cost on the rank that receives the most.

    Args:
        name: ``"all_gather"``, ``"ring"``, ``"all_to_all"``, ``"blocks"``, or ``"none"`` for one process.
        bytes: bytes that this rank sends and receives.
        steps: number of steps in which the keys arrive.
        held: bytes of received keys in memory at a time: in the forward, and in the backward together with gradient shares in transit.
        is_exact: whether the figures were read from the plans rather than extrapolated from shorter sequences.
        parts: the number of ranges of a rank's rows, each of which is computed by itself in an all_gather.
        home: in an all_gather of branches, those that a rank computes on its own rows; None if all of them read the received keys.
        rows: the positions of the keys in memory at a step of an all_gather.
    """

    name: str
    bytes: Bytes
    steps: int
    held: tuple[int, int]
    is_exact: bool = True
    parts: int = 1
    home: DilatedPattern | None = None
    rows: int = 0


NO_EXCHANGE = Exchange(name="none", bytes=Bytes(0, 0, 0, 0), steps=0, held=(0, 0))


def exchange_of(problem: Problem) -> Exchange:
    if problem.world_size == 1:
        return NO_EXCHANGE
    return _of_blocks(problem) if problem.computes == "block_sparse" else _of_branches(problem)


def local_rows(problem: Problem) -> int:
    """Returns the number of positions of the rank that holds the most."""
    return max(local_length(problem.num_positions, rank, problem.world_size, problem.layout) for rank in _ranks(problem))


def _ranks(problem: Problem) -> tuple[int, ...]:
    """Returns the ranks that are examined: all if there are few, else those at the ends and in the middle."""
    W = problem.world_size
    return tuple(range(W)) if W <= 4 else (0, 1, W // 2 - 1, W // 2, W - 2, W - 1)


def _memory_of_ranks(problem: Problem) -> int:
    # in whole GiB, as in ``cost.device_memory``
    return cost.device_memory(torch.device("cpu")) if problem.machine.is_cpu else problem.machine.memory >> 30 << 30


def _question(problem: Problem) -> cost.ExchangeRequest:
    assert isinstance(problem.pattern, DilatedPattern)
    return cost.ExchangeRequest(
        size=problem.world_size, layout=problem.layout, seq_len=problem.num_positions, batch=problem.batch_size,
        num_heads=problem.num_heads, num_kv_heads=problem.num_kv_heads, head_dim=problem.head_dim, itemsize=problem.itemsize,
        is_causal=problem.is_causal, is_dense=problem.computes == "dense", branch_heads=problem.pattern.branch_heads, has_window=False,
        needs_grad=problem.training, memory=_memory_of_ranks(problem),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _of_branches(problem: Problem) -> Exchange:
    question, pattern, is_dense = _question(problem), problem.pattern, problem.computes == "dense"
    assert isinstance(pattern, DilatedPattern)
    W, N, H, Hk = problem.world_size, problem.num_positions, problem.num_heads, problem.num_kv_heads
    name = problem.exchange if problem.exchange != "auto" else cost.exchange_estimates(question)[0].exchange
    if name == "all_to_all":
        reason = why_no_heads(H, Hk, W, pattern.branch_heads)
        if reason:
            raise ValueError(f"exchange is 'all_to_all' and {reason}; use exchange='auto'")
        sizes = CommSizes(H, Hk, problem.head_dim, problem.batch_size, problem.itemsize, accumulation_dtype(problem.dtype).itemsize)
        most = _most([heads_bytes(N, W, rank, problem.layout, sizes) for rank in _ranks(problem)])
        return Exchange(name=name, bytes=most, steps=1, held=(0, 0))
    sharding = make_sharding_plan(N, W, problem.layout, name, H, Hk, 1, problem.is_causal)
    steps = cost.head_steps(question) if name == "all_gather" else 1
    shards = tuple(sharding.ranges(rank) for rank in range(W))
    ring_problem = RingProblem(pattern, ((0, N),), shards, H, Hk, problem.is_causal, None, sharding.exchange, (Hk // steps,) * steps)
    is_exact = W * N * (1 if is_dense else Hk) <= _MOST_MASKED
    seen = [_seen(ring_problem, reader, is_exact) for reader in range(W)]
    row = 2 * problem.batch_size * problem.head_dim * problem.itemsize
    most = _most_of_keys(seen, row, _ranks(problem))
    if not sharding.stays:
        # striped rows are put in order and back; the number of bytes is the same for every rank
        most = Bytes(*(x + y for x, y in zip(astuple(most), _in_order(problem), strict=True)))
    crossing = crossing_of(ring_problem, row * Hk)
    held = [_held(ring_problem if crossing is None else crossing.problem, rank, seen, row) for rank in _ranks(problem)]
    spans = [key_span(ring_problem, rank) for rank in _ranks(problem)]
    return Exchange(
        name=name, bytes=most, steps=W if sharding.exchange == "ring" else steps, held=(max(x[0] for x in held), max(x[1] for x in held)),
        is_exact=is_exact or is_dense, parts=max(len(list(rows_of(shard))) for shard in shards),
        home=pattern if not any(map(any, seen)) else None if crossing is None else crossing.home,
        rows=max(span.end - span.start for span in spans),
    )  # fmt: skip


def _seen(ring_problem: RingProblem, reader: int, is_exact: bool) -> list[int]:
    """Returns [holder] the number of (row, key/value head) units that ``reader`` needs of another.

    Unless ``is_exact``, keys that a rank needs for several branches count once for each, which is at most twice as many.
    """
    if is_exact:
        mask = needed_keys(ring_problem, reader, torch.device("cpu"))
        heads = ring_problem.num_kv_heads // mask.shape[0]
        return [sum(int(mask[:, a:b].sum()) for a, b in theirs) * heads for theirs in ring_problem.shards]
    pattern, group = ring_problem.pattern, ring_problem.num_heads // ring_problem.num_kv_heads
    offsets = pattern.offsets(ring_problem.num_heads)
    counts = [0.0] * ring_problem.size
    for branch, (length, rate) in enumerate(pattern.branches):
        of_heads = [set(offsets[branch][h : h + group]) - {NOT_IN_BRANCH} for h in range(0, ring_problem.num_heads, group)]
        share = sum(map(len, of_heads)) / rate
        ranges = keys_beyond(ring_problem, length, ring_problem.shards[reader])
        for holder, theirs in enumerate(ring_problem.shards):
            if holder != reader:
                counts[holder] += share * sum(max(0, min(b, d) - max(a, c)) for a, b in theirs for _, c, d in ranges)
    return [int(count) for count in counts]


def _held(ring_problem: RingProblem, rank: int, seen: list[list[int]], row: int) -> tuple[int, int]:
    """Returns the bytes that an exchange holds at the same time, forward and backward: keys, packed rows, and gradients of all of them."""
    size, Hk = ring_problem.size, ring_problem.num_kv_heads
    received, sent = seen[rank], [other[rank] for other in seen]
    if ring_problem.exchange == "ring":
        buffers = [received[(rank - hop) % size] + sent[(rank + hop) % size] for hop in range(1, size)]
        shares = [2 * x for x in buffers]
    else:
        span = key_span(ring_problem, rank)
        rows = (span.end - span.start) * any(received)
        packed = (sum(sent) + sum(received)) * (not ring_problem.is_dense)
        buffers = [rows * count + packed * count // Hk for count in ring_problem.head_steps]
        # of every key a gradient of its own and one that is packed, and what comes back
        shares = [2 * rows * count + sum(sent) * count // Hk for count in ring_problem.head_steps]
    forward, backward = _together(buffers, shares, cost.choose_prefetch_depth(max(buffers, default=0) * row))
    return forward * row, backward * row


def _together(buffers: list[int], shares: list[int], depth: int) -> tuple[int, int]:
    """Returns what is held at a time: the keys of ``depth`` steps, and in the backward the gradients of two."""
    ahead = [sum(buffers[i : i + depth]) for i in range(len(buffers))]
    return max(ahead, default=0), max((keys + sum(shares[max(0, i - 1) : i + 1]) for i, keys in enumerate(ahead)), default=0)


def _in_order(problem: Problem) -> tuple[int, int, int, int]:
    """Returns the bytes for putting a striped sequence in order and back: all rows but one in W move to another rank."""
    rows = local_rows(problem) * (problem.world_size - 1) // problem.world_size * problem.batch_size
    D, e = problem.head_dim, problem.itemsize
    inputs = (problem.num_heads + 2 * problem.num_kv_heads) * D * e
    out = problem.num_heads * (D * e + accumulation_dtype(problem.dtype).itemsize)
    forward, backward = rows * (inputs + out), rows * (2 * inputs + out + problem.num_heads * D * e)
    return forward, forward, backward, backward


def _most_of_keys(seen: list[list[int]], row: int, ranks: Iterable[int]) -> Bytes:
    """Returns the most bytes of a rank from the units [reader][holder]: a backward exchanges keys again, and gradients the other way."""
    moved = [(sum(other[rank] for other in seen) * row, sum(seen[rank]) * row) for rank in ranks]
    return _most([Bytes(sent, received, sent + received, sent + received) for sent, received in moved])


def _most(found: list[Bytes]) -> Bytes:
    return max(found, key=lambda x: (x.forward_received, x.backward_received, x.forward_sent))


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
    longest = 8 * max(pattern.q_block, pattern.k_block) * problem.world_size
    while num_blocks(pattern, 2 * longest, problem.num_heads) <= _MOST_LISTED:
        longest *= 2
    one, two = (_of_listed_blocks(problem.of_length(n)) for n in (longest // 2, longest))
    known = [(*astuple(x.bytes), *x.held) for x in (one, two)]
    more = problem.num_positions - longest
    *moved, forward, backward = (max(b, b + (b - a) * more * 2 // longest) for a, b in zip(*known, strict=True))
    return replace(two, bytes=Bytes(*moved), held=(forward, backward), is_exact=False)


@functools.lru_cache(maxsize=64)
def _of_listed_blocks(problem: Problem) -> Exchange:
    pattern, W, N = problem.pattern, problem.world_size, problem.num_positions
    assert isinstance(pattern, BlockPattern)
    shards = tuple(ascending_runs(spans(N, rank, W, problem.layout)) for rank in range(W))
    ring_problem = RingBlockProblem(pattern, ((0, N),), shards, problem.num_heads, problem.num_kv_heads, problem.is_causal)
    needs, columns = needs_of(ring_problem, torch.device("cpu")), columns_of(ring_problem)
    load = block_cost.load_of(ring_problem, needs, problem.batch_size, problem.head_dim, problem.itemsize)
    way = block_cost.choose(load, _memory_of_ranks(problem))
    # rows (holder, block)
    counts = torch.stack([columns.of_position[held].bincount(minlength=len(columns.starts)) for held in columns.positions])
    row = 2 * problem.batch_size * problem.head_dim * problem.itemsize
    seen = torch.zeros((W, W), dtype=torch.int64)
    # a rank's memory holds all rows from the first to the last that it needs
    lengths = torch.tensor([end - start for start, end in (block_span(ring_problem, needs, rank) for rank in range(W))])
    held, shares, first = [], [], 0
    for heads in way.steps:
        rows = (needs.of_heads((first, first + heads)).long() @ counts.T).fill_diagonal_(0)
        first += heads
        seen += rows * heads
        spanned = lengths * (rows.sum(1) > 0)
        held.append(int((spanned * heads).max()) * row)
        shares.append(int(((2 * spanned + rows.sum(0)) * heads).max()) * row)
    depth = min(len(way.steps), cost.choose_prefetch_depth(load.held * max(way.steps)))
    most = _most_of_keys(seen.tolist(), row, range(W))
    return Exchange(name="blocks", bytes=most, steps=len(way.steps), held=_together(held, shares, depth))
