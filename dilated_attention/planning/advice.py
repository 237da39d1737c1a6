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
from dilated_attention.models import LongNetConfig
from dilated_attention.models.config import RING_KINDS
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
# the arguments that use cases take in addition to length, gpu and memory, where they are not those of training
_TAKES = {
    "training": "parameters heads head_dim gpus batch causal attention", "long-context": "parameters heads head_dim gpus attention",
    "serving": "parameters heads head_dim gpus users attention", "encoder": "parameters heads head_dim gpus batch attention",
    "torchscale": "", "huggingface": "heads head_dim gpus causal attention",
}  # fmt: skip
# docs/performance.md, Short sequences: five branches were slower than dense attention at 4,096 positions and faster at 8,192
_LONG = 8192
# docs/ring.md, Figures: with fewer tokens per GPU the exchanges are not hidden
_TOKENS_PER_GPU = 4096
# width and heads of language models with up to this many parameters; the one that is varied, and how many it has
_WIDTHS = (
    *((2e8, 768, 12), (5e8, 1024, 16), (1e9, 1536, 12), (2e9, 2048, 16)),
    *((5e9, 3072, 24), (1e10, 4096, 32), (2e10, 5120, 40), (5e10, 6656, 52), (math.inf, 8192, 64)),
)
_PRESET, _PARAMETERS, _GIGAPATH = "llama-1b", 1.24e9, "gigapath-12l768d"
# the block pattern that decoding was measured with (docs/decoding.md), applied to both sides where there is no causality
_WINDOW, _GLOBAL = 2047, 128
_SHORT, _DECODING, _HF = "docs/performance.md, Short sequences", "docs/decoding.md, Measured", "docs/huggingface.md, Transformers models"
_RING, _SLIDE, _SAME = "docs/ring.md, Figures", "docs/slide_encoder.md, NVIDIA H200", "docs/torchscale.md, What is the same"
_NOTHING_FITS = "weights, gradients and the optimizer alone do not fit"
_REGISTER = "from dilated_attention.integrations.huggingface import register"
Fields = tuple[str, ...]
# what was measured of a sequence that several GPUs share
_SHARED = {
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
    them on one H200), and says which. How well a model learns with each kind of attention is not considered.

    Args:
        use_case: a key of ``USE_CASES``.
        length: N, positions of a sequence; for ``"torchscale"`` tiles of a slide, for ``"serving"`` positions of a request.
        gpu: ``"H200"``, ``"A100"``, … (``planning.gpus.GPUS``), assumed to have every kernel package installed; ``"cpu"``; None: this
            machine.
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
    asked |= {"gpus": 1, "batch": 1, "users": 32, "causal": use_case not in ("encoder", "torchscale")} | given
    length = as_int("length", length, minimum=1, maximum=MOST["num_positions"])
    is_large, told = (parameters or 0) > 7e9, "not given" if parameters is None else f"{parameters:,.0f}"
    if use_case == "training" and is_large:
        raise ValueError(f"parameters is {told}; 'training' is for up to 7,000,000,000: use 'large-training'")
    if use_case == "large-training" and not is_large:
        raise ValueError(f"parameters is {told}; 'large-training' is for more than 7,000,000,000: give that many, or use 'training'")
    if use_case == "short-sequences" and length >= _LONG:
        raise ValueError(f"length is {length}; 'short-sequences' is for fewer than 8,192 positions: use 'training'")
    machine = machine_of(gpu, None if memory is None else int(_checked("memory", memory) * 2**30))
    hardware = detect() if gpu is None else EXAMPLES["cpu"]
    if gpu is not None and not machine.is_cpu:
        hardware = replace(EXAMPLES["hopper"], capability=machine.capability, name=machine.name)
    if machine.is_cpu:
        machine = replace(machine, name="CPU" if hardware.device_type == "cpu" else hardware.name)
    # the dtype of full speed: float16 is slow before Volta
    capability = (hardware.device_type == "cuda" and hardware.capability) or (0, 0)
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32
    # what is asked, and what is chosen: one process that trains, unless a use case decides otherwise
    x = SimpleNamespace(
        name=use_case, length=length, machine=machine, hardware=hardware, here=gpu is None, dtype=dtype, kv_heads=None, **asked,
        base=attention or ("dense" if length < _LONG else "dilated"), training=True, data=1, context=1, memory=None, fits=None,
        checkpointed=False, implementation="",
    )  # fmt: skip
    choose = {"torchscale": _training, "huggingface": _transformers, "long-context": _decoding, "serving": _decoding}
    chosen = choose.get(use_case, _layer if parameters is None else _training)(x)
    asks: dict[str, Any] = {"pattern": x.pattern, "num_positions": length}
    if x.base == "block_sparse":
        # counted from some where there are many
        x.keys = block_counts(x.pattern, length, 1, x.causal, MOST_BLOCKS).pairs / length
        asks = {"block_size": 128, "block_masks": "bits", "length": max(1, round(x.keys))}
    else:
        x.keys = x.pattern.keys_per_query(length, x.heads, is_causal=x.causal)
    x.dense_keys = (length + 1) / 2 if x.causal else float(length)
    backends = explain_backend(
        hardware=hardware, dtype=dtype, head_dim=x.head_dim, num_heads=x.heads, num_kv_heads=x.kv_heads, is_causal=x.causal,
        needs_grad=x.training, **asks,
    )  # fmt: skip
    *setup, code = _code(x)
    is_dilated = x.base == "dilated"
    return Recommendation(
        use_case=use_case, request={"name": use_case, "length": length, **asked, "machine": machine.name, "memory": machine.memory},
        machine=f"{length:,} positions on {f'{x.gpus} × ' if x.gpus > 1 else ''}{machine.name}", kind=kind_of(x.base, x.context),
        segment_lengths=x.pattern.segment_lengths if is_dilated else (), dilation_rates=x.pattern.dilation_rates if is_dilated else (),
        keys_per_query=x.keys, dense_keys_per_query=x.dense_keys, forward=backends.forward, backward=backends.backward,
        settings=tuple(itertools.starmap(Setting, [*_of_attention(x, backends), *chosen])), memory=x.memory, fits=x.fits,
        setup=tuple(setup), code=code,
    )  # fmt: skip


