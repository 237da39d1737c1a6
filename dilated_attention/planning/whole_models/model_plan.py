"""``plan_model``: the cost of training or running a model preset, traced with fake tensors through all its layers at two lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.models.summary import USABLE, cache_rows, embedding_parameters, readable, summarise
from dilated_attention.pattern import BlockPattern
from dilated_attention.planning.estimate.gpus import Gpu
from dilated_attention.planning.estimate.plan import most_positions, pairs_of, search
from dilated_attention.planning.estimate.problem import Problem, checked_sizes, machine_of, make_problem
from dilated_attention.planning.estimate.ring_estimate import Exchange, exchange_of
from dilated_attention.planning.text import fit_text, flops_text, seconds_text, table_text
from dilated_attention.planning.whole_models.hub_config import HubModel
from dilated_attention.planning.whole_models.model_memory import Run, extra_parameters, fixed_of, model_of, peak_of_step, stack_of
from dilated_attention.planning.whole_models.model_time import decode_seconds, prompt_seconds, step_seconds
from dilated_attention.validation import check_bool

Settings = dict[str, int | bool]
# when a model does not fit, settings with up to this many processes are tried, and at most two are shown
_MOST_PROCESSES, _SHOWN = 64, 2


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A training step, or generation, in figures of one process. ``str`` prints them, ``as_dict`` returns them.

    Args:
        preset, …: the request. With ``world_size`` processes each holds its share of the positions, and every figure is for one process.
        parameters: number of parameters of the whole model.
        terms: (what, bytes) at the highest point.
        moment: when the highest point occurs.
        flops: of the whole step: forward and backward, without recomputation; for inference, of the forward.
        exchange: the exchange of each layer's attention.
        seconds: an estimate, None where no rate is known; ``no_time`` says why, ``time_source`` what it is based on. For a language model's
            inference, of processing a prompt of N positions.
        decode_seconds: of a step after these, which adds a token to every sequence; None in training, where no rate is known, or for a
            model that does not generate from a cache. ``decode_source`` says what it is based on.
        fits, longest: see ``AttentionPlan``.
        suggestions: if it does not fit, (settings, peak bytes with them) of those that make it fit, with the fewest processes: at most two.
    """

    preset: str
    num_positions: int
    batch_size: int
    training: bool
    dtype: str
    autocast: bool
    world_size: int
    weight_shards: int
    checkpoint_activations: bool
    parameters: int
    layers: int
    terms: tuple[tuple[str, int], ...]
    moment: str
    flops: float
    exchange: Exchange
    seconds: float | None
    time_source: str
    no_time: str
    device: str
    device_memory: int
    fits: bool
    longest: int
    decode_seconds: float | None = None
    decode_source: str = ""
    suggestions: tuple[tuple[dict[str, int | bool], int], ...] = ()

    @property
    def peak(self) -> int:
        """Peak bytes of one process."""
        return sum(size for _, size in self.terms)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["terms"] = [list(term) for term in self.terms]
        return found | {"peak": self.peak}

    def __str__(self) -> str:
        return _text(self)


def _text(plan: ModelPlan) -> str:
    lines = _heading(plan)
    lines += [
        "",
        f"parameters   {plan.parameters:,} in {plan.layers} blocks",
        f"FLOPs        {flops_text(plan.flops)} per {'step' if plan.training else 'forward'}",
        f"peak memory  {readable(plan.peak)}, {plan.moment}" + (", per process" if plan.world_size * plan.weight_shards > 1 else ""),
    ]
    lines += [f"  {readable(size):>9}  {what}" for what, size in plan.terms]
    if plan.world_size > 1:
        moved = plan.exchange.bytes
        back = f", {readable(moved.backward_received)} backward" if plan.training else ""
        lines.append(f"on the wire  {plan.exchange.name}; a process receives {readable(moved.forward_received)} forward{back}, per layer")
    if plan.seconds is None:
        lines.append(f"time         no estimate: {plan.no_time}")
    else:
        rate = plan.batch_size * plan.num_positions / plan.seconds
        generates = plan.decode_seconds is not None
        what = f"{rate:,.0f} tokens/s of the prompt" if generates else f"{rate:,.0f} positions/s"
        lines.append(f"time         {seconds_text(plan.seconds)} (an estimate), {what}")
        # one part per line; text in brackets stays together
        lines += [f"             {part}" for part in re.split(r"; (?![^(]*\))", plan.time_source)]
    if plan.decode_seconds is not None:
        lines.append(
            f"generating   {seconds_text(plan.decode_seconds)} a step (an estimate), {plan.batch_size / plan.decode_seconds:,.0f} tokens/s"
        )
        lines.append(f"             {plan.decode_source}")
    lines.append(f"fits         {fit_text(plan.fits, plan.peak, plan.device_memory, plan.longest)}")
    for settings, peak in plan.suggestions:
        given = ", ".join(f"{name}={value}" for name, value in settings.items())
        lines.append(f"             it fits with {given}: {readable(peak)} per process")
    return "\n".join(lines)


