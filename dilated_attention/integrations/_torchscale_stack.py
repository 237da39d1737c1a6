"""Maps TorchScale's attention, layers and stacks to this library's names, infers their shape from the weights, and refuses others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dilated_attention.files import parse_json
from dilated_attention.integrations._weights import Weights, place
from dilated_attention.models import LongNetConfig
from dilated_attention.models.stack import LongNetStack
from dilated_attention.pattern import DilatedPattern
from dilated_attention.pattern.checks import as_int_tuple

# patterns of names, and why models that contain them are refused
REFUSED = {
    r"\.[AB]\.(.*\.)?(weight|bias)$": (
        "it is a multiway model, with one set of weights for each of two kinds of tokens; such a split does not exist here"
    ),
    r"(^|\.)moe_layer\.": "it has mixture-of-experts layers; only dense feed-forward layers exist here",
    r"(^|\.)encoder_attn": "its decoder attends to an encoder's output; only stacks of self-attention exist here",
    r"relative_(position|attention_bias)": "it adds relative position biases to its scores; attention kernels here take none",
    r"(^|\.)layernorm_embedding\.": "it normalises embeddings (layernorm_embedding); such a norm does not exist here",
    r"(^|\.)embed_positions\.": "it adds learned or sinusoidal positions to token embeddings (embed_positions), which start at 2 "
    "as in fairseq; models here have rotary positions, XPOS or none",
    r"flat_param": "its weights are flattened by FSDP; save a full state dict first",
    r"\.ffn\.gate\.": "its feed-forward layers are gated linear units; those of LongNet are not",
}


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError, with the reason, for models that are not supported."""
    for name in names:
        for pattern, reason in REFUSED.items():
            if re.search(pattern, name):
                raise ValueError(f"{name}: this model cannot be loaded; {reason}")


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Parses a list of integers, or one written as text: ``"[1024,2048]"``. Text is read as JSON, never evaluated."""
    if isinstance(value, str):
        try:
            value = parse_json(value, name)
        except ValueError as error:
            raise ValueError(f"{name} is {value[:200]!r}; expected integers in brackets, such as '[1024, 2048]'") from error
    return as_int_tuple(name, value)


def needed(name: str, value: Any, why: str) -> Any:
    if value is None:
        raise ValueError(f"{name} is not given, and the weights do not determine it: {why}")
    return value


def attention_settings(segment_lengths: Any, dilation_rates: Any, mixture_grad: str) -> dict[str, Any]:
    """Returns TorchScale's semantics of the branches, as settings of a module or fields of a ``LongNetConfig``."""
    where = "give what the model was trained with, TorchScale's args.{}"
    return {
        "segment_lengths": integers("segment_lengths", needed("segment_lengths", segment_lengths, where.format("segment_length"))),
        "dilation_rates": integers("dilation_rates", needed("dilation_rates", dilation_rates, where.format("dilated_ratio"))),
        "head_offsets": "blocked",
        "tail": "zero_keys",
        "mixture_grad": mixture_grad,
    }


def attention_fields(attention: str, segment_lengths: Any, dilation_rates: Any, mixture_grad: str) -> dict[str, Any]:
    """Returns fields of a ``LongNetConfig`` for TorchScale's dilated attention, or for its plain attention."""
    if attention == "dilated":
        return attention_settings(segment_lengths, dilation_rates, mixture_grad)
    if attention != "dense":
        raise ValueError(f"attention is {attention!r}; expected 'dilated' or 'dense'")
    if segment_lengths is not None or dilation_rates is not None:
        raise ValueError("attention is 'dense', which has no segments; leave segment_lengths and dilation_rates out")
    return {"attention": "dense"}


def activation_of(name: str) -> str:
    """Returns this library's name for an ``activation_fn``."""
    known = {"gelu": "gelu", "relu": "relu", "swish": "silu"}
    if name not in known:
        raise ValueError(f"activation is {name!r}; expected one of {', '.join(map(repr, known))}")
    return known[name]


def checked_heads(num_heads: int | None, embed_dim: int) -> int:
    heads = needed("num_heads", num_heads, "give TorchScale's encoder_attention_heads or decoder_attention_heads")
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 or embed_dim % heads:
        raise ValueError(f"num_heads is {heads!r} and the weights have embed_dim {embed_dim}; expected a divisor of it")
    return heads


def take_attention(weights: Weights, name: str, into: str, head_dim: int, *, has_xpos: bool, sub_norm: bool) -> None:
    """Takes one attention layer.

    XPOS rotates neighbouring dimensions in TorchScale, but halves here, so rows of q and k are permuted.
    """
    order = None
    if has_xpos:
        scale = weights.take(f"{name}xpos.scale", "", 1)
        del weights.taken[""]
        expected = (torch.arange(0, head_dim, 2, dtype=torch.float64) + 0.4 * head_dim) / (1.4 * head_dim)
        if scale.shape != expected.shape or not torch.allclose(
            scale.double().cpu(), expected, atol=1e-2 if scale.element_size() < 4 else 1e-6
        ):
            raise ValueError(f"{weights.prefix}{name}xpos.scale is not XPOS's for head_dim {head_dim}; check num_heads")
        embed_dim = weights.peek(f"{name}q_proj.weight", 2).shape[0]
        order = torch.arange(embed_dim).unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten()
    for projection in ("q_proj", "k_proj"):
        weights.take_linear(f"{name}{projection}", f"{into}{projection}", order=order)
    for projection in ("v_proj", "out_proj"):
        weights.take_linear(f"{name}{projection}", f"{into}{projection}")
    if sub_norm:
        weights.take_norm(f"{name}inner_attn_ln", f"{into}inner_attn_ln")


