"""Estimates the time of one attention call: arithmetic at measured rates where they exist, and lower bounds of memory, links and launches.

    GPU    Σ over branches of FLOPs / rate of the backend chosen for that branch's rows, divided by the share of it that the engine reaches
    floor  least bytes / bandwidth
    host   the call and its launches, on the CPU of an H200 machine
    links  bytes received / rate of the links

A pass takes as long as the longest of these. Rates come from a table of this machine, else from the shipped table of its architecture,
scaled by the ratio of the peaks where the GPU is not the measured one. Without a table a share of the peak is assumed. Every estimate says
which.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention.backends import BackendUnavailable, registry, tuning_table
from dilated_attention.distributed.exchange import cost
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.engine.kernels.nested_selection import chunk_family, make_pieces
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.gpus import GPUS
from dilated_attention.planning.estimate.memory import counts_of, is_nested
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.estimate.ring_estimate import Exchange, local_rows

# measured on an H200, docs/performance.md: share of the kernels' own rate that the engine reaches with several branches, (forward,
# backward)
_ENGINE_SHARE = {False: (0.93, 0.93), True: (0.90, 0.88)}
# FLOP/s of its kernel that visits shared pairs once, on the distinct pairs, by head dim, full and causal
# (benchmarks/results/2026-11-21-h200-nested-forward.json)
_NESTED_RATE = {(64, False): 424e12, (64, True): 321e12, (128, False): 569e12, (128, True): 410e12}
# share of the rates in tables of dense problems, timed in short bursts, that long runs sustain
# (benchmarks/results/2026-11-21-h200-block-sparse.jsonl, dense)
_SUSTAINED = 0.92
# seconds of that machine's CPU per launch, forward and backward (docs/performance.md, How it works)
_LAUNCH = (40e-6, 90e-6)
# seconds per call, in addition. Where kernels are short, the measured time is the CPU's (benchmarks/results/2026-11-21-h200-short.jsonl):
# dense attention, one launch, took at most 0.064 ms forward without gradients and 1.16 ms forward + backward. A backward of 12 launches
# alone took no more than 1.45 ms (2026-11-21-h200-floor.jsonl), so a backward costs at most 0.35 ms; the rest belongs to the forward that
# autograd records
_CALL, _RECORDED = (25e-6, 350e-6), 650e-6
# share of the peak that a kernel is assumed to reach where nothing was measured
_ASSUMED = {"sdpa_efficient": 0.25, "xformers": 0.25, "flex": 0.3, "triton": 0.3, "math": 0.05, "gluon": 0.5}
_ASSUMED_ELSE = 0.45
# share of a link's rate in one direction that an exchange reaches: 300 of 450 GB/s between H200s (docs/ring.md)
_LINK_SHARE = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a call, in seconds.

    Args:
        arithmetic, memory, host, links: the time that each would take alone.
        backend: the backend that computes the pass.
        rate: mean FLOP/s assumed for the arithmetic.
        source: where the rate comes from.
        exposed: the part of the link time that cannot be hidden behind the arithmetic.
    """

    arithmetic: float
    memory: float
    host: float
    links: float
    exposed: float
    backend: str
    rate: float
    source: str

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory, self.host, self.links) + self.exposed

    @property
    def bound(self) -> str:
        """Returns what takes longest: ``"arithmetic"``, ``"memory"``, ``"launches"`` or ``"links"``."""
        parts = {"arithmetic": self.arithmetic, "memory": self.memory, "launches": self.host, "links": self.links}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class _Rate:
    backend: str
    rate: float
    source: str


def passes_of(problem: Problem, exchange: Exchange, least_bytes: tuple[int, int]) -> tuple[tuple[Pass, ...], str]:
    """Returns (the forward and, with ``training``, the backward; the reason if there is no estimate)."""
    found = []
    for backward in (False, True)[: 1 + problem.training]:
        made = _pass(problem, exchange, least_bytes[backward], backward)
        if isinstance(made, str):
            return (), made
        found.append(made)
    return tuple(found), ""


