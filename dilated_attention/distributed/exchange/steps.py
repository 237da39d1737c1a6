"""The one exchange: each rank gets the key rows that its queries see, computes, and sends the rows' gradients back, some heads at a time.

Which rows these are, every rank works out for all ranks (``plan.py``), so nobody is asked for anything. A step brings the rows of some
key/value heads into a *memory* (rows, heads, B, 2·D), in order of position: K and V of a row and head are adjacent, so what one rank sends
another is one message. The next step's rows are in flight while one is computed. Gradients travel in the inputs' dtype; the rank that holds
a row sums what it gets in float32 (float64) and rounds once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.p2p import Transfer, Wire
from dilated_attention.distributed.exchange.plan import Needed
from dilated_attention.engine.branches.problems import Range

Pair = tuple[torch.Tensor, torch.Tensor]
# more runs of rows than this are taken by their numbers
MOST_RUNS = 16
# steps whose keys are in memory at once: of one that is computed, and of the next one
AHEAD = 2


class RowIndex:
    """Rows of a tensor (rows, …), by peer one after the other: ``runs`` of them, or ``numbers``. ``counts``: of each peer."""

    def __init__(self, by_peer: Sequence[Sequence[range | np.ndarray]], device: torch.device) -> None:
        self.counts = [sum(map(len, rows)) for rows in by_peer]
        self.total = sum(self.counts)
        rows = [some for peer in by_peer for some in peer if len(some)]
        self.runs: list[Range] | None = None
        self.numbers: torch.Tensor | None = None
        if len(rows) <= MOST_RUNS and all(isinstance(some, range) for some in rows):
            self.runs = [(some.start, some.stop) for some in rows]  # type: ignore[union-attr]
            return
        numbers = torch.from_numpy(np.concatenate([np.asarray(some, dtype=np.int64) for some in rows]))
        # a copy from other memory would wait for all that the GPU has to do
        self.numbers = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers

    @property
    def nbytes(self) -> int:
        return 0 if self.numbers is None else self.numbers.nbytes

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of x, contiguous."""
        if self.runs is None:
            return x.index_select(0, self.numbers)  # type: ignore[arg-type]
        return torch.cat([x[:0], *[x[start:end] for start, end in self.runs]])

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the rows of x."""
        if self.runs is None:
            x.index_copy_(0, self.numbers, values)  # type: ignore[arg-type]
            return
        for (start, end), some in zip(self.runs, values.split([b - a for a, b in self.runs]), strict=True):
            x[start:end].copy_(some)

    def add(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Adds to the rows of x: peer by peer, of which each names a row once, so that the sum's order is always the same."""
        if self.runs is None:
            for some, numbers in zip(values.split(self.counts), self.numbers.split(self.counts), strict=True):  # type: ignore[union-attr]
                x.index_add_(0, numbers, some.to(x.dtype))
            return
        for (start, end), some in zip(self.runs, values.split([b - a for a, b in self.runs]), strict=True):
            x[start:end].add_(some)


@dataclass(frozen=True, eq=False)
class Step:
    """One step on one rank.

    Args:
        what: for messages.
        kv_heads: [first, last).
        width: of how many of them a row of an index is; 1, or all where they need the same rows.
        rows: of the memory.
        own: (first of the rank's own rows, first row of the memory, count) of rows that it copies.
        send, owed: rows for each peer, counted in the memory and in the rank's own rows.
        place: rows of the memory that come from each peer.
        is_full: every row of memory is filled or arrives.
    """

    what: str
    kv_heads: Range
    width: int
    rows: int
    own: tuple[tuple[int, int, int], ...]
    send: RowIndex
    owed: RowIndex
    place: RowIndex
    is_full: bool

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def is_local(self) -> bool:
        """Whether nothing travels, so that the rank's keys are read where they are."""
        return not (self.send.total or self.place.total) and self.own == (((0, 0, self.rows),) if self.rows else ())

    def is_foreign(self, part: Any) -> bool:
        """Whether a part (see ``computation.Part``) reads keys that arrive."""
        rows = part.key_rows
        return not any(place <= rows.start and rows.stop <= place + count for _, place, count in self.own)

    @property
    def nbytes(self) -> int:
        return self.send.nbytes + self.owed.nbytes + self.place.nbytes

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
    stacked = np.cumsum([0, *(end - start for start, end in shard)]).tolist()
    own = tuple((row, start - span[0], end - start) for row, (start, end) in zip(stacked, shard, strict=False) if start < end)
    send, owed, place = (list[list[Any]]([] for _ in shards) for _ in range(3))
    for peer, held in enumerate(shards):
        if peer == rank:
            continue
        for run, rows in needed(peer).rows(shard):
            send[peer].append(_moved(rows, -span[0] * wanted.heads))
            owed[peer].append(_moved(rows, (stacked[run] - shard[run][0]) * wanted.heads))
        place[peer] = [_moved(rows, -span[0] * wanted.heads) for _, rows in wanted.rows(held)]
    arrives, rows = RowIndex(place, device), span[1] - span[0]
    full = stacked[-1] * wanted.heads + arrives.total == rows * wanted.heads
    width = (kv_heads[1] - kv_heads[0]) // wanted.heads
    return Step(what, kv_heads, width, rows, own, RowIndex(send, device), RowIndex(owed, device), arrives, full)


def _moved(rows: range | np.ndarray, by: int) -> range | np.ndarray:
    return range(rows.start + by, rows.stop + by) if isinstance(rows, range) else rows + by


