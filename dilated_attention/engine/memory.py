"""Estimates the bytes that dilated attention takes from shapes alone, by adding up what the engine allocates, in the same order.

Q = B·N·H·D and K = B·N·Hk·D elements of e bytes in the inputs' dtype, a bytes in the accumulation dtype (float32, or float64
for float64); R = B·N·H rows of the log-sum-exp.

On a GPU (``branches/strategy.py``), with parts = the branch buffers of a chunk. They are freed as soon as the chunk's kernels are issued,
so the buffers of the chunk on the other stream are in the allocator's reserve (measured by ``tests/gpu/test_engine.py`` and
bench extreme):

    forward   inputs (Q + 2K)·e + out Q·e + lse R·a + parts
    backward  inputs (Q + 2K)·e + out, dout 2·Q·e + lse R·a + dq, dk, dv (Q + 2K)·e + parts, the chunk's lse, and what a launch sums
              in float32: dq, and also dk and dv where query heads share them (FlashAttention's kernels)

On a GPU where a pass runs on tiles (``kernels/tiles_choice.py``), with P places in all branches except the direct one, which has rate 1
(``kernels/tiles_layout.py``):

    forward   inputs (Q + 2K)·e + out Q·e + lse R·4 + B·H·P·(D·e + 4)
    backward  inputs (Q + 2K)·e + out, dout 2·Q·e + lse R·4 + dq, dk, dv (Q + 2K)·e + dq, dk, dv at the places, each P·D·e per head, and
              8 bytes (16 with dropout) for each head and each place of all branches

On a CPU (``branches/sequential.py``):

    forward   inputs (Q + 2K)·e + out Q·a + lse R·a + the results of one launch and of the previous one
    backward  inputs (Q + 2K)·e + out, dout 2·Q·e + lse 3·R·a + dq, dk, dv (Q + 2K)·a + the results of two launches
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches.branch_buffers import make_branch_buffers
from dilated_attention.engine.branches.chunking import ChunkSizes, make_tiers
from dilated_attention.engine.branches.launch_views import PART_BYTES
from dilated_attention.engine.branches.plan import Plan, Problem, Shape, make_plan
from dilated_attention.engine.branches.strategy import (
    backward_chunk_sizes,
    forward_chunk_sizes,
    has_own_keys,
    is_fused,
    is_one_problem,
)
from dilated_attention.engine.branches.views import key_rows, launches, query_rows
from dilated_attention.engine.kernels.nested_selection import SequencePiece, make_pieces
from dilated_attention.engine.kernels.tiles_layout import tiles_scratch
from dilated_attention.pattern import DilatedPattern

# kernels pad the rows of their sums to a multiple of this
_TILE = 128


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes alive at the peak of each pass, itemized. ``str()`` prints both lists.

    Args:
        inputs: bytes of q, k, v and the key padding mask.
        forward: (what, bytes) at the peak of the forward, including the inputs.
        backward: the same for the backward; empty without one.
        reserve: bytes in addition to the peak that torch's allocator is known to hold in blocks too small for any further tensor.
    """

    inputs: int
    forward: tuple[tuple[str, int], ...]
    backward: tuple[tuple[str, int], ...] = ()
    reserve: int = 0

    @property
    def forward_peak(self) -> int:
        return sum(size for _, size in self.forward)

    @property
    def backward_peak(self) -> int:
        return sum(size for _, size in self.backward)

    @property
    def peak(self) -> int:
        """Bytes alive at the peak of the whole call."""
        return max(self.forward_peak, self.backward_peak)

    def __str__(self) -> str:
        lines = []
        for name, terms, total in (("forward", self.forward, self.forward_peak), ("backward", self.backward, self.backward_peak)):
            if terms:
                lines.append(f"{name:<34}{_mib(total)}")
                lines += [f"  {what:<32}{_mib(size)}" for what, size in terms]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes per element: e for the inputs, a for the accumulators, o for the forward's output while it is computed."""

    e: int
    a: int
    o: int
    on_cpu: bool


