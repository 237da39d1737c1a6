"""What ``recommend`` chooses from: branches, models by their size, and distributions of a training step over GPUs."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models import LongNetConfig
from dilated_attention.models.summary import Summary, footprint, summarise
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.gpus import Gpu
from dilated_attention.planning.estimate.problem import MOST
from dilated_attention.planning.plans import ModelPlan
from dilated_attention.planning.whole_models.model_memory import model_of, stack_of
from dilated_attention.planning.whole_models.model_plan import plan_model

# docs/performance.md, Short sequences: five branches were slower than dense attention at 4,096 positions and faster at 8,192
SHORT, LONG = 4096, 8192
# 2048 / 1 … : docs/performance.md, Extreme length; a problem of 2048 rows reaches most of a kernel's peak rate
FIRST_SEGMENT, GROWTH = 2048, 4
# lowest dilation rate of far branches, even with few heads: below it they cost more than all the others together
LEAST_RATE = 8
# docs/ring.md, Figures: with fewer tokens per GPU the exchanges are not hidden
TOKENS_PER_GPU = 4096
# multiple of a device's memory above which a formula's footprint cannot fit: footprints are within a quarter of the plans
FAR_BEYOND = 1.5
# number of parameters from which the optimiser alone takes 16 GB
SHARDED = 10**9
# width and heads of language models with up to this many parameters
_WIDTHS = (
    *((2e8, 768, 12), (5e8, 1024, 16), (1e9, 1536, 12), (2e9, 2048, 16)),
    *((5e9, 3072, 24), (1e10, 4096, 32), (2e10, 5120, 40), (5e10, 6656, 52), (math.inf, 8192, 64)),
)
# the model that is varied, and its number of parameters
PRESET, _PARAMETERS = "llama-1b", 1.24e9
_USUAL = cast("LongNetConfig", MODEL_PRESETS[PRESET])


def branches(length: int, num_heads: int, longest: int | None = None) -> DilatedPattern:
    """Returns branches with segments of 2048, 8192, … up to the whole sequence; rates 1, 4, … are limited so that heads cover every offset.

    Each length and rate divides the next, so a pair that several branches share can be identified by its position; see
    ``engine/kernels/nested.py``.

    Args:
        longest: the longest segment, if not the whole sequence.
    """
    whole = 1 << max(0, min(length, longest or length) - 1).bit_length()
    most = 1 << (max(num_heads, LEAST_RATE).bit_length() - 1)
    lengths, rates = [min(FIRST_SEGMENT, whole)], [1]
    while lengths[-1] < whole:
        lengths.append(min(lengths[-1] * GROWTH, whole))
        rates.append(min(rates[-1] * GROWTH, most))
    return DilatedPattern(tuple(lengths), tuple(rates))


class Model(NamedTuple):
    """A ``PRESET`` with fields replaced, as created by ``create_model(PRESET, **overrides)``, and its figures."""

    overrides: dict[str, Any]
    summary: Summary

    @property
    def config(self) -> LongNetConfig:
        return self.summary.config


def usual_shape(parameters: float | None, heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Returns (heads, head dim): the given ones, and the usual ones of a Llama-like model with about this many parameters."""
    embed, usual = next((embed, count) for most, embed, count in _WIDTHS if (parameters or _PARAMETERS) < most)
    if parameters is None and heads is None and head_dim is None:
        embed, usual = _USUAL.embed_dim, _USUAL.num_heads
    elif heads is None and head_dim is not None:
        usual = max(1, round(embed / head_dim))
    heads = heads or usual
    return heads, head_dim or max(32, min(256, round(embed / heads / 32) * 32))


def language_model(parameters: float | None, heads: int | None, head_dim: int | None, is_causal: bool, attention: dict[str, Any]) -> Model:
    """Returns a Llama-like model with about this many parameters: heads of 128 from a billion on, four query heads per key head.

    Its figures are those of one and two blocks, as building all blocks of a large model takes seconds, even empty ones.

    Args:
        parameters: None for those of ``PRESET``, which is unchanged if ``heads`` and ``head_dim`` are None, too.
        attention: fields of ``LongNetConfig`` that define what attends to what.
    """
    overrides: dict[str, Any] = attention | ({} if is_causal else {"is_causal": False})
    is_preset = parameters is None and heads is None and head_dim is None
    wanted = parameters or _PARAMETERS
    if not is_preset:
        heads, head_dim = usual_shape(parameters, heads, head_dim)
        kv_heads = heads // 4 if heads % 4 == 0 else None
        overrides |= {"embed_dim": heads * head_dim, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": None}
        if wanted < 1e9:
            # with 128,256 tokens the embedding alone would be most of such a small model
            overrides["vocab_size"] = 32768
    made = [model_of(PRESET, tuple(sorted((overrides | {"num_layers": layers}).items()))) for layers in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in made)
    outside, block = 2 * one - two, two - one
    layers = _USUAL.num_layers
    if not is_preset:
        layers = overrides["num_layers"] = max(1, round((wanted - outside) / block))
    sizes = {"embedding.weight": outside, "blocks": layers * block}
    return Model(overrides, summarise(PRESET, replace(stack_of(made[0]), num_layers=layers), sizes, (1,), memory=1))


def most_context(length: int, gpus: int) -> int:
    """Returns the number of processes that can share one sequence with enough work left for each."""
    most = min(gpus, max(1, length // TOKENS_PER_GPU), MOST["world_size"])
    return next(c for c in range(most, 0, -1) if gpus % c == 0)


def spread(model: Model, length: int, batch: int, gpus: int, dtype: torch.dtype, machine: Gpu) -> ModelPlan:
    """Returns one GPU's plan of the first distribution that fits, or of the last one tried if none fits.

    ``gpus // world_size`` groups of ``world_size`` GPUs share ``batch_size`` sequences at a time; the rest of a batch follows by gradient
    accumulation. Tried are, in this order: all sequences at the same time, then fewer at a time, then more GPUs per sequence; then the same
    with blocks recomputed in the backward, which costs more time than exchanges do. Weights, gradients and optimiser state are sharded over
    all GPUs, as FSDP2 does. A distribution whose footprint, by a formula, is far too large is not traced.
    """

    planned = functools.partial(
        plan_model, PRESET, num_positions=length, weight_shards=gpus, dtype=dtype, gpu=machine, **model.overrides
    )
    most = most_context(length, gpus)
    least = min(gpus // math.gcd(batch, gpus), most)
    contexts = [c for c in range(least, most + 1) if gpus % c == 0]
    for checkpointed, context in itertools.product((False, True), contexts):
        needs = footprint(model.config, model.summary.num_parameters, checkpoint_activations=checkpointed)
        for sequences in dict.fromkeys((max(1, batch * context // gpus), 1)):
            tried: dict[str, Any] = {"world_size": context, "batch_size": sequences, "checkpoint_activations": checkpointed}
            activations = needs.total(-(-sequences * length // context)) - needs.fixed
            if needs.fixed // gpus + activations <= FAR_BEYOND * machine.memory:
                found = planned(**tried, find_longest=False)
                if found.fits:
                    return found
    return planned(**tried)