class AtHand:
    """``keys``: K and V (B, rows, heads, D), all of which are there."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys = k, v

    def wait(self) -> None:
        """Waits until all keys have come. A later call does nothing."""


class Arrival(AtHand):
    """A step whose keys are in flight, but for the rank's own rows, which are at hand."""

    def __init__(self, step: Step, k: torch.Tensor, v: torch.Tensor, wire: Wire | None, what: str) -> None:
        """Begins the exchange; all ranks begin theirs in the same order. ``k``, ``v``: the rank's rows (B, n, Hk, D)."""
        k, v = step.of_heads(k), step.of_heads(v)
        super().__init__(k, v)
        self.step, self._transfer = step, None
        if step.is_local:
            return
        B, _, heads, D = k.shape
        # a kernel may load a row that it then ignores, and 0 · NaN is NaN, so a row that nobody needs is filled with zeros
        memory = (k.new_empty if step.is_full else k.new_zeros)((step.rows, heads, B, 2 * D))
        keys, values = memory.permute(2, 0, 1, 3).chunk(2, -1)
        self.keys = keys, values
        for row, place, count in step.own:
            for to, x in ((keys, k), (values, v)):
                to[:, place : place + count].copy_(x[:, row : row + count])
        self._rows = memory.view(step.rows * heads // step.width, step.width * B * 2 * D)
        self._came, self._transfer = exchange(self._rows, step.send, step.place, wire, f"{what}, {step.what}: K and V")

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
            self.step.place.put(self._rows, self._came)
            self._transfer = self._came = self._rows = None  # type: ignore[assignment]


def exchange(rows: torch.Tensor, send: RowIndex, place: RowIndex, wire: Wire | None, what: str) -> tuple[torch.Tensor, Transfer | None]:
    """Sends rows and begins to receive others: returns them as they come, peer by peer, and what to wait for."""
    sent, came = send.take(rows), rows.new_empty((place.total, rows.shape[1]))
    if not (send.total or place.total):
        return came, None
    assert wire is not None, "one process has nobody to exchange with"
    return came, wire.start(_by_peer(sent, send.counts), _by_peer(came, place.counts), what)


def _by_peer(rows: torch.Tensor, counts: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    return [(peer, some) for peer, some in enumerate(rows.split(counts)) if len(some)]


class Returning:
    """The gradients of a step's keys on their way to the ranks that hold the keys."""

    def __init__(self, step: Step, grads: Pair | None, k: torch.Tensor, wire: Wire | None) -> None:
        """Sends back the gradients of the keys that came: ``grads`` of the step's memory, (B, rows, heads, D), None for zeros."""
        B, _, _, D = k.shape
        if grads is None:
            grads = (k.new_zeros(()).expand(B, step.rows, step.num_kv_heads, D),) * 2
        self._step, self._grads = step, grads
        self._came = k.new_empty((step.owed.total, step.width * B * 2 * D))
        self._transfer: Transfer | None = None
        if not (step.place.total or step.owed.total):
            return
        assert wire is not None, "one process has nobody to exchange with"
        sent = k.new_empty((0, 0))
        if step.place.total:
            # rows of both, side by side
            rows = [step.place.take(x.permute(1, 2, 0, 3).reshape(-1, step.width, B, D)) for x in grads]
            sent = torch.cat(rows, -1).to(k.dtype).flatten(1)
        to, by = _by_peer(sent, step.place.counts), _by_peer(self._came, step.owed.counts)
        self._transfer = wire.start(to, by, f"backward, {step.what}: dK and dV")

    def add_to(self, total: Pair) -> None:
        """Sums all contributions once they have come, and writes them to the step's heads of dk and dv (B, n, Hk, D)."""
        if self._transfer is not None:
            self._transfer.wait()
        step = self._step
        dk, dv = (step.of_heads(x) for x in total)
        B, n, heads, D = dk.shape
        if not step.owed.total:
            for to, grad in ((dk, self._grads[0]), (dv, self._grads[1])):
                for row, place, count in step.own:
                    to[:, row : row + count].copy_(grad[:, place : place + count])
            return
        sums = torch.empty((n, heads, B, 2 * D), dtype=accumulation_dtype(dk.dtype), device=dk.device)
        parts = sums.permute(2, 0, 1, 3).chunk(2, -1)
        for to, grad in zip(parts, self._grads, strict=True):
            for row, place, count in step.own:
                to[:, row : row + count].copy_(grad[:, place : place + count])
        step.owed.add(sums.view(n * heads // step.width, -1), self._came)
        dk.copy_(parts[0])
        dv.copy_(parts[1])


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
    total: Pair | None = None
    last: Returning | None = None
    for index, step in enumerate(steps):
        grads = computation.backward(index, arrivals[0])
        arrivals.popleft().wait()
        if len(steps) == 1 and step.is_local and grads is not None:
            # nothing is anyone else's
            return grads  # type: ignore[no-any-return]
        back = Returning(step, grads, k, wire)
        total = total or tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))  # type: ignore[assignment]
        assert total is not None
        # add what came back during this step before memory for the next step is allocated
        if last is not None:
            last.add_to(total)
        last = back
        if index + AHEAD < len(steps):
            arrivals.append(Arrival(steps[index + AHEAD], k, v, wire, "backward"))
    assert last is not None and total is not None
    last.add_to(total)
    return total
