"""Computes the peak memory of one attention call of any kind, term by term, without allocating its tensors.

``engine.memory`` covers dense and dilated attention. This module covers block patterns, sequences sharded over processes (on the rank that
needs the most), and two baselines: the textbook matrix products (``standard``) and PyTorch's own function (``sdpa``).
"""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, BackendUnavailable, registry
from dilated_attention.backends.base import Options, accumulation_dtype
from dilated_attention.backends.block_kernels.block_gather import _PIECE_BYTES, _PIECE_BYTES_GPU, pieces
from dilated_attention.engine.blocks.lists import block_lists
from dilated_attention.engine.branches.strategy import is_fused
from dilated_attention.engine.kernels.tiles_choice import tiles_passes
from dilated_attention.engine.memory import MemoryEstimate, attention_memory
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.estimate.block_counts import MOST_BLOCKS, MOST_FOR_SIZE, BlockCounts, block_counts, num_blocks
from dilated_attention.planning.estimate.problem import WHOLE, Problem
from dilated_attention.planning.estimate.ring_estimate import exchange_of, local_rows

Terms = list[tuple[str, int]]
# bytes per block needed temporarily while the lists by key block are built: row, key, the sorted copy and the sort order, in 64 bits
_SORT_BYTES = 40


def memory_of(problem: Problem) -> MemoryEstimate:
    """Returns the peak memory of the forward and, with ``training``, of the backward, on one process.

    The estimate counts the inputs, the results and everything allocated in between, including the caller's tensors. It excludes the
    framework itself and memory that the allocator holds in reserve.
    """
    if problem.kind == "standard":
        return _standard(problem)
    if problem.kind == "sdpa" and problem.device_type == "cpu":
        return _sdpa_cpu(problem)
    if problem.computes == "block_sparse":
        return _ring_blocks(problem) if problem.world_size > 1 else _block_sparse(problem)
    if problem.world_size > 1:
        return _ring(problem)
    pattern = WHOLE if problem.kind == "sdpa" else problem.pattern
    return _engine(problem, pattern, problem.num_positions, tiles=on_tiles(problem))


def _engine(
    problem: Problem, pattern: Any, num_positions: int, heads: tuple[int, int] | None = None, device_type: str = "", **options: Any
) -> MemoryEstimate:
    """Asks the engine's own account. ``heads``: of queries and of keys, if not all. ``device_type``: if not the problem's."""
    H, Hk = heads or (problem.num_heads, problem.num_kv_heads)
    return attention_memory(
        pattern, num_positions, H, problem.head_dim, batch_size=problem.batch_size, num_kv_heads=Hk, dtype=problem.dtype,
        device_type=device_type or problem.device_type, is_causal=problem.is_causal, needs_grad=problem.training,
        expands_keys=_expands_keys(problem), **options,
    )  # fmt: skip


def on_tiles(problem: Problem) -> tuple[bool, bool]:
    """Whether the forward and the backward run on a table of tiles, following the choice of ``backend="auto"``."""
    if (pattern := _fused_branches(problem)) is None:
        return False, False
    request = problem.request(backward=False, length=0)
    return tiles_passes(pattern, request, problem.batch_size, problem.num_positions, problem.training)


def _fused_branches(problem: Problem) -> DilatedPattern | None:
    """Returns the branches of a call that the engine may compute by kernels of its own."""
    is_other = problem.kind in ("standard", "sdpa") or not is_fused(problem.device_type)
    return None if is_other or not isinstance(problem.pattern, DilatedPattern) else problem.pattern


def counts_of(problem: Problem, most: int = MOST_BLOCKS) -> BlockCounts:
    assert isinstance(problem.pattern, BlockPattern)
    return block_counts(problem.pattern, problem.num_positions, problem.num_heads, problem.is_causal, most)


