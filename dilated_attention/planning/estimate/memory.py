"""Computes the peak memory of one attention call of any kind, term by term, without allocating its tensors.

``engine.memory`` covers dense and dilated attention. This module covers block patterns, sequences sharded over processes, and two
baselines: the textbook matrix products (``standard``) and PyTorch's own function (``sdpa``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from dilated_attention.backends import BackendUnavailable, reasons_of, registry
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.block_kernels.block_gather import _PIECE_BYTES, _PIECE_BYTES_GPU
from dilated_attention.backends.selection import NESTED_CAPABILITIES
from dilated_attention.engine.branches.strategy import is_fused
from dilated_attention.engine.kernels.nested_selection import MIN_OPERATIONS, chunk_family, make_pieces
from dilated_attention.engine.kernels.tiles_choice import tiles_passes
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.estimate.block_counts import MOST_FOR_SIZE, BlockCounts, block_counts, parabola
from dilated_attention.planning.estimate.problem import WHOLE, Problem
from dilated_attention.planning.estimate.ring_memory import ring_blocks_memory, ring_memory
from dilated_attention.planning.whole_models.trace import fake_tensors, peak_of

Terms = list[tuple[str, int]]
# bytes per block needed temporarily while the lists by key block are built: row, key, the sorted copy and the sort order, in 64 bits
_SORT_BYTES = 40
# lengths whose traces are extrapolated to longer sequences
_FITTED = (2**12, 2**13, 2**14)
# backends whose backward over lists sums dq in float32
_SUMMING = ("flash4", "cudnn_fe")


def memory_of(problem: Problem) -> MemoryEstimate:
    """Returns the peak memory of the forward and, with ``training``, of the backward, on one process.

    The estimate counts the inputs, the results and everything allocated in between, including the caller's tensors. It excludes the
    framework itself and memory that the allocator holds in reserve.
    """
    if problem.kind == "standard":
        return _standard(problem)
    if problem.kind == "sdpa":
        return _sdpa(problem)
    if problem.world_size > 1:
        return ring_blocks_memory(problem) if problem.computes == "block_sparse" else ring_memory(problem)
    if problem.computes == "block_sparse":
        return _block_sparse(problem)
    assert isinstance(problem.pattern, DilatedPattern)
    return attention_memory(
        problem.pattern,
        problem.num_positions,
        problem.num_heads,
        problem.head_dim,
        batch_size=problem.batch_size,
        num_kv_heads=problem.num_kv_heads,
        dtype=problem.dtype,
        device_type=problem.device_type,
        is_causal=problem.is_causal,
        needs_grad=problem.training,
        nested=is_nested(problem),
        tiles=on_tiles(problem),
    )


def on_tiles(problem: Problem) -> tuple[bool, bool]:
    """Whether the forward and the backward run on a table of tiles, following the choice of ``backend="auto"``."""
    pattern = problem.pattern
    if not is_fused(problem.device_type) or not isinstance(pattern, DilatedPattern) or problem.kind in ("standard", "sdpa"):
        return False, False
    request = problem.request(backward=False, length=0)
    return tiles_passes(pattern, request, problem.batch_size, problem.num_positions, problem.training)


def is_nested(problem: Problem) -> bool:
    """Whether the forward visits pairs shared by nested branches only once, following the choice of ``backend="auto"``."""
    pattern = problem.pattern
    if not is_fused(problem.device_type) or not isinstance(pattern, DilatedPattern) or problem.kind in ("standard", "sdpa"):
        return False
    if reasons_of(NESTED_CAPABILITIES, problem.request(backward=False, length=0)) or (
        pattern.tail == "zero_keys" and not problem.is_causal
    ):
        return False
    piece = make_pieces(pattern, problem.num_heads, problem.num_positions)[0]
    if piece.split is None:
        return False
    family = chunk_family(pattern, piece.split, (0, problem.num_heads), problem.num_heads, piece.length)
    pairs = family.pairs() * problem.batch_size * problem.num_heads
    return 4 * problem.head_dim * pairs / (2 if problem.is_causal else 1) >= MIN_OPERATIONS


def counts_of(problem: Problem) -> BlockCounts:
    assert isinstance(problem.pattern, BlockPattern)
    return block_counts(problem.pattern, problem.num_positions, problem.num_heads, problem.is_causal)


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Returns (elements of q, elements of k, rows of lse)."""
    B, N, H, D = problem.batch_size, problem.num_positions, problem.num_heads, problem.head_dim
    return B * N * H * D, B * N * problem.num_kv_heads * D, B * N * H


