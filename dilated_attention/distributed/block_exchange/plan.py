"""Determines which key rows each rank needs for a block pattern. Every rank computes this for all ranks from what all of them know, so none
asks another.

A rank needs all rows of a key block if one of its query blocks keeps it for one of a step's heads. Blocks are counted from the first
position of each document; they need not end where a rank's rows end.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dilated_attention.distributed.exchange.plan import Needed, RingBlockProblem, RingProblem, Wanted, union, wanted_keys
from dilated_attention.distributed.exchange.setup import FLOPS, head_steps
from dilated_attention.distributed.sharding.layout import Span, joined
from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern.blocks.base import Entries
from dilated_attention.pattern.blocks.kept_blocks import BLOCKS_AT_ONCE


@dataclass(frozen=True, eq=False)
class Columns:
    """The key blocks of all documents, one after the other. ``starts, ends``: (C,) positions of each block; ``first``: index of each
    document's first block, followed by C."""

    starts: torch.Tensor
    ends: torch.Tensor
    first: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NeededBlocks:
    """``kept``: bool (W, K or 1, C), whether a rank needs a key block for a key/value head (1 for all); ``pairs``: (W, K or 1) float64,
    pairs in the kept blocks over all query heads of a key/value head; ``digest``: hash of the kept blocks, if patterns cannot be
    compared."""

    kept: torch.Tensor
    pairs: torch.Tensor
    digest: str

    def of_heads(self, heads: Range) -> torch.Tensor:
        """Returns ``kept`` for key/value heads [first, last), bool (W, C)."""
        return self.kept[:, 0] if self.kept.shape[1] == 1 else self.kept[:, slice(*heads)].any(1)


@functools.lru_cache(maxsize=4)
def columns_of(ring_problem: RingBlockProblem) -> Columns:
    block = ring_problem.pattern.k_block
    first, starts, ends = [0], [], []
    for start, end in ring_problem.documents:
        mine = torch.arange(start, end, block)
        starts.append(mine)
        ends.append((mine + block).clamp(max=end))
        first.append(first[-1] + mine.shape[0])
    none = torch.zeros(0, dtype=torch.int64)
    return Columns(torch.cat([none, *starts]), torch.cat([none, *ends]), tuple(first))


@functools.lru_cache(maxsize=32)
@torch.no_grad()
def needs_of(ring_problem: RingBlockProblem, device: torch.device) -> NeededBlocks:
    """Computes the needs of all ranks, on the CPU; blocks are listed on ``device``."""
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


def kept_runs(ring_problem: RingBlockProblem, needs: NeededBlocks, rank: int, kv_heads: Range | None = None) -> list[Range]:
    """Returns the runs of positions of the key blocks that a rank needs, its own among them, for some of these heads or of all."""
    columns = columns_of(ring_problem)
    kept = needs.of_heads(kv_heads or (0, ring_problem.num_kv_heads))[rank]
    starts, ends = columns.starts[kept], columns.ends[kept]
    cuts = (starts[1:] != ends[:-1]).nonzero()[:, 0]
    firsts, lasts = torch.cat([starts[:1], starts[1:][cuts]]), torch.cat([ends[:-1][cuts], ends[-1:]])
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def needed_keys(
    ring_problem: RingBlockProblem, needs: NeededBlocks, rank: int, kv_heads: Range, branches: RingProblem | None = None
) -> Needed:
    """Returns the keys of other ranks that a rank needs for a step's heads, for a kept block or for ``branches``."""
    wanted, heads = ([], 1) if branches is None else wanted_keys(branches, rank, kv_heads)
    wanted += [Wanted(*run) for run in kept_runs(ring_problem, needs, rank, kv_heads)]
    return union(wanted, ring_problem.shards[rank], heads)


def key_span(ring_problem: RingBlockProblem, needs: NeededBlocks, rank: int) -> Range:
    """Returns the shortest range of whole key blocks that holds a rank's own and needed keys."""
    runs, block = kept_runs(ring_problem, needs, rank), ring_problem.pattern.k_block
    if own := ring_problem.shards[rank]:
        for position in (own[0][0], own[-1][1] - 1):
            start, end = next((a, b) for a, b in ring_problem.documents if a <= position < b)
            low = position - (position - start) % block
            runs.append((low, min(low + block, end)))
    return (min(low for low, _ in runs), max(high for _, high in runs)) if runs else (0, 0)


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
    """Returns runs of positions with neighbours as one and without empty ones; they must ascend, else blocks would not be in order."""
    runs = [(start, stop) for start, stop, step in spans if start < stop]
    assert all(step == 1 for start, stop, step in spans if start < stop), "runs of positions"
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs)), "ascending"
    return joined(runs)


def block_steps(
    ring_problem: RingBlockProblem,
    needs: NeededBlocks,
    sizes: tuple[int, int, int],
    memory: int,
    branches: RingProblem | None = None,
    *,
    needs_grad: bool = False,
    forced: int = 0,
) -> tuple[int, ...]:
    """Returns the number of key/value heads in each step. ``sizes``: batch, head dim and bytes of an element."""
    batch, head_dim, itemsize = sizes
    kv_heads, heads, ranks = ring_problem.num_kv_heads, (0, ring_problem.num_kv_heads), range(ring_problem.size)
    # of a row; where heads differ, a row is that of some head
    row = 2 * batch * head_dim * itemsize * kv_heads
    needed = [needed_keys(ring_problem, needs, rank, heads, branches) for rank in ranks]
    brought = max(x.count([(0, ring_problem.seq_len)]) / x.heads for x in needed)
    held = max(end - start for start, end in (key_span(ring_problem, needs, rank) for rank in ranks))
    pairs = float(needs.pairs.sum(1).max()) * kv_heads / needs.pairs.shape[1]
    if branches is not None:
        lengths = (end - start for start, end in branches.documents)
        whole = sum(branches.pattern.pairs(length, branches.num_heads, is_causal=branches.is_causal) for length in lengths)
        pairs += whole / ring_problem.size
    return head_steps(
        "blocks", kv_heads, brought * row, held * row * (1 + needs_grad), 4 * batch * head_dim * pairs / FLOPS, memory, forced
    )
