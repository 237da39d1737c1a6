"""Determines which key rows each rank needs; every rank computes this for all ranks from what all of them know, so none asks another.

A rank needs a key if one of its queries may see it: both lie in one segment of some branch, the key at the offset of a head that shares
its key/value head, and causality and window allow it. Positions are always those in the whole sequence.

``RingProblem.needed`` says which rows a rank needs, ``key_span`` the range of positions that one *memory* holds for it, and ``make_step``
which lines come from whom and where they lie in that memory. A *line* is one head of a row, with the number row · heads + head; where all
heads need the same rows, it is the row, and heads is 1.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilated_attention.distributed.sharding.layout import joined
from dilated_attention.engine.blocks.lists import block_lists, building_device
from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern import NOT_IN_BRANCH, BlockPattern, DilatedPattern
from dilated_attention.pattern.blocks.block_lists import BlockLists

_CPU = torch.device("cpu")


class KeptBlocks(NamedTuple):
    """Which key blocks the ranks need. ``edges``: (C + 1,) the positions at which the key blocks of all documents begin, and N; ``kept``:
    bool (W, K or 1, C + 2), whether a rank needs a key block for a key/value head (1 for all), with a False on either side; ``pairs``: the
    most query-key pairs of blocks that a rank computes, over all heads; ``digest``: hash of the lists, if patterns cannot be compared."""

    edges: np.ndarray
    kept: np.ndarray
    pairs: float
    digest: str

    def runs(self, rank: int, kv_heads: Range) -> list[Range]:
        """Returns the runs of positions of the key blocks that a rank needs, its own among them, for some key/value heads."""
        kept = np.logical_or.reduce(self.kept[rank, slice(*kv_heads) if self.kept.shape[1] > 1 else slice(None)])
        ends = self.edges[kept[1:] != kept[:-1]].tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))


@dataclass(frozen=True, eq=False)
class RingProblem:
    """What is computed, and which rank holds what; equal on all ranks. ``pattern``: dilated or dense attention, or None; ``documents``:
    (start, end) of each, which partition the sequence; ``shards``: each rank's position ranges in the order of its rows, none of them
    empty, ascending where there are blocks; ``window``: of dense attention; ``blocks``: a block pattern, alone or beside ``pattern``;
    ``device``: where its lists are made."""

    pattern: DilatedPattern | None
    documents: tuple[Range, ...]
    shards: tuple[tuple[Range, ...], ...]
    num_heads: int
    num_kv_heads: int
    is_causal: bool
    window: tuple[int | None, int | None] | None = None
    blocks: BlockPattern | None = None
    device: torch.device = _CPU
    _needed: dict[tuple[int, Range], Needed] = field(default_factory=dict, init=False)

    @property
    def size(self) -> int:
        return len(self.shards)

    @property
    def seq_len(self) -> int:
        return self.documents[-1][1] if self.documents else 0

    @property
    def pairs(self) -> float:
        """Query-key pairs of a rank: of dilated or dense attention the mean, of blocks the most."""
        pairs = 0.0 if self.blocks is None else self.kept.pairs
        if self.pattern is not None:
            lengths = (end - start for start, end in self.documents)
            pairs += sum(self.pattern.pairs(length, self.num_heads, is_causal=self.is_causal) for length in lengths) / self.size
        if self.window is not None and None not in self.window:
            pairs = min(pairs, (sum(self.window) + 1) * self.num_heads * self.seq_len / self.size)  # type: ignore[arg-type]
        return pairs

    @functools.cached_property
    def same_rows(self) -> bool:
        """Whether all key/value heads need the same rows."""
        return (self.blocks is None or self.kept.kept.shape[1] == 1) and (
            self.pattern is None or _taken(self.pattern, self.num_heads, self.num_kv_heads, (0, self.num_kv_heads))[0] == 1
        )

    def needed(self, rank: int, kv_heads: Range | None = None) -> Needed:
        """Returns the keys of other ranks that a rank needs, for key/value heads [first, last) or all of them."""
        kv_heads, shard = (0, self.num_kv_heads) if kv_heads is None or self.same_rows else kv_heads, self.shards[rank]
        if (found := self._needed.get((rank, kv_heads))) is None:
            wanted, heads = [Wanted(*run, b"") for run in shard], 1
            if self.pattern is not None:
                heads, taken = _taken(self.pattern, self.num_heads, self.num_kv_heads, kv_heads)
                for length, some in zip(self.pattern.segment_lengths, taken, strict=True):
                    if any(some):
                        wanted += [Wanted(low, high, some, first) for first, low, high in keys_beyond(self, length, shard)]
            if self.blocks is not None:
                wanted += [Wanted(*run, b"\1" * heads) for run in self.kept.runs(rank, kv_heads)]
            found = self._needed[rank, kv_heads] = union(wanted, heads)
        return found

    def lists_of(self, document: Range) -> BlockLists:
        """Returns the lists of a whole document, on the device or, where they are short, on the host: ranks choose their rows from them."""
        assert self.blocks is not None
        length = document[1] - document[0]
        where = building_device(self.blocks, length, length, self.num_heads, self.device)
        return block_lists(self.blocks, length, self.num_heads, is_causal=self.is_causal, device=where)

    def query_blocks(self, rank: int, document: Range) -> tuple[Range, ...]:
        """Returns the runs of query blocks of a document of which a rank holds rows, ascending and apart."""
        assert self.blocks is not None
        (start, end), block = document, self.blocks.q_block
        inside = [(max(low, start) - start, min(high, end) - start) for low, high in self.shards[rank]]
        return joined((low // block, -(-high // block)) for low, high in inside if low < high)

    @functools.cached_property
    @torch.no_grad()
    def kept(self) -> KeptBlocks:
        """Which key blocks all ranks need, from the lists of all."""
        pattern, ratio, documents = self.blocks, self.num_heads // self.num_kv_heads, self.documents
        assert pattern is not None
        # a pattern that is given by a density may differ between heads at one length but not at another
        per_head = any(pattern.at(end - start).per_head for start, end in documents)
        edges = np.concatenate([*(np.arange(*document, pattern.k_block) for document in documents), [self.seq_len]])
        kept = np.zeros((self.size, self.num_kv_heads if per_head else 1, len(edges) + 1), dtype=bool)
        blocks, digest, before = np.zeros(self.size), hashlib.sha256() if pattern.is_bound_to_process else None, 1
        for document in documents:
            lists = self.lists_of(document)
            has_row = np.zeros((self.size, 1, lists.num_rows), dtype=np.int32)
            for rank in range(self.size):
                for low, high in self.query_blocks(rank, document):
                    has_row[rank, :, low:high] = 1
            # how many query blocks of a rank keep each key block: counted where the lists are, since in a long sequence they are large
            groups, columns, lengths = lists.num_heads, lists.num_columns, lists.row_starts.diff()
            has_list = torch.from_numpy(has_row).to(lengths.device).expand(-1, groups, -1).flatten(1)
            group_start = (torch.arange(groups, device=lengths.device) * columns).repeat_interleave(lists.num_rows)
            column = group_start.repeat_interleave(lengths, output_size=lists.num_entries) + lists.columns
            keepers = has_list.new_zeros((self.size, groups * columns))
            for of_rank, has in zip(keepers, has_list, strict=True):
                of_rank.index_add_(0, column, has.repeat_interleave(lengths, output_size=lists.num_entries))
            counts = keepers.view(self.size, max(1, groups // ratio), ratio if groups > 1 else 1, columns).cpu().numpy()
            kept[..., before : before + columns] = counts.any(2)
            blocks += counts.sum((1, 2, 3)) * self.num_heads / groups
            before += columns
            if digest is not None:
                for x in (lists.row_starts, lists.columns, lists.masks, lists.bits):
                    digest.update(b"none" if x is None else x.cpu().numpy().tobytes())
        pairs = float(blocks.max()) * pattern.q_block * pattern.k_block
        return KeptBlocks(edges, kept, pairs, "" if digest is None else digest.hexdigest()[:16])


class Piece(NamedTuple):
    """Rows needed of positions [low, high): ``units``, numbers offset · heads + head below ``period`` · heads, at low and every ``period``
    positions after it."""

    low: int
    high: int
    period: int
    units: np.ndarray

    def before(self, position: int, heads: int) -> int:
        """Returns how many (row, head) are needed before a position, which is not before ``low``."""
        periods, offset = divmod(position - self.low, self.period)
        return periods * len(self.units) + bisect.bisect_left(self.units, offset * heads)


class Lines(NamedTuple):
    """``total`` line numbers: that of index i ≥ ``skipped`` is first + (i div U) · step + units[i mod U], of U ``units``."""

    total: int
    skipped: int
    first: int
    step: int
    units: np.ndarray


class Needed(NamedTuple):
    """The key rows of other ranks that a rank needs: disjoint ``pieces`` in order of position, of ``heads`` key/value heads, of which each
    has its own rows; 1 if all of them have the same."""

    heads: int
    pieces: tuple[Piece, ...]

    def lines(self, runs: Sequence[Range], places: Iterable[int]) -> Iterator[Lines]:
        """Yields the numbers row · heads + head of what is needed of ascending runs of positions, of which each begins at its row of
        ``places``."""
        pieces = iter(self.pieces)
        piece = next(pieces, None)
        for (start, end), place in zip(runs, places, strict=False):
            while piece is not None and piece.low < end:
                if (low := max(piece.low, start)) < (high := min(piece.high, end)):
                    skipped, first = piece.before(low, self.heads), (piece.low + place - start) * self.heads
                    yield Lines(piece.before(high, self.heads) - skipped, skipped, first, piece.period * self.heads, piece.units)
                if piece.high > end:
                    break
                piece = next(pieces, None)

    def count(self, runs: Sequence[Range]) -> int:
        """Returns the number of (row, head) needed of the runs; of rows where all heads have the same."""
        return sum(lines.total for lines in self.lines(runs, itertools.repeat(0)))


class Wanted(NamedTuple):
    """What a branch needs of positions [low, high).

    Args:
        taken: the bytes of bool (rate, heads): which of a group of ``rate`` positions are needed; none if the rank has these positions.
        first: where such a group begins.
    """

    low: int
    high: int
    taken: bytes
    first: int = 0


# the most ``Lines`` that are made by a launch each
_FEW_LINES = 8
# a set of rates whose pattern repeats after more (position, head) than this is taken to need all rows
_LONGEST_PERIOD = 2**24


def union(wanted: Sequence[Wanted], heads: int) -> Needed:
    """Returns what is needed for any of ``wanted`` and is not the rank's own."""
    waiting = sorted(wanted, key=itemgetter(0), reverse=True)
    pieces, active, every = list[Piece](), list[Wanted](), b"\1" * heads
    for low, high in itertools.pairwise(sorted({edge for x in waiting for edge in (x.low, x.high)})):
        active = [x for x in active if x.high > low]
        while waiting and waiting[-1].low == low:
            active.append(waiting.pop())
        rates = [len(x.taken) // heads for x in active]
        if not active or 0 in rates:
            continue
        period = min(math.lcm(*rates), high - low)
        parts = tuple([((low - x.first) % rate, x.taken) for x, rate in zip(active, rates, strict=True)])
        if period * heads > _LONGEST_PERIOD or any(x.taken == every for x in active):
            period, parts = 1, ((0, every),)
        if len(units := _units(period, heads, parts)):
            pieces.append(Piece(low, high, period, units))
    return Needed(heads, tuple(pieces))


# equal for the lengths of a pattern
@functools.lru_cache(maxsize=1024)
def _units(period: int, heads: int, parts: tuple[tuple[int, bytes], ...]) -> np.ndarray:
    """Returns the numbers offset · heads + head below period · heads that some branch takes.

    Args:
        parts: of each branch the offset at which the period begins, and its ``taken``.
    """
    mask = np.zeros((period, heads), dtype=bool)
    for begin, taken in parts:
        rows = np.frombuffer(taken, dtype=bool).reshape(-1, heads)
        mask |= rows[(begin + np.arange(period)) % len(rows)]
    return mask.ravel().nonzero()[0]


@functools.lru_cache(maxsize=256)
def _taken(pattern: DilatedPattern, num_heads: int, num_kv_heads: int, kv_heads: Range) -> tuple[int, tuple[bytes, ...]]:
    """Returns (how many of the key/value heads [first, last) have rows of their own, 1 if all need the same; for each branch the bytes of
    bool (rate, heads): which of r neighbours a head takes, of rate 1 where it takes all of them)."""
    offsets = np.array(pattern.offsets(num_heads))
    alike = bool((offsets == offsets[:, :1]).all())
    # one column stands for all key/value heads where all query heads are alike
    group, (first, last) = (num_heads, (0, 1)) if alike else (num_heads // num_kv_heads, kv_heads)
    found = []
    for rate, row in zip(pattern.dilation_rates, offsets[:, first * group : last * group], strict=True):
        taken, inside = np.zeros((rate, last - first), dtype=bool), (row != NOT_IN_BRANCH).nonzero()[0]
        taken[row[inside], inside // group] = True
        found.append((taken[:1] if taken.all() else taken).tobytes())
    return last - first, tuple(found)


def keys_beyond(problem: RingProblem, length: int, shard: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Returns (start of the segment, low, high) of the keys that a rank's queries may see in segments that reach beyond its ranges. Keys
    that overlap are one entry for several ranges in one segment, since ranges may be many."""
    left, right = problem.window or (None, None)
    if problem.is_causal:
        right = 0
    seen = set[tuple[int, int, int]]()
    for start, end in shard:
        # the keys of the segments between those of the first and of the last query are the rank's own
        for position in (start, end - 1):
            # the last document that starts at the position or before
            first, last = problem.documents[bisect.bisect_right(problem.documents, position, key=itemgetter(0)) - 1]
            first += (position - first) // length * length
            last = min(first + length, last)
            low = first if left is None else max(first, start - left)
            high = last if right is None else min(last, end + right)
            if low < high and (low < start or high > end):
                seen.add((first, low, high))
    segments = itertools.groupby(sorted(seen), itemgetter(0))
    return [(first, *run) for first, keys in segments for run in joined((low, high) for _, low, high in keys)]


class KeySpan(NamedTuple):
    """The positions [start, end) whose keys a rank gathers, and the documents on them, counted from ``start``."""

    start: int
    end: int
    documents: tuple[Range, ...]

    def seen_by(self, queries: Range, is_causal: bool) -> KeySpan:
        """Returns the span of the documents that the queries lie in, where causal without the keys behind the last query."""
        low, high = (position - self.start for position in queries)
        first = bisect.bisect_right(self.documents, low, key=itemgetter(0)) - 1
        documents = self.documents[first : bisect.bisect_left(self.documents, high, key=itemgetter(0))]
        start, end = documents[0][0], high if is_causal else documents[-1][1]
        return KeySpan(self.start + start, self.start + end, tuple((a - start, min(b, end) - start) for a, b in documents))


def key_span(problem: RingProblem, rank: int) -> KeySpan:
    """Returns a short range that holds a rank's own and needed keys, in which segments and blocks are counted as in the whole sequence."""
    pattern, block = problem.pattern, 1 if problem.blocks is None else problem.blocks.k_block
    reach = [*problem.shards[rank], *((piece.low, piece.high) for piece in problem.needed(rank).pieces)]
    if not reach:
        return KeySpan(0, 0, ())
    low, high = min(a for a, _ in reach), max(b for _, b in reach)
    documents = [(a, b) for a, b in problem.documents if a < high and b > low]
    (start, _), (last, end) = documents[0], documents[-1]
    high, step = min(end, high + (last - high) % block), block
    if pattern is not None:
        if pattern.tail != "mask" and not problem.is_causal:
            # the number of zero keys of a segment depends on what comes after it
            high = end
        # a segment that holds the whole span need not begin with it, but its offsets must be the same
        step = math.lcm(block, *(length if length < high - start else rate for length, rate in pattern.branches))
        if len(documents) > 1 or pattern.tail != "mask":
            # from the first document's beginning: each document counts its segments, and a segment its zero keys, from where it begins
            step = high
    low -= (low - start) % step
    return KeySpan(low, high, tuple((max(a, low) - low, min(b, high) - low) for a, b in documents))


# --- steps ------------------------------------------------------------------------------------------------------------------------


class RowIndex(NamedTuple):
    """``numbers`` of lines by peer, one after the other, on a device; ``counts``: of each peer."""

    counts: list[int]
    numbers: Tensor


def on_device(tables: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the tables on a device, by one copy."""
    tensor = torch.from_numpy(np.concatenate(tables))
    # a copy from other memory would wait for all that the GPU has to do
    tensor = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
    return tensor.split([len(table) for table in tables])


def numbers_of(lines: Sequence[Lines], device: torch.device) -> Tensor:
    """Returns all line numbers one after the other. A device computes them, since there are millions of them in a long sequence."""
    if len(lines) <= _FEW_LINES and all(len(some.units) == 1 for some in lines):
        # as of dense attention: no table has to be copied
        starts = [(some.first + some.skipped * some.step + int(some.units[0]), some) for some in lines]
        runs = [torch.arange(start, start + some.total * some.step, some.step, device=device) for start, some in starts]
        return torch.cat(runs or [torch.arange(0, device=device)])
    # several pieces may have the same units
    units = {id(some.units): some.units for some in lines}
    places = dict(zip(units, itertools.accumulate(map(len, units.values()), initial=0), strict=False))
    begin, table = 0, []
    for some in lines:
        table.append((some.total, some.skipped - begin, some.first, some.step, places[id(some.units)], len(some.units)))
        begin += some.total
    rows, flat = on_device([np.array(table).ravel(), np.concatenate([*units.values()])], device)
    rows = rows.view(-1, 6)
    of_lines = rows.repeat_interleave(rows[:, 0], 0, output_size=begin)
    _, shift, first, step, place, period = of_lines.unbind(1)
    index = torch.arange(begin, device=device) + shift
    periods = index // period
    return first + periods * step + flat[place + index - periods * period]


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
        sources: of each line of the memory the number of the own line that it is, or −2 − the number of a line that comes; −1 for zeros.
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
    sources: Tensor
    own_places: Tensor
    made: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def is_own(self) -> bool:
        """Whether the memory would be the rank's own rows and nothing else, so that they are read where they are."""
        return not len(self.place.numbers) and self.own == (((0, 0, self.rows),) if self.rows else ())

    @property
    def returned(self) -> Tensor:
        """Which of the lines that come back, by peer, is that of each own line: (peers, own lines), as in ``sources``."""
        if (known := self.made.get("returned")) is not None:
            return known  # type: ignore[no-any-return]
        peers = [count for count in self.send.counts if count]
        returned = self.own_places.new_full((len(peers), len(self.own_places)), -1)
        numbers = -2 - torch.arange(len(self.send.numbers), device=returned.device)
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

    def of_heads(self, x: Tensor) -> Tensor:
        """Returns the step's heads of x (B, n, Hk, D)."""
        return x if self.num_kv_heads == x.shape[2] else x[:, :, slice(*self.kv_heads)]


def make_step(problem: RingProblem, rank: int, kv_heads: Range, span: KeySpan, what: str, device: torch.device) -> Step:
    """Plans a step whose memory rows are the positions of ``span``."""
    shard, wanted = problem.shards[rank], problem.needed(rank, kv_heads)
    # where heads need different rows, each row of a head is a line of its own
    each, rows = wanted.heads, span.end - span.start
    stacked = np.cumsum([0, *(end - start for start, end in shard)]).tolist()
    own = tuple((row, start - span.start, end - start) for row, (start, end) in zip(stacked, shard, strict=False))
    send = [[*problem.needed(peer, kv_heads).lines(shard, stacked)] for peer in range(problem.size)]
    place = [[*wanted.lines(held, [start - span.start for start, _ in held])] for held in problem.shards]
    sent_counts, counts = ([sum(some.total for some in lines) for lines in side] for side in (send, place))
    sent, arrives = numbers_of([*itertools.chain(*send, *place)], device).split([sum(sent_counts), sum(counts)])
    own_places = torch.cat([torch.arange(at * each, (at + count) * each, device=device) for _, at, count in own] or [arrives[:0]])
    sources = torch.full((rows * each,), -1, device=device)
    sources[own_places], sources[arrives] = torch.arange(len(own_places), device=device), -2 - torch.arange(len(arrives), device=device)
    to_send, to_place = RowIndex(sent_counts, sent), RowIndex(counts, arrives)
    return Step(what, kv_heads, (kv_heads[1] - kv_heads[0]) // each, rows, own, to_send, to_place, sources, own_places)
