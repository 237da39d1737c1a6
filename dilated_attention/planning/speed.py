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
from typing import NamedTuple

from dilated_attention.backends import BackendUnavailable, rates, registry
from dilated_attention.distributed.exchange import cost
from dilated_attention.engine.branches.plan import Shape, make_plan
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.gpus import GPUS
from dilated_attention.planning.memory import counts_of
from dilated_attention.planning.problem import Problem
from dilated_attention.planning.ring import Exchange, local_rows

# measured on an H200, docs/performance.md: share of the kernels' own rate that the engine reaches with several branches, (forward,
# backward)
_ENGINE_SHARE = {False: (0.93, 0.93), True: (0.90, 0.88)}
# share of the rates in tables of dense problems, timed in short bursts, that long runs sustain
# (benchmarks/results/2026-11-21-h200/block-sparse.jsonl, dense)
_SUSTAINED = 0.92
# seconds of that machine's CPU per launch, forward and backward (docs/performance.md, How it works)
_LAUNCH = (40e-6, 90e-6)
# seconds per call, in addition. Where kernels are short, the measured time is the CPU's (benchmarks/results/2026-11-21-h200/short.jsonl):
# dense attention, one launch, took at most 0.064 ms forward without gradients and 1.16 ms forward + backward. A backward of 12 launches
# alone took no more than 1.45 ms (2026-11-21-h200/floor.jsonl), so a backward costs at most 0.35 ms; the rest belongs to the forward that
# autograd records
_CALL, _RECORDED = (25e-6, 350e-6), 650e-6
# share of the peak that a kernel is assumed to reach where nothing was measured
_ASSUMED = {"sdpa_efficient": 0.25, "xformers": 0.25, "flex": 0.3, "triton": 0.3, "math": 0.05}
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


class _Rate(NamedTuple):
    backend: str
    rate: float
    source: str


# what a reader can do where no rate is known
ESTIMATE_BY_HAND = "time a shorter one, and take the ratio of the FLOPs"


class _NoRate(Exception):
    """Says why no rate is known."""


def passes_of(problem: Problem, exchange: Exchange, least_bytes: tuple[int, int]) -> tuple[tuple[Pass, ...], str]:
    """Returns (the forward and, with ``training``, the backward; the reason if there is no estimate)."""
    try:
        return tuple(_pass(problem, exchange, least_bytes[back], back) for back in (False, True)[: 1 + problem.training]), ""
    except _NoRate as error:
        return (), str(error)


def _pass(problem: Problem, exchange: Exchange, least_bytes: int, backward: bool) -> Pass:
    work, gpu, W = _work(problem, backward), problem.machine, problem.world_size
    flops = [(10 if backward else 4) * problem.head_dim * problem.batch_size * pairs for pairs, _ in work]
    rates = [rate for _, rate in work]
    seconds = sum(each / rate.rate for each, rate in zip(flops, rates, strict=True))
    if isinstance(problem.pattern, DilatedPattern) and problem.pattern.num_branches > 1:
        seconds /= _ENGINE_SHARE[problem.is_causal][backward]
    links = exposed = 0.0
    if W > 1:
        if gpu.link is None:
            raise _NoRate("the rate of the links between its processes is not known")
        received = exchange.bytes.backward_received if backward else exchange.bytes.forward_received
        links = received / (gpu.link * _LINK_SHARE)
        # the first step has to wait for its keys
        waits = exchange.name in ("all_gather", "blocks") and problem.computes != "dilated"
        exposed = cost.LATENCY + (links / max(1, exchange.steps) if waits else 0.0)
        if exchange.name == "all_to_all":
            links, exposed = 0.0, exposed + links
    # contiguous parts of causal dense attention give the last rank the most pairs
    is_uneven = W > 1 and problem.is_causal and problem.layout == "contiguous" and problem.computes == "dense"
    return Pass(
        arithmetic=seconds / W * ((2 * W - 1) / W if is_uneven else 1.0),
        memory=least_bytes / gpu.bandwidth if gpu.bandwidth else 0.0,
        host=_host(problem, backward, exchange),
        links=links,
        exposed=exposed,
        backend=" and ".join(dict.fromkeys(rate.backend for rate in rates)),
        rate=sum(flops) / seconds if seconds else 0.0,
        source="; ".join(dict.fromkeys(rate.source for rate in rates)),
    )


