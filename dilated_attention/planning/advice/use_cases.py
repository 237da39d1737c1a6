"""One function per use case of ``recommend``: it chooses attention and distribution, and gathers the facts that the rules ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dilated_attention.factory import Explanation, create_model, explain_backend
from dilated_attention.functional import explain_decode
from dilated_attention.models import LongNetConfig, SlideEncoderConfig
from dilated_attention.models.summary import USABLE, cache_rows, readable
from dilated_attention.pattern import MAX_LENGTH, BlockPattern, DilatedPattern, GlobalLocal
from dilated_attention.planning.advice import rules
from dilated_attention.planning.advice.answer import Recommendation, settings_of
from dilated_attention.planning.estimate.plan import plan_attention
from dilated_attention.planning.text import seconds_text
from dilated_attention.planning.whole_models.model_plan import plan_model

KINDS = ("dense", "dilated", "block_sparse")
_RING = {"dense": "ring", "dilated": "ring_dilated", "block_sparse": "ring_block_sparse"}
# the block pattern that decoding was measured with (docs/decoding.md), applied to both sides where there is no causality
_WINDOW, _GLOBAL = 2047, 128
_GIGAPATH = "gigapath-12l768d"
_EXTRAS = {"flash4": "flash4", "flash3": "xformers", "flash2": "flash2", "flash3_fp8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request with its defaults filled in."""

    name: str
    length: int
    machine: rules.Machine
    parameters: float | None
    heads: int | None
    head_dim: int | None
    gpus: int
    batch: int
    users: int
    causal: bool
    attention: str | None

    @property
    def base(self) -> str:
        """Returns dense, dilated or block_sparse."""
        return self.attention or ("dense" if self.length < rules.LONG else "dilated")

    def pattern(self, base: str, heads: int, longest: int | None = None) -> DilatedPattern | BlockPattern:
        if base == "dilated":
            return rules.branches(self.length, heads, longest)
        return DilatedPattern((MAX_LENGTH,), (1,)) if base == "dense" else GlobalLocal((_WINDOW, 0 if self.causal else _WINDOW), _GLOBAL)

    def model(self, base: str, longest: int | None = None) -> rules.Model:
        """Builds the model with the number of heads that determines the dilation rates of its branches."""
        heads = self.heads
        if heads is None:
            heads = rules.language_model(self.parameters, None, self.head_dim, self.causal, {"attention": "dense"}).config.num_heads
        pattern = self.pattern(base, heads, longest)
        changes: dict[str, Any] = _branches(pattern) if base == "dilated" else {"attention": base}
        if base == "block_sparse":
            changes["block_pattern"] = pattern
        return rules.language_model(self.parameters, self.heads, self.head_dim, self.causal, changes)

    def mesh_options(self, base: str, context: int) -> dict[str, Any]:
        """Returns the options for a sequence shared by several processes; ``mesh`` is the variable that ``processes`` creates."""
        layout = "zigzag" if base == "dense" and self.causal else "contiguous"
        return {"mesh": _Source('mesh["cp"]'), "layout": layout} if context > 1 else {}

    def processes(self, data: int, context: int) -> list[str]:
        """Returns the lines that start the processes of several GPUs and arrange them in a mesh."""
        if data * context == 1:
            return []
        device = "cuda" if self.machine.is_cuda else "cpu"
        return [
            "import torch.distributed as dist",
            "dist.init_process_group()" + (f"  # torchrun --nproc_per_node={data * context}" if data * context <= 8 else ""),
            f'mesh = dist.init_device_mesh("{device}", ({data}, {context}), mesh_dim_names=("dp", "cp"))',
        ]


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The attention that was chosen, what a device holds at a time, and the distribution over GPUs."""

    base: str
    pattern: DilatedPattern | BlockPattern
    heads: int
    head_dim: int
    kv_heads: int | None = None
    needs_grad: bool = True
    sequences: int = 1
    data: int = 1
    context: int = 1
    memory: int | None = None
    fits: bool | None = None

    @property
    def kind(self) -> str:
        return _RING[self.base] if self.context > 1 else self.base


def training(case: Case) -> Recommendation:
    """Recommends settings for training a model."""
    base, model = case.base, case.model(case.base)
    laid = rules.spread(model, case.length, case.batch, case.gpus, case.machine)
    config, plan = model.config, laid.plan
    chosen = _Chosen(
        base=base, pattern=config.pattern, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        sequences=laid.sequences, data=laid.data, context=laid.context, memory=plan.peak, fits=plan.fits,
    )  # fmt: skip
    facts = {
        "what": "model", "parameters": _billions(model.num_parameters), "sequences": _count(laid.sequences, "sequence"),
        "longest": plan.longest, "checkpointed": plan.checkpoint_activations, "sharded": model.num_parameters > rules.SHARDED,
    } | _time(case, chosen, config.num_layers)  # fmt: skip
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
        arguments |= {"pattern": pattern} if base == "block_sparse" else _branches(pattern, case.length if base == "dense" else None)
        constructor = f"ring_{constructor}" if context > 1 else constructor
    chosen = _Chosen(base=base, pattern=pattern, heads=heads, head_dim=head_dim, sequences=sequences, data=data, context=context)
    facts = _time(case, chosen, 1)
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
    chosen = _Chosen(
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
    chosen = _Chosen(
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
    chosen = _Chosen(base=base, pattern=pattern, heads=heads, head_dim=case.head_dim or 128, data=data, context=context)
    name = "ring_dilated" if context > 1 else "sdpa" if base == "dense" else base
    setup: list[str] = []
    if name != "sdpa":
        arguments = {"pattern": pattern} if base == "block_sparse" else _branches(pattern, case.length if base == "dense" else None)
        registering = _call("register", name, arguments | case.mesh_options(base, context))
        setup = [*_imports("register", base, ".integrations.huggingface"), *case.processes(data, context), registering]
    return _answer(case, chosen, {"what": "transformers"}, setup, f'model.set_attn_implementation("{name}")')


def _answer(case: Case, chosen: _Chosen, facts: dict[str, Any], setup: list[str], code: str) -> Recommendation:
    """Assembles the recommendation from what was chosen and the facts that only some use cases have."""
    pattern = chosen.pattern
    explanation = _explained(case, chosen, case.machine)
    dense = (case.length + 1) / 2 if case.causal else case.length
    keys = pattern.pairs(case.length, chosen.heads, is_causal=case.causal) / (case.length * chosen.heads)
    found = _common(case, chosen, explanation) | {"keys": keys, "dense": dense, "share": keys / dense} | facts
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


def _common(case: Case, chosen: _Chosen, explanation: Explanation) -> dict[str, Any]:
    """Returns the facts that every use case has."""
    machine, pattern, length = case.machine, chosen.pattern, case.length
    is_slides, gpus = case.name == "torchscale", chosen.data * chosen.context
    # the class token precedes a slide's tiles
    positions = -(-chosen.sequences * length // chosen.context) + is_slides
    taken = [name for name in (explanation.forward, explanation.backward) if name]
    plain = "" if machine.is_here or not machine.is_cuda else _plain(case, chosen, explanation)
    facts: dict[str, Any] = {
        "use": case.name, "base": chosen.base, "kind": chosen.kind, "asked": case.attention is not None, "length": length,
        "causal": case.causal, "training": chosen.needs_grad, "cuda": machine.is_cuda, "hopper": machine.is_hopper, "here": machine.is_here,
        "machine": machine.name, "available": readable(machine.memory), "dtype": str(machine.dtype).removeprefix("torch."),
        "heads": chosen.heads, "head_dim": chosen.head_dim, "usual_head_dim": chosen.head_dim in (64, 128), "pattern": shown(pattern),
        "memory": "" if chosen.memory is None else readable(chosen.memory), "fits": "fits" if chosen.fits else "does not fit",
        "gpus": case.gpus, "data": chosen.data, "context": chosen.context, "part": -(-length // chosen.context), "positions": positions,
        "count": chosen.sequences, "too_short_to_share": chosen.context == 1 and length / gpus < rules.TOKENS_PER_GPU and case.batch < gpus,
        "computable": bool(taken), "forward": explanation.forward, "backward": explanation.backward, "plain": plain,
        "described": explanation.request.describe(),
        "basis": " · ".join(dict.fromkeys(basis for basis in (explanation.forward_basis, explanation.backward_basis) if basis)),
        "extras": ",".join(_EXTRAS[name] for name in dict.fromkeys(taken) if name in _EXTRAS),
        "nested": chosen.base == "dilated" and not is_slides and not explanation.nested_reasons,
        "SHORT": rules.SHORT, "LONG": rules.LONG, "TOKENS_PER_GPU": rules.TOKENS_PER_GPU,
        "checkpointed": None, "sharded": False, "seconds": "",
    }  # fmt: skip
    if isinstance(pattern, DilatedPattern):
        above = max(pattern.dilation_rates) > chosen.heads
        limited = any(w > rules.FIRST_SEGMENT * r for w, r in pattern.branches)
        pairs = pattern.branch_pairs(length, chosen.heads, is_causal=case.causal)
        facts |= {
            "branches": ", ".join(f"{w}/{r}" for w, r in pattern.branches), "reach": max(pattern.segment_lengths),
            "each": ", ".join(f"{n / (chosen.heads * length):,.0f}" for n in pairs),
            "rates": "above the heads" if above else "limited" if limited else "",
        }  # fmt: skip
    return facts


def _explained(case: Case, chosen: _Chosen, machine: rules.Machine) -> Explanation:
    """Calls ``explain_backend`` for such a call."""
    pattern, is_sparse = chosen.pattern, isinstance(chosen.pattern, BlockPattern)
    if isinstance(pattern, BlockPattern):
        rows = max(1, round(pattern.pairs(case.length, 1, is_causal=case.causal) / case.length))
    else:
        rows = max(-(-min(w, case.length) // r) for w, r in pattern.branches)
    return explain_backend(
        hardware=machine.hardware, dtype=machine.dtype, head_dim=chosen.head_dim, num_heads=chosen.heads, num_kv_heads=chosen.kv_heads,
        is_causal=case.causal, needs_grad=chosen.needs_grad, length=rows, block_size=128 if is_sparse else None,
        block_masks="bits" if is_sparse else "none",
    )  # fmt: skip


def _plain(case: Case, chosen: _Chosen, explanation: Explanation) -> str:
    """Returns the backends with only PyTorch and Triton, where they are others."""
    machine = replace(case.machine, hardware=replace(case.machine.hardware, packages=frozenset({"triton"})))
    plain = _explained(case, chosen, machine)
    if (plain.forward, plain.backward) == (explanation.forward, explanation.backward):
        return ""
    return f"forward {plain.forward}" + (f", backward {plain.backward}" if plain.backward else "")


def _time(case: Case, chosen: _Chosen, layers: int) -> dict[str, Any]:
    """Returns the plan of one layer's attention and its time; nothing for a GPU whose figures are unknown."""
    machine = case.machine
    if machine.gpu is None and machine.is_cuda:
        return {}
    plan = plan_attention(
        chosen.kind, num_positions=case.length, num_heads=chosen.heads, num_kv_heads=chosen.kv_heads, head_dim=chosen.head_dim,
        batch_size=chosen.sequences, dtype=machine.dtype, world_size=chosen.context,
        layout=case.mesh_options(chosen.base, chosen.context).get("layout"), is_causal=case.causal,
        pattern=None if chosen.base == "dense" else chosen.pattern, gpu=machine.gpu or "cpu", memory=machine.memory, find_longest=False,
    )  # fmt: skip
    if plan.seconds is None:
        return {"plan": plan}
    return {
        "plan": plan, "layers": layers, "seconds": seconds_text(plan.seconds), "seconds_of_layers": seconds_text(plan.seconds * layers),
        "bounds": ", ".join(f"{name} by {one.bound}" for name, one in zip(("forward", "backward"), plan.passes, strict=False)),
        "tflops": plan.passes[0].rate / 1e12, "rate_source": plan.passes[0].source,
    }  # fmt: skip