class _Sizes:
    """Elements of q and k and rows of lse on one process, bytes e per element and a per element of a sum, and the terms of every call."""

    def __init__(self, problem: Problem) -> None:
        rows = problem.batch_size * (local_rows(problem) if problem.world_size > 1 else problem.num_positions)
        self.e, self.a = problem.itemsize, accumulation_dtype(problem.dtype).itemsize
        self.R = rows * problem.num_heads
        self.Q, self.K = self.R * problem.head_dim, rows * problem.num_kv_heads * problem.head_dim
        self.inputs = (self.Q + 2 * self.K) * self.e

    def forward(self, *common: tuple[str, int]) -> Terms:
        return [("q, k, v", self.inputs), *common, ("out", self.Q * self.e), ("lse", self.R * self.a)]

    def backward(self, *common: tuple[str, int]) -> Terms:
        return [("q, k, v", self.inputs), *common, ("out, dout", 2 * self.Q * self.e), ("lse", self.R * self.a)]

    @property
    def grads(self) -> tuple[str, int]:
        return "dq, dk, dv", self.inputs

    def block_sums(self, backend: str) -> int:
        """Returns what a backward over lists sums: dq, and dk and dv where query heads share them, or only two numbers a row."""
        return 4 * (self.Q + 2 * self.R) + 8 * self.K * (self.K < self.Q) if backend == "flash4" else 8 * self.R

    def estimate(self, problem: Problem, forward: Terms, backward: Terms, reserve: int = 0) -> MemoryEstimate:
        both = [tuple((what, int(size)) for what, size in terms if size) for terms in (forward, backward if problem.training else [])]
        return MemoryEstimate(inputs=self.inputs, forward=both[0], backward=both[1], reserve=reserve)


def _block_sparse(problem: Problem) -> MemoryEstimate:
    pattern, counts, x = problem.pattern, counts_of(problem, MOST_FOR_SIZE), _Sizes(problem)
    assert isinstance(pattern, BlockPattern)
    lists = ("lists of blocks", counts.list_bytes)
    forward, backward = x.forward(lists), x.backward(lists)
    names = [_backend(problem, counts, backward=back) for back in (False, True)[: 1 + problem.training]]
    if names[0] in ("sdpa_cpu", "math"):
        forward += _gathered(problem, backward=False)
    else:
        forward.append(("lists as the kernel reads them", 4 * counts.entries))
    if names[-1] in ("sdpa_cpu", "math"):
        # copied when the sums are not in the inputs' dtype, or are stored heads first
        copies = 2 * x.K * x.e if x.e != x.a else 2 * x.K * x.a if pattern.per_head else 0
        backward += [("lse with +inf", x.R * x.a), ("dq", x.Q * x.e), ("sums of dk, dv", 2 * x.K * x.a), ("dk, dv", copies)]
        backward += _gathered(problem, backward=True)
    else:
        running = [("sums of the kernel in float32", x.block_sums(names[-1])), ("lists as the kernel reads them", 8 * counts.entries)]
        building = [("lists by key block, while they are sorted", _SORT_BYTES * counts.entries)]
        backward += [x.grads, *max(running, building, key=lambda terms: sum(size for _, size in terms))]
    return x.estimate(problem, forward, backward)


