"""``recommend``: from a use case and a machine to the attention, its settings and the code that creates it, with a reason for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from dilated_attention.factory import EXAMPLES, MODEL_PRESETS, Explanation, detect, explain_backend
from dilated_attention.factory.create import configured
from dilated_attention.models.config import RING_KINDS, LongNetConfig
from dilated_attention.models.summary import USABLE, cache_bytes, cache_rows, readable
from dilated_attention.pattern import DilatedPattern, GlobalLocal, geometric_branches
from dilated_attention.pattern.checks import as_int, check_bool, one_of, shown
from dilated_attention.planning.attention import plan_attention
from dilated_attention.planning.gpus import machine_of
from dilated_attention.planning.memory import MOST_BLOCKS, block_counts
from dilated_attention.planning.models import plan_model, sizes_of_parameters, stack_of
from dilated_attention.planning.plans import Recommendation, Setting, seconds_text
from dilated_attention.planning.problem import MOST, kind_of
from dilated_attention.validation import MAX_HEAD_DIM, check_positive

USE_CASES: Mapping[str, str] = {
    "training": "train a model of up to 7 billion parameters, or one attention layer",
    "large-training": "train a model of more than 7 billion parameters",
    "long-context": "continue or read one very long sequence",
    "serving": "continue the sequences of many users",
    "short-sequences": "train on sequences of fewer than 8,192 positions",
    "encoder": "embed long documents without causality: slides, genomes, images",
    "torchscale": "load weights trained with TorchScale: Prov-GigaPath, LongViT",
    "huggingface": "train or fine-tune a transformers model",
}
# the arguments that a use case takes in addition to length, gpu and memory; one that is not here takes those of training
_TAKES = {
    "training": "parameters heads head_dim gpus batch causal attention",
    "long-context": "parameters heads head_dim gpus attention",
    "serving": "parameters heads head_dim gpus users attention",
    "encoder": "parameters heads head_dim gpus batch attention",
    "torchscale": "",
    "huggingface": "heads head_dim gpus causal attention",
}
# benchmarks/results/2026-11-22-h200/tiles.md: five branches were slower than dense attention at 4,096 positions and faster at 8,192
_LONG = 8192
# docs/ring.md, Figures: with fewer tokens per GPU the exchanges are not hidden
_TOKENS_PER_GPU = 4096
# (bound, width, heads) of usual language models: those of the first bound above the number of parameters
_WIDTHS = (
    (2e8, 768, 12), (5e8, 1024, 16), (1e9, 1536, 12), (2e9, 2048, 16), (5e9, 3072, 24),
    (1e10, 4096, 32), (2e10, 5120, 40), (5e10, 6656, 52), (math.inf, 8192, 64),
)  # fmt: skip
# the preset that language models are varied from, and how many parameters it has
_PRESET, _PARAMETERS = "llama-1b", 1.24e9
# the preset for TorchScale's weights
_GIGAPATH = "gigapath-12l768d"
# window to the left and global tokens of the block pattern that decoding was measured with (docs/decoding.md); without causality the window
# reaches as far to the right
_WINDOW, _GLOBAL = 2047, 128
# sources of settings: pages and their headings
_SHORT, _DECODING, _HF = "docs/performance.md, Short sequences", "docs/decoding.md, Measured", "docs/huggingface.md, Transformers models"
_TRAINED = "docs/patterns.md, Which attention should I train with?"
_RING, _SLIDE, _SAME = "docs/ring.md, Figures", "docs/slide_encoder.md, NVIDIA H200", "docs/torchscale.md, What is the same"
_NOTHING_FITS = "weights, gradients and the optimizer alone do not fit"
_REGISTER = "from dilated_attention.integrations.huggingface import register"
# measured speed of each kind of attention when several GPUs share a sequence
_SHARED_SPEED = {
    "dense": "causal forward + backward had 0.95 to 0.98 of one GPU's speed from 4,096 tokens per GPU on",
    "dilated": "forward + backward had 0.41 to 0.87 of one GPU's speed from 32,768 tokens each on, 0.92 to 0.98 as a graph",
    "block_sparse": "a window ran at 1.00 of one GPU's speed forward and 0.90 with backward, at 32,768 tokens per GPU",
}


def recommend(
    use_case: str,
    length: int,
    *,
    gpu: str | None = None,
    memory: float | None = None,
    parameters: float | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    users: int | None = None,
    causal: bool | None = None,
    attention: str | None = None,
) -> Recommendation:
    """Recommends what to use for a use case, with a reason for each setting and the code that creates it. Allocates nothing on a device.

    Each reason follows from the definition, from this library's planning functions, or from measured figures in its documentation (most of
    them on one H200), and says which. The kind of attention follows from cost; how well models learned with each is said beside it.

    Args:
        use_case: a key of ``USE_CASES``.
        length: N, positions of a sequence; for ``"torchscale"`` tiles of a slide, for ``"serving"`` positions of a request.
        gpu: ``"H200"``, ``"A100"``, … (``planning.gpus.GPUS``), with flash-attn-4 and triton; ``"cpu"``; None: this machine.
        memory: GiB of each device, instead of its actual memory.
        parameters: of the model; None: one attention layer, or for decoding the preset ``llama-1b``.
        heads, head_dim: of queries; None: the usual ones for this number of parameters.
        gpus: number of devices, 1 by default.
        batch: sequences of a training step over all GPUs, 1 by default.
        users: concurrent requests over all GPUs, 32 by default.
        causal: True by default, except for encoders.
        attention: ``"dense"``, ``"dilated"`` or ``"block_sparse"`` if the model has or must have it; None leaves the choice open.

    Raises:
        ValueError, TypeError: a use case, GPU or size that does not exist, or an argument that this use case does not accept.
    """
    one_of("use_case", use_case, tuple(USE_CASES))
    asked = {
        "parameters": parameters, "heads": heads, "head_dim": head_dim, "gpus": gpus, "batch": batch, "users": users, "causal": causal,
        "attention": attention,
    }  # fmt: skip
    given = {name: _checked(name, value) for name, value in asked.items() if value is not None}
    takes = _TAKES.get(use_case, _TAKES["training"]).split()
    if wrong := ", ".join(name for name in given if name not in takes):
        raise ValueError(
            f"{wrong} given, which {use_case!r} does not use; it takes {', '.join(('length', 'gpu', 'memory', *takes))}: drop {wrong}"
        )
    # from here on every argument is as given, else its default, else None
    asked |= {"gpus": 1, "batch": 1, "users": 32, "causal": use_case not in ("encoder", "torchscale")} | given
    length = as_int("length", length, minimum=1, maximum=MOST["num_positions"])
    is_large, given_text = (parameters or 0) > 7e9, "not given" if parameters is None else f"{parameters:,.0f}"
    if use_case == "training" and is_large:
        raise ValueError(f"parameters is {given_text}; 'training' is for up to 7,000,000,000: use 'large-training'")
    if use_case == "large-training" and not is_large:
        raise ValueError(f"parameters is {given_text}; 'large-training' is for more than 7,000,000,000: give that many, or use 'training'")
    if use_case == "short-sequences" and length >= _LONG:
        raise ValueError(f"length is {length}; 'short-sequences' is for fewer than 8,192 positions: use 'training'")
    # planning reads memory and speed from ``machine``; the selection of backends reads its facts from ``hardware``
    machine = machine_of(gpu, None if memory is None else int(_checked("memory", memory) * 2**30))
    hardware = detect() if gpu is None else EXAMPLES["cpu"]
    if not machine.is_cpu and gpu is not None:
        hardware = replace(EXAMPLES["hopper"], capability=machine.capability, name=machine.name)
    elif machine.is_cpu:
        # an AMD GPU is a CPU to planning, which does not detect it and takes the host's memory; the answer still names the GPU
        machine = replace(machine, name="CPU" if hardware.device_type == "cpu" else hardware.name)
    # the fastest dtype: bfloat16 from Ampere on; float16 is slow before Volta
    capability = (hardware.device_type == "cuda" and hardware.capability) or (0, 0)
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32
    # The answer so far: what is asked, and what is chosen, here for one process that trains, unless a use case decides otherwise.
    #     here                       whether the answer is for this machine
    #     base                       "dense" · "dilated" · "block_sparse": the kind of attention, whether or not processes share a sequence
    #     data, context              number of groups of GPUs, and of GPUs in a group, which share a sequence
    #     memory, fits               bytes needed per device, and whether the device has them; None: unknown
    #     implementation             what transformers calls the attention; "" for this package's own modules
    # The function of a use case adds:
    #     pattern, heads, kv_heads, head_dim
    #     make, arguments            what create_… makes ("model", "attention"), and the source text of its arguments
    #     stack, number, size        of a model: the configuration of its blocks, its number of parameters, and this number in words
    # After it keys and dense_keys are added: keys per query on average, of this attention and of dense attention.
    draft = SimpleNamespace(
        name=use_case, length=length, machine=machine, hardware=hardware, here=gpu is None, dtype=dtype, kv_heads=None, **asked,
        base=attention or ("dense" if length < _LONG else "dilated"), training=True, data=1, context=1, memory=None, fits=None,
        checkpointed=False, implementation="",
    )  # fmt: skip
    choosers = {"torchscale": _training, "huggingface": _transformers, "long-context": _decoding, "serving": _decoding}
    chosen = choosers.get(use_case, _layer if parameters is None else _training)(draft)
    pattern_options: dict[str, Any] = {"pattern": draft.pattern, "num_positions": length}
    if draft.base == "block_sparse":
        # every head has the same pattern; with more than MOST_BLOCKS blocks the number is an estimate from some of them
        draft.keys = block_counts(draft.pattern, length, 1, draft.causal, MOST_BLOCKS).pairs / length
        pattern_options = {"block_size": 128, "block_masks": "bits", "length": max(1, round(draft.keys))}
    else:
        draft.keys = draft.pattern.keys_per_query(length, draft.heads, is_causal=draft.causal)
    draft.dense_keys = (length + 1) / 2 if draft.causal else float(length)
    backends = explain_backend(
        hardware=hardware, dtype=dtype, head_dim=draft.head_dim, num_heads=draft.heads, num_kv_heads=draft.kv_heads, is_causal=draft.causal,
        needs_grad=draft.training, **pattern_options,
    )  # fmt: skip
    *setup, code = _code(draft)
    lengths, rates = (draft.pattern.segment_lengths, draft.pattern.dilation_rates) if draft.base == "dilated" else ((), ())
    return Recommendation(
        use_case=use_case, request={"name": use_case, "length": length, **asked, "machine": machine.name, "memory": machine.memory},
        machine=f"{length:,} positions on {f'{draft.gpus} × ' if draft.gpus > 1 else ''}{machine.name}",
        kind=kind_of(draft.base, draft.context), segment_lengths=lengths, dilation_rates=rates,
        keys_per_query=draft.keys, dense_keys_per_query=draft.dense_keys, forward=backends.forward, backward=backends.backward,
        settings=(*_of_attention(draft, backends), *chosen), memory=draft.memory, fits=draft.fits,
        setup=tuple(setup), code=code,
    )  # fmt: skip


def _checked(name: str, value: Any) -> Any:
    """Returns the value of an argument of ``recommend``, or raises."""
    limits: dict[str, Any] = MOST | {"heads": MOST["num_heads"], "head_dim": MAX_HEAD_DIM, "batch": MOST["batch_size"]}
    if name in limits:
        return as_int(name, value, minimum=1, maximum=limits[name])
    if name == "causal":
        check_bool(name, value)
    elif name == "attention":
        one_of(name, value, tuple(RING_KINDS.values()))
    # parameters, or memory in GiB
    elif check_positive(name, value) > 1e16:
        raise ValueError(f"{name} is {shown(value)}; expected a number above 0, at most 1e16")
    return value


def _pattern(draft: Any, base: str, heads: int, longest: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Returns (the pattern of a kind of attention, the arguments of create_… that describe it).

    Dense attention is one segment of the whole sequence. Dilated branches have segments of 2048, 8192, … up to ``longest`` or the whole
    sequence, rounded up to a power of 2, so that each divides the next. Their rates are at most the number of heads (or 8), so that the
    heads cover every offset.
    """
    if base == "block_sparse":
        pattern = GlobalLocal((_WINDOW, 0 if draft.causal else _WINDOW), _GLOBAL)
        return pattern, {"pattern": pattern}
    lengths: tuple[int, ...] = (draft.length,)
    rates: tuple[int, ...] = (1,)
    if base == "dilated":
        lengths, rates = geometric_branches(1 << (min(draft.length, longest or draft.length) - 1).bit_length())
        # with rates below 8 the far branches would cost more than all others together
        rates = tuple(min(rate, 1 << (max(heads, 8).bit_length() - 1)) for rate in rates)
    return DilatedPattern(lengths, rates), {"segment_lengths": lengths, "dilation_rates": rates}


