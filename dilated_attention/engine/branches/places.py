"""Where the branches' results wait, and what combines them: the same places (``backends/tiles/table.py``) and kernels for both runners.

A branch of rate 1 that every head runs needs no places: its kernel writes into the result itself (the "direct" branch).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dilated_attention.backends.hardware import keep_for_graph, on_device
from dilated_attention.backends.tiles.table import Walk, counts_of, place_of, share_keys
from dilated_attention.engine.branches.launches import View
from dilated_attention.engine.branches.problems import Problem, Range, Shape
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern


class Layout(NamedTuple):
    """The layout of some query heads: walk, offset of each branch and head, and whether query heads of one key head read the same keys."""

    walk: Walk
    offsets: tuple[tuple[int, ...], ...]
    shared: bool

    @property
    def num_places(self) -> int:
        return counts_of(self.walk, False).num_places


# what does not follow the length is made once: a length that was not before waits for the host
@functools.lru_cache(maxsize=256)
def _offsets_of(pattern: DilatedPattern, num_heads: int, heads: Range) -> tuple[tuple[int, ...], ...]:
    """Returns the offset of each branch and query head [first, last)."""
    return tuple([row[slice(*heads)] for row in pattern.offsets(num_heads)])


@functools.lru_cache(maxsize=256)
def layout_of(pattern: DilatedPattern, shape: Shape, keeps_parts: bool, heads: Range) -> Layout:
    """Returns the layout of query heads [first, last). With ``keeps_parts``, per-branch outputs are saved, so no branch is direct."""
    rows = _offsets_of(pattern, shape.num_heads, heads)
    documents = tuple([document for document in shape.documents if document[0] < document[1]])
    everywhere = [b for b, (_, rate) in enumerate(pattern.branches) if rate == 1 and NOT_IN_BRANCH not in rows[b]]
    shared = share_keys(rows, shape.num_heads // shape.num_kv_heads)
    direct = everywhere[0] if everywhere and not keeps_parts else -1
    key_direct = everywhere[0] if everywhere and shared else -1
    return Layout(Walk(pattern.branches, documents, shape.queries, direct, key_direct), rows, shared)


def view_of(layout: Layout, index: int, head_dim: int, problem: Problem) -> View | None:
    """Returns a problem's rows in results (heads, places, D) where batch entries are documents of equal length; None of the direct branch.

    Args:
        index: of the tensor.
        head_dim: D; 0 for lse (heads, places).
    """
    if problem.branch == layout.walk.direct:
        return None
    (base, places, segments), heads, width = place_of(layout.walk, problem.branch), problem.heads, head_dim or 1
    of_head, segment = layout.num_places * width, problem.q_start // problem.stride
    more, dense = ((head_dim,), (1,)) if head_dim else ((), ())
    size, stride = (problem.q_len, heads.size, *more), (width, heads.step * of_head, *dense)
    start = heads.start * of_head + (base + segment * places) * width
    return index, segments * places * width, places * width, size, stride, start


def combine(layout: Layout, results: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Merges or sums the results of all branches at their places, in float32, onto results that hold those of the direct branch.

    Args:
        results: out (B, N, H, D) and lse (B, N, H), float32; or dq, dk and dv (B, N, H, D).
        parts: the same at the places (H, places, …), flat. An out without keys (lse −inf) is not read.
    """
    # what follows needs Triton
    from dilated_attention.backends.tiles.call import TileCall, prepared
    from dilated_attention.backends.tiles.run import combine_launch

    (_, N, H, D), device = results[0].shape, results[0].device
    p = prepared(TileCall(layout.walk, layout.offsets, 1.0), 1, H, D, results[0].dtype, device)
    keep_for_graph(p, device.type)
    # batch entries are documents
    strides = tuple([(x.stride(0) - N * x.stride(1), *x.stride()[1:3]) for x in results])
    if strides not in p.launches:
        p.launches[strides] = (combine_launch(p, *strides),)
    with on_device(device):
        given, tables = (*results, *parts), p.tables
        spans, _, _ = tables.pointers()
        of_pattern = tables.starts, tables.lengths, tables.rates, p.offsets
        pointers = [*(x.data_ptr() for x in given), spans, *(x.data_ptr() for x in of_pattern)]
        p.launches[strides][0](pointers, lambda: (*given, tables.tensors()[0], *of_pattern), p.index)
