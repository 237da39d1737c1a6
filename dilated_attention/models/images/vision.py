"""Vision transformers over whole images cut into patches, on LongNet's encoder: LongViT (arXiv 2312.03558), up to a million patches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from typing_extensions import Unpack

from dilated_attention.distributed.sharding.layout import positions_of
from dilated_attention.functional.options import shows_options
from dilated_attention.models.config import TORCHSCALE_ENCODER, LongNetConfig, ModelConfig, as_size
from dilated_attention.models.images.base import ImageModel, means_of_runs
from dilated_attention.models.images.slide_config import checked_encoder
from dilated_attention.models.stack import ModelOptions
from dilated_attention.pattern.checks import as_int, one_of
from dilated_attention.validation import check_held, not_a_tensor

POOLINGS = ("mean_norm", "norm_mean", "class_token", "none")
# LongViT's segment lengths by the side of the image in pixels, with patches of 32; other sides use the first
_SEGMENTS = {
    1024: (64, 128, 256, 512, 1024),
    4096: (1024, 2048, 4096, 8192, 16384),
    8192: (1024, 4096, 8192, 16384, 65536),
    16384: (1024, 4096, 16384, 65536, 262144),
    32768: (1024, 4096, 32768, 262144, 1048576),
}


def longvit_segment_lengths(image_size: int) -> tuple[int, ...]:
    """Returns LongViT's five segment lengths, in patches, for images of ``image_size`` × ``image_size`` pixels."""
    return _SEGMENTS.get(as_int("image_size", image_size, minimum=1), _SEGMENTS[1024])


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig(ModelConfig):
    """Configuration of a ``LongViT``.

    Args:
        encoder: configuration of the blocks, with ``is_causal=False`` and no vocabulary; its ``dropout`` also applies to the embedded
            patches.
        image_size: side in pixels of the image that the learned positions belong to; a multiple of patch_size.
        patch_size: side of a patch in pixels.
        in_channels: number of channels of the image.
        pooling: ``"mean_norm"``: norm of the mean of the patches (LongViT's classifier) · ``"norm_mean"``: mean of the normed patches (its
            pretraining) · ``"class_token"``: norm of a class token before the patches · ``"none"``: the patches themselves, no norm.
        num_classes: number of outputs of a linear layer on the pooled vector; None for the vector itself.
        norm_eps: ε of the norm at the pooling.

    Raises:
        ValueError, TypeError: if the model cannot be built.
    """

    encoder: LongNetConfig
    image_size: int = 1024
    patch_size: int = 32
    in_channels: int = 3
    pooling: str = "mean_norm"
    num_classes: int | None = None
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        self._convert(partial(checked_encoder, what="LongViT"), "encoder")
        self._convert(as_size, "image_size", "patch_size", "in_channels")
        self._convert(as_size, "num_classes", optional=True)
        self._convert(check_held, "norm_eps")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size is {self.image_size} and patch_size is {self.patch_size}; use a multiple of {self.patch_size}")
        one_of("pooling", self.pooling, POOLINGS)
        if self.pooling == "none" and self.num_classes is not None:
            raise ValueError(
                f"num_classes is {self.num_classes} and pooling is 'none'; a class describes a whole image: pool, or leave num_classes out"
            )

    @property
    def grid(self) -> int:
        """Number of patches along the side of an image of ``image_size``."""
        return self.image_size // self.patch_size

    @classmethod
    def longvit(
        cls,
        image_size: int = 1024,
        *,
        embed_dim: int = 384,
        num_layers: int = 12,
        num_heads: int = 16,
        mixture_grad: str = "detached",
        drop_path: float = 0.0,
        **others: Any,
    ) -> VisionConfig:
        """Returns LongViT-small's configuration for this image size, with TorchScale's semantics. ``others`` are the remaining fields."""
        encoder = LongNetConfig(
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            segment_lengths=longvit_segment_lengths(image_size),
            **TORCHSCALE_ENCODER,
            mixture_grad=mixture_grad,
            drop_path=drop_path,
            final_norm=False,
        )
        return cls(encoder=encoder, image_size=image_size, **others)