def _block_sparse(problem: Problem) -> MemoryEstimate:
    pattern = problem.pattern
    assert isinstance(pattern, BlockPattern)
    counts = block_counts(pattern, problem.num_positions, problem.num_heads, problem.is_causal, MOST_FOR_SIZE)
    Q, K, R = _sizes(problem)
    e, a = problem.itemsize, accumulation_dtype(problem.dtype).itemsize
    inputs = (Q + 2 * K) * e
    common: Terms = [("q, k, v", inputs), ("lists of blocks", counts.list_bytes)]
    forward: Terms = [*common, ("out", Q * e), ("lse", R * a)]
    backward: Terms = [*common, ("out, dout", 2 * Q * e), ("lse", R * a)]
    grads = ("dq, dk, dv", (Q + 2 * K) * e)
    names = [_backend(problem, counts, backward=back) for back in (False, True)[: 1 + problem.training]]
    if names[0] in ("sdpa_cpu", "math"):
        forward += _gathered(problem, counts, backward=False)
    else:
        forward.append(("lists as the kernel reads them", 4 * counts.entries))
    if not problem.training:
        return MemoryEstimate(inputs=inputs, forward=_non_zero(forward))
    if names[1] in ("sdpa_cpu", "math"):
        backward += [("lse with +inf", R * a), ("dq", Q * e), ("sums of dk, dv", 2 * K * a)]
        # copied when the sums are not in the inputs' dtype, or are stored heads first
        copies = 2 * K * e if e != a else 2 * K * a if pattern.per_head else 0
        backward += [("dk, dv", copies), *_gathered(problem, counts, backward=True)]
    else:
        sums = 4 * (R * problem.head_dim + 2 * R) if names[1] in _SUMMING else 8 * R
        shared = 8 * K if names[1] in _SUMMING and problem.num_kv_heads < problem.num_heads else 0
        lists = 4 * counts.entries
        running = [("sums of the kernel in float32", sums + shared), ("lists as the kernel reads them", 2 * lists)]
        building = [("lists by key block, while they are sorted", _SORT_BYTES * counts.entries)]
        backward += [grads, *max(running, building, key=lambda terms: sum(size for _, size in terms))]
    return MemoryEstimate(inputs=inputs, forward=_non_zero(forward), backward=_non_zero(backward))