def _model(draft: Any, base: str, longest: int | None = None) -> dict[str, Any]:
    """Returns the overrides of ``_PRESET`` that make a model with about as many parameters as were asked for.

    The model is the preset itself if neither parameters nor heads were given. Else width and heads are the usual ones, four query heads
    share a key head, and there are as many layers as the parameters need. ``longest``: see ``_pattern``.
    """
    config = cast("LongNetConfig", MODEL_PRESETS[_PRESET])
    wanted, heads = draft.parameters or _PARAMETERS, config.num_heads
    shape: dict[str, Any] = {}
    is_preset = draft.parameters is None and draft.heads is None and draft.head_dim is None
    if not is_preset:
        width, usual_heads = next((width, heads) for most, width, heads in _WIDTHS if wanted < most)
        heads = draft.heads or (usual_heads if draft.head_dim is None else max(1, round(width / draft.head_dim)))
        # the nearest multiple of 32, from 32 to 256
        head_dim = draft.head_dim or max(32, min(256, round(width / heads / 32) * 32))
        kv_heads = heads // 4 if heads % 4 == 0 else None
        shape = {"embed_dim": heads * head_dim, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": None}
        # with 128,256 tokens the embedding alone would be most of a small model
        shape |= {"vocab_size": 32768} if wanted < 1e9 else {}
    pattern, branches = _pattern(draft, base, heads, longest)
    overrides: dict[str, Any] = branches if base == "dilated" else {"attention": base}
    overrides |= ({"block_pattern": pattern} if base == "block_sparse" else {}) | ({} if draft.causal else {"is_causal": False}) | shape
    if not is_preset:
        # parameters of a model of one layer, which the sum counts already; "blocks" are those of the layer itself
        sizes = sizes_of_parameters(configured(_PRESET, **overrides, num_layers=1)[0])
        overrides["num_layers"] = max(1, round((wanted - sum(sizes.values())) / sizes["blocks"]) + 1)
    return overrides


def _choose_model(draft: Any, preset: str, overrides: dict[str, Any]) -> None:
    """Adds a model to the draft: its configuration and attention, the arguments that create it, its size."""
    config, _ = configured(preset, **overrides)
    draft.stack, draft.number = stack_of(config), sum(sizes_of_parameters(config).values())
    draft.base, draft.pattern, draft.heads = draft.stack.kind, draft.stack.pattern, draft.stack.num_heads
    draft.kv_heads, draft.head_dim = draft.stack.num_kv_heads, draft.stack.head_dim
    draft.make, draft.arguments = "model", _arguments(preset, overrides)
    draft.size = f"{draft.number / 1e9:.3g} billion" if draft.number >= 10**9 else f"{draft.number / 1e6:.3g} million"


def _most_context(draft: Any) -> int:
    """Returns the largest number of processes that can share one sequence with enough work for each, a divisor of the number of GPUs."""
    most = min(draft.gpus, max(1, draft.length // _TOKENS_PER_GPU), MOST["world_size"])
    return next(c for c in range(most, 0, -1) if draft.gpus % c == 0)


def _training(draft: Any) -> list[Setting]:
    """Chooses the first distribution that fits, or the last one tried if none fits.

    ``gpus // context`` groups of ``context`` GPUs share ``count`` sequences at a time; gradient accumulation takes the rest of a batch.
    It tries, in this order: all sequences at the same time, then one, then more GPUs per sequence; then the same with blocks recomputed in
    the backward, which costs more time than exchanges do. Weights, gradients and optimiser state are sharded over all GPUs, as FSDP2 does.
    """
    gpus, most = draft.gpus, _most_context(draft)
    if draft.name == "torchscale":
        # nothing is overridden: the weights were trained with the preset's segments, offsets, tail and gradient
        preset, overrides = _GIGAPATH, dict[str, Any]()
    else:
        preset, overrides = _PRESET, _model(draft, draft.base)
    _choose_model(draft, preset, overrides)
    # at least gpus / gcd(batch, gpus) of them share a sequence, so that none is idle
    contexts = [c for c in range(min(gpus // math.gcd(draft.batch, gpus), most), most + 1) if gpus % c == 0]
    tried = [
        (checkpointed, context, count)
        for checkpointed, context in itertools.product((False, True), contexts)
        for count in dict.fromkeys((max(1, draft.batch * context // gpus), 1))
    ]
    # ``plan`` stays at the first that fits, or at the last
    for checkpointed, context, count in tried:
        plan = plan_model(
            preset, num_positions=draft.length, weight_shards=gpus, dtype=draft.dtype, gpu=draft.machine, world_size=context,
            batch_size=count, checkpoint_activations=checkpointed, find_longest=(checkpointed, context, count) == tried[-1], **overrides,
        )  # fmt: skip
        if plan.fits:
            break
    draft.context, draft.data, draft.checkpointed = plan.world_size, gpus // plan.world_size, plan.checkpoint_activations
    reason = f"{draft.size} parameters with AdamW, {plan.batch_size} sequences at a time, by plan_model"
    if not plan.fits:
        unfit = f"a sequence of {plan.longest:,} positions would fit" if plan.longest else _NOTHING_FITS
        reason += f"; {unfit}"
    settings = [_memory(draft, plan.peak, plan.fits, reason)]
    reason = "without it the activations do not fit" if draft.checkpointed else "the activations fit, and computing blocks twice costs time"
    reason += ": a training step of GigaPath's encoder took 235 ms and 4.2 GB with it, 163 ms and 11.9 GB without, on an H200"
    return [*settings, Setting("checkpoint_activations", str(draft.checkpointed), reason, _SLIDE), *_spread(draft)]


def _layer(draft: Any) -> list[Setting]:
    """Chooses for one attention layer of a model that the caller already has."""
    draft.heads, draft.head_dim, draft.context = draft.heads or 16, draft.head_dim or 64, _most_context(draft)
    draft.pattern, arguments = _pattern(draft, draft.base, draft.heads)
    draft.data, is_shared = draft.gpus // draft.context, draft.context > 1
    name = f"{'ring_' * is_shared}multihead_{'block_sparse' if draft.base == 'block_sparse' else 'dilated'}"
    arguments = {"embed_dim": draft.heads * draft.head_dim, "num_heads": draft.heads} | arguments
    if is_shared and draft.base == "dense":
        name, arguments = "ring", {}
    draft.make, draft.arguments = "attention", _arguments(name, arguments)
    settings = list(_spread(draft))
    # planning knows neither the memory nor the rates of an AMD GPU
    if not (draft.machine.is_cpu and draft.hardware.device_type == "cuda"):
        plan = plan_attention(
            kind_of(draft.base, draft.context), num_positions=draft.length, num_heads=draft.heads, head_dim=draft.head_dim,
            batch_size=max(1, draft.batch // draft.data), dtype=draft.dtype, world_size=draft.context,
            layout=_layout(draft) if is_shared else None, is_causal=draft.causal,
            pattern=None if draft.base == "dense" else draft.pattern, gpu=draft.machine, find_longest=False,
        )  # fmt: skip
        time = "" if plan.seconds is None else f"; forward + backward take {seconds_text(plan.seconds)}, an estimate of plan_attention"
        settings.append(_memory(draft, plan.peak, plan.fits, f"of this layer's tensors and what its calls need in addition{time}"))
    return settings


def _transformers(draft: Any) -> list[Setting]:
    """Chooses for a transformers model, which keeps its own weights, caches and trainer."""
    draft.heads, draft.head_dim = draft.heads or 32, draft.head_dim or 128
    draft.context = 1 if draft.base == "block_sparse" else _most_context(draft)
    draft.data = draft.gpus // draft.context
    draft.pattern, arguments = _pattern(draft, draft.base, draft.heads)
    draft.implementation = "ring_dilated" if draft.context > 1 else "sdpa" if draft.base == "dense" else draft.base
    draft.arguments = _arguments(draft.implementation, arguments)
    if draft.implementation == "sdpa":
        return list(_spread(draft))
    reason = "a model trained with dense attention computes something else with these layers; padding on the left shifts segments"
    return [Setting("integration", "fine-tune, with padding on the right", reason, _HF), *_spread(draft)]


def _decoding(draft: Any) -> list[Setting]:
    """Chooses the longest segments whose cached keys fit alongside the weights, for all requests of a GPU."""
    is_serving = draft.name == "serving"
    draft.training, count = False, -(-draft.users // draft.gpus) if is_serving else 1
    itemsize, usable, base, longest = draft.dtype.itemsize, int(USABLE * draft.machine.memory), draft.base, draft.length
    # a copy, since ``_choose_model`` replaces the heads that were asked for
    asked = SimpleNamespace(**vars(draft))
    while True:
        _choose_model(draft, _PRESET, _model(asked, base, longest))
        request_bytes = cache_bytes(draft.stack, draft.length, itemsize)
        assert request_bytes is not None, "a causal model of these patterns has a cache"
        weights = itemsize * draft.number
        fits = weights + count * request_bytes <= usable
        # nothing can be shortened if the segments were given or the weights alone do not fit
        if fits or draft.attention is not None or base != "dilated" or weights > usable:
            break
        longest //= 4
        # where even short segments do not fit, a window is left
        base = "dilated" if longest >= _LONG else "block_sparse"
    num_fitting, rows = max(0, usable - weights) // request_bytes, cache_rows(draft.stack, draft.length)
    reason = f"weights of {draft.size} parameters and the cache of {count} requests, of which {num_fitting} would fit"
    settings = [_memory(draft, weights + count * request_bytes, fits, reason)]
    cache = "PagedKVCache: model.generate([prompt, …])" if is_serving else "KVCache: model.generate(prompt, …)"
    reason = f"{readable(request_bytes)} per request for the last {rows:,} of {draft.length:,} positions"
    settings.append(Setting("KV cache", cache, reason, "docs/decoding.md, What a row reads"))
    if draft.gpus > 1:
        settings.append(Setting("mesh", f"{draft.gpus} processes, each with its own requests", "a sequence is continued by one process"))
    return settings


def _memory(draft: Any, size: int, fits: bool, reason: str) -> Setting:
    """Adds to the draft whether ``size`` bytes per device fit, and returns the setting that says so."""
    draft.memory, draft.fits = size, fits
    value = f"{readable(size)} per device, {'fits' if fits else 'does not fit'}"
    return Setting("memory", value, f"{reason}; {draft.machine.name} has {readable(draft.machine.memory)}")


def _layout(draft: Any) -> str:
    return "zigzag" if draft.base == "dense" and draft.causal else "contiguous"


def _spread(draft: Any) -> Iterator[Setting]:
    """Yields the settings that spread a training step over several GPUs; none for one GPU."""
    if draft.gpus > 1:
        reason = "whole sequences fit on a GPU, and GPUs that share none exchange only gradients"
        if draft.context > 1:
            reason = f"{-(-draft.length // draft.context):,} tokens per GPU; on four H200 {_SHARED_SPEED[draft.base]}"
        elif draft.length < _TOKENS_PER_GPU * draft.data and draft.batch < draft.data:
            reason += f"; sharing one would leave less than 4,096 tokens per GPU: give at least {draft.gpus} sequences per step"
        value = f"{draft.data} × {draft.context} (sequences × parts of one)"
        yield Setting("mesh", value, f"{reason}. FSDP2 or DDP over all {draft.gpus}", _RING)
    if draft.context > 1:
        reason = "zigzag gives every process equally many pairs of causal dense attention; contiguous parts keep near keys on one"
        yield Setting("layout", f'"{_layout(draft)}"', reason, "docs/ring.md, How it works")


def _why_kind(draft: Any) -> tuple[str, str]:
    """Returns why this kind of attention is recommended, and the page that says so: (reason, source)."""
    if draft.name == "torchscale":
        return 'what the weights were trained with, all in the preset; load_torchscale("slide_encoder.pth") reads them', _SAME
    if draft.attention is not None:
        return "requested; a model keeps the attention that it was trained with", _HF
    if draft.base == "dense":
        return "dilated was slower at 4,096 positions and faster at 8,192, on an H200; dense leaves no key out", _SHORT
    if draft.base == "block_sparse":
        return "the cache of every dilated pattern of 8,192 positions and more is too large for so many requests", _DECODING
    near = f"every query attends to all near keys, and to few far ones: {draft.keys / draft.dense_keys:.2%} of dense attention's pairs"
    if not draft.training:
        more = "a step of decoding reads only these keys: 1,125 tokens/s at a million positions on an H200, dense attention 107"
        return f"{near}; {more}", _DECODING
    more = "on an H200 1,048,576 causal positions of 12 heads of 64 took 19.7 ms forward"
    return f"{near}; {more}", "docs/performance.md, Against the arithmetic floor"


def _of_attention(draft: Any, backends: Explanation) -> Iterator[Setting]:
    """Yields the settings that follow from the attention, whatever the use case: its kind, keys, backend and dtype."""
    yield Setting("kind", kind_of(draft.base, draft.context), *_why_kind(draft))
    if draft.base != "dense" and draft.name != "torchscale":
        source, better = "docs/block_sparse.md, What it does not do", "measure it on your model"
        reason = "a model trained with other keys computes something else: train it and dense attention on your data where both can"
        if draft.training and draft.causal and not draft.implementation:
            source, better = _TRAINED, 'layers that differ learn more in equal time: create_model("mixed-50m"), or any attention=[…]'
            reason = (
                "trained from nothing for 360 s at 32,768 bytes, layers of branches reached 0.892 bits a byte, windows 0.872, dense "
                "layers 1.024, and three windows to a dense layer 0.796; at 131,072 bytes, with lengths that double, 0.879, 0.844, 0.692 "
                'and 0.650, and 0.613 where its dense layers have positions="none". Only those copied from 524,288 bases back'
            )
        yield Setting("accuracy", better, reason, source)
    average = f"{draft.keys:,.0f} keys per query on average, dense attention has {draft.dense_keys:,.0f}"
    if draft.base == "dilated":
        reach, reason = max(draft.pattern.segment_lengths), f"segment/rate. {average}"
        if reach < draft.length:
            reason += f". No segment is longer than {reach:,}, so that the keys of all requests fit"
        if draft.name != "torchscale" and max(draft.pattern.dilation_rates) > draft.heads:
            reason += f". Rates above the {draft.heads} heads leave positions out of far branches; more heads avoid this"
        yield Setting("branches", ", ".join(f"{w}/{r}" for w, r in draft.pattern.branches), reason, "docs/performance.md, How it works")
    elif draft.base == "block_sparse":
        yield Setting("pattern", _source(draft.pattern), f"{average}: near and first positions", "docs/block_sparse.md, Performance")
    if backends.forward is None:
        yield Setting("backend", "none", f"no backend can compute {backends.request.describe()}; try another head dim")
    else:
        basis = " · ".join(dict.fromkeys(filter(None, (backends.forward_basis, backends.backward_basis))))
        chosen = f"forward {backends.forward}" + (f", backward {backends.backward}" if draft.training else "")
        packages = "" if draft.here else " with flash-attn-4 and triton"
        yield Setting("backend", chosen, f'what backend="auto" chooses{packages}: {basis}')
    name = str(draft.dtype).removeprefix("torch.")
    why = {"bfloat16": "the range of float32 at half the bytes", "float16": "the GPU has no bfloat16; train with torch.amp.GradScaler"}
    yield Setting("dtype", name, why.get(name, "no fast 16-bit products here"))
    if draft.name != "torchscale" and draft.head_dim not in (64, 128):
        yield Setting("head dim", f"{draft.head_dim}; better 64 or 128", "what every kernel library is built for")


def _code(draft: Any) -> list[str]:
    """Returns the lines of code to paste. The last one creates the model or the attention, or sets it; the others prepare that."""
    if draft.implementation == "sdpa":
        # transformers' own attention needs nothing of this package
        return ['model.set_attn_implementation("sdpa")']
    processes, options = draft.data * draft.context, draft.arguments + (", checkpoint_activations=True" if draft.checkpointed else "")
    options += f', mesh=mesh["cp"], layout="{_layout(draft)}"' if draft.context > 1 else ""
    if draft.implementation:
        first, last = _REGISTER, [f"register({options})", f'model.set_attn_implementation("{draft.implementation}")']
    else:
        first, last = f"from dilated_attention import create_{draft.make}", [f"{draft.make} = create_{draft.make}({options})"]
    lines = [first, *(["from dilated_attention.pattern import GlobalLocal"] * (draft.base == "block_sparse"))]
    if processes > 1:
        mesh = f'mesh = dist.init_device_mesh("{draft.hardware.device_type}", ({draft.data}, {draft.context}), mesh_dim_names=("dp", "cp"))'
        lines += ["import torch.distributed as dist", f"dist.init_process_group()  # torchrun --nproc_per_node={processes}", mesh]
    return [*lines, *last]


def _arguments(name: str, arguments: dict[str, Any]) -> str:
    """Returns the source of a call's arguments: a name, and those by keyword."""
    return ", ".join((repr(name), *(f"{key}={_source(value)}" for key, value in arguments.items()))).replace("'", '"')


def _source(value: Any) -> str:
    return f"GlobalLocal({value.window}, {value.global_tokens})" if isinstance(value, GlobalLocal) else repr(value)
