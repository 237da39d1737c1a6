"""Stands in for ``gigapath.slide_encoder`` of Prov-GigaPath: a pipeline that makes and calls its slide encoder changes one import and needs
neither flash-attn nor timm.

    from dilated_attention.integrations import gigapath as slide_encoder

    model = slide_encoder.create_model("slide_encoder.pth", "gigapath_slide_enc12l768d", 1536, global_pool=True)
    (slide,) = model(tiles, coords)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dilated_attention.integrations._weights import read_weights
from dilated_attention.integrations.torchscale import load_slide_encoder
from dilated_attention.models.config import as_size
from dilated_attention.models.images.slide_config import GIGAPATH_MAX_WSI_SIZE, SlideEncoderConfig
from dilated_attention.models.images.slide_encoder import SlideEncoder
from dilated_attention.pattern.checks import one_of
from dilated_attention.validation import check_bool, check_probability

__all__ = ["LongNetViT", "create_model"]

# widths and layers by the names under which Prov-GigaPath registers its models
_ARCHITECTURES = {
    "gigapath_slide_enc12l768d": (768, 12),
    "gigapath_slide_enc24l1024d": (1024, 24),
    "gigapath_slide_enc12l1536d": (1536, 12),
}


class LongNetViT(SlideEncoder):
    """A ``SlideEncoder`` that is called, and answers, as Prov-GigaPath's: with a list of vectors.

    Differs from the original: its parameters have this package's names (``load_state_dict`` takes no file of the original's:
    ``create_model`` does), tiles outside the grid and coordinates that do not fit are refused, and positions need no table.
    """

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, coords: torch.Tensor, all_layer_embed: bool = False, **options: Any
    ) -> list[torch.Tensor]:
        """Computes the slides' vectors.

        Args:
            x: (B, L, in_chans), tile embeddings.
            coords: (B, L, 2), each tile's x and y in pixels at level 0.
            all_layer_embed: return the vectors of the blocks' input and of each block's output, without the encoder's last norm.
            options: further arguments of ``SlideEncoder.forward``, such as ``cu_seqlens``.

        Returns:
            [(B, E)], or with ``all_layer_embed`` one such tensor for the input and one for each block.
        """
        if check_bool("all_layer_embed", all_layer_embed):
            return list(super().forward(x, coords, all_layers=True, **options))
        return [super().forward(x, coords, **options)]


def create_model(
    pretrained: str | Path,
    model_arch: str,
    in_chans: int,
    local_dir: str | Path | None = None,
    *,
    slide_ngrids: int = 1000,
    tile_size: int = 256,
    max_wsi_size: int = GIGAPATH_MAX_WSI_SIZE,
    global_pool: bool = False,
    dropout: float = 0.25,
    drop_path_rate: float = 0.1,
    ignore: Sequence[str] = (),
) -> LongNetViT:
    """Makes Prov-GigaPath's slide encoder, as ``gigapath.slide_encoder.create_model`` does. The model is in training mode, as there.

    The class token of the released weights was never trained, as the original's demo says: use ``global_pool=True`` with them.

    Args:
        pretrained: a file of weights (``slide_encoder.pth``); ``"hf_hub:prov-gigapath/prov-gigapath"`` downloads the released one with
            huggingface_hub; ``""`` starts from random weights.
        model_arch: ``"gigapath_slide_enc12l768d"``, the released weights' · ``"gigapath_slide_enc24l1024d"`` ·
            ``"gigapath_slide_enc12l1536d"``.
        in_chans: width of the tile embeddings.
        local_dir: where a downloaded file is put; None for huggingface_hub's cache.
        slide_ngrids: cells of a side of the grid; coordinates beyond it are refused.
        tile_size: side of a tile in pixels at level 0.
        max_wsi_size: side in pixels of the largest slide, from which the segments follow.
        global_pool: represent a slide by the mean of its tiles; False: by the class token.
        dropout, drop_path_rate: in training.
        ignore: prefixes of the names of weights to leave out, such as ``"classifier"``.

    Raises:
        FileNotFoundError, ValueError: if the file does not exist or is not of this architecture. Differs from the original, which then
            prints a line and goes on with random weights.
    """
    one_of("model_arch", model_arch, tuple(_ARCHITECTURES))
    in_chans = as_size("in_chans", in_chans)
    width, layers = _ARCHITECTURES[model_arch]
    settings: dict[str, Any] = {
        "max_wsi_size": max_wsi_size,
        "tile_size": tile_size,
        "grid_size": as_size("slide_ngrids", slide_ngrids),
        "global_pool": global_pool,
        "dropout": dropout,
        "drop_path": check_probability("drop_path_rate", drop_path_rate),
    }
    if not str(pretrained):
        return LongNetViT(SlideEncoderConfig.gigapath(width, layers, in_dim=in_chans, **settings))
    file = str(pretrained)
    if file.startswith("hf_hub:"):
        try:
            from huggingface_hub import hf_hub_download
        except ImportError as error:
            raise ImportError(f'{file!r} needs huggingface_hub: pip install "dilated-attention[hf]"') from error
        file = hf_hub_download(file.partition(":")[2], "slide_encoder.pth", local_dir=local_dir)
    # a table of the grid's positions, which files may hold, is computed here
    weights = {name: x for name, x in read_weights(file).items() if name != "pos_embed"}
    loaded = load_slide_encoder(weights, ignore=ignore, **settings)
    config = loaded.config
    if (config.encoder.embed_dim, config.encoder.num_layers, config.in_dim) != (width, layers, in_chans):
        raise ValueError(
            f"{pretrained} holds {config.encoder.num_layers} layers of width {config.encoder.embed_dim} on {config.in_dim} channels; "
            f"{model_arch} with in_chans={in_chans} has {layers} of {width} on {in_chans}: give the model_arch and in_chans of the file"
        )
    # the loaded weights themselves, no second copy of them
    model = LongNetViT(config, device="meta")
    model.load_state_dict(loaded.state_dict(), assign=True)
    return model
