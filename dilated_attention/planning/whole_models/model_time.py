"""Times of models: a step or a forward, a prompt that enters a cache chunk by chunk, and a generated token."""

from __future__ import annotations

from dilated_attention.backends import registry
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.engine.decode.keys import row_keys
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.models.summary import cache_rows
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.estimate.memory import counts_of
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.estimate.ring_estimate import Exchange
from dilated_attention.planning.estimate.speed import branchwise_arithmetic, passes_of
from dilated_attention.planning.text import seconds_text
from dilated_attention.planning.whole_models.model_memory import PREFILL, Run, model_of, stack_of, trace_of

# seconds, what they are based on, and where there are none the reason
Estimate = tuple[float | None, str, str]
# shares of the peaks that linear layers, and the memory traffic between them, are assumed to reach. With these, the estimate for a training
# step of Prov-GigaPath's encoder on 45,681 tiles matches what an H200 measured
# (benchmarks/results/2026-11-21-h200/slide-encoder.jsonl)
_BANDWIDTH_SHARE, _LINEAR_SHARE = 0.5, 0.45
# seconds of an H200 machine's CPU per block of a prompt, from prompts of 12 blocks in benchmarks/results/2026-11-21-h200/train-infer.json.
# Dense, 1,024 positions, 1 and 8 requests: 20.0 and 19.7 ms, one launch of attention
_BLOCK_SECONDS = 19.83e-3 / 12
# dilated, the same prompts: 28.2 and 26.9 ms, six launches
_LAUNCH_SECONDS = (27.59e-3 - 19.83e-3) / (12 * 5)
# a window, 131,072 positions in 16 chunks: 409 ms, of which 15 chunks join cached keys to their own; 20.1 ms of one that does not
_JOIN_SECONDS = ((408.95e-3 - 20.07e-3) / 15 - 20.07e-3) / 12
# times that each element of the cached keys and values, and of a chunk's own, is read or written until attention and cache have it
# (models/kv_cache/decode_step.py): zeros, a copy from the cache, a copy of that; zeros and a copy, and a copy into the cache
_HELD_PASSES, _OWN_PASSES, _CACHE_PASSES = 5, 3, 2
# chunks that are looked at; of more, every k-th, with k odd since segments repeat after an even number of chunks
_SAMPLED = 256
# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200/decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
_DECODE_SECONDS, _READ_SHARE = 0.84e-3 / 12, 0.9
# rows over which the keys of a generated token are averaged
_ROWS = 4096
_NOT_MEASURED = "rates of its linear layers were not measured"


