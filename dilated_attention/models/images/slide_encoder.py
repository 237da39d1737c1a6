"""Encoder of a whole slide from the embeddings and positions of its tiles: Prov-GigaPath's slide encoder on LongNet's encoder."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dilated_attention.models.config import TORCHSCALE_ENCODER, LongNetConfig, ModelConfig, as_size
from dilated_attention.models.images.positions import grid_positions
from dilated_attention.models.images.slides import checked_bounds, device_bounds, has_empty, rows_of_slides
from dilated_attention.models.saving import Pretrained
from dilated_attention.models.stack import LongNetEncoder
from dilated_attention.pattern.checks import as_int, shown
from dilated_attention.validation import check_bool, check_positive

# side in pixels of the largest slide that Prov-GigaPath's segment lengths are made for
GIGAPATH_MAX_WSI_SIZE = 262144


def segment_lengths_of(max_wsi_size: int = GIGAPATH_MAX_WSI_SIZE, tile_size: int = 256) -> tuple[int, ...]:
    """Returns Prov-GigaPath's five segment lengths for slides of at most ``max_wsi_size`` × ``max_wsi_size`` pixels.

    With tiles of ``tile_size`` pixels, they go from 1024 to the largest power of 2 that is at most the number of tiles, in equal ratios,
    rounded down: 1024, 5792, 32768, 185363, 1048576 for 262144 pixels in tiles of 256.
    """
    side = as_int("max_wsi_size", max_wsi_size, minimum=1) // as_int("tile_size", tile_size, minimum=1)
    if side < 4:
        raise ValueError(
            f"max_wsi_size is {max_wsi_size} and tile_size is {tile_size}, which leaves {side} × {side} tiles; expected at least 4 × 4"
        )
    last = (side * side).bit_length() - 1
    return tuple(int(2.0 ** (10 + i * (last - 10) / 4)) for i in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlideEncoderConfig(ModelConfig):
    """Configuration of a ``SlideEncoder``.

    Args:
        encoder: configuration of the blocks, with ``is_causal=False`` and no vocabulary; its ``dropout`` also applies to embedded tiles.
        in_dim: width of the tile embeddings.
        grid_size: side of the grid in cells; coordinates beyond it are refused. It affects no weight's shape and changes no position.
        tile_size: side of a tile in pixels, by which coordinates are divided.
        global_pool: represent the slide by the mean of its tiles. False: by the class token.
        norm_eps: ε of the last norm.

    Raises:
        ValueError, TypeError: if the model cannot be built.
    """

    encoder: LongNetConfig
    in_dim: int = 1536
    grid_size: int = 1000
    tile_size: int = 256
    global_pool: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        # in a configuration read from a file, this is a dict
        if isinstance(self.encoder, dict):
            object.__setattr__(self, "encoder", LongNetConfig.from_dict(self.encoder))
        check_encoder(self.encoder, "a slide encoder")
        if self.encoder.embed_dim % 4:
            raise ValueError(f"encoder.embed_dim is {self.encoder.embed_dim}; positions on a grid need a multiple of 4")
        for name in ("in_dim", "grid_size", "tile_size"):
            object.__setattr__(self, name, as_size(name, getattr(self, name)))
        check_bool("global_pool", self.global_pool)
        object.__setattr__(self, "norm_eps", check_positive("norm_eps", self.norm_eps))

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


def check_encoder(encoder: Any, what: str) -> None:
    """Raises an error if a configuration is not that of a plain encoder."""
    if not isinstance(encoder, LongNetConfig):
        raise TypeError(f"encoder is {shown(encoder)} ({type(encoder).__name__}); expected a LongNetConfig")
    for name, wanted in (("is_causal", False), ("vocab_size", None), ("is_ring", False)):
        if getattr(encoder, name) is not wanted:
            raise ValueError(f"encoder.{name} is {getattr(encoder, name)!r}; {what} needs {wanted}")


class SlideEncoder(Pretrained):
    """Computes one vector per slide: embedded tiles with their grid positions, after a class token, through LongNet's encoder and a norm.

        x_0 = c,   x_t = W e_t + b + position(t),   slide = norm(encoder(x)_0), or norm(mean_t encoder(x)_t) with ``global_pool``

    Args:
        config: the configuration; ``SlideEncoderConfig.gigapath()`` for Prov-GigaPath's, whose weights ``load_torchscale`` loads.
        backend: ``"auto"`` or a name of ``list_backends()``.
        checkpoint_activations: save only each block's input for the backward and recompute the block.
        device, dtype: those of the parameters.

    Differs from Prov-GigaPath: positions are computed for the given tiles, without the table of grid_size² rows; slides of unequal
    length run in one batch.

    >>> model = SlideEncoder(SlideEncoderConfig.gigapath()).eval()
    >>> tiles, coords, cu_seqlens = collate_slides([(tiles_a, coords_a), (tiles_b, coords_b)])
    >>> slides = model(tiles, coords, cu_seqlens=cu_seqlens)     # (2, 768)
    """

    config_class = SlideEncoderConfig
    config: SlideEncoderConfig

    def __init__(
        self,
        config: SlideEncoderConfig,
        *,
        backend: str = "auto",
        checkpoint_activations: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        width = config.encoder.embed_dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.tile_embedding = nn.Linear(config.in_dim, width, **factory)
        self.class_token = nn.Parameter(torch.empty(width, **factory))
        self.dropout = nn.Dropout(config.encoder.dropout)
        self.encoder = LongNetEncoder(config.encoder, backend=backend, checkpoint_activations=checkpoint_activations, **factory)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, **factory)
        nn.init.xavier_uniform_(self.tile_embedding.weight)
        nn.init.zeros_(self.tile_embedding.bias)
        nn.init.normal_(self.class_token, std=0.02)

    def forward(
        self, tiles: torch.Tensor, coords: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, all_layers: bool = False
    ) -> Any:
        """Embeds slides.

        Args:
            tiles: (B, L, in_dim), tile embeddings of B slides of L tiles each; with ``cu_seqlens`` (1, tiles of all slides, in_dim).
            coords: (B, L, 2), each tile's position in pixels; float32, float64 or integers.
            cu_seqlens: bounds of slides of unequal length, int32 (slides + 1,), as returned by ``collate_slides``. Slides do not attend to
                each other.
            all_layers: return the vectors of the blocks' input and of each block's output, all without the encoder's own last norm.

        Returns:
            (slides, E); with ``all_layers`` [M + 1 tensors (slides, E)].

        Raises:
            ValueError, TypeError: if tensors do not fit, or a tile is outside the grid.
        """
        x, bounds = self._embed(tiles, coords, cu_seqlens)
        if all_layers:
            return [self._pool(state, bounds) for state in self.encoder(x, cu_seqlens=device_bounds(bounds, x), all_layers=True)[1]]
        return self._pool(self.encoder(x, cu_seqlens=device_bounds(bounds, x)), bounds)

    def attention_map(
        self,
        tiles: torch.Tensor,
        coords: torch.Tensor,
        *,
        layer: int = -1,
        query_rows: Any = "cls",
        cu_seqlens: torch.Tensor | None = None,
        average_heads: bool = False,
        chunk: int | None = None,
    ) -> Any:
        """Returns what the class token, or chosen tiles, attend to in one block: exact weights, without computing all N².

        Set eval mode first. With ``tail="zero_keys"`` a row sums to 1 minus the weight of the zero keys, which have no position.

        Args:
            tiles, coords, cu_seqlens: see ``forward``.
            layer: index of the block, from 0; negative values count from the end.
            query_rows: ``"cls"``, or indices in each slide, where the class token is 0 and tiles start at 1.
            average_heads, chunk: see ``dilated_attention.functional.attention_map``.

        Returns:
            (B, H, R, 1 + L): the first column is the class token; with ``average_heads`` (B, R, 1 + L). With ``cu_seqlens`` a list of
            such tensors without the batch dimension, one for each slide.

        Raises:
            ValueError, TypeError: if tensors do not fit, or the layer or rows do not exist.

        >>> heat = model.attention_map(tiles, coords, average_heads=True)[:, 0, 1:]     # (B, L), one weight for each tile
        """
        with torch.no_grad():
            x, bounds = self._embed(tiles, coords, cu_seqlens)
        options: dict[str, Any] = {"layer": layer, "average_heads": average_heads, "chunk": chunk}
        if bounds is None:
            return self.encoder.attention_map(x, query_rows=query_rows, **options)
        rows = rows_of_slides(query_rows, bounds)
        count = len(rows) // (len(bounds) - 1)
        maps = self.encoder.attention_map(x, query_rows=rows, cu_seqlens=device_bounds(bounds, x), **options)[0]
        parts = enumerate(itertools.pairwise(bounds))
        return [maps[..., slide * count : (slide + 1) * count, start:end] for slide, (start, end) in parts]

    def _embed(self, tiles: torch.Tensor, coords: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, list[int] | None]:
        """Returns the input of the blocks, class tokens included, and the bounds of packed slides in it."""
        bounds = self._check(tiles, coords, cu_seqlens)
        places = grid_positions(
            coords,
            self.config.encoder.embed_dim,
            tile_size=self.config.tile_size,
            grid_size=self.config.grid_size,
            dtype=self.class_token.dtype,
        )
        x = self.tile_embedding(tiles) + places.to(tiles.device)
        token = self.class_token.to(x.dtype)
        if bounds is None:
            return self.dropout(torch.cat((token.expand(x.shape[0], 1, -1), x), dim=1)), None
        parts = [part for start, end in itertools.pairwise(bounds) for part in (token[None], x[0, start:end])]
        return self.dropout(torch.cat(parts)[None]), [bound + slide for slide, bound in enumerate(bounds)]

    def _pool(self, x: torch.Tensor, bounds: list[int] | None) -> torch.Tensor:
        if bounds is None:
            return self.norm(x[:, 1:].mean(dim=1) if self.config.global_pool else x[:, 0])
        if not self.config.global_pool:
            return self.norm(x[0, bounds[:-1]])
        return self.norm(torch.stack([x[0, start + 1 : end].mean(dim=0) for start, end in itertools.pairwise(bounds)]))

    def _check(self, tiles: Any, coords: Any, cu_seqlens: Any) -> list[int] | None:
        if not isinstance(tiles, torch.Tensor) or not isinstance(coords, torch.Tensor):
            raise TypeError(f"tiles and coords are {type(tiles).__name__} and {type(coords).__name__}; expected two tensors")
        if tiles.ndim != 3 or tiles.shape[2] != self.config.in_dim:
            raise ValueError(f"tiles has shape {tuple(tiles.shape)}; expected (slides, tiles, in_dim) with in_dim = {self.config.in_dim}")
        if tuple(coords.shape) != (*tiles.shape[:2], 2):
            raise ValueError(
                f"coords has shape {tuple(coords.shape)} and tiles has {tuple(tiles.shape)}; expected one pair of pixels for each tile, "
                f"{(*tiles.shape[:2], 2)}"
            )
        bounds = None if cu_seqlens is None else checked_bounds(cu_seqlens, tiles)
        if self.config.global_pool and (tiles.shape[1] == 0 or (bounds is not None and has_empty(bounds))):
            raise ValueError("a slide has no tiles, and global_pool=True means the mean of its tiles; leave that slide out")
        return bounds