def _pass(problem: Problem, exchange: Exchange, least_bytes: int, backward: bool) -> Pass | str:
    if problem.kind == "standard":
        return _standard(problem, least_bytes, backward)
    arithmetic = _arithmetic(problem, _work(problem, backward), backward)
    if isinstance(arithmetic, str):
        return arithmetic
    seconds, flops, rates = arithmetic
    several = isinstance(problem.pattern, DilatedPattern) and problem.pattern.num_branches > 1
    if several and (backward or not any(nested for *_, nested in _work(problem, backward))):
        seconds /= _ENGINE_SHARE[problem.is_causal][backward]
    busiest = seconds / problem.world_size * _imbalance(problem)
    wire = exposed = 0.0
    if problem.world_size > 1:
        if problem.gpu is None or problem.gpu.link is None:
            return "the rate of the links between its processes is not known"
        received = exchange.bytes.backward_received if backward else exchange.bytes.forward_received
        wire = received / (problem.gpu.link * _LINK_SHARE)
        # the first step has to wait for its keys
        exposed = cost.LATENCY + (
            wire / max(1, exchange.steps) if exchange.name in ("all_gather", "blocks") and problem.computes != "dilated" else 0.0
        )
        if exchange.name == "all_to_all":
            exposed += wire
            wire = 0.0
    bandwidth = problem.gpu.bandwidth if problem.gpu is not None else None
    names = list(dict.fromkeys(rate.backend for rate in rates))
    sources = list(dict.fromkeys(rate.source for rate in rates))
    return Pass(
        arithmetic=busiest,
        memory=least_bytes / bandwidth if bandwidth else 0.0,
        host=_host(problem, backward, exchange),
        links=wire,
        exposed=exposed,
        backend=" and ".join(names),
        rate=flops / seconds if seconds else 0.0,
        source="; ".join(sources),
    )


def branchwise_arithmetic(problem: Problem) -> tuple[float, str] | str:
    """Returns (seconds of a forward's arithmetic, its source) if no pairs are shared between branches; else why the rate is not known."""
    pattern = problem.pattern
    if isinstance(pattern, DilatedPattern):
        work = _branches(pattern, problem.num_positions, problem.num_heads, problem.is_causal)
    else:
        work = _work(problem, backward=False)
    found = _arithmetic(problem, work, backward=False)
    return found if isinstance(found, str) else (found[0], "; ".join(dict.fromkeys(rate.source for rate in found[2])))


def _arithmetic(problem: Problem, work: list[tuple[int, int, bool]], backward: bool) -> tuple[float, float, list[_Rate]] | str:
    """Returns (seconds, FLOPs, the rates) of ``work``, or the reason why a rate is not known."""
    per_pair = (10 if backward else 4) * problem.head_dim * problem.batch_size
    seconds = flops = 0.0
    rates: list[_Rate] = []
    for pairs, length, nested in work:
        rate = _nested_rate(problem) if nested else rate_of(problem, length, backward)
        if isinstance(rate, str):
            return rate
        rates.append(rate)
        seconds += per_pair * pairs / rate.rate
        flops += per_pair * pairs
    return seconds, flops, rates


