"""``plan_model``: the cost of training or running a model preset, by formulas: of a block what ``models.summary`` says that it keeps, and
the attention, the loss and the optimizer beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.factory.create import MODELS, configured, replaced
from dilated_attention.functional.fused_layers import MOST_COLUMNS
from dilated_attention.models import LongNetConfig, SlideEncoderConfig
from dilated_attention.models.config import sum_over_layers
from dilated_attention.models.loss import CHUNK_BYTES
from dilated_attention.models.summary import block_bytes, cache_bytes, embedding_parameters
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int
from dilated_attention.planning.attention import ESTIMATE_BY_HAND, fit_of, pairs_of, passes_of, shared_fields
from dilated_attention.planning.gpus import Gpu
from dilated_attention.planning.memory import counts_of, exchange_of, memory_of, of_engine, sizes_of
from dilated_attention.planning.plans import ModelPlan, seconds_text
from dilated_attention.planning.problem import MOST, Problem, kind_of, make_problem
from dilated_attention.validation import check_bool

# positions of a prompt that generation computes at a time (models/language_model.py)
PREFILL = 8192
# shares of the peaks that linear layers, and the memory traffic between them, are assumed to reach; and what this traffic is: so many times
# the bytes that blocks save, of which a forward has 0.4, and more with rotary positions, which are computed in float32
_BANDWIDTH_SHARE, _LINEAR_SHARE = 0.5, 0.45
_TRAFFIC, _OF_FORWARD, _ROTARY = 13.5, 0.4, 1.7
# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200/decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
_DECODE_SECONDS, _READ_SHARE = 0.84e-3 / 12, 0.9
# rows over which the keys of a generated token are averaged
_ROWS = 4096
Terms = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model, and how it runs. ``sizes``: see ``sizes_of_parameters``; ``weight``: bytes of one number of the weights."""

    config: Any
    stack: LongNetConfig
    sizes: dict[str, int]
    weight: int
    checkpoints: bool
    shards: int


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
    """Estimates what a model needs on one process, from formulas.

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
    weight_shards = as_int("weight_shards", weight_shards, minimum=1, maximum=MOST["weight_shards"])
    config, _ = configured(preset, **overrides)
    stack = stack_of(config)
    # the attention of each layer
    problems = tuple(
        make_problem(
            kind_of(one.kind, world_size), num_positions=num_positions, num_heads=stack.num_heads, num_kv_heads=stack.num_kv_heads,
            head_dim=stack.head_dim, batch_size=batch_size, dtype=dtype, world_size=world_size, is_causal=stack.is_causal,
            training=training, layout=None if world_size == 1 else "contiguous", pattern=None if one.kind == "dense" else one.pattern,
            gpu=gpu, memory=memory,
        )
        for one in stack.cycle
    )  # fmt: skip
    problem = problems[0]
    half = problem.dtype in (torch.float16, torch.bfloat16)
    casts = (training and half) if autocast is None else autocast
    if casts and not half:
        raise ValueError(f"autocast is True and dtype is {problem.dtype}; autocast computes in float16 or bfloat16: leave it out")
    run = Run(
        config=config, stack=stack, sizes=sizes_of_parameters(config), weight=4 if casts else problem.dtype.itemsize,
        checkpoints=checkpoint_activations, shards=weight_shards,
    )  # fmt: skip

    def bytes_needed(other: Problem) -> int:
        of_length = tuple(one.of_length(other.num_positions) for one in problems)
        return sum(size for _, size in _peak_of(run, of_length)[0])

    terms, moment = _peak_of(run, problems)
    fits, longest = fit_of(problem, bytes_needed, find_longest)
    # that of the layer which receives most
    exchange = max(map(exchange_of, problems), key=lambda one: one.bytes.forward_received)
    parameters, cached = sum(run.sizes.values()), _cache_of(run, problem)
    # a lookup costs nothing, but a tied embedding is also the matrix of the output layer
    multiplied = parameters - (0 if stack.tie_embeddings else embedding_parameters(run.sizes))
    # 2 per matrix parameter and position, and 4·E per pair of a layer and head; the backward twice that
    flops = (6 if training else 2) * multiplied * problem.batch_size * problem.num_positions
    pairs = sum_over_layers([pairs_of(one)[0] for one in problems], stack.num_layers)
    attended = (12 if training else 4) * stack.embed_dim * pairs / stack.num_heads
    # the GPU's time alone is far too short where chunks wait for the CPU
    why_not = "a prompt enters the cache in chunks and mostly waits for the CPU; python -m benchmarks train-infer measures it"
    times = _step_seconds(run, problems, flops) if cached is None else (None, "", why_not)
    decode: tuple[float | None, str] = (None, "")
    if cached is not None and weight_shards == 1:
        decode = _decode_seconds(stack.num_layers, problems, cached, multiplied * run.weight)
    return ModelPlan(
        **shared_fields(problem), preset=preset, autocast=casts, weight_shards=weight_shards, parameters=parameters,
        checkpoint_activations=checkpoint_activations, layers=stack.num_layers, terms=terms, moment=moment, flops=flops + attended,
        exchange=exchange, seconds=times[0], time_source=times[1], no_time=times[2], fits=fits, longest=longest, decode_seconds=decode[0],
        decode_source=decode[1],
    )  # fmt: skip


def stack_of(config: Any) -> LongNetConfig:
    """Returns the configuration of a model's blocks."""
    stack: LongNetConfig = getattr(config, "encoder", config)
    return stack


