"""Encoder of a whole slide from the embeddings and positions of its tiles: Prov-GigaPath's slide encoder on LongNet's encoder."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from dilated_attention.functional.options import shows_options
from dilated_attention.models.images.base import ImageModel, insert_class_tokens, means_of_runs
from dilated_attention.models.images.slide_config import SlideEncoderConfig
from dilated_attention.models.images.slides import check_finite, checked_slides, grid_positions, rows_of_slides, wrong_step
from dilated_attention.models.stack import ModelOptions
from dilated_attention.models.text import has_values
from dilated_attention.pattern.checks import as_int, differs
from dilated_attention.validation import check_bool


class SlideEncoder(ImageModel):
    """Computes one vector per slide: embedded tiles with their grid positions, after a class token, through LongNet's encoder and a norm.

        x_0 = c,   x_t = W e_t + b + position(t),   slide = norm(encoder(x)_0), or norm(mean_t encoder(x)_t) with ``global_pool``

    With ``config.num_classes`` a linear layer, ``head``, makes logits of it; with ``pooling="none"`` the output is that of ``features``.

    Args:
        config: the configuration; ``SlideEncoderConfig.gigapath()`` for Prov-GigaPath's, whose weights ``load_torchscale`` loads.
        options: see ``models.stack.ModelOptions``. Of a sharded model, tiles and coords are each process's shards, as ``shard_sequence``
            cuts them; the class token needs nothing from the caller. ``layout="striped"`` sends nearly every tile to another process, to
            make room for the class token. A ``Layout`` is refused: it is made for one length, and there are two, with and without class
            tokens.

    A sharded model returns the whole slides' vectors on every process. Compute the same loss from them everywhere: a process's gradient of
    this model's parameters is then its share times the number of processes, so an average, by DDP, FSDP2 or ``average_gradients``, is
    exact; see ``models.loss``. The first process draws drop path for all; dropout uses each process's own random generator.

    Differs from Prov-GigaPath: positions are computed for the given tiles, without the table of grid_size² rows; slides of unequal
    length run in one batch; processes can share a slide.

    >>> model = SlideEncoder(SlideEncoderConfig.gigapath()).eval()
    >>> tiles, coords, cu_seqlens = collate_slides(
    ...     [(tiles_a, coords_a), (tiles_b, coords_b)])
    >>> slides = model(tiles, coords, cu_seqlens=cu_seqlens)  # (2, 768)

    >>> model = SlideEncoder(config, mesh=mesh)  # on each process
    >>> tiles, coords = shard_sequence(mesh, [tiles, coords], [1, 1])
    >>> slide = model(tiles, coords)  # (1, 768), on every process
    """

    config_class = SlideEncoderConfig
    config: SlideEncoderConfig

    @shows_options
    def __init__(self, config: SlideEncoderConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__("SlideEncoder", config, options)
        self._checks_steps = True
        nn.init.xavier_uniform_(self.tile_embedding.weight)
        nn.init.zeros_(self.tile_embedding.bias)
        nn.init.normal_(self.class_token, std=0.02)
        if self.head is not None:
            nn.init.trunc_normal_(self.head.weight, std=0.02)

    def _add_embedding(self, width: int, factory: dict[str, Any]) -> None:
        self.tile_embedding = nn.Linear(self.config.in_dim, width, **factory)
        self.class_token = nn.Parameter(torch.empty(width, **factory))

    def forward(
        self,
        tiles: torch.Tensor,
        coords: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        all_layers: bool = False,
    ) -> Any:
        """Computes the slides' vectors, or their logits if the model has ``num_classes``.

        Args:
            tiles: (B, L, in_dim), tile embeddings of B slides of L tiles each; with ``cu_seqlens`` (1, tiles of all slides, in_dim). For a
                sharded model this process's shard of the L tiles. Any floating dtype, converted to that of the parameters; then autocast
                applies as to any module.
            coords: (B, L, 2), each tile's x and y in pixels at level 0; float32, float64 or integers. For a sharded model those of its
                tiles. If a slide's tiles are not ``tile_size`` apart (``tile_step``), a UserWarning says so, once for a model; on a GPU
                the first call alone is looked at.
            cu_seqlens: bounds of slides of unequal length, int32 (slides + 1,), as returned by ``collate_slides``. Slides do not attend to
                each other. For a sharded model they are bounds in the whole sequence.
            seq_len: L, for a sharded model. None: the processes ask each other once per call, and compare their arguments; inside
                torch.compile it is required.
            all_layers: return the vectors of the blocks' input and of each block's output, all without the encoder's own last norm.

        Returns:
            (slides, E), or logits (slides, num_classes), or with ``pooling="none"`` (B, L, E). With ``all_layers`` a list of one such
            tensor more than there are blocks, never logits.

        Raises:
            ValueError, TypeError: if tensors do not fit, a tile is outside the grid, or tiles on the CPU have NaN or infinite features
                (reading a GPU's would make the host wait; ``collate_slides`` checks them anywhere). Of a sharded model only the process
                that has such a tile raises this.
        """
        if not check_bool("all_layers", all_layers):
            vectors = self.embed(tiles, coords, cu_seqlens=cu_seqlens, seq_len=seq_len)
            return vectors if self.head is None else self.head(vectors)
        x, bounds, options = self._begin(tiles, coords, cu_seqlens, seq_len)
        return [self._pool(state, bounds) for state in self.encoder(x, all_layers=True, **options)[1]]

    def embed(
        self, tiles: torch.Tensor, coords: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, seq_len: int | None = None
    ) -> torch.Tensor:
        """Computes the slides' vectors (slides, E), without the head of a model with ``num_classes``. For arguments see ``forward``."""
        x, bounds, options = self._begin(tiles, coords, cu_seqlens, seq_len)
        return self._pool(self.encoder(x, **options), bounds)

    def features(self, tiles: torch.Tensor, coords: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """Computes a vector for each tile, (B, L, E): the encoder's output, without class tokens and the norm after it, in the order of
        ``tiles``. For arguments see ``forward``. Raises ValueError, too, if processes share the slide.

        >>> vectors = model.features(tiles, coords)  # of any pooling
        """
        x, bounds, options = self._begin(tiles, coords, cu_seqlens)
        return self._tiles_of(self.encoder(x, **options), bounds)

    def _tiles_of(self, x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        if self._shared is not None:
            raise ValueError("processes share this slide, and vectors of tiles are given by one; load the weights without group and mesh")
        return torch.cat([x[:, start + 1 : end] for start, end in itertools.pairwise(bounds)], 1)

    @torch.no_grad()
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
            ValueError, TypeError: if tensors do not fit, the layer or rows do not exist, or processes share the slide.

        >>> rows = model.attention_map(tiles, coords, query_rows=[0, 17])
        >>> rows.shape  # class token and 17th tile: (B, H, 2, 1 + L)
        """
        x, bounds, options = self._begin(tiles, coords, cu_seqlens)
        rows = query_rows if cu_seqlens is None else rows_of_slides(query_rows, bounds)
        maps = self.encoder.attention_map(x, query_rows=rows, layer=layer, average_heads=average_heads, chunk=chunk, **options)
        if cu_seqlens is None:
            return maps
        count = len(rows) // (len(bounds) - 1)
        parts = zip(maps[0].split(count, -2), itertools.pairwise(bounds), strict=True)
        return [part[..., start:end] for part, (start, end) in parts]

    @torch.no_grad()
    def attention_received(
        self,
        tiles: torch.Tensor,
        coords: torch.Tensor,
        *,
        layer: int = -1,
        cu_seqlens: torch.Tensor | None = None,
        average_heads: bool = True,
    ) -> Any:
        """Returns one weight for each tile, for a heat map: what the slide's vector averages in one block's attention.

            a(t) = p(0, t) of the class token, or with ``global_pool`` the mean over the slide's tiles i of p(i, t)

        p are the weights of ``attention_map``. The weights of a slide sum to 1 minus those of its class token and of zero keys. Set eval
        mode first. They depend on the order of the tiles, since segments and dilation cut the sequence: see docs/heatmap.md.

        Args:
            tiles, coords, cu_seqlens: see ``forward``.
            layer: index of the block, from 0; negative values count from the end.
            average_heads: return the mean over heads; False: each head's weights.

        Returns:
            (B, L), or (B, H, L) without ``average_heads``. With ``cu_seqlens`` a list of such tensors without the batch dimension, one for
            each slide.

        Raises:
            ValueError, TypeError: if tensors do not fit, the layer does not exist, or processes share the slide.

        >>> weights = model.attention_received(tiles, coords)[0]
        >>> heat = weights * tiles.shape[1]  # (L,); 1 where a tile has an even share
        """
        if not self.config.global_pool:
            found = self.attention_map(tiles, coords, layer=layer, cu_seqlens=cu_seqlens, average_heads=average_heads)
            return found[..., 0, 1:] if cu_seqlens is None else [weights[..., 0, 1:] for weights in found]
        x, bounds, options = self._begin(tiles, coords, cu_seqlens)
        shares, slides = torch.zeros(x.shape[:2], device=x.device), list(itertools.pairwise(bounds))
        for start, end in slides:
            shares[:, start + 1 : end] = 1 / (end - start - 1)
        received = self.encoder.attention_received(x, layer=layer, query_weights=shares, average_heads=average_heads, **options)
        return received[..., 1:] if cu_seqlens is None else [received[0, ..., start + 1 : end] for start, end in slides]

    def _begin(
        self, tiles: torch.Tensor, coords: torch.Tensor, cu_seqlens: torch.Tensor | None, seq_len: int | None = None
    ) -> tuple[torch.Tensor, list[int], dict[str, Any]]:
        """Returns the input of the blocks with class tokens, each slide's bounds in it ([0, 1 + L] of a plain batch), and the encoder's
        arguments seq_len and cu_seqlens."""
        config, ring = self.config, self._shared
        bounds = checked_slides(tiles, coords, cu_seqlens, config.in_dim)
        places = grid_positions(
            coords, config.encoder.embed_dim, tile_size=config.tile_size, grid_size=config.grid_size, dtype=self.class_token.dtype
        )
        whole = tiles.shape[1]
        if ring is None:
            if seq_len is not None and differs(seq_len, whole):
                raise ValueError(f"seq_len is {seq_len} and there are {whole} tiles; on one process leave seq_len out")
        elif seq_len is None:
            whole = ring.whole_length(whole, slides=tiles.shape[0], cu_seqlens=bounds)
        else:
            whole = as_int("seq_len", seq_len, minimum=0)
        if bounds is None:
            bounds = [0, whole]
        elif len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != whole or sorted(bounds) != bounds:
            raise ValueError(f"cu_seqlens is {bounds}; expected rising bounds from 0 to the number of tiles, {whole}")
        if config.global_pool and any(start == end for start, end in itertools.pairwise(bounds)):
            raise ValueError("a slide has no tiles, and global_pool=True means the mean of its tiles; leave that slide out")
        tiles = tiles.to(places.dtype)
        check_finite(tiles, bounds, is_shard=ring is not None)
        # of a shard of packed slides it is not known here which tile is of which slide, and a striped shard has every W-th tile
        if ring is None or (len(bounds) == 2 and ring.layout != "striped"):
            self._check_steps(coords, bounds)
        x = self.tile_embedding(tiles) + places.to(tiles.device)
        token = self.class_token.to(x.dtype)
        if ring is not None:
            x = insert_class_tokens(x, token, bounds, ring)
        else:
            parts = x.split([end - start for start, end in itertools.pairwise(bounds)], 1)
            x = torch.cat([rows for part in parts for rows in (token.expand(x.shape[0], 1, -1), part)], 1)
        # each slide now begins with its class token
        bounds = [bound + slide for slide, bound in enumerate(bounds)]
        options: dict[str, Any] = {} if ring is None else {"seq_len": bounds[-1]}
        if cu_seqlens is not None:
            options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=x.device)
        return self.dropout(x), bounds, options

    def _check_steps(self, coords: torch.Tensor, bounds: list[int]) -> None:
        """Warns once if tiles are not ``tile_size`` apart. Every call on a CPU is looked at until then, but only the first one on a GPU,
        since reading coords makes the host wait."""
        if not self._checks_steps or not has_values(coords, waits=True):
            return
        message = wrong_step(coords, bounds, self.config.tile_size)
        self._checks_steps = message is None and coords.device.type == "cpu"
        if message is not None:
            warnings.warn(message, stacklevel=2)

    def _pool(self, x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        # pooling="none"
        if self.norm is None:
            return self._tiles_of(x, bounds)
        is_mean = self.config.global_pool
        if self._shared is None and len(bounds) == 2:
            return self.norm(x[:, 1:].mean(dim=1) if is_mean else x[:, 0])
        runs = [(start + 1, end) if is_mean else (start, start + 1) for start, end in itertools.pairwise(bounds)]
        # means (B, 1, E) of a batch, or (1, slides, E) of packed slides, to (slides, E)
        return self.norm(means_of_runs(x, runs, bounds[-1], self._shared).flatten(0, 1))
