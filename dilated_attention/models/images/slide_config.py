"""Configuration of a slide encoder, and Prov-GigaPath's segment lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dilated_attention.models.config import TORCHSCALE_ENCODER, LongNetConfig, ModelConfig, as_config, as_size
from dilated_attention.pattern.checks import as_int, one_of, shown
from dilated_attention.validation import check_bool, check_held

# side in pixels of the largest slide that Prov-GigaPath's segment lengths are made for
GIGAPATH_MAX_WSI_SIZE = 262144


def segment_lengths_of(max_wsi_size: int = GIGAPATH_MAX_WSI_SIZE, tile_size: int = 256) -> tuple[int, ...]:
    """Returns Prov-GigaPath's five segment lengths for slides of at most ``max_wsi_size`` × ``max_wsi_size`` pixels.

    They go from 1024 to the largest power of 2 within the number of tiles, in equal ratios, rounded down: 1024, 5792, 32768, 185363,
    1048576 by default.
    """
    side = as_int("max_wsi_size", max_wsi_size, minimum=1) // as_int("tile_size", tile_size, minimum=1)
    if side < 4:
        raise ValueError(
            f"max_wsi_size is {max_wsi_size} and tile_size is {tile_size}, which leaves {side} × {side} tiles; expected at least 4 × 4"
        )
    # as exponents of 2, in four equal steps from 10
    last_exponent = (side * side).bit_length() - 1
    return tuple(int(2.0 ** (10 + i * (last_exponent - 10) / 4)) for i in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlideEncoderConfig(ModelConfig):
    """Configuration of a ``SlideEncoder``.

    Args:
        encoder: configuration of the blocks, with ``is_causal=False`` and no vocabulary; its ``dropout`` also applies to embedded tiles.
        in_dim: width of the tile embeddings.
        grid_size: side of the grid in cells; coordinates beyond it are refused. It affects no weight's shape and changes no position.
        tile_size: side of a tile in pixels, by which coordinates are divided.
        global_pool: represent the slide by the mean of its tiles. False: by the class token.
        pooling: None: ``global_pool`` says · ``"none"``: a vector for each tile, the encoder's output without the last norm.
        norm_eps: ε of the last norm.
        num_classes: number of outputs of a linear layer on the slide's vector; None for the vector itself, or for as many as names.
        class_names: what the outputs are called, for whoever loads the model; nothing is computed from them.

    Raises:
        ValueError, TypeError: if the model cannot be built.
    """

    encoder: LongNetConfig
    in_dim: int = 1536
    grid_size: int = 1000
    tile_size: int = 256
    global_pool: bool = False
    pooling: str | None = None
    norm_eps: float = 1e-6
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        # each field named is replaced by what the function makes of its name and value
        self._convert(partial(checked_encoder, what="a slide encoder"), "encoder")
        if self.encoder.embed_dim % 4:
            raise ValueError(f"encoder.embed_dim is {self.encoder.embed_dim}; positions on a grid need a multiple of 4")
        names = self.class_names
        if names is not None:
            if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"class_names is {shown(names)}; expected a sequence of strings")
            if len(set(names)) < len(names):
                raise ValueError(f"class_names is {shown(names)}; expected another name for each class, which names an output")
            if self.num_classes not in (None, len(names)):
                raise ValueError(
                    f"class_names has {len(names)} names and num_classes is {self.num_classes}; expected a name for each class"
                )
            object.__setattr__(self, "class_names", tuple(names))
            object.__setattr__(self, "num_classes", len(names))
        self._convert(as_size, "in_dim", "grid_size", "tile_size")
        self._convert(as_size, "num_classes", optional=True)
        self._convert(check_bool, "global_pool")
        self._convert(check_held, "norm_eps")
        if self.pooling is not None:
            one_of("pooling", self.pooling, ("none",), also="or None")
            if self.global_pool or self.num_classes is not None:
                raise ValueError(
                    f"pooling is 'none', global_pool is {self.global_pool} and num_classes is {self.num_classes}; both describe a whole "
                    "slide: leave them out, or pooling"
                )

    @classmethod
    def gigapath(
        cls,
        embed_dim: int = 768,
        num_layers: int = 12,
        *,
        num_heads: int = 16,
        max_wsi_size: int = GIGAPATH_MAX_WSI_SIZE,
        tile_size: int = 256,
        mixture_grad: str = "detached",
        dropout: float = 0.25,
        drop_path: float = 0.1,
        **others: Any,
    ) -> SlideEncoderConfig:
        """Returns Prov-GigaPath's configuration, with TorchScale's semantics of attention.

        It has 768 × 12 layers (the released weights), 1024 × 24 or 1536 × 12. ``mixture_grad="exact"`` trains with the true gradient, which
        was not used for the released weights. ``others`` are the remaining fields.
        """
        encoder = LongNetConfig(
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            segment_lengths=segment_lengths_of(max_wsi_size, tile_size),
            **TORCHSCALE_ENCODER,
            mixture_grad=mixture_grad,
            dropout=dropout,
            drop_path=drop_path,
        )
        return cls(encoder=encoder, tile_size=tile_size, **others)


def checked_encoder(name: str, encoder: Any, what: str) -> LongNetConfig:
    """Returns the configuration of a plain encoder, which is a dict if it was read from a file.

    Raises ValueError if it is that of a causal model, one with a vocabulary, or one whose sequence several processes share. ``name``: of
    the field; ``what``: the model that has it, for the message.
    """
    if isinstance(encoder, dict):
        encoder = LongNetConfig.from_dict(encoder)
    encoder = as_config(name, encoder)
    for field, wanted in (("is_causal", False), ("vocab_size", None), ("is_ring", False)):
        if getattr(encoder, field) is not wanted:
            raise ValueError(f"{name}.{field} is {getattr(encoder, field)!r}; {what} needs {wanted}")
    return encoder
