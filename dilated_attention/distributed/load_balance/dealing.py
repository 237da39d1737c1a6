"""Deals the documents of a sequence out to processes, so that several kinds of load are even at once.

A document that is too large for one process is cut into pieces of equal positions: chunks, or pairs of chunks (the i-th and the i-th last
of 2k), which have equal causal pairs. Short neighbours form one piece. Pieces are dealt out the largest first, exchanged between
processes while that makes the loads more even, and at last positions are moved until all processes hold equally many.

Loads are rows (positions, pairs of each kind of layer), in shares of what a process holds on average: 1 is even.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from dilated_attention.engine.branches.plan import Range

Runs = list[Range]
# (starts, ends) of runs → their loads (runs, kinds)
LoadsOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# neighbouring documents form a piece up to this part of a piece's largest load, so that there is something left to even out with
SMALL = 0.25
# loads are not evened out further than this
EVEN = 0.005
# rounds of exchanges between processes, each of which makes the loads more even
MOST_EXCHANGES = 64


def loads_of_runs(runs: Sequence[Range], loads: LoadsOf) -> torch.Tensor:
    """Returns the loads (runs, kinds)."""
    starts, ends = (torch.tensor([run[i] for run in runs], dtype=torch.int64) for i in (0, 1))
    return loads(starts, ends)


class Cuts:
    """Where documents may be cut: at multiples of ``unit``, counted from each document's first position.

    Args:
        documents: [start, end) of each, which partition the sequence; none is empty.
    """

    def __init__(self, documents: tuple[Range, ...], unit: int) -> None:
        self.documents, self.unit = documents, unit
        self._starts = [start for start, _ in documents]
        self.seq_len = documents[-1][1] if documents else 0

    def document(self, position: int) -> Range:
        """Returns the document of a position."""
        return self.documents[bisect.bisect_right(self._starts, position) - 1]

    def before(self, position: int) -> int:
        """Returns the last place at a position or before it."""
        if position >= self.seq_len:
            return self.seq_len
        start, _ = self.document(position)
        return start + (position - start) // self.unit * self.unit

    def within(self, start: int, end: int) -> Runs:
        """Returns a run as runs within a document each."""
        found = []
        while start < end:
            stop = min(end, self.document(start)[1])
            found.append((start, stop))
            start = stop
        return found


def contiguous(cuts: Cuts, size: int) -> list[Runs]:
    """Returns one run for each process, all equally long up to a unit."""
    whole = -(-cuts.seq_len // cuts.unit) * cuts.unit
    ends = [cuts.before(whole * rank // size) for rank in range(size + 1)]
    return [cuts.within(*run) for run in itertools.pairwise(ends)]


def zigzag(cuts: Cuts, size: int) -> list[Runs]:
    """Returns for each process two runs that are equally far from both ends, together equally long up to a unit."""
    whole = -(-cuts.seq_len // cuts.unit) * cuts.unit
    front = [cuts.before(whole * rank // (2 * size)) for rank in range(size + 1)]
    ends = [cuts.before(whole + first - whole * rank // size) for rank, first in enumerate(front)]
    # where a process holds a block or two, a place before may be behind the next process's
    back = list(itertools.accumulate(reversed(ends), max))[::-1]
    return [cuts.within(front[r], front[r + 1]) + cuts.within(back[r + 1], back[r]) for r in range(size)]


def pieces_of(cuts: Cuts, loads: torch.Tensor, size: int, largest: float, *, paired: bool) -> list[Runs]:
    """Returns the pieces of documents: runs within a document each.

    Args:
        loads: (documents, kinds).
        largest: a document with more than this load of a kind is cut.
        paired: into pairs of chunks, not chunks.
    """
    found: list[Runs] = []
    # the loads of the last piece, if it is one of short neighbours
    small: list[float] | None = None
    for (start, end), load in zip(cuts.documents, loads.tolist(), strict=True):
        most = max(load)
        if most <= largest:
            both = load if small is None else [a + b for a, b in zip(small, load, strict=True)]
            if small is None or max(both) > SMALL * largest:
                found.append([])
                both = load
            found[-1].append((start, end))
            small = both
            continue
        small = None
        count = math.ceil(most / largest)
        # as many on each process
        count = -(-count // size) * size if count > size / 2 else count
        chunks = 2 * count if paired else count
        bounds = [start + (end - start) * i // (chunks * cuts.unit) * cuts.unit for i in range(chunks)]
        runs = list(itertools.pairwise([*bounds, end]))
        for i in range(count):
            piece = [runs[i], runs[-1 - i]] if paired else [runs[i]]
            piece = [run for run in piece if run[0] < run[1]]
            if piece:
                found.append(piece)
    return found


def deal(pieces: Sequence[Runs], size: int, loads: LoadsOf) -> list[Runs]:
    """Deals pieces out to processes: the largest first, each to the process whose loads fit it best, then exchanges them."""
    flat = [run for piece in pieces for run in piece]
    if not flat:
        return [[] for _ in range(size)]
    index = torch.repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
    of_run = loads_of_runs(flat, loads)
    of_piece = torch.zeros(len(pieces), of_run.shape[1], dtype=torch.float64).index_add_(0, index, of_run)
    owner = _dealt(of_piece, size)
    _exchange(of_piece, owner, size)
    return [[run for piece, mine in zip(pieces, owner.tolist(), strict=True) if mine == rank for run in piece] for rank in range(size)]


def _dealt(loads: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the process of each piece, each of which goes where the sum of all loads' squares grows least."""
    rows = loads.tolist()
    held = [[0.0] * loads.shape[1] for _ in range(size)]
    owner = [0] * len(rows)
    for piece in sorted(range(len(rows)), key=lambda i: -max(rows[i])):
        load = rows[piece]
        rank = min(range(size), key=lambda r: sum(a * b for a, b in zip(held[r], load, strict=True)))
        owner[piece] = rank
        held[rank] = [a + b for a, b in zip(held[rank], load, strict=True)]
    return torch.tensor(owner)


