"""A sequence shared by several processes: what a rank holds, receives and sends, read from the plans that the ranks would follow."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.block_exchange import plan as block_plan
from dilated_attention.distributed.block_exchange.plan import ascending_runs, columns_of, needs_of
from dilated_attention.distributed.block_exchange.plan import key_span as block_span
from dilated_attention.distributed.exchange import cost
from dilated_attention.distributed.exchange.crossing import crossing_of
from dilated_attention.distributed.exchange.plan import RingBlockProblem, RingProblem, key_span, needed_keys
from dilated_attention.distributed.exchange.run import AHEAD
from dilated_attention.distributed.exchange.sharding_plan import make_sharding_plan, why_no_heads
from dilated_attention.distributed.sharding.layout import local_length, spans
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.blocks import num_blocks
from dilated_attention.planning.problem import Problem

# the most positions, of all heads and ranks, that are marked one by one to count what ranks need, and the most blocks that are listed
_MOST_MASKED, _MOST_LISTED = 2**20, 2**16


@dataclass(frozen=True)
class Bytes:
    """The bytes that one rank exchanges."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How keys are exchanged in a call, and the cost on the rank that receives the most.

    Args:
        name: ``"all_gather"``, ``"all_to_all"``, ``"blocks"``, or ``"none"`` for one process.
        bytes: bytes that this rank sends and receives.
        steps: number of steps in which the keys arrive.
        held: bytes of received keys in memory at a time: in the forward, and in the backward together with gradient shares in transit.
        is_exact: whether the figures were read from the plans of the whole sequence rather than of shorter ones.
        rows: positions whose keys are in memory at a step of an all_gather.
        home: in an all_gather of branches, those that a rank computes on its own rows; None if all of them read the received keys.
    """

    name: str
    bytes: Bytes
    steps: int
    held: tuple[int, int]
    is_exact: bool = True
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
        is_causal=problem.is_causal, is_dense=problem.computes == "dense", branch_heads=problem.pattern.branch_heads,
        needs_grad=problem.training, memory=_memory_of_ranks(problem),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _of_branches(problem: Problem) -> Exchange:
    question, pattern, is_dense = _question(problem), problem.pattern, problem.computes == "dense"
    assert isinstance(pattern, DilatedPattern)
    W, N, H, Hk = problem.world_size, problem.num_positions, problem.num_heads, problem.num_kv_heads
    name, wide = problem.exchange, accumulation_dtype(problem.dtype).itemsize
    if name in ("auto", "ring"):
        name = cost.exchange_estimates(question)[0].exchange
    if name == "all_to_all":
        if reason := why_no_heads(H, Hk, W, pattern.branch_heads):
            raise ValueError(f"exchange is 'all_to_all' and {reason}; use exchange='auto'")
        sizes = H, Hk, problem.head_dim, problem.batch_size, problem.itemsize, wide
        most = _most([heads_bytes(N, W, local_length(N, rank, W, problem.layout), sizes) for rank in _ranks(problem)])
        return Exchange(name=name, bytes=most, steps=1, held=(0, 0))
    # what crosses ranks keeps its proportions where all lengths are divided alike
    scale = 1
    while W * N * (1 if is_dense else Hk) // scale > _MOST_MASKED and all(w >= 2 * scale * r for w, r in pattern.branches if w * W > N):
        scale *= 2
    short = pattern if is_dense or scale == 1 else replace(pattern, segment_lengths=tuple(max(r, w // scale) for w, r in pattern.branches))
    sharding = make_sharding_plan(N // scale, W, problem.layout, name, H, Hk, problem.is_causal)
    steps = cost.head_steps(question)
    shards = tuple(sharding.ranges(rank) for rank in range(W))
    ring_problem = RingProblem(short, ((0, N // scale),), shards, H, Hk, problem.is_causal)
    row = 2 * problem.batch_size * problem.head_dim * problem.itemsize * scale
    seen = [_seen(ring_problem, reader) for reader in range(W)]
    most = _most_of_keys(seen, row, _ranks(problem))
    if sharding.given != sharding.used:
        # striped rows are put in order and back: all but one in W move to another rank
        moved, D, e = local_rows(problem) * (W - 1) // W * problem.batch_size, problem.head_dim, problem.itemsize
        inputs, out = (H + 2 * Hk) * D * e, H * (D * e + wide)
        more = (moved * (inputs + out),) * 2 + (moved * (2 * inputs + out + H * D * e),) * 2
        most = Bytes(*(x + y for x, y in zip(astuple(most), more, strict=True)))
    crossing = crossing_of(ring_problem, row * Hk)
    exchanged = ring_problem if crossing is None else crossing.problem
    held, rows = [], 0
    for rank in _ranks(problem):
        received, sent = seen[rank], [other[rank] for other in seen]
        span = key_span(exchanged, rank)
        rows = max(rows, (span.end - span.start) * any(received))
        keys, packed = (span.end - span.start) * any(received) * Hk, (sum(sent) + sum(received)) * (not exchanged.is_dense)
        held.append(_held([(keys + packed) * row // steps] * steps, [(2 * keys + sum(sent)) * row // steps] * steps))
    return Exchange(
        name=name, bytes=most, steps=steps, held=(max(x[0] for x in held), max(x[1] for x in held)),
        is_exact=is_dense or scale == 1, rows=rows * scale,
        home=pattern if not any(map(any, seen)) else None if crossing is None else _longer(crossing.home, scale),
    )  # fmt: skip


def _longer(home: DilatedPattern | None, scale: int) -> DilatedPattern | None:
    return home if home is None or scale == 1 else replace(home, segment_lengths=tuple(w * scale for w in home.segment_lengths))


def _seen(ring_problem: RingProblem, reader: int) -> list[int]:
    """Returns [holder] the number of (row, key/value head) units that ``reader`` needs of another."""
    mask = needed_keys(ring_problem, reader, torch.device("cpu"))
    heads = ring_problem.num_kv_heads // mask.shape[0]
    return [sum(int(mask[:, a:b].sum()) for a, b in theirs) * heads for theirs in ring_problem.shards]


def _held(buffers: list[int], shares: list[int]) -> tuple[int, int]:
    """Returns the bytes held at a time, forward and backward: keys and gradients of two steps."""
    ahead = [sum(buffers[i : i + AHEAD]) for i in range(len(buffers))]
    return max(ahead), max(keys + sum(shares[max(0, i - 1) : i + 1]) for i, keys in enumerate(ahead))


def _most_of_keys(seen: list[list[int]], row: int, ranks: Iterable[int]) -> Bytes:
    """Returns the most bytes of a rank from the units [reader][holder]: a backward exchanges keys again, and gradients the other way."""
    moved = [(sum(other[rank] for other in seen) * row, sum(seen[rank]) * row) for rank in ranks]
    return _most([Bytes(sent, received, sent + received, sent + received) for sent, received in moved])


def _most(found: list[Bytes]) -> Bytes:
    return max(found, key=lambda x: (x.forward_received, x.backward_received, x.forward_sent))


@functools.lru_cache(maxsize=64)
def _of_blocks(problem: Problem) -> Exchange:
    """Returns the exchange from the ranks' lists; of a long sequence linearly from two shorter ones.

    The edges of a window stay constant, and whatever is spread over the sequence grows with it.
    """
    pattern, W, N = problem.pattern, problem.world_size, problem.num_positions
    assert isinstance(pattern, BlockPattern)
    if num_blocks(pattern, N, problem.num_heads) > _MOST_LISTED and (longest := 8 * max(pattern.q_block, pattern.k_block) * W) < N:
        while num_blocks(pattern, 2 * longest, problem.num_heads) <= _MOST_LISTED:
            longest *= 2
        one, two = (_of_listed(problem.of_length(n)) for n in (longest // 2, longest))
        known = [(*astuple(x.bytes), *x.held) for x in (one, two)]
        *moved, forward, backward = (max(b, b + (b - a) * (N - longest) * 2 // longest) for a, b in zip(*known, strict=True))
        return replace(two, bytes=Bytes(*moved), held=(forward, backward), is_exact=False)
    return _of_listed(problem)


def _of_listed(problem: Problem) -> Exchange:
    pattern, W, N, Hk = problem.pattern, problem.world_size, problem.num_positions, problem.num_kv_heads
    assert isinstance(pattern, BlockPattern)
    shards = tuple(ascending_runs(spans(N, rank, W, problem.layout)) for rank in range(W))
    ring_problem = RingBlockProblem(pattern, ((0, N),), shards, problem.num_heads, Hk, problem.is_causal)
    needs, columns = needs_of(ring_problem, torch.device("cpu")), columns_of(ring_problem)
    load = block_plan.load_of(ring_problem, needs, problem.batch_size, problem.head_dim, problem.itemsize)
    way, _ = block_plan.choose_steps(load, _memory_of_ranks(problem))
    # rows (holder, block)
    counts = torch.stack([columns.of_position[held].bincount(minlength=len(columns.starts)) for held in columns.positions])
    row, seen, first = 2 * problem.batch_size * problem.head_dim * problem.itemsize, torch.zeros((W, W), dtype=torch.int64), 0
    for heads in way:
        seen += (needs.of_heads((first, first + heads)).long() @ counts.T).fill_diagonal_(0) * heads
        first += heads
    # a rank's memory holds all rows from the first to the last that it needs
    lengths = torch.tensor([end - start for start, end in (block_span(ring_problem, needs, rank) for rank in range(W))])
    spanned = lengths * (seen.sum(1) > 0) * Hk
    steps, keys, shares = len(way), int(spanned.max()), int((2 * spanned + seen.sum(0)).max())
    most = _most_of_keys(seen.tolist(), row, range(W))
    return Exchange(name="blocks", bytes=most, steps=steps, held=_held([keys * row // steps] * steps, [shares * row // steps] * steps))


def heads_bytes(seq_len: int, size: int, held: int, sizes: tuple[int, ...], *, lse_grad: bool = False) -> Bytes:
    """Returns the bytes of an all_to_all, forward: q, k, v of others' rows for some heads, and out and lse of its rows' other heads back.

    Args:
        held: positions of the rank.
        sizes: numbers of heads, of key/value heads, head dim, batch size, and bytes of an element and of an element of a sum.
        lse_grad: whether the call returned lse; then its gradient is exchanged, as zeros where a rank has none.
    """
    num_heads, num_kv_heads, head_dim, batch, itemsize, sum_itemsize = sizes
    heads, kv_heads, element = num_heads // size, max(1, num_kv_heads // size), head_dim * itemsize
    # bytes per row of one rank that another rank computes
    inputs, outputs = (heads + 2 * kv_heads) * element, heads * (element + sum_itemsize)
    # dout, out, lse, and the gradient of lse
    more = heads * (2 * element + (1 + lse_grad) * sum_itemsize)
    # ranks that share a key/value head each return a contribution to its gradients
    back = heads * element + 2 * kv_heads * (head_dim * sum_itemsize if num_kv_heads < size else element)
    away, here = held * (size - 1) * batch, (seq_len - held) * batch
    return Bytes(
        away * inputs + here * outputs,
        here * inputs + away * outputs,
        away * (inputs + more) + here * back,
        here * (inputs + more) + away * back,
    )
