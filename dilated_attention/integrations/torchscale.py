"""Loads weights of TorchScale's LongNet, Prov-GigaPath's slide encoder and LongViT into this package's models, without TorchScale.

``load_torchscale`` takes a file or a state dict and recognises its kind; ``from_torchscale`` takes a module and also reads its settings.
What the weights do not determine (number of heads, segments, dilation rates) must be given; what models here do not support (multiway,
experts, deepnorm …) is refused by name. The models compute what TorchScale computes: contiguous groups of heads have the same offset,
padding adds zero keys, segments are at most as long as the sequence, and by default its gradient, which leaves out the mixture weights;
``mixture_grad="exact"`` trains with the true one. Two of its errors are not reproduced: if r does not divide w and there are several
segments, TorchScale shifts all but the first (a warning is given when a call is affected); and it applies attention dropout in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dilated_attention.integrations._weights import (
    FIRST_WEIGHT,
    KeyRules,
    attention_fields,
    fill_model,
    read_supported,
    read_weights,
    refuse_unsupported,
    required_setting,
    shape_of,
    short_list,
    stack_config,
)
from dilated_attention.models import LongNetConfig, LongNetDecoder, LongNetEncoder, LongNetLM
from dilated_attention.models.config import TORCHSCALE_ENCODER
from dilated_attention.models.images.slide_config import GIGAPATH_MAX_WSI_SIZE, SlideEncoderConfig, segment_lengths_of
from dilated_attention.models.images.slide_encoder import SlideEncoder
from dilated_attention.models.images.vision import LongViT, VisionConfig, longvit_segment_lengths, resized_positions
from dilated_attention.modules import MultiheadDilatedAttention
from dilated_attention.pattern.checks import one_of

__all__ = ["from_torchscale", "load_attention", "load_decoder", "load_encoder", "load_longvit", "load_slide_encoder", "load_torchscale"]

# ``args`` of TorchScale's modules that are refused if they are set, and what each would need
_REFUSED_ARGS = {
    "multiway": "separate weights for two kinds of tokens",
    "deepnorm": "deepnorm's residual connections",
    "moe_freq": "mixture-of-experts layers",
    "rel_pos_buckets": "relative position biases",
    "layernorm_embedding": "a norm of the embeddings",
    "activation_dropout": "dropout inside the feed-forward layers, for inference set args.activation_dropout = 0",
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
    loaders: dict[str, Any] = {
        "attention": load_attention,
        "encoder": load_encoder,
        "decoder": load_decoder,
        "slide_encoder": load_slide_encoder,
        "longvit": load_longvit,
    }
    weights = read_weights(source, part)
    kind = _kind_of(weights) if kind is None else kind
    one_of("kind", kind, tuple(loaders))
    return loaders[kind](weights, **settings)


def _kind_of(weights: dict[str, torch.Tensor]) -> str:
    """Returns the kind (see ``load_torchscale``) that the names of weights tell, or raises."""
    refuse_unsupported(weights)
    patches = [value.ndim for name, value in weights.items() if name.endswith("patch_embed.proj.weight")]
    if patches:
        return "longvit" if patches[0] == 4 else "slide_encoder"
    for kind, name in (("attention", "q_proj.weight"), ("encoder", f"encoder.{FIRST_WEIGHT}"), ("decoder", f"decoder.{FIRST_WEIGHT}")):
        if name in weights:
            return kind
    if FIRST_WEIGHT in weights:
        raise ValueError(
            "these are the layers of an encoder or of a decoder, which have the same names; say kind='encoder' or kind='decoder'"
        )
    raise ValueError(
        f"these are not weights of TorchScale that are known here: {short_list(weights)}; expected q_proj.weight, {FIRST_WEIGHT} or "
        "patch_embed.proj.weight among them"
    )


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
    """Loads one TorchScale ``DilatedAttention``, whose weights are named ``q_proj.weight``, ``k_proj.weight``, …

    In a decoder, call its forward with ``is_causal=True``.

    Args:
        source: see ``load_torchscale``.
        num_heads: H; TorchScale's ``encoder_attention_heads`` or ``decoder_attention_heads``.
        segment_lengths, dilation_rates: TorchScale's ``segment_length`` and ``dilated_ratio``, as lists or as text.
        xpos_scale_base: the scale base of XPOS, if the weights have XPOS.
        layer_norm_eps: TorchScale's ``layernorm_eps``.
        mixture_grad: ``"detached"``, which is TorchScale's gradient · ``"exact"``.
        dropout: TorchScale's ``attention_dropout``.
        backend: ``"auto"`` or a name of ``list_backends()``.
        device, dtype: those of the parameters; None for those of the weights.
    """
    weights = read_supported(source)
    has_xpos = "xpos.scale" in weights
    if not has_xpos and xpos_scale_base != 512.0:
        raise ValueError(f"xpos_scale_base is {xpos_scale_base} and these weights have no xpos.scale, so no XPOS; leave it out")
    layer = MultiheadDilatedAttention(
        shape_of(weights, "q_proj.weight", 2)[1],
        required_setting("num_heads", num_heads),
        **attention_fields("dilated", segment_lengths, dilation_rates, mixture_grad),
        dropout=dropout,
        layer_norm="inner_attn_ln.weight" in weights,
        layer_norm_eps=layer_norm_eps,
        rotary=has_xpos,
        xpos_scale_base=xpos_scale_base if has_xpos else None,
        backend=backend,
        device="meta",
    )
    return fill_model(layer, weights, (), layer.head_dim, device, dtype)


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
    attention: str = "dilated",
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    mixture_grad: str = "detached",
    activation: str = "gelu",
    scale_embedding: bool = False,
    ignore: Sequence[str] = (),
    device: Any = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> Any:
    weights = read_supported(source, ignore)
    prefix, other = ("decoder.", "encoder.") if is_causal else ("encoder.", "decoder.")
    if prefix + FIRST_WEIGHT not in weights:
        if other + FIRST_WEIGHT in weights:
            raise ValueError(
                f"kind is {prefix[:-1]!r} and the names of these weights start with {other!r}; an encoder sees both sides "
                f"and a decoder only what comes before: use kind={other[:-1]!r}, or remove the prefix if kind is right"
            )
        prefix = ""
    embedding, output = weights.get(f"{prefix}embed_tokens.weight"), weights.get(f"{prefix}output_projection.weight")
    if embedding is None and scale_embedding:
        raise ValueError(
            "scale_embedding is True and the weights have no embed_tokens; multiply your embeddings by sqrt(embed_dim) instead"
        )
    if embedding is not None and output is None:
        raise ValueError(
            "there is embed_tokens.weight and no output_projection.weight, so this model makes no logits; leave the embedding out with "
            "ignore=['embed_tokens'], and feed the layers embeddings"
        )
    is_tied = embedding is not None and output is not None and embedding.shape == output.shape and torch.equal(embedding, output)
    if is_tied:
        del weights[f"{prefix}output_projection.weight"]
    one_of("activation", activation, ("gelu", "relu", "swish"))
    fields = {name: settings.pop(name) for name in ("is_pre_norm", *LongNetConfig.__dataclass_fields__) if name in settings}
    config = stack_config(
        weights,
        prefix,
        is_causal=is_causal,
        vocab_size=None if embedding is None else embedding.shape[0],
        tie_embeddings=is_tied or embedding is None,
        scale_embedding=scale_embedding,
        **attention_fields(attention, segment_lengths, dilation_rates, mixture_grad),
        ffn="silu" if activation == "swish" else activation,
        **fields,
    )
    rules: KeyRules = (
        (r"^(decoder\.)?norm\.", f"{prefix}layer_norm."),
        (r"^(decoder\.)?blocks\.", f"{prefix}blocks."),
        (r"^embedding\.", f"{prefix}embed_tokens."),
        (r"^output\.", f"{prefix}output_projection."),
    )
    model: Any = LongNetLM if embedding is not None else LongNetDecoder if is_causal else LongNetEncoder
    return fill_model(model(config, device="meta", **settings), weights, rules, config.head_dim, device, dtype)


def load_slide_encoder(
    source: Any,
    *,
    num_heads: int = 16,
    max_wsi_size: int = GIGAPATH_MAX_WSI_SIZE,
    tile_size: int = 256,
    segment_lengths: Any = None,
    dilation_rates: Any = TORCHSCALE_ENCODER["dilation_rates"],
    grid_size: int = 1000,
    global_pool: bool = False,
    num_classes: int | None = None,
    norm_eps: float = 1e-6,
    layer_norm_eps: float = 1e-5,
    mixture_grad: str = "detached",
    dropout: float = 0.0,
    drop_path: float = 0.0,
    ignore: Sequence[str] = (),
    device: Any = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> SlideEncoder:
    """Loads Prov-GigaPath's slide encoder, ``slide_encoder.pth``: the released one (768 × 12 layers) and others of its family.

    Args:
        source: see ``load_torchscale``.
        num_heads: number of heads; 16 in all released models.
        max_wsi_size, tile_size: Prov-GigaPath's arguments, which determine the segments; 262144 and 256 by default.
        segment_lengths: the segment lengths themselves; None for ``segment_lengths_of(max_wsi_size, tile_size)``.
        dilation_rates: 1, 2, 4, 8, 16 in all released models.
        grid_size: Prov-GigaPath's ``slide_ngrids``.
        global_pool: use the mean of the tiles instead of the class token.
        num_classes: to start fine-tuning, a new head of this many classes.
        norm_eps, layer_norm_eps: ε of the last norm, and of the layers' norms.
        mixture_grad: see ``load_attention``.
        dropout, drop_path: for further training; Prov-GigaPath uses 0.25 and 0.1.
        ignore: prefixes of the names of weights to leave out.
        device, dtype: see ``load_attention``.
        options: ``backend``, ``checkpoint_activations``; for slides shared by processes ``group``, ``mesh`` …: see ``SlideEncoder``.
    """
    # names start so if the encoder was fine-tuned by Prov-GigaPath's code, in which a ClassificationHead holds it
    weights = {name.removeprefix("slide_encoder."): value for name, value in read_supported(source, ignore).items()}
    lengths = segment_lengths_of(max_wsi_size, tile_size) if segment_lengths is None else segment_lengths
    encoder = stack_config(
        weights,
        "encoder.",
        num_heads=num_heads,
        is_causal=False,
        is_pre_norm=True,
        **attention_fields("dilated", lengths, dilation_rates, mixture_grad),
        layer_norm_eps=layer_norm_eps,
        dropout=dropout,
        drop_path=drop_path,
    )
    config = SlideEncoderConfig(
        encoder=encoder,
        in_dim=shape_of(weights, "patch_embed.proj.weight", 2)[1],
        grid_size=grid_size,
        tile_size=tile_size,
        global_pool=global_pool,
        norm_eps=norm_eps,
        num_classes=num_classes,
    )
    rules: KeyRules = (
        (r"^encoder\.norm\.", "encoder.layer_norm."),
        (r"^tile_embedding\.", "patch_embed.proj."),
        (r"^class_token$", "cls_token"),
    )
    token = weights.get("cls_token")
    if token is not None and token.shape[:-1] == (1, 1):
        weights["cls_token"] = token[0, 0]
    model = SlideEncoder(config, device="meta", **options)
    fresh = {} if num_classes is None else _head(num_classes, encoder.embed_dim)
    return fill_model(model, weights, rules, encoder.head_dim, device, dtype, fresh)


def load_longvit(
    source: Any,
    *,
    image_size: int | None = None,
    num_classes: int | None = None,
    num_heads: int = 16,
    segment_lengths: Any = None,
    dilation_rates: Any = TORCHSCALE_ENCODER["dilation_rates"],
    attention: str = "dilated",
    layer_norm_eps: float = 1e-5,
    mixture_grad: str = "detached",
    norm_eps: float | None = None,
    drop_path: float = 0.0,
    ignore: Sequence[str] = (),
    device: Any = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> LongViT:
    """Loads LongViT: its backbone, its classifiers (single-process or sequence-parallel, with the same names), or its DINO pretraining.

    The pooling follows from the file. With ``model.…``, ``fc_norm`` and ``head`` it is a classifier: norm of the mean. With ``backbone.…``
    and a norm it is the pretraining: mean of the norms; its projection head (``head.mlp``, ``head.last_layer``) is left out. A bare
    backbone returns patches.

    Args:
        source: see ``load_torchscale``.
        image_size: side in pixels of the images to run on; None for that of the stored positions. Another size resizes the positions as
            LongViT's fine-tuning does, but without rounding them to float16, and uses the segments of that size.
        num_classes: to start fine-tuning, a new norm and a new head of this many classes instead of the file's.
        num_heads: number of heads; 16 in LongViT-small.
        segment_lengths: None for ``longvit_segment_lengths(image_size)``.
        dilation_rates: 1, 2, 4, 8, 16 in LongViT.
        attention: ``"dilated"`` · ``"dense"``, which is LongViT's ``flash_attention=False``, without segments and rates.
        norm_eps: ε of the norm at the pooling; None for LongViT's, 1e-5 in a classifier and 1e-6 in the pretraining.
        layer_norm_eps, mixture_grad, drop_path, ignore, device, dtype, options: see ``load_slide_encoder``.
    """
    weights = read_supported(source, ignore)
    # the backbone's names start with ``outer``
    outer = next((p for p in ("model.", "backbone.") if f"{p}pos_embed" in weights), "")
    _, channels, patch, _ = shape_of(weights, f"{outer}patch_embed.proj.weight", 4)
    if image_size is None:
        image_size = int(shape_of(weights, f"{outer}pos_embed", 3)[1] ** 0.5 + 0.5) * patch
    if image_size % patch:
        raise ValueError(f"image_size is {image_size}; expected a multiple of the patches' side, {patch}")
    if attention == "dense":
        dilation_rates = None
    elif segment_lengths is None:
        segment_lengths = longvit_segment_lengths(image_size)
    encoder = stack_config(
        weights,
        f"{outer}encoder.",
        num_heads=num_heads,
        is_causal=False,
        is_pre_norm=True,
        **attention_fields(attention, segment_lengths, dilation_rates, mixture_grad),
        layer_norm_eps=layer_norm_eps,
        drop_path=drop_path,
    )
    # names of the norm and the head start with ``around``: in a classifier they are outside its backbone, in the pretraining inside
    around = "" if outer == "model." else outer
    norm = next((name for name in ("fc_norm", "norm") if f"{around}{name}.weight" in weights), None)
    pooling = {None: "none", "norm": "norm_mean", "fc_norm": "mean_norm"}[norm]
    # values of new parameters, which replace the file's
    fresh: dict[str, torch.Tensor] = {}
    if num_classes is not None:
        fresh = {"norm.weight": torch.ones(encoder.embed_dim), "norm.bias": torch.zeros(encoder.embed_dim)}
        fresh |= _head(num_classes, encoder.embed_dim)
        pooling = "mean_norm"
    elif norm == "fc_norm" and f"{around}head.weight" in weights:
        num_classes = weights[f"{around}head.weight"].shape[0]
    if norm_eps is None:
        norm_eps = 1e-6 if pooling == "norm_mean" else 1e-5
    unused = [f"{around}{name}." for name in ("fc_norm", "norm", "head") if fresh]
    unused += ["head.mlp.", "head.last_layer."] if outer == "backbone." else []
    weights = {name: value for name, value in weights.items() if not name.startswith(tuple(unused))}
    config = VisionConfig(
        encoder=encoder, image_size=image_size, patch_size=patch, in_channels=channels, pooling=pooling, num_classes=num_classes,
        norm_eps=norm_eps,
    )  # fmt: skip
    rules: KeyRules = (
        (r"^encoder\.norm\.", "encoder.layer_norm."),
        (r"^encoder\.", f"{outer}encoder."),
        (r"^patch_embedding\.", f"{outer}patch_embed.proj."),
        (r"^positions$", f"{outer}pos_embed"),
        (r"^norm\.", f"{around}{norm}."),
        (r"^head\.", f"{around}head."),
    )
    positions = weights.get(f"{outer}pos_embed")
    if positions is not None:
        weights[f"{outer}pos_embed"] = resized_positions(positions, config.grid)
    return fill_model(LongViT(config, device="meta", **options), weights, rules, encoder.head_dim, device, dtype, fresh)


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
    # what DDP and other wrappers hold
    while isinstance(getattr(foreign, "module", None), nn.Module):
        foreign = foreign.module
    kind = type(foreign).__name__
    if hasattr(foreign, "q_proj"):
        settings = _settings_of(foreign, foreign)
        if "attention" in settings:
            raise TypeError(f"module is a {kind}, which is not dilated; load the encoder or decoder around it")
        return load_attention(foreign, dropout=float(foreign.dropout), **settings, **options)
    backbone = foreign.model if hasattr(foreign, "fc_norm") and isinstance(getattr(foreign, "model", None), nn.Module) else foreign
    stack = backbone.encoder if hasattr(backbone, "patch_embed") else backbone
    if not hasattr(stack, "layers") or not len(stack.layers):
        raise TypeError(f"module is a {kind}; expected TorchScale's attention, encoder or decoder, or a model around them")
    if not getattr(stack.layers[0], "normalize_before", True):
        raise ValueError("normalize_before is False; models here normalise before each layer, never after it (post-norm)")
    settings = _settings_of(stack, stack.layers[0].self_attn)
    settings |= {name: float(getattr(stack.args, name)) for name in ("dropout", "attention_dropout")}
    settings |= {"drop_path": float(stack.args.drop_path_rate), "activation": str(stack.args.activation_fn)}
    settings["scale_embedding"] = stack.embed_scale != 1.0
    if backbone is stack:
        # only layers of a decoder have the attribute for cross-attention
        load = load_decoder if hasattr(stack.layers[0], "encoder_attn") else load_encoder
        return load(foreign, is_pre_norm=True, **settings, **options)
    # settings that the loaders of these two models do not take, and the only value of each that they support
    fixed: dict[str, Any] = {"activation": "gelu", "scale_embedding": False, "attention_dropout": 0.0, "xpos_scale_base": 512.0}
    is_slide_encoder = hasattr(backbone, "cls_token")
    fixed |= {"attention": "dilated"} if is_slide_encoder else {"dropout": 0.0}
    for name, value in fixed.items():
        if settings.pop(name, value) != value:
            raise ValueError(f"{name} of {kind} is not {value!r}, TorchScale's default, as in every such model that is known here")
    if is_slide_encoder:
        for name, theirs in (("tile_size", "tile_size"), ("grid_size", "slide_ngrids"), ("global_pool", "global_pool")):
            settings[name] = getattr(backbone, theirs)
        return load_slide_encoder(foreign, norm_eps=backbone.norm.eps, **settings, **options)
    norm = getattr(foreign, "fc_norm", getattr(foreign, "norm", None))
    return load_longvit(foreign, norm_eps=None if norm is None else norm.eps, **settings, **options)


def _settings_of(module: Any, attention: Any) -> dict[str, Any]:
    """Returns the settings of a TorchScale module's attention, by the names of ``load_attention``; raises if one is not supported."""
    args = getattr(module, "args", None)
    if args is None:
        raise TypeError(f"{type(module).__name__} has no args; expected a module of TorchScale's: for weights use load_torchscale")
    for name, reason in _REFUSED_ARGS.items():
        if getattr(args, name, False):
            raise ValueError(f"args.{name} is {getattr(args, name)!r}; models here do not have it: {reason}")
    settings: dict[str, Any] = {"num_heads": attention.num_heads, "layer_norm_eps": args.layernorm_eps}
    # TorchScale's args contain it whether or not XPOS is used
    if getattr(attention, "xpos", None) is not None:
        settings["xpos_scale_base"] = float(getattr(args, "xpos_scale_base", 512))
    # TorchScale's DilatedAttention has this method, its dense attention does not
    if hasattr(attention, "gathering"):
        return settings | {"segment_lengths": args.segment_length, "dilation_rates": args.dilated_ratio}
    return settings | {"attention": "dense"}


def _head(num_classes: int, width: int) -> dict[str, torch.Tensor]:
    """Returns the weights of a new head, initialised as in the models."""
    return {"head.weight": nn.init.trunc_normal_(torch.empty(num_classes, width), std=0.02), "head.bias": torch.zeros(num_classes)}