def attention_memory(
    pattern: DilatedPattern,
    num_positions: int,
    num_heads: int,
    head_dim: int,
    *,
    batch_size: int = 1,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
    is_causal: bool = False,
    needs_grad: bool = True,
    key_padding_mask: bool = False,
    nested: bool = False,
    tiles: tuple[bool, bool] = (False, False),
    detached: bool = False,
    dropout: bool = False,
    saved_bytes: int = 0,
    expands_keys: bool = False,
) -> MemoryEstimate:
    """Estimates the peak memory of ``dilated_attention`` on contiguous q, k, v (and dout), as the engine allocates it.

    Counted are the tensors of the call, including those of its caller, and the float32 sums that backward kernels keep on a GPU, which for
    one long problem are as large as a gradient. Not counted are other allocations of a kernel, such as for results that it cannot write
    into a given tensor (bounded by a launch, see ``PART_BYTES``), cached or fragmented memory of an allocator, and torch itself.

    Args:
        pattern: branches and head offsets.
        num_positions: N, the number of queries and of keys.
        num_heads: H.
        head_dim: D.
        batch_size: B.
        num_kv_heads: Hk; None for H.
        dtype: dtype of q, k, v.
        device_type: ``"cpu"`` or ``"cuda"``; it determines how much one launch may return.
        is_causal, key_padding_mask: as in the call.
        nested: the forward visits pairs of nested branches once (``nested_selection.py``) where branches nest, and has no parts for them.
        tiles: whether the forward and the backward run on tiles (``tiles_choice.choices_of``).
        detached, dropout: as in the call. They count where a pass runs on tiles; other estimates are for exact mixing without dropout.
        saved_bytes: bytes of the per-branch outputs that the forward saves for the backward (``prepare.saved_elements``).
        expands_keys: the backward's kernel has dk and dv of each query head, as PyTorch's own have on a GPU, before they are summed.
        needs_grad: whether to include the backward. The estimate assumes no gradient of lse.

    >>> pattern = DilatedPattern((2048, 8192), (1, 4))
    >>> print(attention_memory(pattern, 2**20, 8, 64))
    """
    H, Hk, D, B, N = num_heads, num_kv_heads or num_heads, head_dim, batch_size, num_positions
    shape = Shape(H, Hk, (0, N), (0, N), ((0, N),), is_causal)
    plan = make_plan(pattern, shape)
    e, a = dtype.itemsize, accumulation_dtype(dtype).itemsize
    sizes = _Sizes(e, a, e if plan.single else a, device_type == "cpu")
    Q, K, R = B * N * H * D, B * N * Hk * D, B * N * H
    max_bytes = PART_BYTES.get(device_type, PART_BYTES["cuda"])

    mask = B * N if key_padding_mask else 0
    inputs = (Q + 2 * K) * e + mask
    # with padding, k and v are copied with their padded rows zeroed
    common = [("q, k, v", inputs), ("k, v without padding", 2 * K * e if key_padding_mask else 0)]
    queries = torch.empty((B, N, H, D), device="meta", dtype=dtype)
    keys = torch.empty((B, N, Hk, D), device="meta", dtype=dtype)

    if is_fused(device_type) and dtype is not torch.float64:
        scratch = functools.partial(
            tiles_scratch, pattern, shape, B, D, dtype, detached=detached, is_saved=saved_bytes > 0, dropout=dropout
        )
        common.append(("the branches' own outputs", saved_bytes))
        terms = [*common, ("out", Q * e), ("lse", R * a)]
        if tiles[0]:
            terms.append(("scratch of the tiles", scratch(is_backward=False)))
        else:
            pieces = make_pieces(pattern, H, N) if nested else (SequencePiece(0, N, None),)
            terms.append(("parts", max(_forward_parts(pattern, piece, shape, queries, keys, a) for piece in pieces)))
        if not needs_grad:
            return MemoryEstimate(inputs=inputs, forward=_non_zero(terms))
        grads = [*common, ("out, dout", 2 * Q * e), ("lse", R * a), ("dq, dk, dv", (Q + 2 * K) * e)]
        if tiles[1]:
            grads.append(("scratch of the tiles", scratch(is_backward=True)))
            return MemoryEstimate(inputs=inputs, forward=_non_zero(terms), backward=_non_zero(grads))
        if has_own_keys(pattern, shape):
            chunk_sizes = backward_chunk_sizes(pattern, shape, queries, keys)
            grads.append(("parts", _parts(pattern, shape, lambda tier: backward_chunk_sizes(tier, shape, queries, keys), B, 3 * D * e, 0)))
        else:
            chunk_sizes = backward_chunk_sizes(pattern, shape, queries, keys, in_buffers=False)
            share = chunk_sizes.heads * chunk_sizes.positions / (H * N)
            grads.append(("dq, dk, dv of the chunks in float32", int((Q + 2 * K) * (a + e) * share)))
        grads.append(("lse of the chunks", B * chunk_sizes.heads * chunk_sizes.positions * a))
        grads.append(("sums of kernels in float32", _kernel_sums(pattern, shape, chunk_sizes, B, D, e if expands_keys else 0)))
        return MemoryEstimate(inputs=inputs, forward=_non_zero(terms), backward=_non_zero(grads))

    if not key_padding_mask and is_one_problem(pattern, shape):
        # the kernel's results are those of the call
        whole_forward = [*common, ("out", Q * e), ("lse", R * a)]
        whole_backward = [*common, ("out, dout", 2 * Q * e), ("lse", R * a), ("dq, dk, dv", (Q + 2 * K) * e)]
        return MemoryEstimate(inputs=inputs, forward=_non_zero(whole_forward), backward=_non_zero(whole_backward if needs_grad else []))

    running = list(_forward_launches(plan, queries, keys, max_bytes, sizes))
    rounded = Q * e if sizes.o != e else 0
    transient = max(_two_in_a_row(running), rounded + (running[-1][0] if running else 0))
    forward = [*common, ("out", Q * sizes.o), ("lse", R * a), ("launch results, rounded out", transient)]
    backward: list[tuple[str, int]] = []
    if needs_grad:
        results = list(_backward_launches(plan, queries, keys, max_bytes, sizes))
        rounded = (Q + 2 * K) * e if a != e else 0
        transient = max(_two_in_a_row(results), rounded + (results[-1][0] if results else 0))
        # lse as saved, in the engine's layout (the same memory if there is one head), and with +inf for empty rows
        lse = R * a * (3 if H > 1 else 2)
        backward = [*common, ("out, dout", 2 * Q * e), ("lse", lse), ("dq, dk, dv", (Q + 2 * K) * a)]
        backward.append(("launch results, rounded dq, dk, dv", transient))
    return MemoryEstimate(inputs=inputs, forward=_non_zero(forward), backward=_non_zero(backward))


