"""What ``recommend`` chooses from: branches, models by their size, and distributions of a training step over GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models import LongNetConfig
from dilated_attention.models.summary import Summary, footprint, summarise
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.problem import MOST, Machine
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
    """A preset with fields replaced, as created by ``create_model(preset, **overrides)``, and its figures."""

    preset: str
    overrides: dict[str, Any]
    summary: Summary

    @property
    def config(self) -> LongNetConfig:
        return self.summary.config


def language_model(parameters: float | None, heads: int | None, head_dim: int | None, is_causal: bool, attention: dict[str, Any]) -> Model:
    """Returns a Llama-like model with about this many parameters: heads of 128 from a billion on, four query heads per key head.

    Args:
        parameters: None for the unchanged preset ``llama-1b``.
        attention: fields of ``LongNetConfig`` that define what attends to what.
    """
    overrides: dict[str, Any] = attention | ({} if is_causal else {"is_causal": False})
    if parameters is None and heads is None and head_dim is None:
        return _model(overrides)
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
    return _model(overrides, wanted)


def _model(overrides: dict[str, Any], parameters: float | None = None) -> Model:
    """Returns a model with about this many parameters, or the preset's blocks. Its figures are those of one and two blocks, as building all
    blocks of a large model takes seconds, even empty ones.
    """
    made = [model_of("llama-1b", tuple(sorted((overrides | {"num_layers": layers}).items()))) for layers in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in made)
    outside, block = 2 * one - two, two - one
    usual = MODEL_PRESETS["llama-1b"]
    assert isinstance(usual, LongNetConfig)
    layers = usual.num_layers
    if parameters is not None:
        layers = overrides["num_layers"] = max(1, round((parameters - outside) / block))
    sizes = {"embedding.weight": outside, "blocks": layers * block}
    summary = summarise("llama-1b", replace(stack_of(made[0]), num_layers=layers), sizes, (1,), memory=1)
    return Model("llama-1b", overrides, summary)


def most_context(length: int, gpus: int) -> int:
    """Returns the number of processes that can share one sequence with enough work left for each."""
    most = min(gpus, max(1, length // TOKENS_PER_GPU), MOST["world_size"])
    return next(c for c in range(most, 0, -1) if gpus % c == 0)


def spread(model: Model, length: int, batch: int, gpus: int, dtype: torch.dtype, machine: Machine) -> ModelPlan:
    """Returns one GPU's plan of the first distribution that fits, or of the last one tried if none fits.

    ``gpus // world_size`` groups of ``world_size`` GPUs share ``batch_size`` sequences at a time; the rest of a batch follows by gradient
    accumulation. Tried are, in this order: all sequences at the same time, then fewer at a time, then more GPUs per sequence; then the same
    with blocks recomputed in the backward, which costs more time than exchanges do. Weights, gradients and optimiser state are sharded over
    all GPUs, as FSDP2 does. A distribution whose footprint, by a formula, is far too large is not traced.
    """

    def planned(context: int, sequences: int, checkpointed: bool, *, find_longest: bool) -> ModelPlan:
        return plan_model(
            model.preset, num_positions=length, batch_size=sequences, world_size=context, weight_shards=gpus,
            checkpoint_activations=checkpointed, dtype=dtype, gpu=machine.gpu or "cpu", memory=machine.memory, find_longest=find_longest,
            **model.overrides,
        )  # fmt: skip

    most = most_context(length, gpus)
    least = min(gpus // math.gcd(batch, gpus), most)
    for checkpointed in (False, True):
        needs = footprint(model.config, model.summary.num_parameters, checkpoint_activations=checkpointed)
        needs = replace(needs, fixed=needs.fixed // gpus)
        for context in (c for c in range(least, most + 1) if gpus % c == 0):
            for sequences in dict.fromkeys((max(1, batch * context // gpus), 1)):
                if needs.total(-(-sequences * length // context)) > FAR_BEYOND * machine.memory:
                    continue
                found = planned(context, sequences, checkpointed, find_longest=False)
                if found.fits:
                    return found
    return planned(context, sequences, True, find_longest=True)