def _heading(plan: ModelPlan, length: str | None = None) -> list[str]:
    weights = "float32 weights under autocast" if plan.autocast else f"{plan.dtype} weights"
    flags = [f"{plan.dtype}", weights, "training" if plan.training else "inference"]
    if plan.checkpoint_activations:
        flags.append("activations checkpointed")
    if plan.world_size > 1:
        flags.append(f"{plan.world_size} processes share a sequence")
    if plan.weight_shards > 1:
        flags.append(f"weights over {plan.weight_shards} processes")
    return [
        f"{plan.preset}, {length or f'{plan.num_positions:,} positions'} × {plan.batch_size}, {', '.join(flags)}",
        f"on {plan.device} with {readable(plan.device_memory)}",
    ]


def model_table(plans: Sequence[ModelPlan]) -> str:
    """Formats plans of one model at several lengths; only the last one contains the longest length that fits."""
    last = plans[-1]
    rows = [("positions", "FLOPs", "peak memory", "highest", "time", "fits")]
    for plan in plans:
        time = "–" if plan.seconds is None else seconds_text(plan.seconds)
        rows.append(
            (f"{plan.num_positions:,}", flops_text(plan.flops), readable(plan.peak), plan.moment, time, "yes" if plan.fits else "no")
        )
    return table_text(_heading(last, "several lengths"), rows, last.longest, [last.time_source] if last.time_source else [], last.no_time)


