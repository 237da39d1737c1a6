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

A backward receives the keys and values again, and sends a contribution to dK and dV, as large, for each. Those of all_to_all:
``heads_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dilated_attention.distributed.sharding.layout import Layout
from dilated_attention.pattern import BlockPattern
from dilated_attention.planning.memory import Bytes
from tests.helpers.ring_cases import positions

Documents = Sequence[tuple[int, int]]


class CommSizes(NamedTuple):
    """The sizes that bytes depend on. ``itemsize`` and ``sum_itemsize`` are the bytes of an element and of an element of a sum."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    itemsize: int
    sum_itemsize: int


def dense_bytes(
    seq_len: int,
    size: int,
    rank: int,
    layout: str | Layout,
    sizes: CommSizes,
    *,
    is_causal: bool,
    window: tuple[int | None, int | None] | None = None,
    documents: Documents | None = None,
) -> Bytes:
    """Returns the bytes of ``ring_attention`` with all_gather (in any number of head steps) or ring; any layout but striped.

    Args:
        documents: (start, end) of packed documents, which partition the sequence; None for one.
    """
    left, right = window or (None, None)
    firsts, lasts = _documents(seq_len, documents)

    def needed(rows: torch.Tensor) -> torch.Tensor:
        low = firsts[rows] if left is None else torch.maximum(firsts[rows], rows - left)
        reach = 0 if is_causal else right
        high = lasts[rows] if reach is None else torch.minimum(lasts[rows], rows + reach + 1)
        return _covered(seq_len, low, high).expand(sizes.kv_heads, -1)

    return _of_keys(rank, sizes, [positions(seq_len, r, size, layout) for r in range(size)], needed)


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
    documents: Documents | None = None,
) -> Bytes:
    """Returns the bytes of ``ring_dilated_attention`` with all_gather and offsets h mod r: any layout but striped.

    Args:
        documents: (start, end) of packed documents, which partition the sequence; None for one.
    """

    def needed(rows: torch.Tensor) -> torch.Tensor:
        return _of_branches(seq_len, rows, lengths, rates, sizes, is_causal, documents)

    return _of_keys(rank, sizes, [positions(seq_len, r, size, layout) for r in range(size)], needed)


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

    def needed(rows: torch.Tensor) -> torch.Tensor:
        # a block counts whole, even with others' queries
        keys = mask[:, torch.isin(q_blocks, q_blocks[rows])].any(1).unflatten(0, (sizes.kv_heads, -1)).any(1)
        together = torch.cat([part.any(0).expand(part.shape) for part in keys.split(list(head_steps or (sizes.kv_heads,)))])
        blocks = torch.zeros(sizes.kv_heads, -(-seq_len // pattern.k_block), dtype=torch.int64).index_add_(1, k_blocks, together.long())
        found = blocks[:, k_blocks] > 0
        return found if branches is None else found | _of_branches(seq_len, rows, *branches, sizes, is_causal, None)

    return _of_keys(rank, sizes, [positions(seq_len, r, size, layout) for r in range(size)], needed)


def heads_bytes(seq_len: int, size: int, held: int, sizes: CommSizes, *, lse_grad: bool = False) -> Bytes:
    """Returns the bytes of an all_to_all, forward: q, k, v of others' rows for some heads, and out and lse of its rows' other heads back.

    ``held``: positions of the rank; ``sizes``: numbers of heads, of key/value heads, head dim, batch size, and bytes of an element and of
    an element of a sum; ``lse_grad``: the call returned lse, whose gradient is exchanged, too, as zeros where a rank has none.
    """
    num_heads, num_kv_heads, head_dim, batch, itemsize, sum_itemsize = sizes
    heads, kv_heads, element = num_heads // size, max(1, num_kv_heads // size), head_dim * itemsize
    # bytes per row of one rank that another rank computes
    inputs, outputs = (heads + 2 * kv_heads) * element, heads * (element + sum_itemsize)
    # dout, out, lse, and the gradient of lse
    more = heads * (2 * element + (1 + lse_grad) * sum_itemsize)
    # ranks that share a key/value head each return a contribution to its gradients
    back = heads * element + 2 * kv_heads * (head_dim * sum_itemsize if num_kv_heads < size else element)
    away, here = held * (size - 1) * batch, (seq_len - held) * batch
    return Bytes(
        away * inputs + here * outputs,
        here * inputs + away * outputs,
        away * (inputs + more) + here * back,
        here * (inputs + more) + away * back,
    )


def _documents(seq_len: int, documents: Documents | None) -> tuple[torch.Tensor, ...]:
    """Returns the first position of each position's document, and the one behind its last."""
    bounds = torch.tensor(documents or [(0, seq_len)])
    return bounds.repeat_interleave(bounds[:, 1] - bounds[:, 0], 0).unbind(1)


def _covered(seq_len: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Returns bool (N,): the positions in some [low, high)."""
    some = low < high
    steps = torch.zeros(seq_len + 1, dtype=torch.int64)
    for edge, change in ((low[some], 1), (high[some], -1)):
        steps.index_add_(0, edge, torch.full_like(edge, change))
    return steps.cumsum(0)[:seq_len] > 0


def _of_branches(
    seq_len: int,
    rows: torch.Tensor,
    lengths: tuple[int, ...],
    rates: tuple[int, ...],
    sizes: CommSizes,
    is_causal: bool,
    documents: Documents | None,
) -> torch.Tensor:
    """Returns bool (K, N): the keys in a segment of some row, at the offset h mod r of one of the key/value head's query heads."""
    (firsts, lasts), where, heads = _documents(seq_len, documents), torch.arange(seq_len), torch.arange(sizes.heads)
    found = torch.zeros(sizes.kv_heads, seq_len, dtype=torch.bool)
    for length, rate in zip(lengths, rates, strict=True):
        starts = firsts + (where - firsts) // length * length
        ends = torch.minimum(starts + length, lasts)[rows]
        taken = ((where - starts) % rate == heads[:, None] % rate).unflatten(0, (sizes.kv_heads, -1)).any(1)
        found |= taken & _covered(seq_len, starts[rows], torch.minimum(ends, rows + 1) if is_causal else ends)
    return found


def _of_keys(rank: int, sizes: CommSizes, held: list[torch.Tensor], needed: Callable[[torch.Tensor], torch.Tensor]) -> Bytes:
    """Returns the bytes of keys that are received and of gradient contributions that go back, of positions ``held`` by each rank."""
    row = 2 * sizes.head_dim * sizes.batch * sizes.itemsize
    others, mine = [r for r in range(len(held)) if r != rank], needed(held[rank])
    sent = row * sum(int(needed(held[other])[:, held[rank]].sum()) for other in others)
    received = row * sum(int(mine[:, held[other]].sum()) for other in others)
    return Bytes(sent, received, sent + received, sent + received)
