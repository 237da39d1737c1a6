"""``recommend``: from a use case and a machine to the attention, its settings and the code that creates it, with a reason for each.

A function per use case chooses attention and distribution; what it returns are facts. With those of the request and of the machine they
decide in ``rules.json`` which settings are recommended, in which words, and which lines of code create them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dilated_attention.factory import EXAMPLES, detect
from dilated_attention.functional import explain_decode
from dilated_attention.models.summary import USABLE, cache_rows, footprint, readable
from dilated_attention.pattern import DilatedPattern
from dilated_attention.pattern.checks import as_int, check_bool, check_number, one_of, shown
from dilated_attention.planning.advice.answer import Recommendation, filled, holds, rule_table, settings_of
from dilated_attention.planning.advice.case import GROWTH, LONG, Case, Model, arguments_of, branches_of, facts_of
from dilated_attention.planning.estimate.gpus import machine_of
from dilated_attention.planning.estimate.problem import MOST
from dilated_attention.planning.plans import ModelPlan
from dilated_attention.planning.whole_models.model_memory import model_of
from dilated_attention.planning.whole_models.model_plan import plan_model
from dilated_attention.validation import MAX_HEAD_DIM

USE_CASES: Mapping[str, str] = {name: case["for"] for name, case in rule_table()["use_cases"].items()}
KINDS = ("dense", "dilated", "block_sparse")
# limits; those of numbers that need not be whole are the parameters of a model, and the GiB of a device
_NUMBERS = {"parameters": 10**16, "memory": 2**30}
_MOST = MOST | {"heads": MOST["num_heads"], "head_dim": MAX_HEAD_DIM, "batch": MOST["batch_size"]}
_GIGAPATH = "gigapath-12l768d"
# multiple of a device's memory above which a formula's footprint cannot fit: footprints are within a quarter of the plans
FAR_BEYOND = 1.5
# number of parameters from which the optimiser alone takes 16 GB
SHARDED = 10**9


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
    row = rule_table()["use_cases"][use_case]
    arguments = {
        "parameters": parameters, "heads": heads, "head_dim": head_dim, "gpus": gpus, "batch": batch, "users": users, "causal": causal,
        "attention": attention,
    }  # fmt: skip
    given = {name: _checked(name, value) for name, value in arguments.items() if value is not None}
    if wrong := ", ".join(name for name in given if name not in row["takes"]):
        takes = ", ".join(("length", "gpu", "memory", *row["takes"]))
        raise ValueError(f"{wrong} given, which {use_case!r} does not use; it takes {takes}: drop {wrong}")
    usual = {"gpus": 1, "batch": 1, "users": 32, "causal": use_case not in ("encoder", "torchscale")}
    machine = machine_of(gpu, None if memory is None else int(_checked("memory", memory) * 2**30))
    hardware = detect() if gpu is None else EXAMPLES["cpu"]
    if gpu is not None and not machine.is_cpu:
        hardware = replace(EXAMPLES["hopper"], capability=machine.capability, name=machine.name)
    if machine.is_cpu:
        machine = replace(machine, name="CPU" if hardware.device_type == "cpu" else hardware.name)
    case = Case(
        name=use_case, length=as_int("length", length, minimum=1, maximum=MOST["num_positions"]), machine=machine, hardware=hardware,
        here=gpu is None, **(arguments | usual | given),
    )  # fmt: skip
    for refused in row.get("refused", ()):
        if holds(refused["when"], vars(case)):
            raise ValueError(filled(refused["text"], vars(case)))
    named = {"torchscale": _torchscale, "huggingface": _layer, "long-context": _decoding, "serving": _decoding}
    facts = facts_of(case, named.get(use_case, _layer if parameters is None else _training)(case))
    *setup, code = filled(rule_table()["code"], facts).splitlines()
    asked = {name: value for name, value in vars(case).items() if name not in ("hardware", "here")}
    same = ("kind", "segment_lengths", "dilation_rates", "keys_per_query", "dense_keys_per_query", "forward", "backward")
    return Recommendation(
        use_case=use_case, request=asked | {"machine": machine.name, "memory": machine.memory},
        machine=f"{case.length:,} positions on {f'{case.gpus} × ' if case.gpus > 1 else ''}{machine.name}",
        memory=facts["bytes"], fits=facts["fits"], settings=settings_of(facts), setup=tuple(setup), code=code,
        **{name: facts[name] for name in same},
    )  # fmt: skip


def _checked(name: str, value: Any) -> Any:
    if name == "causal":
        check_bool(name, value)
    elif name == "attention":
        one_of(name, value, KINDS)
    elif name in _MOST:
        return as_int(name, value, minimum=1, maximum=_MOST[name])
    else:
        check_number(name, value, "a number above 0")
        if not 0 < value <= _NUMBERS[name]:
            raise ValueError(f"{name} is {shown(value)}; expected a number above 0, at most {_NUMBERS[name]:,}")
    return value


def _training(case: Case) -> dict[str, Any]:
    model = case.model(case.base)
    return _trained(case, model) | {"what": "model", "layers": model.config.num_layers}


def _torchscale(case: Case) -> dict[str, Any]:
    """Existing weights: segments, offsets, tail and gradient are those that they were trained with."""
    return _trained(case, Model(_GIGAPATH, {}, model_of(_GIGAPATH, ()).summary())) | {"what": "slide"}


def _trained(case: Case, model: Model) -> dict[str, Any]:
    plan = _spread(case, model)
    return _of_model(model) | {
        "count": plan.batch_size, "data": case.gpus // plan.world_size, "context": plan.world_size, "memory": plan.peak, "fits": plan.fits,
        "longest": plan.longest, "checkpointed": plan.checkpoint_activations, "sharded": model.summary.num_parameters > SHARDED,
    }  # fmt: skip


def _spread(case: Case, model: Model) -> ModelPlan:
    """Returns one GPU's plan of the first distribution that fits, or of the last one tried if none fits.

    ``gpus // world_size`` groups of ``world_size`` GPUs share ``batch_size`` sequences at a time; the rest of a batch follows by gradient
    accumulation. Tried are, in this order: all sequences at the same time, then fewer at a time, then more GPUs per sequence; then the same
    with blocks recomputed in the backward, which costs more time than exchanges do. Weights, gradients and optimiser state are sharded over
    all GPUs, as FSDP2 does. A distribution whose footprint, by a formula, is far too large is not traced.
    """
    gpus = case.gpus
    planned = functools.partial(
        plan_model, model.preset, num_positions=case.length, weight_shards=gpus, dtype=case.dtype, gpu=case.machine, **model.overrides
    )
    least = min(gpus // math.gcd(case.batch, gpus), case.most_context)
    contexts = [c for c in range(least, case.most_context + 1) if gpus % c == 0]
    for checkpointed, context in itertools.product((False, True), contexts):
        needs = footprint(model.config, model.summary.num_parameters, checkpoint_activations=checkpointed)
        for sequences in dict.fromkeys((max(1, case.batch * context // gpus), 1)):
            tried: dict[str, Any] = {"world_size": context, "batch_size": sequences, "checkpoint_activations": checkpointed}
            activations = needs.total(-(-sequences * case.length // context)) - needs.fixed
            if needs.fixed // gpus + activations <= FAR_BEYOND * case.machine.memory:
                found = planned(**tried, find_longest=False)
                if found.fits:
                    return found
    return planned(**tried)


def _layer(case: Case) -> dict[str, Any]:
    """One attention layer of a model that the caller already has; a transformers model keeps its own weights, caches and trainer."""
    base, is_transformers = case.base, case.name == "huggingface"
    heads, head_dim = case.heads or (32 if is_transformers else 16), case.head_dim or (128 if is_transformers else 64)
    context = 1 if is_transformers and base == "block_sparse" else case.most_context
    data, pattern = case.gpus // context, case.pattern(base, heads)
    # dense attention is one segment of the whole sequence
    arguments: dict[str, Any] = branches_of(pattern) if isinstance(pattern, DilatedPattern) else {"pattern": pattern}
    found = {"base": base, "pattern": pattern, "heads": heads, "head_dim": head_dim, "data": data, "context": context}
    if is_transformers:
        name = "ring_dilated" if context > 1 else "sdpa" if base == "dense" else base
        found |= {"what": "sdpa" if name == "sdpa" else "transformers", "implementation": name}
    else:
        name = f"{'ring_' if context > 1 else ''}multihead_{'block_sparse' if base == 'block_sparse' else 'dilated'}"
        arguments = {"embed_dim": heads * head_dim, "num_heads": heads} | arguments
        if base == "dense" and context > 1:
            name, arguments = "ring", {}
        found |= {"what": "layer", "layers": 1, "count": max(1, case.batch // data)}
    return found | {"arguments": arguments_of(name, arguments)}


def _decoding(case: Case) -> dict[str, Any]:
    """Chooses the longest segments whose cached keys fit alongside the weights, for all requests of a GPU."""
    requests = -(-case.users // case.gpus) if case.name == "serving" else 1
    itemsize, usable = case.dtype.itemsize, int(USABLE * case.machine.memory)
    base, longest = case.base, case.length
    while True:
        model = case.model(base, longest)
        each = model.summary.cache_bytes(case.length, itemsize)
        assert each is not None, "a causal model of these patterns has a cache"
        weights = itemsize * model.summary.num_parameters
        needed = weights + requests * each
        # nothing can be shortened if the segments were given or the weights alone do not fit
        if needed <= usable or case.attention is not None or base != "dilated" or weights > usable:
            break
        longest //= GROWTH
        base = "dilated" if longest >= LONG else "block_sparse"
    config = model.config
    decoder = explain_decode(
        hardware=case.hardware, dtype=case.dtype, dense=base == "dense", head_dim=config.head_dim, num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )  # fmt: skip
    return _of_model(model) | {
        "what": "decoding", "training": False, "count": requests, "memory": needed, "fits": needed <= usable, "cache": readable(each),
        "fitting": max(0, usable - weights) // each, "rows": cache_rows(config, case.length), "decoder": decoder.chosen,
    }  # fmt: skip


def _of_model(model: Model) -> dict[str, Any]:
    config, number = model.config, model.summary.num_parameters
    return {
        "base": config.kind, "pattern": config.pattern, "heads": config.num_heads, "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "arguments": arguments_of(model.preset, model.overrides),
        "parameters": f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million",
    }  # fmt: skip
