"""Loads Prov-GigaPath's slide encoder and LongViT from their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilated_attention.integrations._torchscale_stack import (
    attention_fields,
    attention_settings,
    check_names,
    fill,
    stack_config,
    take_stack,
)
from dilated_attention.integrations._weights import Weights, read_weights, without
from dilated_attention.models.config import TORCHSCALE_ENCODER
from dilated_attention.models.images.positions import grid_positions
from dilated_attention.models.images.slide_config import GIGAPATH_MAX_WSI_SIZE, SlideEncoderConfig, segment_lengths_of
from dilated_attention.models.images.slide_encoder import SlideEncoder
from dilated_attention.models.images.vision import LongViT, VisionConfig, longvit_segment_lengths, resized_positions


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
    names = without(read_weights(source), ignore)
    check_names(list(names))
    weights = Weights(names, "encoder.")
    lengths = segment_lengths_of(max_wsi_size, tile_size) if segment_lengths is None else segment_lengths
    encoder = stack_config(
        weights,
        num_heads=num_heads,
        is_causal=False,
        is_pre_norm=True,
        **attention_settings(lengths, dilation_rates, mixture_grad),
        layer_norm_eps=layer_norm_eps,
        dropout=dropout,
        drop_path=drop_path,
    )
    take_stack(weights, encoder, "encoder.")
    weights.prefix = ""
    in_dim = weights.peek("patch_embed.proj.weight", 2).shape[1]
    weights.take_linear("patch_embed.proj", "tile_embedding")
    token = weights.take("cls_token", "class_token", 3)
    if token.shape != (1, 1, encoder.embed_dim):
        raise ValueError(f"cls_token has shape {tuple(token.shape)}; expected (1, 1, {encoder.embed_dim})")
    weights.taken["class_token"] = token.flatten()
    weights.take_norm("norm", "norm")
    if num_classes is not None:
        _add_head(weights, num_classes, encoder.embed_dim)
    config = SlideEncoderConfig(
        encoder=encoder,
        in_dim=in_dim,
        grid_size=grid_size,
        tile_size=tile_size,
        global_pool=global_pool,
        norm_eps=norm_eps,
        num_classes=num_classes,
    )
    if "pos_embed" in weights:
        _check_table(weights.take("pos_embed", "pos_embed", 3), config)
        del weights.taken["pos_embed"]
    return fill(SlideEncoder(config, device="meta", **options), weights, device, dtype)


def _check_table(table: torch.Tensor, config: SlideEncoderConfig) -> None:
    """Raises ValueError if a stored position table is not the one computed here; checks its corners, middle and some rows between."""
    side, width = config.grid_size, config.encoder.embed_dim
    if tuple(table.shape) != (1, side * side + 1, width):
        raise ValueError(
            f"pos_embed has shape {tuple(table.shape)}; "
            f"expected (1, grid_size² + 1, embed_dim) = {(1, side * side + 1, width)}: set grid_size"
        )
    cells = torch.tensor([(x, y) for x in range(0, side, max(1, side // 8)) for y in (0, side // 3, side // 2, side - 1)])
    rows = grid_positions(cells, width, tile_size=1, grid_size=side)
    stored = table[0, 1 + cells[:, 0] * side + cells[:, 1]].float().cpu()
    if table[0, 0].any() or not torch.allclose(stored, rows, atol=1e-2 if table.element_size() < 4 else 1e-5):
        raise ValueError("pos_embed is not the fixed sine-cosine table of Prov-GigaPath; positions of slides are never learned here")


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
    names = without(read_weights(source), ignore)
    check_names(list(names))
    outer = next((p for p in ("model.", "backbone.") if f"{p}pos_embed" in names), "")
    weights = Weights(names, outer)
    patch = weights.peek("patch_embed.proj.weight", 4)
    positions = weights.peek("pos_embed", 3)
    stored_size = int(positions.shape[1] ** 0.5 + 0.5) * patch.shape[2]
    image_size = stored_size if image_size is None else image_size
    if image_size % patch.shape[2]:
        raise ValueError(f"image_size is {image_size}; expected a multiple of the patches' side, {patch.shape[2]}")
    if attention == "dilated" and segment_lengths is None:
        segment_lengths = longvit_segment_lengths(image_size)
    weights.prefix = f"{outer}encoder."
    encoder = stack_config(
        weights,
        num_heads=num_heads,
        is_causal=False,
        is_pre_norm=True,
        **attention_fields(attention, segment_lengths, None if attention == "dense" else dilation_rates, mixture_grad),
        layer_norm_eps=layer_norm_eps,
        drop_path=drop_path,
    )
    take_stack(weights, encoder, "encoder.")
    weights.prefix = outer
    for kind, ndim in (("weight", 4), ("bias", 1)):
        weights.take(f"patch_embed.proj.{kind}", f"patch_embedding.{kind}", ndim)
    weights.taken["positions"] = resized_positions(weights.take("pos_embed", "positions", 3), image_size // patch.shape[2])
    if outer == "backbone.":
        weights.drop(name for name in names if name.startswith(("head.mlp.", "head.last_layer.")))
    pooling = _take_pooling(weights, outer, num_classes, encoder.embed_dim)
    if norm_eps is not None:
        pooling["norm_eps"] = norm_eps
    config = VisionConfig(encoder=encoder, image_size=image_size, patch_size=patch.shape[2], in_channels=patch.shape[1], **pooling)
    return fill(LongViT(config, device="meta", **options), weights, device, dtype)


def _take_pooling(weights: Weights, outer: str, num_classes: int | None, width: int) -> dict[str, Any]:
    """Takes the norm and the head from the file, or makes new ones, and returns the corresponding fields of ``VisionConfig``."""
    # the norm and head of a classifier are outside its backbone, those of the pretraining inside
    weights.prefix = "" if outer == "model." else outer
    norm = next((name for name in ("fc_norm", "norm") if f"{name}.weight" in weights), None)
    if num_classes is not None:
        weights.drop(f"{weights.prefix}{name}.{kind}" for name in ("fc_norm", "norm", "head") for kind in ("weight", "bias"))
        like = weights.taken["encoder.blocks.0.ffn_norm.weight"]
        weights.taken["norm.weight"], weights.taken["norm.bias"] = torch.ones_like(like), torch.zeros_like(like)
        _add_head(weights, num_classes, width)
        return {"pooling": "mean_norm", "num_classes": num_classes}
    if norm is None:
        return {"pooling": "none"}
    weights.take_norm(norm, "norm")
    if norm == "norm":
        return {"pooling": "norm_mean", "norm_eps": 1e-6}
    if "head.weight" not in weights:
        return {"pooling": "mean_norm"}
    weights.take_linear("head", "head")
    return {"pooling": "mean_norm", "num_classes": weights.taken["head.weight"].shape[0]}


def _add_head(weights: Weights, num_classes: int, width: int) -> None:
    """Adds a new head, as the models initialise theirs."""
    like = weights.taken["norm.weight"]
    head = torch.nn.init.trunc_normal_(like.new_empty(num_classes, width, dtype=torch.float32), std=0.02)
    weights.taken["head.weight"], weights.taken["head.bias"] = head.to(like.dtype), like.new_zeros(num_classes)
