"""Layouts that balance the work of a block pattern across processes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dilated_attention.distributed.block_exchange.plan import RingBlockProblem, entries_of
from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.engine.branches.plan import Range
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int

# query-key pairs that a GPU computes while it receives one key row (key and value) of the same head dim: 580 TFLOP/s at 4 FLOPs per pair
# and channel, 235 GB/s at 4 bytes per row and channel. Measured on 4 H200s in rings in steps of heads (benchmarks/ring_blocks.py): a
# window of 10 % received 741 MiB and took 10.0 ms with runs dealt out, 106 MiB and 7.8 ms if contiguous, and 6.7 ms without an exchange
PAIRS_PER_ROW = 2500
# shorter runs are only used if they lower the cost by at least this fraction
WORTH_IT = 0.01


def balanced_layout(
    pattern: BlockPattern,
    seq_len: int,
    world_size: int,
    num_heads: int = 1,
    *,
    is_causal: bool = False,
    device: torch.device | str = "cpu",
) -> Layout:
    """Assigns positions to processes so that all of them finish at the same time.

    Every process gets the same number of blocks (±1), and the pairs are balanced as far as this pays off. The candidates are contiguous,
    zigzag, and runs of several lengths that are dealt out: the run with the most pairs goes first, to the process that has the fewest
    pairs so far and still has room. The result is the candidate whose slowest process has the least to do, counting both pairs and keys
    received from other processes: shorter runs balance the pairs better, but more keys have to be sent.

    Args:
        pattern: a pattern that is determined by shapes alone.
        seq_len: N.
        world_size: W.
        num_heads: H; it matters to patterns that differ between heads.
        is_causal: the same value as in the attention call.
        device: where the kept blocks are counted; a GPU is faster if there are many millions of them.

    Returns:
        A layout of whole blocks. Its ``imbalance`` says how even it is, by the pairs of the kept blocks, which kernels compute whole.

    Raises:
        ValueError, TypeError: if the pattern or the sequence length is not valid.
    """
    if not isinstance(pattern, BlockPattern):
        raise TypeError(f"pattern is {pattern!r} ({type(pattern).__name__}); expected a block pattern, e.g. LocalWindow(512)")
    if pattern.is_chosen:
        raise ValueError(f"pattern is {pattern!r}, whose blocks are chosen by content in each call; expected one determined by shapes")
    seq_len, size = as_int("seq_len", seq_len, minimum=0), as_int("world_size", world_size, minimum=1)
    work = BlockWork.of(pattern, seq_len, as_int("num_heads", num_heads, minimum=1), is_causal=is_causal, device=torch.device(device))
    best, least = [], math.inf
    for deal in _deals(work.pairs.tolist(), size):
        blocks = deal()
        cost = work.cost(blocks)
        if cost < least * (1 - WORTH_IT):
            best, least = blocks, cost
    runs = tuple(tuple((first * work.unit, min(last * work.unit, seq_len)) for first, last in mine) for mine in best)
    return Layout(seq_len, runs, work.imbalance(best))


@dataclass(frozen=True, eq=False)
class BlockWork:
    """The work of each ``unit`` = max(q_block, k_block) positions, and the keys it needs.

    Args:
        pairs: (units,) int64, pairs in the kept blocks of all list groups.
        groups: the number of different block lists: 1 or the number of heads.
        needs: (needs,) int64, (group · units + unit of queries) · units + unit of keys, each combination once.
    """

    unit: int
    pairs: torch.Tensor
    groups: int
    needs: torch.Tensor

    @classmethod
    def of(cls, pattern: BlockPattern, seq_len: int, num_heads: int, *, is_causal: bool, device: torch.device) -> BlockWork:
        unit = max(pattern.q_block, pattern.k_block)
        units = -(-seq_len // unit)
        pairs = torch.zeros(units, dtype=torch.int64, device=device)
        needs: list[torch.Tensor] = []
        groups = 1
        if seq_len:
            ring_problem = RingBlockProblem(pattern, ((0, seq_len),), (((0, seq_len),),), num_heads, 1, is_causal)
            for _, entries in entries_of(ring_problem, seq_len, device):
                queries = (seq_len - entries.row * pattern.q_block).clamp(max=pattern.q_block)
                keys = (seq_len - entries.column * pattern.k_block).clamp(max=pattern.k_block)
                row, column = entries.row * pattern.q_block // unit, entries.column * pattern.k_block // unit
                pairs.index_add_(0, row, queries * keys)
                needs.append(((entries.group * units + row) * units + column).unique())
                groups = max(groups, int(entries.group.max()) + 1 if entries.group.numel() else 1)
        return cls(unit, pairs, groups, torch.cat(needs) if needs else pairs[:0])

    def cost(self, blocks: list[list[Range]]) -> float:
        """Returns the cost of the slowest process in pairs, where each row it must receive counts as ``PAIRS_PER_ROW`` pairs."""
        units, size = self.pairs.shape[0], len(blocks)
        if not units:
            return 0.0
        owner = self._owners(blocks)
        pairs = torch.zeros(size, dtype=torch.int64, device=owner.device).index_add_(0, owner, self.pairs)
        reader, column = owner[self.needs // units % units], self.needs % units
        group = self.needs // units**2
        far = reader != owner[column]
        wanted = ((group * size + reader) * units + column)[far].unique()
        rows = torch.bincount(wanted // units % size, minlength=size) * self.unit
        return float((pairs + PAIRS_PER_ROW * rows).max())

    def imbalance(self, blocks: list[list[Range]]) -> float:
        """Returns the maximum over the mean number of pairs per process."""
        total = int(self.pairs.sum())
        if not total:
            return 1.0
        pairs = torch.zeros(len(blocks), dtype=torch.int64, device=self.pairs.device).index_add_(0, self._owners(blocks), self.pairs)
        return int(pairs.max()) * len(blocks) / total

    def _owners(self, blocks: list[list[Range]]) -> torch.Tensor:
        owner = torch.zeros(self.pairs.shape[0], dtype=torch.int64, device=self.pairs.device)
        for rank, mine in enumerate(blocks):
            for first, last in mine:
                owner[first:last] = rank
        return owner


def _deals(work: list[int], size: int) -> list[Callable[[], list[list[Range]]]]:
    """Returns the candidate ways to deal out the blocks, the preferred one first."""
    count = len(work)
    found: list[Callable[[], list[list[Range]]]] = [lambda: _contiguous(count, size), lambda: _zigzag(count, size)]
    length = max(1, count // (4 * size))
    while length >= 1:
        found.append(lambda length=length: _dealt(work, size, length))  # type: ignore[misc]
        length //= 2
    return found


def _contiguous(count: int, size: int) -> list[list[Range]]:
    return [_joined([_share(count, size, rank)]) for rank in range(size)]


def _zigzag(count: int, size: int) -> list[list[Range]]:
    found, low, high = [], 0, count
    for rank in range(size):
        first, last = _share(count, size, rank)
        front = (last - first + 1) // 2
        back = last - first - front
        found.append(_joined([(low, low + front), (high - back, high)]))
        low, high = low + front, high - back
    return found


def _share(count: int, parts: int, index: int) -> Range:
    return index * count // parts, (index + 1) * count // parts


def _dealt(work: list[int], size: int, length: int) -> list[list[Range]]:
    """Deals out runs of ``length`` blocks, heaviest first, each to the least loaded process that has room.

    A run that does not fit is split, and the rest is dealt out again.
    """
    count = len(work)
    total = [0]
    for one in work:
        total.append(total[-1] + one)
    room = [_share(count, size, rank)[1] - _share(count, size, rank)[0] for rank in range(size)]
    load = [0] * size
    dealt: list[list[Range]] = [[] for _ in range(size)]
    waiting = [
        (-(total[min(first + length, count)] - total[first]), first, min(first + length, count)) for first in range(0, count, length)
    ]
    heapq.heapify(waiting)
    while waiting:
        _, first, last = heapq.heappop(waiting)
        rank = min((rank for rank in range(size) if room[rank]), key=lambda rank: (load[rank], rank))
        middle = min(last, first + room[rank])
        dealt[rank].append((first, middle))
        room[rank] -= middle - first
        load[rank] += total[middle] - total[first]
        if middle < last:
            heapq.heappush(waiting, (-(total[last] - total[middle]), middle, last))
    return [_joined(mine) for mine in dealt]


def _joined(runs: list[Range]) -> list[Range]:
    found: list[Range] = []
    for first, last in sorted(runs):
        if first == last:
            continue
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found
