"""Layouts in which a pattern of blocks gives all processes equally much to compute."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from dilated_attention.distributed.blocks_plan import BlockJob, entries_of
from dilated_attention.distributed.dealt import Layout
from dilated_attention.engine.plan import Range
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import as_int

# most over mean work that counts as even
EVEN = 1.02
# by which it must fall for shorter runs to be taken
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
    """Who holds which positions, so that all processes have nearly equally many pairs to compute, and equally many blocks (±1).

    Contiguous where that is even (most over mean at most 1.02), else zigzag, else runs dealt out: the one with most pairs first, to the
    process with the fewest so far that has room; in runs as long as even dealing allows, since keys near a run need not travel.

    Args:
        pattern: one that shapes alone determine.
        seq_len: N.
        world_size: W.
        num_heads: H, by which patterns differ that differ between heads.
        is_causal: as of the call.
        device: where the kept blocks are counted; a GPU is faster where there are many millions.

    Returns:
        A layout of whole blocks; ``imbalance`` says how even it is, by the pairs of the kept blocks, which kernels compute whole.

    Raises:
        ValueError, TypeError: no such pattern or sequence.
    """
    if not isinstance(pattern, BlockPattern):
        raise TypeError(f"pattern is {pattern!r} ({type(pattern).__name__}); expected a block pattern, e.g. LocalWindow(512)")
    if pattern.is_chosen:
        raise ValueError(f"pattern is {pattern!r}, which is chosen by content anew in every call; expected one that shapes determine")
    seq_len, size = as_int("seq_len", seq_len, minimum=0), as_int("world_size", world_size, minimum=1)
    work = work_of_blocks(pattern, seq_len, as_int("num_heads", num_heads, minimum=1), is_causal=is_causal, device=torch.device(device))
    unit = max(pattern.q_block, pattern.k_block)
    best: tuple[float, list[list[Range]]] | None = None
    for deal in _deals(work, size):
        blocks = deal()
        uneven = _imbalance(work, blocks)
        # shorter runs let more keys travel, so they must be worth it
        if best is None or uneven < best[0] - WORTH_IT:
            best = uneven, blocks
        if best[0] <= EVEN:
            break
    assert best is not None
    runs = tuple(tuple((first * unit, min(last * unit, seq_len)) for first, last in mine) for mine in best[1])
    return Layout(seq_len, runs, best[0])


def work_of_blocks(pattern: BlockPattern, seq_len: int, num_heads: int, *, is_causal: bool, device: torch.device) -> list[int]:
    """Pairs of the kept blocks of each max(q_block, k_block) queries."""
    unit = max(pattern.q_block, pattern.k_block)
    work = torch.zeros(-(-seq_len // unit), dtype=torch.int64, device=device)
    if not seq_len:
        return []
    job = BlockJob(pattern, ((0, seq_len),), (((0, seq_len),),), num_heads, 1, is_causal)
    for _, entries in entries_of(job, seq_len, device):
        queries = (seq_len - entries.row * pattern.q_block).clamp(max=pattern.q_block)
        keys = (seq_len - entries.column * pattern.k_block).clamp(max=pattern.k_block)
        work.index_add_(0, entries.row * pattern.q_block // unit, queries * keys)
    return work.tolist()  # type: ignore[no-any-return]


def _deals(work: list[int], size: int) -> list[Callable[[], list[list[Range]]]]:
    """Ways to deal the blocks, the preferred one first."""
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
    """Runs of ``length`` blocks, heaviest first, each to the least loaded process that has room; one that has too little takes a part."""
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


def _imbalance(work: list[int], blocks: list[list[Range]]) -> float:
    loads = [sum(sum(work[first:last]) for first, last in mine) for mine in blocks]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
