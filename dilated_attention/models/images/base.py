"""What slide encoders and vision transformers have in common: LongNet's encoder, a norm and a head; and how class tokens enter a sequence
of tiles, or patches, that several processes share.

A class token is a position of the sequence, so S class tokens change which process holds which tile. Take contiguous shards of 9 tiles over
2 processes, and one class token c. Tile 4 moves from the first process to the second:

    tiles        0 1 2 3 4 | 5 6 7 8
    sequence   c 0 1 2 3 | 4 5 6 7 8

Before that move, the first process holds all class tokens. Of contiguous shards at most S rows leave a process, of zigzag shards 2S; of
striped shards almost all rows move.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dilated_attention.distributed.comm.group import members_named
from dilated_attention.distributed.comm.p2p import reshard, wire_of
from dilated_attention.distributed.sharding.layout import LAYOUTS, ShardSpec, Span, spans
from dilated_attention.functional.arguments import place_in
from dilated_attention.models.loss import sum_over_group
from dilated_attention.models.saving import Pretrained
from dilated_attention.models.stack import LongNetEncoder, ModelOptions, stack_options
from dilated_attention.modules import RingSettings
from dilated_attention.pattern.checks import one_of, shown

# [first, last), of rows or positions
Range = tuple[int, int]


class ImageModel(Pretrained):
    """Base class of ``SlideEncoder`` and ``LongViT``. ``name``: that of the class whose options these are."""

    norm: Any

    def __init__(self, name: str, config: Any, options: ModelOptions) -> None:
        super().__init__()
        self.config = config
        if not isinstance(self.config, self.config_class):
            raise TypeError(f"config is {shown(config)}; expected a {self.config_class.__name__}")
        # by name alone: a ``Layout`` holds for one length, but the model needs it with and without class tokens
        one_of("layout", options.get("layout", "contiguous"), LAYOUTS)
        given = stack_options(name, options)
        self.ring: RingSettings | None = given["ring"]
        width, factory = config.encoder.embed_dim, {key: given[key] for key in ("device", "dtype")}
        self._add_embedding(width, factory)
        self.dropout = nn.Dropout(config.encoder.dropout)
        self.encoder = LongNetEncoder(config.encoder, **given)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, **factory) if getattr(config, "pooling", None) != "none" else None
        self.head = None if config.num_classes is None else nn.Linear(width, config.num_classes, **factory)
        if self.head is not None:
            nn.init.zeros_(self.head.bias)

    def _add_embedding(self, width: int, factory: dict[str, Any]) -> None:
        """Makes the parameters that come before the encoder. ``factory``: device and dtype."""
        raise NotImplementedError

    @property
    def _shared(self) -> RingSettings | None:
        """How several processes share a sequence; None for one process."""
        return self.ring if self.ring is not None and self.ring.group_name else None


def rows_at_positions(held: Sequence[Span], start: int, stop: int) -> list[Range]:
    """Returns which of a process's rows, as ranges, are at positions in [start, stop). ``held``: positions of all its rows, in order."""
    ranges, row = [], 0
    for first, last, step in held:
        low, high = (row + len(range(first, min(end, last), step)) for end in (start, stop))
        if low < high:
            ranges.append((low, high))
        row += len(range(first, last, step))
    return ranges


@functools.lru_cache(maxsize=16)
def holdings(bounds: tuple[int, ...], size: int, layout: str) -> tuple[list[ShardSpec], list[ShardSpec]]:
    """Returns (before, after): the positions that each process holds in the sequence with class tokens, before and after rows move.

    Before, the first process holds all class tokens, in front of its tiles. ``bounds``: slide i has the tiles [bounds[i], bounds[i + 1]).
    """
    before = []
    for rank in range(size):
        held = [] if rank else [(bound + slide, bound + slide + 1, 1) for slide, bound in enumerate(bounds[:-1])]
        for span in spans(bounds[-1], rank, size, layout):
            for slide, run in enumerate(itertools.pairwise(bounds), 1):
                # here ``slide`` counts from 1: before a tile of it there are as many class tokens
                for tiles in (range(*span)[first:last] for first, last in rows_at_positions([span], *run)):
                    held.append((tiles.start + slide, tiles.stop + slide, tiles.step))
        before.append(ShardSpec(tuple(held), (0, 1)))
    return before, [ShardSpec(spans(bounds[-1] + len(bounds) - 1, rank, size, layout), (0, 1)) for rank in range(size)]


