"""A rank's part of a block-sparse call as a schedule: every row that is copied, sent, received or summed is determined once, in advance.

A step's memory is (rows, 2, B, heads, D). K and V of a row are adjacent, so that what one rank sends another is one message. First come
the rows of the buffer that kernels read, then the rows packed for other ranks, then received rows that must be put in order before they
can be read. Messages hold rows by ascending position. If each key block has one holder, the buffer stores the key blocks rank by rank,
so that a message arrives where kernels read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.block_lists import BlockLists
from dilated_attention.distributed.block_exchange.lists import RankLists, lists_of_buffer, lists_of_heads, rank_lists
from dilated_attention.distributed.block_exchange.plan import Columns, RingBlockProblem, columns_of, needs_of
from dilated_attention.engine.branches.plan import Range
from dilated_attention.fork import cached_property


@dataclass(frozen=True, eq=False)
class Queries:
    """The query rows of a launch: whole blocks, of which the rank may hold only a part.

    Args:
        rows: the range [first, last) of the rank's rows if these are all of the launch's rows; else None.
        held, place: the rank's rows, and their indices among the launch's rows.
        positions: (L,) positions in the whole sequence.
    """

    rows: slice | None
    held: torch.Tensor
    place: torch.Tensor
    positions: torch.Tensor

    def of(self, x: torch.Tensor, dim: int, value: float = 0.0) -> torch.Tensor:
        """Gathers the launch's rows of the rank's x along ``dim``; rows that the rank does not hold are ``value``."""
        if self.rows is not None:
            return x.narrow(dim, self.rows.start, self.rows.stop - self.rows.start)
        shape = list(x.shape)
        shape[dim] = len(self.positions)
        return x.new_full(shape, value).index_copy_(dim, self.place, x.index_select(dim, self.held))

    def put(self, x: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Writes the launch's rows to the rank's x."""
        if self.rows is not None:
            self.of(x, dim).copy_(values)
        else:
            x.index_copy_(dim, self.held, values.index_select(dim, self.place).to(x.dtype))


@dataclass(frozen=True, eq=False)
class BlockLaunch:
    """One document's rows of a step. ``keys`` are rows of the buffer, with positions ``key_positions``."""

    queries: Queries
    keys: slice
    key_positions: torch.Tensor
    lists: BlockLists


