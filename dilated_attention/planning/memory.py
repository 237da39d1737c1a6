"""Estimates what a call takes on one process, from shapes alone: how many blocks its pattern keeps (``counts_of``), how many bytes ranks
exchange (``exchange_of``), and the peak of its memory, term by term (``memory_of``).

``engine.memory`` estimates the memory of dense and dilated calls on one process. This file adds block patterns, and sequences shared over
processes, on the rank that needs most.

Letters: W ranks, N positions of the whole sequence, H query heads, Hk key/value heads, B batch, D head dim; Q, K, R, e, a see ``sizes_of``.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.nonfinite import PIECE_BYTES, PIECE_BYTES_GPU
from dilated_attention.distributed import ring_pass
from dilated_attention.distributed.comm.call_consistency import device_memory
from dilated_attention.distributed.exchange.plan import RingProblem, key_span
from dilated_attention.distributed.exchange.run import AHEAD, HOST_MS
from dilated_attention.distributed.sharding.layout import shards_of
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern, Intersection, MaskFunction, PerHead, Sparsity, Union
from dilated_attention.pattern.blocks.base import FULL, PARTIAL, head_of, state_of
from dilated_attention.pattern.blocks.block_lists import kept_blocks
from dilated_attention.planning.problem import WHOLE, Problem

# names and sizes of what is in memory: (what, bytes)
Terms = list[tuple[str, int]]
# a pattern of at most so many blocks is listed: to count its pairs, and to size its memory. A sample gives the counts of longer sequences
MOST_BLOCKS, MOST_FOR_SIZE = 2**18, 2**13
# the same for a function of pairs, which is asked about every pair of every block
_MOST_ASKED_BLOCKS = 2**10
# a sample can be taken where a mean row of blocks keeps at most so many, and a row that keeps all (of global tokens) has at most so many
_MOST_BLOCKS_OF_ROW, _MOST_COLUMNS = 2**13, 2**15
# what a sample looks at: at most so many blocks and so many rows of blocks, and so many queries of each row
_SAMPLED_BLOCKS, _SAMPLED_ROWS, _SAMPLED_QUERIES = 2**15, 16, 4
# the fractional parts of its multiples fill [0, 1) evenly
_GOLDEN_RATIO = 0.618034
# the exchange of a pattern of at most so many blocks is read from the ranks' lists; that of a longer sequence is extrapolated
_MOST_RING_BLOCKS = 2**16
# temporary bytes per block while the lists by key block are built: row, key, the sorted copy and the sort order, in 64 bits
_SORT_BYTES = 40


class BlockCounts(NamedTuple):
    """Counts for one sequence, over all heads.

    ``pairs``: kept (head, query, key) triples; ``entries``: kept blocks, once where heads share a list; ``computed``: all pairs of the kept
    blocks, since kernels compute a block whole; ``list_bytes``: bytes of the lists that kernels read; ``mask_kind``: see ``BlockLists``;
    ``is_exact``: the figures were counted, not estimated from a sample.
    """

    pairs: int
    entries: int
    computed: int
    list_bytes: int
    mask_kind: str
    is_exact: bool


@functools.lru_cache(maxsize=512)
def block_counts(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool, most: int) -> BlockCounts:
    """Returns the counts of ``pattern``. At most ``most`` blocks (1,024 of a function of pairs) are counted one by one; more are estimated
    from a sample of rows. Where rows are too long for a sample, the counts are those of a shorter sequence, scaled by ``num_blocks``, or of
    a function of pairs as they grew from half of that."""
    blocks = num_blocks(pattern, num_positions, num_heads)
    if blocks <= (min(most, _MOST_ASKED_BLOCKS) if _asks_pairs(pattern) else most):
        lists = block_lists(pattern, num_positions, num_heads, is_causal=is_causal, device="cpu")
        return BlockCounts(
            pairs=pattern.pairs(num_positions, num_heads, is_causal=is_causal), entries=lists.num_entries,
            computed=lists.num_entries * pattern.q_block * pattern.k_block * (num_heads // lists.num_heads), list_bytes=lists.nbytes,
            mask_kind=lists.mask_kind, is_exact=True,
        )  # fmt: skip
    if _can_sample(pattern, num_positions):
        return _sampled_counts(pattern, num_positions, num_heads, is_causal)
    shorter = 8 * max(pattern.q_block, pattern.k_block)
    while _can_sample(pattern, 2 * shorter):
        shorter *= 2
    counts, names = block_counts(pattern, shorter, num_heads, is_causal, most), ("pairs", "entries", "computed", "list_bytes")
    growth = dict.fromkeys(names, blocks / num_blocks(pattern, shorter, num_heads))
    if _asks_pairs(pattern):
        # only a function itself says how its pairs grow: as a power of the length, seen where it doubles
        half, doublings = block_counts(pattern, shorter // 2, num_heads, is_causal, most), math.log2(num_positions / shorter)
        growth = {name: (max(1, getattr(counts, name)) / max(1, getattr(half, name))) ** doublings for name in names}
    grown = {name: int(growth[name] * getattr(counts, name)) for name in names}
    return counts._replace(**grown, is_exact=False)  # type: ignore[arg-type]


def num_blocks(pattern: BlockPattern, num_positions: int, num_heads: int) -> float:
    """Returns approximately how many blocks the pattern keeps, once where heads share a list."""
    return _blocks_of_row(pattern, num_positions) * pattern.grid(num_positions).num_rows * (num_heads if pattern.per_head else 1)


def _blocks_of_row(pattern: BlockPattern, num_positions: int) -> float:
    """Returns approximately how many blocks a row of blocks keeps on average."""
    grid = pattern.grid(num_positions)
    # ``Sparsity.cost`` would look at all rows to find the pattern of this length
    return max(1.0, pattern.ratio * grid.num_columns if isinstance(pattern, Sparsity) else pattern.cost(grid))


def _can_sample(pattern: BlockPattern, num_positions: int) -> bool:
    return _blocks_of_row(pattern, num_positions) <= _MOST_BLOCKS_OF_ROW and pattern.grid(num_positions).num_columns <= _MOST_COLUMNS


def _asks_pairs(pattern: BlockPattern) -> bool:
    """Whether the pattern or a part of it is a function, which has to be asked about every pair."""
    return isinstance(pattern, MaskFunction) or any(_asks_pairs(part) for part in getattr(pattern, "parts", ()))


def _sampled_counts(pattern: BlockPattern, num_positions: int, num_heads: int, is_causal: bool) -> BlockCounts:
    """Estimates the counts from some queries of some rows of blocks: the first row, which may hold global tokens, and rows all over the
    sequence. A block of a function of pairs counts as kept if one of these queries keeps one of its keys, as whole if all keep all."""
    resolved, heads = pattern.resolved(num_positions, num_heads, is_causal)
    num_lists, asks_pairs, q_block, k_block = len(heads), _asks_pairs(pattern), resolved.q_block, resolved.k_block
    num_rows = resolved.grid(num_positions).num_rows
    if not (asks_pairs or isinstance(resolved, Intersection | PerHead | Union)):
        # every head draws equally many blocks, so one head is enough
        heads = heads[:1]
    generator = torch.Generator().manual_seed(0)
    # one row is sampled in each of so many parts of the sequence. Parts go in pairs: where the row lies early in the first, it lies as late
    # in the second. So a causal pattern, whose rows grow with their position, is counted right from few rows
    num_sampled = 2 * max(1, min(_SAMPLED_ROWS, int(_SAMPLED_BLOCKS / _blocks_of_row(pattern, num_positions) / len(heads))) // 2)
    if num_rows - 1 <= 2 * num_sampled:
        # there are few rows, so all are looked at
        rows = [(row, 1.0) for row in range(num_rows)]
    else:
        # places differ from pair to pair: at equal distances a pattern that repeats itself would show one phase alone
        early = [(0.3 + i // 2 * _GOLDEN_RATIO) % 1 for i in range(num_sampled)]
        sampled_places = [i + (1 - x if i % 2 else x) for i, x in enumerate(early)]
        rows = [(0, 1.0), *((1 + int(place / num_sampled * (num_rows - 1)), (num_rows - 1) / num_sampled) for place in sampled_places)]
    totals = torch.zeros(3, dtype=torch.float64)
    for row, weight in rows:
        grid, queries_of_row = resolved.grid(num_positions, (row, row + 1)), min(q_block, num_positions - row * q_block)
        queries = row * q_block + torch.randint(queries_of_row, (_SAMPLED_QUERIES, 1), generator=generator)
        group, _, column = resolved.columns(grid, heads)
        head, sampled_pairs = head_of(group, heads), (num_positions - column * k_block).clamp(max=k_block) * _SAMPLED_QUERIES
        # of a block that is kept whole, no pair is looked at
        state = torch.full_like(column, PARTIAL) if asks_pairs else resolved.classify(grid, head, torch.full_like(column, row), column)[0]
        pairs_of_block, partial = sampled_pairs * (state == FULL), (state == PARTIAL).nonzero()[:, 0]
        keys = column[partial, None, None] * k_block + torch.arange(k_block)
        is_kept = resolved.allowed(queries, keys, head[partial, None, None], num_positions) & (keys < num_positions)
        pairs_of_block[partial] = is_kept.broadcast_to(len(partial), _SAMPLED_QUERIES, k_block).sum((1, 2))
        if asks_pairs:
            state = state_of(pairs_of_block > 0, pairs_of_block == sampled_pairs)
        figures = pairs_of_block.sum().double() * queries_of_row / _SAMPLED_QUERIES, (state > 0).sum(), (state == PARTIAL).sum()
        totals += weight * torch.stack(figures)
    pairs, entries, num_partial = (int(x) for x in (totals * num_lists / len(heads)).tolist())
    mask_kind = "none"
    if num_partial and asks_pairs:
        # read from the lists of a short sequence, whose pairs are all asked about
        mask_kind = kept_blocks(pattern, min(num_positions, 16 * q_block), num_heads, is_causal=is_causal).mask_kind
    elif num_partial:
        mask_kind = kept_blocks(resolved, num_positions, num_heads, first_query=num_rows // 2 * q_block, num_queries=q_block).mask_kind
    # row starts; columns, and the index of each block's mask; the masks themselves, of a function alone, whose blocks may all differ
    bytes_of_lists = 4 * num_lists * num_rows + 4 * entries * (1 + (num_partial > 0)) + num_partial * q_block * k_block // 8 * asks_pairs
    heads_per_list = num_heads // num_lists
    return BlockCounts(
        pairs=pairs * heads_per_list, entries=entries, computed=max(pairs, entries * q_block * k_block) * heads_per_list,
        list_bytes=bytes_of_lists + (8 * num_positions if mask_kind == "interval" else 0), mask_kind=mask_kind, is_exact=False,
    )  # fmt: skip


class Bytes(NamedTuple):
    """The bytes that one rank sends and receives in each pass."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int


