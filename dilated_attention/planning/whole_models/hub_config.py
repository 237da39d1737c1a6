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

# decoders of equal blocks with gated feed-forward layers and RMSNorms
_GATED = ("llama", "mistral", "qwen2", "qwen3")
KNOWN = (*_GATED, "gpt2")


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
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a config.json: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected the object of a transformers model's config.json")
    kind = _required(found, "model_type", path)
    if kind not in KNOWN:
        raise ValueError(
            f"{path}: model_type is {kind!r}; expected one of {', '.join(KNOWN)}, whose blocks the planner has. "
            "For another model plan the preset nearest in size, or one attention layer: plan dense --heads … --head-dim …"
        )
    fields = _gpt2(found, path) if kind == "gpt2" else _gated(found, kind, path)
    extra, max_positions = fields.pop("extra"), fields.pop("max_positions", None)
    attention: dict[str, Any] = {"attention": "dense"}
    if pattern is not None:
        given = ("segment_lengths", "dilation_rates", "head_offsets", "tail")
        attention = {"attention": "dilated"} | {name: getattr(pattern, name) for name in given}
    config = LongNetConfig(**fields, **attention, sub_norm=False, scale_embedding=False)
    return HubModel(name=f"{kind} of {path}", config=config, extra_parameters=extra, max_positions=max_positions)


def _gated(found: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    E, H, M, F, V = (
        _size(found, key, path) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    )
    # the first Llamas' files have no such key
    Hk = H if kind == "llama" and found.get("num_key_value_heads") is None else _size(found, "num_key_value_heads", path)
    head_dim = E // H if found.get("head_dim") is None and kind != "qwen3" else _size(found, "head_dim", path)
    if head_dim * H != E:
        raise ValueError(
            f"{path}: head_dim is {head_dim} with {H} heads and hidden_size {E}; the planner's blocks have head_dim = hidden_size / heads, "
            f"which would be {E / H:g}. Plan its attention layer alone: plan dense --heads {H} --kv-heads {Hk} --head-dim {head_dim}"
        )
    biases = 0
    if kind == "qwen2":
        biases += (H + 2 * Hk) * head_dim
    elif found.get("attention_bias"):
        biases += (H + 2 * Hk) * head_dim + E
    if found.get("mlp_bias"):
        biases += 2 * F + E
    return {
        "vocab_size": V, "embed_dim": E, "num_layers": M, "num_heads": H, "num_kv_heads": Hk, "ffn": "swiglu", "ffn_dim": F,
        "norm": "rms_norm", "qk_norm": kind == "qwen3", "bias": False, "tie_embeddings": bool(found.get("tie_word_embeddings", False)),
        "extra": M * biases,
    }  # fmt: skip


def _gpt2(found: dict[str, Any], path: Path) -> dict[str, Any]:
    E, H, M, V, positions = (_size(found, key, path) for key in ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions"))
    inner = 4 * E if found.get("n_inner") is None else _size(found, "n_inner", path)
    return {
        "vocab_size": V, "embed_dim": E, "num_layers": M, "num_heads": H, "ffn_dim": inner, "positions": "none",
        "tie_embeddings": bool(found.get("tie_word_embeddings", True)),
        # the table of positions
        "extra": positions * E, "max_positions": positions,
    }  # fmt: skip


def _required(found: dict[str, Any], key: str, path: Path) -> Any:
    if found.get(key) is None:
        raise ValueError(f"{path} has no {key!r}; expected the config.json of a transformers model, which has one")
    return found[key]


def _size(found: dict[str, Any], key: str, path: Path) -> int:
    value = _required(found, key, path)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {key} is {value!r}; expected a whole number of at least 1")
    return value
