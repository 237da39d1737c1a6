"""Determines which key rows each rank needs for a block pattern, and how many heads' keys are sent at a time, by a model of a forward's
time. Every rank computes this for all ranks from what all of them know, so none asks another.

A rank needs all rows of a key block if one of its query blocks keeps it for one of a step's heads. A step is a group of key/value heads; it
brings all keys of its heads into one buffer, so that one launch computes a row's softmax and nothing is merged. Blocks are counted from the
first position of each document; they need not end where a rank's rows end. In the model the first step's keys are waited for, the others
travel while earlier steps are computed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dilated_attention.distributed.exchange.cost import FEW_CTAS, FLOPS, LATENCY, SHARE
from dilated_attention.distributed.exchange.plan import RingBlockProblem, RingProblem
from dilated_attention.distributed.exchange.plan import needed_keys as branch_keys
from dilated_attention.distributed.sharding.layout import Span, joined
from dilated_attention.engine.branches.problems import Range
from dilated_attention.pattern.blocks.base import Entries
from dilated_attention.pattern.blocks.kept_blocks import BLOCKS_AT_ONCE


@dataclass(frozen=True, eq=False)
class Columns:
    """The key blocks of all documents, one after the other. ``starts, ends``: (C,) positions of each block; ``first``: index of each
    document's first block, followed by C; ``of_position``, ``rank_of_position``, ``row_of_position``: (N,) block, rank and the rank's row
    of each position; ``positions``: those of each rank's rows."""

    starts: torch.Tensor
    ends: torch.Tensor
    first: tuple[int, ...]
    of_position: torch.Tensor
    rank_of_position: torch.Tensor
    row_of_position: torch.Tensor
    positions: tuple[torch.Tensor, ...]


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
    """Returns runs of positions with neighbours as one and without empty ones; they must ascend, else blocks would not be in order."""
    runs = [(start, stop) for start, stop, step in spans if start < stop]
    assert all(step == 1 for start, stop, step in spans if start < stop), "runs of positions"
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs)), "ascending"
    return joined(runs)


MOST_STEPS = 8
# the cost of a launch in seconds, in addition to the time its last query blocks leave idle; and the multiprocessors of an H200
LAUNCH, PROCESSORS = 20e-6, 132


class TransferLane(NamedTuple):
    """A way to send keys. ``is_few``: NCCL uses few multiprocessors; ``takes``: how many; ``rate``: bytes/s received."""

    is_few: bool
    takes: int
    rate: float


# seconds until the host has issued a forward, and each step (H100s, benchmarks scaling: 3.0 ms in 3 steps of 16 heads, 0.5 ms of a ring)
HOST, HOST_STEP = 0.5e-3, 0.7e-3
# measured on four H200s; with few multiprocessors each brings about 15 GB/s
LANES = (TransferLane(False, 24, 235e9), TransferLane(True, FEW_CTAS, 60e9))


@dataclass(frozen=True)
class TransferLoad:
    """What one key/value head of ``heads`` costs the slowest rank. ``compute, launch``: seconds of arithmetic, and of a step's launch in
    addition; ``brought, held``: bytes of the keys it receives, and of these together with its own."""

    heads: int
    compute: float
    launch: float
    brought: int
    held: int


def load_of(
    ring_problem: RingBlockProblem, needs: NeededBlocks, batch: int, head_dim: int, itemsize: int, branches: RingProblem | None = None
) -> TransferLoad:
    """Returns the load of a call's blocks, and of ``branches`` on the same keys. Keys that both need count twice."""
    columns, row = columns_of(ring_problem), 2 * batch * head_dim * itemsize
    sizes = (columns.ends - columns.starts).double()
    brought = held = 0.0
    for rank, kept in enumerate(needs.kept.double()):
        elsewhere = columns.of_position[columns.rank_of_position != rank].bincount(minlength=len(sizes)).double()
        more = 0.0 if branches is None else float(branch_keys(branches, rank, needs.kept.device).sum(1).double().mean())
        brought, held = max(brought, float((kept @ elsewhere).mean()) + more), max(held, float((kept @ sizes).mean()) + more)
    pairs = float(needs.pairs.mean(1).max())
    if branches is not None:
        lengths = (end - start for start, end in branches.documents)
        whole = sum(branches.pattern.pairs(length, branches.num_heads, is_causal=branches.is_causal) for length in lengths)
        pairs += whole / ring_problem.size / ring_problem.num_kv_heads
    flops = 4 * batch * head_dim * pairs
    rows_of_queries = max(1, max(len(x) for x in columns.positions)) * ring_problem.num_heads // ring_problem.num_kv_heads
    # the last wave of query blocks fills half of the multiprocessors on average
    tail = flops / (FLOPS / PROCESSORS) * ring_problem.pattern.q_block / rows_of_queries / 2
    return TransferLoad(ring_problem.num_kv_heads, flops / FLOPS, LAUNCH + tail, math.ceil(brought * row), math.ceil(held * row))


def choose_steps(load: TransferLoad, memory: int, forced: int = 0) -> tuple[tuple[int, ...], TransferLane]:
    """Returns the number of key/value heads in each step, and the lane, of the fastest way by the model. The keys of two steps may take the
    fraction ``SHARE`` of ``memory`` (bytes of a device); ``forced``: number of steps, 0 for any."""
    if not load.brought:
        return even_steps(load.heads, forced or 1), LANES[0]
    counts = range(1, load.heads + 1)
    ways = [(even_steps(load.heads, n), lane) for lane in LANES for n in ([forced] if forced else counts)]
    if not forced:
        ways += [(_grown(load, lane, first), lane) for lane in LANES for first in counts]
    most = max(len(steps) for steps, _ in ways)
    room = [way for way in ways if 2 * max(way[0]) * load.held <= SHARE * memory] or [way for way in ways if len(way[0]) == most]
    return min(room, key=lambda way: seconds(load, *way))


def even_steps(heads: int, steps: int) -> tuple[int, ...]:
    """Splits the heads into this many steps, the larger ones first; no step is empty."""
    size, larger = divmod(heads, min(steps, heads))
    return tuple(size + (index < larger) for index in range(min(steps, heads)))


def _grown(load: TransferLoad, lane: TransferLane, first: int) -> tuple[int, ...]:
    """Returns steps that grow as fast as their keys can be transferred during the computation before them."""
    steps, done, wire = [first], first, load.brought / lane.rate
    while done < load.heads:
        left = load.heads - done
        fits = int((wire * first + load.compute * done) / wire) - done
        steps.append(left if len(steps) == MOST_STEPS - 1 else min(left, max(1, fits)))
        done += steps[-1]
    return tuple(steps)


def seconds(load: TransferLoad, steps: tuple[int, ...], lane: TransferLane) -> float:
    """Returns the modelled seconds of a forward, at least the host's. Transfers during arithmetic take multiprocessors from it."""
    wire, end = load.brought / lane.rate, 0.0
    for count, total in zip(steps, itertools.accumulate(steps), strict=True):
        end = max(end, LATENCY + wire * total) + load.compute * count + load.launch
    return max(end + wire * (load.heads - steps[0]) * lane.takes / PROCESSORS, HOST + HOST_STEP * len(steps))
