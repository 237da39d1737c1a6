"""The time of a prompt that enters a cache chunk by chunk: of each chunk, the CPU's time to launch it or the GPU's to compute it."""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention.backends import registry
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.engine.decode.keys import row_keys
from dilated_attention.models.config import LongNetConfig
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.whole_models.model_memory import PREFILL
from dilated_attention.planning.whole_models.timeline import Line

# seconds of an H200 machine's CPU per block, from prompts of 12 blocks in benchmarks/results/2026-11-21-h200/train-infer.json. Dense,
# 1,024 positions, 1 and 8 requests: 20.0 and 19.7 ms, one launch of attention
BLOCK_SECONDS = 19.83e-3 / 12
# dilated, the same prompts: 28.2 and 26.9 ms, six launches
LAUNCH_SECONDS = (27.59e-3 - 19.83e-3) / (12 * 5)
# a window, 131,072 positions in 16 chunks: 409 ms, of which 15 chunks join cached keys to their own; 20.1 ms of one that does not
JOIN_SECONDS = ((408.95e-3 - 20.07e-3) / 15 - 20.07e-3) / 12
# times that each element of the cached keys and values, and of a chunk's own, is read or written until attention and cache have it
# (models/kv_cache/decode_step.py): zeros, a copy from the cache, a copy of that; zeros and a copy, and a copy into the cache
_HELD_PASSES, _OWN_PASSES, _CACHE_PASSES = 5, 3, 2
# chunks that are looked at; of more, every k-th, with k odd since segments repeat after an even number of chunks
_SAMPLED = 256


@dataclass(frozen=True, kw_only=True)
class PromptTime:
    """Seconds of a whole prompt. ``seconds`` is the sum over chunks of the longer of the CPU's and the GPU's time."""

    seconds: float
    cpu: float
    attention: float
    linear: float
    moved: float
    cpu_source: str


def prompt_time(config: LongNetConfig, problem: Problem, *, attention: float, linear: float, moved: Line, bandwidth: float) -> PromptTime:
    """Estimates the time of B prompts of N positions in chunks of ``PREFILL``.

    CPU   blocks · (1.65 ms + 0.13 ms · (launches − 1) + 0.49 ms where cached keys are joined to the chunk's)
    GPU   attention by the chunk's share of the pairs + linear · positions + (moved + copies of keys and values, merges) / bandwidth

    A chunk behind others is no self-attention, so its branches run one after the other, several launches each: the segments that it cuts
    have a rectangle of keys before it and a causal square, and heads of different offsets have launches of their own.

    Args:
        attention: seconds of all layers' arithmetic, over the whole prompt.
        linear: seconds of the linear layers, per position.
        moved: bytes that operations other than attention read and write, by the positions of a chunk.
        bandwidth: bytes per second that memory reaches.
    """
    N, H, K = problem.num_positions, problem.num_heads, problem.num_kv_heads
    keys = row_keys(config.pattern, H, K, N, "cpu")
    row = 2 * problem.batch_size * config.num_layers * K * problem.head_dim * problem.itemsize
    every = (-(-N // PREFILL) // _SAMPLED) | 1
    sums = [0.0] * 5
    for start in range(0, N, every * PREFILL):
        # the last sample stands for fewer chunks
        covered = min(every * PREFILL, N - start)
        count = min(PREFILL, covered)
        *_, before = keys.before(start)
        launches, merged = _launches(problem, before, count)
        cpu = config.num_layers * (BLOCK_SECONDS + LAUNCH_SECONDS * (launches - 1) + (JOIN_SECONDS if before else 0.0))
        copied = row * ((_HELD_PASSES * before + _OWN_PASSES * count if before else 0) + _CACHE_PASSES * count)
        parts = [
            attention * _share(problem, start, covered) * count / covered,
            linear * count,
            (moved.at(count) + copied + config.num_layers * merged) / bandwidth,
        ]
        for index, value in enumerate((max(cpu, sum(parts)), cpu, *parts)):
            sums[index] += value * covered / count
    source = (
        f"as on an H200's machine: {BLOCK_SECONDS * 1e3:.2f} ms a block, {LAUNCH_SECONDS * 1e3:.2f} ms for each further launch of its "
        f"attention, {JOIN_SECONDS * 1e3:.2f} ms where cached keys are joined"
    )
    return PromptTime(seconds=sums[0], cpu=sums[1], attention=sums[2], linear=sums[3], moved=sums[4], cpu_source=source)


def _launches(problem: Problem, before: int, count: int) -> tuple[int, int]:
    """Returns (launches of a layer's attention, bytes read and written to merge them), of a chunk behind ``before`` keys."""
    pattern = problem.pattern
    if not isinstance(pattern, DilatedPattern):
        return 1, 0
    end = before + count
    longest = max(-(-min(w, end) // r) for w, r in pattern.branches)
    backend = registry.select(problem.request(backward=False, length=longest), "auto")
    shape = Shape(
        problem.num_heads,
        problem.num_kv_heads,
        (before, end),
        (0, end),
        ((0, end),),
        problem.is_causal,
        aligned_last=backend.capabilities.aligned_last,
    )
    plan = make_plan(pattern, shape)
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
