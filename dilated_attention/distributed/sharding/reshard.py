"""Redistributes rows and heads over the ranks: from one layout to another, and between sequence shards and head shards.

A holding is (spans, heads): the rows that a rank holds, and the heads it holds of them. Rank s sends rank r what s holds under the old
division and r needs under the new one, so an all-to-all over heads, its inverse and a change of layout are one function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.distributed.comm.p2p import Wire
from dilated_attention.distributed.sharding.layout import Span
from dilated_attention.engine.branches.problems import Range


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Rows at the positions of ``spans``, one after the other, and their heads [first, last)."""

    spans: tuple[Span, ...]
    heads: Range

    @property
    def rows(self) -> int:
        return sum(len(range(*span)) for span in self.spans)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """``count`` rows that two holdings share: (start, step) in each of them, and the heads [first, last)."""

    here: tuple[int, int]
    there: tuple[int, int]
    count: int
    heads: Range

    def of(self, x: torch.Tensor, side: tuple[int, int], first_head: int) -> torch.Tensor:
        """Returns a view (B, count, heads, …) of a holding's tensor."""
        start, step = side
        heads = slice(self.heads[0] - first_head, self.heads[1] - first_head)
        return x[:, start : start + (self.count - 1) * step + 1 : step, heads]


@functools.lru_cache(maxsize=4096)
def shared_rows(here: ShardSpec, there: ShardSpec) -> tuple[SharedRows, ...]:
    """Returns what both hold, in the order of ``here``'s rows."""
    heads = (max(here.heads[0], there.heads[0]), min(here.heads[1], there.heads[1]))
    if heads[0] >= heads[1]:
        return ()
    found = []
    row = 0
    for span in here.spans:
        other_row = 0
        for other in there.spans:
            common = _common(range(*span), range(*other))
            if common is not None:
                positions, count = common
                first, step = positions
                found.append(
                    SharedRows(
                        (row + (first - span[0]) // span[2], step // span[2]),
                        (other_row + (first - other[0]) // other[2], step // other[2]),
                        count,
                        heads,
                    )
                )
            other_row += len(range(*other))
        row += len(range(*span))
    return tuple(found)


def _common(a: range, b: range) -> tuple[tuple[int, int], int] | None:
    """Returns ((first, step), count) of the positions in both ranges, or None. Their steps are equal, or one of them is 1."""
    low, high = max(a.start, b.start), min(a.stop, b.stop)
    step = max(a.step, b.step)
    coarse = a if a.step == step else b
    assert a.step == b.step or min(a.step, b.step) == 1
    if a.step == b.step and (a.start - b.start) % step:
        return None
    first = low + (coarse.start - low) % step
    count = len(range(first, high, step))
    return ((first, step), count) if count else None


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
    results, others = [], [rank for rank in range(len(old[0])) if rank != me]
    # bytes, and where others' go, by peer; the widest numbers come first, since the others' bytes would not be aligned for them
    outgoing, incoming = ([list[torch.Tensor]() for _ in old[0]] for _ in range(2))
    wide = [accumulation_dtype(x.dtype) if add else x.dtype for x in tensors]
    for index in sorted(range(len(tensors)), key=lambda i: -wide[i].itemsize):
        x, before, after, dtype = tensors[index], old[index], new[index], wide[index]
        mine, needed = before[me], after[me]
        shape = (x.shape[0], needed.rows, needed.heads[1] - needed.heads[0], *x.shape[3:])
        result = (torch.zeros if add else torch.empty)(shape, dtype=dtype, device=x.device)
        results.append((index, result))
        for piece in shared_rows(mine, after[me]):
            piece.of(result, piece.there, needed.heads[0]).copy_(piece.of(x, piece.here, mine.heads[0]))
        for rank in others:
            for piece in shared_rows(mine, after[rank]):
                part = piece.of(x, piece.here, mine.heads[0]).to(dtype)
                # a copy in any case: a contiguous tensor of one number may have any stride
                outgoing[rank].append(part.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8))
            for piece in shared_rows(before[rank], needed):
                incoming[rank].append(piece.of(result, piece.there, needed.heads[0]))
    send_counts, counts = ([sum(map(_nbytes, parts)) for parts in by_peer] for by_peer in (outgoing, incoming))
    came = tensors[0].new_empty(sum(counts), dtype=torch.uint8)
    if sum(send_counts) or sum(counts):
        assert wire is not None, "one process holds everything"
        wire.start(torch.cat([came[:0], *itertools.chain(*outgoing)]), send_counts, came, counts, what).wait()
    places = list(itertools.chain(*incoming))
    for place, part in zip(places, came.split([*map(_nbytes, places)]), strict=True):
        if part.storage_offset() % place.itemsize:
            # what came before it from another rank has an odd number of bytes
            part = part.clone()
        (place.add_ if add else place.copy_)(part.view(place.dtype).view(place.shape))
    return [result for _, result in sorted(results, key=lambda found: found[0])]


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.itemsize
