"""Layouts whose processes have equal work: of packed documents, and of several kinds of layers at once.

Work is counted as query-key pairs, as means over heads. The causal query at position x of its document has x + 1 pairs in dense attention,
and floor((x mod w) / r) + 1 in a branch with segments of w positions and rate r, in the heads that take x. Of block patterns all pairs of a
kept block count, since kernels compute them all.

A *load* is the vector (positions, pairs of each kind of layer), each divided by its mean over processes: 1 everywhere is perfectly even. A
*run* is a range of positions, a *piece* the runs that are dealt out together to one process.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilated_attention.distributed.sharding.layout import Layout, joined
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.bounds import document_ranges
from dilated_attention.engine.ops.settings import DENSE, pattern_of
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import MAX_RANKS, as_int, as_int_tuple, check_bool
from dilated_attention.validation import check_factory

AnyPattern = BlockPattern | DilatedPattern | None
Runs = list[Range]
# a layout is balanced if its ``imbalance``, maximum over mean pairs of a process, is at most this
BALANCED = 1.03
# upper bounds of a piece's load, tried in this order: few large pieces first, since they need fewer keys of other processes
LARGEST = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
# short neighbouring documents are one piece as long as its load is at most this fraction of the upper bound
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
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Layout:
    """Assigns positions to processes so that all of them finish at the same time.

    Every process gets the same number of positions, up to one unit: a position, or with block patterns a block. The candidates are
    contiguous shards, and documents that are dealt out, the longest first: long ones are cut into chunks or pairs of chunks that are
    equally far from both ends (of one document: zigzag), short ones stay whole, so that their keys need not travel. The result is the first
    candidate whose processes have equal pairs (up to 3 %, for each pattern); if there is none, the one with the most equal pairs.

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
    # several numbers of 8 bytes are held of each position
    seq_len = as_int("seq_len", seq_len, minimum=0, maximum=2**31)
    size = as_int("world_size", world_size, minimum=1, maximum=MAX_RANKS)
    num_heads = as_int("num_heads", num_heads, minimum=1)
    check_bool("is_causal", is_causal)
    place = check_factory(device, None)["device"] or torch.device("cpu")
    documents = _documents(cu_seqlens, seq_len)
    if not documents:
        return Layout(seq_len, ((),) * size)
    pairs = [pairs_of(one or pattern_of(DENSE), documents, num_heads, is_causal=is_causal, device=place) for one in patterns]
    unit = max([1, *(max(one.q_block, one.k_block) for one in patterns if isinstance(one, BlockPattern))])
    layouts = list[Layout]()
    for layout in Dealer(pairs, documents, size, unit).candidates(is_causal=is_causal):
        layouts.append(layout)
        if layout.imbalance <= BALANCED:
            break
    return min(layouts, key=lambda layout: layout.imbalance)


def pairs_of(
    pattern: BlockPattern | DilatedPattern, documents: Sequence[Range], num_heads: int, *, is_causal: bool, device: torch.device
) -> Tensor:
    """Returns the pairs of the query at each position, (N,) float64 on the CPU, as means over heads."""
    lengths = [end - start for start, end in documents]
    if isinstance(pattern, BlockPattern):
        return _pairs_of_blocks(pattern, lengths, num_heads, is_causal, device)
    in_longest, each_length = torch.arange(max(lengths), dtype=torch.int32), torch.tensor(lengths)
    # positions within their document. What a causal query sees does not depend on the document's length: those of the longest one serve all
    positions = in_longest if is_causal else torch.cat([in_longest[:length] for length in lengths])
    total = torch.zeros(positions.shape, dtype=torch.float64)
    for (segment, rate), offsets in zip(pattern.branches, pattern.offsets(num_heads), strict=True):
        # by offset, how many heads have it
        heads_of_offset = torch.bincount(
            torch.tensor([offset for offset in offsets if offset != NOT_IN_BRANCH], dtype=torch.int64), minlength=rate
        )
        segment = min(segment, len(in_longest))
        inside = positions % segment
        # a head that takes this position takes every ``rate``-th one of the segment: the earlier ones and this one, then the later ones
        taken = inside // rate + 1
        if not is_causal:
            # how many positions are left in the document, this one included
            remaining = each_length.repeat_interleave(each_length) - positions
            taken += (torch.minimum(remaining, segment - inside) - 1) // rate
        total += heads_of_offset[inside % rate] * taken
    total /= num_heads
    return torch.cat([total[:length] for length in lengths]) if is_causal else total


