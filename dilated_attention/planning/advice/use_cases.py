"""One function per use case of ``recommend``: it makes the choices and puts their settings in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dilated_attention.factory import create_model
from dilated_attention.models import LongNetConfig, SlideEncoderConfig
from dilated_attention.models.summary import USABLE, cache_rows
from dilated_attention.planning.advice import rationale, rules, run_settings
from dilated_attention.planning.advice.answer import Recommendation, Setting
from dilated_attention.planning.advice.snippets import call_text, imports, mesh_options, processes
from dilated_attention.planning.advice.use_case import RING, Case, Chosen, listed, shared, told
from dilated_attention.planning.estimate.attention_plan import AttentionPlan
from dilated_attention.planning.estimate.plan import plan_attention
from dilated_attention.planning.whole_models.model_plan import ModelPlan, plan_model

_GIGAPATH = "gigapath-12l768d"


def training(case: Case) -> Recommendation:
    """Recommends settings for training a model."""
    base, model = case.base, case.model(case.base)
    laid = rules.spread(model, case.length, case.batch, case.gpus, case.machine)
    config, context = model.config, laid.mesh.context
    what = f"{_billions(model.num_parameters)} parameters with AdamW, {_count(laid.sequences, 'sequence')} at a time"
    if not laid.fits:
        what += (
            f"; a sequence of {laid.longest:,} positions would fit"
            if laid.longest
            else ("; weights, gradients and the optimizer alone do not fit")
        )
    chosen = Chosen(
        kind=RING[base] if context > 1 else base, base=base, pattern=config.pattern, heads=config.num_heads, kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, needs_grad=True, positions=-(-laid.sequences * case.length // context), memory=laid.memory,
        fits=laid.fits,
    )  # fmt: skip
    plan = _planned(case, chosen, laid.sequences, context)
    settings = [
        run_settings.memory(laid.memory, case.machine, laid.fits, f"{what}; by plan_model", rationale.COMPUTED),
        *run_settings.time(plan, config.num_layers),
        run_settings.checkpointing(laid.checkpointed, laid.fits),
        *shared(case, base, laid.mesh, model.num_parameters > rules.SHARDED),
        run_settings.batch(case.length, laid.sequences),
        *([rationale.known_encoders()] if case.name == "encoder" else []),
    ]
    options = {"checkpoint_activations": True} if laid.checkpointed else {}
    arguments = model.overrides | options | (mesh_options(base, case.causal) if context > 1 else {})
    setup = [*imports("create_model", base), *processes(laid.mesh, case.machine.is_cuda)]
    return told(case, chosen, settings, setup, call_text("create_model", model.preset, arguments))


def layer(case: Case) -> Recommendation:
    """Recommends settings for one attention layer of a model that the caller already has."""
    base, heads, head_dim = case.base, case.heads or 16, case.head_dim or 64
    context = rules.most_context(case.length, case.gpus)
    mesh = rules.Mesh(case.gpus // context, context)
    pattern, sequences = case.pattern(base, heads), max(1, case.batch // mesh.data)
    kind, constructor = (RING[base] if context > 1 else base), "multihead_block_sparse" if base == "block_sparse" else "multihead_dilated"
    arguments: dict[str, Any] = {"embed_dim": heads * head_dim, "num_heads": heads}
    if kind == "ring":
        constructor, arguments = "ring", {}
    elif base == "block_sparse":
        arguments["pattern"] = pattern
    else:
        # one segment as long as the sequence is dense attention
        arguments |= listed(pattern) if base == "dilated" else {"segment_lengths": (case.length,), "dilation_rates": (1,)}
    if context > 1:
        constructor = constructor if kind == "ring" else f"ring_{constructor}"
        arguments |= mesh_options(base, case.causal)
    chosen = Chosen(
        kind=kind, base=base, pattern=pattern, heads=heads, kv_heads=None, head_dim=head_dim, needs_grad=True,
        positions=-(-sequences * case.length // context),
    )  # fmt: skip
    settings: list[Setting] = []
    plan = _planned(case, chosen, sequences, context)
    if plan is not None:
        chosen = replace(chosen, memory=plan.peak, fits=plan.fits)
        what = "of one layer's attention: q, k, v, result, gradients and what its calls need in addition"
        settings = [run_settings.memory(plan.peak, case.machine, plan.fits, what, rationale.COMPUTED), *run_settings.time(plan, 1)]
    settings += [
        *shared(case, base, mesh, False),
        run_settings.batch(case.length, sequences),
        *([rationale.known_encoders()] if case.name == "encoder" else []),
    ]
    setup = [*imports("create_attention", base), *processes(mesh, case.machine.is_cuda)]
    return told(case, chosen, settings, setup, call_text("create_attention", constructor, arguments))


def decoding(case: Case) -> Recommendation:
    """Recommends settings for decoding: the longest segments whose cached keys fit alongside the weights, for all requests of a GPU."""
    requests = -(-case.users // case.gpus) if case.name == "serving" else 1
    itemsize, usable = case.machine.dtype.itemsize, int(USABLE * case.machine.memory)
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
    config, fitting = model.config, max(0, usable - weights) // each
    rows = cache_rows(config, case.length)
    assert rows is not None
    what = f"weights of {_billions(model.num_parameters)} parameters and the cache of {_count(requests, 'request')}"
    if needed > usable:
        what += f", of which {fitting} would fit"
    chosen = Chosen(
        kind=base, base=base, pattern=config.pattern, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        needs_grad=False, positions=requests, memory=needed, fits=needed <= usable,
    )  # fmt: skip
    settings = [
        run_settings.memory(needed, case.machine, needed <= usable, what, f"{rationale.DECODING}, What a row reads"),
        run_settings.cache(base, case.name == "serving", rows, case.length, each),
        run_settings.decoder(
            case.machine, case.machine.dtype, base, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim
        ),
        *([run_settings.stepping()] if case.machine.is_cuda else []),
        *([run_settings.users(requests, fitting)] if case.name == "serving" else []),
        *([run_settings.replicas(case.gpus)] if case.gpus > 1 else []),
    ]
    return told(case, chosen, settings, imports("create_model", base), call_text("create_model", model.preset, model.overrides))


def torchscale(case: Case) -> Recommendation:
    """Recommends settings for existing weights: segments, offsets, tail and gradient are those that they were trained with."""
    made = create_model(_GIGAPATH, device="meta")
    assert isinstance(made.config, SlideEncoderConfig)
    encoder: LongNetConfig = made.config.encoder
    # the class token precedes the tiles
    positions = case.length + 1
    planned = [_slides(case, checkpointed=False)]
    if not planned[0].fits:
        planned.append(_slides(case, checkpointed=True))
    taken = planned[-1]
    chosen = Chosen(
        kind="dilated", base="dilated", pattern=encoder.pattern, heads=encoder.num_heads, kv_heads=None, head_dim=encoder.head_dim,
        needs_grad=True,
        positions=positions, memory=taken.peak, fits=taken.fits,
    )  # fmt: skip
    checkpointed = taken.checkpoint_activations
    settings = [
        run_settings.memory(taken.peak, case.machine, taken.fits, "fine-tuning on one slide with AdamW; by plan_model", rationale.COMPUTED),
        run_settings.checkpointing(checkpointed, taken.fits),
        *rationale.checkpoints(case.machine),
    ]
    setup = ["from dilated_attention import create_model", '# with weights: integrations.torchscale.load_torchscale("slide_encoder.pth")']
    return told(
        case, chosen, settings, setup, call_text("create_model", _GIGAPATH, {"checkpoint_activations": True} if checkpointed else {})
    )


def _slides(case: Case, *, checkpointed: bool) -> ModelPlan:
    machine = case.machine
    return plan_model(
        _GIGAPATH, num_positions=case.length, checkpoint_activations=checkpointed, dtype=machine.dtype, gpu=machine.gpu or "cpu",
        memory=machine.memory,
        find_longest=False,
    )  # fmt: skip


def huggingface(case: Case) -> Recommendation:
    """Recommends settings for a transformers model, which keeps its own weights, caches and trainer."""
    base, heads, head_dim = case.base, case.heads or 32, case.head_dim or 128
    context = rules.most_context(case.length, case.gpus) if base != "block_sparse" else 1
    mesh = rules.Mesh(case.gpus // context, context)
    pattern = case.pattern(base, heads)
    kind = RING[base] if context > 1 else base
    chosen = Chosen(
        kind=kind,
        base=base,
        pattern=pattern,
        heads=heads,
        kv_heads=None,
        head_dim=head_dim,
        needs_grad=True,
        positions=-(-case.length // context),
    )
    settings = [*rationale.transformers(base), *shared(case, base, mesh, False), run_settings.batch(case.length, 1)]
    if kind == "dense":
        return told(case, chosen, settings, [], 'model.set_attn_implementation("sdpa")')
    arguments: dict[str, Any] = {"segment_lengths": (case.length,), "dilation_rates": (1,)} if base == "dense" else listed(pattern)
    if base == "block_sparse":
        arguments = {"pattern": pattern}
    name = "ring_dilated" if context > 1 else base
    if context > 1:
        arguments |= mesh_options(base, case.causal)
    setup = [
        "from dilated_attention.integrations.huggingface import register",
        *imports("", base),
        *processes(mesh, case.machine.is_cuda),
    ]
    return told(
        case, chosen, settings, [*setup, call_text("register", name, arguments, bound="")], f'model.set_attn_implementation("{name}")'
    )


def _planned(case: Case, chosen: Chosen, sequences: int, context: int) -> AttentionPlan | None:
    """Plans one layer's attention; None for a GPU whose figures are unknown."""
    machine = case.machine
    if machine.gpu is None and machine.is_cuda:
        return None
    return plan_attention(
        chosen.kind, num_positions=case.length, num_heads=chosen.heads, num_kv_heads=chosen.kv_heads, head_dim=chosen.head_dim,
        batch_size=sequences, dtype=machine.dtype, world_size=context,
        layout=mesh_options(chosen.base, case.causal)["layout"] if context > 1 else None,
        is_causal=case.causal, pattern=None if chosen.base == "dense" else chosen.pattern, gpu=machine.gpu or "cpu", memory=machine.memory,
        find_longest=False,
    )  # fmt: skip


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
