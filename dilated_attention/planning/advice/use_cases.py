"""One function per use case of ``recommend``: it chooses attention and distribution, and gathers the facts that the rules ask for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from dilated_attention.factory import create_model
from dilated_attention.functional import explain_decode
from dilated_attention.models import LongNetConfig, SlideEncoderConfig
from dilated_attention.models.summary import USABLE, cache_rows, readable
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.advice import rules
from dilated_attention.planning.advice.answer import Recommendation, settings_of
from dilated_attention.planning.advice.facts import Case, Chosen, branches_of, common_facts, explained, shown, time_facts
from dilated_attention.planning.whole_models.model_plan import plan_model

_GIGAPATH = "gigapath-12l768d"


def training(case: Case) -> Recommendation:
    """Recommends settings for training a model."""
    base, model = case.base, case.model(case.base)
    laid = rules.spread(model, case.length, case.batch, case.gpus, case.machine)
    config, plan = model.config, laid.plan
    chosen = Chosen(
        base=base, pattern=config.pattern, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        sequences=laid.sequences, data=laid.data, context=laid.context, memory=plan.peak, fits=plan.fits,
    )  # fmt: skip
    facts = {
        "what": "model", "parameters": _billions(model.num_parameters), "sequences": _count(laid.sequences, "sequence"),
        "longest": plan.longest, "checkpointed": plan.checkpoint_activations, "sharded": model.num_parameters > rules.SHARDED,
    } | time_facts(case, chosen, config.num_layers)  # fmt: skip
    options = {"checkpoint_activations": True} if plan.checkpoint_activations else {}
    arguments = model.overrides | options | case.mesh_options(base, laid.context)
    setup = [*_imports("create_model", base), *case.processes(laid.data, laid.context)]
    return _answer(case, chosen, facts, setup, _call("create_model", model.preset, arguments))


def layer(case: Case) -> Recommendation:
    """Recommends settings for one attention layer of a model that the caller already has."""
    base, heads, head_dim = case.base, case.heads or 16, case.head_dim or 64
    context = rules.most_context(case.length, case.gpus)
    data = case.gpus // context
    pattern, sequences = case.pattern(base, heads), max(1, case.batch // data)
    constructor = "multihead_block_sparse" if base == "block_sparse" else "multihead_dilated"
    arguments: dict[str, Any] = {"embed_dim": heads * head_dim, "num_heads": heads}
    if base == "dense" and context > 1:
        constructor, arguments = "ring", {}
    else:
        arguments |= {"pattern": pattern} if base == "block_sparse" else branches_of(pattern, case.length if base == "dense" else None)
        constructor = f"ring_{constructor}" if context > 1 else constructor
    chosen = Chosen(base=base, pattern=pattern, heads=heads, head_dim=head_dim, sequences=sequences, data=data, context=context)
    facts = time_facts(case, chosen, 1)
    if "plan" in facts:
        chosen = replace(chosen, memory=facts["plan"].peak, fits=facts["plan"].fits)
    code = _call("create_attention", constructor, arguments | case.mesh_options(base, context))
    setup = [*_imports("create_attention", base), *case.processes(data, context)]
    return _answer(case, chosen, {"what": "layer"} | facts, setup, code)


def decoding(case: Case) -> Recommendation:
    """Recommends settings for decoding: the longest segments whose cached keys fit alongside the weights, for all requests of a GPU."""
    machine, requests = case.machine, -(-case.users // case.gpus) if case.name == "serving" else 1
    itemsize, usable = machine.dtype.itemsize, int(USABLE * machine.memory)
    base, longest = case.base, case.length
    while True:
        model = case.model(base, longest)
        each = model.summary.cache_bytes(case.length, itemsize)
        assert each is not None, "a causal model of these patterns has a cache"
        weights = itemsize * model.num_parameters
        needed = weights + requests * each
        # nothing can be shortened if the segments were given or the weights alone do not fit
        if needed <= usable or case.attention is not None or base != "dilated" or weights > usable:
            break
        longest //= rules.GROWTH
        base = "dilated" if longest >= rules.LONG else "block_sparse"
    config = model.config
    decoder = explain_decode(
        hardware=machine.hardware, dtype=machine.dtype, dense=base == "dense", head_dim=config.head_dim, num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )  # fmt: skip
    facts = {
        "what": "decoding", "parameters": _billions(model.num_parameters), "requests": _count(requests, "request"), "cache": readable(each),
        "fitting": max(0, usable - weights) // each, "rows": cache_rows(config, case.length),
        "decoder": decoder.chosen,
    }  # fmt: skip
    chosen = Chosen(
        base=base, pattern=config.pattern, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        needs_grad=False, sequences=requests, memory=needed, fits=needed <= usable,
    )  # fmt: skip
    return _answer(case, chosen, facts, _imports("create_model", base), _call("create_model", model.preset, model.overrides))


def torchscale(case: Case) -> Recommendation:
    """Recommends settings for existing weights: segments, offsets, tail and gradient are those that they were trained with."""
    made, machine = create_model(_GIGAPATH, device="meta").config, case.machine
    assert isinstance(made, SlideEncoderConfig)
    encoder: LongNetConfig = made.encoder
    for checkpointed in (False, True):
        plan = plan_model(
            _GIGAPATH, num_positions=case.length, checkpoint_activations=checkpointed, dtype=machine.dtype, gpu=machine.gpu or "cpu",
            memory=machine.memory, find_longest=False,
        )  # fmt: skip
        if plan.fits:
            break
    chosen = Chosen(
        base="dilated", pattern=encoder.pattern, heads=encoder.num_heads, head_dim=encoder.head_dim, memory=plan.peak, fits=plan.fits
    )
    setup = [*_imports("create_model", "dilated"), '# with weights: integrations.torchscale.load_torchscale("slide_encoder.pth")']
    code = _call("create_model", _GIGAPATH, {"checkpoint_activations": True} if checkpointed else {})
    return _answer(case, chosen, {"what": "slide", "checkpointed": checkpointed}, setup, code)


def huggingface(case: Case) -> Recommendation:
    """Recommends settings for a transformers model, which keeps its own weights, caches and trainer."""
    base, heads = case.base, case.heads or 32
    context = rules.most_context(case.length, case.gpus) if base != "block_sparse" else 1
    data, pattern = case.gpus // context, case.pattern(base, heads)
    chosen = Chosen(base=base, pattern=pattern, heads=heads, head_dim=case.head_dim or 128, data=data, context=context)
    name = "ring_dilated" if context > 1 else "sdpa" if base == "dense" else base
    setup: list[str] = []
    if name != "sdpa":
        arguments = {"pattern": pattern} if base == "block_sparse" else branches_of(pattern, case.length if base == "dense" else None)
        registering = _call("register", name, arguments | case.mesh_options(base, context))
        setup = [*_imports("register", base, ".integrations.huggingface"), *case.processes(data, context), registering]
    return _answer(case, chosen, {"what": "transformers"}, setup, f'model.set_attn_implementation("{name}")')


def _answer(case: Case, chosen: Chosen, facts: dict[str, Any], setup: list[str], code: str) -> Recommendation:
    """Assembles the recommendation from what was chosen and the facts that only some use cases have."""
    pattern = chosen.pattern
    explanation = explained(case, chosen, case.machine)
    dense = (case.length + 1) / 2 if case.causal else case.length
    keys = pattern.pairs(case.length, chosen.heads, is_causal=case.causal) / (case.length * chosen.heads)
    found = common_facts(case, chosen, explanation) | {"keys": keys, "dense": dense, "share": keys / dense} | facts
    branches = pattern if isinstance(pattern, DilatedPattern) and chosen.base == "dilated" else None
    request = {field.name: getattr(case, field.name) for field in fields(case)}
    return Recommendation(
        use_case=case.name,
        request=request | {"machine": case.machine.name, "memory": case.machine.memory},
        machine=f"{case.length:,} positions on {f'{case.gpus} × ' if case.gpus > 1 else ''}{case.machine.name}",
        kind=chosen.kind,
        segment_lengths=branches.segment_lengths if branches else (),
        dilation_rates=branches.dilation_rates if branches else (),
        keys_per_query=keys,
        dense_keys_per_query=dense,
        forward=explanation.forward,
        backward=explanation.backward,
        memory=chosen.memory,
        fits=chosen.fits,
        settings=settings_of(found),
        setup=tuple(setup),
        code=code,
    )


def _call(function: str, name: str, arguments: dict[str, Any]) -> str:
    """Returns ``model = create_model(name, argument=…)``."""
    variable = {"create_model": "model = ", "create_attention": "attention = "}.get(function, "")
    listed = [repr(name), *(f"{key}={shown(value)}" for key, value in arguments.items())]
    return f"{variable}{function}({', '.join(listed)})".replace("'", '"')


def _imports(function: str, base: str, module: str = "") -> list[str]:
    """Returns the lines that import a function, and the pattern that the code writes."""
    lines = [f"from dilated_attention{module} import {function}"]
    return [*lines, "from dilated_attention.pattern import GlobalLocal"] if base == "block_sparse" else lines


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
