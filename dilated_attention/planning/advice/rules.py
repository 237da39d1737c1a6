"""What ``recommend`` chooses from: machines, branches, models by their size, and distributions of a training step over GPUs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.factory import EXAMPLES, MODEL_PRESETS, Hardware, create_model, detect
from dilated_attention.models import LongNetConfig
from dilated_attention.models.summary import Summary, footprint, summarise
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.gpus import Gpu
from dilated_attention.planning.estimate.problem import MOST
from dilated_attention.planning.estimate.problem import machine_of as planned_machine
from dilated_attention.planning.whole_models.model_plan import ModelPlan, plan_model

# docs/performance.md, Short sequences: five branches were slower than dense attention at 4,096 positions and faster at 8,192
SHORT, LONG = 4096, 8192
# 2048 / 1 … : docs/performance.md, Extreme length; a problem of 2048 rows reaches most of a kernel's peak rate
FIRST_SEGMENT, GROWTH = 2048, 4
# lowest dilation rate of far branches, even with few heads: below it they cost more than all the others together
LEAST_RATE = 8
# docs/ring.md, Figures: with fewer tokens per GPU the exchanges are not hidden
TOKENS_PER_GPU = 4096
LARGE = 7 * 10**9
# multiple of a device's memory above which a formula's footprint cannot fit: footprints are within a quarter of the plans
FAR_BEYOND = 1.5
# number of parameters from which the optimiser alone takes 16 GB
SHARDED = 10**9
# width and heads of language models with up to this many parameters
_WIDTHS = (
    *((2e8, 768, 12), (5e8, 1024, 16), (1e9, 1536, 12), (2e9, 2048, 16)),
    *((5e9, 3072, 24), (1e10, 4096, 32), (2e10, 5120, 40), (5e10, 6656, 52), (math.inf, 8192, 64)),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, and whether it is this machine's. ``memory`` is in bytes."""

    name: str
    hardware: Hardware
    memory: int
    is_here: bool
    gpu: Gpu | None

    @property
    def is_cuda(self) -> bool:
        return self.hardware.device_type == "cuda"

    @property
    def is_hopper(self) -> bool:
        return self.hardware.capability is not None and self.hardware.capability[0] == 9 and not self.hardware.is_rocm

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of full speed: the default of ``explain_backend``, except float32 for GPUs before Volta, whose float16 is slow."""
        capability = (self.hardware.capability or (0, 0)) if self.is_cuda else (0, 0)
        return torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32


def machine_of(gpu: str | None, memory: float | None) -> Machine:
    """Returns this machine's GPU or CPU (None), its CPU (``"cpu"``), or a GPU by name with every kernel package installed.

    ``memory`` is in GiB and replaces the device's own.
    """
    found = planned_machine(gpu)
    if gpu is None:
        hardware = detect()
    elif found.gpu is None:
        hardware = EXAMPLES["cpu"]
    else:
        hardware = replace(EXAMPLES["hopper"], capability=found.gpu.capability, name=found.name)
    name = found.name if found.gpu is not None else "CPU" if hardware.device_type == "cpu" else hardware.name
    size = found.memory if memory is None else int(memory * 2**30)
    return Machine(name=name, hardware=hardware, memory=size, is_here=gpu is None, gpu=found.gpu)


def branches(length: int, num_heads: int, longest: int | None = None) -> DilatedPattern:
    """Returns branches with segments of 2048, 8192, … up to the whole sequence; rates 1, 4, … are limited so that heads cover every offset.

    Each length and rate divides the next, so a pair that several branches share can be identified by its position; see
    ``engine/kernels/nested.py``.

    Args:
        longest: the longest segment, if not the whole sequence.
    """
    whole = 1 << max(0, min(length, longest or length) - 1).bit_length()
    most = 1 << (max(num_heads, LEAST_RATE).bit_length() - 1)
    lengths, rates = [], []
    segment, rate = FIRST_SEGMENT, 1
    while True:
        lengths.append(min(segment, whole))
        rates.append(min(rate, most))
        if segment >= whole:
            return DilatedPattern(tuple(lengths), tuple(rates))
        segment, rate = segment * GROWTH, rate * GROWTH


@dataclass(frozen=True, kw_only=True)
class Model:
    """A preset with fields replaced, as created by ``create_model(preset, **overrides)``."""

    preset: str
    overrides: dict[str, Any]
    summary: Summary

    @property
    def config(self) -> LongNetConfig:
        return self.summary.config

    @property
    def num_parameters(self) -> int:
        return self.summary.num_parameters


def language_model(parameters: float | None, heads: int | None, head_dim: int | None, is_causal: bool, attention: dict[str, Any]) -> Model:
    """Returns a Llama-like model with about this many parameters: heads of 128 from a billion on, four query heads per key head.

    Args:
        parameters: None for the unchanged preset ``llama-1b``.
        attention: fields of ``LongNetConfig`` that define what attends to what.
    """
    overrides: dict[str, Any] = attention | ({} if is_causal else {"is_causal": False})
    if parameters is None and heads is None and head_dim is None:
        return _model("llama-1b", overrides)
    wanted = parameters or 1.24e9
    embed, usual = next((embed, count) for most, embed, count in _WIDTHS if wanted < most)
    if heads is None and head_dim is not None:
        usual = max(1, round(embed / head_dim))
    heads = heads or usual
    head_dim = head_dim or max(32, min(256, round(embed / heads / 32) * 32))
    kv_heads = heads // 4 if heads % 4 == 0 else None
    overrides |= {"embed_dim": heads * head_dim, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": None}
    if wanted < 1e9:
        # with 128,256 tokens the embedding alone would be most of such a small model
        overrides["vocab_size"] = 32768
    embedding, block = _parameters("llama-1b", _sorted(overrides))
    return _model("llama-1b", overrides | {"num_layers": max(1, round((wanted - embedding) / block))})


def _model(preset: str, overrides: dict[str, Any]) -> Model:
    """Returns the model's figures, derived from one and two blocks: building all blocks of a large model takes seconds, even empty ones."""
    fields = {name: value for name, value in overrides.items() if name != "num_layers"}
    embedding, block = _parameters(preset, _sorted(fields))
    usual = MODEL_PRESETS[preset]
    assert isinstance(usual, LongNetConfig)
    made: LongNetConfig = create_model(preset, **fields, num_layers=1, device="meta").config
    config = replace(made, num_layers=overrides.get("num_layers", usual.num_layers))
    sizes = {"embedding.weight": embedding, "blocks": config.num_layers * block}
    return Model(preset=preset, overrides=overrides, summary=summarise(preset, config, sizes, (1,), memory=1))


