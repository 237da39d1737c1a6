"""Communication volume in closed form: the bytes that a call on a sharded sequence must exchange, from its arguments alone.

The formulas do not use the plans; tests compare measured bytes with them.

With n of N positions on a rank, H heads, K key/value heads, head dim D, batch B, s bytes per element, and R(r) the rows of other ranks
that rank r's queries see, a rank receives

    all_gather, ring   2·R·K·D·B·s forward; full: R = N − n; causal: R = (end of its last run) − n; window: the rows within its reach
                       outside its own runs
    dilated            2·D·B·s for each key/value head and each row of another rank that is in a segment of the rank's, at the offset
                       h mod r of one of its query heads, and not after the rank's last position if causal; a row that several branches
                       take counts once
    blocks             2·R·D·B·s forward, R: rows of other ranks in the key blocks that its queries keep, counted for each key/value head;
                       what one head needs counts for all heads of its step
    blocks, dilated    the rows of either, in one softmax; a row that both need counts once

A backward receives the keys and values again, and sends a contribution to dK and dV, as large, for each. Those of all_to_all are in
``dilated_attention/distributed/comm/comm_volume.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from dilated_attention.distributed.comm.comm_volume import Bytes, CommSizes
from dilated_attention.distributed.sharding.custom_layout import Layout
from dilated_attention.distributed.sharding.layout import joined, spans
from dilated_attention.engine.branches.plan import Range
from dilated_attention.pattern import BlockPattern

# (reader, holder) → rows × heads received
Seen = Callable[[int, int], int]


def dense_bytes(
    seq_len: int,
    size: int,
    rank: int,
    layout: str | Layout,
    sizes: CommSizes,
    *,
    is_causal: bool,
    window: tuple[int | None, int | None] | None = None,
    documents: Sequence[Range] | None = None,
) -> Bytes:
    """Returns the bytes of ``ring_attention`` with all_gather (in any number of head steps) or ring; any layout but striped.

    Args:
        documents: (start, end) of packed documents, which partition the sequence; None for one.
    """
    documents = documents or [(0, seq_len)]
    runs = [_runs(seq_len, r, size, layout) for r in range(size)]
    left, right = window or (None, None)
    if is_causal:
        right = 0

    def reach(run: Range, document: Range) -> Range:
        """Returns the keys that a run's queries in a document see."""
        (start, end), (first, last) = (max(run[0], document[0]), min(run[1], document[1])), document
        if start >= end:
            return 0, 0
        return first if left is None else max(first, start - left), last if right is None else min(last, end + right)

    def seen(reader: int, holder: int) -> int:
        """Returns rows × key/value heads of ``holder`` that ``reader`` sees."""
        once = 0
        for start, stop in runs[holder]:
            parts = [
                (max(start, low), min(stop, high)) for low, high in itertools.starmap(reach, itertools.product(runs[reader], documents))
            ]
            end = start
            for low, high in sorted(part for part in parts if part[0] < part[1]):
                once += max(0, high - max(low, end))
                end = max(end, high)
        return once * sizes.kv_heads

    return _of_keys(size, rank, sizes, seen)


def dilated_bytes(
    seq_len: int,
    size: int,
    rank: int,
    lengths: tuple[int, ...],
    rates: tuple[int, ...],
    sizes: CommSizes,
    *,
    is_causal: bool,
    layout: str | Layout = "contiguous",
    documents: Sequence[Range] | None = None,
) -> Bytes:
    """Returns the bytes of ``ring_dilated_attention`` with all_gather and offsets h mod r: for small N, any layout but striped.

    Args:
        documents: (start, end) of packed documents, which partition the sequence; None for one.
    """
    held = [_runs(seq_len, r, size, layout) for r in range(size)]
    kept = [_rows_of_branches(seq_len, runs, lengths, rates, sizes, is_causal, documents or [(0, seq_len)]) for runs in held]
    return _of_keys(size, rank, sizes, _seen_of(kept, seq_len, size, layout))


