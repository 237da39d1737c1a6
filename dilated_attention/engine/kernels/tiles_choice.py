"""Decides whether a whole call runs on the kernels that walk a table of tiles, or problem by problem on a kernel library.

A library's kernels are faster on long problems, but every problem is a separate launch, which takes more host time than GPU time at
short lengths. So both times are estimated from the shipped rates and the plan's launches, and the faster way is chosen.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dilated_attention.backends import AttentionRequest, Capabilities, rates, registry
from dilated_attention.engine.branches.chunking import CallSizes, chunk_sizes
from dilated_attention.engine.branches.launches import PART_BYTES
from dilated_attention.engine.branches.problems import Shape, whole_shape
from dilated_attention.engine.kernels.tiles import head_bytes
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern

NAME = "tiles"
# Host time in ms, forward and backward, of one launch of a library (its views and kernels), and of the rest of a call, on H200s. The
# backward takes 0.095 and 0.35 where a launch of torch's takes 7 µs; hosts of other machines took up to 1.5 times as long. A whole call
# on tiles takes less than 0.1 and 0.25.
_PROBLEM_MS = {False: 0.09, True: 0.12}
_CALL_MS = {False: 0.2, True: 0.5}
# the same of a call that is one launch without copies of q, k and v: not more than that of the tiles, so their kernels decide
_LAUNCH_MS = 0.09
# measured time of the tiles under causality over that of their rate, for self-attention of one sequence: LongNet's segments, 12 x 64
# and 16 x 128, 32,768 to 1,048,576 positions, on an H200
_CAUSAL = 1.3
# TFLOP/s of the tiles and of a library, in half precision and float32, for requests without a row in the table
_TILES_TFLOPS = {False: (250.0, 45.0), True: (190.0, 33.0)}
_LIBRARY_TFLOPS = {False: (420.0, 35.0), True: (380.0, 30.0)}
# bytes per element of a problem's results that are read and written to sum them, forward and backward; bytes/s of such sums
_SUM_BYTES = {False: 12, True: 36}
_MEMORY = 2e12
# measured time of a library's kernels in a cut call over that of their rates: GigaPath's segments, half of 50,000 and of 200,000 queries,
# on H200s (benchmarks/results/2026-11-23-h200x2/rings.md)
_CUT = 1.6
# kernels that are slower than the tiles at every length; those of the second set only in half precision
_SLOWER = frozenset({"math", "flex"})
_SLOWER_HALF = frozenset({"sdpa_efficient", "xformers"})


def is_packed(pattern: DilatedPattern, shape: Shape, capabilities: Capabilities, batch: int) -> bool:
    """Whether a library that takes boundaries in place of problems computes a call in one launch, if it has no mask by position and its
    backward no gradient of lse."""
    if not capabilities.documents or batch != 1 or shape.window is not None or shape.heads is not None:
        return False
    if pattern.branches[0][1] != 1 or pattern.num_branches > 1 or pattern.branch_heads != "all":
        return False
    # a segment at the end has zero keys
    if pattern.tail != "mask" and not shape.is_causal:
        return False
    # keys of a part of the sequence, like those of one rank, have other positions; self-attention of one document is folded into a batch
    if shape.keys != (0, shape.documents[-1][1]) or shape.queries[1] > shape.keys[1]:
        return False
    return len(shape.documents) > 1 or shape.is_cut


def packed_library(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, preferred: str) -> str:
    """Returns the library for a call over documents or a part of the queries.

    It is the preferred one, which computes problem by problem, unless one that takes boundaries in place of problems is faster.
    """
    may_be_packed = pattern.num_branches == 1 and (shape.is_cut or len(shape.documents) > 1)
    if request.hardware.device_type != "cuda" or request.key_mask or request.dropout or not may_be_packed:
        return preferred
    for name in registry.order(request):
        backend = registry.get(name)
        if not is_packed(pattern, shape, backend.capabilities, batch) or backend.reasons_against(request):
            continue
        packed_ms, preferred_ms = (library_ms(pattern, shape, request, batch, which) for which in (name, preferred))
        if name == preferred or packed_ms > preferred_ms:
            return preferred
        registry.tell_once(f"backend {name} (in place of {preferred}, estimated to take longer or as long) for {request.describe()}")
        return name
    return preferred


def runs_on_tiles(
    pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, library: str, *, both: bool = False, named: bool = False,
    host_ms: float = 0.0,
) -> bool:  # fmt: skip
    """Whether a pass runs on tiles in place of ``library``.

    Args:
        both: both passes decide alike, by their times together: with detached mixing the backward reads what the forward saved.
        named: the caller named the library.
        host_ms: host time in ms that what surrounds the pass takes.
    """
    if shape.keys[0] or (shape.documents and shape.documents[-1][1] != shape.keys[1]):
        # tables have all keys of the documents
        return False
    if registry.get(library).capabilities.whole_calls and (named or not both):
        return True
    if named or request.hardware.device_type != "cuda":
        return False
    if shape.queries == shape.keys and len(shape.documents) == 1:
        # one answer for all lengths between two of four binary digits
        shape = whole_shape(shape.num_heads, shape.num_kv_heads, rounded(shape.keys[1]), shape.is_causal)._replace(window=shape.window)
    tiles = registry.get(NAME)
    passes = [replace(request, needs_grad=which, extent=0) for which in ((False, True) if both else (request.needs_grad,))]
    if any(tiles.reasons_against(request) for request in passes):
        return False
    tiles_total = library_total = 0.0
    for request in passes:
        # the smallest group of heads that can run at a time stays within the budget
        size = batch, request.head_dim, request.dtype.itemsize
        of_head, budget = head_bytes(pattern, shape, size, request.needs_grad, both)
        if of_head * (shape.num_heads // shape.num_kv_heads) > budget:
            return False
    for request in passes:
        name = packed_library(pattern, shape, request, batch, registry.select(request).name) if both else library
        if name in _SLOWER or (name in _SLOWER_HALF and request.dtype is not torch.float32):
            return True
        own_ms = tiles_ms(pattern, shape, request, batch, host_ms)
        tiles_total += own_ms
        library_total += own_ms if name == NAME else library_ms(pattern, shape, request, batch, name, host_ms)
    return tiles_total <= library_total


def rounded(num_positions: int) -> int:
    """Returns the number of positions by which decisions are made: the next one of four binary digits."""
    step = 1 << max(0, num_positions.bit_length() - 4)
    return -(-num_positions // step) * step


def _operations(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int) -> float:
    return (10 if request.needs_grad else 4) * request.head_dim * _pairs(pattern, shape) * batch


@functools.lru_cache(maxsize=16)
def _pairs(pattern: DilatedPattern, shape: Shape) -> int:
    pairs = sum(pattern.pairs(end - start, shape.num_heads, is_causal=shape.is_causal) for start, end in shape.documents)
    (first, last), num_keys = shape.queries, max(1, shape.keys[1])
    if shape.is_causal and len(shape.documents) == 1 and min(pattern.segment_lengths) >= num_keys:
        # later queries see more keys
        pairs = pairs * (last * (last + 1) - first * (first + 1)) // (num_keys * (num_keys + 1))
    else:
        pairs = pairs * (last - first) // num_keys
    if shape.window is not None and None not in shape.window:
        left, right = shape.window
        assert left is not None and right is not None
        pairs = min(pairs, (left + right + 1) * (shape.queries[1] - shape.queries[0]) * shape.num_heads)
    return pairs


def tiles_ms(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, host_ms: float = 0.0) -> float:
    rate = rates.rate_of(NAME, request) or _TILES_TFLOPS[request.needs_grad][request.dtype is torch.float32]
    kernels = _operations(pattern, shape, request, batch) / rate / 1e9
    is_whole = not shape.is_cut and len(shape.documents) == 1
    return max(kernels * (_CAUSAL if shape.is_causal and is_whole and pattern.num_branches > 1 else 1), host_ms) + 0.1


def library_ms(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, library: str, host_ms: float = 0.0) -> float:
    rate = rates.rate_of(library, request) or _LIBRARY_TFLOPS[request.needs_grad][request.dtype is torch.float32]
    kernels = _operations(pattern, shape, request, batch) / rate / 1e9
    masked = request.key_mask or request.dropout
    if not masked and is_packed(pattern, shape, registry.get(library).capabilities, batch):
        return max(kernels, _LAUNCH_MS + host_ms)
    launches = _launches(pattern, shape, request, batch)
    if launches > 1 and (shape.is_cut or len(shape.documents) > 1):
        # the results of a cut call are summed problem by problem, in float32, between short launches
        kernels *= _CUT
        rows = batch * shape.num_heads * sum(-(-(shape.queries[1] - shape.queries[0]) // rate) for rate in pattern.dilation_rates)
        kernels += rows * request.head_dim * _SUM_BYTES[request.needs_grad] / _MEMORY * 1e3
    if launches == 1 and shape.is_cut:
        return max(kernels, _LAUNCH_MS + host_ms)
    return max(kernels, launches * _PROBLEM_MS[request.needs_grad] + _CALL_MS[request.needs_grad] + host_ms)


def _launches(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int) -> int:
    """Estimates the number of kernel launches of a library, from a few integers a branch."""
    groups = _head_groups(pattern, shape.num_heads)
    N, H, D = shape.queries[1], shape.num_heads, request.head_dim
    if not request.needs_grad or len(shape.documents) > 1 or shape.queries != shape.keys:
        # every document has separate launches
        return sum(
            count * _runs(w, start, end) for (w, _), count in zip(pattern.branches, groups, strict=True) for start, end in shape.documents
        )
    # limited memory cuts a long backward into chunks, each with all problems, and cuts these further by what accumulates in float32
    cut = chunk_sizes(pattern, CallSizes(batch, N, H, shape.num_kv_heads, D, request.dtype.itemsize), True)
    positions, heads = min(cut.positions, N), min(cut.heads, H)
    of_chunk = 0
    for (w, rate), count in zip(pattern.branches, groups, strict=True):
        accumulated = 4 * D * batch * heads * -(-positions // rate)
        of_chunk += max(min(count, heads) * _runs(w, 0, positions), -(-accumulated // PART_BYTES["cuda"]))
    return of_chunk * -(-N // positions) * -(-H // heads)


@functools.lru_cache(maxsize=64)
def _head_groups(pattern: DilatedPattern, num_heads: int) -> tuple[int, ...]:
    """Returns the number of groups of heads of each branch that are one view: heads of one offset, or of offsets that grow evenly."""
    counts = []
    for row in pattern.offsets(num_heads):
        offsets = [offset for offset in row if offset != NOT_IN_BRANCH]
        different = len(set(offsets))
        counts.append(min(different, -(-len(offsets) // different)) if offsets else 0)
    return tuple(counts)


def _runs(length: int, start: int, end: int) -> int:
    """Returns the number of different lengths of the segments of a document: that of the last one differs."""
    return 1 + (end - start > length and (end - start) % length > 0)