def _exchange(loads: torch.Tensor, owner: torch.Tensor, size: int) -> None:
    """Exchanges pieces, one for one or one for none, between the process with the most uneven loads and others, in place."""
    nothing = torch.zeros(size, loads.shape[1], dtype=torch.float64)
    excess = nothing.index_add(0, owner, loads) - 1
    for _ in range(MOST_EXCHANGES):
        worst = excess.abs().amax(1)
        if float(worst.max()) <= EVEN:
            return
        # where nothing evens out the worst, the next one may
        if not any(_exchange_one(loads, owner, excess, nothing, rank) for rank in worst.argsort(descending=True).tolist()[:2]):
            return


def _exchange_one(loads: torch.Tensor, owner: torch.Tensor, excess: torch.Tensor, nothing: torch.Tensor, rank: int) -> bool:
    """Makes the exchange of ``rank`` with another process that lowers the sum of squares of ``excess`` most; False if there is none."""
    mine, others = (owner == rank).nonzero()[:, 0], (owner != rank).nonzero()[:, 0]
    given = torch.cat([loads[mine], nothing[:1]])
    taken, holders = torch.cat([loads[others], nothing]), torch.cat([owner[others], torch.arange(len(nothing))])
    # |moved|² + moved · difference, of moved = given − taken
    difference = excess[holders] - excess[rank]
    change = given.square().sum(1)[:, None] + (taken * (taken - difference)).sum(1) + given @ (difference - 2 * taken).T
    change.masked_fill_((holders == rank)[None], 0.0)
    least = int(change.argmin())
    if float(change.view(-1)[least]) > -1e-9:
        return False
    i, j = divmod(least, change.shape[1])
    holder = int(holders[j])
    if i < len(mine):
        owner[mine[i]] = holder
    if j < len(others):
        owner[others[j]] = rank
    moved = given[i] - taken[j]
    excess[rank] -= moved
    excess[holder] += moved
    return True


def even_out(dealt: list[Runs], cuts: Cuts, loads: LoadsOf, cost: Callable[[Range], float]) -> None:
    """Moves positions between processes, in place, until the numbers of positions that they hold differ by at most a unit.

    Args:
        cost: of a run on another process than the rest of its document, as a load.
    """
    unit = cuts.unit
    counts = [sum(end - start for start, end in mine) for mine in dealt]
    mean = sum(counts) / len(counts)
    excess: torch.Tensor | None = None
    while max(counts) - min(counts) > unit:
        if excess is None:
            owner = torch.repeat_interleave(torch.tensor([len(mine) for mine in dealt]))
            every = loads_of_runs([run for mine in dealt for run in mine], loads)
            excess = torch.zeros(len(dealt), every.shape[1], dtype=torch.float64).index_add_(0, owner, every) - 1
        high, low = counts.index(max(counts)), counts.index(min(counts))
        wanted = max(int(min(counts[high] - mean, mean - counts[low])) // unit, 1) * unit
        options: list[tuple[Range, int]] = []
        for i, (start, end) in enumerate(dealt[high]):
            if end - start >= wanted:
                options.append(((start, start + wanted), i))
                after = cuts.before(end - wanted)
                if start < after and end - after < counts[high] - counts[low]:
                    options.append(((after, end), i))
        if not options:
            longest = max(range(len(dealt[high])), key=lambda i: dealt[high][i][1] - dealt[high][i][0])
            options.append((dealt[high][longest], longest))
        moved = loads_of_runs([run for run, _ in options], loads)
        worst = torch.maximum((excess[high] - moved).abs().amax(1), (excess[low] + moved).abs().amax(1))
        best = int((worst + torch.tensor([cost(run) for run, _ in options])).argmin())
        (start, end), i = options[best]
        first, last = dealt[high].pop(i)
        dealt[high] += [run for run in ((first, start), (end, last)) if run[0] < run[1]]
        dealt[low].append((start, end))
        counts[high], counts[low] = counts[high] - (end - start), counts[low] + (end - start)
        excess[high] -= moved[best]
        excess[low] += moved[best]
