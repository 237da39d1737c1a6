"""Computes the peak memory of one attention call of any kind, term by term, without allocating its tensors: adds to ``engine.memory`` block
patterns, and sequences sharded over processes, on the rank that needs the most."""

from __future__ import annotations

from typing import Any

from dilated_attention.backends import AttentionRequest, BackendUnavailable, registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.block_kernels.block_gather import _PIECE_BYTES, _PIECE_BYTES_GPU
from dilated_attention.engine.branches import run_problems
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.blocks import MOST_BLOCKS, MOST_FOR_SIZE, BlockCounts, block_counts
from dilated_attention.planning.problem import Problem
from dilated_attention.planning.ring import exchange_of, local_rows

# bytes per block needed temporarily while the lists by key block are built: row, key, the sorted copy and the sort order, in 64 bits
_SORT_BYTES = 40


def memory_of(problem: Problem) -> MemoryEstimate:
    """Returns the peak memory of the forward and, with ``training``, of the backward, on one process: inputs, results and everything in
    between, including the caller's tensors; without the framework itself and memory that the allocator holds in reserve."""
    if problem.computes == "block_sparse":
        return _of_blocks(problem)
    if problem.world_size > 1:
        return _of_ring(problem)
    return _of_engine(problem, problem.num_positions)


def _of_engine(
    problem: Problem, num_positions: int, pattern: Any = None, heads: tuple[int, int] | None = None, **options: Any
) -> MemoryEstimate:
    """Asks the engine's own account. ``pattern``, ``heads``: if not the problem's, or not all heads of queries and of keys."""
    pattern, (H, Hk) = pattern or problem.pattern, heads or (problem.num_heads, problem.num_kv_heads)
    return attention_memory(
        pattern, num_positions, H, problem.head_dim, batch_size=problem.batch_size, num_kv_heads=Hk, dtype=problem.dtype,
        hardware=problem.hardware, is_causal=problem.is_causal, needs_grad=problem.training, **options,
    )  # fmt: skip


def counts_of(problem: Problem, most: int = MOST_BLOCKS) -> BlockCounts:
    assert isinstance(problem.pattern, BlockPattern)
    return block_counts(problem.pattern, problem.num_positions, problem.num_heads, problem.is_causal, most)


def _selected(request: AttentionRequest) -> str:
    try:
        return registry.select(request).name
    except BackendUnavailable:
        return "math"


def _expands_keys(problem: Problem) -> bool:
    """Whether query heads share keys and the backward runs on PyTorch's own GPU kernels, which have dk and dv of each of them."""
    asked = problem.training and problem.device_type == "cuda" and problem.num_kv_heads < problem.num_heads
    return asked and _selected(problem.request(backward=True, length=problem.num_positions)).startswith("sdpa")


def _estimate(problem: Problem, forward: list[tuple[str, int]], backward: list[tuple[str, int]]) -> MemoryEstimate:
    passes = [tuple((what, int(size)) for what, size in terms if size) for terms in (forward, backward if problem.training else [])]
    return MemoryEstimate(inputs=forward[0][1], forward=passes[0], backward=passes[1])


