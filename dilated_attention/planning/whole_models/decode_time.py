"""The time of one generated token: weights and cached keys read once, and the kernels of a block that are too short to read much."""

from __future__ import annotations

from dilated_attention.models.config import LongNetConfig
from dilated_attention.models.summary import cache_rows
from dilated_attention.pattern import BlockPattern
from dilated_attention.planning.estimate.memory import counts_of
from dilated_attention.planning.estimate.problem import Problem

# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200-decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
BLOCK_SECONDS = 0.84e-3 / 12
READ_SHARE = 0.9
# rows over which the keys of a generated token are averaged
_ROWS = 4096


def decode_seconds(config: LongNetConfig, problem: Problem, weight_bytes: int) -> tuple[float | None, str]:
    """Returns (seconds of a step that adds one token to each of B sequences of N positions, what it is based on).

    seconds = blocks · 70 µs + (weights + B · keys and values that a row reads) / (90 % of the bandwidth). None where no rate is known, or
    several processes share a sequence.
    """
    gpu = problem.gpu
    if gpu is None or gpu.bandwidth is None or problem.world_size > 1:
        return None, ""
    kept = cache_rows(config, problem.num_positions)
    if kept is None:
        return None, ""
    row = 2 * problem.num_kv_heads * problem.head_dim * problem.itemsize
    read = problem.batch_size * config.num_layers * row * min(kept, _keys_of_row(problem))
    seconds = config.num_layers * BLOCK_SECONDS + (weight_bytes + read) / (gpu.bandwidth * READ_SHARE)
    return seconds, f"{BLOCK_SECONDS * 1e6:.0f} µs a block, as on an H200; weights and cached keys at {READ_SHARE:.0%} of the bandwidth"


def _keys_of_row(problem: Problem) -> int:
    """Returns how many positions' keys a row after N positions reads; heads that share keys are taken to read different ones."""
    N, H = problem.num_positions, problem.num_heads
    if problem.computes == "dense":
        return N
    pattern = problem.pattern
    if isinstance(pattern, BlockPattern):
        # the mean over all rows; where windows are narrow it is that of the last ones
        return -(-counts_of(problem).pairs // (N * problem.num_kv_heads))
    rows = min(_ROWS, N)
    more = pattern.pairs(N, H, is_causal=True) - pattern.pairs(N - rows, H, is_causal=True)
    return -(-more // (rows * problem.num_kv_heads))
