"""One step of an exchange on one rank: which rows it sends and receives, where they go, and the copies that it makes. Planned in closed
form from what all ranks know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.distributed.exchange.plan import Needed
from dilated_attention.engine.branches.problems import Range

Pair = tuple[torch.Tensor, torch.Tensor]


class RowIndex(NamedTuple):
    """``numbers`` of lines by peer, one after the other, on a device; ``counts``: of each peer."""

    counts: list[int]
    numbers: torch.Tensor


def on_device(lines: Sequence[range | np.ndarray], device: torch.device) -> torch.Tensor:
    """Returns the numbers of all lines, one after the other."""
    numbers = [np.arange(some.start, some.stop) if isinstance(some, range) else some for some in lines]
    tensor = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))
    # a copy from other memory would wait for all that the GPU has to do
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, eq=False)
class Step:
    """One step on one rank. A *line* is a row of all the step's heads, or of one head where these need different rows.

    Args:
        what: for messages.
        kv_heads: [first, last).
        width: heads of a line.
        rows: of the memory, which holds the keys of a range of positions in order.
        own: (first of the rank's own rows, first row of the memory, count) of the runs that may be read where they are.
        send: the rank's own lines for each peer; gradients come back for them.
        place: lines of the memory that come from each peer.
        sources: for each line of the memory which of the own lines, those that come, and a line of zeros it is.
        own_places: the line of the memory of each own line.
        own_lines: the line of the rank's tensors of each own line, where these are only some rows; None for all of them.
        made: launches of kernels by what they depend on, and what else is made once for these rows, also of other heads.
    """

    what: str
    kv_heads: Range
    width: int
    rows: int
    own: tuple[tuple[int, int, int], ...]
    send: RowIndex
    place: RowIndex
    sources: torch.Tensor
    own_places: torch.Tensor
    own_lines: torch.Tensor | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def is_own(self) -> bool:
        """Whether the memory would be the rank's own rows and nothing else, so that they are read where they are."""
        return self.own_lines is None and not len(self.place.numbers) and self.own == (((0, 0, self.rows),) if self.rows else ())

    @property
    def returned(self) -> torch.Tensor:
        """Which of the lines that come back, by peer, is that of each own line: (peers, own lines) int64, −1 for none."""
        if (known := self.made.get("returned")) is not None:
            return known  # type: ignore[no-any-return]
        peers = [count for count in self.send.counts if count]
        returned = self.own_places.new_full((len(peers), len(self.own_places)), -1)
        numbers = torch.arange(len(self.send.numbers), device=returned.device)
        for row, lines, places in zip(returned, self.send.numbers.split(peers), numbers.split(peers), strict=True):
            row[lines] = places
        self.made["returned"] = returned
        return returned

    def local(self, rows: slice) -> slice | None:
        """Returns rows of the memory as own rows; None if some of them are not the rank's own, or not adjacent."""
        for row, place, count in self.own:
            if place <= rows.start and rows.stop <= place + count:
                return slice(rows.start - place + row, rows.stop - place + row)
        return None

    @property
    def nbytes(self) -> int:
        lines = self.own_lines if self.own_lines is not None else self.own_places[:0]
        return sum(x.nbytes for x in (self.send.numbers, self.place.numbers, self.sources, self.own_places, lines))

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the step's heads of x (B, n, Hk, D)."""
        return x if self.num_kv_heads == x.shape[2] else x[:, :, slice(*self.kv_heads)]


def make_step(
    shards: Sequence[Sequence[Range]],
    rank: int,
    needed: Callable[[int], Needed],
    kv_heads: Range,
    span: Range,
    what: str,
    device: torch.device,
    sparse: tuple[int, tuple[int, ...]] | None = None,
) -> Step:
    """Plans a step whose memory rows are the positions of ``span``.

    Args:
        needed: what a rank needs for the step's heads.
        sparse: (g, offsets) where the rank's own row i of each of all key/value heads is row g · i + offset of its tensors.
    """
    shard, wanted, num_heads = shards[rank], needed(rank), kv_heads[1] - kv_heads[0]
    offsets = None if sparse is None else sparse[1][slice(*kv_heads)]
    # rows of heads at different offsets are lines of their own
    alike = wanted.heads == 1 and (offsets is None or len(set(offsets)) == 1)
    each, rows = 1 if alike else num_heads, span[1] - span[0]

    def moved(lines: range | np.ndarray, by: int) -> range | np.ndarray:
        if each == wanted.heads:
            return range(lines.start + by * each, lines.stop + by * each) if isinstance(lines, range) else lines + by * each
        if isinstance(lines, range):
            return range((lines.start + by) * each, (lines.stop + by) * each)
        return ((lines + by)[:, None] * each + np.arange(each)).ravel()

    stacked = np.cumsum([0, *(end - start for start, end in shard)]).tolist()
    own = tuple((row, start - span[0], end - start) for row, (start, end) in zip(stacked, shard, strict=False) if start < end)
    send, place = (list[list[Any]]([] for _ in shards) for _ in range(2))
    for peer, held in enumerate(shards):
        if peer != rank:
            send[peer] = [moved(some, stacked[run] - shard[run][0]) for run, some in needed(peer).rows(shard)]
            place[peer] = [moved(some, -span[0]) for _, some in wanted.rows(held)]
    sent, arrives = (
        RowIndex([sum(map(len, some)) for some in by_peer], on_device([*itertools.chain(*by_peer)], device)) for by_peer in (send, place)
    )
    lines = stacked[-1] * each
    own_places = torch.cat([torch.arange(at * each, (at + count) * each, device=device) for _, at, count in own] or [arrives.numbers[:0]])
    numbers = torch.arange(lines + len(arrives.numbers), device=device)
    sources = torch.full((rows * each,), lines + len(arrives.numbers), device=device)
    sources.index_copy_(0, own_places, numbers[:lines]).index_copy_(0, arrives.numbers, numbers[lines:])
    own_lines: torch.Tensor | None = None
    if sparse is not None and offsets is not None:
        # a line of all heads has one offset
        places = (np.arange(stacked[-1])[:, None] * sparse[0] + np.array(offsets[:each])) * each + np.arange(each)
        own_lines, own = on_device([places.ravel()], device), ()
    return Step(what, kv_heads, num_heads // each, rows, own, sent, arrives, sources, own_places, own_lines)


def gather(to: torch.Tensor, of: Pair, came: torch.Tensor | None, lines: torch.Tensor, step: Step, *, are_own: bool = True) -> None:
    """Writes lines of K and V, or of their gradients, to ``to`` (lines, width · B · 2·D, or what has as many numbers). ``lines``: which of
    those of ``of``, of those that came after them, and of a line of zeros. ``are_own``: ``own_lines`` numbers the lines of ``of``."""
    if has_kernels(to):
        from dilated_attention.distributed.exchange import copies_triton

        copies_triton.gather(to, of, came, lines, step, are_own=are_own)
        return
    every = _lines(of, step.width, to.dtype)
    if are_own and step.own_lines is not None:
        every = every[step.own_lines]
    if came is not None:
        every = torch.cat([every, came, came.new_zeros((1, came.shape[1]))])
    torch.index_select(every, 0, lines, out=to.view(-1, every.shape[1]))


def add(to: Pair, grads: Pair, came: torch.Tensor, step: Step) -> None:
    """Sets dk and dv (B, n, heads, D) of the rank's own keys to the sum of what it has computed, ``grads`` of the memory, and the lines
    that came, by peer. Where own keys are only some rows, the sums are added to what dk and dv hold."""
    if has_kernels(came):
        from dilated_attention.distributed.exchange import copies_triton

        copies_triton.add(to, grads, came, step)
        return
    dtype = accumulation_dtype(came.dtype)
    sums = _lines(grads, step.width, dtype)[step.own_places]
    peers = [count for count in step.send.counts if count]
    # each names a line once, so peer by peer the order of the sums is always the same
    for numbers, share in zip(step.send.numbers.split(peers), came.split(peers), strict=True):
        sums.index_add_(0, numbers, share.to(dtype))
    if step.own_lines is not None:
        sums = _lines(to, step.width, dtype).index_add_(0, step.own_lines, sums)
    B, n, heads, D = to[0].shape
    for x, some in zip(to, sums.view(n, heads, B, 2 * D).permute(2, 0, 1, 3).chunk(2, -1), strict=True):
        x.copy_(some)


def _lines(of: Pair, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of K and V, or their gradients, (B, rows, heads, D), as lines (…, width · B · 2·D)."""
    B, _, _, D = of[0].shape
    return torch.cat([x.permute(1, 2, 0, 3).to(dtype) for x in of], -1).view(-1, width * B * 2 * D)
