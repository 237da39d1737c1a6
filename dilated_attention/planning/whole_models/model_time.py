"""Times of models: a step or a forward, and a generated token."""

from __future__ import annotations

from dilated_attention.models import LongNetConfig
from dilated_attention.models.summary import cache_rows
from dilated_attention.pattern import BlockPattern
from dilated_attention.planning.estimate.memory import counts_of
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.estimate.ring_estimate import Exchange
from dilated_attention.planning.estimate.speed import passes_of
from dilated_attention.planning.text import seconds_text
from dilated_attention.planning.whole_models.model_memory import Run, model_of, stack_of, trace_of

# shares of the peaks that linear layers, and the memory traffic between them, are assumed to reach. With these, the estimate for a training
# step of Prov-GigaPath's encoder on 45,681 tiles matches what an H200 measured
# (benchmarks/results/2026-11-21-h200/slide-encoder.jsonl)
_BANDWIDTH_SHARE, _LINEAR_SHARE = 0.5, 0.45
# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200/decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
_DECODE_SECONDS, _READ_SHARE = 0.84e-3 / 12, 0.9
# rows over which the keys of a generated token are averaged
_ROWS = 4096


def step_seconds(run: Run, problem: Problem, exchange: Exchange, flops: float) -> tuple[float | None, str, str]:
    """Estimates a training step or a forward: attention, linear layers at a share of the peak, traffic at a share of the bandwidth.

    ``flops`` are those of the linear layers. Returns (seconds, what they are based on, the reason where there are none).
    """
    passes, why_not = passes_of(problem, exchange, (0, 0))
    if not passes:
        return None, "", why_not
    gpu = problem.gpu
    peak = None if gpu is None else gpu.peak(problem.dtype)
    if gpu is None or peak is None or gpu.bandwidth is None:
        return None, "", "rates of its linear layers were not measured"
    again = run.training and run.checkpoint_activations
    layers = stack_of(model_of(run.preset, run.overrides)).num_layers
    attention = layers * (sum(one.seconds for one in passes) + (passes[0].seconds if again else 0.0))
    linear = flops * (4 / 3 if again else 1) / problem.world_size / (peak * _LINEAR_SHARE)
    moved = trace_of(run).moved(-(-problem.num_positions // problem.world_size)) / (gpu.bandwidth * _BANDWIDTH_SHARE)
    source = (
        f"attention {seconds_text(attention)} ({passes[0].source}); "
        f"linear layers {seconds_text(linear)}, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {seconds_text(moved)}, at {_BANDWIDTH_SHARE:.0%} of the bandwidth; "
        "without the CPU's own time, which short sequences wait for"
    )
    return attention + linear + moved, source, ""


def decode_seconds(config: LongNetConfig, problem: Problem, weight_bytes: int) -> tuple[float | None, str]:
    """Returns (seconds of a step that adds one token to each of B sequences of N positions, what it is based on).

    seconds = blocks · 70 µs + (weights + B · keys and values that a row reads) / (90 % of the bandwidth). None where no rate is known, or
    several processes share a sequence.
    """
    gpu, kept = problem.gpu, cache_rows(config, problem.num_positions)
    if gpu is None or gpu.bandwidth is None or problem.world_size > 1 or kept is None:
        return None, ""
    row = 2 * problem.num_kv_heads * problem.head_dim * problem.itemsize
    read = problem.batch_size * config.num_layers * row * min(kept, _keys_of_row(problem))
    seconds = config.num_layers * _DECODE_SECONDS + (weight_bytes + read) / (gpu.bandwidth * _READ_SHARE)
    return seconds, f"{_DECODE_SECONDS * 1e6:.0f} µs a block, as on an H200; weights and cached keys at {_READ_SHARE:.0%} of the bandwidth"


def _keys_of_row(problem: Problem) -> int:
    """Returns how many positions' keys a row after N positions reads; heads that share keys are taken to read different ones."""
    N, H, Hk = problem.num_positions, problem.num_heads, problem.num_kv_heads
    pattern = problem.pattern
    if problem.computes == "dense":
        return N
    if isinstance(pattern, BlockPattern):
        # the mean over all rows; where windows are narrow it is that of the last ones
        return -(-counts_of(problem).pairs // (N * Hk))
    rows = min(_ROWS, N)
    return -(-(pattern.pairs(N, H, is_causal=True) - pattern.pairs(N - rows, H, is_causal=True)) // (rows * Hk))
