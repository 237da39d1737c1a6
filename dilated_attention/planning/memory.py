"""Computes the peak memory of one attention call of any kind, term by term, without allocating its tensors: adds to ``engine.memory`` block
patterns, and sequences sharded over processes, on the rank that needs the most."""

from __future__ import annotations

from typing import Any

from dilated_attention.backends import BackendUnavailable
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.block_kernels.block_gather import _PIECE_BYTES, _PIECE_BYTES_GPU
from dilated_attention.distributed.exchange.computation import HOST_MS
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.blocks import MOST_BLOCKS, MOST_FOR_SIZE, BlockCounts, block_counts
from dilated_attention.planning.problem import Problem
from dilated_attention.planning.ring import exchange_of

Terms = list[tuple[str, int]]
# bytes per block needed temporarily while the lists by key block are built: row, key, the sorted copy and the sort order, in 64 bits
_SORT_BYTES = 40


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
        piece = (_PIECE_BYTES if problem.machine.is_cpu else _PIECE_BYTES_GPU) * (2 + 2 * backward)
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