class LongViT(ImageModel):
    """LongViT: embeds patches of an image, adds learned positions, applies LongNet's encoder, pools, and for classes adds a linear layer.

    Args:
        config: the configuration; ``VisionConfig.longvit(image_size)`` for LongViT's, whose weights ``load_torchscale`` loads.
        options: see ``models.stack.ModelOptions``. Each process that shares an image is given the whole images, which may be on the CPU,
            copies the pixels of its own patches to the model's device, and embeds these alone. A ``Layout`` is refused.

    A sharded model returns the whole images' vectors or logits on every process, and with ``pooling="none"`` each process its rows.
    Gradients and random draws are those of a sharded ``SlideEncoder``; for a loss of rows use ``models.sharded_mean``.

    >>> model = LongViT(VisionConfig.longvit(4096, num_classes=2))
    >>> logits = model(images)  # (B, 3, 4096, 4096) → (B, 2): 16,384 patches each
    """

    config_class = VisionConfig
    config: VisionConfig

    @shows_options
    def __init__(self, config: VisionConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__("LongViT", config, options)
        for parameter in (self.positions, self.class_token, None if self.head is None else self.head.weight):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)

    def _add_embedding(self, width: int, factory: dict[str, Any]) -> None:
        config = self.config
        self.patch_embedding = nn.Conv2d(config.in_channels, width, config.patch_size, stride=config.patch_size, **factory)
        self.positions = nn.Parameter(torch.empty(1, config.grid**2, width, **factory))
        self.class_token = nn.Parameter(torch.empty(width, **factory)) if config.pooling == "class_token" else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes logits (B, num_classes) or vectors (B, E) of images (B, in_channels, height, width).

        With ``pooling="none"`` it returns ``features``. A sharded model is given whole images, equal on all processes.

        Raises:
            ValueError, TypeError: if the images do not fit, or a side is not a multiple of patch_size.
        """
        x = self.features(images)
        if self.norm is None:
            return x
        x = self._pool(self.norm(x), images) if self.config.pooling == "norm_mean" else self.norm(self._pool(x, images))
        return x if self.head is None else self.head(x)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the encoder's output, (B, patches, E): the patches row by row, after the class token if there is one. A sharded model
        returns this process's rows of it, those at its positions of the layout (``local_positions``)."""
        self._check(images)
        side = self.config.patch_size
        rows, columns = images.shape[2] // side, images.shape[3] // side
        tokens, positions, spread = int(self.class_token is not None), self.positions_of(rows, columns), {}
        if self._shared is None:
            x = rearrange(self.patch_embedding(images), "b e rows columns -> b (rows columns) e")
        else:
            ring, length = self._shared, rows * columns + tokens
            rank, size = ring.place()
            # in every layout the first position is the first process's first row. A process that does not hold the class token takes no row
            # of it, so that its gradient is zeros there and not None
            own_tokens = 0 if rank else tokens
            held = positions_of(length, rank, size, ring.layout, images.device)[own_tokens:] - tokens
            patches = rearrange(images, "b c (rows p) (columns q) -> b rows columns c p q", p=side, q=side)
            # a view until here: only pixels of this process's patches are copied
            mine = patches[:, held // columns, held % columns].to(positions.device)
            x = self.patch_embedding(mine.flatten(0, 1)).view(images.shape[0], held.shape[0], positions.shape[2])
            positions, tokens, spread = positions[:, held.to(x.device)], own_tokens, {"seq_len": length}
        x = x + positions
        if self.class_token is not None:
            x = torch.cat((self.class_token.to(x.dtype).expand(x.shape[0], tokens, -1), x), dim=1)
        return self.encoder(self.dropout(x), **spread)

    def _pool(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Returns the mean of the rows (B, E), or the class token's."""
        if self._shared is None:
            return x.mean(dim=1) if self.class_token is None else x[:, 0]
        patches = images.shape[2:].numel() // self.config.patch_size**2
        stop, length = (patches, patches) if self.class_token is None else (1, patches + 1)
        return means_of_runs(x, [(0, stop)], length, self._shared)[:, 0]

    def positions_of(self, rows: int, columns: int) -> torch.Tensor:
        """Returns positions (1, rows·columns, E) of a grid of patches: the learned ones, or a bicubic interpolation of them, whose scale is
        LongViT's, (rows + 0.1) / grid, so that the sampling points differ slightly from those that follow from the sizes alone."""
        grid = self.config.grid
        if (rows, columns) == (grid, grid):
            return self.positions
        found = _interpolated(self.positions, grid, scale_factor=((rows + 0.1) / grid, (columns + 0.1) / grid))
        assert found.shape[1] == rows * columns
        return found

    def _check(self, images: Any) -> None:
        if not isinstance(images, torch.Tensor):
            raise not_a_tensor("images", images, "a tensor (batch, channels, height, width)")
        if images.ndim != 4 or images.shape[1] != self.config.in_channels:
            raise ValueError(
                f"images has shape {tuple(images.shape)}; expected (batch, channels, height, width) with {self.config.in_channels} channels"
            )
        patch = self.config.patch_size
        if images.shape[2] % patch or images.shape[3] % patch or 0 in images.shape[2:]:
            raise ValueError(
                f"images are {images.shape[2]} × {images.shape[3]} pixels; expected positive multiples of patch_size = {patch}: crop or pad"
            )


def resized_positions(positions: torch.Tensor, grid: int) -> torch.Tensor:
    """Resizes learned positions (1, n², E) to grid² patches by bicubic interpolation, as at the start of LongViT's fine-tuning."""
    side = int(positions.shape[1] ** 0.5 + 0.5)
    if side * side != positions.shape[1]:
        raise ValueError(f"positions has shape {tuple(positions.shape)}; expected (1, patches, E) of a square image")
    if side == grid:
        return positions
    return _interpolated(positions.float(), side, size=(grid, grid)).to(positions.dtype)


def _interpolated(positions: torch.Tensor, side: int, **size: Any) -> torch.Tensor:
    learned = rearrange(positions, "1 (rows columns) e -> 1 e rows columns", rows=side)
    return rearrange(F.interpolate(learned, mode="bicubic", **size), "1 e rows columns -> 1 (rows columns) e")