class Exchange(NamedTuple):
    """How the ranks of a call exchange keys, and what this costs: in bytes on the rank that receives most, in memory on the one that holds
    most.

    Args:
        name: ``"all_gather"``, ``"all_to_all"``, ``"blocks"``, or ``"none"`` for one process.
        bytes: what the rank that receives most sends and receives.
        steps: in how many steps, each of some heads, the keys arrive.
        held: bytes of keys in memory for the exchange: in the forward, and in the backward together with gradients on their way.
        is_exact: whether the figures were read from the needs in the whole sequence; else from those in two shorter ones.
        rows: positions whose keys are in memory at a step.
        home: in an all_gather of branches, those that a rank computes from its own keys; None if all branches read received keys.
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
    """Returns how the ranks of this problem exchange keys, and what it costs."""
    if problem.world_size == 1:
        return NO_EXCHANGE
    # in whole GiB, as the ranks of a call see it: see ``device_memory``
    memory = device_memory(torch.device("cpu")) if problem.machine.is_cpu else problem.machine.memory >> 30 << 30
    pattern, W, N, H, Hk = problem.pattern, problem.world_size, problem.num_positions, problem.num_heads, problem.num_kv_heads
    B, D, e, a = problem.batch_size, problem.head_dim, problem.dtype.itemsize, accumulation_dtype(problem.dtype).itemsize
    blocks, branches = (pattern, None) if isinstance(pattern, BlockPattern) else (None, pattern)
    sides = None
    if isinstance(pattern, BlockPattern) and problem.window is not None:
        # computed as dense attention
        blocks, branches, sides = None, WHOLE, pattern.dense_window
    if blocks is not None and num_blocks(blocks, N, H) > _MOST_RING_BLOCKS and (longest := 8 * max(blocks.q_block, blocks.k_block) * W) < N:
        # extrapolated linearly from two shorter ones: the edges of a window stay as they are, and what is spread over the sequence grows
        while num_blocks(blocks, 2 * longest, H) <= _MOST_RING_BLOCKS:
            longest *= 2
        short, long = (exchange_of(problem.of_length(n)) for n in (longest // 2, longest))
        figures = zip((*short.bytes, *short.held), (*long.bytes, *long.held), strict=True)
        *moved, forward, backward = (max(y, y + (y - x) * (N - longest) * 2 // longest) for x, y in figures)
        return long._replace(bytes=Bytes(*moved), held=(forward, backward), is_exact=False)
    is_dense = problem.computes == "dense"
    name = ring_pass.exchange_of(problem.exchange, problem.layout, W, H, Hk, is_dense=is_dense, is_causal=problem.is_causal)
    by_heads, reordering = name == "all_to_all", [0, 0, 0, 0]
    if branches is not None and by_heads and (reason := ring_pass.why_no_heads(H, Hk, W, branches.branch_heads)):
        raise ValueError(f"exchange is 'all_to_all' and {reason}; use exchange='auto'")
    if by_heads or problem.layout == "striped":
        # all rows but one in W go to another rank: q, k, v, and out and lse back; in a backward these, dout, and gradients back. By heads a
        # key/value head goes to all ranks that share it, and each returns a gradient
        is_shared = by_heads and Hk < W
        rows, inputs, out = B * (N - N // W), (H + 2 * (W if is_shared else Hk)) * D * e, H * (D * e + a)
        grads = inputs + H * D * e + 2 * W * D * (a - e) * is_shared
        reordering = [rows * (inputs + out) // W] * 2 + [rows * (inputs + out + grads) // W] * 2
    if by_heads:
        return Exchange(name=name, bytes=Bytes(*reordering), steps=1, held=(0, 0))
    shards = shards_of(N, W, problem.layout, is_causal=problem.is_causal)
    ring_problem = RingProblem(branches, ((0, N),), shards, H, Hk, problem.is_causal, sides, blocks=blocks)
    # bytes of the keys and values of one position and head
    unit_bytes, home = 2 * B * D * e, None
    if (crossing := ring_pass.crossing_of(ring_problem, unit_bytes * Hk)) is not None:
        ring_problem, home = crossing.problem, crossing.home
    kind, steps = "blocks" if blocks is not None else "dense" if branches == WHOLE else "dilated", [(0, Hk)]
    if branches is None or branches.branch_heads == "all":
        steps = ring_pass.steps_of(kind, ring_problem, (B, D, e), memory, needs_grad=problem.training)
    # how many units, one row of one key/value head each, rank [reader] needs of rank [holder]. All heads of a step of blocks receive what
    # one of them needs
    units = torch.zeros((W, W), dtype=torch.int64)
    # where all heads need the same rows, one step tells of all: long dense sequences have a step for each head
    is_alike = blocks is None and all(ring_problem.needed(rank).heads == 1 for rank in range(W))
    for low, high in [(0, Hk)] if is_alike else steps:
        needed = (ring_problem.needed(rank, (low, high)) for rank in range(W))
        units += torch.tensor([[x.count(shard) * ((high - low) // x.heads) for shard in ring_problem.shards] for x in needed])
    received, sent = units.sum(1), units.sum(0)
    # a forward sends every needed unit once. A backward sends it again, and its gradient the other way
    in_forward, out_forward = max(zip((received * unit_bytes).tolist(), (sent * unit_bytes).tolist(), strict=True))
    moved = [out_forward, in_forward, in_forward + out_forward, in_forward + out_forward]
    # a rank has memory for all rows from the first to the last that it needs. While a step is computed, its keys are in memory, and what
    # the next step sends and receives (``ahead``); in a backward also the gradients of its keys, and with several steps those of the step
    # before. With one step nothing is ahead while its gradients are made. Of blocks the gradients of a rank's own keys are counted
    # elsewhere, since they are made last
    spanned = [key_span(ring_problem, rank) for rank in range(W)]
    lengths = torch.tensor([span.end - span.start for span in spanned]) * (received > 0)
    keys, own, ahead = lengths * Hk, 0 if blocks is None else problem.rows * Hk, (sent + received) * min(AHEAD, len(steps))
    with_gradients = torch.maximum(2 * keys - own, keys + ahead) if len(steps) == 1 else 3 * keys + ahead
    forward, backward = (int(x.max()) * unit_bytes // len(steps) for x in (keys + ahead, with_gradients))
    return Exchange(
        name="all_gather" if blocks is None else kind, bytes=Bytes(*map(operator.add, moved, reordering)), steps=len(steps),
        held=(forward, backward), home=home if units.any() else branches, rows=int(lengths.max()),
    )  # fmt: skip


def memory_of(problem: Problem) -> MemoryEstimate:
    """Returns the peak memory of the forward and, with ``training``, of the backward, on one process. Counted are inputs, results and what
    is allocated between them, the caller's tensors included; not torch itself, nor memory that its allocator keeps in reserve."""
    window = problem.window
    if problem.computes == "block_sparse" and window is None:
        passes = _block_terms(problem, False), _block_terms(problem, True)
    elif problem.world_size > 1:
        passes = _ring_terms(problem)
    else:
        return engine_estimate(problem, problem.num_positions, None if window is None else WHOLE, window=window or ())
    forward, backward = (tuple((what, int(size)) for what, size in terms if size) for terms in passes)
    return MemoryEstimate(forward=forward, backward=backward if problem.training else ())