@dataclass(frozen=True, eq=False)
class RowMessage:
    """Rows sent to or received from a peer: a contiguous range of memory or, for gradients, arbitrary rows."""

    peer: int
    rows: slice | torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockStep:
    """Some key/value heads on one rank.

    Args:
        heads, kv_heads: the ranges of query heads and of key/value heads.
        exchanges: whether any rank sends anything.
        in_place: whether the buffer is the rank's own rows, without a copy.
        buffer_rows, memory_rows: rows of the buffer, and of the whole memory, including packed rows and rows to be put in order.
        filled, filled_from: the rows of memory that are copies of the rank's own rows, and which rows these are.
        sends, receives: messages, whose rows are in memory.
        put, put_from: rows of the buffer that are copied from the end of memory once they have arrived.
        returns: the buffer rows whose gradients are sent back to each peer.
        came_rows: number of rows of gradients that come back.
        arrivals: the messages of these rows.
        own_at: (n,) int32 buffer row of each of the rank's rows; −1 if its own queries do not need it.
        came_at: (peers, n) int32 row among those that come back; −1 if none does.
    """

    heads: Range
    kv_heads: Range
    exchanges: bool
    in_place: bool
    buffer_rows: int
    memory_rows: int
    filled: torch.Tensor
    filled_from: torch.Tensor
    sends: tuple[RowMessage, ...]
    receives: tuple[RowMessage, ...]
    put: torch.Tensor
    put_from: slice
    launches: tuple[BlockLaunch, ...]
    returns: tuple[RowMessage, ...]
    came_rows: int
    arrivals: tuple[RowMessage, ...]
    own_at: torch.Tensor
    came_at: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockSchedule:
    ring_problem: RingBlockProblem
    rank: int
    steps: tuple[BlockStep, ...]
    queries: tuple[Queries, ...]

    @cached_property
    def exchanges(self) -> bool:
        return any(step.exchanges for step in self.steps)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the lists, which take most of the memory."""
        lists = {id(launch.lists): launch.lists for step in self.steps for launch in step.launches}
        return sum(one.nbytes for one in lists.values())

    @cached_property
    def is_one_launch(self) -> bool:
        """Whether there is a single launch and its results are those of the rank."""
        return len(self.steps) == len(self.queries) == 1 and self.queries[0].rows is not None


@torch.no_grad()
def make_block_schedule(ring_problem: RingBlockProblem, rank: int, head_steps: tuple[int, ...], device: torch.device) -> BlockSchedule:
    """Makes the schedule of one rank.

    Args:
        head_steps: number of key/value heads in each step.
    """
    assert sum(head_steps) == ring_problem.num_kv_heads
    columns, needs = columns_of(ring_problem), needs_of(ring_problem, device)
    mine = rank_lists(ring_problem, rank, device)
    queries = tuple(_queries(ring_problem, rank, columns, part, device) for part in mine)
    ratio = ring_problem.num_heads // ring_problem.num_kv_heads
    steps: list[BlockStep] = []
    first = 0
    for count in head_steps:
        kv_heads = (first, first + count)
        heads = (first * ratio, (first + count) * ratio)
        first += count
        if steps and needs.kept.shape[1] == 1:
            # with one list for all heads, steps differ only in their heads
            steps.append(replace(steps[0], heads=heads, kv_heads=kv_heads))
            continue
        parts = [replace(part, lists=lists_of_heads(part.lists, heads)) for part in mine]
        steps.append(_Maker(ring_problem, rank, columns, needs.of_heads(kv_heads), parts, queries, device).step(heads, kv_heads))
    return BlockSchedule(ring_problem, rank, tuple(steps), queries)


def _queries(ring_problem: RingBlockProblem, rank: int, columns: Columns, part: RankLists, device: torch.device) -> Queries:
    positions = part.positions + ring_problem.documents[part.document][0]
    place = (columns.rank_of_position[positions] == rank).nonzero()[:, 0]
    held = columns.row_of_position[positions[place]]
    rows = slice(int(held[0]), int(held[-1]) + 1) if len(place) == len(positions) else None
    return Queries(rows, held.to(device), place.to(device), positions.to(device))


class _Maker:
    """Makes the steps of one rank."""

    def __init__(
        self,
        ring_problem: RingBlockProblem,
        rank: int,
        columns: Columns,
        need: torch.Tensor,
        parts: list[RankLists],
        queries: tuple[Queries, ...],
        device: torch.device,
    ) -> None:
        self.ring_problem, self.rank, self.columns, self.need = ring_problem, rank, columns, need
        self.parts, self.queries, self.device = parts, queries, device
        self.others = [peer for peer in range(ring_problem.size) if peer != rank]
        self.mine = columns.positions[rank]
        self._needed: dict[Range, torch.Tensor] = {}

    def step(self, heads: Range, kv_heads: Range) -> BlockStep:
        c, me = self.columns, self.rank
        lows, highs = c.holders()
        wanted = self.need[me].nonzero()[:, 0]
        in_place = self._lies_in_place(wanted, lows, highs)
        launches, at = self._launches_in_place(wanted) if in_place else self._launches(wanted, lows, highs)
        rows = len(self.mine) if in_place else int((c.ends[wanted] - c.starts[wanted]).sum())
        # rows of memory that are copies of own rows: those that own queries need, then those that others need and that must be packed
        own = self._needed_of(me, me)
        filled, filled_from = ([], []) if in_place else ([at[own]], [c.row_of_position[own]])
        end = 0 if in_place else rows
        packed: list[tuple[torch.Tensor, int]] = []
        sends = []
        for peer in self.others:
            positions = self._needed_of(peer, me)
            if not len(positions):
                continue
            stretch = None if in_place else _stretch(at[positions])
            if stretch is None:
                first = next((first for other, first in packed if torch.equal(other, positions)), None)
                if first is None:
                    first = end
                    packed.append((positions, first))
                    filled.append(torch.arange(first, first + len(positions)))
                    filled_from.append(c.row_of_position[positions])
                    end += len(positions)
                stretch = slice(first, first + len(positions))
            sends.append(RowMessage(peer, stretch))
        receives, returns, put = [], [], []
        first_put = end
        for peer in self.others:
            positions = self._needed_of(me, peer)
            if not len(positions):
                continue
            stretch = _stretch(at[positions])
            if stretch is None:
                put.append(at[positions])
                receives.append(RowMessage(peer, slice(end, end + len(positions))))
                returns.append(RowMessage(peer, at[positions].to(self.device)))
                end += len(positions)
            else:
                receives.append(RowMessage(peer, stretch))
                returns.append(RowMessage(peer, stretch))
        own_at = at[self.mine].to(torch.int32)
        arrivals, came_at, came_rows = self._arrivals()
        exchanges = any(
            bool(len(self._needed_of(a, b))) for a in range(self.ring_problem.size) for b in range(self.ring_problem.size) if a != b
        )
        none = [torch.zeros(0, dtype=torch.int64)]
        return BlockStep(
            heads=heads,
            kv_heads=kv_heads,
            exchanges=exchanges,
            in_place=in_place,
            buffer_rows=rows,
            memory_rows=end,
            filled=torch.cat(none + filled).to(self.device),
            filled_from=torch.cat(none + filled_from).to(self.device),
            sends=tuple(sends),
            receives=tuple(receives),
            put=torch.cat(none + put).to(self.device),
            put_from=slice(first_put, end),
            launches=launches,
            returns=tuple(returns),
            came_rows=came_rows,
            arrivals=arrivals,
            own_at=own_at.to(self.device),
            came_at=came_at.to(self.device),
        )

    def _needed_of(self, reader: int, holder: int) -> torch.Tensor:
        """Returns the positions that ``holder`` has and ``reader`` needs, ascending: what the one sends the other."""
        if (reader, holder) not in self._needed:
            positions = self.columns.positions[holder]
            self._needed[reader, holder] = positions[self.need[reader][self.columns.of_position[positions]]]
        return self._needed[reader, holder]

    def _lies_in_place(self, wanted: torch.Tensor, lows: torch.Tensor, highs: torch.Tensor) -> bool:
        """Whether nothing is needed from other ranks and every needed block is aligned with the blocks of the rank's own rows."""
        c, size = self.columns, self.ring_problem.pattern.k_block
        if not bool(((lows[wanted] == self.rank) & (highs[wanted] == self.rank)).all()):
            return False
        for part in self.parts:
            document = part.document
            mine = wanted[(wanted >= c.first[document]) & (wanted < c.first[document + 1])]
            rows = self._own_rows(document)
            first, last = c.row_of_position[c.starts[mine]], c.row_of_position[c.ends[mine] - 1] + 1
            ragged = (last - first != size) & (last != rows.stop)
            if bool(((first - rows.start) % size != 0).any() or (last - first != c.ends[mine] - c.starts[mine]).any() or ragged.any()):
                return False
        return True

    def _own_rows(self, document: int) -> slice:
        """Returns the rank's rows of a document, which are contiguous."""
        start, end = self.ring_problem.documents[document]
        first = int(torch.searchsorted(self.mine, start))
        return slice(first, int(torch.searchsorted(self.mine, end)))

    def _launches_in_place(self, wanted: torch.Tensor) -> tuple[tuple[BlockLaunch, ...], torch.Tensor]:
        """Returns the launches, and for each position its row in the buffer, or −1."""
        c, ring_problem = self.columns, self.ring_problem
        launches = []
        for part, queries in zip(self.parts, self.queries, strict=True):
            document = part.document
            first, last = c.first[document], c.first[document + 1]
            rows = self._own_rows(document)
            mapping = torch.full((last - first,), -1)
            mine = wanted[(wanted >= first) & (wanted < last)]
            mapping[mine - first] = (c.row_of_position[c.starts[mine]] - rows.start) // ring_problem.pattern.k_block
            lists = lists_of_buffer(part.lists, mapping, rows.stop - rows.start)
            launches.append(BlockLaunch(queries, rows, self.mine[rows].to(self.device), lists))
        at = torch.full((ring_problem.seq_len,), -1)
        at[self.mine] = torch.arange(len(self.mine))
        return tuple(launches), at

    def _launches(self, wanted: torch.Tensor, lows: torch.Tensor, highs: torch.Tensor) -> tuple[tuple[BlockLaunch, ...], torch.Tensor]:
        """Returns the launches on a buffer, and for each position its row there, or −1."""
        c, ring_problem = self.columns, self.ring_problem
        launches, begins = [], torch.full((len(c.starts),), -1)
        offset = 0
        for part, queries in zip(self.parts, self.queries, strict=True):
            first, last = c.first[part.document], c.first[part.document + 1]
            mine = wanted[(wanted >= first) & (wanted < last)]
            num_keys = int((c.ends - c.starts)[mine].sum())
            chosen = mine[_by_rank(mine, lows, highs, last - 1)]
            lists = self._moved(part, chosen, num_keys)
            if part.lists.mask_kind == "interval" and lists.mask_kind != "interval" and not torch.equal(chosen, mine):
                # in order of position an interval may stay an interval of buffer rows, but then received rows have to be copied
                moved = self._moved(part, mine, num_keys)
                if moved.mask_kind == "interval":
                    chosen, lists = mine, moved
            sizes = (c.ends - c.starts)[chosen]
            begins[chosen] = offset + sizes.cumsum(0) - sizes
            positions = torch.repeat_interleave(c.starts[chosen] + offset - begins[chosen], sizes, output_size=num_keys)
            positions += torch.arange(num_keys)
            launches.append(BlockLaunch(queries, slice(offset, offset + num_keys), positions.to(self.device), lists))
            offset += num_keys
        begin = begins[c.of_position]
        inside = torch.arange(ring_problem.seq_len) - c.starts[c.of_position]
        return tuple(launches), torch.where(begin < 0, -1, begin + inside)

    def _moved(self, part: RankLists, blocks: torch.Tensor, num_keys: int) -> BlockLists:
        """Returns a document's lists for a buffer that holds these key blocks in this order."""
        first, last = self.columns.first[part.document], self.columns.first[part.document + 1]
        mapping = torch.full((last - first,), -1)
        mapping[blocks - first] = torch.arange(len(blocks))
        return lists_of_buffer(part.lists, mapping, num_keys)

    def _arrivals(self) -> tuple[tuple[RowMessage, ...], torch.Tensor, int]:
        """Returns the messages of gradients that come back, the row of each (peer, own row) among them, and the number of these rows."""
        arrivals, rows = [], []
        end = 0
        for peer in self.others:
            positions = self._needed_of(peer, self.rank)
            if not len(positions):
                continue
            arrivals.append(RowMessage(peer, slice(end, end + len(positions))))
            at = torch.full((len(self.mine),), -1, dtype=torch.int32)
            at[self.columns.row_of_position[positions]] = torch.arange(end, end + len(positions), dtype=torch.int32)
            rows.append(at)
            end += len(positions)
        return tuple(arrivals), torch.stack(rows) if rows else torch.zeros((0, len(self.mine)), dtype=torch.int32), end


def _by_rank(blocks: torch.Tensor, lows: torch.Tensor, highs: torch.Tensor, last: int) -> torch.Tensor:
    """Orders a document's key blocks rank by rank, so that each rank's message arrives in place; a short last block stays last.

    Keeps them in order of position if some blocks are split between two ranks.
    """
    holders = lows[blocks].clone()
    if not torch.equal(holders, highs[blocks]):
        return torch.arange(len(blocks))
    if len(blocks) and int(blocks[-1]) == last:
        holders[holders == holders[-1]] = 2**31 - 1
    return holders.argsort(stable=True)


def _stretch(rows: torch.Tensor) -> slice | None:
    """Returns the rows as a slice if they are contiguous, else None."""
    first = int(rows[0])
    if first < 0 or not torch.equal(rows, torch.arange(first, first + len(rows))):
        return None
    return slice(first, first + len(rows))