def stack_config(weights: Weights, *, num_heads: int | None, is_causal: bool, is_pre_norm: bool, **fields: Any) -> LongNetConfig:
    """Returns the configuration of the layers in ``weights``: from shapes and names, and ``fields`` for the rest."""
    embed_dim = weights.peek("layers.0.self_attn.q_proj.weight", 2).shape[1]
    heads = checked_heads(num_heads, embed_dim)
    num_layers = 1
    while f"layers.{num_layers}.self_attn.q_proj.weight" in weights:
        num_layers += 1
    norms = {f"layers.0.{name}.weight" in weights for name in ("self_attn.inner_attn_ln", "ffn.ffn_layernorm")}
    if len(norms) > 1:
        raise ValueError("there is only one of the two inner norms (self_attn.inner_attn_ln, ffn.ffn_layernorm); expected both or none")
    has_sub_norm, has_last_norm = norms.pop(), "layer_norm.weight" in weights
    if not (has_sub_norm or has_last_norm or is_pre_norm):
        raise ValueError(
            "there is neither layer_norm nor inner_attn_ln, as in models with norms after each layer (post-norm, deepnorm), "
            "whose residual connections differ; those do not exist here. If norms come first in this model, say is_pre_norm=True"
        )
    if is_causal and not has_last_norm:
        raise ValueError(
            "there is no layer_norm, so this decoder normalises after each layer (post-norm or deepnorm), which does not exist here"
        )
    return LongNetConfig(
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=heads,
        ffn_dim=weights.peek("layers.0.ffn.fc1.weight", 2).shape[0],
        sub_norm=has_sub_norm,
        positions="xpos" if "layers.0.self_attn.xpos.scale" in weights else "none",
        final_norm=has_last_norm,
        is_causal=is_causal,
        **fields,
    )


def take_stack(weights: Weights, config: LongNetConfig, into: str = "") -> None:
    """Takes all layers and the last norm, as the weights of a ``LongNetEncoder`` or ``LongNetDecoder``."""
    for i in range(config.num_layers):
        layer, block = f"layers.{i}.", f"{into}blocks.{i}."
        has_xpos = config.positions == "xpos"
        take_attention(weights, f"{layer}self_attn.", f"{block}attention.", config.head_dim, has_xpos=has_xpos, sub_norm=config.sub_norm)
        weights.take_norm(f"{layer}self_attn_layer_norm", f"{block}attention_norm")
        weights.take_norm(f"{layer}final_layer_norm", f"{block}ffn_norm")
        weights.take_linear(f"{layer}ffn.fc1", f"{block}ffn.up")
        weights.take_linear(f"{layer}ffn.fc2", f"{block}ffn.down")
        if config.sub_norm:
            weights.take_norm(f"{layer}ffn.ffn_layernorm", f"{block}ffn.norm")
    if config.final_norm:
        weights.take_norm("layer_norm", f"{into}norm")


def fill(model: nn.Module, weights: Weights, device: Any, dtype: torch.dtype | None) -> Any:
    """Loads all weights that were taken into ``model``, built on meta, and returns it in eval mode."""
    taken = place(weights.finish(), device, dtype)
    try:
        model.load_state_dict(taken, assign=True)
    except RuntimeError as error:
        raise ValueError(f"these weights do not belong to one model: {error}") from error
    model.requires_grad_()
    # hooks go on a stack, not on each of its layers: layers without hooks need less memory
    watched: list[nn.Module] = [module for module in model.modules() if isinstance(module, LongNetStack)] or [model]
    for module in watched:
        pattern = _pattern_of(module)
        if isinstance(pattern, DilatedPattern) and any(w % r for w, r in pattern.branches):
            module.register_forward_pre_hook(_warn_if_shifted, with_kwargs=True)
    return model.eval()


def _pattern_of(module: Any) -> Any:
    return module.config.pattern if isinstance(module, LongNetStack) else module.attention.pattern


def shifted_branch(pattern: DilatedPattern, num_positions: int) -> tuple[int, int] | None:
    """Returns the first (w, r) for which TorchScale shifts all segments after the first: r does not divide w, and N > w."""
    return next(((w, r) for w, r in pattern.branches if w % r and num_positions > w), None)


def _warn_if_shifted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    x = args[0] if args else kwargs.get("x", kwargs.get("query"))
    bounds = kwargs.get("cu_seqlens")
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        return
    pattern, length = _pattern_of(module), x.shape[1]
    # bounds are only read if the whole batch is long enough
    if bounds is not None and shifted_branch(pattern, length):
        length = int(bounds.diff().max())
    if branch := shifted_branch(pattern, length):
        w, r = branch
        warnings.warn(
            f"{length} positions in segments of {w} with dilation rate {r}, which does not divide {w}: TorchScale's own output is shifted "
            "from the second segment on, an error that is not reproduced here, so these weights give a different result there",
            stacklevel=3,
        )
