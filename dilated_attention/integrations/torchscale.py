"""Loads weights of TorchScale's LongNet, Prov-GigaPath's slide encoder and LongViT into this package's models, without TorchScale.

``load_torchscale`` takes a file or a state dict and recognises its kind; ``from_torchscale`` takes a module and also reads its settings.
What the weights do not determine (number of heads, segments, dilation rates) must be given; what models here do not support (multiway,
experts, deepnorm …) is refused by name. The models compute what TorchScale computes: offsets in blocks of heads, zero keys where it
pads, segments clamped to the sequence, and by default its gradient, which leaves out the mixture weights; ``mixture_grad="exact"``
trains with the true one. Two of its errors are not reproduced: if r does not divide w and there are several segments, TorchScale
shifts all but the first (a warning is given when a call is affected); and it applies attention dropout in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dilated_attention.integrations._torchscale_images import load_longvit, load_slide_encoder
from dilated_attention.integrations._torchscale_sequence import load_attention, load_decoder, load_encoder
from dilated_attention.integrations._torchscale_stack import check_names
from dilated_attention.integrations._weights import read_weights

__all__ = ["from_torchscale", "load_attention", "load_decoder", "load_encoder", "load_longvit", "load_slide_encoder", "load_torchscale"]

_LOADERS: dict[str, Callable[..., Any]] = {
    "attention": load_attention,
    "encoder": load_encoder,
    "decoder": load_decoder,
    "slide_encoder": load_slide_encoder,
    "longvit": load_longvit,
}


def load_torchscale(source: Any, *, kind: str | None = None, part: str | None = None, **settings: Any) -> Any:
    """Returns a model of this package with TorchScale's weights, in eval mode.

    Args:
        source: path of a file (.safetensors, or written by ``torch.save`` with only tensors in it), state dict, or module. Of a module only
            the weights are read; ``from_torchscale`` also reads its settings.
        kind: ``"attention"`` · ``"encoder"`` · ``"decoder"`` · ``"slide_encoder"`` · ``"longvit"``; None to infer it from the names. An
            encoder and a decoder have the same names, unless they start with ``encoder.`` or ``decoder.``.
        part: key of the weights in a file that contains several, such as ``"teacher"``.
        settings: arguments of ``load_attention``, ``load_encoder``, ``load_decoder``, ``load_slide_encoder`` or ``load_longvit``.

    Returns:
        MultiheadDilatedAttention · LongNetEncoder or, with token embeddings, LongNetLM · LongNetDecoder or LongNetLM · SlideEncoder ·
        LongViT.

    Raises:
        ValueError, TypeError: if weights are missing, left over or refused, settings are missing or do not belong to this kind, or a file
            is damaged or holds more than tensors.

    >>> model = load_torchscale("slide_encoder.pth")             # Prov-GigaPath
    >>> model = load_torchscale("longvit.pth", image_size=4096)  # LongViT
    >>> model = load_torchscale(
    ...     state, kind="encoder", num_heads=12,
    ...     segment_lengths=[2048, 4096], dilation_rates=[1, 2])
    """
    weights = read_weights(source, part)
    if kind is None:
        kind = _kind_of(weights)
    if kind not in _LOADERS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(map(repr, _LOADERS))}")
    return _LOADERS[kind](weights, **settings)


def _kind_of(weights: dict[str, torch.Tensor]) -> str:
    check_names(list(weights))
    if "q_proj.weight" in weights:
        return "attention"
    patches = [value for name, value in weights.items() if name.endswith("patch_embed.proj.weight")]
    if patches:
        return "longvit" if patches[0].ndim == 4 else "slide_encoder"
    first = "layers.0.self_attn.q_proj.weight"
    for kind in ("encoder", "decoder"):
        if f"{kind}.{first}" in weights:
            return kind
    if first in weights:
        raise ValueError(
            "these are the layers of an encoder or of a decoder, which have the same names; say kind='encoder' or kind='decoder'"
        )
    raise ValueError(
        f"these are not weights of TorchScale that are known here: {', '.join(sorted(weights)[:8])}; expected q_proj.weight, {first} or "
        "patch_embed.proj.weight among them"
    )


def from_torchscale(module: nn.Module, **options: Any) -> Any:
    """Converts a module of TorchScale, Prov-GigaPath or LongViT to a model of this package that computes the same, with copied weights.

    Args:
        module: a DilatedAttention, LongNetEncoder, LongNetDecoder, plain Encoder or Decoder, LongNetViT, LongViT or LongViT classifier; or
            one of these wrapped in DDP.
        options: ``mixture_grad``, ``backend``, ``checkpoint_activations``, ``device``, ``dtype``, ``ignore``, see ``load_decoder``.

    Returns:
        See ``load_torchscale``; the model is in eval mode and has the dropout and drop path of the module.

    Raises:
        ValueError, TypeError: if the module is of another kind, or does something that models here do not support.

    >>> model = from_torchscale(LongNetEncoder(args))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a module of TorchScale's: for weights use load_torchscale")
    foreign: Any = module
    while isinstance(getattr(foreign, "module", None), nn.Module):
        foreign = foreign.module
    if hasattr(foreign, "q_proj"):
        settings = _attention_settings(_arguments(foreign), foreign)
        if "attention" in settings:
            raise TypeError(f"module is a {type(foreign).__name__}, which is not dilated; load the encoder or decoder around it")
        return load_attention(foreign, dropout=float(foreign.dropout), **settings, **options)
    backbone = foreign.model if hasattr(foreign, "fc_norm") and isinstance(getattr(foreign, "model", None), nn.Module) else foreign
    stack = backbone.encoder if hasattr(backbone, "patch_embed") else backbone
    if not hasattr(stack, "layers") or not len(stack.layers):
        raise TypeError(
            f"module is a {type(foreign).__name__}; expected TorchScale's attention, encoder or decoder, or a model around them"
        )
    settings = _stack_settings(stack)
    if backbone is stack:
        # only layers of a decoder have the attribute for cross-attention
        load = load_decoder if hasattr(stack.layers[0], "encoder_attn") else load_encoder
        return load(foreign, is_pre_norm=True, **settings, **options)
    for name, default in (("activation", "gelu"), ("scale_embedding", False), ("attention_dropout", 0.0), ("xpos_scale_base", 512.0)):
        if settings.pop(name, default) != default:
            raise ValueError(
                f"{name} of {type(foreign).__name__} is not {default!r}, TorchScale's default, as in every such model that is known here"
            )
    if hasattr(backbone, "cls_token"):
        if settings.pop("attention", "dilated") != "dilated":
            raise ValueError("this slide encoder has no dilated attention; Prov-GigaPath's have")
        for name, theirs in (("tile_size", "tile_size"), ("grid_size", "slide_ngrids"), ("global_pool", "global_pool")):
            settings[name] = getattr(backbone, theirs)
        return load_slide_encoder(foreign, norm_eps=backbone.norm.eps, **settings, **options)
    if settings.pop("dropout"):
        raise ValueError("dropout of this LongViT is not 0, TorchScale's default, as in every LongViT that is known here")
    norm = getattr(foreign, "fc_norm", getattr(foreign, "norm", None))
    return load_longvit(foreign, norm_eps=None if norm is None else norm.eps, **settings, **options)