def sizes_of_parameters(config: Any) -> dict[str, int]:
    """Returns the numbers of a model's parameters by name, those of all its blocks together as ``"blocks"``. One block is made, of dense
    attention, which has as many parameters as any: making all of a large model takes seconds, even without memory."""
    stack = stack_of(config)
    one = replaced(stack, {"attention": "dense", "num_layers": 1})
    model = MODELS[type(config)](one if config is stack else replace(config, encoder=one), device="meta")
    sizes = Counter[str]()
    for name, parameter in model.named_parameters():
        sizes.update({"blocks": stack.num_layers * parameter.numel()} if ".blocks." in name else {name: parameter.numel()})
    return sizes


def _peak_of(run: Run, problems: tuple[Problem, ...]) -> tuple[Terms, str]:
    """Returns (terms at the highest point, when it occurs), for the process with the highest peak. FSDP shards weights, gradients and the
    optimizer's moments over ``shards`` processes, and gathers blocks whole. Where layers differ, each is taken to need what the one that
    needs most does."""
    problem, stack, config = problems[0], run.stack, run.config
    on_gpu, training, embed, e = not problem.machine.is_cpu, problem.training, stack.embed_dim, problem.dtype.itemsize
    total, block_size = sum(run.sizes.values()) * run.weight, run.sizes["blocks"] // stack.num_layers
    # a workspace for each thread that runs matrix products: the caller's, and autograd's
    workspace = (32 if problem.machine.capability >= (9, 0) else 8) * 2**20 * on_gpu
    always = [("weights", -(-total // run.shards)), ("cuBLAS's workspaces", (1 + training) * workspace)]
    always += [("two unsharded blocks", 2 * block_size * run.weight * (run.shards > 1))]
    cached = _cache_of(run, problem)
    if cached is not None:
        problems = tuple(one.of_length(min(one.num_positions, PREFILL)) for one in problems)
    rows = problems[0].rows * problem.batch_size
    # bytes that attention allocates in addition to q, k, v and out, and in a backward to their gradients
    inside = [0, 0]
    for one in problems:
        estimate, (Q, K, R, _, a) = memory_of(one), sizes_of(one)
        peaks = estimate.forward_peak - 2 * (Q + K) * e - R * a, estimate.backward_peak - 4 * (Q + K) * e - R * a
        inside = list(map(max, inside, peaks))
    # tiles or patches as they are given, and embedded
    width = config.in_dim if isinstance(config, SlideEncoderConfig) else 0 if config is stack else config.in_channels * config.patch_size**2
    given = rows * run.weight * (embed if config is stack else width + 2 * embed)
    block, passing = block_bytes(stack, e, is_plain=not on_gpu)
    if not training:
        keys, inner = 2 * embed * problem.num_kv_heads // problem.num_heads, stack.inner_dim
        wide = inner * (2 + (stack.ffn == "swiglu") + (not on_gpu)) + 5 * embed
        one_block = max(rows * e * wide, rows * e * (4 * embed + keys) + inside[0])
        always += [("keys and values of the cache", cached or 0), ("activations", given), ("inside a block", one_block)]
        return tuple(term for term in always if term[1]), "in the forward"
    # weights that autocast has cast are saved, too
    saved = rows * block + e * block_size * (run.weight != e)
    # a call with detached mixing saves its branches' outputs (engine/ops/prepare.py)
    detached = [one for one, layer in zip(problems, stack.cycle, strict=True) if layer.mixture_grad == "detached" and one.world_size == 1]
    terms_of = [dict(of_engine(one, one.num_positions, detached=True).forward) for one in detached if one.computes == "dilated"]
    saved += max((terms.get("the branches' own outputs", 0) for terms in terms_of), default=0)
    passing = max(rows * passing, inside[1])
    kept = saved
    if run.checkpoints:
        # autocast keeps what it has cast itself: weights of layers that no kernel computes, as there is no norm, or rows are too long
        cast = embed * (not stack.sub_norm) + stack.inner_dim * (stack.inner_dim > MOST_COLUMNS)
        kept, passing = rows * run.weight * embed + e * embed * cast * (run.weight != e), passing + saved
    activations = given + stack.num_layers * kept
    loss, loss_grads = _loss_of(run, rows, e)
    always.append(("optimizer's moments", -(-2 * total // run.shards)))
    # torch's AdamW computes the roots of all parameters' second moments at once on a GPU, of one at a time on a CPU, fewer than a block
    temporaries = total // run.shards if on_gpu else 2 * block_size * run.weight
    gradients = "gradients", total // run.shards
    moments: dict[str, Terms] = {
        "in the optimizer's step": (gradients, ("optimizer's temporaries", temporaries)),
        "at the loss": (("activations", activations), ("logits and their gradients, a chunk at a time", loss)),
        "in the backward of the last block": (("gradients", loss_grads), ("activations", activations), ("inside a block", passing)),
        "in the backward of the first block": (gradients, ("activations", given + kept), ("inside a block", passing)),
    }
    moment = max(moments, key=lambda name: sum(size for _, size in moments[name]))
    return tuple(term for term in (*always, *moments[moment]) if term[1]), moment


def _loss_of(run: Run, rows: int, e: int) -> tuple[int, int]:
    """Returns (peak bytes of the loss and its backward, hidden states included; of these, the gradients of the output layer)."""
    if run.config is not run.stack:
        return 0, 0
    vocabulary, embed = run.stack.vocab_size, run.stack.embed_dim
    grads = vocabulary * embed * run.weight
    # a chunk as computed, in float32, and its softmax or gradient; hidden states and their gradients; the weight's cast and gradient
    chunk = min(rows, max(1, CHUNK_BYTES // (4 * vocabulary))) * vocabulary * (8 + e * (e < 4))
    return chunk + 2 * rows * embed * run.weight + grads + vocabulary * embed * e * (run.weight != e), grads


def _cache_of(run: Run, problem: Problem) -> int | None:
    """Returns the bytes of the keys and values that generation caches; None where a run does not generate from a cache."""
    if problem.training or problem.world_size > 1 or run.config is not run.stack:
        return None
    each = cache_bytes(run.stack, problem.num_positions, problem.dtype.itemsize)
    return None if each is None else problem.batch_size * each


def _step_seconds(run: Run, problems: tuple[Problem, ...], flops: float) -> tuple[float | None, str, str]:
    """Estimates a training step or a forward: attention, linear layers (``flops``) at a share of the peak, traffic at a share of the
    bandwidth. Returns (seconds, what they are based on, the reason where there are none)."""
    problem = problems[0]
    gpu = problem.machine
    if gpu.is_cpu:
        # whatever was measured of attention alone
        return None, "", f"rates of linear layers on a CPU are not known; {ESTIMATE_BY_HAND}"
    estimates = {one: passes_of(one, exchange_of(one), (0, 0)) for one in problems}
    for passes, why_not in estimates.values():
        if not passes:
            return None, "", why_not
    peak = gpu.peak(problem.dtype)
    if peak is None or gpu.bandwidth is None:
        return None, "", "rates of its linear layers were not measured"
    again = problem.training and run.checkpoints

    def seconds_of(one: Problem) -> float:
        passes = estimates[one][0]
        return sum(x.seconds for x in passes) + (passes[0].seconds if again else 0.0)

    attention = sum_over_layers(list(map(seconds_of, problems)), run.stack.num_layers)
    sources = "; ".join(dict.fromkeys(passes[0].source for passes, _ in estimates.values()))
    linear = flops * (4 / 3 if again else 1) / problem.world_size / (peak * _LINEAR_SHARE)
    saved = block_bytes(run.stack, problem.dtype.itemsize, is_plain=False)[0] * run.stack.num_layers * problem.rows * problem.batch_size
    times = _TRAFFIC * (1 if run.stack.positions == "none" else _ROTARY)
    moved = times * (1 + _OF_FORWARD * again if problem.training else _OF_FORWARD) * saved / (gpu.bandwidth * _BANDWIDTH_SHARE)
    source = (
        f"attention {seconds_text(attention)} ({sources}); "
        f"linear layers {seconds_text(linear)}, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {seconds_text(moved)}, at {_BANDWIDTH_SHARE:.0%} of the bandwidth; "
        "without the CPU's own time, which short sequences wait for"
    )
    return attention + linear + moved, source, ""


def _decode_seconds(blocks: int, problems: tuple[Problem, ...], cached: int, weight_bytes: int) -> tuple[float | None, str]:
    """Returns (seconds of a step that adds one token to each of B sequences of N positions, what it is based on). ``cached``: bytes of all
    cached keys and values, the most that can be read.

    seconds = blocks · 70 µs + (weights + B · keys and values that a row reads) / (90 % of the bandwidth). None where no rate is known.
    """
    bandwidth = problems[0].machine.bandwidth
    if bandwidth is None:
        return None, ""
    row = 2 * problems[0].num_kv_heads * problems[0].head_dim * problems[0].dtype.itemsize
    read = min(cached, problems[0].batch_size * row * sum_over_layers(list(map(_keys_of_row, problems)), blocks))
    seconds = blocks * _DECODE_SECONDS + (weight_bytes + read) / (bandwidth * _READ_SHARE)
    return seconds, f"{_DECODE_SECONDS * 1e6:.0f} µs a block, as on an H200; weights and cached keys at {_READ_SHARE:.0%} of the bandwidth"


def _keys_of_row(problem: Problem) -> int:
    """Returns how many positions' keys a row after N positions reads; heads that share keys are taken to read different ones."""
    N, H, Hk, pattern = problem.num_positions, problem.num_heads, problem.num_kv_heads, problem.pattern
    if problem.computes == "dense":
        return N
    if isinstance(pattern, BlockPattern):
        # the mean over all rows; where windows are narrow it is that of the last ones
        return -(-counts_of(problem).pairs // (N * Hk))
    rows = min(_ROWS, N)
    return -(-(pattern.pairs(N, H, is_causal=True) - pattern.pairs(N - rows, H, is_causal=True)) // (rows * Hk))