def block_bytes(
    pattern: BlockPattern,
    seq_len: int,
    size: int,
    rank: int,
    layout: str | Layout,
    sizes: CommSizes,
    *,
    is_causal: bool,
    branches: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    head_steps: tuple[int, ...] | None = None,
) -> Bytes:
    """Returns the bytes of ``ring_block_sparse_attention`` for one document, from the pattern's definition by pairs: for small N.

    Args:
        branches: segment lengths and dilation rates of ``ring_block_sparse_dilated_attention``, with offsets h mod r. A key that a branch
            and a block need counts once.
        head_steps: the numbers of key/value heads sent together; None for all. It only matters to patterns that differ between heads.
    """
    mask = pattern.dense_mask(seq_len, seq_len, sizes.heads, is_causal=is_causal)
    q_blocks, k_blocks = (torch.arange(seq_len) // block for block in (pattern.q_block, pattern.k_block))
    positions = [torch.cat([torch.arange(*span) for span in spans(seq_len, r, size, layout)]) for r in range(size)]

    def of_rank(r: int) -> torch.Tensor:
        """Returns bool (K, N): keys in blocks that some query block of the rank keeps; a block counts whole, even with others' queries."""
        mine = torch.isin(q_blocks, q_blocks[positions[r]])
        keys = mask[:, mine].any(1).unflatten(0, (sizes.kv_heads, -1)).any(1)
        steps = [part.any(0).expand(part.shape) for part in keys.split(list(head_steps or (sizes.kv_heads,)))]
        together = torch.cat(steps)
        blocks = torch.zeros(sizes.kv_heads, -(-seq_len // pattern.k_block), dtype=torch.int64).index_add_(1, k_blocks, together.long())
        needed = blocks[:, k_blocks] > 0
        if branches is not None:
            needed |= _rows_of_branches(seq_len, _runs(seq_len, r, size, layout), *branches, sizes, is_causal, [(0, seq_len)])
        return needed

    return _of_keys(size, rank, sizes, _seen_of([of_rank(r) for r in range(size)], seq_len, size, layout))


def _rows_of_branches(
    seq_len: int,
    runs: list[Range],
    lengths: tuple[int, ...],
    rates: tuple[int, ...],
    sizes: CommSizes,
    is_causal: bool,
    documents: Sequence[Range],
) -> torch.Tensor:
    """Returns bool (K, N): the keys in a segment of some run, at the offset h mod r of one of the key/value head's query heads."""
    positions, heads = torch.arange(seq_len), torch.arange(sizes.heads)
    bounds = torch.tensor(documents)
    firsts, lasts = bounds.repeat_interleave(bounds[:, 1] - bounds[:, 0], 0).unbind(1)
    found = torch.zeros(sizes.kv_heads, seq_len, dtype=torch.bool)
    for length, rate in zip(lengths, rates, strict=True):
        starts = firsts + (positions - firsts) // length * length
        ends = torch.minimum(starts + length, lasts)
        taken = ((positions - starts) % rate == heads[:, None] % rate).unflatten(0, (sizes.kv_heads, -1)).any(1)
        for first, last in runs:
            reached = (starts < last) & (ends > first)
            found |= taken & reached & (positions < last) if is_causal else taken & reached
    return found


def _seen_of(kept: list[torch.Tensor], seq_len: int, size: int, layout: str | Layout) -> Seen:
    """Returns the count of rows × key/value heads for what each rank needs of all keys, bool (K, N)."""
    positions = [torch.cat([torch.arange(*span) for span in spans(seq_len, r, size, layout)]) for r in range(size)]
    return lambda reader, holder: int(kept[reader][:, positions[holder]].sum())


def _runs(seq_len: int, rank: int, size: int, layout: str | Layout) -> list[Range]:
    """Returns a rank's runs; the last rank's two runs of a zigzag are one."""
    return list(joined((start, stop) for start, stop, _ in spans(seq_len, rank, size, layout)))


def _of_keys(size: int, rank: int, sizes: CommSizes, seen: Seen) -> Bytes:
    """Returns the bytes of keys that are received and of gradient contributions that go back."""
    row = 2 * sizes.head_dim * sizes.batch * sizes.itemsize
    others = [r for r in range(size) if r != rank]
    sent, received = row * sum(seen(other, rank) for other in others), row * sum(seen(rank, other) for other in others)
    return Bytes(sent, received, sent + received, sent + received)
