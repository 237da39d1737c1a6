"""Determines which key rows each rank needs for a block pattern. Every rank computes this for all ranks from what all of them know, so none
asks another.

A rank needs all rows of a key block if one of its query blocks keeps it for one of a step's heads. Blocks are counted from the first
position of each document; they need not end where a rank's rows end.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass

import torch

from dilated_attention.distributed.exchange.plan import Needed, RingBlockProblem, RingProblem, Wanted, union, wanted_keys
from dilated_attention.distributed.exchange.setup import FLOPS, head_steps
from dilated_attention.distributed.sharding.layout import Span, joined
from dilated_attention.engine.blocks.lists import block_lists, building_device
from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern.blocks.base import divided
from dilated_attention.pattern.blocks.block_lists import BlockLists


@dataclass(frozen=True, eq=False)
class Columns:
    """The key blocks of all documents, one after the other. ``starts, ends``: (C,) positions of each block; ``first``: index of each
    document's first block, followed by C."""

    starts: torch.Tensor
    ends: torch.Tensor
    first: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NeededBlocks:
    """``kept``: bool (W, K or 1, C), whether a rank needs a key block for a key/value head (1 for all); ``blocks``: the most blocks that a
    rank computes, over all heads; ``digest``: hash of the lists, if patterns cannot be compared."""

    kept: torch.Tensor
    blocks: float
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


def lists_of(ring_problem: RingBlockProblem, document: Range, device: torch.device) -> BlockLists:
    """Returns the lists of a whole document, on the device or, where they are short, on the host: each rank's rows are chosen from them."""
    pattern, length = ring_problem.pattern, document[1] - document[0]
    where = building_device(pattern, length, length, ring_problem.num_heads, device)
    return block_lists(pattern, length, ring_problem.num_heads, is_causal=ring_problem.is_causal, device=where)


def query_blocks(ring_problem: RingBlockProblem, rank: int, document: Range) -> torch.Tensor:
    """Returns the query blocks of a document of which a rank holds rows, ascending, each once."""
    (start, end), block = document, ring_problem.pattern.q_block
    inside = [(max(low, start) - start, min(high, end) - start) for low, high in ring_problem.shards[rank]]
    runs = joined((low // block, -(-high // block)) for low, high in inside if low < high)
    return torch.cat([torch.arange(0), *(torch.arange(*run) for run in runs)])


@functools.lru_cache(maxsize=32)
@torch.no_grad()
def needs_of(ring_problem: RingBlockProblem, device: torch.device) -> NeededBlocks:
    """Computes the needs of all ranks from the lists of all; they are returned on the CPU."""
    columns, pattern, ratio = columns_of(ring_problem), ring_problem.pattern, ring_problem.num_heads // ring_problem.num_kv_heads
    # a pattern that is given by a density may differ between heads at one length but not at another
    per_head = any(pattern.at(end - start).per_head for start, end in ring_problem.documents)
    kept = torch.zeros((ring_problem.size, ring_problem.num_kv_heads if per_head else 1, len(columns.starts)), dtype=torch.bool)
    blocks, digest = [0.0] * ring_problem.size, hashlib.sha256() if pattern.lives_here else None
    for index, document in enumerate(ring_problem.documents):
        lists = lists_of(ring_problem, document, device)
        group, row = divided(lists.row_of_entry.cpu(), max(lists.num_rows, 1))
        column = columns.first[index] + lists.columns.cpu().long()
        for rank in range(ring_problem.size):
            held = torch.zeros(lists.num_rows, dtype=torch.bool)
            held[query_blocks(ring_problem, rank, document)] = True
            mine = held[row]
            kept[rank, group[mine] // ratio if lists.num_heads > 1 else slice(None), column[mine]] = True
            blocks[rank] += int(mine.sum()) * ring_problem.num_heads / lists.num_heads
        if digest is not None:
            for x in (lists.row_starts, lists.columns, lists.masks, lists.bits):
                digest.update(b"none" if x is None else x.cpu().numpy().tobytes())
    return NeededBlocks(kept, max(blocks), "" if digest is None else digest.hexdigest()[:16])


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
    pairs = needs.blocks * ring_problem.pattern.q_block * ring_problem.pattern.k_block
    if branches is not None:
        lengths = (end - start for start, end in branches.documents)
        whole = sum(branches.pattern.pairs(length, branches.num_heads, is_causal=branches.is_causal) for length in lengths)
        pairs += whole / ring_problem.size
    return head_steps(
        "blocks", kv_heads, brought * row, held * row * (1 + needs_grad), 4 * batch * head_dim * pairs / FLOPS, memory, forced
    )
