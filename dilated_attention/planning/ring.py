"""A sequence shared by several processes: what a rank holds, receives and sends, from the keys that the ranks need of one another."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.call_consistency import device_memory
from dilated_attention.distributed.exchange import blocks, setup
from dilated_attention.distributed.exchange.plan import Needed, RingBlockProblem, RingProblem, key_span, needed_keys
from dilated_attention.distributed.exchange.run import AHEAD
from dilated_attention.distributed.sharding.layout import joined, spans
from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.blocks import num_blocks
from dilated_attention.planning.problem import Problem

# the most blocks that are listed
_MOST_LISTED = 2**16


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
        bytes, steps: that this rank sends and receives, and in how many steps the keys arrive.
        held: bytes of received keys in memory at a time: in the forward, and in the backward together with gradient shares in transit.
        is_exact: whether the figures were read from the needs in the whole sequence rather than in shorter ones.
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


@functools.lru_cache(maxsize=256)
def exchange_of(problem: Problem) -> Exchange:
    if problem.world_size == 1:
        return NO_EXCHANGE
    # in whole GiB, as in ``device_memory``
    memory = device_memory(torch.device("cpu")) if problem.machine.is_cpu else problem.machine.memory >> 30 << 30
    if isinstance(problem.pattern, BlockPattern):
        return _of_blocks(problem, problem.pattern, memory)
    return _of_branches(problem, problem.pattern, memory)


def _of_branches(problem: Problem, pattern: DilatedPattern, memory: int) -> Exchange:
    W, N, H, Hk = problem.world_size, problem.num_positions, problem.num_heads, problem.num_kv_heads
    B, D, e, wide = problem.batch_size, problem.head_dim, problem.dtype.itemsize, accumulation_dtype(problem.dtype).itemsize
    is_dense = problem.computes == "dense"
    name = setup.exchange_of(problem.exchange, problem.layout, W, H, Hk, is_dense=is_dense, is_causal=problem.is_causal)
    if name == "all_to_all":
        if reason := setup.why_no_heads(H, Hk, W, pattern.branch_heads):
            raise ValueError(f"exchange is 'all_to_all' and {reason}; use exchange='auto'")
        # q, k, v of others' rows for some heads, and out and lse of its rows' other heads back; in a backward also dout, out, lse, and the
        # gradients back, those of a key/value head from each rank that shares it
        heads, kv_heads, element, rows = H // W, max(1, Hk // W), D * e, B * (N - N // W)
        forward = rows * ((heads + 2 * kv_heads) * element + heads * (element + wide))
        backward = forward + rows * (2 * heads * element + 2 * kv_heads * (D * wide if Hk < W else element))
        return Exchange(name=name, bytes=Bytes(forward, forward, backward, backward), steps=1, held=(0, 0))
    sharding = setup.make_sharding_plan(N, W, problem.layout, name, H, Hk, problem.is_causal)
    shards = tuple(sharding.ranges(rank) for rank in range(W))
    ring_problem = RingProblem(pattern, ((0, N),), shards, H, Hk, problem.is_causal)
    row = 2 * B * D * e
    crossing = setup.crossing_of(ring_problem, row * Hk)
    exchanged, home = (ring_problem, None) if crossing is None else (crossing.problem, crossing.home)
    seen = _units([needed_keys(exchanged, rank) for rank in range(W)], exchanged.shards, Hk)
    spanned = [key_span(exchanged, rank) for rank in range(W)]
    lengths = torch.tensor([span.end - span.start for span in spanned]) * (seen.sum(1) > 0)
    sizes = {"batch": B, "num_heads": H, "num_kv_heads": Hk, "head_dim": D, "itemsize": e}
    if is_dense:
        steps = setup.dense_steps(N, W, is_causal=problem.is_causal, needs_grad=problem.training, memory=memory, **sizes)
    else:
        steps = setup.head_steps("dilated", Hk, 0, exchanged.seq_len * Hk * row * (1 + problem.training), 0, memory)
    found = _gathered(name, seen, lengths * Hk, row, len(steps) if pattern.branch_heads == "all" else 1)
    if problem.layout == "striped":
        # rows are put in order and back: all but one in W move to another rank
        moved, inputs, out = problem.rows * (W - 1) // W * B, (H + 2 * Hk) * D * e, H * (D * e + wide)
        more = (moved * (inputs + out),) * 2 + (moved * (2 * inputs + out + H * D * e),) * 2
        found = replace(found, bytes=Bytes(*map(sum, zip(astuple(found.bytes), more, strict=True))))
    return replace(found, rows=int(lengths.max()), home=home if seen.any() else pattern)


def _units(needed: list[Needed], shards: tuple[tuple[Range, ...], ...], kv_heads: int) -> torch.Tensor:
    """Returns [reader][holder] the (row, key/value head) units that a rank needs of another."""
    return torch.tensor([[x.count(shard) * (kv_heads // x.heads) for shard in shards] for x in needed])


def _gathered(name: str, seen: torch.Tensor, keys: torch.Tensor, row: int, steps: int, own: int = 0) -> Exchange:
    """Returns an exchange of the units ``seen`` [reader][holder] of ``row`` bytes, into a memory of ``keys`` units: a backward exchanges
    keys again, and gradients the other way. A step's memory is there while it is computed, what the next one sends and receives too; in a
    backward also the memory's gradients, and those of the step before. ``own``: units of a rank's gradients, if they are made last."""
    received, sent = max(zip((seen.sum(1) * row).tolist(), (seen.sum(0) * row).tolist(), strict=True))
    ahead = (seen.sum(0) + seen.sum(1)) * min(AHEAD, steps)
    both = torch.maximum(2 * keys - own, keys + ahead) if steps == 1 else 3 * keys + ahead
    forward, backward = (int(units.max()) * row // steps for units in (keys + ahead, both))
    return Exchange(name=name, bytes=Bytes(sent, received, sent + received, sent + received), steps=steps, held=(forward, backward))


def _of_blocks(problem: Problem, pattern: BlockPattern, memory: int) -> Exchange:
    """Returns the exchange from the ranks' lists; of a long sequence linearly from two shorter ones: the edges of a window stay constant,
    and whatever is spread over the sequence grows with it."""
    W, N, H, Hk = problem.world_size, problem.num_positions, problem.num_heads, problem.num_kv_heads
    if num_blocks(pattern, N, H) > _MOST_LISTED and (longest := 8 * max(pattern.q_block, pattern.k_block) * W) < N:
        while num_blocks(pattern, 2 * longest, H) <= _MOST_LISTED:
            longest *= 2
        one, two = (exchange_of(problem.of_length(n)) for n in (longest // 2, longest))
        both = zip((*astuple(one.bytes), *one.held), (*astuple(two.bytes), *two.held), strict=True)
        *moved, forward, backward = (max(b, b + (b - a) * (N - longest) * 2 // longest) for a, b in both)
        return replace(two, bytes=Bytes(*moved), held=(forward, backward), is_exact=False)
    shards = tuple(joined((start, stop) for start, stop, _ in spans(N, rank, W, problem.layout)) for rank in range(W))
    ring_problem = RingBlockProblem(pattern, ((0, N),), shards, H, Hk, problem.is_causal)
    needs = blocks.needs_of(ring_problem, torch.device("cpu"))
    sizes = problem.batch_size, problem.head_dim, problem.dtype.itemsize
    needed_of = functools.partial(blocks.needed_blocks, ring_problem, needs)
    steps = setup.block_steps(ring_problem, needs, needed_of, sizes, memory, needs_grad=problem.training)
    seen = torch.zeros((W, W), dtype=torch.int64)
    for kv_heads in setup.heads_of(steps):
        # what one head needs counts for all heads of its step
        needed = [needed_of(rank, kv_heads) for rank in range(W)]
        seen += _units(needed, shards, kv_heads[1] - kv_heads[0])
    # a rank's memory holds all rows from the first to the last that it needs
    lengths = torch.tensor([end - start for start, end in (blocks.block_span(ring_problem, needs, rank) for rank in range(W))])
    row = 2 * problem.batch_size * problem.head_dim * problem.dtype.itemsize
    return _gathered("blocks", seen, lengths * (seen.sum(1) > 0) * Hk, row, len(steps), problem.rows * Hk)