class _Source(str):
    """Source code that is inserted verbatim."""

    __repr__ = str.__str__


def _call(function: str, name: str, arguments: dict[str, Any]) -> str:
    """Returns ``model = create_model(name, argument=…)``."""
    variable = {"create_model": "model = ", "create_attention": "attention = "}.get(function, "")
    listed = [repr(name), *(f"{key}={shown(value)}" for key, value in arguments.items())]
    return f"{variable}{function}({', '.join(listed)})".replace("'", '"')


def _imports(function: str, base: str, module: str = "") -> list[str]:
    """Returns the lines that import a function, and the pattern that the code writes."""
    lines = [f"from dilated_attention{module} import {function}"]
    return [*lines, "from dilated_attention.pattern import GlobalLocal"] if base == "block_sparse" else lines


def shown(value: Any) -> str:
    """Returns a value as source code."""
    return f"GlobalLocal({value.window}, {value.global_tokens})" if isinstance(value, GlobalLocal) else repr(value)


def _branches(pattern: DilatedPattern | BlockPattern, whole: int | None = None) -> dict[str, Any]:
    """Returns a pattern's branches as arguments; ``whole``: one segment of that length, which is dense attention."""
    assert isinstance(pattern, DilatedPattern)
    w, r = (pattern.segment_lengths, pattern.dilation_rates) if whole is None else ((whole,), (1,))
    return {"segment_lengths": w, "dilation_rates": r}


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