def _parts(
    pattern: DilatedPattern, shape: Shape, chunk_sizes: Callable[[DilatedPattern], ChunkSizes], batch: int, row_bytes: int, lse_bytes: int
) -> int:
    """Returns the bytes of a chunk's branch buffers, in the tier where they are largest."""
    if make_plan(pattern, shape).single and not (pattern.tail == "zero_keys" and not shape.is_causal):
        return 0
    tiers = make_tiers(pattern, shape.num_heads, chunk_sizes)
    return max(_layer_bytes(tier, shape, chunk_sizes(tier), batch, row_bytes, lse_bytes) for tier in tiers)


def _layer_bytes(pattern: DilatedPattern, shape: Shape, chunk_sizes: ChunkSizes, batch: int, row_bytes: int, lse_bytes: int) -> int:
    first = next(chunk_sizes.chunks(shape.num_heads, shape.queries[1]))
    layers = make_branch_buffers(pattern, shape.num_heads, first.heads, first.positions[1] - first.positions[0], shape.is_causal)
    rows = layers.rows(with_direct=False) * row_bytes + layers.rows(with_direct=True) * lse_bytes
    return batch * layers.heads * rows


def _forward_parts(
    pattern: DilatedPattern, piece: SequencePiece, whole: Shape, queries: torch.Tensor, keys: torch.Tensor, lse_bytes: int
) -> int:
    """Returns the bytes of a piece's branch buffers. If its nested branches are visited together, only the others have buffers."""
    positions = (0, piece.length)
    shape = replace(whole, queries=positions, keys=positions, documents=(positions,))
    q, k = queries[:, : piece.length], keys[:, : piece.length]
    row_bytes = q.shape[3] * q.element_size()
    if piece.split is None:
        return _parts(pattern, shape, lambda tier: forward_chunk_sizes(tier, shape, q, k), q.shape[0], row_bytes, lse_bytes)
    if piece.split.others is None:
        return 0
    chunk_sizes = forward_chunk_sizes(pattern, shape, q, k, waiting=piece.split.layers)
    return _layer_bytes(piece.split.layers, shape, chunk_sizes, q.shape[0], row_bytes, lse_bytes)


