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

import torch

from dilated_attention.pattern import BlockPattern
from dilated_attention.planning.memory import Bytes
from tests.helpers.ring_cases import WHOLE, Spread, positions


def rows_bytes(spread: Spread, world: int, rank: int, itemsize: int) -> Bytes:
    """Returns the bytes of a call whose keys travel as rows, in any number of head steps; any layout but striped.

    Of branches with offsets h mod r, and of block patterns from their definition by pairs, so for small N.
    """
    case, n = spread.case, spread.case.num_keys
    bounds, where, heads = torch.tensor(case.bounds or (0, n)), torch.arange(n), torch.arange(case.heads)
    firsts, lasts = (x.repeat_interleave(bounds.diff()) for x in (bounds[:-1], bounds[1:]))

    def needed(rows: torch.Tensor) -> torch.Tensor:
        """bool (K, N): the keys that these queries see."""
        found = torch.zeros(case.kv_heads, n, dtype=torch.bool)
        if case.pattern == WHOLE:
            left, right = case.window or (None, None)
            reach = 0 if case.is_causal else right
            low = firsts[rows] if left is None else torch.maximum(firsts[rows], rows - left)
            return found | _covered(n, low, lasts[rows] if reach is None else torch.minimum(lasts[rows], rows + reach + 1))
        for length, rate in () if case.dilated is None else case.dilated.branches:
            starts = firsts + (where - firsts) // length * length
            ends = torch.minimum(starts + length, lasts)[rows]
            taken = ((where - starts) % rate == heads[:, None] % rate).unflatten(0, (case.kv_heads, -1)).any(1)
            found |= taken & _covered(n, starts[rows], torch.minimum(ends, rows + 1) if case.is_causal else ends)
        if isinstance(case.pattern, BlockPattern):
            q_blocks, k_blocks = (where // block for block in (case.pattern.q_block, case.pattern.k_block))
            mask = case.pattern.dense_mask(n, n, case.heads, is_causal=case.is_causal)
            # a block counts whole, even with others' queries
            keys = mask[:, torch.isin(q_blocks, q_blocks[rows])].any(1).unflatten(0, (case.kv_heads, -1)).any(1)
            together = torch.cat([part.any(0).expand(part.shape) for part in keys.chunk(spread.head_steps or 1)])
            blocks = torch.zeros(case.kv_heads, -(-n // case.pattern.k_block), dtype=torch.int64).index_add_(1, k_blocks, together.long())
            found |= blocks[:, k_blocks] > 0
        return found

    held = [positions(n, r, world, spread.layout) for r in range(world)]
    row, others, mine = 2 * case.head_dim * case.batch * itemsize, [r for r in range(world) if r != rank], needed(held[rank])
    sent = row * sum(int(needed(held[other])[:, held[rank]].sum()) for other in others)
    received = row * sum(int(mine[:, held[other]].sum()) for other in others)
    return Bytes(sent, received, sent + received, sent + received)


def heads_bytes(spread: Spread, world: int, rank: int, itemsize: int, sum_itemsize: int, *, lse_grad: bool = False) -> Bytes:
    """Returns the bytes of an all_to_all, forward: q, k, v of others' rows for some heads, and out and lse of its rows' other heads back.

    ``itemsize`` and ``sum_itemsize`` are the bytes of an element and of an element of a sum; ``lse_grad``: the call returned lse, whose
    gradient is exchanged, too, as zeros where a rank has none.
    """
    case, held = spread.case, len(positions(spread.case.num_keys, rank, world, spread.layout))
    heads, kv_heads, element = case.heads // world, max(1, case.kv_heads // world), case.head_dim * itemsize
    # bytes per row of one rank that another rank computes
    inputs, outputs = (heads + 2 * kv_heads) * element, heads * (element + sum_itemsize)
    # dout, out, lse, and the gradient of lse
    more = heads * (2 * element + (1 + lse_grad) * sum_itemsize)
    # ranks that share a key/value head each return a contribution to its gradients
    back = heads * element + 2 * kv_heads * (case.head_dim * sum_itemsize if case.kv_heads < world else element)
    away, here = held * (world - 1) * case.batch, (case.num_keys - held) * case.batch
    return Bytes(
        away * inputs + here * outputs,
        here * inputs + away * outputs,
        away * (inputs + more) + here * back,
        here * (inputs + more) + away * back,
    )


def _covered(seq_len: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Returns bool (N,): the positions in some [low, high)."""
    some = low < high
    steps = torch.zeros(seq_len + 1, dtype=torch.int64)
    for edge, change in ((low[some], 1), (high[some], -1)):
        steps.index_add_(0, edge, torch.full_like(edge, change))
    return steps.cumsum(0)[:seq_len] > 0