def _work(problem: Problem, backward: bool) -> list[tuple[int, _Rate]]:
    """Returns (pairs of one sequence, the rate at which they are computed) of each part of a call."""
    N, H, is_causal, pattern = problem.num_positions, problem.num_heads, problem.is_causal, problem.pattern
    if problem.computes == "block_sparse":
        computed = counts_of(problem).computed
        return [(computed, _rate_of(problem, max(1, computed // (N * H)), backward))]
    assert isinstance(pattern, DilatedPattern)
    pairs = pattern.branch_pairs(N, H, is_causal=is_causal)
    rows = (-(-min(w, N) // r) for w, r in pattern.branches)
    return [(n, _rate_of(problem, count, backward)) for n, count in zip(pairs, rows, strict=True)]


def _rate_of(problem: Problem, length: int, backward: bool) -> _Rate:
    """Returns the FLOP/s of the backend chosen for problems of this many rows."""
    blocks = counts_of(problem).mask_kind if problem.computes == "block_sparse" else None
    request = problem.request(backward=backward, length=length, blocks=blocks)
    try:
        backend = registry.select(request).name
    except BackendUnavailable as error:
        raise _NoRate(str(error).splitlines()[0]) from error
    kept = _SUSTAINED if blocks is None and problem.device_type == "cuda" else 1.0
    table, tflops = rates.table_of(problem.hardware.architecture), rates.rate_of(backend, request)
    if table is not None and tflops is not None:
        scale, where = _scale(problem, table.device)
        return _Rate(backend, tflops * 1e12 * scale * kept, f"the shipped table of {table.device}, {table.date}{where}")
    if (gpu := problem.machine).is_cpu:
        # tables of a CPU hold dense problems, of which dense and dilated calls consist
        what = (
            "rates of block-sparse calls on a CPU are not known" if request.blocks else "nothing was measured on this CPU for such a call"
        )
        raise _NoRate(f"{what}; {ESTIMATE_BY_HAND}")
    peak = gpu.peak(problem.dtype)
    if peak is None:
        others = ", ".join(name for name in gpu.peaks if name != "fp8")
        dtype = str(problem.dtype).removeprefix("torch.")
        reason = f"no peak rate of {gpu.name} in {dtype} is known, and nothing was measured on it"
        raise _NoRate(reason + (f"; known are {others}" if others else ""))
    share = _ASSUMED.get(backend, _ASSUMED_ELSE)
    return _Rate(backend, peak * share, f"assumed, not measured: {share:.0%} of the peak of {gpu.name}, {peak / 1e12:,.0f} TFLOP/s")


def _scale(problem: Problem, measured_on: str) -> tuple[float, str]:
    """Returns the peak relative to that of the measured GPU, and a description of this scaling."""
    mine, theirs = problem.machine.peak(problem.dtype), GPUS["H200 SXM"].peak(problem.dtype)
    if "H200" not in measured_on or mine is None or theirs is None or mine == theirs:
        return 1.0, ""
    return mine / theirs, f", times the ratio of peaks, {mine / theirs:.2f}"


def _host(problem: Problem, backward: bool, exchange: Exchange) -> float:
    """Returns the CPU's time for the call and its launches."""
    if problem.device_type == "cpu":
        return 0.0
    call = _CALL[backward] + (_RECORDED if problem.training and not backward else 0.0)
    if problem.computes == "block_sparse":
        return call + max(1, exchange.steps) * _LAUNCH[backward]
    assert isinstance(problem.pattern, DilatedPattern)
    whole = (0, local_rows(problem))
    plan = make_plan(problem.pattern, Shape(problem.num_heads, problem.num_kv_heads, whole, whole, (whole,), problem.is_causal))
    return call + (len(plan.problems) + exchange.steps) * _LAUNCH[backward]