def counts_of(problem: Problem, most: int = MOST_BLOCKS) -> BlockCounts:
    """Returns ``block_counts`` of a block-sparse problem."""
    assert isinstance(problem.pattern, BlockPattern)
    return block_counts(problem.pattern, problem.num_positions, problem.num_heads, problem.is_causal, most)


def engine_estimate(
    problem: Problem, num_positions: int, pattern: Any = None, heads: tuple[int, int] | None = None, **options: Any
) -> MemoryEstimate:
    """Returns the engine's own estimate, ``attention_memory``, of a dense or dilated problem at ``num_positions``. ``pattern``, ``heads``:
    instead of the problem's pattern and of its (query heads, key/value heads); ``options``: further arguments of ``attention_memory``."""
    (H, Hk), pattern = heads or (problem.num_heads, problem.num_kv_heads), pattern or problem.pattern
    return attention_memory(
        pattern, num_positions, H, problem.head_dim, batch_size=problem.batch_size, num_kv_heads=Hk, dtype=problem.dtype,
        hardware=problem.hardware, is_causal=problem.is_causal, needs_grad=problem.training, **options,
    )  # fmt: skip


def _backend_name(problem: Problem, backward: bool, length: int, block_masks: str = "none") -> str:
    """Returns the name of the backend that computes a pass; where there is none, the plain one."""
    try:
        return problem.backend(backward=backward, length=length, block_masks=block_masks)[0]
    except BackendUnavailable:
        return "math"


