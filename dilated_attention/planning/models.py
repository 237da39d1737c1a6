"""``plan_model``: estimates by formulas what it costs to train or run a model preset.

Memory is what blocks save (``models.summary.block_bytes``), and attention, the loss and the optimizer beside it. Time is attention's, and
linear layers and memory traffic at assumed shares of the GPU's peaks.

``stack`` is the configuration of a model's blocks; a ``problem`` is the attention of one of the layers that take turns (``stack.cycle``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dilated_attention.factory.create import MODELS, configured, replaced
from dilated_attention.functional.fused_layers import MOST_COLUMNS
from dilated_attention.models import LongNetConfig, SlideEncoderConfig
from dilated_attention.models.loss import CHUNK_BYTES
from dilated_attention.models.summary import block_bytes, cache_bytes, embedding_parameters, residual_bytes
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int, check_bool
from dilated_attention.planning.attention import ESTIMATE_BY_HAND, fit_of, pairs_of, passes_of, shared_fields
from dilated_attention.planning.gpus import Gpu
from dilated_attention.planning.memory import counts_of, engine_estimate, exchange_of, memory_of, sizes_of
from dilated_attention.planning.plans import ModelPlan, seconds_text
from dilated_attention.planning.problem import MOST, Problem, kind_of, make_problem

# positions of a prompt that generation computes at a time (models/language_model.py)
PREFILL = 8192
# the assumed shares: of the peak bandwidth that memory traffic between linear layers reaches, of the peak FLOP/s that they reach
_BANDWIDTH_SHARE, _LINEAR_SHARE = 0.5, 0.6
# a training step moves so many times the bytes that blocks save. Of this, a forward moves a fraction of 0.4
_TRAFFIC, _FORWARD_FRACTION = 10.0, 0.4
# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200/decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
_DECODE_SECONDS, _READ_SHARE = 0.84e-3 / 12, 0.9
# the keys that a generated token reads are averaged over so many last rows of the sequence
_AVERAGED_ROWS = 4096
# names and sizes of what is in memory: (what, bytes)
Terms = tuple[tuple[str, int], ...]


class ModelRun(NamedTuple):
    """A model, and how it runs.

    Args:
        config, stack: the model's configuration, and that of its blocks; the same one for a language model.
        parameters: see ``sizes_of_parameters``.
        weight_itemsize: bytes of an element of the weights.
        checkpoints: activations are checkpointed: a block saves its input alone.
        weight_shards: see ``plan_model``.
    """

    config: Any
    stack: LongNetConfig
    parameters: dict[str, int]
    weight_itemsize: int
    checkpoints: bool
    weight_shards: int


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
    # the attention of each kind of layer
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
    is_half = problem.dtype in (torch.float16, torch.bfloat16)
    uses_autocast = (training and is_half) if autocast is None else autocast
    if uses_autocast and not is_half:
        raise ValueError(f"autocast is True and dtype is {problem.dtype}; autocast computes in float16 or bfloat16: leave it out")
    run = ModelRun(
        config=config, stack=stack, parameters=sizes_of_parameters(config), weight_itemsize=4 if uses_autocast else problem.dtype.itemsize,
        checkpoints=checkpoint_activations, weight_shards=weight_shards,
    )  # fmt: skip

    def bytes_needed(other: Problem) -> int:
        same_length = tuple(one.of_length(other.num_positions) for one in problems)
        return sum(size for _, size in _peak_of(run, same_length)[0])

    terms, moment = _peak_of(run, problems)
    fits, longest = fit_of(problem, bytes_needed, find_longest)
    # the plan shows the exchange of the layer that receives most
    exchange = max(map(exchange_of, problems), key=lambda one: one.bytes.forward_received)
    parameters, cache_size = sum(run.parameters.values()), _cache_of(run, problem)
    # a lookup costs nothing, but a tied embedding is also the matrix of the output layer
    multiplied = parameters - (0 if stack.tie_embeddings else embedding_parameters(run.parameters))
    # a forward computes 2 FLOPs per matrix parameter and position, and 4·D per pair of a head; a backward twice as many
    flops = (6 if training else 2) * multiplied * problem.batch_size * problem.num_positions
    pairs = stack.sum_over_layers([pairs_of(one)[0] for one in problems])
    attended = (12 if training else 4) * stack.embed_dim * pairs / stack.num_heads
    # no time is given for a prompt: its chunks wait for the CPU, and the GPU's time alone is far too short
    why_not = "a prompt enters the cache in chunks and mostly waits for the CPU; python -m benchmarks train-infer measures it"
    times = _step_seconds(run, problems, flops) if cache_size is None else (None, "", why_not)
    decode: tuple[float | None, str] = (None, "")
    if cache_size is not None and weight_shards == 1:
        decode = _decode_seconds(stack, problems, cache_size, multiplied * run.weight_itemsize)
    attention = tuple(dict.fromkeys("every key" if one.computes == "dense" else repr(one.pattern) for one in problems))
    return ModelPlan(
        **shared_fields(problem), preset=preset, attention=attention, autocast=uses_autocast, weight_shards=weight_shards,
        parameters=parameters, checkpoint_activations=checkpoint_activations, layers=stack.num_layers, terms=terms, moment=moment,
        flops=flops + attended, exchange=exchange, seconds=times[0], time_source=times[1], no_time=times[2], fits=fits,
        longest=longest, decode_seconds=decode[0], decode_source=decode[1],
    )  # fmt: skip


def stack_of(config: Any) -> LongNetConfig:
    """Returns the configuration of a model's blocks."""
    return getattr(config, "encoder", config)  # type: ignore[no-any-return]


