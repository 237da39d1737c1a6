"""Estimates the bytes that dilated attention takes from shapes alone, by adding up what the engine allocates, in the same order.

Q = B·N·H·D and K = B·N·Hk·D elements of e bytes in the inputs' dtype, a bytes in the accumulation dtype (float32, or float64
for float64); R = B·N·H rows of the log-sum-exp.

On a GPU (``branches/strategy.py``), with parts = the branch buffers of a chunk. They are freed as soon as the chunk's kernels are issued,
so the buffers of the chunk on the other stream are in the allocator's reserve (measured by ``tests/gpu/test_engine.py`` and
benchmarks extreme):

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
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches.branch_buffers import make_branch_buffers
from dilated_attention.engine.branches.chunking import CallSizes, ChunkSizes, backward_chunk_sizes, forward_chunk_sizes, make_tiers
from dilated_attention.engine.branches.launch_views import PART_BYTES
from dilated_attention.engine.branches.plan import Plan, Problem, Shape, make_plan
from dilated_attention.engine.branches.strategy import has_own_keys, is_fused, is_one_problem
from dilated_attention.engine.branches.views import key_rows, launches, query_rows
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
    """

    inputs: int
    forward: tuple[tuple[str, int], ...]
    backward: tuple[tuple[str, int], ...] = ()

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
    sizes = CallSizes(B, N, H, Hk, D, e)
    Q, K, R = B * N * H * D, B * N * Hk * D, B * N * H

    mask = B * N if key_padding_mask else 0
    inputs = (Q + 2 * K) * e + mask
    # with padding, k and v are copied with their padded rows zeroed
    common = [("q, k, v", inputs), ("k, v without padding", 2 * K * e if key_padding_mask else 0)]
    forward = [*common, ("out", Q * e), ("lse", R * a)]
    backward = [*common, ("out, dout", 2 * Q * e), ("lse", R * a), ("dq, dk, dv", (Q + 2 * K) * e)]

    if is_fused(device_type) and dtype is not torch.float64:
        scratch = functools.partial(
            tiles_scratch, pattern, shape, B, D, dtype, detached=detached, is_saved=saved_bytes > 0, dropout=dropout
        )
        forward, backward = ([*terms[:2], ("the branches' own outputs", saved_bytes), *terms[2:]] for terms in (forward, backward))
        if tiles[0]:
            forward.append(("scratch of the tiles", scratch(is_backward=False)))
        else:
            forward.append(("parts", _parts(pattern, shape, lambda tier: forward_chunk_sizes(tier, sizes), B, D * e, a)))
        if not needs_grad:
            return _estimate(inputs, forward, [])
        if tiles[1]:
            return _estimate(inputs, forward, [*backward, ("scratch of the tiles", scratch(is_backward=True))])
        chunk_sizes = backward_chunk_sizes(pattern, sizes, has_own_keys(pattern, shape))
        if has_own_keys(pattern, shape):
            backward.append(("parts", _parts(pattern, shape, lambda tier: backward_chunk_sizes(tier, sizes), B, 3 * D * e, 0)))
        else:
            share = chunk_sizes.heads * chunk_sizes.positions / (H * N)
            backward.append(("dq, dk, dv of the chunks in float32", int((Q + 2 * K) * (a + e) * share)))
        backward.append(("lse of the chunks", B * chunk_sizes.heads * chunk_sizes.positions * a))
        backward.append(("sums of kernels in float32", _kernel_sums(pattern, shape, chunk_sizes, B, D, e if expands_keys else 0)))
        return _estimate(inputs, forward, backward)

    if not key_padding_mask and is_one_problem(pattern, shape):
        # the kernel's results are those of the call
        return _estimate(inputs, forward, backward if needs_grad else [])

    def merged(problem: Problem, rows: int, _: int) -> tuple[int, int]:
        heads = rows * problem.heads.count
        # a copy of the part in the accumulation dtype, and four tensors and one mask of lse's shape
        temporaries = 0 if problem.first else (heads * D * a if e != a else 0) + heads * (4 * a + 1)
        return heads * (D * e + a), temporaries

    def added(problem: Problem, rows: int, keys: int) -> tuple[int, int]:
        dq, dk = rows * problem.heads.count * D, keys * problem.heads.kv_count * D
        # torch's CPU kernels convert a whole operand before they add it to a tensor of another dtype
        return (dq + 2 * dk) * e, max(dq, dk) * a if device_type == "cpu" and e != a else 0

    of_launches = functools.partial(_launch_bytes, plan, sizes, PART_BYTES.get(device_type, PART_BYTES["cuda"]))
    # the forward's output while it is computed
    o = e if plan.single else a
    forward = [*common, ("out", Q * o), ("lse", R * a), ("launch results, rounded out", of_launches(merged, Q * e if o != e else 0))]
    if not needs_grad:
        return _estimate(inputs, forward, [])
    # lse as saved, in the engine's layout (the same memory if there is one head), and with +inf for empty rows
    lse = R * a * (3 if H > 1 else 2)
    backward = [*common, ("out, dout", 2 * Q * e), ("lse", lse), ("dq, dk, dv", (Q + 2 * K) * a)]
    backward.append(("launch results, rounded dq, dk, dv", of_launches(added, (Q + 2 * K) * e if a != e else 0)))
    return _estimate(inputs, forward, backward)


def _estimate(inputs: int, *passes: list[tuple[str, int]]) -> MemoryEstimate:
    forward, backward = (tuple((what, size) for what, size in terms if size) for terms in passes)
    return MemoryEstimate(inputs=inputs, forward=forward, backward=backward)


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


def _launch_bytes(plan: Plan, sizes: CallSizes, max_bytes: int, of: Callable[[Problem, int, int], tuple[int, int]], rounded: int) -> int:
    """Returns the most bytes alive at once: a launch's results with those of the previous one, with their temporaries, or rounded at last.

    The launches are cut as the engine cuts them, on views of tensors without memory.

    Args:
        of: returns the bytes of (results, temporaries of merging or adding them) of a launch, from its problem, query rows and key rows.
        rounded: bytes of the results in the inputs' dtype.
    """
    B, N, H, Hk, D, _ = sizes
    q, k = (torch.empty((B, N, heads, D), device="meta") for heads in (H, Hk))
    most = before = 0
    for problem in plan.problems:
        max_rows = max_bytes // (4 * D * problem.heads.count)
        views = [query_rows(problem, 0, q), key_rows(problem, 0, k)]
        for q_PLGD, k_PSKD in launches(views, max_batch=None, max_extent=None, max_rows=None):
            (P, L), S = q_PLGD.shape[:2], k_PSKD.shape[1]
            size = min(P, max(1, max_rows // max(1, L, S)))
            whole, rest = divmod(P, size)
            # of a sequence of equal launches, two are enough
            for problems in [size] * min(whole, 2) + [rest] * (rest > 0):
                results, temporaries = of(problem, problems * L, problems * S)
                most = max(most, before + results, results + temporaries)
                before = results
    return max(most, rounded + before)


def readable(num_bytes: float) -> str:
    """Formats a number of bytes, e.g. as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.0f} TiB" if num_bytes >= 100 else f"{num_bytes:.3g} TiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:>12,.1f} MiB"
