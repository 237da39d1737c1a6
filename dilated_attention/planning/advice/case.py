"""The request to ``recommend``, what it chooses from, and the facts about both and the machine that ``rules.json`` asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from dilated_attention.backends import Hardware
from dilated_attention.factory import MODEL_PRESETS, Explanation, explain_backend
from dilated_attention.models import LongNetConfig
from dilated_attention.models.summary import Summary, readable, summarise
from dilated_attention.pattern import BlockPattern, DilatedPattern, GlobalLocal
from dilated_attention.planning.estimate.gpus import Gpu
from dilated_attention.planning.estimate.plan import plan_attention
from dilated_attention.planning.estimate.problem import MOST, kind_of
from dilated_attention.planning.plans import seconds_text
from dilated_attention.planning.whole_models.model_memory import model_of, stack_of

# docs/performance.md, Short sequences: five branches were slower than dense attention at 4,096 positions and faster at 8,192
SHORT, LONG = 4096, 8192
# 2048 / 1 … : docs/performance.md, Extreme length; a problem of 2048 rows reaches most of a kernel's peak rate
FIRST_SEGMENT, GROWTH = 2048, 4
# lowest dilation rate of far branches, even with few heads: below it they cost more than all the others together
LEAST_RATE = 8
# docs/ring.md, Figures: with fewer tokens per GPU the exchanges are not hidden
TOKENS_PER_GPU = 4096
# width and heads of language models with up to this many parameters
_WIDTHS = (
    *((2e8, 768, 12), (5e8, 1024, 16), (1e9, 1536, 12), (2e9, 2048, 16)),
    *((5e9, 3072, 24), (1e10, 4096, 32), (2e10, 5120, 40), (5e10, 6656, 52), (math.inf, 8192, 64)),
)
# the model that is varied, and its number of parameters
PRESET, _PARAMETERS = "llama-1b", 1.24e9
_CONFIG = cast("LongNetConfig", MODEL_PRESETS[PRESET])
# the block pattern that decoding was measured with (docs/decoding.md), applied to both sides where there is no causality
_WINDOW, _GLOBAL = 2047, 128
_EXTRAS = {"flash4": "flash4", "flash3": "xformers", "flash2": "flash2", "flash3_fp8": "fp8"}
# facts where nothing else is stated: one sequence on one GPU, of training, whose memory and time are not estimated
_USUAL: dict[str, Any] = {
    "training": True, "count": 1, "data": 1, "context": 1, "kv_heads": None, "memory": None, "fits": None, "checkpointed": None,
    "sharded": False, "seconds": None, "implementation": "", "plain": "", "segment_lengths": (), "dilation_rates": (),
}  # fmt: skip


def branches(length: int, num_heads: int, longest: int | None = None) -> DilatedPattern:
    """Returns branches with segments of 2048, 8192, … up to the whole sequence; rates 1, 4, … are limited so that heads cover every offset.

    Each length and rate divides the next.

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
    """A model as created by ``create_model(preset, **overrides)``, and its figures."""

    preset: str
    overrides: dict[str, Any]
    summary: Summary

    @property
    def config(self) -> LongNetConfig:
        return self.summary.config


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request with its defaults filled in. ``here``: whether the machine is this one."""

    name: str
    length: int
    machine: Gpu
    hardware: Hardware
    here: bool
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
        return self.attention or ("dense" if self.length < LONG else "dilated")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of full speed: the default of ``explain_backend``, except float32 for GPUs before Volta, whose float16 is slow."""
        capability = (self.hardware.capability or (0, 0)) if self.hardware.device_type == "cuda" else (0, 0)
        return torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32

    def pattern(self, base: str, heads: int, longest: int | None = None) -> DilatedPattern | BlockPattern:
        if base == "dilated":
            return branches(self.length, heads, longest)
        return DilatedPattern((self.length,), (1,)) if base == "dense" else GlobalLocal((_WINDOW, 0 if self.causal else _WINDOW), _GLOBAL)

    @property
    def most_context(self) -> int:
        """The number of processes that can share one sequence with enough work left for each."""
        most = min(self.gpus, max(1, self.length // TOKENS_PER_GPU), MOST["world_size"])
        return next(c for c in range(most, 0, -1) if self.gpus % c == 0)

    def model(self, base: str, longest: int | None = None) -> Model:
        """Returns a Llama-like model with about this many parameters: heads of 128 from a billion on, four query heads per key head.

        Without parameters, heads and head dim it is ``PRESET``. Its figures are those of one and two blocks, as building all blocks of a
        large model takes seconds, even empty ones.
        """
        is_preset = self.parameters is None and self.heads is None and self.head_dim is None
        wanted, heads, layers = self.parameters or _PARAMETERS, self.heads, _CONFIG.num_layers
        embed, usual = next((embed, count) for most, embed, count in _WIDTHS if wanted < most)
        if is_preset:
            embed, usual = _CONFIG.embed_dim, _CONFIG.num_heads
        elif heads is None and self.head_dim is not None:
            usual = max(1, round(embed / self.head_dim))
        heads = heads or usual
        # the number of heads determines the dilation rates of its branches
        pattern = self.pattern(base, heads, longest)
        overrides: dict[str, Any] = branches_of(pattern) if base == "dilated" else {"attention": base}
        overrides |= {"block_pattern": pattern} if base == "block_sparse" else {}
        overrides |= {} if self.causal else {"is_causal": False}
        if not is_preset:
            head_dim = self.head_dim or max(32, min(256, round(embed / heads / 32) * 32))
            kv_heads = heads // 4 if heads % 4 == 0 else None
            overrides |= {"embed_dim": heads * head_dim, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": None}
            if wanted < 1e9:
                # with 128,256 tokens the embedding alone would be most of such a small model
                overrides["vocab_size"] = 32768
        made = [model_of(PRESET, tuple(sorted((overrides | {"num_layers": layers}).items()))) for layers in (1, 2)]
        one, two = (sum(p.numel() for p in model.parameters()) for model in made)
        outside, block = 2 * one - two, two - one
        if not is_preset:
            layers = overrides["num_layers"] = max(1, round((wanted - outside) / block))
        sizes = {"embedding.weight": outside, "blocks": layers * block}
        return Model(PRESET, overrides, summarise(PRESET, replace(stack_of(made[0]), num_layers=layers), sizes, (1,), memory=1))


def facts_of(case: Case, chosen: dict[str, Any]) -> dict[str, Any]:
    machine, hardware, length, base, pattern = case.machine, case.hardware, case.length, chosen["base"], chosen["pattern"]
    chosen = _USUAL | {"layout": "zigzag" if base == "dense" and case.causal else "contiguous"} | chosen
    chosen |= {name: value for name, value in _estimated(case, chosen).items() if chosen.get(name) is None}
    heads, context, is_slides = chosen["heads"], chosen["context"], case.name == "torchscale"
    processes = chosen["data"] * context
    explained = _explained(case, chosen, hardware)
    keys = pattern.pairs(length, heads, is_causal=case.causal) / (length * heads)
    dense = (length + 1) / 2 if case.causal else length
    facts: dict[str, Any] = vars(case) | chosen | {
        "use": case.name, "kind": kind_of(base, context), "cuda": hardware.device_type == "cuda", "device": hardware.device_type,
        "hopper": hardware.capability is not None and hardware.capability[0] == 9 and not hardware.is_rocm, "machine": machine.name,
        "available": readable(machine.memory), "dtype": str(case.dtype).removeprefix("torch."), "pattern": source(pattern),
        "keys_per_query": keys, "dense_keys_per_query": dense, "share": keys / dense, "bytes": chosen["memory"],
        "memory": readable(chosen["memory"] or 0), "processes": processes, "part": -(-length // context),
        # the class token precedes a slide's tiles
        "positions": -(-chosen["count"] * length // context) + is_slides,
        "too_short_to_share": context == 1 and length / processes < TOKENS_PER_GPU and case.batch < processes,
        "forward": explained.forward, "backward": explained.backward, "described": explained.request.describe(),
        "basis": " · ".join(dict.fromkeys(filter(None, (explained.forward_basis, explained.backward_basis)))),
        "extras": ",".join(dict.fromkeys(_EXTRAS[x] for x in (explained.forward, explained.backward) if x in _EXTRAS)),
        "SHORT": SHORT, "LONG": LONG, "TOKENS_PER_GPU": TOKENS_PER_GPU,
    }  # fmt: skip
    if not case.here and facts["cuda"]:
        # of this machine the packages are known; of another one, say what only PyTorch and Triton would take
        plain = _explained(case, chosen, replace(hardware, packages=frozenset({"triton"})))
        if (plain.forward, plain.backward) != (explained.forward, explained.backward):
            facts["plain"] = f"forward {plain.forward}" + (f", backward {plain.backward}" if plain.backward else "")
    if base == "dilated":
        reach, limited = max(pattern.segment_lengths), any(w > FIRST_SEGMENT * r for w, r in pattern.branches)
        pairs = pattern.branch_pairs(length, heads, is_causal=case.causal)
        facts |= branches_of(pattern) | {
            "branches": ", ".join(f"{w}/{r}" for w, r in pattern.branches), "reach": reach, "is_cut": reach < length,
            "each": ", ".join(f"{n / (heads * length):,.0f}" for n in pairs),
            "rates": "above the heads" if max(pattern.dilation_rates) > heads else "limited" if limited else "",
        }  # fmt: skip
    return facts


def _explained(case: Case, chosen: dict[str, Any], hardware: Hardware) -> Explanation:
    pattern, is_sparse = chosen["pattern"], chosen["base"] == "block_sparse"
    if is_sparse:
        rows = max(1, round(pattern.pairs(case.length, 1, is_causal=case.causal) / case.length))
    else:
        rows = max(-(-min(w, case.length) // r) for w, r in pattern.branches)
    return explain_backend(
        hardware=hardware, dtype=case.dtype, head_dim=chosen["head_dim"], num_heads=chosen["heads"], num_kv_heads=chosen["kv_heads"],
        is_causal=case.causal, needs_grad=chosen["training"], length=rows, block_size=128 if is_sparse else None,
        block_masks="bits" if is_sparse else "none",
    )  # fmt: skip


def _estimated(case: Case, chosen: dict[str, Any]) -> dict[str, Any]:
    """Returns memory and time of one layer's attention; nothing for a GPU whose figures are unknown."""
    machine, context, layers = case.machine, chosen["context"], chosen.get("layers")
    if layers is None or (machine.is_cpu and case.hardware.device_type == "cuda"):
        return {}
    plan = plan_attention(
        kind_of(chosen["base"], context), num_positions=case.length, num_heads=chosen["heads"], num_kv_heads=chosen["kv_heads"],
        head_dim=chosen["head_dim"], batch_size=chosen["count"], dtype=case.dtype, world_size=context,
        layout=chosen["layout"] if context > 1 else None, is_causal=case.causal,
        pattern=None if chosen["base"] == "dense" else chosen["pattern"], gpu=machine, find_longest=False,
    )  # fmt: skip
    found = {"memory": plan.peak, "fits": plan.fits}
    if plan.seconds is None:
        return found
    return found | {
        "seconds": seconds_text(plan.seconds), "seconds_of_layers": seconds_text(plan.seconds * layers),
        "bounds": ", ".join(f"{name} by {one.bound}" for name, one in zip(("forward", "backward"), plan.passes, strict=False)),
        "tflops": plan.passes[0].rate / 1e12, "rate_source": plan.passes[0].source,
    }  # fmt: skip


def arguments_of(name: str, arguments: dict[str, Any]) -> str:
    """Returns the source of a call's arguments: a name, and those by keyword."""
    return ", ".join((repr(name), *(f"{key}={source(value)}" for key, value in arguments.items()))).replace("'", '"')


def source(value: Any) -> str:
    return f"GlobalLocal({value.window}, {value.global_tokens})" if isinstance(value, GlobalLocal) else repr(value)


def branches_of(pattern: Any) -> dict[str, Any]:
    return {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