def _work(problem: Problem, backward: bool) -> list[tuple[int, int, bool]]:
    """Returns a list of (pairs of one sequence, number of rows to look up the rate, whether the nested kernel computes them)."""
    N, H = problem.num_positions, problem.num_heads
    if problem.computes == "block_sparse":
        counts = counts_of(problem)
        return [(counts.computed, max(1, counts.computed // (N * H)), False)]
    pattern = problem.pattern
    assert isinstance(pattern, DilatedPattern)
    if not backward and is_nested(problem) and problem.world_size == 1:
        work: list[tuple[int, int, bool]] = []
        for piece in make_pieces(pattern, H, N):
            others: DilatedPattern | None = pattern
            if piece.split is not None:
                family = chunk_family(pattern, piece.split, (0, H), H, piece.length)
                pairs = family.pairs() * H
                work.append((pairs // 2 if problem.is_causal else pairs, 0, True))
                others = piece.split.others
            if others is not None:
                work += _branches(others, piece.length, H, problem.is_causal)
        return work
    return _branches(pattern, N, H, problem.is_causal)


def _branches(pattern: DilatedPattern, num_positions: int, num_heads: int, is_causal: bool) -> list[tuple[int, int, bool]]:
    pairs = pattern.branch_pairs(num_positions, num_heads, is_causal=is_causal)
    return [(n, -(-min(w, num_positions) // r), False) for n, (w, r) in zip(pairs, pattern.branches, strict=True)]


def _nested_rate(problem: Problem) -> _Rate:
    assert problem.gpu is not None
    scale, where = _scale(problem, "NVIDIA H200")
    return _Rate("nested", _NESTED_RATE[problem.head_dim, problem.is_causal] * scale, f"the nested kernel as measured on an H200{where}")


def rate_of(problem: Problem, length: int, backward: bool) -> _Rate | str:
    """Returns the FLOP/s of the backend chosen for problems of this many rows, or the reason why the rate is not known."""
    blocks = counts_of(problem).mask_kind if problem.computes == "block_sparse" else None
    request = problem.request(backward=backward, length=length, blocks=blocks)
    name = {"sdpa": "sdpa"}.get(problem.kind, "auto")
    try:
        backend = registry.select(request, name).name
    except BackendUnavailable as error:
        return str(error).splitlines()[0]
    here = tuning_table.measured_here(problem.hardware)
    general = tuning_table.shipped(problem.hardware.architecture)
    for table, is_here in ((here, True), (general, False)):
        row = None if table is None else table.row_for(request)
        timing = None if row is None else next((x for x in row.timings if x.backend == backend), None)
        if table is None or timing is None:
            continue
        kept = _SUSTAINED if blocks is None and problem.device_type == "cuda" else 1.0
        if is_here:
            return _Rate(backend, timing.tflops * 1e12 * kept, f"measured here on {table.date}")
        measured_on = str(table.environment.get("device", ""))
        scale, where = _scale(problem, measured_on)
        return _Rate(backend, timing.tflops * 1e12 * scale * kept, f"the shipped table of {measured_on}, {table.date}{where}")
    if problem.gpu is None:
        return f"nothing was measured on this CPU for such a call; {tuning_table.RERUN} measures it"
    peak = problem.gpu.peak(problem.dtype)
    if peak is None:
        dtype = str(problem.dtype).removeprefix("torch.")
        others = [name for name in problem.gpu.peaks if name != "fp8"]
        instead = f"; known are {', '.join(others)}" if others else ""
        return f"no peak rate of {problem.gpu.name} in {dtype} is known, and nothing was measured on it{instead}"
    share = _ASSUMED.get(backend, _ASSUMED_ELSE)
    return _Rate(backend, peak * share, f"assumed, not measured: {share:.0%} of the peak of {problem.gpu.name}, {peak / 1e12:,.0f} TFLOP/s")


def _scale(problem: Problem, measured_on: str) -> tuple[float, str]:
    """Returns the peak relative to that of the measured GPU, and a description of this scaling."""
    assert problem.gpu is not None
    known = GPUS["H200 SXM"] if "H200" in measured_on else None
    mine = problem.gpu.peak(problem.dtype)
    theirs = None if known is None else known.peak(problem.dtype)
    if mine is None or theirs is None or mine == theirs:
        return 1.0, ""
    return mine / theirs, f", times the ratio of peaks, {mine / theirs:.2f}"


def _imbalance(problem: Problem) -> float:
    """Returns the ratio of the busiest rank's pairs to the mean, for causal dense attention."""
    if problem.world_size == 1 or not problem.is_causal or problem.layout != "contiguous" or problem.computes != "dense":
        return 1.0
    W = problem.world_size
    return (2 * W - 1) / W


def _call(problem: Problem, backward: bool) -> float:
    return _CALL[backward] + (_RECORDED if problem.training and not backward else 0.0)


def _host(problem: Problem, backward: bool, exchange: Exchange) -> float:
    if problem.device_type == "cpu":
        return 0.0
    call = _call(problem, backward)
    if problem.computes == "block_sparse":
        return call + max(1, exchange.steps) * _LAUNCH[backward]
    pattern = problem.pattern
    assert isinstance(pattern, DilatedPattern)
    n = local_rows(problem) if problem.world_size > 1 else problem.num_positions
    whole = (0, n)
    plan = make_plan(pattern, Shape(problem.num_heads, problem.num_kv_heads, whole, whole, (whole,), problem.is_causal))
    return call + (len(plan.problems) + exchange.steps) * _LAUNCH[backward]


def _standard(problem: Problem, least_bytes: int, backward: bool) -> Pass | str:
    """Time of the matrix products at an assumed share of the peak, and of every pass over the N² scores in memory."""
    gpu = problem.gpu
    peak = None if gpu is None else gpu.peak(problem.dtype)
    if gpu is None or peak is None or gpu.bandwidth is None:
        return "its rates are not known" if gpu is not None else "nothing was measured on this CPU for plain matrix products"
    share = 0.6
    pairs = problem.batch_size * problem.num_heads * problem.num_positions**2
    # four products backward, as the weights are kept; product, scaling, mask and softmax each write and read the scores
    flops = (8 if backward else 4) * problem.head_dim * pairs
    touched = (10 if backward else 7 + 2 * problem.is_causal) * pairs * problem.itemsize
    return Pass(
        arithmetic=flops / (peak * share) + touched / gpu.bandwidth,
        memory=least_bytes / gpu.bandwidth,
        host=_call(problem, backward),
        links=0.0,
        exposed=0.0,
        backend="matrix products",
        rate=peak * share,
        source=(
            f"assumed, not measured: {share:.0%} of the peak of {gpu.name}, "
            f"and {touched / pairs / problem.itemsize:.0f} passes over all scores"
        ),
    )