def sizes_of(problem: Problem) -> tuple[int, int, int, int, int]:
    """Returns, of the tensors of one rank, (Q elements of q, K elements of k, R numbers of the log-sum-exp, e bytes of an element, a bytes
    of a number in the accumulation dtype, such as the log-sum-exp's)."""
    rows, e, a = problem.batch_size * problem.rows, problem.dtype.itemsize, accumulation_dtype(problem.dtype).itemsize
    return rows * problem.num_heads * problem.head_dim, rows * problem.num_kv_heads * problem.head_dim, rows * problem.num_heads, e, a


def _block_terms(problem: Problem, backward: bool) -> Terms:
    """Returns what a pass of a block pattern has in memory, on one process or on a rank of several."""
    counts, exchange, W = counts_of(problem, MOST_FOR_SIZE), exchange_of(problem), problem.world_size
    (Q, K, R, e, a), steps, entries = sizes_of(problem), max(1, exchange.steps), counts.entries // W
    results = [("out, dout", 2 * Q * e), ("dq, dk, dv", (Q + 2 * K) * e)] if backward else [("out", Q * e)]
    terms = [("q, k, v", (Q + 2 * K) * e), ("lists of blocks", counts.list_bytes // W), ("lse", R * a), *results]
    terms.append(("keys from elsewhere, shares of gradients" if backward else "keys from elsewhere", exchange.held[backward]))
    if steps > 1:
        terms.append(("gradients of a step", Q * e // steps) if backward else ("results of a step", (Q * e + R * a) // steps))
    mean = max(1, counts.computed // (problem.num_positions * problem.num_heads))
    backend = _backend_name(problem, backward, mean, counts.mask_kind)
    if backend in ("sdpa_cpu", "math"):
        piece = (PIECE_BYTES if problem.machine.is_cpu else PIECE_BYTES_GPU) * (2 + 2 * backward)
        if problem.num_heads > 1 and W == 1:
            terms.append(("copies, heads first", ((3 if backward else 1) * Q + 2 * K) * e))
        terms.append(("pieces of gathered blocks", min(piece, 2 * counts.computed * problem.head_dim * e)))
        return terms + [("sums of dk, dv", 2 * K * a * (e != a)), ("lse with +inf", 2 * R * a)] * backward
    if not backward:
        return [*terms, ("lists as the kernel reads them", 4 * entries)]
    # flash4 sums dq and, where query heads share keys, dk and dv; other kernels keep two numbers a row
    sums = (4 * (Q + 2 * R) + 8 * K * (K < Q) if backend == "flash4" else 8 * R) // steps
    if sums + 8 * entries > _SORT_BYTES * entries:
        return [*terms, ("sums of the kernel in float32", sums), ("lists as the kernel reads them", 8 * entries)]
    return [*terms, ("lists by key block, while they are sorted", _SORT_BYTES * entries)]


def _ring_terms(problem: Problem) -> tuple[Terms, Terms]:
    """Returns (forward, backward): what a dense or dilated call over several ranks has in memory on one. This is the engine's estimate for
    the rank's own rows, or for some heads of all rows, and the keys from elsewhere."""
    exchange, W, H, Hk = exchange_of(problem), problem.world_size, problem.num_heads, problem.num_kv_heads
    pattern = problem.pattern if problem.window is None else WHOLE
    assert isinstance(pattern, DilatedPattern)
    Q, K, R, e, a = sizes_of(problem)
    if exchange.name == "all_to_all":
        # some heads are computed as on one process; the caller's rows of all heads stay in memory beside them
        pattern = pattern if pattern.branch_heads == "split" else pattern.with_heads(0, H // W, H)
        whole = engine_estimate(problem, problem.num_positions, pattern, (H // W, max(1, Hk // W)))
        caller = ("q, k, v in the caller's rows", (Q + 2 * K) * e), ("q, k, v, out, dout in the caller's rows", (3 * Q + 2 * K) * e)
        return [caller[0], *whole.forward], [caller[1], *whole.backward]
    # elements of K and V of all rows that the rank has in memory
    keys, held = ("keys from elsewhere", exchange.held[0]), 2 * problem.batch_size * Hk * problem.head_dim * exchange.rows
    if problem.computes == "dense" or problem.window is not None:
        common = [("q, k, v", (Q + 2 * K) * e), keys, ("lse", R * a)]
        # zigzag computes its two ranges one after the other
        ranges, on_gpu, sum_bytes = 1 + (problem.layout == "zigzag"), not problem.machine.is_cpu, 4
        if on_gpu and problem.training and Hk < H and _backend_name(problem, True, problem.num_positions).startswith("sdpa"):
            # PyTorch's kernels make dk and dv for each query head, in the dtype of k
            sum_bytes = H // Hk * e
        sums = (4 * Q // ranges + held * sum_bytes * (Hk < H)) * on_gpu // exchange.steps
        grads = ("dk, dv of all keys in memory", held * e * ranges // exchange.steps), ("sums of kernels in float32", sums)
        return [*common, ("out", Q * e)], [*common, ("out, dout", 2 * Q * e), ("dq", Q * e), *grads]
    if exchange.home is None:
        first = exchange.rows - problem.rows if problem.is_causal else 0
        local = engine_estimate(problem, problem.rows, keys=(exchange.rows, first), host_ms=HOST_MS)
        # the local estimate has the gradients of the rank's own keys
        more = [keys, ("dk, dv of all keys in memory", (held - 2 * K) * e)]
    else:
        local = engine_estimate(problem, problem.rows, exchange.home)
        more = [("keys from elsewhere, shares of gradients", exchange.held[1])]
    return [*local.forward, keys], [*local.backward, *more]
