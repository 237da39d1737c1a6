"""Bytes on the wire in closed form: what a call on a spread sequence must exchange, from its arguments alone.

This does not look at plans: tests hold what is measured to it.

With n of N positions on a rank, W ranks, H heads, K key/value heads, head dim D, batch B, s bytes an element, f bytes an element of
sums (8 for float64, else 4), and R(r) the rows of other ranks that rank r's queries see, a rank receives

    all_gather, ring   2·R·K·D·B·s forward; full: R = N − n; causal: R = (end of its last run) − n; a window's: what lies within its
                       reach beyond its own runs
    all_to_all         q, k, v: (N − n)·(H/W + 2·max(K/W, 1))·D·B·s; out and lse back: n·(H − H/W)·(D·s + f)·B
    dilated            of each branch (w, r) with w > n: 2·K·min(H/K, r)·D·B·s·(w − n)/r, or causal only the segment's positions before
                       it; nothing of a branch with w ≤ n (contiguous, segments aligned with ranks, r | n, offsets h mod r)

A backward receives the keys and values again, and sends back a share of dK and dV, on a CPU in the dtype of sums, for each row and run
of its queries that saw it: 2·(Σ over runs of R(run))·K·D·B·f, where both runs of a zigzag's rank may see the same keys (the last rank's
two are one). Of a dilated branch with H < r² each query head has a share of its own: 2·H·D·B·f·(w − n)/r.

    blocks             2·R·D·B·s forward, R: rows of others in the key blocks that its queries keep, counted for each key/value head, and
                       as often as heads travel together; backward as much again, while 2·R·D·B·f go back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dilated_attention.distributed.dealt import Layout
from dilated_attention.distributed.layout import spans
from dilated_attention.engine.plan import Range
from dilated_attention.pattern import BlockPattern

# of (reader, holder): heads of rows that come, and that shares go back for
Seen = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Bytes:
    """What one rank exchanges."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int