def sizes_of_parameters(config: Any) -> dict[str, int]:
    """Returns how many elements each parameter of a model has, by name; all blocks together are ``"blocks"``.

    The model is made with one block on the meta device, since making a large one takes seconds even there. The block has dense attention:
    all kinds of attention have equally many parameters.
    """
    stack = stack_of(config)
    one = replaced(stack, {"attention": "dense", "num_layers": 1})
    model = MODELS[type(config)](one if config is stack else replace(config, encoder=one), device="meta")
    sizes = Counter[str]()
    for name, parameter in model.named_parameters():
        sizes.update({"blocks": stack.num_layers * parameter.numel()} if ".blocks." in name else {name: parameter.numel()})
    return sizes


def _peak_of(run: ModelRun, problems: tuple[Problem, ...]) -> tuple[Terms, str]:
    """Returns (what is in memory at the highest point, when this is), on the process that needs most.

    FSDP shards weights, gradients and the optimizer's moments over ``weight_shards`` processes, and gathers blocks whole. Where layers
    differ, every layer counts as the one that needs most.
    """
    problem, stack, config = problems[0], run.stack, run.config
    on_gpu, training, embed, e = not problem.machine.is_cpu, problem.training, stack.embed_dim, problem.dtype.itemsize
    weight_bytes, parameters_of_block = sum(run.parameters.values()) * run.weight_itemsize, run.parameters["blocks"] // stack.num_layers
    # one for each thread that multiplies matrices: the caller's, and autograd's
    workspace = (32 if problem.machine.capability >= (9, 0) else 8) * 2**20 * on_gpu
    terms = [("weights", -(-weight_bytes // run.weight_shards)), ("cuBLAS's workspaces", (1 + training) * workspace)]
    terms += [("two unsharded blocks", 2 * parameters_of_block * run.weight_itemsize * (run.weight_shards > 1))]
    cache_size = _cache_of(run, problem)
    if cache_size is not None:
        problems = tuple(one.of_length(min(one.num_positions, PREFILL)) for one in problems)
    rows = problems[0].rows * problem.batch_size
    # (forward, backward): bytes of attention beside q, k, v, out and lse, and in a backward beside dout and the gradients of q, k, v
    attention_extra = [0, 0]
    for one in problems:
        estimate, (Q, K, R, _, a) = memory_of(one), sizes_of(one)
        extra = estimate.forward_peak - 2 * (Q + K) * e - R * a, estimate.backward_peak - 4 * (Q + K) * e - R * a
        attention_extra = list(map(max, attention_extra, extra))
    # token embeddings, which with checkpoints are the input that the first block keeps; or tiles or patches, as they are given and in two
    # steps of their embedding
    width = config.in_dim if isinstance(config, SlideEncoderConfig) else 0 if config is stack else config.in_channels * config.patch_size**2
    keeps_tokens = training and run.checkpoints
    input_bytes = rows * run.weight_itemsize * (embed * (not keeps_tokens) if config is stack else width + 2 * embed)
    saved_per_row, passing_per_row = block_bytes(stack, e, is_plain=not on_gpu)
    if not training:
        keys, inner = 2 * embed * problem.num_kv_heads // problem.num_heads, stack.inner_dim
        in_ffn = inner * (2 + (stack.ffn == "swiglu") + (not on_gpu)) + 5 * embed
        inside_block = max(rows * e * in_ffn, rows * e * (4 * embed + keys) + attention_extra[0])
        terms += [("keys and values of the cache", cache_size or 0), ("activations", input_bytes), ("inside a block", inside_block)]
        return tuple(term for term in terms if term[1]), "in the forward"
    # autocast's casts of the weights are saved, too
    saved = rows * saved_per_row + e * parameters_of_block * (run.weight_itemsize != e)
    # a call with detached mixing saves its branches' outputs (engine/ops/prepare.py)
    detached = [one for one, layer in zip(problems, stack.cycle, strict=True) if layer.mixture_grad == "detached" and one.world_size == 1]
    estimates = [dict(engine_estimate(one, one.num_positions, detached=True).forward) for one in detached if one.computes == "dilated"]
    saved += max((estimate.get("the branches' own outputs", 0) for estimate in estimates), default=0)
    passing = max(rows * passing_per_row, attention_extra[1])
    kept = saved
    if run.checkpoints:
        # a block keeps its input, and autocast keeps casts of those weights that plain layers compute with: where there is no norm for a
        # kernel to compute along, or its rows are too long for the kernel. All but the input is computed again
        cast = embed * (not stack.sub_norm) + stack.inner_dim * (stack.inner_dim > MOST_COLUMNS)
        kept = rows * min(run.weight_itemsize, residual_bytes(stack, e)) * embed + e * embed * cast * (run.weight_itemsize != e)
        passing += saved - rows * e * embed
    activations = input_bytes + stack.num_layers * kept
    loss, loss_grads = _loss_of(run, rows, e)
    terms.append(("optimizer's moments", -(-2 * weight_bytes // run.weight_shards)))
    # torch's AdamW takes the root of second moments: of all parameters at once on a GPU, of one at a time on a CPU, less than a block
    temporaries = weight_bytes // run.weight_shards if on_gpu else 2 * parameters_of_block * run.weight_itemsize
    gradients = "gradients", weight_bytes // run.weight_shards
    candidates: dict[str, Terms] = {
        "in the optimizer's step": (gradients, ("optimizer's temporaries", temporaries)),
        "at the loss": (("activations", activations), ("logits and their gradients, a chunk at a time", loss)),
        "in the backward of the last block": (("gradients", loss_grads), ("activations", activations), ("inside a block", passing)),
        "in the backward of the first block": (gradients, ("activations", input_bytes + kept), ("inside a block", passing)),
    }
    moment = max(candidates, key=lambda name: sum(size for _, size in candidates[name]))
    return tuple(term for term in (*terms, *candidates[moment]) if term[1]), moment


def _loss_of(run: ModelRun, rows: int, e: int) -> tuple[int, int]:
    """Returns (peak bytes of a language model's loss and its backward, hidden states included; those of these that remain, the gradient of
    the output layer). Other models' losses are small: (0, 0)."""
    if run.config is not run.stack:
        return 0, 0
    vocabulary, embed = run.stack.vocab_size, run.stack.embed_dim
    grads = vocabulary * embed * run.weight_itemsize
    # a chunk's logits as computed, in float32, and their softmax or gradient; besides, hidden states and the weight's cast, with gradients
    chunk = min(rows, max(1, CHUNK_BYTES // (4 * vocabulary))) * vocabulary * (8 + e * (e < 4))
    return chunk + 2 * rows * embed * run.weight_itemsize + grads + vocabulary * embed * e * (run.weight_itemsize != e), grads


def _cache_of(run: ModelRun, problem: Problem) -> int | None:
    """Returns the bytes of the keys and values that generation caches; None where a run does not generate from a cache."""
    if problem.training or problem.world_size > 1 or run.config is not run.stack:
        return None
    each = cache_bytes(run.stack, problem.num_positions, problem.dtype.itemsize)
    return None if each is None else problem.batch_size * each


def _step_seconds(run: ModelRun, problems: tuple[Problem, ...], flops: float) -> tuple[float | None, str, str]:
    """Estimates the time of a training step or a forward: attention, linear layers (``flops``) at a share of the peak, and memory traffic
    at a share of the bandwidth. Returns (seconds, what they are based on, the reason if there is no estimate)."""
    problem = problems[0]
    gpu = problem.machine
    if gpu.is_cpu:
        # this holds even where rates of attention were measured on this CPU
        return None, "", f"rates of linear layers on a CPU are not known; {ESTIMATE_BY_HAND}"
    estimates = {one: passes_of(one, exchange_of(one), (0, 0)) for one in problems}
    for passes, why_not in estimates.values():
        if not passes:
            return None, "", why_not
    peak = gpu.peak(problem.dtype)
    if peak is None or gpu.bandwidth is None:
        return None, "", "rates of its linear layers were not measured"
    # with checkpoints, a backward first repeats the forward
    repeats_forward = problem.training and run.checkpoints

    def seconds_of(one: Problem) -> float:
        passes = estimates[one][0]
        return sum(x.seconds for x in passes) + (passes[0].seconds if repeats_forward else 0.0)

    attention = run.stack.sum_over_layers(list(map(seconds_of, problems)))
    sources = "; ".join(dict.fromkeys(passes[0].source for passes, _ in estimates.values()))
    linear = flops * (4 / 3 if repeats_forward else 1) / problem.world_size / (peak * _LINEAR_SHARE)
    saved = block_bytes(run.stack, problem.dtype.itemsize, is_plain=False)[0] * run.stack.num_layers * problem.rows * problem.batch_size
    passes_moved = 1 + _FORWARD_FRACTION * repeats_forward if problem.training else _FORWARD_FRACTION
    traffic = _TRAFFIC * passes_moved * saved / (gpu.bandwidth * _BANDWIDTH_SHARE)
    source = (
        f"attention {seconds_text(attention)} ({sources}); "
        f"linear layers {seconds_text(linear)}, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {seconds_text(traffic)}, at {_BANDWIDTH_SHARE:.0%} of the bandwidth; "
        "without the CPU's own time, which short sequences wait for"
    )
    return attention + linear + traffic, source, ""


def _decode_seconds(stack: LongNetConfig, problems: tuple[Problem, ...], cache_size: int, weight_bytes: int) -> tuple[float | None, str]:
    """Returns (seconds of a step that adds one token to each of B sequences of N positions, what they are based on).

    ``cache_size``: bytes of all cached keys and values, the most that can be read.

    seconds = layers · 70 µs + (weights + B · keys and values that a row reads) / (90 % of the bandwidth). None where no rate is known.
    """
    bandwidth = problems[0].machine.bandwidth
    if bandwidth is None:
        return None, ""
    row = 2 * problems[0].num_kv_heads * problems[0].head_dim * problems[0].dtype.itemsize
    read = min(cache_size, problems[0].batch_size * row * stack.sum_over_layers(list(map(_keys_of_row, problems))))
    seconds = stack.num_layers * _DECODE_SECONDS + (weight_bytes + read) / (bandwidth * _READ_SHARE)
    return seconds, f"{_DECODE_SECONDS * 1e6:.0f} µs a block, as on an H200; weights and cached keys at {_READ_SHARE:.0%} of the bandwidth"


def _keys_of_row(problem: Problem) -> int:
    """Returns the keys that a token after N positions reads, per key/value head. Query heads that share one are taken to read different
    keys."""
    N, H, Hk, pattern = problem.num_positions, problem.num_heads, problem.num_kv_heads, problem.pattern
    if problem.computes == "dense":
        return N
    if isinstance(pattern, BlockPattern):
        # the mean over all rows; where windows are narrow, it is also the mean of the last rows
        return -(-counts_of(problem).pairs // (N * Hk))
    rows = min(_AVERAGED_ROWS, N)
    return -(-(pattern.pairs(N, H, is_causal=True) - pattern.pairs(N - rows, H, is_causal=True)) // (rows * Hk))
