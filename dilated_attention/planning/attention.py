"""``plan_attention``: estimates the cost of one attention call, on any machine: pairs, FLOPs, bytes, memory, communication, time, reach."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch

from dilated_attention.models.summary import USABLE
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.blocks import MOST_FOR_SIZE
from dilated_attention.planning.gpus import Gpu
from dilated_attention.planning.memory import counts_of, memory_of
from dilated_attention.planning.plans import AttentionPlan
from dilated_attention.planning.problem import MOST_ELEMENTS, Problem, make_problem
from dilated_attention.planning.ring import exchange_of
from dilated_attention.planning.speed import passes_of
from dilated_attention.validation import check_bool

MOST_POSITIONS = 2**31
# lists of blocks can index at most this many entries
_MOST_ENTRIES = 2**29
_NO_SUCH_CALL = 2**80


def plan_attention(
    kind: str,
    *,
    num_positions: int,
    num_heads: int,
    head_dim: int,
    batch_size: int = 1,
    num_kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    world_size: int = 1,
    layout: str | None = None,
    exchange: str = "auto",
    is_causal: bool = False,
    training: bool = True,
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    pattern: DilatedPattern | BlockPattern | None = None,
    gpu: str | Gpu | None = None,
    memory: int | None = None,
    find_longest: bool = True,
) -> AttentionPlan:
    """Estimates the cost of one call of attention from formulas, without allocating its tensors.

    Args:
        kind: ``"dense"`` · ``"dilated"`` · ``"block_sparse"`` · for a sequence shared by several processes ``"ring"`` (dense) ·
            ``"ring_dilated"`` · ``"ring_block_sparse"``.
        num_positions: N, of the whole sequence.
        num_heads, head_dim, batch_size, num_kv_heads: H, D, B and Hk; ``num_kv_heads=None`` means H.
        dtype: of q, k and v; None for bfloat16 on a GPU that supports it, float16 on an older one, float32 on a CPU.
        world_size: processes of one node that share the sequence, one GPU each.
        layout: how they share it: ``"contiguous"``, ``"zigzag"``, ``"striped"``; None for the kind's default.
        exchange: for ``"ring"`` and ``"ring_dilated"``: ``"auto"``, ``"all_gather"``, ``"ring"``, ``"all_to_all"``.
        is_causal: whether a query sees only itself and earlier positions.
        training: whether to include the backward.
        segment_lengths, dilation_rates: for dilated kinds; or pass ``pattern``, a ``DilatedPattern``.
        pattern: for block-sparse kinds, a ``BlockPattern``. The pairs of a ``MaskFunction`` are counted from some queries if many.
        gpu: a GPU's name (see ``gpus.find_gpu``), or a ``Gpu``; ``"cpu"`` for this machine's CPU; None for its GPU, or for its CPU if it
            has none.
        memory: bytes of device memory to assume instead of the device's own.
        find_longest: False skips the search for the longest sequence; ``longest`` is then N or 0. Patterns of tables that end with N, as
            masks of blocks or functions may hold, need it.

    Raises:
        ValueError, TypeError: arguments that are invalid or do not go together; an unknown GPU name.

    >>> print(plan_attention(
    ...     "dilated", num_positions=2**20, num_heads=12, head_dim=64, gpu="H200",
    ...     segment_lengths=[2048, 8192], dilation_rates=[1, 4]))
    """
    check_bool("find_longest", find_longest)
    problem = make_problem(
        kind, num_positions=num_positions, num_heads=num_heads, head_dim=head_dim, batch_size=batch_size, num_kv_heads=num_kv_heads,
        dtype=dtype, world_size=world_size, layout=layout, exchange=exchange, is_causal=is_causal, training=training,
        segment_lengths=segment_lengths, dilation_rates=dilation_rates, pattern=pattern, gpu=gpu, memory=memory,
    )  # fmt: skip
    N, H, B, machine = problem.num_positions, problem.num_heads, problem.batch_size, problem.machine
    pairs, exact = pairs_of(problem)
    flops = 4 * problem.head_dim * pairs, (10 * problem.head_dim * pairs if problem.training else 0)
    least = least_bytes(problem)
    found = exchange_of(problem)
    passes, reasons_against = passes_of(problem, found, least)
    fits, longest = fit_of(problem, _bytes_needed, find_longest)
    same = ("kind", "num_heads", "num_kv_heads", "head_dim", "world_size", "layout", "is_causal", "training")
    return AttentionPlan(
        **{name: getattr(problem, name) for name in same}, num_positions=N, batch_size=B, dtype=str(problem.dtype).removeprefix("torch."),
        pattern="every key" if problem.computes == "dense" else repr(problem.pattern), pairs=pairs, pairs_exact=exact,
        dense_pairs=B * H * (N * (N + 1) // 2 if problem.is_causal else N * N), flops=flops, least_bytes=least, memory=memory_of(problem),
        exchange=found, passes=passes, no_time=reasons_against, device=machine.name, device_memory=machine.memory,
        device_source=machine.source, fits=fits, longest=longest,
    )  # fmt: skip


def pairs_of(problem: Problem) -> tuple[int, bool]:
    """Returns (pairs of the whole call, whether they were counted exactly)."""
    if problem.computes == "block_sparse":
        counts = counts_of(problem)
        return problem.batch_size * counts.pairs, counts.is_exact
    pairs = problem.pattern.pairs(problem.num_positions, problem.num_heads, is_causal=problem.is_causal)
    return problem.batch_size * pairs, True


def least_bytes(problem: Problem) -> tuple[int, int]:
    """(forward, backward) bytes that one process must read and write once: q, k, v → out, lse; and these and dout → dq, dk, dv."""
    rows = problem.batch_size * -(-problem.num_positions // problem.world_size)
    element = problem.head_dim * problem.itemsize
    q, k, lse = rows * problem.num_heads * element, rows * problem.num_kv_heads * element, rows * problem.num_heads * 4
    return 2 * q + 2 * k + lse, (4 * q + 4 * k + lse if problem.training else 0)


def fit_of(problem: Problem, bytes_needed: Callable[[Problem], int], find_longest: bool) -> tuple[bool, int]:
    """Returns (whether the problem fits, a number of positions that fits where one more does not; 0 if not even one per process fits).

    At most 2^31 positions are tried. The bytes may fall where a longer sequence exchanges its keys in more parts or in another way; then
    some sequences that are shorter than the longest may not fit.
    """

    def excess(num_positions: int) -> int:
        return bytes_needed(problem.of_length(num_positions)) - int(USABLE * problem.machine.memory)

    N, W = problem.num_positions, problem.world_size
    fits = excess(N) <= 0
    most = min(MOST_POSITIONS, MOST_ELEMENTS // (problem.batch_size * problem.num_heads * problem.head_dim))
    return fits, search(excess, W, max(W, most)) if find_longest else N * fits


def search(excess: Callable[[int], int], low: int, high: int) -> int:
    """Returns the largest x in [low, high] with ``excess(x)`` ≤ 0; 0 if there is none. ``excess`` grows with x."""
    if excess(low) > 0:
        return 0
    return low + bisect.bisect_right(range(low, high + 1), 0, key=excess) - 1


def _bytes_needed(problem: Problem) -> int:
    """Returns the peak; more than any memory where the call cannot exist."""
    if problem.computes == "block_sparse" and counts_of(problem, MOST_FOR_SIZE).entries >= _MOST_ENTRIES * problem.world_size:
        return _NO_SUCH_CALL
    return memory_of(problem).peak