def step_seconds(run: Run, problem: Problem, exchange: Exchange, flops: float) -> Estimate:
    """Estimates a training step or a forward: attention, linear layers at a share of the peak, traffic at a share of the bandwidth."""
    passes, why_not = passes_of(problem, exchange, (0, 0))
    if not passes:
        return None, "", why_not
    rates = _rates(problem)
    if rates is None:
        return None, "", _NOT_MEASURED
    config = stack_of(model_of(run.preset, run.overrides))
    again = run.training and run.checkpoint_activations
    attention = config.num_layers * (sum(one.seconds for one in passes) + (passes[0].seconds if again else 0.0))
    pairs = 0
    if not isinstance(problem.pattern, BlockPattern):
        pairs = problem.pattern.pairs(problem.num_positions, config.num_heads, is_causal=config.is_causal)
    attended = 12 * config.embed_dim * pairs / config.num_heads * config.num_layers * run.batch_size / (1 if run.training else 3)
    linear = max(0.0, flops - attended) * (4 / 3 if again else 1) / problem.world_size / rates[0]
    moved = trace_of(run).moved(-(-problem.num_positions // problem.world_size)) / rates[1]
    source = _source(attention, passes[0].source, linear, moved)
    return attention + linear + moved, f"{source}; without the CPU's own time, which short sequences wait for", ""


def _rates(problem: Problem) -> tuple[float, float] | None:
    """Returns the (FLOP/s of linear layers, bytes/s between them) that are assumed; None where the GPU's are not known."""
    peak = None if problem.gpu is None else problem.gpu.peak(problem.dtype)
    if problem.gpu is None or peak is None or problem.gpu.bandwidth is None:
        return None
    return peak * _LINEAR_SHARE, problem.gpu.bandwidth * _BANDWIDTH_SHARE


def _source(attention: float, rates: str, linear: float, moved: float) -> str:
    return (
        f"attention {seconds_text(attention)} ({rates}); linear layers {seconds_text(linear)}, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {seconds_text(moved)}, at {_BANDWIDTH_SHARE:.0%} of the bandwidth"
    )


def prompt_seconds(run: Run, problem: Problem, model: LongNetLM) -> Estimate:
    """Estimates the time of B prompts of N positions in chunks of ``PREFILL``: of each chunk the longer of the CPU's and the GPU's time.

    CPU   blocks · (1.65 ms + 0.13 ms · (launches − 1) + 0.49 ms where cached keys are joined to the chunk's)
    GPU   attention by the chunk's share of the pairs + linear · positions + (moved + copies of keys and values, merges) / bandwidth

    A chunk behind others is no self-attention, so its branches run one after the other, several launches each: the segments that it cuts
    have a rectangle of keys before it and a causal square, and heads of different offsets have launches of their own. Logits are only
    computed after the last position.
    """
    arithmetic, rates = branchwise_arithmetic(problem), _rates(problem)
    if isinstance(arithmetic, str) or rates is None:
        return None, "", arithmetic if isinstance(arithmetic, str) else _NOT_MEASURED
    N, K, config, timeline = problem.num_positions, problem.num_kv_heads, model.config, trace_of(run)
    looked_up = {id(model.embedding.weight), id(model.output_weight)}
    weights = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in looked_up)
    keys = row_keys(config.pattern, problem.num_heads, K, N, "cpu")
    row = 2 * problem.batch_size * config.num_layers * K * problem.head_dim * problem.itemsize
    every = (-(-N // PREFILL) // _SAMPLED) | 1
    total = [0.0] * 5
    for start in range(0, N, every * PREFILL):
        # the last sample stands for fewer chunks
        covered = min(every * PREFILL, N - start)
        count = min(PREFILL, covered)
        *_, before = keys.before(start)
        launches, merged = _launches(problem, before, count)
        cpu = config.num_layers * (_BLOCK_SECONDS + _LAUNCH_SECONDS * (launches - 1) + (_JOIN_SECONDS if before else 0.0))
        copied = row * ((_HELD_PASSES * before + _OWN_PASSES * count if before else 0) + _CACHE_PASSES * count)
        parts = (
            config.num_layers * arithmetic[0] * _share(problem, start, covered) * count / covered,
            2 * problem.batch_size * weights / rates[0] * count,
            (timeline.moved(count) + copied + config.num_layers * merged) / rates[1],
        )
        total = [x + y * covered / count for x, y in zip(total, (max(cpu, sum(parts)), cpu, *parts), strict=True)]
    seconds, cpu, *parts_of_gpu = total
    source = (
        f"chunks of {PREFILL:,} positions, each of which takes the CPU's time or the GPU's, whichever is longer; "
        f"CPU {seconds_text(cpu)} (as on an H200's machine: {_BLOCK_SECONDS * 1e3:.2f} ms a block, {_LAUNCH_SECONDS * 1e3:.2f} ms for each "
        f"further launch of its attention, {_JOIN_SECONDS * 1e3:.2f} ms where cached keys are joined); "
        f"GPU {seconds_text(sum(parts_of_gpu))}: {_source(parts_of_gpu[0], arithmetic[1], *parts_of_gpu[1:])}"
    )
    return seconds, source, ""


def _launches(problem: Problem, before: int, count: int) -> tuple[int, int]:
    """Returns (launches of a layer's attention, bytes read and written to merge them), of a chunk behind ``before`` keys."""
    pattern = problem.pattern
    if not isinstance(pattern, DilatedPattern):
        return 1, 0
    end = before + count
    longest = max(-(-min(w, end) // r) for w, r in pattern.branches)
    aligned = registry.select(problem.request(backward=False, length=longest), "auto").capabilities.aligned_last
    heads = problem.num_heads, problem.num_kv_heads
    plan = make_plan(pattern, Shape(*heads, (before, end), (0, end), ((0, end),), problem.is_causal, aligned_last=aligned))
    rows = 0 if plan.single else sum(part.segments * part.q_len * part.heads.count for part in plan.problems)
    # a part in the model's dtype is read, and the sum in float32 read and written
    return len(plan.problems), problem.batch_size * rows * problem.head_dim * (problem.itemsize + 8)


def _share(problem: Problem, start: int, count: int) -> float:
    """Returns the share of the prompt's pairs that rows [start, start + count) have; of lists of blocks, that of their rows."""
    pattern, H = problem.pattern, problem.num_heads
    if not isinstance(pattern, DilatedPattern):
        return count / problem.num_positions
    whole, first, last = (pattern.pairs(n, H, is_causal=True) for n in (problem.num_positions, start, start + count))
    return (last - first) / whole


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