def plan_model(
    preset: str | HubModel,
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
        preset: a name of ``factory.MODEL_PRESETS``, or what ``read_hub_config`` returns for a transformers model's ``config.json``.
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
    machine = machine_of(gpu, memory)
    sizes = checked_sizes(num_positions=num_positions, batch_size=batch_size, world_size=world_size, weight_shards=weight_shards)
    # overrides are frozen because plans are cached by their arguments
    fields = tuple((name, _frozen(value)) for name, value in sorted(overrides.items()))
    model = model_of(preset, fields)
    config = stack_of(model)
    problem = _attention_of(config, machine.gpu, sizes, dtype, training)
    half = problem.dtype in (torch.float16, torch.bfloat16)
    casts = (training and half) if autocast is None else autocast
    if casts and not half:
        raise ValueError(f"autocast is True and dtype is {problem.dtype}; autocast computes in float16 or bfloat16: leave it out")
    run = Run(
        preset=preset, overrides=fields, batch_size=batch_size, training=training, dtype=problem.dtype, casts=casts,
        checkpoint_activations=checkpoint_activations, on_gpu=machine.gpu is not None,
    )  # fmt: skip
    most = None if isinstance(preset, str) else preset.max_positions
    if most is not None and num_positions > most:
        raise ValueError(f"num_positions is {num_positions:,}; expected at most {most:,}, the length of the model's table of positions")

    def excess(n: int) -> int:
        return sum(size for _, size in peak_of_step(run, weight_shards, problem.of_length(n))[0]) - budget

    def peak_with(settings: Settings) -> int:
        changed = replace(run, checkpoint_activations=bool(settings.get("checkpoint_activations", checkpoint_activations)))
        given = sizes | {name: int(value) for name, value in settings.items() if name in sizes}
        attention = _attention_of(config, machine.gpu, given, dtype, training)
        return sum(size for _, size in peak_of_step(changed, given["weight_shards"], attention)[0])

    terms, moment = peak_of_step(run, weight_shards, problem)
    budget = int(USABLE * machine.memory)
    fits = sum(size for _, size in terms) <= budget
    longest = search(excess, world_size, most or most_positions(problem)) if find_longest else num_positions * fits
    suggestions = _fitting(peak_with, run, world_size, weight_shards, budget) if find_longest and not fits else ()
    exchange = exchange_of(problem)
    sizes_of = {name: parameter.numel() for name, parameter in model.named_parameters()}
    flops = _flops(config, sizes_of, problem)
    generates = isinstance(model, LongNetLM) and not training
    if isinstance(model, LongNetLM) and generates and world_size == 1 and cache_rows(config, num_positions) is not None:
        seconds, source, why_not = prompt_seconds(run, problem, model)
    else:
        seconds, source, why_not = step_seconds(run, problem, exchange, flops)
    per_token, token_source = None, ""
    if generates and weight_shards == 1:
        looked_up = 0 if config.tie_embeddings else sum(n for name, n in sizes_of.items() if name.endswith("embedding.weight"))
        read = fixed_of(run, weight_shards).weights - looked_up * run.weight_dtype.itemsize
        per_token, token_source = decode_seconds(config, problem, read)
    return ModelPlan(
        preset=preset if isinstance(preset, str) else preset.name, num_positions=num_positions, batch_size=batch_size, training=training,
        dtype=str(problem.dtype).removeprefix("torch."), autocast=casts, world_size=world_size, weight_shards=weight_shards,
        checkpoint_activations=checkpoint_activations, parameters=sum(sizes_of.values()) + extra_parameters(preset),
        layers=config.num_layers, terms=terms, moment=moment, flops=flops, exchange=exchange, seconds=seconds, time_source=source,
        no_time=why_not, device=machine.name, device_memory=machine.memory, fits=fits, longest=longest, decode_seconds=per_token,
        decode_source=token_source, suggestions=suggestions,
    )  # fmt: skip


def _attention_of(config: LongNetConfig, gpu: Gpu | None, sizes: dict[str, int], dtype: torch.dtype | None, training: bool) -> Problem:
    """Returns the attention of one layer as a separate problem."""
    shared = sizes["world_size"] > 1
    kind = ("ring" if config.kind == "dense" else f"ring_{config.kind}") if shared else config.kind
    return make_problem(
        kind, num_positions=sizes["num_positions"], num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        batch_size=sizes["batch_size"], dtype=dtype, world_size=sizes["world_size"], layout="contiguous" if shared else None,
        is_causal=config.is_causal, training=training, pattern=None if config.kind == "dense" else config.pattern, gpu=gpu,
    )  # fmt: skip


def _flops(config: LongNetConfig, sizes: dict[str, int], problem: Problem) -> float:
    """Returns the FLOPs of a step: 6 per matrix parameter and position, and 12·E per key of a query and layer; a third for a forward."""
    summary = summarise("", config, sizes, (), memory=1)
    if isinstance(problem.pattern, BlockPattern):
        keys = pairs_of(problem)[0] / (problem.batch_size * problem.num_positions * problem.num_heads)
        looked_up = 0 if config.tie_embeddings else embedding_parameters(sizes)
        each = 6 * (summary.num_parameters - looked_up) + 12 * config.embed_dim * keys * config.num_layers
    else:
        each = summary.training_flops(problem.num_positions)
    return problem.batch_size * problem.num_positions * each / (1 if problem.training else 3)


def _fitting(peak_with: Callable[[Settings], int], run: Run, world: int, shards: int, budget: int) -> tuple[tuple[Settings, int], ...]:
    """Returns at most two (settings, peak) that fit in ``budget`` bytes, with the fewest processes: each is planned, none is a rule."""
    present = processes = max(world, shards)
    while processes <= max(present, _MOST_PROCESSES):
        checkpoint: Settings = {"checkpoint_activations": True} if run.training and not run.checkpoint_activations else {}
        sharded: Settings = {"weight_shards": processes} if processes > shards else {}
        # a language model generates from a cache that processes do not share
        shared: Settings = {"world_size": processes} if run.training and processes > world else {}
        found: list[tuple[Settings, int]] = []
        # those of fewer changes first
        one = (checkpoint, sharded, shared, sharded | checkpoint, shared | sharded, shared | checkpoint, shared | sharded | checkpoint)
        tried: list[Settings] = [{}]
        for settings in one:
            repeats = settings in tried or (processes > present and not settings.keys() - checkpoint.keys())
            # what fits with fewer changes needs no more of them
            if repeats or len(found) == _SHOWN or any(given.items() <= settings.items() for given, _ in found):
                continue
            tried.append(settings)
            peak = peak_with(settings)
            found += [(settings, peak)] if peak <= budget else []
        if found:
            return tuple(found)
        processes *= 2
    return ()


def _frozen(value: Any) -> Any:
    """Converts lists to tuples, recursively."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
