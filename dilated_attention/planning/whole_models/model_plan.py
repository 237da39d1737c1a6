"""``plan_model``: the cost of training or running a model preset, traced with fake tensors through all its layers at two lengths."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.models.summary import embedding_parameters
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int
from dilated_attention.planning.estimate.gpus import Gpu
from dilated_attention.planning.estimate.memory import counts_of
from dilated_attention.planning.estimate.plan import fit_of, pairs_of
from dilated_attention.planning.estimate.problem import MOST, Problem, kind_of, make_problem
from dilated_attention.planning.estimate.ring_estimate import Exchange, exchange_of
from dilated_attention.planning.estimate.speed import ESTIMATE_BY_HAND, passes_of
from dilated_attention.planning.plans import ModelPlan, seconds_text
from dilated_attention.planning.whole_models.model_memory import Run, cache_of, model_of, moments_of, peak_of_step, stack_of
from dilated_attention.validation import check_bool

# shares of the peaks that linear layers, and the memory traffic between them, are assumed to reach. With these, the estimate for a training
# step of Prov-GigaPath's encoder on 45,681 tiles matches what an H200 measured
# (benchmarks/results/2026-11-21-h200/slide-encoder.jsonl)
_BANDWIDTH_SHARE, _LINEAR_SHARE = 0.5, 0.45
# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200/decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
_DECODE_SECONDS, _READ_SHARE = 0.84e-3 / 12, 0.9
# rows over which the keys of a generated token are averaged
_ROWS = 4096


def plan_model(
    preset: str,
    *,
    num_positions: int,
    batch_size: int = 1,
    training: bool = True,
    world_size: int = 1,
    weight_shards: int = 1,
    checkpoint_activations: bool = False,
    dtype: torch.dtype | None = None,
    autocast: bool | None = None,
    gpu: str | Gpu | None = None,
    memory: int | None = None,
    find_longest: bool = True,
    **overrides: Any,
) -> ModelPlan:
    """Estimates what a model needs on one process, from fake tensors and formulas.

    Args:
        preset: a name of ``factory.MODEL_PRESETS``.
        num_positions: N of each sequence; for a slide its tiles, for an image its patches.
        batch_size: sequences at a time.
        training: a step of forward, backward and AdamW in float32. False: a language model generates, with keys and values of N positions
            cached and prompts processed ``PREFILL`` positions at a time; any other model runs its forward.
        world_size: processes that share each sequence (context parallelism), one GPU each.
        weight_shards: processes over which FSDP shards weights, gradients and the optimizer's moments; two blocks at a time are gathered
            whole.
        checkpoint_activations: see ``create_model``.
        dtype: that the model computes in; None for the default of ``plan_attention``.
        autocast: weights in float32 and autocast to ``dtype``; None enables it in training where ``dtype`` is a 16-bit one.
        gpu, memory, find_longest: see ``plan_attention``.
        overrides: fields of the preset's configuration, see ``create_model``.

    Raises:
        ValueError, TypeError: see ``plan_attention`` and ``create_model``.

    >>> print(plan_model("llama-1b", num_positions=131072, gpu="H200",
    ...                  checkpoint_activations=True))
    """
    flags = {"checkpoint_activations": checkpoint_activations, "find_longest": find_longest}
    for name, flag in (flags if autocast is None else flags | {"autocast": autocast}).items():
        check_bool(name, flag)
    as_int("weight_shards", weight_shards, minimum=1, maximum=MOST["weight_shards"])
    # overrides are frozen because plans are cached by their arguments
    fields = tuple((name, _frozen(value)) for name, value in sorted(overrides.items()))
    model = model_of(preset, fields)
    config = stack_of(model)
    # one layer's attention
    problem = make_problem(
        kind_of(config.kind, world_size), num_positions=num_positions, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, batch_size=batch_size, dtype=dtype, world_size=world_size, is_causal=config.is_causal, training=training,
        layout=None if world_size == 1 else "contiguous", pattern=None if config.kind == "dense" else config.pattern, gpu=gpu,
        memory=memory,
    )  # fmt: skip
    machine = problem.machine
    half = problem.dtype in (torch.float16, torch.bfloat16)
    casts = (training and half) if autocast is None else autocast
    if casts and not half:
        raise ValueError(f"autocast is True and dtype is {problem.dtype}; autocast computes in float16 or bfloat16: leave it out")
    run = Run(
        preset=preset, overrides=fields, batch_size=batch_size, training=training, dtype=problem.dtype, casts=casts,
        checkpoint_activations=checkpoint_activations, on_gpu=not machine.is_cpu,
    )  # fmt: skip

    def bytes_needed(problem: Problem) -> int:
        return sum(size for _, size in peak_of_step(run, weight_shards, problem)[0])

    terms, moment = peak_of_step(run, weight_shards, problem)
    fits, longest = fit_of(problem, bytes_needed, find_longest)
    exchange = exchange_of(problem)
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    looked_up = 0 if config.tie_embeddings else embedding_parameters(parameters)
    # 2 per matrix parameter and position, and 4·E per pair of a layer and head; the backward twice that
    flops = (6 if training else 2) * (sum(parameters.values()) - looked_up) * batch_size * num_positions
    attended = (12 if training else 4) * config.embed_dim * config.num_layers * pairs_of(problem)[0] / config.num_heads
    cached = cache_of(run, problem)
    seconds: float | None = None
    if cached is not None:
        # the GPU's time alone is far too short where chunks wait for the CPU
        source, why_not = "", "a prompt enters the cache in chunks and mostly waits for the CPU; bench train-infer measures it"
    else:
        seconds, source, why_not = _step_seconds(run, problem, exchange, flops)
    per_token, token_source = None, ""
    if cached is not None and weight_shards == 1:
        weights = (sum(parameters.values()) - looked_up) * run.weight_dtype.itemsize
        per_token, token_source = _decode_seconds(config.num_layers, problem, cached, weights)
    return ModelPlan(
        preset=preset, num_positions=num_positions, batch_size=batch_size, training=training,
        dtype=str(problem.dtype).removeprefix("torch."), autocast=casts, world_size=world_size, weight_shards=weight_shards,
        checkpoint_activations=checkpoint_activations, parameters=sum(parameters.values()), layers=config.num_layers, terms=terms,
        moment=moment, flops=flops + attended, exchange=exchange, seconds=seconds, time_source=source, no_time=why_not,
        device=machine.name, device_memory=machine.memory, fits=fits, longest=longest, decode_seconds=per_token,
        decode_source=token_source,
    )  # fmt: skip


def _step_seconds(run: Run, problem: Problem, exchange: Exchange, flops: float) -> tuple[float | None, str, str]:
    """Estimates a training step or a forward: attention, linear layers at a share of the peak, traffic at a share of the bandwidth.

    ``flops`` are those of the linear layers. Returns (seconds, what they are based on, the reason where there are none).
    """
    gpu = problem.machine
    if gpu.is_cpu:
        # whatever was measured of attention alone
        return None, "", f"rates of linear layers on a CPU are not known; {ESTIMATE_BY_HAND}"
    passes, why_not = passes_of(problem, exchange, (0, 0))
    if not passes:
        return None, "", why_not
    peak = gpu.peak(problem.dtype)
    if peak is None or gpu.bandwidth is None:
        return None, "", "rates of its linear layers were not measured"
    again = run.training and run.checkpoint_activations
    layers = stack_of(model_of(run.preset, run.overrides)).num_layers
    attention = layers * (sum(one.seconds for one in passes) + (passes[0].seconds if again else 0.0))
    linear = flops * (4 / 3 if again else 1) / problem.world_size / (peak * _LINEAR_SHARE)
    moved = moments_of(run, -(-problem.num_positions // problem.world_size))[0][-1].moved / (gpu.bandwidth * _BANDWIDTH_SHARE)
    source = (
        f"attention {seconds_text(attention)} ({passes[0].source}); "
        f"linear layers {seconds_text(linear)}, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {seconds_text(moved)}, at {_BANDWIDTH_SHARE:.0%} of the bandwidth; "
        "without the CPU's own time, which short sequences wait for"
    )
    return attention + linear + moved, source, ""


def _decode_seconds(blocks: int, problem: Problem, cached: int, weight_bytes: int) -> tuple[float | None, str]:
    """Returns (seconds of a step that adds one token to each of B sequences of N positions, what it is based on).

    seconds = blocks · 70 µs + (weights + B · keys and values that a row reads) / (90 % of the bandwidth). None where no rate is known.

    Args:
        cached: bytes of all cached keys and values, the most that can be read.
    """
    bandwidth = problem.machine.bandwidth
    if bandwidth is None:
        return None, ""
    row = 2 * problem.num_kv_heads * problem.head_dim * problem.itemsize
    read = min(cached, problem.batch_size * blocks * row * _keys_of_row(problem))
    seconds = blocks * _DECODE_SECONDS + (weight_bytes + read) / (bandwidth * _READ_SHARE)
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


def _frozen(value: Any) -> Any:
    """Converts lists to tuples, recursively."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
