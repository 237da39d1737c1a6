"""Shapes of transformers models from their ``config.json``, read as JSON, without transformers.

A shape is a ``LongNetConfig`` whose blocks have the model's widths, and the parameters that these blocks do not have: biases of single
layers, a table of positions. Activations and FLOPs are those of the blocks; the number of parameters is the model's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention.models import LongNetConfig
from dilated_attention.pattern import DilatedPattern

# decoders of equal blocks with gated feed-forward layers and RMSNorms; and GPT-2
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of a ``config.json``; ``plan_model`` takes it instead of a preset's name.

    Args:
        name: the model's type and where it was read from.
        config: its blocks.
        extra_parameters: number of parameters that the model has in addition.
        max_positions: length of its table of positions; None if it has none.
    """

    name: str
    config: LongNetConfig
    extra_parameters: int
    max_positions: int | None = None


def read_hub_config(path: str | Path, pattern: DilatedPattern | None = None) -> HubModel:
    """Reads a ``config.json`` of transformers.

    Args:
        path: the file.
        pattern: of its attention in the plan; None for dense attention over all positions, also where the model has sliding windows.

    Raises:
        ValueError: the file is not such a config, lacks a key, or describes a model that the planner has no blocks for.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a config.json: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected the object of a transformers model's config.json")

    def required(key: str) -> Any:
        if found.get(key) is None:
            raise ValueError(f"{path} has no {key!r}; expected the config.json of a transformers model, which has one")
        return found[key]

    def size(key: str, usual: int | None = None) -> int:
        value = usual if usual is not None and found.get(key) is None else required(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: {key} is {value!r}; expected a whole number of at least 1")
        return value

    kind = required("model_type")
    if kind not in KNOWN:
        raise ValueError(
            f"{path}: model_type is {kind!r}; expected one of {', '.join(KNOWN)}, whose blocks the planner has. "
            "For another model plan the preset nearest in size, or one attention layer: plan dense --heads … --head-dim …"
        )
    fields: dict[str, Any] = {"attention": "dense", "sub_norm": False, "scale_embedding": False, "vocab_size": size("vocab_size")}
    if pattern is not None:
        fields["attention"] = "dilated"
        fields |= {name: getattr(pattern, name) for name in ("segment_lengths", "dilation_rates", "head_offsets", "tail")}
    if kind == "gpt2":
        E, positions = size("n_embd"), size("n_positions")
        config = LongNetConfig(
            embed_dim=E, num_layers=size("n_layer"), num_heads=size("n_head"), ffn_dim=size("n_inner", 4 * E), positions="none",
            tie_embeddings=bool(found.get("tie_word_embeddings", True)), **fields,
        )  # fmt: skip
        return HubModel(name=f"gpt2 of {path}", config=config, extra_parameters=positions * E, max_positions=positions)
    E, H, M, F = (size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"))
    # the first Llamas' files have no such key
    Hk = size("num_key_value_heads", H if kind == "llama" else None)
    head_dim = size("head_dim", E // H if kind != "qwen3" else None)
    if head_dim * H != E:
        raise ValueError(
            f"{path}: head_dim is {head_dim} with {H} heads and hidden_size {E}; the planner's blocks have head_dim = hidden_size / heads, "
            f"which would be {E / H:g}. Plan its attention layer alone: plan dense --heads {H} --kv-heads {Hk} --head-dim {head_dim}"
        )
    of_keys = (H + 2 * Hk) * head_dim
    biases = of_keys if kind == "qwen2" else of_keys + E if found.get("attention_bias") else 0
    biases += 2 * F + E if found.get("mlp_bias") else 0
    config = LongNetConfig(
        embed_dim=E, num_layers=M, num_heads=H, num_kv_heads=Hk, ffn="swiglu", ffn_dim=F, norm="rms_norm", qk_norm=kind == "qwen3",
        bias=False, tie_embeddings=bool(found.get("tie_word_embeddings", False)), **fields,
    )  # fmt: skip
    return HubModel(name=f"{kind} of {path}", config=config, extra_parameters=M * biases)