def _sorted(overrides: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(overrides.items(), key=lambda item: item[0]))


@functools.lru_cache(maxsize=256)
def _parameters(preset: str, overrides: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
    """Returns (parameters outside the blocks, parameters per block) of a preset with fields replaced."""
    one, two = (
        sum(p.numel() for p in create_model(preset, **dict(overrides), num_layers=layers, device="meta").parameters()) for layers in (1, 2)
    )
    return 2 * one - two, two - one


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A training step over GPUs: ``data`` groups of ``context`` GPUs, each of which shares ``sequences`` at a time.

    The rest of a batch follows by gradient accumulation. ``plan`` is of one GPU.
    """

    data: int
    context: int
    sequences: int
    plan: ModelPlan


def most_context(length: int, gpus: int) -> int:
    """Returns the number of processes that can share one sequence with enough work left for each."""
    most = min(gpus, max(1, length // TOKENS_PER_GPU), MOST["world_size"])
    return next(c for c in range(most, 0, -1) if gpus % c == 0)


def spread(model: Model, length: int, batch: int, gpus: int, machine: Machine) -> Spread:
    """Returns the first distribution that fits, or the last one tried if none fits.

    They are tried in this order: all sequences at the same time, then fewer at a time, then more GPUs per sequence; then the same with
    blocks recomputed in the backward, which costs more time than exchanges do. Weights, gradients and optimiser state are sharded over all
    GPUs, as FSDP2 does. Memory comes from ``plan_model``; a distribution whose footprint, by a formula, is far too large is not traced.
    """

    def planned(context: int, sequences: int, checkpointed: bool, *, find_longest: bool) -> Spread:
        plan = plan_model(
            model.preset, num_positions=length, batch_size=sequences, world_size=context, weight_shards=gpus,
            checkpoint_activations=checkpointed, dtype=machine.dtype, gpu=machine.gpu or "cpu", memory=machine.memory,
            find_longest=find_longest, **model.overrides,
        )  # fmt: skip
        return Spread(data=gpus // context, context=context, sequences=sequences, plan=plan)

    most = most_context(length, gpus)
    least = min(gpus // math.gcd(batch, gpus), most)
    context, sequences = most, 1
    for checkpointed in (False, True):
        needs = footprint(model.config, model.num_parameters, checkpoint_activations=checkpointed)
        needs = replace(needs, fixed=needs.fixed // gpus)
        for context in (c for c in range(least, most + 1) if gpus % c == 0):
            for sequences in dict.fromkeys((max(1, batch * context // gpus), 1)):
                if needs.total(-(-sequences * length // context)) > FAR_BEYOND * machine.memory:
                    continue
                found = planned(context, sequences, checkpointed, find_longest=False)
                if found.plan.fits:
                    return found
    return planned(context, sequences, True, find_longest=True)
