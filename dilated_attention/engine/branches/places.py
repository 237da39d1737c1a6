"""Where the branches' results wait, and what combines them: the same places (``backends/tiles/table.py``) and kernels for both runners.

A branch of rate 1 that every head runs needs no places: its kernel writes into the result itself (the "direct" branch).

A call is cut into chunks, so that results that wait take bounded memory, however long the sequence is: heads are independent of each other,
and so are ranges of positions that begin and end at a segment boundary of every branch. So a call is cut into chunks of heads × positions,
each of which is a separate call on views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dilated_attention.backends.hardware import keep_for_graph, on_device
from dilated_attention.backends.tiles.table import Walk, counts_of, place_of, share_keys
from dilated_attention.engine.branches.launches import PART_BYTES, View
from dilated_attention.engine.branches.problems import Problem, Range, Shape, offsets_of, whole_shape
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern


class Layout(NamedTuple):
    """The layout of some query heads: walk, offset of each branch and head, and whether query heads of one key head read the same keys."""

    walk: Walk
    offsets: tuple[tuple[int, ...], ...]
    shared: bool

    @property
    def num_places(self) -> int:
        return counts_of(self.walk, False).num_places


@functools.lru_cache(maxsize=256)
def layout_of(pattern: DilatedPattern, shape: Shape, keeps_parts: bool, heads: Range) -> Layout:
    """Returns the layout of query heads [first, last). With ``keeps_parts``, per-branch outputs are saved, so no branch is direct."""
    rows = tuple([row[slice(*heads)] for row in offsets_of(pattern, shape.num_heads)])
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
        spans, _, _ = p.tables.parts()
        p.launches[strides][0]([*results, *parts, spans, *p.tables.of_pattern, p.offsets], p.index)


# a call limits its transient memory to this many bytes, or to this share of the bytes of q, k and v if that is more
TRANSIENT_BYTES = 512 * 2**20
# a backward makes three launches where a forward makes one, so its chunks must be larger to keep the GPU from waiting for the CPU
BACKWARD_TRANSIENT_BYTES = 2 * TRANSIENT_BYTES
TRANSIENT_SHARE = 0.05
# number of chunks that are computed concurrently
CONCURRENT_CHUNKS = 2


class Stage(NamedTuple):
    """Branches that are merged together, chunk by chunk.

    Args:
        pattern: their pattern.
        heads, positions: of each chunk.
        concurrent: number of chunks that are alive at once.
        merged: index of the branch of the pattern that stands for the merged result of the earlier stages; None in the first stage.
    """

    pattern: DilatedPattern
    heads: int
    positions: int
    concurrent: int = 1
    merged: int | None = None

    @property
    def branches(self) -> tuple[int, ...]:
        """The branches of the pattern that this stage computes."""
        return tuple([b for b in range(self.pattern.num_branches) if b != self.merged])

    def chunks(self, num_heads: int, num_positions: int) -> Iterator[tuple[Range, Range]]:
        """Yields heads [first, last) and positions [first, last)."""
        for start in range(0, num_positions, self.positions):
            for head in range(0, num_heads, self.heads):
                yield (head, min(head + self.heads, num_heads)), (start, min(start + self.positions, num_positions))


def input_bytes(shape: Shape, size: tuple[int, int, int]) -> int:
    """Returns the bytes of q, k and v. ``size``: see ``Plan``."""
    batch, head_dim, itemsize = size
    queries, keys = (last - first for first, last in (shape.queries, shape.keys))
    return batch * (queries * shape.num_heads + 2 * keys * shape.num_kv_heads) * head_dim * itemsize


def transient_budget(input_bytes: int, *, is_backward: bool = False) -> int:
    return max(BACKWARD_TRANSIENT_BYTES if is_backward else TRANSIENT_BYTES, int(TRANSIENT_SHARE * input_bytes))


def stages_of(
    pattern: DilatedPattern, shape: Shape, size: tuple[int, int, int], is_backward: bool, at_places: bool = True
) -> tuple[Stage, ...]:
    """Returns the stages of a pass of self-attention.

    A forward keeps out in the inputs' dtype and a lse; a backward dq, dk and dv, and the launch on each stream accumulates dq in float32.

    Args:
        size: see ``Plan``.
        at_places: of a backward; otherwise it runs problem by problem.
    """
    batch, head_dim, itemsize = size
    width, budget = head_dim * itemsize, transient_budget(input_bytes(shape, size), is_backward=is_backward)
    if not is_backward:
        return make_stages(pattern, shape, batch * (width + 4), budget)
    budget -= CONCURRENT_CHUNKS * PART_BYTES["cuda"]
    if at_places:
        return make_stages(pattern, shape, batch * 3 * width, budget)
    # problem by problem, dq, dk and dv of the chunk are summed in float32, which takes as much as a branch that covers every row
    everything = DilatedPattern((shape.queries[1],) * 2, (1, 1), "zero")
    (stage,) = make_stages(everything, shape, batch * 3 * head_dim * 4, budget)
    return (stage._replace(pattern=pattern),)


def make_stages(pattern: DilatedPattern, shape: Shape, row_bytes: int, budget: int) -> tuple[Stage, ...]:
    """Returns one stage, in the largest chunks whose parts together fit ``budget`` bytes.

    If not even the smallest chunks fit, because some segments are nearly as long as the sequence, there are two stages where these take
    less: that of the short segments in chunks of positions, then that of the long ones, which have few parts, as their rates are high.

    Args:
        row_bytes: bytes that a part keeps for one position of one head, of all batch entries.
    """
    stage, least = _stage_of(pattern, shape, row_bytes, budget)
    best: tuple[Stage, ...] = (stage,)
    if least > budget and pattern.branch_heads == "all":
        rows, ordered = offsets_of(pattern, shape.num_heads), sorted(range(pattern.num_branches), key=pattern.segment_lengths.__getitem__)
        branches = [(*pattern.branches[b], rows[b]) for b in ordered]
        # stands for the result of the short segments
        result = shape.queries[1], 1, (0,) * shape.num_heads
        for count in range(1, len(branches)):
            short, short_bytes = _stage_of(_pattern_of(branches[:count], pattern.tail), shape, row_bytes, budget)
            long, long_bytes = _stage_of(_pattern_of([result, *branches[count:]], pattern.tail), shape, row_bytes, budget)
            if max(short_bytes, long_bytes) < least:
                best, least = (short, long._replace(merged=0)), max(short_bytes, long_bytes)
    return best


def _pattern_of(branches: Sequence[tuple[int, int, tuple[int, ...]]], tail: str) -> DilatedPattern:
    lengths, rates, offsets = zip(*branches, strict=True)
    return DilatedPattern(lengths, rates, offsets, tail=tail)


def _stage_of(pattern: DilatedPattern, shape: Shape, row_bytes: int, budget: int) -> tuple[Stage, int]:
    """Returns the stage of all branches of a pattern, and the bytes of the parts of the chunks that are alive at once."""
    (_, num_positions), num_heads, num_kv_heads = shape.queries, shape.num_heads, shape.num_kv_heads
    group = num_heads // num_kv_heads

    def part_bytes(heads: int, positions: int) -> int:
        shape = whole_shape(num_heads, num_heads, positions, False)
        return heads * layout_of(pattern, shape, False, (0, heads)).num_places * row_bytes

    whole = part_bytes(num_heads, num_positions)
    if whole <= budget:
        return Stage(pattern, num_heads, num_positions), whole
    budget //= CONCURRENT_CHUNKS
    # positions after which all branches begin a segment; with zero keys, padding depends on N
    period = num_positions if pattern.tail == "zero_keys" else min(num_positions, math.lcm(*pattern.segment_lengths))
    per_period = part_bytes(num_heads, period)
    if period < num_positions and per_period <= budget:
        periods = budget // per_period
        return Stage(pattern, num_heads, period * periods, CONCURRENT_CHUNKS), CONCURRENT_CHUNKS * per_period * periods
    kv_heads = max(1, budget // max(1, per_period // num_kv_heads))
    # the same number of chunks, but of equal size
    kv_heads = -(-num_kv_heads // -(-num_kv_heads // kv_heads))
    of_chunk = part_bytes(kv_heads * group, period)
    # one at a time where two of the smallest chunks are too many
    concurrent = CONCURRENT_CHUNKS if of_chunk <= budget else 1
    return Stage(pattern, kv_heads * group, period, concurrent), concurrent * of_chunk
