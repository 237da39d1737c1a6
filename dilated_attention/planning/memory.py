"""What a call takes on one process, without its tensors: the blocks that a pattern keeps, the keys that ranks exchange, and the peak of its
memory, term by term: as ``engine.memory`` has it, and of block patterns and sequences shared over processes, on the rank needing most."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.block_gather import PIECE_BYTES, PIECE_BYTES_GPU
from dilated_attention.distributed.comm.call_consistency import device_memory
from dilated_attention.distributed.exchange import blocks, setup
from dilated_attention.distributed.exchange.plan import Needed, RingBlockProblem, RingProblem, key_span, needed_keys
from dilated_attention.distributed.exchange.run import AHEAD, HOST_MS
from dilated_attention.distributed.sharding.layout import joined, spans
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern, Intersection, MaskFunction, PerHead, Sparsity, Union
from dilated_attention.pattern.blocks.base import FULL, PARTIAL, head_of, state_of
from dilated_attention.pattern.blocks.block_lists import kept_blocks
from dilated_attention.planning.problem import Problem

# the most blocks that are listed to count pairs, and to size lists; counts of longer sequences come from a sample
MOST_BLOCKS, MOST_FOR_SIZE = 2**18, 2**13
# the most blocks of a function of pairs all of whose pairs are asked about
_MOST_ASKED = 2**10
# a sample is taken where a mean row keeps at most so many blocks, and one that keeps all (a global one) has at most so many
_MOST_OF_A_ROW, _MOST_COLUMNS = 2**13, 2**15
# of a sample, the most blocks, rows of blocks, and queries of a row
_SAMPLED_BLOCKS, _SAMPLED_ROWS, _SAMPLED_QUERIES = 2**15, 16, 4
# multiples of it, without their whole parts, fill [0, 1) evenly
_GOLDEN = 0.618034
# the most blocks that are listed
_MOST_LISTED = 2**16
Terms = list[tuple[str, int]]
# bytes per block needed temporarily while the lists by key block are built: row, key, the sorted copy and the sort order, in 64 bits
_SORT_BYTES = 40


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Counts for one sequence, over all heads.

    ``pairs``: kept (head, query, key) triples; ``entries``: kept blocks, once where heads share their list; ``computed``: pairs of all kept
    blocks, which kernels compute whole; ``list_bytes``: of the lists that kernels read; ``mask_kind``: see ``BlockLists``; ``is_exact``:
    the figures were counted rather than estimated from a sample.
    """

    pairs: int
    entries: int
    computed: int
    list_bytes: int
    mask_kind: str
    is_exact: bool


