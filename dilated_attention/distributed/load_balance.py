"""Layouts whose processes have equal work: of packed documents, and of several kinds of layers at once.

Work is counted as query-key pairs, by a function P(x), the pairs of all queries before position x, so those of a run [a, b) are
P(b) − P(a). Of a causal dense document, x positions have x(x + 1)/2 pairs; a branch (w, r) of a dilated pattern has

    P(x) = Σ_h ⌊x/w⌋ · f(t(w)) + f(t(x mod w)),    f(t) = t(t + 1)/2,    t(n) = ⌊n/r⌋ + [o_h < n mod r], positions taken among n

so that the sum over heads needs but the number of heads with o_h < m, for each m. Where not causal, x positions of L have x · L pairs, and
f is t(x mod w) times the positions taken in the segment. Block patterns are counted block by block, since kernels compute blocks whole.

Loads are rows (positions, pairs of each kind of layer), in shares of what a process holds on average: 1 is even.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from dilated_attention.distributed.block_exchange.plan import entries_of
from dilated_attention.distributed.exchange.plan import RingBlockProblem
from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.distributed.sharding.layout import joined
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.bounds import document_ranges
from dilated_attention.pattern import MAX_LENGTH, NOT_IN_BRANCH, BlockPattern, DilatedPattern
from dilated_attention.pattern.blocks.base import Entries
from dilated_attention.pattern.checks import MAX_RANKS, as_int, as_int_tuple, check_bool

AnyPattern = BlockPattern | DilatedPattern | None
Runs = list[Range]
DENSE = DilatedPattern((MAX_LENGTH,), (1,), "zero")
# maximum over mean pairs of a process up to which a layout counts as balanced
BALANCED = 1.03
# the largest load of a piece, in shares of what a process holds: few large pieces are tried before many small ones
LARGEST = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
# neighbouring documents form a piece up to this part of the largest load
SMALL = 0.25
# rounds of exchanges between processes
MOST_EXCHANGES = 64


def balanced_layout(
    pattern: AnyPattern | Sequence[AnyPattern],
    seq_len: int,
    world_size: int,
    num_heads: int = 1,
    *,
    is_causal: bool = False,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Layout:
    """Assigns positions to processes so that all of them finish at the same time.

    Every process gets the same number of positions, up to one unit: a position, or with block patterns a block. The candidates are
    contiguous, zigzag, and documents that are dealt out, the longest first: long ones are cut into chunks or pairs of chunks, short ones
    stay whole, so that their keys need not travel. The result is the first candidate whose processes have equal pairs (up to 3 %, for each
    pattern); if there is none, the one with the most equal pairs.

    Args:
        pattern: what is computed: a block pattern that is determined by shapes alone, a ``DilatedPattern``, None for dense attention; or
            a list of them, one for each kind of layer of a model, and the layout balances each.
        seq_len: N.
        world_size: W.
        num_heads: H; it matters to patterns that differ between heads.
        is_causal: the same value as in the attention calls.
        cu_seqlens: boundaries of packed documents, int32 (documents + 1,) or a list, from 0 to N; None for one document. Each batch of
            other documents needs a layout of its own.
        device: where kept blocks are counted; a GPU is faster if there are many millions of them.

    Returns:
        A layout whose ``imbalance`` says how even it is: maximum over mean pairs of a process, the largest over the patterns. Of block
        patterns, the pairs are those of kept blocks, which kernels compute whole, and blocks are not cut.

    Raises:
        ValueError, TypeError: if a pattern, the sequence length or the boundaries are not valid.

    >>> layout = balanced_layout(
    ...     [None, DilatedPattern((2048, 32768), (1, 16))], N, W, H,
    ...     is_causal=True, cu_seqlens=cu_seqlens)
    >>> tokens, targets = shard_sequence(
    ...     group, [tokens, targets], [1, 1], layout=layout)
    """
    patterns = _checked(pattern)
    seq_len, size = as_int("seq_len", seq_len, minimum=0), as_int("world_size", world_size, minimum=1, maximum=MAX_RANKS)
    num_heads = as_int("num_heads", num_heads, minimum=1)
    check_bool("is_causal", is_causal)
    documents = Documents(_documents(cu_seqlens, seq_len))
    if not documents.ranges:
        return Layout(seq_len, ((),) * size)
    works = [
        BlockWork(one, documents, num_heads, is_causal=is_causal, device=torch.device(device))
        if isinstance(one, BlockPattern)
        else BranchWork(one or DENSE, documents, num_heads, is_causal=is_causal)
        for one in patterns
    ]
    best: Layout | None = None
    for candidate in Dealer(works, documents, size).candidates(paired=is_causal):
        if best is None or candidate.imbalance < best.imbalance:
            best = candidate
        if best.imbalance <= BALANCED:
            break
    assert best is not None
    return best


class Documents:
    """Packed documents [start, end), which partition a sequence; none is empty."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self.ranges = ranges
        self.starts, self.ends = (torch.tensor([x[i] for x in ranges], dtype=torch.int64) for i in (0, 1))

    def place(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (index of the document, position in it); the last document's end counts as its own."""
        index = (torch.bucketize(positions, self.starts, right=True) - 1).clamp(min=0)
        return index, positions - self.starts[index]


class Dealer:
    """Deals positions out to processes; documents are cut at multiples of ``unit``, counted from each document's first position."""

    def __init__(self, works: Sequence[BranchWork | BlockWork], documents: Documents, size: int) -> None:
        self.size, self.documents, self.unit = size, documents.ranges, max(work.unit for work in works)
        self.seq_len = self.documents[-1][1]
        self._starts = [start for start, _ in self.documents]
        totals = [float(work.pairs_before(torch.tensor([self.seq_len]))) for work in works]
        assert all(map(math.isfinite, totals)), "pairs overflow"
        # a pattern that keeps nothing is even anyhow
        self._kinds = [(work, total / size) for work, total in zip(works, totals, strict=True) if total]

    def candidates(self, *, paired: bool) -> Iterator[Layout]:
        """Yields layouts, those of few and long runs first."""
        yield self._layout(self._contiguous())
        yield self._layout(self._zigzag())
        for largest in LARGEST:
            yield self._layout(self._dealt(largest, paired))

    def _layout(self, shards: Sequence[Runs]) -> Layout:
        runs = tuple(joined(sorted(mine)) for mine in shards)
        pairs = torch.stack([self._loads(mine).sum(0) for mine in runs])[:, 1:]
        return Layout(self.seq_len, runs, max(1.0, float(pairs.max())) if self._kinds else 1.0)

    def _loads(self, runs: Sequence[Range]) -> torch.Tensor:
        """Returns the positions and the pairs of each pattern of runs (runs, 1 + patterns), in shares of a process's mean."""
        starts, ends = (torch.tensor([run[i] for run in runs], dtype=torch.int64) for i in (0, 1))
        columns = [(ends - starts).double() * (self.size / self.seq_len)]
        columns += [(work.pairs_before(ends) - work.pairs_before(starts)) / mean for work, mean in self._kinds]
        return torch.stack(columns, 1)

    def _before(self, position: int) -> int:
        """Returns the last place for a cut at a position or before it."""
        if position >= self.seq_len:
            return self.seq_len
        start = self._starts[bisect.bisect_right(self._starts, position) - 1]
        return start + (position - start) // self.unit * self.unit

    def _contiguous(self) -> list[Runs]:
        """Returns one run for each process, all equally long up to a unit."""
        whole = -(-self.seq_len // self.unit) * self.unit
        return [[run] for run in itertools.pairwise(self._before(whole * rank // self.size) for rank in range(self.size + 1))]

    def _zigzag(self) -> list[Runs]:
        """Returns for each process two runs that are equally far from both ends, together equally long up to a unit."""
        size, whole = self.size, -(-self.seq_len // self.unit) * self.unit
        front = [self._before(whole * rank // (2 * size)) for rank in range(size + 1)]
        ends = [self._before(whole + first - whole * rank // size) for rank, first in enumerate(front)]
        # where a process holds a block or two, a place before may be behind the next process's
        back = list(itertools.accumulate(reversed(ends), max))[::-1]
        return [[(front[r], front[r + 1]), (back[r + 1], back[r])] for r in range(size)]

    def _dealt(self, largest: float, paired: bool) -> list[Runs]:
        """Deals pieces out, the largest first, each to the process where the sum of all loads' squares grows least."""
        pieces = self._pieces(largest, paired)
        index = torch.repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
        of_runs = self._loads([run for piece in pieces for run in piece])
        loads = torch.zeros(len(pieces), of_runs.shape[1], dtype=torch.float64).index_add_(0, index, of_runs)
        held, owner = torch.zeros(self.size, loads.shape[1], dtype=torch.float64), torch.zeros(len(pieces), dtype=torch.int64)
        for piece in loads.amax(1).argsort(descending=True, stable=True).tolist():
            owner[piece] = (held @ loads[piece]).argmin()
            held[owner[piece]] += loads[piece]
        for _ in range(MOST_EXCHANGES):
            if not self._exchange(loads, owner, held - 1):
                break
            held = torch.zeros_like(held).index_add_(0, owner, loads)
        dealt = [
            [run for piece, mine in zip(pieces, owner.tolist(), strict=True) if mine == rank for run in piece] for rank in range(self.size)
        ]
        self._even_out(dealt)
        return dealt

    def _exchange(self, loads: torch.Tensor, owner: torch.Tensor, excess: torch.Tensor) -> bool:
        """Exchanges a piece of the most uneven process for one of another, or for none, to the least sum of squares of ``excess``; returns
        whether there was such an exchange. Without them as even a layout has three times as many runs."""
        rank, nothing = int(excess.abs().amax(1).argmax()), torch.zeros_like(excess)
        mine, others = (owner == rank).nonzero()[:, 0], (owner != rank).nonzero()[:, 0]
        given, taken = torch.cat([loads[mine], nothing[:1]]), torch.cat([loads[others], nothing])
        holders = torch.cat([owner[others], torch.arange(self.size)])
        # |moved|² + moved · difference, of moved = given − taken
        difference = excess[holders] - excess[rank]
        change = given.square().sum(1)[:, None] + (taken * (taken - difference)).sum(1) + given @ (difference - 2 * taken).T
        change[:, holders == rank] = 0.0
        i, j = divmod(int(change.argmin()), len(holders))
        if float(change[i, j]) > -1e-9:
            return False
        owner[mine[i : i + 1]] = holders[j]
        owner[others[j : j + 1]] = rank
        return True

    def _pieces(self, largest: float, paired: bool) -> list[Runs]:
        """Cuts documents with more than the largest load of some kind into chunks, or pairs of the i-th and the i-th last of 2k, all with
        as many causal pairs. Short neighbours form one piece."""
        found: list[Runs] = []
        # the loads of the last piece, if it is one of short neighbours
        small: torch.Tensor | None = None
        for (start, end), load in zip(self.documents, self._loads(self.documents), strict=True):
            most = float(load.max())
            if most <= largest:
                small = load if small is None else small + load
                if small is load or float(small.max()) > SMALL * largest:
                    found.append([])
                    small = load
                found[-1].append((start, end))
                continue
            small, count = None, math.ceil(most / largest)
            # as many on each process
            count = -(-count // self.size) * self.size if count > self.size / 2 else count
            chunks = 2 * count if paired else count
            bounds = [start + (end - start) * i // (chunks * self.unit) * self.unit for i in range(chunks)]
            runs = list(itertools.pairwise([*bounds, end]))
            found += [[run for run in ({runs[i], runs[-1 - i]} if paired else {runs[i]}) if run[0] < run[1]] for i in range(count)]
        return found

    def _even_out(self, dealt: list[Runs]) -> None:
        """Moves ends of the longest runs, in place, until the numbers of positions of processes differ by at most a unit."""
        counts = [sum(end - start for start, end in mine) for mine in dealt]
        mean = self.seq_len / self.size
        while max(counts) - min(counts) > self.unit:
            high, low = counts.index(max(counts)), counts.index(min(counts))
            wanted = max(int(min(counts[high] - mean, mean - counts[low])) // self.unit, 1) * self.unit
            start, end = longest = max(dealt[high], key=lambda run: run[1] - run[0])
            dealt[high].remove(longest)
            # the first positions of a causal document have the fewest pairs
            cut = start + wanted if end - start > wanted else end
            dealt[low].append((start, cut))
            dealt[high] += [(cut, end)] if cut < end else []
            counts[high], counts[low] = counts[high] - (cut - start), counts[low] + (cut - start)


class BranchWork:
    """The pairs of a dense or dilated pattern, as means over heads."""

    unit = 1

    def __init__(self, pattern: DilatedPattern, documents: Documents, num_heads: int, *, is_causal: bool) -> None:
        self.documents, self.num_heads, self.is_causal = documents, num_heads, is_causal
        # of each branch (w, r, for each m ≤ r how many heads have an offset below m), float64, as squares of long sequences overflow int64
        self._branches: list[tuple[int, int, torch.Tensor]] = []
        for (length, rate), offsets in zip(pattern.branches, pattern.offsets(num_heads), strict=True):
            count = Counter(offset for offset in offsets if offset != NOT_IN_BRANCH)
            below = list(itertools.accumulate((count[m] for m in range(rate)), initial=0))
            self._branches.append((length, rate, torch.tensor(below, dtype=torch.float64)))
        lengths = documents.ends - documents.starts
        whole = self._of_document(lengths, lengths)
        self._before = whole.cumsum(0) - whole

    def pairs_before(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the pairs, float64, of all queries before each of the positions."""
        index, x = self.documents.place(positions)
        return self._before[index] + self._of_document(x, (self.documents.ends - self.documents.starts)[index])

    def _of_document(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Returns the pairs of the first x queries of documents."""
        total = torch.zeros(x.shape, dtype=torch.float64)
        for w, rate, below in self._branches:
            full, segment = torch.div(x, w, rounding_mode="floor"), torch.tensor(w)
            last = segment if self.is_causal else (length - full * w).clamp(max=w)
            # an int64 tensor times a number is float32, in which the pairs of a dense pattern overflow
            total += full.double() * self._of_segment(segment, segment, rate, below) + self._of_segment(x - full * w, last, rate, below)
        return total / self.num_heads

    def _of_segment(self, n: torch.Tensor, of: torch.Tensor, rate: int, below: torch.Tensor) -> torch.Tensor:
        """Returns Σ_h t(n) t(of), or where causal Σ_h t(n)(t(n) + 1)/2."""
        (a, x), (b, y) = (((whole := torch.div(m, rate, rounding_mode="floor")).double(), m - whole * rate) for m in (n, of))
        if self.is_causal:
            # a head that takes one position more has t + 1 pairs more
            return below[-1] * a * (a + 1) / 2 + below[x] * (a + 1)
        return below[-1] * a * b + a * below[y] + b * below[x] + below[torch.minimum(x, y)]


class BlockWork:
    """The pairs of a block pattern, as means over heads, of each ``unit`` = max(q_block, k_block) positions of a document."""

    def __init__(self, pattern: BlockPattern, documents: Documents, num_heads: int, *, is_causal: bool, device: torch.device) -> None:
        self.unit, self.documents = max(pattern.q_block, pattern.k_block), documents
        lengths = documents.ends - documents.starts
        # (documents + 1,) the first unit of each document
        self._first = torch.nn.functional.pad((-(-lengths // self.unit)).cumsum(0), (1, 0))
        # the number of different block lists is 1 or the number of heads
        pairs, self.groups = torch.zeros(int(self._first[-1]), dtype=torch.float64, device=device), 1
        lengths, first = lengths.to(device), self._first.to(device)
        for document, x in _listed(pattern, lengths, num_heads, is_causal=is_causal):
            queries = (lengths[document] - x.row * pattern.q_block).clamp(max=pattern.q_block)
            keys = (lengths[document] - x.column * pattern.k_block).clamp(max=pattern.k_block)
            pairs.index_add_(0, first[document] + x.row * pattern.q_block // self.unit, (queries * keys).double())
            self.groups = max(self.groups, x.num_groups)
        self._before = torch.nn.functional.pad(pairs.cpu().cumsum(0), (1, 0)) / self.groups

    def pairs_before(self, positions: torch.Tensor) -> torch.Tensor:
        """See ``BranchWork``; of positions where units begin or documents end."""
        index, x = self.documents.place(positions)
        return self._before[self._first[index] - (-x // self.unit)]


def _listed(pattern: BlockPattern, lengths: torch.Tensor, num_heads: int, *, is_causal: bool) -> Iterator[tuple[torch.Tensor, Entries]]:
    """Yields the kept blocks of documents of these lengths, with the index of each block's document."""

    @functools.cache
    def of_length(length: int) -> list[Entries]:
        problem = RingBlockProblem(pattern, ((0, length),), (((0, length),),), num_heads, 1, is_causal)
        return [entries for _, entries in entries_of(problem, length, lengths.device)]

    longest = of_length(int(lengths.max()))
    # the rows of a causal pattern that is the same in every sequence are the first of the longest document's; a block of more queries than
    # keys may hold keys behind a document's last
    if is_causal and pattern.is_prefix_stable and pattern.q_block <= pattern.k_block and len(longest) == longest[0].num_groups == 1:
        (x,) = longest
        counts = torch.searchsorted(x.row, -(-lengths // pattern.q_block))
        document = torch.repeat_interleave(counts)
        index = torch.arange(len(document), device=lengths.device) - (counts.cumsum(0) - counts)[document]
        yield document, Entries(x.group[index], x.row[index], x.column[index], x.full[index], x.key[index], 1)
        return
    for i, length in enumerate(lengths.tolist()):
        for entries in of_length(length):
            yield torch.full_like(entries.row, i), entries


def _checked(pattern: AnyPattern | Sequence[AnyPattern]) -> list[AnyPattern]:
    patterns = list(pattern) if isinstance(pattern, (list, tuple)) else [pattern]
    if not patterns:
        raise ValueError("pattern is an empty list; expected a pattern for each kind of layer, or None for dense attention")
    for one in patterns:
        if not (one is None or isinstance(one, (BlockPattern, DilatedPattern))):
            raise TypeError(
                f"pattern is {one!r} ({type(one).__name__}); expected a block pattern, e.g. LocalWindow(512), a DilatedPattern, None for "
                "dense attention, or a list of them"
            )
        if isinstance(one, BlockPattern) and one.is_chosen:
            raise ValueError(f"pattern is {one!r}, whose blocks are chosen by content in each call; expected one determined by shapes")
    return patterns  # type: ignore[return-value]


def _documents(cu_seqlens: torch.Tensor | Sequence[int] | None, seq_len: int) -> tuple[Range, ...]:
    """Returns the documents that are not empty."""
    if cu_seqlens is None:
        return ((0, seq_len),) if seq_len else ()
    if not isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = torch.tensor(as_int_tuple("cu_seqlens", cu_seqlens))
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; expected integers (documents + 1,), "
            "e.g. int32 boundaries from 0 to N"
        )
    return document_ranges(tuple(cu_seqlens.tolist()), seq_len)
