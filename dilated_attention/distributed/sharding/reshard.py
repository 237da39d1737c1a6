"""Redistributes rows and heads over the ranks: from one layout to another, and between sequence shards and head shards.

A holding is (spans, heads): the rows that a rank holds, and the heads it holds of them. Rank s sends rank r what s holds under the old
division and r needs under the new one, so an all-to-all over heads, its inverse and a change of layout are one function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.p2p import Wire
from dilated_attention.distributed.sharding.layout import ShardSpec, Span

# of the queries and of the keys, rank by rank
Holdings = tuple[list[ShardSpec], ...]
Index = tuple[slice, ...]


def holdings(rows: Sequence[tuple[Span, ...]], num_heads: int, num_kv_heads: int, *, by_heads: bool) -> Holdings:
    """Returns which rows and heads each rank holds. ``by_heads``: each has some heads, else all."""
    size, group = len(rows), num_heads // num_kv_heads
    assert not by_heads or num_heads % size == 0, "some heads would belong to no rank"
    heads = [(num_heads // size * rank, num_heads // size * (rank + 1)) if by_heads else (0, num_heads) for rank in range(size)]
    return tuple(
        [ShardSpec(of_rank, (first // each, -(-last // each))) for of_rank, (first, last) in zip(rows, heads, strict=True)]
        for each in (1, group)
    )


@functools.lru_cache(maxsize=4096)
def shared_rows(here: ShardSpec, there: ShardSpec) -> tuple[tuple[Index, Index], ...]:
    """Returns what both hold, in the order of ``here``'s rows: where it lies in tensors (B, rows, heads, …) of either."""
    low, high = max(here.heads[0], there.heads[0]), min(here.heads[1], there.heads[1])
    if low >= high:
        return ()
    heads, others_heads = (slice(low - holding.heads[0], high - holding.heads[0]) for holding in (here, there))
    shared, row = [], 0
    for span in here.spans:
        other_row = 0
        for other in there.spans:
            if positions := _common(range(*span), range(*other)):
                mine, others = _rows(positions, span, row), _rows(positions, other, other_row)
                shared.append(((slice(None), mine, heads), (slice(None), others, others_heads)))
            other_row += len(range(*other))
        row += len(range(*span))
    return tuple(shared)


def _common(a: range, b: range) -> range:
    """Returns the positions in both ranges. Their steps are equal, or one of them is 1."""
    if a.step == b.step and (a.start - b.start) % a.step:
        return range(0)
    low, coarse = max(a.start, b.start), max(a, b, key=lambda x: x.step)
    return range(low + (coarse.start - low) % coarse.step, min(a.stop, b.stop), coarse.step)


def _rows(positions: range, span: Span, row: int) -> slice:
    """Returns the rows of some of a span's positions, of which the first is in row ``row``."""
    first, step = row + range(*span).index(positions.start), positions.step // span[2]
    return slice(first, first + (len(positions) - 1) * step + 1, step)


def reshard(
    tensors: Sequence[torch.Tensor],
    old: Sequence[Sequence[ShardSpec]],
    new: Sequence[Sequence[ShardSpec]],
    me: int,
    wire: Wire | None,
    what: str,
    *,
    add: bool = False,
) -> list[torch.Tensor]:
    """Returns each tensor (B, rows, heads, …) under its new division. ``old`` and ``new`` list every rank's holding for each tensor;
    ``add``: several ranks hold contributions to the same rows and heads, which are summed in the accumulation dtype."""
    if all(list(a) == list(b) for a, b in zip(old, new, strict=True)):
        return list(tensors)
    results, others = list[torch.Tensor](), [rank for rank in range(len(old[0])) if rank != me]
    # bytes, and where others' go, by peer
    outgoing, incoming = ([list[torch.Tensor]() for _ in old[0]] for _ in range(2))
    for x, before, after in zip(tensors, old, new, strict=True):
        mine, needed, dtype = before[me], after[me], accumulation_dtype(x.dtype) if add else x.dtype
        shape = (x.shape[0], needed.rows, needed.heads[1] - needed.heads[0], *x.shape[3:])
        result = (torch.zeros if add else torch.empty)(shape, dtype=dtype, device=x.device)
        results.append(result)
        for at, to in shared_rows(mine, needed):
            result[to] = x[at]
        for rank in others:
            # a copy in any case: a contiguous tensor of one number may have any stride
            parts = (x[at].to(dtype).clone(memory_format=torch.contiguous_format) for at, _ in shared_rows(mine, after[rank]))
            outgoing[rank] += [part.view(-1).view(torch.uint8) for part in parts]
            incoming[rank] += [result[to] for _, to in shared_rows(before[rank], needed)]
    send_counts, counts = ([sum(part.nbytes for part in parts) for parts in by_peer] for by_peer in (outgoing, incoming))
    came = tensors[0].new_empty(sum(counts), dtype=torch.uint8)
    if sum(send_counts) or sum(counts):
        assert wire is not None, "one process holds everything"
        wire.start(torch.cat([came[:0], *itertools.chain(*outgoing)]), send_counts, came, counts, what).wait()
    places = list(itertools.chain(*incoming))
    for place, part in zip(places, came.split([place.nbytes for place in places]), strict=True):
        if part.storage_offset() % place.itemsize:
            # what came before it is narrower, and its bytes are no multiple
            part = part.clone()
        (place.add_ if add else place.copy_)(part.view(place.dtype).view(place.shape))
    return results