def _checked(name: str, value: Any) -> Any:
    limits: dict[str, Any] = MOST | {"heads": MOST["num_heads"], "head_dim": MAX_HEAD_DIM, "batch": MOST["batch_size"]}
    if name in limits:
        return as_int(name, value, minimum=1, maximum=limits[name])
    if name == "causal":
        check_bool(name, value)
    elif name == "attention":
        one_of(name, value, tuple(RING_KINDS.values()))
    elif check_positive(name, value) > 1e16:
        raise ValueError(f"{name} is {shown(value)}; expected a number above 0, at most 1e16")
    return value


def _pattern(x: Any, base: str, heads: int, longest: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Returns (the pattern of a kind of attention, the arguments that make it). Dense attention is one segment of the whole sequence; of
    branches, segments of 2048, 8192, … up to ``longest``, or the whole sequence, divide one another, and heads cover every offset."""
    if base == "block_sparse":
        pattern = GlobalLocal((_WINDOW, 0 if x.causal else _WINDOW), _GLOBAL)
        return pattern, {"pattern": pattern}
    lengths: tuple[int, ...] = (x.length,)
    rates: tuple[int, ...] = (1,)
    if base == "dilated":
        lengths, rates = geometric_branches(1 << (min(x.length, longest or x.length) - 1).bit_length())
        # below a rate of 8 far branches cost more than all others together
        rates = tuple(min(rate, 1 << (max(heads, 8).bit_length() - 1)) for rate in rates)
    return DilatedPattern(lengths, rates), {"segment_lengths": lengths, "dilation_rates": rates}


def _model(x: Any, base: str, longest: int | None = None) -> tuple[dict[str, Any], LongNetConfig, int]:
    """Returns (overrides of ``_PRESET``, configuration, number of parameters) of a model with about as many parameters as were asked for.
    Heads have 128 from a billion parameters on, four query heads share a key head."""
    config = cast("LongNetConfig", MODEL_PRESETS[_PRESET])
    wanted, heads = x.parameters or _PARAMETERS, config.num_heads
    shape: dict[str, Any] = {}
    if not (is_preset := {x.parameters, x.heads, x.head_dim} == {None}):
        embed, usual = next((embed, count) for most, embed, count in _WIDTHS if wanted < most)
        heads = x.heads or (usual if x.head_dim is None else max(1, round(embed / x.head_dim)))
        head_dim = x.head_dim or max(32, min(256, round(embed / heads / 32) * 32))
        kv_heads = heads // 4 if heads % 4 == 0 else None
        shape = {"embed_dim": heads * head_dim, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": None}
        # with 128,256 tokens the embedding alone would be most of a small model
        shape |= {"vocab_size": 32768} if wanted < 1e9 else {}
    pattern, made_by = _pattern(x, base, heads, longest)
    overrides: dict[str, Any] = made_by if base == "dilated" else {"attention": base}
    overrides |= ({"block_pattern": pattern} if base == "block_sparse" else {}) | ({} if x.causal else {"is_causal": False}) | shape
    if not is_preset:
        sizes = sizes_of_parameters(configured(_PRESET, **overrides, num_layers=1)[0])
        overrides["num_layers"] = max(1, round((wanted - sum(sizes.values())) / sizes["blocks"]) + 1)
    return overrides, *_sized(_PRESET, overrides)


def _sized(preset: str, overrides: dict[str, Any]) -> tuple[LongNetConfig, int]:
    config, _ = configured(preset, **overrides)
    return stack_of(config), sum(sizes_of_parameters(config).values())


def _take_model(x: Any, preset: str, overrides: dict[str, Any], config: LongNetConfig, number: int) -> None:
    x.base, x.pattern, x.heads, x.kv_heads, x.head_dim = config.kind, config.pattern, config.num_heads, config.num_kv_heads, config.head_dim
    x.make, x.arguments = "model", _arguments(preset, overrides)
    x.size = f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _most_context(x: Any) -> int:
    """Returns the number of processes that can share one sequence with enough work left for each."""
    most = min(x.gpus, max(1, x.length // _TOKENS_PER_GPU), MOST["world_size"])
    return next(c for c in range(most, 0, -1) if x.gpus % c == 0)


def _training(x: Any) -> list[Fields]:
    """Chooses the first distribution that fits, or the last one tried if none fits.

    ``gpus // context`` groups of ``context`` GPUs share ``count`` sequences at a time; gradient accumulation takes the rest of a batch.
    Tried are, in this order: all sequences at the same time, then one, then more GPUs per sequence; then the same with blocks recomputed in
    the backward, which costs more time than exchanges do. Weights, gradients and optimiser state are sharded over all GPUs, as FSDP2 does.
    """
    gpus, most = x.gpus, _most_context(x)
    # segments, offsets, tail and gradient are those that the weights were trained with
    is_slides = x.name == "torchscale"
    model = (_GIGAPATH, {}, *_sized(_GIGAPATH, {})) if is_slides else (_PRESET, *_model(x, x.base))
    preset, overrides, *_ = model
    contexts = [c for c in range(min(gpus // math.gcd(x.batch, gpus), most), most + 1) if gpus % c == 0]
    tried = [
        (checkpointed, context, count)
        for checkpointed, context in itertools.product((False, True), contexts)
        for count in dict.fromkeys((max(1, x.batch * context // gpus), 1))
    ]
    for checkpointed, context, count in tried:
        plan = plan_model(
            preset, num_positions=x.length, weight_shards=gpus, dtype=x.dtype, gpu=x.machine, world_size=context, batch_size=count,
            checkpoint_activations=checkpointed, find_longest=(checkpointed, context, count) == tried[-1], **overrides,
        )  # fmt: skip
        if plan.fits:
            break
    _take_model(x, *model)
    x.context, x.data, x.checkpointed = plan.world_size, gpus // plan.world_size, plan.checkpoint_activations
    reason = f"{x.size} parameters with AdamW, {plan.batch_size} sequences at a time, by plan_model"
    if not plan.fits:
        unfit = f"a sequence of {plan.longest:,} positions would fit" if plan.longest else _NOTHING_FITS
        reason += f"; {unfit}"
    settings = [_memory(x, plan.peak, plan.fits, reason)]
    reason = "without it the activations do not fit" if x.checkpointed else "the activations fit, and computing blocks twice costs time"
    reason += ": a training step of GigaPath's encoder took 235 ms and 4.2 GB with it, 163 ms and 11.9 GB without, on an H200"
    return [*settings, ("checkpoint_activations", str(x.checkpointed), reason, _SLIDE), *_spread(x)]


def _layer(x: Any) -> list[Fields]:
    """One attention layer of a model that the caller already has."""
    x.heads, x.head_dim, x.context = x.heads or 16, x.head_dim or 64, _most_context(x)
    x.pattern, arguments = _pattern(x, x.base, x.heads)
    x.data, is_shared = x.gpus // x.context, x.context > 1
    name = f"{'ring_' * is_shared}multihead_{'block_sparse' if x.base == 'block_sparse' else 'dilated'}"
    arguments = {"embed_dim": x.heads * x.head_dim, "num_heads": x.heads} | arguments
    if is_shared and x.base == "dense":
        name, arguments = "ring", {}
    x.make, x.arguments, count = "attention", _arguments(name, arguments), max(1, x.batch // x.data)
    settings = list(_spread(x))
    # figures of an unknown GPU are not known
    if not (x.machine.is_cpu and x.hardware.device_type == "cuda"):
        plan = plan_attention(
            kind_of(x.base, x.context), num_positions=x.length, num_heads=x.heads, head_dim=x.head_dim, batch_size=count, dtype=x.dtype,
            world_size=x.context, layout=_layout(x) if is_shared else None, is_causal=x.causal,
            pattern=None if x.base == "dense" else x.pattern, gpu=x.machine, find_longest=False,
        )  # fmt: skip
        time = "" if plan.seconds is None else f"; forward + backward take {seconds_text(plan.seconds)}, an estimate of plan_attention"
        settings.append(_memory(x, plan.peak, plan.fits, f"of this layer's tensors and what its calls need in addition{time}"))
    return settings


def _transformers(x: Any) -> list[Fields]:
    """A transformers model keeps its own weights, caches and trainer."""
    x.heads, x.head_dim = x.heads or 32, x.head_dim or 128
    x.context = 1 if x.base == "block_sparse" else _most_context(x)
    x.data = x.gpus // x.context
    x.pattern, arguments = _pattern(x, x.base, x.heads)
    x.implementation = "ring_dilated" if x.context > 1 else "sdpa" if x.base == "dense" else x.base
    x.arguments = _arguments(x.implementation, arguments)
    if x.implementation == "sdpa":
        return list(_spread(x))
    reason = "a model trained with dense attention computes something else with these layers; padding on the left shifts segments"
    return [("integration", "fine-tune, with padding on the right", reason, _HF), *_spread(x)]


def _decoding(x: Any) -> list[Fields]:
    """Chooses the longest segments whose cached keys fit alongside the weights, for all requests of a GPU."""
    is_serving = x.name == "serving"
    x.training, count = False, -(-x.users // x.gpus) if is_serving else 1
    itemsize, usable, base, longest = x.dtype.itemsize, int(USABLE * x.machine.memory), x.base, x.length
    while True:
        overrides, config, number = _model(x, base, longest)
        each = cache_bytes(config, x.length, itemsize)
        assert each is not None, "a causal model of these patterns has a cache"
        weights = itemsize * number
        fits = weights + count * each <= usable
        # nothing can be shortened if the segments were given or the weights alone do not fit
        if fits or x.attention is not None or base != "dilated" or weights > usable:
            break
        longest //= 4
        base = "dilated" if longest >= _LONG else "block_sparse"
    _take_model(x, _PRESET, overrides, config, number)
    fitting, rows = max(0, usable - weights) // each, cache_rows(config, x.length)
    reason = f"weights of {x.size} parameters and the cache of {count} requests, of which {fitting} would fit"
    settings = [_memory(x, weights + count * each, fits, reason)]
    cache = "PagedKVCache: model.generate([prompt, …])" if is_serving else "KVCache: model.generate(prompt, …)"
    reason = f"{readable(each)} per request for the last {rows:,} of {x.length:,} positions"
    settings.append(("KV cache", cache, reason, "docs/decoding.md, What a row reads"))
    if x.gpus > 1:
        settings.append(("mesh", f"{x.gpus} processes, each with its own requests", "a sequence is continued by one process"))
    return settings


def _memory(x: Any, size: int, fits: bool, reason: str) -> Fields:
    x.memory, x.fits = size, fits
    value = f"{readable(size)} per device, {'fits' if fits else 'does not fit'}"
    return "memory", value, f"{reason}; {x.machine.name} has {readable(x.machine.memory)}"


def _layout(x: Any) -> str:
    return "zigzag" if x.base == "dense" and x.causal else "contiguous"


def _spread(x: Any) -> Iterator[Fields]:
    """Yields how a training step is spread over several GPUs."""
    if x.gpus > 1:
        reason = "whole sequences fit on a GPU, and GPUs that share none exchange only gradients"
        if x.context > 1:
            reason = f"{-(-x.length // x.context):,} tokens per GPU; on four H200 {_SHARED[x.base]}"
        elif x.length < _TOKENS_PER_GPU * x.data and x.batch < x.data:
            reason += f"; sharing one would leave less than 4,096 tokens per GPU: give at least {x.gpus} sequences per step"
        yield "mesh", f"{x.data} × {x.context} (sequences × parts of one)", f"{reason}. FSDP2 or DDP over all {x.gpus}", _RING
    if x.context > 1:
        reason = "zigzag gives every process equally many pairs of causal dense attention; contiguous parts keep near keys on one"
        yield "layout", f'"{_layout(x)}"', reason, "docs/ring.md, How it works"


def _why_kind(x: Any) -> tuple[str, str]:
    """Returns (reason, source) of the kind of attention."""
    if x.name == "torchscale":
        return 'what the weights were trained with, all in the preset; load_torchscale("slide_encoder.pth") reads them', _SAME
    if x.attention is not None:
        return "requested; a model keeps the attention that it was trained with", _HF
    if x.base == "dense":
        return "dilated was slower at 4,096 positions and faster at 8,192, on an H200; dense leaves no key out", _SHORT
    if x.base == "block_sparse":
        return "the cache of every dilated pattern of 8,192 positions and more is too large for so many requests", _DECODING
    near = f"every query attends to all near keys, and to few far ones: {x.keys / x.dense_keys:.2%} of dense attention's pairs"
    if not x.training:
        more = "a step of decoding reads only these keys: 1,125 tokens/s at a million positions on an H200, dense attention 107"
        return f"{near}; {more}", _DECODING
    more = "on an H200 1,048,576 causal positions of 12 heads of 64 took 17.41 ms forward and 48.57 ms backward"
    return f"{near}; {more}", "docs/performance.md, Against the arithmetic floor"


def _of_attention(x: Any, backends: Explanation) -> Iterator[Fields]:
    """Yields what every use case decides."""
    yield "kind", kind_of(x.base, x.context), *_why_kind(x)
    if x.base != "dense" and x.name != "torchscale":
        reason = "how well a model learns with these keys is not measured here: train it and dense attention on your data where both can"
        yield "accuracy", "measure it on your model", reason, "docs/block_sparse.md, What it does not do"
    average = f"{x.keys:,.0f} keys per query on average, dense attention has {x.dense_keys:,.0f}"
    if x.base == "dilated":
        reach, reason = max(x.pattern.segment_lengths), f"segment/rate. {average}"
        if reach < x.length:
            reason += f". No segment is longer than {reach:,}, so that the keys of all requests fit"
        if x.name != "torchscale" and max(x.pattern.dilation_rates) > x.heads:
            reason += f". Rates above the {x.heads} heads leave positions out of far branches; more heads avoid this"
        yield "branches", ", ".join(f"{w}/{r}" for w, r in x.pattern.branches), reason, "docs/performance.md, How it works"
    elif x.base == "block_sparse":
        yield "pattern", _source(x.pattern), f"{average}: near and first positions", "docs/block_sparse.md, Performance"
    if backends.forward is None:
        yield "backend", "none", f"no backend can compute {backends.request.describe()}; try another head dim"
    else:
        basis = " · ".join(dict.fromkeys(filter(None, (backends.forward_basis, backends.backward_basis))))
        chosen = f"forward {backends.forward}" + (f", backward {backends.backward}" if x.training else "")
        packages = "" if x.here else " with every kernel package installed"
        yield "backend", chosen, f'what backend="auto" chooses{packages}: {basis}'
    name = str(x.dtype).removeprefix("torch.")
    why = {"bfloat16": "the range of float32 at half the bytes", "float16": "the GPU has no bfloat16; train with torch.amp.GradScaler"}
    yield "dtype", name, why.get(name, "no fast 16-bit products here")
    if x.name != "torchscale" and x.head_dim not in (64, 128):
        yield "head dim", f"{x.head_dim}; better 64 or 128", "what every kernel library is built for"


def _code(x: Any) -> list[str]:
    """Returns the lines to paste."""
    lines, processes, is_own = [], x.data * x.context, x.implementation == "sdpa"
    if not is_own:
        lines.append(f"from dilated_attention import create_{x.make}" if not x.implementation else _REGISTER)
    if x.base == "block_sparse":
        lines.append("from dilated_attention.pattern import GlobalLocal")
    if processes > 1 and not is_own:
        mesh = f'mesh = dist.init_device_mesh("{x.hardware.device_type}", ({x.data}, {x.context}), mesh_dim_names=("dp", "cp"))'
        lines += ["import torch.distributed as dist", f"dist.init_process_group()  # torchrun --nproc_per_node={processes}", mesh]
    options = x.arguments + (", checkpoint_activations=True" if x.checkpointed else "")
    options += f', mesh=mesh["cp"], layout="{_layout(x)}"' if x.context > 1 else ""
    if not x.implementation:
        return [*lines, f"{x.make} = create_{x.make}({options})"]
    return [*lines, *([] if is_own else [f"register({options})"]), f'model.set_attn_implementation("{x.implementation}")']


def _arguments(name: str, arguments: dict[str, Any]) -> str:
    """Returns the source of a call's arguments: a name, and those by keyword."""
    return ", ".join((repr(name), *(f"{key}={_source(value)}" for key, value in arguments.items()))).replace("'", '"')


def _source(value: Any) -> str:
    return f"GlobalLocal({value.window}, {value.global_tokens})" if isinstance(value, GlobalLocal) else repr(value)
