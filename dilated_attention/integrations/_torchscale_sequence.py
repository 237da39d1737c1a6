"""Loads TorchScale's attention, encoder and decoder from their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.integrations._torchscale_stack import (
    activation_of,
    attention_fields,
    attention_settings,
    check_names,
    checked_heads,
    fill,
    stack_config,
    take_attention,
    take_stack,
)
from dilated_attention.integrations._weights import Weights, read_weights, without
from dilated_attention.models import LongNetDecoder, LongNetEncoder, LongNetLM
from dilated_attention.modules import MultiheadDilatedAttention

_Q = "layers.0.self_attn.q_proj.weight"


def load_attention(
    source: Any,
    *,
    num_heads: int | None = None,
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    xpos_scale_base: float = 512.0,
    layer_norm_eps: float = 1e-5,
    mixture_grad: str = "detached",
    dropout: float = 0.0,
    backend: str = "auto",
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> MultiheadDilatedAttention:
    """Loads one TorchScale ``DilatedAttention`` from weights named ``q_proj.weight`` …

    In a decoder, call its forward with ``is_causal=True``.

    Args:
        source: see ``load_torchscale``.
        num_heads: H; TorchScale's ``encoder_attention_heads`` or ``decoder_attention_heads``.
        segment_lengths, dilation_rates: TorchScale's ``segment_length`` and ``dilated_ratio``, as lists or as text.
        xpos_scale_base: XPOS's scale base, if the weights have XPOS.
        layer_norm_eps: TorchScale's ``layernorm_eps``.
        mixture_grad: ``"detached"``, which is TorchScale's gradient · ``"exact"``.
        dropout: TorchScale's ``attention_dropout``.
        backend: ``"auto"`` or a name of ``list_backends()``.
        device, dtype: those of the parameters; None for those of the weights.
    """
    names = read_weights(source)
    check_names(list(names))
    weights = Weights(names)
    embed_dim = weights.peek("q_proj.weight", 2).shape[1]
    has_xpos, sub_norm = "xpos.scale" in weights, "inner_attn_ln.weight" in weights
    if not has_xpos and xpos_scale_base != 512.0:
        raise ValueError(f"xpos_scale_base is {xpos_scale_base} and these weights have no xpos.scale, so no XPOS; leave it out")
    layer = MultiheadDilatedAttention(
        embed_dim,
        checked_heads(num_heads, embed_dim),
        **attention_settings(segment_lengths, dilation_rates, mixture_grad),
        dropout=dropout,
        layer_norm=sub_norm,
        layer_norm_eps=layer_norm_eps,
        rotary=has_xpos,
        xpos_scale_base=xpos_scale_base if has_xpos else None,
        backend=backend,
        device="meta",
    )
    take_attention(weights, "", "", layer.head_dim, has_xpos=has_xpos, sub_norm=sub_norm)
    return fill(layer, weights, device, dtype)


def load_encoder(source: Any, **settings: Any) -> LongNetEncoder | LongNetLM:
    """Loads TorchScale's ``LongNetEncoder``; with token embeddings, a LongNetLM with ``is_causal=False``.

    Args:
        source: see ``load_torchscale``; names may start with ``encoder.``.
        settings: see ``load_decoder``.
    """
    return _load_stack(source, is_causal=False, **settings)


def load_decoder(source: Any, **settings: Any) -> LongNetDecoder | LongNetLM:
    """Loads TorchScale's ``LongNetDecoder``; with token embeddings, a LongNetLM.

    Args:
        source: see ``load_torchscale``; names may start with ``decoder.``.
        num_heads, segment_lengths, dilation_rates, xpos_scale_base, layer_norm_eps, mixture_grad: see ``load_attention``.
        attention: ``"dilated"`` · ``"dense"``, for TorchScale's plain ``Encoder`` and ``Decoder``, without segments and rates.
        activation: TorchScale's ``activation_fn``: ``"gelu"`` · ``"relu"`` · ``"swish"``.
        scale_embedding: multiply embeddings by sqrt(E), which is TorchScale's ``no_scale_embedding=False``. Its own default is not to.
        is_pre_norm: norms come before each layer; needed if the weights do not determine this.
        dropout, attention_dropout, drop_path: for further training; drop_path is TorchScale's ``drop_path_rate``.
        ignore: prefixes of the names of weights to leave out.
        backend, checkpoint_activations: see ``LongNetDecoder``.
        device, dtype: see ``load_attention``.
    """
    return _load_stack(source, is_causal=True, **settings)


def _load_stack(
    source: Any,
    *,
    is_causal: bool,
    num_heads: int | None = None,
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    attention: str = "dilated",
    activation: str = "gelu",
    xpos_scale_base: float = 512.0,
    layer_norm_eps: float = 1e-5,
    mixture_grad: str = "detached",
    scale_embedding: bool = False,
    is_pre_norm: bool = False,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    drop_path: float = 0.0,
    ignore: Sequence[str] = (),
    device: Any = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    names = without(read_weights(source), ignore)
    check_names(list(names))
    prefix, other = ("decoder.", "encoder.") if is_causal else ("encoder.", "decoder.")
    if prefix + _Q not in names:
        if other + _Q in names:
            raise ValueError(
                f"kind is {prefix[:-1]!r} and the names of these weights start with {other!r}; an encoder sees both sides "
                f"and a decoder only what comes before: use kind={other[:-1]!r}, or remove the prefix if kind is right"
            )
        prefix = ""
    weights = Weights(names, prefix)
    vocabulary = weights.peek("embed_tokens.weight", 2).shape[0] if "embed_tokens.weight" in weights else None
    is_tied = False
    if vocabulary is None and scale_embedding:
        raise ValueError(
            "scale_embedding is True and the weights have no embed_tokens; multiply your embeddings by sqrt(embed_dim) instead"
        )
    if vocabulary is not None:
        if "output_projection.weight" not in weights:
            raise ValueError(
                "there is embed_tokens.weight and no output_projection.weight, so this model makes no logits; leave the embedding out with "
                "ignore=['embed_tokens'], and feed the layers embeddings"
            )
        embedding = weights.take("embed_tokens.weight", "embedding.weight", 2)
        output = weights.take("output_projection.weight", "output.weight", 2)
        if is_tied := embedding.shape == output.shape and torch.equal(embedding, output):
            del weights.taken["output.weight"]
    config = stack_config(
        weights,
        num_heads=num_heads,
        is_causal=is_causal,
        is_pre_norm=is_pre_norm,
        vocab_size=vocabulary,
        tie_embeddings=is_tied or vocabulary is None,
        scale_embedding=scale_embedding,
        xpos_scale_base=xpos_scale_base,
        layer_norm_eps=layer_norm_eps,
        dropout=dropout,
        attention_dropout=attention_dropout,
        drop_path=drop_path,
        **attention_fields(attention, segment_lengths, dilation_rates, mixture_grad),
        ffn=activation_of(activation),
    )
    take_stack(weights, config, "" if vocabulary is None else "decoder.")
    model: Any = LongNetLM if vocabulary is not None else LongNetDecoder if is_causal else LongNetEncoder
    return fill(model(config, device="meta", **options), weights, device, dtype)