def _gathered(problem: Problem, *, backward: bool) -> Terms:
    """Terms of ``backends/block_kernels/block_gather.py``: copies, heads first, and what the largest of its pieces gathers and computes.

    Its own code cuts the pieces, of tensors without memory. Pieces do not grow further once they are full, so those of the first blocks of
    a long sequence, and of a few of many sequences, are as large as any.
    """
    x, pattern, H, Hk, D, N = (
        _Sizes(problem),
        problem.pattern,
        problem.num_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.num_positions,
    )
    assert isinstance(pattern, BlockPattern)
    blocks, length = max(pattern.q_block, pattern.k_block), N
    while (listed := num_blocks(pattern, length, H)) > MOST_FOR_SIZE and length > blocks:
        length = -(-length // (2 * blocks)) * blocks
    lists = block_lists(pattern, length, H, is_causal=problem.is_causal, device="cpu")
    batch = min(problem.batch_size, max(1, int(MOST_FOR_SIZE // listed)))
    q, k = (torch.empty((), dtype=problem.dtype).expand(batch, length, heads, D) for heads in (H, Hk))
    rows = keys = working = 0
    for piece in pieces(q, k, lists, Options(scale=1.0), _PIECE_BYTES if problem.device_type == "cpu" else _PIECE_BYTES_GPU):
        problems, row_heads, key_heads = piece.rows.shape[0], piece.heads.shape[1], piece.kv_heads.shape[1]
        size, size_k = problems * piece.num_queries * row_heads * D, problems * piece.num_keys * key_heads * D
        rows, keys = max(rows, size), max(keys, size_k)
        # the results; of a second piece of some rows also what the first one found; and the mask as bytes, gathered, and as a bias
        work = size * x.e * (1 + piece.is_second) + problems * piece.num_queries * piece.num_keys * piece.has_pairs * (2 + x.e)
        work += size_k * (2 * x.e + (x.a if x.a != x.e else 0)) if backward else problems * piece.num_queries * row_heads * x.a
        working = max(working, work)
    queries_part, keys_part = (-(-N // block) * block / N for block in (pattern.q_block, pattern.k_block))
    gathered = 3 if backward else 1
    copies = int(gathered * x.Q * queries_part + 2 * x.K * keys_part) if H > 1 or N % blocks else 0
    return [
        ("copies, heads first", copies * x.e + (x.R * 4 if backward else 0)),
        ("a piece of gathered blocks", (gathered * rows + 2 * keys) * x.e),
        ("results and masks of a piece", working),
    ]


def _backend(problem: Problem, counts: BlockCounts, *, backward: bool) -> str:
    mean = max(1, counts.computed // (problem.num_positions * problem.num_heads))
    return _selected(problem.request(backward=backward, length=mean, blocks=counts.mask_kind))


def _expands_keys(problem: Problem) -> bool:
    """Whether query heads share keys and the backward runs on PyTorch's own GPU kernels, which have dk and dv of each of them."""
    asked = problem.training and problem.device_type == "cuda" and problem.num_kv_heads < problem.num_heads
    return asked and _selected(problem.request(backward=True, length=problem.num_positions)).startswith("sdpa")


def _selected(request: AttentionRequest) -> str:
    try:
        return registry.select(request).name
    except BackendUnavailable:
        return "math"


def _ring(problem: Problem) -> MemoryEstimate:
    exchange, x, pattern = exchange_of(problem), _Sizes(problem), problem.pattern
    assert isinstance(pattern, DilatedPattern)
    H, Hk, D, on_gpu, W = problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.device_type == "cuda", problem.world_size
    if exchange.name == "all_to_all":
        # some heads of the whole sequence, computed as on one process, in addition to the caller's rows of all heads
        pattern = pattern if pattern.branch_heads == "split" else pattern.with_heads(0, H // W, H)
        whole = _engine(problem, pattern, problem.num_positions, (H // W, max(1, Hk // W)))
        own = x.inputs + 2 * x.Q * x.e + 4 * x.R
        forward: Terms = [("q, k, v in the caller's rows", x.inputs), *whole.forward]
        return x.estimate(problem, forward, [("q, k, v, out, dout in the caller's rows", own), *whole.backward])
    keys = ("keys from elsewhere", exchange.held[0])
    received = 2 * problem.batch_size * Hk * D * exchange.rows
    if problem.computes == "dense" and exchange.name == "all_gather":
        # each step computes each range of the rows in one launch; on a GPU it writes out and dq where they belong
        launches = exchange.steps * exchange.parts
        copied = x.Q * x.e // launches * (launches > 1 and not on_gpu)
        forward = x.forward(keys, ("results of a part", copied + x.R * x.a // launches * (launches > 1)))
        of_part = copied + received * x.e // exchange.steps * (exchange.parts > 1)
        backward = x.backward(keys, ("lse with +inf", x.R * x.a // launches), ("dq", x.Q * x.e), ("gradients of a part", of_part))
        backward.append(("dk, dv of all keys in memory", received * x.e // exchange.steps))
        if on_gpu:
            rows = -(-local_rows(problem) // exchange.parts // 128) * 128
            shared = received * (H // Hk * x.e if _expands_keys(problem) else 4)
            launch = 4 * rows * problem.batch_size * H * (D + 2) + shared * (Hk < H)
            backward.append(("sums of kernels in float32", launch // exchange.steps))
        return x.estimate(problem, forward, backward)
    if exchange.name == "all_gather" and exchange.home is None:
        # the queries are a range of those whose keys are in memory: problem by problem, as on a CPU
        local = _engine(problem, pattern, local_rows(problem), device_type="cpu")
        more = (received - 2 * x.K) * (x.a + x.e * (x.a != x.e))
        return x.estimate(problem, [*local.forward, keys], [*local.backward, keys, ("dk, dv of all keys in memory", more)])
    # the engine runs on the rank's own rows; then the parts are merged into its results
    local = _engine(problem, exchange.home or pattern, local_rows(problem))
    forward, backward = [*local.forward, keys], list(local.backward)
    if exchange.name == "ring" and x.e != x.a:
        forward.append(("out in the dtype of sums", x.Q * x.a))
        backward.append(("dq, dk, dv in the dtype of sums", (x.Q + 2 * x.K) * x.a))
    backward.append(("keys from elsewhere, shares of gradients", exchange.held[1]))
    return x.estimate(problem, forward, backward)


def _ring_blocks(problem: Problem) -> MemoryEstimate:
    exchange, x, steps = exchange_of(problem), _Sizes(problem), max(1, exchange_of(problem).steps)
    lists = ("lists of blocks", counts_of(problem, MOST_FOR_SIZE).list_bytes // problem.world_size)
    forward, backward = x.forward(lists), x.backward(lists)
    forward.append(("keys from elsewhere", exchange.held[0]))
    backward += [x.grads, ("keys from elsewhere, shares of gradients", exchange.held[1])]
    if problem.training and problem.device_type == "cuda":
        sums = x.block_sums(_backend(problem, counts_of(problem, MOST_FOR_SIZE), backward=True))
        backward.append(("sums of kernels in float32", sums // steps))
    if steps > 1:
        forward.append(("results of a step", (x.Q * x.e + x.R * x.a) // steps))
        backward.append(("gradients of a step", x.Q * x.e // steps))
    return x.estimate(problem, forward, backward)


def _sdpa_cpu(problem: Problem) -> MemoryEstimate:
    """PyTorch's function on (B, H, N, D) copies k and v for each of the query heads that share them. On a GPU it is one launch."""
    x = _Sizes(problem)
    copies = 2 * (x.Q - x.K) * x.e
    backward = [*x.backward(("k, v of each query head", 2 * copies)), x.grads]
    return x.estimate(problem, x.forward(("k, v of each query head", copies)), backward)


def _standard(problem: Problem) -> MemoryEstimate:
    """At most two matrices of all pairs forward and three backward, a fourth in torch's CUDA kernel of softmax.

    With them live the mask, and copies of q, k, v, out and dout as the products of ``bench/workloads/standard.py`` read and write them.
    """
    x, B, on_gpu = _Sizes(problem), problem.batch_size, problem.device_type == "cuda"
    matrix = B * problem.num_heads * problem.num_positions**2 * x.e
    mask = problem.num_positions**2 if problem.is_causal else 0
    grouped = problem.num_kv_heads < problem.num_heads
    copies = 3 * x.Q + 2 * x.K if grouped else (4 if B > 1 else 3) * x.Q
    forward: Terms = [("q, k, v", x.inputs), ("out", x.Q * x.e), ("scores and weights of all pairs", 2 * matrix + mask + copies * x.e)]
    rest = (4 if on_gpu else 3) * matrix + mask + (4 if B > 1 else 3 if grouped else 2) * x.Q * x.e
    backward: Terms = [("q, k, v", x.inputs), ("out, dout", 2 * x.Q * x.e), x.grads, ("scores, weights and their gradients", rest)]
    # autograd computes dv before the weights' gradient: dv takes the memory of the scores, where no matrix fits afterwards
    return x.estimate(problem, forward, backward, reserve=matrix if problem.training and on_gpu else 0)