@functools.lru_cache(maxsize=512)
def block_counts(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool, most: int) -> BlockCounts:
    """Returns the counts of ``pattern``, from a sample of its rows if it has more than ``most`` blocks (a function of pairs: more than
    1,024). Where a row is too long to be looked at, the counts are a shorter sequence's, grown as ``num_blocks``."""
    blocks = num_blocks(pattern, num_positions, num_heads)
    if blocks <= (min(most, _MOST_ASKED) if _asks_pairs(pattern) else most):
        lists = block_lists(pattern, num_positions, num_heads, is_causal=is_causal, device="cpu")
        return BlockCounts(
            pairs=pattern.pairs(num_positions, num_heads, is_causal=is_causal), entries=lists.num_entries,
            computed=lists.num_entries * pattern.q_block * pattern.k_block * (num_heads // lists.num_heads), list_bytes=lists.nbytes,
            mask_kind=lists.mask_kind, is_exact=True,
        )  # fmt: skip
    if _can_sample(pattern, num_positions):
        return _of_sample(pattern, num_positions, num_heads, is_causal)
    shorter = 8 * max(pattern.q_block, pattern.k_block)
    while _can_sample(pattern, 2 * shorter):
        shorter *= 2
    counts, growth = block_counts(pattern, shorter, num_heads, is_causal, most), blocks / num_blocks(pattern, shorter, num_heads)
    grown = {name: int(growth * getattr(counts, name)) for name in ("pairs", "entries", "computed", "list_bytes")}
    return replace(counts, **grown, is_exact=False)  # type: ignore[arg-type]


def num_blocks(pattern: BlockPattern, num_positions: int, num_heads: int) -> float:
    """Returns approximately how many blocks a list would have."""
    return _blocks_of_row(pattern, num_positions) * pattern.grid(num_positions).num_rows * (num_heads if pattern.per_head else 1)


def _blocks_of_row(pattern: BlockPattern, num_positions: int) -> float:
    grid = pattern.grid(num_positions)
    # a ``Sparsity``'s own ``cost`` would build the pattern for this length by looking at all its rows
    return max(1.0, pattern.ratio * grid.num_columns if isinstance(pattern, Sparsity) else pattern.cost(grid))


def _can_sample(pattern: BlockPattern, num_positions: int) -> bool:
    return _blocks_of_row(pattern, num_positions) <= _MOST_OF_A_ROW and pattern.grid(num_positions).num_columns <= _MOST_COLUMNS


def _asks_pairs(pattern: BlockPattern) -> bool:
    """Whether a part of the pattern is a function that its lists ask about every pair."""
    return isinstance(pattern, MaskFunction) or any(_asks_pairs(part) for part in getattr(pattern, "parts", ()))


def _of_sample(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    """Counts of the first row of blocks, which may hold global tokens, and of some others all over the sequence, by some of their queries.
    Of a function of pairs a block counts as kept if any of these queries keeps a key of it, and as kept whole if all keep every key."""
    resolved, heads = pattern.resolved(num_positions, num_heads, is_causal)
    groups, asks, q_block, k_block = len(heads), _asks_pairs(pattern), resolved.q_block, resolved.k_block
    num_rows = resolved.grid(num_positions).num_rows
    if not (asks or isinstance(resolved, Intersection | PerHead | Union)):
        # heads that draw their blocks keep equally many
        heads = heads[:1]
    generator = torch.Generator().manual_seed(0)
    # pairs of rows: where the first lies early in its part of the sequence, the second lies as late in its own, so that rows of a causal
    # pattern, which grow with their position, count right however few they are
    count = 2 * max(1, min(_SAMPLED_ROWS, int(_SAMPLED_BLOCKS / _blocks_of_row(pattern, num_positions) / len(heads))) // 2)
    if num_rows - 1 <= 2 * count:
        # few rows: all of them
        rows = [(row, 1.0) for row in range(num_rows)]
    else:
        # at another place in each part: equal distances would meet one phase of what repeats itself
        early = [(0.3 + i // 2 * _GOLDEN) % 1 for i in range(count)]
        sampled_places = [i + (1 - x if i % 2 else x) for i, x in enumerate(early)]
        rows = [(0, 1.0), *((1 + int(place / count * (num_rows - 1)), (num_rows - 1) / count) for place in sampled_places)]
    totals = torch.zeros(3, dtype=torch.float64)
    for row, weight in rows:
        grid, of_row = resolved.grid(num_positions, (row, row + 1)), min(q_block, num_positions - row * q_block)
        queries = row * q_block + torch.randint(of_row, (_SAMPLED_QUERIES, 1), generator=generator)
        group, _, column = resolved.columns(grid, heads)
        head, size_of_block = head_of(group, heads), (num_positions - column * k_block).clamp(max=k_block) * _SAMPLED_QUERIES
        # whole blocks need no look at their pairs
        state = torch.full_like(column, PARTIAL) if asks else resolved.classify(grid, head, torch.full_like(column, row), column)[0]
        pairs_of_block, partial = size_of_block * (state == FULL), (state == PARTIAL).nonzero()[:, 0]
        keys = column[partial, None, None] * k_block + torch.arange(k_block)
        is_kept = resolved.allowed(queries, keys, head[partial, None, None], num_positions) & (keys < num_positions)
        pairs_of_block[partial] = is_kept.broadcast_to(len(partial), _SAMPLED_QUERIES, k_block).sum((1, 2))
        if asks:
            state = state_of(pairs_of_block > 0, pairs_of_block == size_of_block)
        sampled = pairs_of_block.sum().double() * of_row / _SAMPLED_QUERIES, (state > 0).sum(), (state == PARTIAL).sum()
        totals += weight * torch.stack(sampled)
    pairs, entries, num_partial = (int(x) for x in (totals * groups / len(heads)).tolist())
    kind = "none"
    if num_partial and asks:
        # a short sequence, whose pairs are all asked about
        kind = kept_blocks(pattern, min(num_positions, 16 * q_block), num_heads, is_causal=is_causal).mask_kind
    elif num_partial:
        kind = kept_blocks(resolved, num_positions, num_heads, first_query=num_rows // 2 * q_block, num_queries=q_block).mask_kind
    # row starts and columns; the number of each block's mask; masks, of which those of a function may all differ; intervals
    lists = 4 * groups * num_rows + 4 * entries * (1 + (num_partial > 0)) + num_partial * q_block * k_block // 8 * asks
    heads_per_list = num_heads // groups
    return BlockCounts(
        pairs=pairs * heads_per_list, entries=entries, computed=max(pairs, entries * q_block * k_block) * heads_per_list,
        list_bytes=lists + (8 * num_positions if kind == "interval" else 0), mask_kind=kind, is_exact=False,
    )  # fmt: skip


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
        return _exchange_of_blocks(problem, problem.pattern, memory)
    return _exchange_of_branches(problem, problem.pattern, memory)


def _exchange_of_branches(problem: Problem, pattern: DilatedPattern, memory: int) -> Exchange:
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


def _exchange_of_blocks(problem: Problem, pattern: BlockPattern, memory: int) -> Exchange:
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


def memory_of(problem: Problem) -> MemoryEstimate:
    """Returns the peak memory of the forward and, with ``training``, of the backward, on one process: inputs, results and everything in
    between, including the caller's tensors; without the framework itself and memory that the allocator holds in reserve."""
    if problem.computes == "block_sparse":
        passes = _of_blocks(problem, False), _of_blocks(problem, True)
    elif problem.world_size > 1:
        passes = _of_ring(problem)
    else:
        return of_engine(problem, problem.num_positions)
    forward, backward = (tuple((what, int(size)) for what, size in terms if size) for terms in passes)
    return MemoryEstimate(forward=forward, backward=backward if problem.training else ())


def counts_of(problem: Problem, most: int = MOST_BLOCKS) -> BlockCounts:
    assert isinstance(problem.pattern, BlockPattern)
    return block_counts(problem.pattern, problem.num_positions, problem.num_heads, problem.is_causal, most)


def of_engine(
    problem: Problem, num_positions: int, pattern: Any = None, heads: tuple[int, int] | None = None, **options: Any
) -> MemoryEstimate:
    """Asks the engine's own account. ``pattern``, ``heads``: if not the problem's, or not all heads of queries and of keys."""
    (H, Hk), pattern = heads or (problem.num_heads, problem.num_kv_heads), pattern or problem.pattern
    return attention_memory(
        pattern, num_positions, H, problem.head_dim, batch_size=problem.batch_size, num_kv_heads=Hk, dtype=problem.dtype,
        hardware=problem.hardware, is_causal=problem.is_causal, needs_grad=problem.training, **options,
    )  # fmt: skip


def _selected(problem: Problem, backward: bool, length: int, block_masks: str = "none") -> str:
    try:
        return problem.backend(backward=backward, length=length, block_masks=block_masks)[0]
    except BackendUnavailable:
        return "math"


def sizes_of(problem: Problem) -> tuple[int, int, int, int, int]:
    """Returns elements of a rank's q and k, rows of its log-sum-exp, and bytes of an element and of one of a sum."""
    rows, e, a = problem.batch_size * problem.rows, problem.dtype.itemsize, accumulation_dtype(problem.dtype).itemsize
    return rows * problem.num_heads * problem.head_dim, rows * problem.num_kv_heads * problem.head_dim, rows * problem.num_heads, e, a


def _of_blocks(problem: Problem, backward: bool) -> Terms:
    counts, exchange, W = counts_of(problem, MOST_FOR_SIZE), exchange_of(problem), problem.world_size
    (Q, K, R, e, a), steps, entries = sizes_of(problem), max(1, exchange.steps), counts.entries // W
    results = [("out, dout", 2 * Q * e), ("dq, dk, dv", (Q + 2 * K) * e)] if backward else [("out", Q * e)]
    terms = [("q, k, v", (Q + 2 * K) * e), ("lists of blocks", counts.list_bytes // W), ("lse", R * a), *results]
    terms.append(("keys from elsewhere, shares of gradients" if backward else "keys from elsewhere", exchange.held[backward]))
    if steps > 1:
        terms.append(("gradients of a step", Q * e // steps) if backward else ("results of a step", (Q * e + R * a) // steps))
    mean = max(1, counts.computed // (problem.num_positions * problem.num_heads))
    backend = _selected(problem, backward, mean, counts.mask_kind)
    if backend in ("sdpa_cpu", "math"):
        piece = (PIECE_BYTES if problem.machine.is_cpu else PIECE_BYTES_GPU) * (2 + 2 * backward)
        if problem.num_heads > 1 and W == 1:
            terms.append(("copies, heads first", ((3 if backward else 1) * Q + 2 * K) * e))
        terms.append(("pieces of gathered blocks", min(piece, 2 * counts.computed * problem.head_dim * e)))
        return terms + [("sums of dk, dv", 2 * K * a * (e != a)), ("lse with +inf", 2 * R * a)] * backward
    if not backward:
        return [*terms, ("lists as the kernel reads them", 4 * entries)]
    # dq, and dk and dv where query heads share them, or only two numbers a row
    sums = (4 * (Q + 2 * R) + 8 * K * (K < Q) if backend == "flash4" else 8 * R) // steps
    if sums + 8 * entries > _SORT_BYTES * entries:
        return [*terms, ("sums of the kernel in float32", sums), ("lists as the kernel reads them", 8 * entries)]
    return [*terms, ("lists by key block, while they are sorted", _SORT_BYTES * entries)]


def _of_ring(problem: Problem) -> tuple[Terms, Terms]:
    """On the rank's own rows, or of some heads of all rows, the engine's account, and the keys from elsewhere."""
    exchange, W, H, Hk, pattern = exchange_of(problem), problem.world_size, problem.num_heads, problem.num_kv_heads, problem.pattern
    assert isinstance(pattern, DilatedPattern)
    Q, K, R, e, a = sizes_of(problem)
    if exchange.name == "all_to_all":
        # computed as on one process, in addition to the caller's rows of all heads
        pattern = pattern if pattern.branch_heads == "split" else pattern.with_heads(0, H // W, H)
        whole = of_engine(problem, problem.num_positions, pattern, (H // W, max(1, Hk // W)))
        caller = ("q, k, v in the caller's rows", (Q + 2 * K) * e), ("q, k, v, out, dout in the caller's rows", (3 * Q + 2 * K) * e)
        return [caller[0], *whole.forward], [caller[1], *whole.backward]
    keys, received = ("keys from elsewhere", exchange.held[0]), 2 * problem.batch_size * Hk * problem.head_dim * exchange.rows
    if problem.computes == "dense":
        common = [("q, k, v", (Q + 2 * K) * e), keys, ("lse", R * a)]
        # zigzag computes its two ranges one after the other
        ranges, on_gpu, shared = 1 + (problem.layout == "zigzag"), not problem.machine.is_cpu, 4
        if on_gpu and problem.training and Hk < H and _selected(problem, True, problem.num_positions).startswith("sdpa"):
            # PyTorch's own kernels have dk and dv of each query head
            shared = H // Hk * e
        sums = (4 * Q // ranges + received * shared * (Hk < H)) * on_gpu // exchange.steps
        grads = ("dk, dv of all keys in memory", received * e * ranges // exchange.steps), ("sums of kernels in float32", sums)
        return [*common, ("out", Q * e)], [*common, ("out, dout", 2 * Q * e), ("dq", Q * e), *grads]
    if exchange.home is None:
        first = exchange.rows - problem.rows if problem.is_causal else 0
        local = of_engine(problem, problem.rows, keys=(exchange.rows, first), host_ms=HOST_MS)
        more = [keys, ("dk, dv of all keys in memory", (received - 2 * K) * e)]
    else:
        local = of_engine(problem, problem.rows, exchange.home)
        more = [("keys from elsewhere, shares of gradients", exchange.held[1])]
    return [*local.forward, keys], [*local.backward, *more]