def _gathered(problem: Problem, counts: BlockCounts, *, backward: bool) -> Terms:
    """Terms of ``backends/block_kernels/block_gather.py``: heads-first copies, and one piece of gathered blocks with its intermediates."""
    Q, K, R = _sizes(problem)
    pattern, e = problem.pattern, problem.itemsize
    assert isinstance(pattern, BlockPattern)
    queries, keys = ((-(-problem.num_positions // block) * block / problem.num_positions) for block in (pattern.q_block, pattern.k_block))
    is_copied = problem.num_heads > 1 or problem.num_positions % max(pattern.q_block, pattern.k_block)
    copies = (3 * Q * queries if backward else Q * queries) + 2 * K * keys if is_copied else 0
    piece = min(_PIECE_BYTES if problem.device_type == "cpu" else _PIECE_BYTES_GPU, counts.entries * pattern.k_block * problem.head_dim * e)
    return [
        ("copies, heads first", int(copies) * e + (R * 4 if backward else 0)),
        ("a piece of gathered blocks", (8 if backward else 3) * piece),
    ]


def _backend(problem: Problem, counts: BlockCounts, *, backward: bool) -> str:
    mean = max(1, counts.computed // (problem.num_positions * problem.num_heads))
    request = problem.request(backward=backward, length=mean, blocks=counts.mask_kind)
    try:
        return registry.select(request).name
    except BackendUnavailable:
        return "math"


def _sdpa(problem: Problem) -> MemoryEstimate:
    """PyTorch's function on (B, H, N, D): one launch, with dense gradients, and on a GPU an additional dq in float32."""
    if problem.device_type == "cuda":
        return attention_memory(
            WHOLE,
            problem.num_positions,
            problem.num_heads,
            problem.head_dim,
            batch_size=problem.batch_size,
            num_kv_heads=problem.num_kv_heads,
            dtype=problem.dtype,
            device_type="cuda",
            is_causal=problem.is_causal,
            needs_grad=problem.training,
        )
    Q, K, R = _sizes(problem)
    e, a = problem.itemsize, accumulation_dtype(problem.dtype).itemsize
    # k and v are copied for each of the query heads that share them
    expanded = 2 * (Q - K) * e
    inputs = (Q + 2 * K) * e
    forward = [("q, k, v", inputs), ("k, v of each query head", expanded), ("out", Q * e), ("lse", R * a)]
    backward: Terms = []
    if problem.training:
        backward = [("q, k, v", inputs), ("k, v of each query head", 2 * expanded), ("out, dout", 2 * Q * e), ("lse", R * a)]
        backward.append(("dq, dk, dv", (Q + 2 * K) * e))
    return MemoryEstimate(inputs=inputs, forward=_non_zero(forward), backward=_non_zero(backward))


def _standard(problem: Problem) -> MemoryEstimate:
    Q, K, _ = _sizes(problem)
    e = problem.itemsize
    inputs = (Q + 2 * K) * e
    on_gpu = problem.device_type == "cuda"
    sizes = (problem.batch_size, problem.num_positions, problem.num_heads, problem.num_kv_heads, problem.head_dim)
    forward, both = _standard_peaks_at(*sizes, problem.dtype, problem.is_causal, problem.training, on_gpu)
    terms = [("q, k, v", inputs), ("out", Q * e), ("scores and weights of all pairs", forward - Q * e)]
    backward: Terms = []
    if problem.training:
        rest = both - (3 * Q + 2 * K) * e
        backward = [
            ("q, k, v", inputs),
            ("out, dout", 2 * Q * e),
            ("dq, dk, dv", (Q + 2 * K) * e),
            ("scores, weights and their gradients", rest),
        ]
    # autograd computes dv before the weights' gradient: dv takes the memory of the scores, where no matrix fits afterwards
    reserve = problem.batch_size * problem.num_heads * problem.num_positions**2 * e if problem.training and on_gpu else 0
    return MemoryEstimate(inputs=inputs, forward=_non_zero(terms), backward=_non_zero(backward), reserve=reserve)


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes softmax(q·kᵀ/√D)·v as in textbooks, with all N² scores in memory: the baseline of plans and benchmarks.

    q (B, N, H, D), k and v (B, N, Hk, D) → (B, N, H, D). ``hidden`` is an (N, N) mask, true where a query does not see a key, for calls
    that share one; None builds it here from ``is_causal``.
    """
    if is_causal and hidden is None:
        # allocated before the scores: after them it would take the memory of a freed matrix, and no other matrix would fit there again
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    # reusing the name keeps at most two matrices alive at a time
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2)


def _standard_peaks_at(batch: int, num_positions: int, *rest: Any) -> tuple[int, int]:
    """The peaks at any length: from a few thousand positions on, the same moment is the highest, and its bytes are quadratic in N."""
    if num_positions <= _FITTED[-1]:
        return _standard_peaks(batch, num_positions, *rest)
    known = [_standard_peaks(batch, n, *rest) for n in _FITTED]
    return parabola(_FITTED, [x[0] for x in known], num_positions), parabola(_FITTED, [x[1] for x in known], num_positions)


@functools.lru_cache(maxsize=512)
def _standard_peaks(
    batch: int, num_positions: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, is_causal: bool, training: bool,
    on_gpu: bool
) -> tuple[int, int]:  # fmt: skip
    """Returns the peak bytes in addition to q, k and v: of the forward, and of forward and backward together."""
    with fake_tensors():
        shapes = [(batch, num_positions, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        q, k, v = (torch.empty(shape, dtype=dtype) for shape in shapes)
        with torch.no_grad():
            forward = peak_of(lambda: standard_attention(q, k, v, is_causal=is_causal), on_gpu=on_gpu)
        if not training:
            return forward, 0
        leaves = [x.requires_grad_() for x in (q, k, v)]
        dout = torch.empty(shapes[0], dtype=dtype)
        kept: list[torch.Tensor] = []

        def step() -> object:
            kept.append(standard_attention(*leaves, is_causal=is_causal))
            return torch.autograd.grad(kept, leaves, dout)

        return forward, peak_of(step, on_gpu=on_gpu) + dout.numel() * dout.element_size()


def _non_zero(terms: Terms) -> tuple[tuple[str, int], ...]:
    return tuple((what, int(size)) for what, size in terms if size)