def _pairs_of_blocks(pattern: BlockPattern, lengths: Sequence[int], num_heads: int, is_causal: bool, device: torch.device) -> Tensor:
    """Returns ``pairs_of`` for a block pattern on documents of these lengths."""

    @functools.cache
    def of_length(length: int) -> Tensor:
        """Returns the pairs of each query of a document, (length,) float64: all keys of the blocks that its row keeps."""
        lists = block_lists(pattern, length, num_heads, is_causal=is_causal, device=device)
        blocks_of_row = lists.row_starts.diff().view(lists.num_heads, -1).double().mean(0).cpu()
        return (blocks_of_row * pattern.k_block).repeat_interleave(pattern.q_block)[:length]

    # in a causal pattern that is prefix-stable a position keeps the same keys in every document, so the counts of the longest one serve
    # all; but a block of more queries than keys may reach key blocks after a shorter document's end, and heads draw blocks by the length
    longest = max(lengths)
    if is_causal and pattern.is_prefix_stable and pattern.q_block <= pattern.k_block and not pattern.at(longest).per_head:
        return torch.cat([of_length(longest)[:length] for length in lengths])
    return torch.cat([of_length(length) for length in lengths])


class Dealer:
    """Deals positions out to processes; documents are cut at multiples of ``unit``, counted from each document's first position."""

    def __init__(self, pairs: Sequence[Tensor], documents: Sequence[Range], size: int, unit: int) -> None:
        self.documents, self.size, self.unit, self.seq_len = documents, size, unit, documents[-1][1]
        self._starts = [start for start, _ in documents]
        # for each kind of layer: ((N + 1,), at position x the pairs of all queries below x; the mean pairs of a process). A pattern without
        # pairs needs no balance and is left out
        sums = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in pairs]
        self._kinds = [(x, float(x[-1]) / size) for x in sums if x[-1]]

    def candidates(self, *, is_causal: bool) -> Iterator[Layout]:
        """Yields layouts, those of few and long runs first."""
        # a short last unit counts as a complete one; else shards could differ by more than a unit
        rounded_len = -(-self.seq_len // self.unit) * self.unit
        cuts = [self._cut(rounded_len * rank // self.size) for rank in range(self.size + 1)]
        yield self._layout([[run] for run in itertools.pairwise(cuts)])
        for largest in LARGEST:
            for paired in (True,) if is_causal else (False, True):
                yield self._layout(self._dealt(largest, paired))

    def _layout(self, shards: Sequence[Runs]) -> Layout:
        runs = tuple(joined(sorted(mine)) for mine in shards)
        # all but the first of a load, the positions
        pairs = torch.stack([self._loads(mine).sum(0) for mine in runs])[:, 1:]
        return Layout(self.seq_len, runs, max([1.0, *pairs.flatten().tolist()]))

    def _loads(self, runs: Sequence[Range]) -> Tensor:
        """Returns the load of each run, (runs, 1 + kinds) float64."""
        starts, ends = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
        pairs = [(sums[ends] - sums[starts]) / mean for sums, mean in self._kinds]
        return torch.stack([(ends - starts).double() * (self.size / self.seq_len), *pairs], 1)

    def _cut(self, position: int) -> int:
        """Returns the largest position, at most ``position``, at which the sequence may be cut."""
        if position >= self.seq_len:
            return self.seq_len
        start = self._starts[bisect.bisect_right(self._starts, position) - 1]
        return start + (position - start) // self.unit * self.unit

    def _dealt(self, largest: float, paired: bool) -> list[Runs]:
        """Returns the runs of each process: deals pieces out, the largest first, each to the process where the sum of squares of all loads
        grows least, and improves that by exchanges."""
        pieces = self._pieces(largest, paired)
        index = torch.repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
        of_runs = self._loads([run for piece in pieces for run in piece])
        loads = torch.zeros(len(pieces), of_runs.shape[1], dtype=torch.float64).index_add_(0, index, of_runs)
        held, owner = torch.zeros(self.size, loads.shape[1], dtype=torch.float64), torch.zeros(len(pieces), dtype=torch.int64)
        for piece in loads.amax(1).argsort(descending=True, stable=True).tolist():
            # |held + load|² − |held|² = 2 · held · load + |load|², of which the last term is the same for all processes
            owner[piece] = (held @ loads[piece]).argmin()
            held[owner[piece]] += loads[piece]
        for _ in range(MOST_EXCHANGES):
            if not self._exchange(loads, owner, held - 1):
                break
            held = torch.zeros_like(held).index_add_(0, owner, loads)
        dealt: list[Runs] = [[] for _ in range(self.size)]
        for piece, rank in zip(pieces, owner.tolist(), strict=True):
            dealt[rank] += piece
        self._even_out(dealt)
        return dealt

    def _exchange(self, loads: Tensor, owner: Tensor, excess: Tensor) -> bool:
        """Swaps a piece of the most uneven process for another process's, or gives or takes a piece without return: whatever reduces the
        sum of squares of ``excess`` most. Returns False if nothing reduces it. If pieces were only given and taken, an equally even layout
        would have three times as many runs.

        Args:
            loads: (pieces, 1 + kinds).
            owner: (pieces,) int64, the process of each piece; changed in place.
            excess: (processes, 1 + kinds), the loads of processes − 1.
        """
        rank, no_piece = int(excess.abs().amax(1).argmax()), torch.zeros_like(excess)
        mine, others = (owner == rank).nonzero()[:, 0], (owner != rank).nonzero()[:, 0]
        # the last of ``given`` is none, and so are the last of ``received``, one for each process that may get a piece without return
        given, received = torch.cat([loads[mine], no_piece[:1]]), torch.cat([loads[others], no_piece])
        holders = torch.cat([owner[others], torch.arange(self.size)])
        # half of the change of the sum of squares: |moved|² + moved · difference, of moved = given − received
        difference = excess[holders] - excess[rank]
        change = given.square().sum(1)[:, None] + (received * (received - difference)).sum(1) + given @ (difference - 2 * received).T
        change[:, holders == rank] = 0.0
        i, j = divmod(int(change.argmin()), len(holders))
        if float(change[i, j]) > -1e-9:
            return False
        # an index after the last piece is no piece: the slice is empty
        owner[mine[i : i + 1]] = holders[j]
        owner[others[j : j + 1]] = rank
        return True

    def _pieces(self, largest: float, paired: bool) -> list[Runs]:
        """Returns the pieces: each document whose load exceeds ``largest`` is cut into pieces of equal length; neighbours among the others
        are one piece if they are short (``SMALL``).

        Args:
            paired: a piece of a cut document is two chunks, equally far from both ends, so that causal pieces have about as many pairs.
        """
        pieces: list[Runs] = []
        # the load of the last piece; None if that is of a document that is cut
        small: Tensor | None = None
        for (start, end), load in zip(self.documents, self._loads(self.documents), strict=True):
            most = float(load.max())
            if most <= largest:
                if small is None or float((small + load).max()) > SMALL * largest:
                    pieces.append([])
                    small = torch.zeros_like(load)
                small = small + load
                pieces[-1].append((start, end))
                continue
            small, count, units = None, math.ceil(most / largest), -(-(end - start) // self.unit)
            # a multiple of the number of processes, so that each can get equally many pieces; of few it does not matter
            count = -(-count // self.size) * self.size if count > self.size / 2 else count
            chunks = count * (1 + paired)
            # each edge is rounded up to a unit (hence both signs), since a document's last unit may be short
            edges = [min(start - (-units * i // chunks) * self.unit, end) for i in range(chunks + 1)]
            runs = list(itertools.pairwise(edges))
            for i in range(count):
                pieces.append([(low, high) for low, high in (runs[i], runs[-1 - i])[: 1 + paired] if low < high])
        return pieces

    def _even_out(self, dealt: list[Runs]) -> None:
        """Moves the first positions of the longest runs to other processes, in place, until their numbers of positions differ by at most a
        unit."""
        mean = self.seq_len / self.size
        while True:
            counts = [sum(end - start for start, end in mine) for mine in dealt]
            if max(counts) - min(counts) <= self.unit:
                return
            high, low = counts.index(max(counts)), counts.index(min(counts))
            wanted = max(int(min(counts[high] - mean, mean - counts[low])) // self.unit, 1) * self.unit
            start, end = longest = max(dealt[high], key=lambda run: run[1] - run[0])
            dealt[high].remove(longest)
            # the first positions of a causal document have the fewest pairs
            cut = start + wanted if end - start > wanted else end
            dealt[low].append((start, cut))
            dealt[high] += [(cut, end)] if cut < end else []


def _checked(pattern: AnyPattern | Sequence[AnyPattern]) -> list[AnyPattern]:
    """Returns the patterns as a list, each of a kind whose pairs can be counted."""
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


def _documents(cu_seqlens: Tensor | Sequence[int] | None, seq_len: int) -> tuple[Range, ...]:
    """Returns (start, end) of each document that is not empty."""
    cu_seqlens = (0, seq_len) if cu_seqlens is None else cu_seqlens
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(as_int_tuple("cu_seqlens", cu_seqlens))
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; expected integers (documents + 1,), "
            "e.g. int32 boundaries from 0 to N"
        )
    return document_ranges(tuple(cu_seqlens.tolist()), seq_len)