def _arguments(module: Any) -> Any:
    """Returns the ``args`` of a TorchScale module, checked for what is not supported here."""
    args = getattr(module, "args", None)
    if args is None:
        raise TypeError(f"{type(module).__name__} has no args; expected a module of TorchScale's: for weights use load_torchscale")
    reasons = {
        "multiway": "separate weights for two kinds of tokens",
        "deepnorm": "deepnorm's residual connections",
        "moe_freq": "mixture-of-experts layers",
        "rel_pos_buckets": "relative position biases",
        "layernorm_embedding": "a norm of the embeddings",
        "activation_dropout": "dropout inside the feed-forward layers, for inference set args.activation_dropout = 0",
    }
    for name, reason in reasons.items():
        if getattr(args, name, False):
            raise ValueError(f"args.{name} is {getattr(args, name)!r}; models here do not have it: {reason}")
    return args


def _attention_settings(args: Any, attention: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_heads": attention.num_heads,
        "layer_norm_eps": args.layernorm_eps,
    }
    # TorchScale's args contain it whether or not XPOS is used
    if getattr(attention, "xpos", None) is not None:
        settings["xpos_scale_base"] = float(getattr(args, "xpos_scale_base", 512))
    if hasattr(attention, "gathering"):
        settings |= {"segment_lengths": args.segment_length, "dilation_rates": args.dilated_ratio}
    else:
        settings["attention"] = "dense"
    return settings


def _stack_settings(stack: Any) -> dict[str, Any]:
    args = _arguments(stack)
    layer = stack.layers[0]
    if not getattr(layer, "normalize_before", True):
        raise ValueError("normalize_before is False; models here normalise before each layer, never after it (post-norm)")
    return _attention_settings(args, layer.self_attn) | {
        "activation": str(args.activation_fn),
        "scale_embedding": stack.embed_scale != 1.0,
        "dropout": float(args.dropout),
        "attention_dropout": float(args.attention_dropout),
        "drop_path": float(args.drop_path_rate),
    }
