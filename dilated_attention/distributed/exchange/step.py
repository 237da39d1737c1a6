"""One step of an exchange on one rank: which rows it sends and receives, where they go, and the copies that it makes. Planned in closed
form from what all ranks know."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.hardware import has_kernels
from dilated_attention.distributed.exchange.plan import KeySpan, RingProblem
from dilated_attention.engine.branches.problems import Range

Pair = tuple[torch.Tensor, torch.Tensor]


class RowIndex(NamedTuple):
    """``numbers`` of lines by peer, one after the other, on a device; ``counts``: of each peer."""

    counts: list[int]
    numbers: torch.Tensor


def numbers_of(lines: Iterable[range | np.ndarray]) -> np.ndarray:
    """Returns the numbers of all lines, one after the other."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(x.start, x.stop) if isinstance(x, range) else x for x in lines)])


def on_device(tables: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns the tables on a device, by one copy."""
    tensor = torch.from_numpy(np.concatenate(tables))
    # a copy from other memory would wait for all that the GPU has to do
    tensor = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
    return tensor.split([len(table) for table in tables])


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
    made: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def is_own(self) -> bool:
        """Whether the memory would be the rank's own rows and nothing else, so that they are read where they are."""
        return not len(self.place.numbers) and self.own == (((0, 0, self.rows),) if self.rows else ())

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
        return sum(x.nbytes for x in (self.send.numbers, self.place.numbers, self.sources, self.own_places))

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the step's heads of x (B, n, Hk, D)."""
        return x if self.num_kv_heads == x.shape[2] else x[:, :, slice(*self.kv_heads)]


def make_step(problem: RingProblem, rank: int, kv_heads: Range, span: KeySpan, what: str, device: torch.device) -> Step:
    """Plans a step whose memory rows are the positions of ``span``."""
    shard, wanted = problem.shards[rank], problem.needed(rank, kv_heads)
    # where heads need different rows, each row of a head is a line of its own
    each, rows = wanted.heads, span.end - span.start

    def moved(lines: range | np.ndarray, by: int) -> range | np.ndarray:
        return range(lines.start + by * each, lines.stop + by * each) if isinstance(lines, range) else lines + by * each

    stacked = np.cumsum([0, *(end - start for start, end in shard)]).tolist()
    own = tuple((row, start - span.start, end - start) for row, (start, end) in zip(stacked, shard, strict=False) if start < end)
    send, place = (list[list[Any]]([] for _ in problem.shards) for _ in range(2))
    for peer, held in enumerate(problem.shards):
        if peer != rank:
            send[peer] = [moved(some, stacked[run] - shard[run][0]) for run, some in problem.needed(peer, kv_heads).rows(shard)]
            place[peer] = [moved(some, -span.start) for _, some in wanted.rows(held)]
    own_lines = numbers_of(range(at * each, (at + count) * each) for _, at, count in own)
    sent, arrives = (numbers_of(itertools.chain(*by_peer)) for by_peer in (send, place))
    lines, arrived = len(own_lines), len(arrives)
    filled = np.full(rows * each, lines + arrived)
    filled[own_lines], filled[arrives] = np.arange(lines), np.arange(lines, lines + arrived)
    to_send, to_place, sources, own_places = on_device([sent, arrives, filled, own_lines], device)
    to_peers, from_peers = ([sum(map(len, some)) for some in by_peer] for by_peer in (send, place))
    width, index = (kv_heads[1] - kv_heads[0]) // each, (RowIndex(to_peers, to_send), RowIndex(from_peers, to_place))
    return Step(what, kv_heads, width, rows, own, *index, sources, own_places)


def gather(to: torch.Tensor, of: Pair, came: torch.Tensor | None, lines: torch.Tensor, step: Step) -> None:
    """Writes lines of K and V, or of their gradients, to ``to`` (lines, width · B · 2·D, or what has as many numbers). ``lines``: which of
    those of ``of``, of those that came after them, and of a line of zeros."""
    if has_kernels(to):
        from dilated_attention.distributed.exchange import copies_triton

        copies_triton.gather(to, of, came, lines, step)
        return
    every = _lines(of, step.width, to.dtype)
    if came is not None:
        every = torch.cat([every, came, came.new_zeros((1, came.shape[1]))])
    torch.index_select(every, 0, lines, out=to.view(-1, every.shape[1]))


def add(to: Pair, grads: Pair, came: torch.Tensor, step: Step) -> None:
    """Sets dk and dv (B, n, heads, D) of the rank's own keys to the sum of what it has computed, ``grads`` of the memory, and the lines
    that came, by peer."""
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
    B, n, heads, D = to[0].shape
    for x, some in zip(to, sums.view(n, heads, B, 2 * D).permute(2, 0, 1, 3).chunk(2, -1), strict=True):
        x.copy_(some)


def _lines(of: Pair, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of K and V, or their gradients, (B, rows, heads, D), as lines (…, width · B · 2·D)."""
    B, _, _, D = of[0].shape
    return torch.cat([x.permute(1, 2, 0, 3).to(dtype) for x in of], -1).view(-1, width * B * 2 * D)