def insert_class_tokens(x: torch.Tensor, token: torch.Tensor, bounds: Sequence[int], ring: RingSettings) -> torch.Tensor:
    """Puts a class token before the first tile of each slide, in a sequence that processes share. All processes must call it.

    Args:
        x: (B, n, E), this process's rows of the sequence of tiles, in the order of the layout.
        token: (E,), in x's dtype.
        bounds: of the slides, in the whole sequence of tiles.

    Returns:
        (B, n′, E), this process's rows of the sequence with class tokens. If the n rows are no shard of the tiles, there is a row too many:
        the attention that follows then refuses them, on all processes alike.
    """
    # other processes expand the token to 0 rows, so that its gradient there is zeros and not None
    tokens = token.expand(x.shape[0], 0 if ring.place()[0] else len(bounds) - 1, -1)
    return move_rows(torch.cat((tokens, x), 1), bounds, ring.group_name, ring.layout, ring.timeout, False)


@torch.library.custom_op("dilated_attention::move_rows", mutates_args=())
def move_rows(x: torch.Tensor, bounds: Sequence[int], group_name: str, layout: str, timeout: float, inverse: bool) -> torch.Tensor:
    """Moves rows (B, n, E) from the processes that hold them before to those that hold them after, see ``holdings``. ``inverse`` moves them
    back, which is the derivative."""
    members = members_named(group_name)
    old, new = holdings(tuple(map(int, bounds)), members.size, layout)
    if inverse:
        old, new = new, old
    expected = old[members.rank].rows
    rows = x if x.shape[1] == expected else x.new_zeros(x.shape[0], expected, x.shape[2])
    wire = wire_of(members, timeout, x.device)
    moved = reshard([rows[:, :, None]], [old], [new], members.rank, wire, "class tokens")[0][:, :, 0]
    return moved if rows is x else x.new_zeros(x.shape[0], moved.shape[1] + 1, x.shape[2])


@move_rows.register_fake
def _(x: torch.Tensor, bounds: Sequence[int], group_name: str, layout: str, timeout: float, inverse: bool) -> torch.Tensor:
    rank, size = place_in(group_name)
    return x.new_empty(x.shape[0], holdings(tuple(map(int, bounds)), size, layout)[not inverse][rank].rows, x.shape[2])


def _save_settings(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.settings = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    *settings, inverse = ctx.settings
    return move_rows(grad, *settings, not inverse), None, None, None, None, None


move_rows.register_autograd(_backward, setup_context=_save_settings)


def means_of_runs(x: torch.Tensor, runs: Sequence[Range], seq_len: int, ring: RingSettings | None) -> torch.Tensor:
    """Averages rows over ranges of positions, such as the tiles of each slide. All processes must call it.

    Args:
        x: (B, n, E), this process's rows.
        runs: disjoint ranges of positions.
        seq_len: N, the length of the whole sequence.
        ring: how processes share it; None where this one holds all of it.

    Returns:
        (B, ranges, E) in x's dtype, equal on all processes. A process's gradient is that of the sum of all processes' losses, as
        ``average_gradients``, DDP and FSDP2 need it.
    """
    held = ((0, seq_len, 1),) if ring is None else spans(seq_len, *ring.place(), ring.layout)
    pieces = sorted((*rows, index) for index, run in enumerate(runs) for rows in rows_at_positions(held, *run))
    edges = [0, *(edge for first, last, _ in pieces for edge in (first, last)), x.shape[1], x.shape[1]]
    # one split, because its backward makes one tensor; a slice for each range would make one of x's size each
    parts = x.split([b - a for a, b in itertools.pairwise(edges)], dim=1)
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    # all processes must take part in the backward: one without rows does so by a sum over no rows
    sums = [parts[-1].sum(1, dtype=dtype)] * len(runs)
    for (_, _, index), part in zip(pieces, parts[1::2], strict=False):
        sums[index] = sums[index] + part.sum(1, dtype=dtype)
    means = torch.stack([total / (stop - start) for total, (start, stop) in zip(sums, runs, strict=True)], 1)
    return (means if ring is None else sum_over_group(means, ring.group_name)).to(x.dtype)
