"""``plan_attention``: estimates the cost of one attention call, on any machine: pairs, FLOPs, bytes, memory, communication, time, reach.

Its time is arithmetic at measured rates where they exist, and lower bounds of memory, links and launches.

    GPU    Σ over branches of FLOPs / rate of the call's backend at that branch's rows, divided by the share of it that the engine reaches
    tiles  a call that runs whole on tiles: the engine's own estimate (``engine/ops/prepare.py``)
    floor  least bytes / bandwidth
    host   the call and its launches, on the CPU of an H200 machine
    links  bytes received / rate of the links

A pass takes as long as the longest of these. Rates come from the shipped table of the architecture, scaled by the ratio of
the peaks where the GPU is not the measured one. Without a table a share of the peak is assumed. Every estimate says which.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, BackendUnavailable, rates
from dilated_attention.engine.branches.problems import problems_of, whole_shape
from dilated_attention.engine.ops import prepare
from dilated_attention.models.summary import USABLE
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.planning.gpus import GPUS, Gpu
from dilated_attention.planning.memory import MOST_FOR_SIZE, Exchange, counts_of, exchange_of, memory_of, sizes_of
from dilated_attention.planning.plans import AttentionPlan, Pass
from dilated_attention.planning.problem import MOST_ELEMENTS, Problem, make_problem
from dilated_attention.validation import check_bool

MOST_POSITIONS = 2**31
# lists of blocks can index at most this many entries
_MOST_ENTRIES = 2**29
_NO_SUCH_CALL = 2**80
# on an H200, docs/performance.md: share of the kernels' rate that the engine reaches with several branches, (forward, backward), of full
# and of causal attention
_ENGINE_SHARE = (0.93, 0.93), (0.90, 0.88)
# share of the rates of dense problems, timed in bursts, that long runs sustain (benchmarks/results/2026-11-21-h200/block-sparse.jsonl)
_SUSTAINED = 0.92
# seconds of that machine's CPU per launch, forward and backward (docs/performance.md, How it works)
_LAUNCH = (40e-6, 90e-6)
# seconds per call, in addition, and of a forward that autograd records. Where kernels are short, the measured time is the CPU's
# (benchmarks/results/2026-11-29-h200x2/last-cut.md): dense attention, one launch, took 0.09 ms forward and 0.42 forward + backward,
# GigaPath's call of 5,308 positions 0.67
_CALL, _RECORDED = (25e-6, 180e-6), 170e-6
# share of the peak that a kernel is assumed to reach where nothing was measured
_ASSUMED = {"sdpa_efficient": 0.25, "xformers": 0.25, "flex": 0.3, "triton": 0.3, "math": 0.05}
_ASSUMED_ELSE = 0.45
# least seconds of an exchange, and the share of a link's rate in one direction that one reaches: 300 of 450 GB/s between H200s
# (docs/ring.md)
_LATENCY = 40e-6
_LINK_SHARE = 2 / 3
# what a reader can do where no rate is known
ESTIMATE_BY_HAND = "time a shorter one, and take the ratio of the FLOPs"


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
        find_longest: False skips the search for the longest sequence; ``longest`` is then None. Patterns of tables that end with N, as
            masks of blocks or functions may hold, need it.

    Raises:
        ValueError, TypeError: arguments that are invalid or do not go together; an unknown GPU name.

    >>> print(plan_attention(
    ...     "dilated", num_positions=2**20, num_heads=12, head_dim=64, gpu="H200",
    ...     segment_lengths=[2048, 8192], dilation_rates=[1, 4]))
    """
    # every argument but one is the problem's
    arguments = dict(locals())
    check_bool("find_longest", arguments.pop("find_longest"))
    problem = make_problem(**arguments)
    N, H, B = problem.num_positions, problem.num_heads, problem.batch_size
    pairs, exact = pairs_of(problem)
    least, found = least_bytes(problem), exchange_of(problem)
    passes, why_no_time = passes_of(problem, found, least)
    fits, longest = fit_of(problem, _bytes_needed, find_longest)
    same = ("kind", "num_heads", "num_kv_heads", "head_dim", "layout", "is_causal")
    return AttentionPlan(
        **shared_fields(problem), **{name: getattr(problem, name) for name in same}, exchange=found, no_time=why_no_time, fits=fits,
        longest=longest, pattern="every key" if problem.computes == "dense" else repr(problem.pattern), pairs=pairs, pairs_exact=exact,
        dense_pairs=B * H * (N * (N + 1) // 2 if problem.is_causal else N * N), least_bytes=least, memory=memory_of(problem), passes=passes,
        flops=(4 * problem.head_dim * pairs, 10 * problem.head_dim * pairs * problem.training), device_source=problem.machine.source,
    )  # fmt: skip


def shared_fields(problem: Problem) -> dict[str, Any]:
    """Returns the fields of a ``Plan`` that say what was asked for."""
    same = {name: getattr(problem, name) for name in ("num_positions", "batch_size", "world_size", "training")}
    machine = problem.machine
    return same | {"dtype": str(problem.dtype).removeprefix("torch."), "device": machine.name, "device_memory": machine.memory}


def pairs_of(problem: Problem) -> tuple[int, bool]:
    """Returns (pairs of the whole call, whether they were counted exactly)."""
    if problem.computes == "block_sparse":
        counts = counts_of(problem)
        return problem.batch_size * counts.pairs, counts.is_exact
    pairs = problem.pattern.pairs(problem.num_positions, problem.num_heads, is_causal=problem.is_causal)
    return problem.batch_size * pairs, True


def least_bytes(problem: Problem) -> tuple[int, int]:
    """(forward, backward) bytes that one process must read and write once: q, k, v → out, lse; and these and dout → dq, dk, dv."""
    Q, K, R, e, a = sizes_of(problem)
    return 2 * (Q + K) * e + R * a, (4 * (Q + K) * e + R * a if problem.training else 0)


def fit_of(problem: Problem, bytes_needed: Callable[[Problem], int], find_longest: bool) -> tuple[bool, int | None]:
    """Returns (whether the problem fits, a number of positions that fits where one more does not, up to 2^31; 0 if not one per process
    fits; None without ``find_longest``). The bytes may fall where a longer sequence exchanges its keys in another way; then some shorter
    than the longest may not fit."""

    def excess(num_positions: int) -> int:
        return bytes_needed(problem.of_length(num_positions)) - int(USABLE * problem.machine.memory)

    fits, W = excess(problem.num_positions) <= 0, problem.world_size
    if not find_longest:
        return fits, None
    most = min(MOST_POSITIONS, MOST_ELEMENTS // (problem.batch_size * problem.num_heads * problem.head_dim))
    # the bytes grow with the length
    return fits, 0 if excess(W) > 0 else W - 1 + bisect.bisect_right(range(W, max(W, most) + 1), 0, key=excess)


def _bytes_needed(problem: Problem) -> int:
    """Returns the peak; more than any memory where the call cannot exist."""
    if (
        problem.computes == "block_sparse"
        and problem.window is None
        and counts_of(problem, MOST_FOR_SIZE).entries >= _MOST_ENTRIES * problem.world_size
    ):
        return _NO_SUCH_CALL
    return memory_of(problem).peak


class _NoRate(Exception):
    """Says why no rate is known."""


def passes_of(problem: Problem, exchange: Exchange, least_bytes: tuple[int, int]) -> tuple[tuple[Pass, ...], str]:
    """Returns (the forward and, with ``training``, the backward; the reason if there is no estimate)."""
    try:
        return tuple(_pass(problem, exchange, least_bytes[back], back) for back in (False, True)[: 1 + problem.training]), ""
    except _NoRate as error:
        return (), str(error)


def _pass(problem: Problem, exchange: Exchange, least_bytes: int, backward: bool) -> Pass:
    gpu, W, N, H, pattern, launches = (
        problem.machine, problem.world_size, problem.num_positions, problem.num_heads, problem.pattern, max(1, exchange.steps)
    )  # fmt: skip
    # the pairs of one sequence in each part of the call, and the rows of its problems, by which its rate is looked up
    if isinstance(pattern, BlockPattern):
        counts = counts_of(problem)
        pairs: tuple[int, ...] = (counts.computed,)
        rows, block_masks = [max(1, counts.computed // (N * H))], counts.mask_kind
    else:
        pairs, block_masks = pattern.branch_pairs(N, H, is_causal=problem.is_causal), "none"
        rows = [-(-min(w, N) // r) for w, r in pattern.branches]
        launches = exchange.steps + len(
            problems_of(pattern, whole_shape(H, problem.num_kv_heads, problem.rows, problem.is_causal)).problems
        )
    try:
        # as in a call, the longest problems choose the backend of all
        backend, request = problem.backend(backward=backward, length=max(rows), block_masks=block_masks)
    except BackendUnavailable as error:
        raise _NoRate(str(error).splitlines()[0]) from error
    rates_of_parts, sources = zip(*(_rate_of(problem, backend, replace(request, length=length)) for length in rows), strict=True)
    flops = [(10 if backward else 4) * problem.head_dim * problem.batch_size * count for count in pairs]
    seconds = sum(each / rate for each, rate in zip(flops, rates_of_parts, strict=True))
    if len(flops) > 1:
        seconds /= _ENGINE_SHARE[problem.is_causal][backward]
    if (on_tiles := _on_tiles(problem, backend, request)) is not None:
        seconds, backend, launches, sources = on_tiles[0], prepare.TILES, 1, on_tiles[1:]
    # the CPU's time for the call and its launches
    host = 0.0 if gpu.is_cpu else _CALL[backward] + _RECORDED * (problem.training and not backward) + launches * _LAUNCH[backward]
    links = exposed = 0.0
    if W > 1:
        if gpu.link is None:
            raise _NoRate("the rate of the links between its processes is not known")
        received = exchange.bytes.backward_received if backward else exchange.bytes.forward_received
        links, exposed = received / (gpu.link * _LINK_SHARE), _LATENCY
        if exchange.name == "all_to_all":
            links, exposed = 0.0, exposed + links
        elif problem.computes != "dilated":
            # the first step has to wait for its keys
            exposed += links / max(1, exchange.steps)
    # contiguous parts of causal dense attention give the last rank the most pairs
    is_uneven = problem.is_causal and problem.layout == "contiguous" and problem.computes == "dense"
    return Pass(
        arithmetic=seconds / W * ((2 * W - 1) / W if is_uneven else 1.0),
        memory=least_bytes / gpu.bandwidth if gpu.bandwidth else 0.0,
        launches=host, links=links, exposed=exposed, backend=backend,
        rate=sum(flops) / seconds if seconds else 0.0, source="; ".join(dict.fromkeys(sources)),
    )  # fmt: skip


def _on_tiles(problem: Problem, library: str, request: AttentionRequest) -> tuple[float, str] | None:
    """Returns (seconds, source) of a call that runs whole on tiles in place of a library, as short ones do; None for any other."""
    pattern = problem.pattern
    if problem.world_size > 1 or problem.machine.is_cpu or problem.window or not isinstance(pattern, DilatedPattern):
        return None
    call = pattern, whole_shape(problem.num_heads, problem.num_kv_heads, problem.num_positions, problem.is_causal), request
    if not prepare.runs_on_tiles(*call, problem.batch_size, library):
        return None
    kernels_ms = prepare.tiles_ms(*call, problem.batch_size) - prepare.TILES_CALL_MS
    scale, source = _scaled(problem, "H200", "the engine's estimate of a whole call on tiles, measured on an H200")
    return kernels_ms * 1e-3 / scale, source


def _scaled(problem: Problem, device: str, source: str) -> tuple[float, str]:
    """Returns (the factor of rates measured on ``device`` on the problem's machine, the source with it): of an H200's the ratio of the
    peaks."""
    peak, measured = problem.machine.peak(problem.dtype), GPUS["H200 SXM"].peak(problem.dtype) if "H200" in device else None
    scale = peak / measured if peak and measured else 1.0
    return scale, source + (f", times the ratio of peaks, {scale:.2f}" if scale != 1 else "")


def _rate_of(problem: Problem, backend: str, request: AttentionRequest) -> tuple[float, str]:
    """Returns (the FLOP/s of a backend for such a request, what they are based on)."""
    gpu, dtype, is_dense = problem.machine, str(problem.dtype).removeprefix("torch."), problem.computes != "block_sparse"
    peak, table, tflops = gpu.peak(dtype), rates.table_of(problem.hardware.architecture), rates.rate_of(backend, request)
    if table is not None and tflops is not None:
        scale, source = _scaled(problem, table.device, f"the shipped table of {table.device}, {table.date}")
        return tflops * 1e12 * scale * (_SUSTAINED if is_dense and not gpu.is_cpu else 1.0), source
    if gpu.is_cpu:
        # tables of a CPU hold dense problems, of which dense and dilated calls consist
        what = "nothing was measured on this CPU for such a call" if is_dense else "rates of block-sparse calls on a CPU are not known"
        raise _NoRate(f"{what}; {ESTIMATE_BY_HAND}")
    if peak is None:
        others = ", ".join(name for name in gpu.peaks if name != "fp8")
        reason = f"no peak rate of {gpu.name} in {dtype} is known, and nothing was measured on it"
        raise _NoRate(reason + (f"; known are {others}" if others else ""))
    share = _ASSUMED.get(backend, _ASSUMED_ELSE)
    return peak * share, f"assumed, not measured: {share:.0%} of the peak of {gpu.name}, {peak / 1e12:,.0f} TFLOP/s"
