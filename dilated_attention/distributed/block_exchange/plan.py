"""Determines which key rows each rank needs for a block pattern; every rank computes this for all ranks from the pattern alone.

A rank needs a key block if one of its query blocks keeps it for one of a step's heads, and then it needs all rows of the block. A step
is a group of key/value heads. It brings all keys that its heads need into one buffer, so that a row's softmax is computed in one launch
and nothing has to be merged. Blocks are counted from the first position of each document; they need not end where a rank's rows end.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dilated_attention.distributed.exchange.plan import RingBlockProblem
from dilated_attention.distributed.sharding.layout import Span, joined
from dilated_attention.engine.branches.plan import Range
from dilated_attention.pattern.blocks.base import Entries
from dilated_attention.pattern.blocks.kept_blocks import BLOCKS_AT_ONCE


@dataclass(frozen=True, eq=False)
class Columns:
    """The key blocks of all documents, one after the other, and where every position is stored.

    Args:
        starts, ends: (C,) positions of each block.
        first: the index of each document's first block, followed by C.
        of_position: (N,) the block of each position.
        rank_of_position, row_of_position: (N,) which rank holds each position, and as which of its rows.
        positions: the positions of each rank's rows.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    first: tuple[int, ...]
    of_position: torch.Tensor
    rank_of_position: torch.Tensor
    row_of_position: torch.Tensor
    positions: tuple[torch.Tensor, ...]

    def holders(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (C,) the lowest and the highest rank that holds rows of each block."""
        shape = self.starts.shape
        low = torch.full(shape, 2**31 - 1).scatter_reduce(0, self.of_position, self.rank_of_position, "amin")
        high = torch.full(shape, -1).scatter_reduce(0, self.of_position, self.rank_of_position, "amax")
        return low, high


@dataclass(frozen=True, eq=False)
class NeededBlocks:
    """Args:
    kept: bool (W, K or 1, C): whether a rank needs a key block for a key/value head; 1 if all heads have the same list.
    pairs: (W, K or 1) float64: number of pairs in the kept blocks, over all query heads of a key/value head.
    digest: hash of all kept blocks if patterns cannot be compared otherwise; else "".
    """

    kept: torch.Tensor
    pairs: torch.Tensor
    digest: str

    def of_heads(self, heads: Range) -> torch.Tensor:
        """Returns ``kept`` for key/value heads [first, last), bool (W, C)."""
        return self.kept[:, 0] if self.kept.shape[1] == 1 else self.kept[:, slice(*heads)].any(1)


@functools.lru_cache(maxsize=4)
def columns_of(ring_problem: RingBlockProblem) -> Columns:
    block, N = ring_problem.pattern.k_block, ring_problem.seq_len
    first, starts, ends = [0], [], []
    for start, end in ring_problem.documents:
        mine = torch.arange(start, end, block)
        starts.append(mine)
        ends.append((mine + block).clamp(max=end))
        first.append(first[-1] + mine.shape[0])
    none = torch.zeros(0, dtype=torch.int64)
    all_starts, all_ends = torch.cat([none, *starts]), torch.cat([none, *ends])
    of_position = torch.repeat_interleave(all_ends - all_starts)
    ranks, rows = torch.full((N,), -1), torch.full((N,), -1)
    positions = []
    for rank, spans in enumerate(ring_problem.shards):
        held = torch.cat([none, *(torch.arange(*span) for span in spans)])
        ranks[held] = rank
        rows[held] = torch.arange(held.shape[0])
        positions.append(held)
    assert bool((rows >= 0).all()) and sum(len(x) for x in positions) == N, "every position is held once"
    return Columns(all_starts, all_ends, tuple(first), of_position, ranks, rows, tuple(positions))


@functools.lru_cache(maxsize=32)
@torch.no_grad()
def needs_of(ring_problem: RingBlockProblem, device: torch.device) -> NeededBlocks:
    """Computes the needs of all ranks.

    Args:
        device: where the blocks are listed; the result is on the CPU.
    """
    columns = columns_of(ring_problem)
    # a pattern that is given by a density may differ between heads at one length but not at another
    per_head = any(ring_problem.pattern.at(end - start).per_head for start, end in ring_problem.documents)
    groups = ring_problem.num_heads if per_head else 1
    C = columns.starts.shape[0]
    kept = torch.zeros((ring_problem.size, groups, C), dtype=torch.bool, device=device)
    pairs = torch.zeros((ring_problem.size, groups), dtype=torch.float64, device=device)
    digest = hashlib.sha256() if ring_problem.pattern.lives_here else None
    for index, (start, end) in enumerate(ring_problem.documents):
        rows = torch.stack([_rows_held(ring_problem, spans, start, end) for spans in ring_problem.shards]).to(device)
        for first_row, entries in entries_of(ring_problem, end - start, device):
            column = columns.first[index] + entries.column
            # keys of whole blocks, because kernels compute whole blocks
            area = (end - start - entries.column * ring_problem.pattern.k_block).clamp(max=ring_problem.pattern.k_block).double()
            if digest is not None:
                said = torch.stack([entries.group, entries.row, entries.column, entries.full.long()])
                digest.update(f"{first_row}:".encode() + said.cpu().numpy().tobytes())
            for rank in range(ring_problem.size):
                held = rows[rank][entries.row]
                mine = held > 0
                if entries.num_groups == groups:
                    kept[rank, entries.group[mine], column[mine]] = True
                    pairs[rank].index_add_(0, entries.group, held * area)
                else:
                    kept[rank, :, column[mine]] = True
                    pairs[rank] += (held * area).sum()
    kept, pairs = kept.cpu(), pairs.cpu()
    ratio = ring_problem.num_heads // ring_problem.num_kv_heads
    if groups > 1:
        kept, pairs = (
            kept.unflatten(1, (ring_problem.num_kv_heads, ratio)).any(2),
            pairs.unflatten(1, (ring_problem.num_kv_heads, ratio)).sum(2),
        )
    else:
        pairs = pairs * ratio
    return NeededBlocks(kept, pairs, "" if digest is None else digest.hexdigest()[:16])


def needed_keys(ring_problem: RingBlockProblem, needs: NeededBlocks, kv_heads: Range, device: torch.device, rank: int) -> torch.Tensor:
    """Returns bool (1, N): the keys of other ranks that a rank needs for some key/value head of a step."""
    mask = needs.of_heads(kv_heads)[rank][columns_of(ring_problem).of_position]
    for start, end in ring_problem.shards[rank]:
        mask[start:end] = False
    return mask[None].to(device)


def key_span(ring_problem: RingBlockProblem, needs: NeededBlocks, rank: int) -> Range:
    """Returns the shortest range of whole key blocks that holds a rank's own and needed keys."""
    columns = columns_of(ring_problem)
    kept = needs.kept[rank].any(0)
    kept[columns.of_position[columns.positions[rank]]] = True
    blocks = kept.nonzero()[:, 0]
    return (int(columns.starts[blocks[0]]), int(columns.ends[blocks[-1]])) if len(blocks) else (0, 0)


def _rows_held(ring_problem: RingBlockProblem, spans: tuple[Range, ...], start: int, end: int) -> torch.Tensor:
    """Returns how many positions of each query block of the document a rank holds, (query blocks of the document,)."""
    block = ring_problem.pattern.q_block
    held = torch.zeros(-(-(end - start) // block), dtype=torch.int64)
    for low, high in spans:
        low, high = max(low, start) - start, min(high, end) - start
        if low < high:
            rows = torch.arange(low // block, -(-high // block))
            held[rows] += (rows * block + block).clamp(max=high) - (rows * block).clamp(min=low)
    return held


def entries_of(ring_problem: RingBlockProblem, length: int, device: torch.device) -> Iterator[tuple[int, Entries]]:
    """Yields (first row, kept blocks) of a document, for some query blocks at a time."""
    ring_problem.pattern.check(length, ring_problem.num_heads)
    pattern = ring_problem.pattern.at(length)
    pattern = pattern.causal() if ring_problem.is_causal else pattern
    heads = tuple(range(ring_problem.num_heads)) if pattern.per_head else (0,)
    whole = pattern.grid(length, None, device)
    step = max(1, int(BLOCKS_AT_ONCE / (max(pattern.cost(whole), 1.0) * len(heads))))
    for first in range(0, whole.num_rows, step):
        grid = pattern.grid(length, (first, min(first + step, whole.num_rows)), device)
        yield first, pattern.entries_of_heads(grid, heads)


def ascending_runs(spans: tuple[Span, ...]) -> tuple[Range, ...]:
    """Returns runs of positions with neighbours as one and without empty ones.

    Raises:
        AssertionError: if the runs do not ascend; blocks of such a layout would not be in order.
    """
    runs = [(start, stop) for start, stop, step in spans if start < stop]
    assert all(step == 1 for start, stop, step in spans if start < stop), "runs of positions"
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs)), "ascending"
    return joined(runs)