def _of_blocks(problem: Problem) -> MemoryEstimate:
    counts, exchange, pattern = counts_of(problem, MOST_FOR_SIZE), exchange_of(problem), problem.pattern
    assert isinstance(pattern, BlockPattern)
    rows = problem.batch_size * (local_rows(problem) if problem.world_size > 1 else problem.num_positions)
    e, a, R, on_cpu = problem.itemsize, accumulation_dtype(problem.dtype).itemsize, rows * problem.num_heads, problem.device_type == "cpu"
    Q, K, steps = R * problem.head_dim, rows * problem.num_kv_heads * problem.head_dim, max(1, exchange.steps)
    common = [("q, k, v", (Q + 2 * K) * e), ("lists of blocks", counts.list_bytes // problem.world_size), ("lse", R * a)]
    forward = [*common, ("out", Q * e), ("keys from elsewhere", exchange.held[0])]
    backward = [*common, ("out, dout", 2 * Q * e), ("dq, dk, dv", (Q + 2 * K) * e)]
    backward.append(("keys from elsewhere, shares of gradients", exchange.held[1]))
    if steps > 1:
        forward.append(("results of a step", (Q * e + R * a) // steps))
        backward.append(("gradients of a step", Q * e // steps))
    entries, mean = counts.entries // problem.world_size, max(1, counts.computed // (problem.num_positions * problem.num_heads))
    for terms, is_backward in ((forward, False), (backward, True)):
        backend = _selected(problem.request(backward=is_backward, length=mean, blocks=counts.mask_kind))
        if backend in ("sdpa_cpu", "math"):
            piece = (_PIECE_BYTES if on_cpu else _PIECE_BYTES_GPU) * (2 + 2 * is_backward)
            if problem.num_heads > 1 and problem.world_size == 1:
                terms.append(("copies, heads first", ((3 if is_backward else 1) * Q + 2 * K) * e))
            terms.append(("pieces of gathered blocks", min(piece, 2 * counts.computed * problem.head_dim * e)))
            terms += [("sums of dk, dv", 2 * K * a * (e != a)), ("lse with +inf", 2 * R * a)] * is_backward
        elif is_backward:
            # dq, and dk and dv where query heads share them, or only two numbers a row
            sums = (4 * (Q + 2 * R) + 8 * K * (K < Q) if backend == "flash4" else 8 * R) // steps
            running = [("sums of the kernel in float32", sums), ("lists as the kernel reads them", 8 * entries)]
            building = [("lists by key block, while they are sorted", _SORT_BYTES * entries)]
            terms += running if sums + 8 * entries > _SORT_BYTES * entries else building
        else:
            terms.append(("lists as the kernel reads them", 4 * entries))
    return _estimate(problem, forward, backward)


def _of_ring(problem: Problem) -> MemoryEstimate:
    """On the rank's own rows, or of some heads of all rows, the engine's account, and the keys from elsewhere."""
    exchange, pattern, W, rows = exchange_of(problem), problem.pattern, problem.world_size, local_rows(problem)
    assert isinstance(pattern, DilatedPattern)
    e, a, H, Hk = problem.itemsize, accumulation_dtype(problem.dtype).itemsize, problem.num_heads, problem.num_kv_heads
    Q, K = (problem.batch_size * rows * heads * problem.head_dim for heads in (H, Hk))
    if exchange.name == "all_to_all":
        # computed as on one process, in addition to the caller's rows of all heads
        pattern = pattern if pattern.branch_heads == "split" else pattern.with_heads(0, H // W, H)
        whole = _of_engine(problem, problem.num_positions, pattern, (H // W, max(1, Hk // W)))
        forward = [("q, k, v in the caller's rows", (Q + 2 * K) * e), *whole.forward]
        return _estimate(problem, forward, [("q, k, v, out, dout in the caller's rows", (3 * Q + 2 * K) * e), *whole.backward])
    received, gathers = 2 * problem.batch_size * Hk * problem.head_dim * exchange.rows, exchange.name == "all_gather"
    keys = "keys from elsewhere", exchange.held[0]
    if problem.computes == "dense" and gathers:
        common = [("q, k, v", (Q + 2 * K) * e), keys, ("lse", Q // problem.head_dim * a)]
        # zigzag computes its two ranges one after the other
        ranges = 1 + (problem.layout == "zigzag")
        backward = [*common, ("out, dout", 2 * Q * e), ("dq", Q * e)]
        backward.append(("dk, dv of all keys in memory", received * e * ranges // exchange.steps))
        shared = received * (H // Hk * e if _expands_keys(problem) else 4) * (Hk < H)
        sums = (4 * Q // ranges + shared) * (problem.device_type == "cuda")
        return _estimate(problem, [*common, ("out", Q * e)], [*backward, ("sums of kernels in float32", sums // exchange.steps)])
    if gathers and exchange.home is None:
        # ranges of the keys in memory are read problem by problem, as on a CPU
        local = _of_engine(problem, rows, runner=run_problems)
        more = "dk, dv of all keys in memory", (received - 2 * K) * (a + e * (a != e))
        return _estimate(problem, [*local.forward, keys], [*local.backward, keys, more])
    local = _of_engine(problem, rows, exchange.home)
    return _estimate(problem, [*local.forward, keys], [*local.backward, ("keys from elsewhere, shares of gradients", exchange.held[1])])