@dataclass(frozen=True)
class Sizes:
    """What bytes depend on beside who sees whom. ``itemsize`` and ``sum_itemsize``: of an element, and of one of a sum."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    itemsize: int
    sum_itemsize: int


def dense_bytes(
    seq_len: int, size: int, rank: int, layout: str, sizes: Sizes, *, is_causal: bool, window: tuple[int | None, int | None] | None = None
) -> Bytes:
    """``ring_attention`` by all_gather, in one step of heads or many, or by ring; contiguous or zigzag."""
    runs = [_runs(seq_len, r, size, layout) for r in range(size)]
    left, right = window or (None, None)
    if is_causal:
        right = 0

    def reach(run: Range) -> Range:
        return 0 if left is None else max(0, run[0] - left), seq_len if right is None else min(seq_len, run[1] + right)

    def seen(reader: int, holder: int) -> tuple[int, int]:
        """Key/value heads of rows of ``holder`` that ``reader`` sees; and counted for each run that sees them."""
        once = each = 0
        for start, stop in runs[holder]:
            parts = [(max(start, low), min(stop, high)) for low, high in map(reach, runs[reader])]
            parts = sorted(part for part in parts if part[0] < part[1])
            each += sum(high - low for low, high in parts)
            end = start
            for low, high in parts:
                once += max(0, high - max(low, end))
                end = max(end, high)
        return once * sizes.kv_heads, each * sizes.kv_heads

    return _of_keys(size, rank, sizes, seen)


def dilated_bytes(
    seq_len: int, size: int, rank: int, lengths: tuple[int, ...], rates: tuple[int, ...], sizes: Sizes, *, is_causal: bool
) -> Bytes:
    """``ring_dilated_attention`` of a contiguous sequence by all_gather, offsets h mod r.

    W divides N into n; every w divides n or is a multiple of n; the rates of the latter divide n, and rates and H/K divide one another.
    """
    n = seq_len // size
    total = Bytes(0, 0, 0, 0)
    for length, rate in zip(lengths, rates, strict=True):
        if length <= n:
            assert n % length == 0
            continue
        assert length % n == 0 and n % rate == 0
        team = length // n

        # of a key/value head the rows of each offset that its query heads have
        heads = sizes.kv_heads * min(sizes.heads // sizes.kv_heads, rate)
        # r launches of heads of equal offset, or H/r of heads of different ones if these are fewer: then a share for each query head
        shares = sizes.heads if sizes.heads < rate * rate else heads

        def seen(reader: int, holder: int, team: int = team, rows: int = n // rate, taken: Range = (heads, shares)) -> tuple[int, int]:
            together = reader // team == holder // team and (holder < reader or not is_causal)
            return (rows * taken[0], rows * taken[1]) if together else (0, 0)

        total = _sum(total, _of_keys(size, rank, sizes, seen))
    return total


def heads_bytes(seq_len: int, size: int, rank: int, layout: str, sizes: Sizes, *, lse_grad: bool = False) -> Bytes:
    """all_to_all: heads of the whole sequence on each rank, and everything back. A striped sequence travels as any other.

    Args:
        lse_grad: the call returned lse, whose gradient then travels, zeros where a rank has none.
    """
    held = sum(len(range(*span)) for span in spans(seq_len, rank, size, layout))
    others = seq_len - held
    heads, kv_heads = sizes.heads // size, max(1, sizes.kv_heads // size)
    element, sums = sizes.head_dim * sizes.itemsize, sizes.head_dim * sizes.sum_itemsize
    # per row of one rank that another computes
    inputs = (heads + 2 * kv_heads) * element
    outputs = heads * (element + sizes.sum_itemsize)
    # dout, out, lse, and the gradient of lse
    more = heads * (2 * element + (1 + lse_grad) * sizes.sum_itemsize)
    # ranks that share a key/value head each have a share of its gradients
    back = heads * element + 2 * kv_heads * (sums if sizes.kv_heads < size else element)
    away, here = held * (size - 1) * sizes.batch, others * sizes.batch
    return Bytes(
        forward_sent=away * inputs + here * outputs,
        forward_received=here * inputs + away * outputs,
        backward_sent=away * (inputs + more) + here * back,
        backward_received=here * (inputs + more) + away * back,
    )


def block_bytes(
    pattern: BlockPattern,
    seq_len: int,
    size: int,
    rank: int,
    layout: str | Layout,
    sizes: Sizes,
    *,
    is_causal: bool,
    head_steps: tuple[int, ...] | None = None,
) -> Bytes:
    """``ring_block_sparse_attention`` of one document, from the pattern's definition by pairs: for small N.

    Args:
        head_steps: key/value heads that travel together; None for all. It matters only to patterns that differ between heads.
    """
    mask = pattern.dense_mask(seq_len, seq_len, sizes.heads, is_causal=is_causal)
    q_blocks, k_blocks = (torch.arange(seq_len) // block for block in (pattern.q_block, pattern.k_block))
    positions = [torch.cat([torch.arange(*span) for span in spans(seq_len, r, size, layout)]) for r in range(size)]

    def of_rank(r: int) -> torch.Tensor:
        """bool (K, N): keys in the blocks that some query's block keeps; all queries of a block count, also those of another rank."""
        mine = torch.isin(q_blocks, q_blocks[positions[r]])
        keys = mask[:, mine].any(1).unflatten(0, (sizes.kv_heads, -1)).any(1)
        steps = [part.any(0).expand(part.shape) for part in keys.split(list(head_steps or (sizes.kv_heads,)))]
        together = torch.cat(steps)
        blocks = torch.zeros(sizes.kv_heads, -(-seq_len // pattern.k_block), dtype=torch.int64).index_add_(1, k_blocks, together.long())
        return blocks[:, k_blocks] > 0

    kept = [of_rank(r) for r in range(size)]

    def seen(reader: int, holder: int) -> tuple[int, int]:
        rows = int(kept[reader][:, positions[holder]].sum())
        return rows, rows

    return _of_keys(size, rank, sizes, seen)


def _runs(seq_len: int, rank: int, size: int, layout: str) -> list[Range]:
    """A rank's runs; the last rank's two of a zigzag are one."""
    runs: list[Range] = []
    for start, stop, _ in spans(seq_len, rank, size, layout):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        elif start < stop:
            runs.append((start, stop))
    return [run for run in runs if run[0] < run[1]]


def _of_keys(size: int, rank: int, sizes: Sizes, seen: Seen) -> Bytes:
    """Keys that come and shares of gradients that go back."""
    others = [r for r in range(size) if r != rank]
    row = 2 * sizes.head_dim * sizes.batch
    sent, received = (sum(pair[0] for pair in pairs) * row * sizes.itemsize for pairs in _both(seen, rank, others))
    shares_received, shares_sent = (sum(pair[1] for pair in pairs) * row * sizes.sum_itemsize for pairs in _both(seen, rank, others))
    return Bytes(sent, received, sent + shares_sent, received + shares_received)


def _both(seen: Seen, rank: int, others: list[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What the others see of the rank, and what it sees of them."""
    return [seen(other, rank) for other in others], [seen(rank, other) for other in others]


def _sum(a: Bytes, b: Bytes) -> Bytes:
    return Bytes(
        a.forward_sent + b.forward_sent,
        a.forward_received + b.forward_received,
        a.backward_sent + b.backward_sent,
        a.backward_received + b.backward_received,
    )