def _kernel_sums(pattern: DilatedPattern, shape: Shape, chunk_sizes: ChunkSizes, batch: int, head_dim: int, expanded: int) -> int:
    """Returns the bytes that the largest backward launch accumulates: dq, two numbers per row, and dk and dv of heads that share them.

    ``expanded``: bytes per element of dk and dv of each query head, or 0 if the kernel sums those of a key head.
    """
    positions = (0, min(chunk_sizes.positions, shape.queries[1]))
    part = replace(shape, queries=positions, keys=positions, documents=(positions,), heads=(0, min(chunk_sizes.heads, shape.num_heads)))
    sizes = []
    for problem in make_plan(pattern, part).problems:
        rows, keys = (-(-length // _TILE) * _TILE for length in (problem.q_len, problem.k_len))
        launch = PART_BYTES["cuda"] // (4 * head_dim * problem.heads.count)
        segments = min(batch * problem.segments, max(1, launch // max(rows, keys)))
        shared = 2 * keys * head_dim * (problem.heads.count * expanded or 4 * problem.heads.kv_count)
        sums = 4 * rows * problem.heads.count * (head_dim + 2)
        sizes.append(segments * (sums + shared * (shape.num_kv_heads < shape.num_heads)))
    return max(sizes, default=0)


def _forward_launches(plan: Plan, q: torch.Tensor, k: torch.Tensor, max_bytes: int, sizes: _Sizes) -> Iterator[tuple[int, int]]:
    """Yields (results, temporaries of the merge) of each launch, in bytes."""
    for problem in plan.problems:
        for rows, _ in _rows_of_launches(problem, q, k, max_bytes):
            elements, heads = rows * problem.heads.count * q.shape[-1], rows * problem.heads.count
            temporaries = 0
            if not problem.first:
                # a copy of the part in the accumulation dtype, and four tensors and one mask of lse's shape
                temporaries = (elements * sizes.a if sizes.e != sizes.a else 0) + heads * (4 * sizes.a + 1)
            yield elements * sizes.e + heads * sizes.a, temporaries


def _backward_launches(plan: Plan, q: torch.Tensor, k: torch.Tensor, max_bytes: int, sizes: _Sizes) -> Iterator[tuple[int, int]]:
    """Yields (results, temporaries of adding them up) of each launch, in bytes."""
    for problem in plan.problems:
        for rows, key_rows_ in _rows_of_launches(problem, q, k, max_bytes):
            dq, dk = rows * problem.heads.count * q.shape[-1], key_rows_ * problem.heads.kv_count * q.shape[-1]
            # torch's CPU kernels convert a whole operand before they add it to a tensor of another dtype
            temporaries = max(dq, dk) * sizes.a if sizes.on_cpu and sizes.e != sizes.a else 0
            yield (dq + 2 * dk) * sizes.e, temporaries


def _rows_of_launches(problem: Problem, q: torch.Tensor, k: torch.Tensor, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (query rows, key rows) of the launches, cut as the engine cuts them, on views of tensors without memory.

    Of a sequence of equal launches it yields only two, since only the results of a launch and of the previous one are alive at a time.
    """
    views = [query_rows(problem, 0).of(q), key_rows(problem, 0).of(k)]
    max_rows = max_bytes // (4 * q.shape[-1] * problem.heads.count)
    for q_PLGD, k_PSKD in launches(views, max_batch=None, max_extent=None, max_rows=None):
        (P, L), S = q_PLGD.shape[:2], k_PSKD.shape[1]
        size = min(P, max(1, max_rows // max(1, L, S)))
        whole, rest = divmod(P, size)
        for problems in [size] * min(whole, 2) + [rest] * (rest > 0):
            yield problems * L, problems * S


def _two_in_a_row(running: list[tuple[int, int]]) -> int:
    """Returns the most bytes alive at once: a launch's results together with those of the previous launch, or while they are merged."""
    most = before = 0
    for results, temporaries in running:
        most = max(most, before + results, results + temporaries)
        before = results
    return most


def _non_zero(terms: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((what, size) for what, size in terms if size)


def _mib(size: int) -> str:
    return f"{size / 2**20:>12,.1f} MiB"
