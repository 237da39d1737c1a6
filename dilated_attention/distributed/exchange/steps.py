"""The one exchange: each rank gets the key rows that its queries see, computes, and sends the rows' gradients back, some heads at a time.

Which rows these are, every rank works out for all ranks (``plan.py``), so nobody is asked for anything. A step brings the rows of some
key/value heads into a *memory* (rows, heads, B, 2·D), in order of position: K and V of a row and head are adjacent, so what one rank sends
another is one message. The next step's rows are in flight while one is computed. Gradients travel in the inputs' dtype; the rank that holds
a row sums what it gets in float32 (float64) and rounds once. Short calls wait for the CPU, so a step takes few operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.p2p import Wire
from dilated_attention.distributed.exchange.plan import Needed
from dilated_attention.engine.branches.problems import Range

Pair = tuple[torch.Tensor, torch.Tensor]
# steps whose keys are in memory at once: of one that is computed, and of the next one
AHEAD = 2


class RowIndex:
    """``numbers`` of rows by peer, one after the other, on a device; ``counts``: of each peer."""

    def __init__(self, by_peer: Sequence[Sequence[range | np.ndarray]], device: torch.device) -> None:
        self.counts = [sum(map(len, rows)) for rows in by_peer]
        self.total = sum(self.counts)
        rows = [np.arange(some.start, some.stop) if isinstance(some, range) else some for peer in by_peer for some in peer]
        numbers = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *rows]))
        # a copy from other memory would wait for all that the GPU has to do
        self.numbers = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


@dataclass(frozen=True, eq=False)
class Step:
    """One step on one rank. A *line* is a row of all its heads, or of one head where these need different rows.

    Args:
        what: for messages.
        kv_heads: [first, last).
        width: heads of a line.
        rows: of the memory.
        own: (first of the rank's own rows, first row of the memory, count) of the runs that it holds.
        send: the rank's own lines for each peer; gradients come back for them.
        place: lines of the memory that come from each peer.
        sources: for each line of the memory which of the own lines, those that come, and a line of zeros it is.
        is_full: no line is the line of zeros.
        own_places: the line of the memory of each own line.
    """

    what: str
    kv_heads: Range
    width: int
    rows: int
    own: tuple[tuple[int, int, int], ...]
    send: RowIndex
    place: RowIndex
    sources: torch.Tensor
    is_full: bool
    own_places: torch.Tensor

    @cached_property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @cached_property
    def is_own(self) -> bool:
        """Whether the memory would be the rank's own rows and nothing else, so that they are read where they are."""
        return not self.place.total and self.own == (((0, 0, self.rows),) if self.rows else ())

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


def make_step(
    shards: Sequence[Sequence[Range]],
    rank: int,
    needed: Callable[[int], Needed],
    kv_heads: Range,
    span: Range,
    what: str,
    device: torch.device,
) -> Step:
    """Plans a step whose memory rows are the positions of ``span``. ``needed``: what a rank needs for the step's heads."""
    shard, wanted = shards[rank], needed(rank)
    each, rows = wanted.heads, span[1] - span[0]
    stacked = np.cumsum([0, *(end - start for start, end in shard)]).tolist()
    own = tuple((row, start - span[0], end - start) for row, (start, end) in zip(stacked, shard, strict=False) if start < end)
    send, place = (list[list[Any]]([] for _ in shards) for _ in range(2))
    for peer, held in enumerate(shards):
        if peer != rank:
            send[peer] = [_moved(some, (stacked[run] - shard[run][0]) * each) for run, some in needed(peer).rows(shard)]
            place[peer] = [_moved(some, -span[0] * each) for _, some in wanted.rows(held)]
    arrives, lines = RowIndex(place, device), stacked[-1] * each
    own_places = torch.cat([torch.arange(at * each, (at + count) * each, device=device) for _, at, count in own] or [arrives.numbers[:0]])
    numbers = torch.arange(lines + arrives.total, device=device)
    sources = torch.full((rows * each,), lines + arrives.total, device=device)
    sources.index_copy_(0, own_places, numbers[:lines]).index_copy_(0, arrives.numbers, numbers[lines:])
    full, width = lines + arrives.total == rows * each, (kv_heads[1] - kv_heads[0]) // each
    return Step(what, kv_heads, width, rows, own, RowIndex(send, device), arrives, sources, full, own_places)


def _moved(rows: range | np.ndarray, by: int) -> range | np.ndarray:
    return range(rows.start + by, rows.stop + by) if isinstance(rows, range) else rows + by


def _wide(lines: torch.Tensor) -> torch.Tensor:
    """Returns lines as wider numbers, of which fewer are copied, where they can be read so."""
    return lines.view(torch.int64) if lines.shape[1] * lines.itemsize % 8 == 0 else lines


class AtHand:
    """``own``: the rank's K and V (B, n, heads, D); ``keys``: K and V (B, rows, heads, D) of the memory, once they are waited for."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.own = self.keys = k, v

    def wait(self) -> None:
        """Waits until all keys have come. A later call does nothing."""


class Arrival(AtHand):
    """A step whose keys are in flight."""

    def __init__(self, step: Step, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        super().__init__(step.of_heads(k), step.of_heads(v))
        self._step, self._lines, self._transfer = step, None, None
        if step.is_own and not step.send.total:
            return
        k, v = self.own
        B, n, heads, D = k.shape
        lines, width = len(step.own_places), step.width * B * 2 * D
        # the rank's own lines, those that come, and zeros: a kernel may load a row that it then ignores, and 0 · NaN is NaN
        every = k.new_empty((lines + step.place.total + 1, width))
        torch.cat([k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)], -1, out=every[:lines].view(n, heads, B, 2 * D))
        if not step.is_full:
            every[-1].zero_()
        wide = _wide(every)
        came = wide[lines:-1]
        self._lines = wide, every
        if step.send.total or step.place.total:
            assert wire is not None, "one process has nobody to exchange with"
            sent = wide.index_select(0, step.send.numbers)
            self._transfer = wire.start_lines(sent, step.send.counts, came, step.place.counts, f"{what}, {step.what}: K and V")

    def wait(self) -> None:
        if self._lines is None:
            return
        if self._transfer is not None:
            self._transfer.wait()
        step, (k, _), (wide, every) = self._step, self.own, self._lines
        self._lines = self._transfer = None
        if not step.is_own:
            B, _, heads, D = k.shape
            memory = wide.index_select(0, step.sources).view(every.dtype).view(step.rows, heads, B, 2 * D).permute(2, 0, 1, 3)
            self.keys = memory[..., :D], memory[..., D:]


class Returning:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: Step, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Sends back the gradients of the keys that came: ``grads`` of the step's memory, (B, rows, heads, D), None for zeros."""
        B, n, _, D = k.shape
        self._step, self._shape, self._transfer = step, (n, step.num_kv_heads, B, 2 * D), None
        if grads is None:
            grads = (k.new_zeros(()).expand(B, step.rows, step.num_kv_heads, D),) * 2
        self._grads, self._dtype = grads, k.dtype
        if not (step.place.total or step.send.total):
            return
        assert wire is not None, "one process has nobody to exchange with"
        width = step.width * B * 2 * D
        self._lines = torch.cat([x.permute(1, 2, 0, 3) for x in grads], -1).view(len(step.sources), width)
        sent = _wide(self._lines.to(k.dtype)).index_select(0, step.place.numbers)
        self._came = k.new_empty((step.send.total, width))
        what = f"backward, {step.what}: dK and dV"
        self._transfer = wire.start_lines(sent, step.place.counts, _wide(self._came), step.send.counts, what)

    def result(self) -> Pair:
        """Returns the sums of all contributions, once they have come, as dk and dv (B, n, heads, D) of the step's heads."""
        step = self._step
        if self._transfer is not None:
            self._transfer.wait()
        if not step.send.total:
            if not step.is_own:
                rows = [slice(place, place + count) for _, place, count in step.own]
                self._grads = tuple(torch.cat([x[:, :0], *[x[:, some] for some in rows]], 1) for x in self._grads)  # type: ignore[assignment]
            return self._grads[0].to(self._dtype), self._grads[1].to(self._dtype)
        sums = (self._lines if step.is_own else self._lines.index_select(0, step.own_places)).to(accumulation_dtype(self._dtype))
        came = self._came.to(sums.dtype)
        peers = [count for count in step.send.counts if count]
        # each names a line once, so peer by peer the order of the sums is always the same
        for some, numbers in zip(came.split(peers), step.send.numbers.split(peers), strict=True):
            sums.index_add_(0, numbers, some)
        sums = sums.view(self._shape).permute(2, 0, 1, 3)
        D = sums.shape[-1] // 2
        return sums[..., :D].to(self._dtype), sums[..., D:].to(self._dtype)


def forward(
    computation: Any,
    steps: Sequence[Step],
    k: torch.Tensor,
    v: torch.Tensor,
    wire: Wire | None,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Runs all steps, and ``meanwhile`` what else there is to compute, while the first keys are in flight."""
    arrivals = deque(Arrival(step, k, v, wire, "forward") for step in steps[:AHEAD])
    if meanwhile is not None:
        meanwhile()
    for index in range(len(steps)):
        computation.forward(index, arrivals[0])
        arrivals.popleft().wait()
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "forward"))


def backward(
    computation: Any,
    steps: Sequence[Step],
    k: torch.Tensor,
    v: torch.Tensor,
    wire: Wire | None,
    meanwhile: Callable[[], object] | None = None,
) -> Pair:
    """Runs all steps and returns (dk, dv) of this rank's keys, in their dtype."""
    arrivals = deque(Arrival(step, k, v, wire, "backward") for step in steps[:AHEAD])
    if meanwhile is not None:
        meanwhile()
    found: list[Pair] = []
    last: Returning | None = None
    for index, step in enumerate(steps):
        grads = computation.backward(index, arrivals[0])
        arrivals.popleft().wait()
        back = Returning(step, grads, k, wire)
        # add what came back during this step before memory for the next step is allocated
        if last is not None:
            found.append(last.result())
        last = back
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "backward"))
    assert last is not None
    found.append(last.result())
    if len(found) == 1:
        return found[0]
    dk, dv = (torch.cat(some, 2) for some in zip(*found, strict=True))
    return dk, dv
