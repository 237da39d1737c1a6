"""The memory of a call whose sequence is shared by several processes, on the rank that needs the most."""

from __future__ import annotations

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.estimate.block_counts import MOST_FOR_SIZE, block_counts
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.estimate.ring_estimate import Exchange, exchange_of, local_rows

Terms = list[tuple[str, int]]


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


def _non_zero(terms: Terms) -> tuple[tuple[str, int], ...]:
    return tuple((what, int(size)) for what, size in terms if size)
