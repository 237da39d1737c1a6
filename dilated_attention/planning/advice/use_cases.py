"""One function per use case of ``recommend``: it chooses attention and distribution, and gathers the facts that only its rules ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dilated_attention.functional import explain_decode
from dilated_attention.models import LongNetConfig
from dilated_attention.models.summary import USABLE, cache_rows, readable
from dilated_attention.planning.advice import rules
from dilated_attention.planning.advice.answer import Recommendation
from dilated_attention.planning.advice.case import Case, Chosen, answer, shown, time_facts
from dilated_attention.planning.whole_models.model_memory import model_of, stack_of
from dilated_attention.planning.whole_models.model_plan import plan_model

_GIGAPATH = "gigapath-12l768d"


def training(case: Case) -> Recommendation:
    """Recommends settings for training a model."""
    base, model = case.base, case.model(case.base)
    plan = rules.spread(model, case.length, case.batch, case.gpus, case.dtype, case.machine)
    context, parameters = plan.world_size, model.summary.num_parameters
    chosen = _of_model(
        base, model.config, sequences=plan.batch_size, data=case.gpus // context, context=context, memory=plan.peak, fits=plan.fits
    )
    facts = {
        "what": "model", "parameters": _billions(parameters), "sequences": _count(plan.batch_size, "sequence"),
        "longest": plan.longest, "checkpointed": plan.checkpoint_activations, "sharded": parameters > rules.SHARDED,
    } | time_facts(case, chosen, model.config.num_layers)  # fmt: skip
    arguments = model.overrides | _checkpointed(plan.checkpoint_activations) | case.mesh_arguments(base, context)
    code = _call("create_model", model.preset, arguments)
    return answer(case, chosen, facts, case.setup("create_model", base, chosen.data, context), code)


def layer(case: Case) -> Recommendation:
    """Recommends settings for one attention layer of a model that the caller already has."""
    base, heads, head_dim = case.base, case.heads or 16, case.head_dim or 64
    context = rules.most_context(case.length, case.gpus)
    data, pattern = case.gpus // context, case.pattern(base, heads)
    chosen = Chosen(
        base=base, pattern=pattern, heads=heads, head_dim=head_dim, sequences=max(1, case.batch // data), data=data, context=context
    )
    facts = time_facts(case, chosen, 1)
    if "plan" in facts:
        chosen = replace(chosen, memory=facts["plan"].peak, fits=facts["plan"].fits)
    if base == "dense" and context > 1:
        constructor, arguments = "ring", case.mesh_arguments(base, context)
    else:
        constructor = ("ring_" if context > 1 else "") + ("multihead_block_sparse" if base == "block_sparse" else "multihead_dilated")
        arguments = {"embed_dim": heads * head_dim, "num_heads": heads} | case.attention_arguments(base, pattern, context)
    code = _call("create_attention", constructor, arguments)
    return answer(case, chosen, {"what": "layer"} | facts, case.setup("create_attention", base, data, context), code)


def decoding(case: Case) -> Recommendation:
    """Recommends settings for decoding: the longest segments whose cached keys fit alongside the weights, for all requests of a GPU."""
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
        longest //= rules.GROWTH
        base = "dilated" if longest >= rules.LONG else "block_sparse"
    config = model.config
    decoder = explain_decode(
        hardware=case.hardware, dtype=case.dtype, dense=base == "dense", head_dim=config.head_dim, num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )  # fmt: skip
    facts = {
        "what": "decoding", "parameters": _billions(model.summary.num_parameters), "requests": _count(requests, "request"),
        "cache": readable(each), "fitting": max(0, usable - weights) // each, "rows": cache_rows(config, case.length),
        "decoder": decoder.chosen,
    }  # fmt: skip
    chosen = _of_model(base, config, needs_grad=False, sequences=requests, memory=needed, fits=needed <= usable)
    return answer(case, chosen, facts, case.setup("create_model", base), _call("create_model", model.preset, model.overrides))


def torchscale(case: Case) -> Recommendation:
    """Recommends settings for existing weights: segments, offsets, tail and gradient are those that they were trained with."""
    for checkpointed in (False, True):
        plan = plan_model(
            _GIGAPATH, num_positions=case.length, checkpoint_activations=checkpointed, dtype=case.dtype, gpu=case.machine.gpu or "cpu",
            memory=case.machine.memory, find_longest=False,
        )  # fmt: skip
        if plan.fits:
            break
    chosen = _of_model("dilated", stack_of(model_of(_GIGAPATH, ())), memory=plan.peak, fits=plan.fits)
    weights = '# with weights: integrations.torchscale.load_torchscale("slide_encoder.pth")'
    code = _call("create_model", _GIGAPATH, _checkpointed(checkpointed))
    return answer(case, chosen, {"what": "slide", "checkpointed": checkpointed}, [*case.setup("create_model", "dilated"), weights], code)


def huggingface(case: Case) -> Recommendation:
    """Recommends settings for a transformers model, which keeps its own weights, caches and trainer."""
    base, heads = case.base, case.heads or 32
    context = rules.most_context(case.length, case.gpus) if base != "block_sparse" else 1
    data, pattern = case.gpus // context, case.pattern(base, heads)
    chosen = Chosen(base=base, pattern=pattern, heads=heads, head_dim=case.head_dim or 128, data=data, context=context)
    name = "ring_dilated" if context > 1 else "sdpa" if base == "dense" else base
    setup: list[str] = []
    if name != "sdpa":
        registering = _call("register", name, case.attention_arguments(base, pattern, context))
        setup = [*case.setup("register", base, data, context, ".integrations.huggingface"), registering]
    return answer(case, chosen, {"what": "transformers"}, setup, f'model.set_attn_implementation("{name}")')


def _of_model(base: str, config: LongNetConfig, **fields: Any) -> Chosen:
    shape: dict[str, Any] = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return Chosen(base=base, pattern=config.pattern, **shape, **fields)


def _checkpointed(checkpointed: bool) -> dict[str, Any]:
    return {"checkpoint_activations": True} if checkpointed else {}


def _call(function: str, name: str, arguments: dict[str, Any]) -> str:
    """Returns ``model = create_model(name, argument=…)``."""
    variable = {"create_model": "model = ", "create_attention": "attention = "}.get(function, "")
    listed = [repr(name), *(f"{key}={shown(value)}" for key, value in arguments.items())]
    return f"{variable}{function}({', '.join(listed)})".replace("'", '"')


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
