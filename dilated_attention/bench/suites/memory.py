"""Peak memory, predicted and measured.

Attention by length, implementation by implementation; what fits on a GPU; and a model of Llama-7B's shape.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import registry
from dilated_attention.bench.accuracy.contender_check import check
from dilated_attention.bench.accuracy.correctness import WHOLE, Attend, wrong
from dilated_attention.bench.measure.skip import Attempt, attempt, release
from dilated_attention.bench.measure.subprocess_runner import Peak, in_child, why_no_children
from dilated_attention.bench.report.plots import Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.suites.memory_report import PASSES, plots, tables
from dilated_attention.bench.workloads import model_memory
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, SDPA, STANDARD, Contender
from dilated_attention.bench.workloads.problem import Problem, geometric
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.models.summary import USABLE
from dilated_attention.parsing import size
from dilated_attention.pattern import BlockPattern, DilatedPattern, LocalWindow
from dilated_attention.planning import detected_gpu, find_gpu
from dilated_attention.planning.estimate.memory import memory_of
from dilated_attention.planning.estimate.plan import longest_of, pairs_of
from dilated_attention.planning.estimate.problem import Problem as Planned
from dilated_attention.planning.estimate.problem import make_problem

CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES)}
# memory of common GPUs: from 8 GB in a laptop to the 141 of an H200
SIZES_GIB = (8, 24, 40, 80, 141)
# configurations whose longest sequence is determined: one layer's attention of Llama-7B's shape, in bfloat16
_FITS: dict[str, tuple[str, DilatedPattern | BlockPattern | None]] = {
    "standard": ("standard", None),
    "dense kernel": ("dense", None),
    "DilatedAttention": ("dilated", DilatedPattern(*geometric(2**25))),
    "BlockSparseAttention, window of 4,096": ("block_sparse", LocalWindow(4096)),
}
# bytes beyond which a call is not run on a CPU, whose memory is needed for other things
_MOST_ON_CPU = 2 * 2**30
# FLOP/s assumed for a check of what fits, to estimate its time beforehand
_SLOW = 2e14


class Memory(Suite):
    """Measures bytes instead of time: a peak is the same on every run."""

    name = "memory"
    about = "peak memory by length, predicted and measured; the longest sequences that fit 8 to 141 GB; models of Llama-7B's shape"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 4k … 256k; on a CPU 1k … 4k")
        parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all")
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
        parser.add_argument("--model-lengths", type=size, nargs="+", help="default: 4k 32k; on a CPU 512")
        parser.add_argument("--parts", nargs="+", choices=("attention", "fits", "model"), default=["attention", "fits", "model"])
        parser.add_argument("--limit", type=float, default=1.0, help="seconds of a call that checks what fits, on a GPU; default: 1")

    def settings(self, session: Session) -> dict[str, Any]:
        return super().settings(session) | {"dtype": str(session.dtype).removeprefix("torch."), "limit": session.options.limit}

    def problems(self, session: Session) -> list[Problem]:
        lengths = session.options.lengths or ([2**i for i in range(12, 19)] if session.full else [1024, 2048, 4096])
        heads, head_dim = (16, 128) if session.full else (8, 64)
        return [
            Problem(num_positions=n, num_heads=heads, head_dim=head_dim, dtype=session.dtype, device=session.device, is_causal=True)
            for n in lengths
        ]

    def groups(self, session: Session) -> Sequence[Group]:
        parts = session.options.parts
        groups = []
        if "attention" in parts:
            chosen = [CONTENDERS[name] for name in session.options.contenders or CONTENDERS]
            groups += [
                Group(f"attention {problem.label} {which}", functools.partial(_attention, chosen, problem, which))
                for problem in self.problems(session)
                for which in session.options.passes
            ]
        if "fits" in parts:
            groups += [Group(f"fits {gib} GB", functools.partial(_fits, gib, session)) for gib in SIZES_GIB]
        if "model" in parts:
            lengths = session.options.model_lengths or ([4096, 32768] if session.full else [512])
            groups += [
                Group(f"model N={n} {work}", functools.partial(_models, n, work, session)) for n in lengths for work in model_memory.WORK
            ]
            groups.append(Group("model fits", _models_fit))
        return groups

    def tables(self, results: Results) -> list[Table]:
        return tables(results)

    def plots(self, results: Results) -> list[Plot]:
        return plots(results)


def _attention(contenders: Iterable[Contender], problem: Problem, which: str) -> list[Row]:
    rows = []
    for contender in contenders:
        row = Row(name=contender.name, case=problem.case | {"part": "attention", "pass": which})
        if which == "training" and not contender.trains:
            continue
        note = _wrong(contender.name, problem.reduced(WHOLE))
        predicted = None if note else predicted_bytes(contender, problem, which)
        if predicted is not None and predicted > _MOST_ON_CPU and problem.device.type == "cpu":
            note = f"not run: it would take {predicted / 2**30:.1f} GiB, on a CPU at most {_MOST_ON_CPU / 2**30:.0f}"
        found = Attempt(None, note) if note else _peak_of(contender, problem, which)
        if found.value is None:
            rows.append(replace(row, note=found.note))
            continue
        values: dict[str, float] = {"peak_bytes": found.value, "bytes_per_token": found.value / problem.num_positions / problem.batch_size}
        if predicted is not None:
            values |= {"predicted_bytes": predicted, "off": found.value / predicted - 1}
        rows.append(replace(row, values=values))
    return rows


@functools.lru_cache(maxsize=256)
def _wrong(name: str, small: Problem) -> str:
    """Returns a note where a contender does not run or is wrong on a short sequence."""
    contender = CONTENDERS[name]
    made = attempt(lambda: check(contender, small, contender.make(small)))
    return made.note or wrong(made.value or {}, contender.allowed(small))


def _peak_of(contender: Contender, problem: Problem, which: str) -> Attempt[int]:
    function = functools.partial(peak_of_call, contender.name, problem, which)
    if problem.device.type != "cuda":
        why_not = why_no_children()
        return Attempt(None, why_not) if why_not else in_child(function)
    release(workspaces=True)
    found = attempt(function)
    release(workspaces=True)
    return found


def peak_of_call(name: str, problem: Problem, which: str) -> int:
    """Returns the peak bytes of a call, inputs and results included, in the current process."""
    contender = CONTENDERS[name]
    if problem.device.type != "cuda":
        # code is loaded on first use: that does not count towards the call
        small = problem.reduced(WHOLE)
        _called(contender.make(small), small, which)
    attend = contender.make(problem)
    gc.collect()
    if problem.device.type == "cuda":
        # creates the tables and plans that calls share
        _called(attend, problem, which)
        gc.collect()
    peak = Peak(problem.device)
    _called(attend, problem, which)
    return peak.bytes()


def _called(attend: Attend, problem: Problem, which: str) -> None:
    leaves = problem.qkv()
    if which == "forward":
        with torch.no_grad():
            attend(*leaves)
        return
    # allocated before the forward, so that it does not split up blocks that the forward frees
    dout = problem.draw(problem.num_heads, 9)
    torch.autograd.grad(attend(*leaves), leaves, dout)


def predicted_bytes(contender: Contender, problem: Problem, which: str) -> int | None:
    """Returns the peak that planning predicts for the same call; None where it cannot predict it."""
    planned = _planned(contender, problem, which)
    if planned is None:
        return None
    found = memory_of(planned)
    # its calls share one mask, which is created before them
    shared = problem.num_positions**2 if contender is STANDARD and problem.is_causal else 0
    return (found.forward_peak if which == "forward" else found.peak) - shared


def _planned(contender: Contender, problem: Problem, which: str) -> Planned | None:
    pattern = contender.pattern(problem)
    if pattern is None or contender.bound is not None or _copies(contender, problem):
        return None
    kind = {STANDARD.name: "standard", SDPA.name: "sdpa"}.get(contender.name, "dense")
    given: dict[str, Any] = {}
    if contender not in DENSE:
        kind, given = "block_sparse" if isinstance(pattern, BlockPattern) else "dilated", {"pattern": pattern}
    return make_problem(
        kind,
        num_positions=problem.num_positions,
        num_heads=problem.num_heads,
        num_kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        batch_size=problem.batch_size,
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        training=which == "training",
        gpu=detected_gpu(problem.device) if problem.device.type == "cuda" else None,
        **given,
    )


def _copies(contender: Contender, problem: Problem) -> bool:
    """Whether a dense kernel returns newly allocated results, which are copied.

    Plans describe the backends chosen by default, which write to given memory.
    """
    if problem.device.type != "cuda" or contender not in DENSE or contender in (STANDARD, SDPA):
        return False
    return not registry.get(contender.name).capabilities.writes_views


def _fits(gib: int, session: Session) -> list[Row]:
    """Estimates each implementation's longest sequence in this much GPU memory, by formula.

    On a GPU with at least this much memory, the result is verified under that limit.
    """
    here = detected_gpu(session.device) if session.device.type == "cuda" else None
    gpu = here or find_gpu("H200")
    rows = []
    for name, (kind, pattern) in _FITS.items():
        for which in PASSES:
            given = {} if pattern is None else {"pattern": pattern}
            planned = make_problem(kind, num_positions=4096, num_heads=32, head_dim=128, dtype=torch.bfloat16, is_causal=True,
                                   training=which == "training", gpu=gpu, **given)  # type: ignore[arg-type]  # fmt: skip
            longest = longest_of(planned, gib * 2**30)
            values: dict[str, float] = {"longest": longest, "predicted_bytes": memory_of(planned.of_length(longest)).peak}
            note = ""
            if here is not None and gib * 2**30 <= 1.02 * here.memory:
                found = _held(planned.of_length(longest), min(gib * 2**30, here.memory), session)
                note = found.note
                if found.value is not None:
                    values |= {"peak_bytes": found.value, "off": found.value / values["predicted_bytes"] - 1}
            rows.append(Row(name=name, case={"part": "fits", "GB": gib, "pass": which}, values=values, note=note))
    return rows


def _held(planned: Planned, memory: int, session: Session) -> Attempt[int]:
    """Returns the peak of the call itself, limited to ``memory``; a note where it is not tried or does not fit."""
    N, H, D = planned.num_positions, planned.num_heads, planned.head_dim
    problem = Problem(num_positions=N, num_heads=H, head_dim=D, dtype=planned.dtype, device=session.device, is_causal=True)
    pairs, _ = pairs_of(planned)
    if (14 if planned.training else 4) * D * pairs / _SLOW > session.options.limit:
        return Attempt(None, "not tried: time, not memory")
    attend = _attend_of(planned)
    device = session.device
    # these remain from earlier calls, in parts of large blocks
    clear_block_lists()
    release(workspaces=True)
    # with the limit of a whole GPU, the CUDA context takes some of it, too
    if torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) < 0.95 * memory:
        return Attempt(None, "not tried: other processes hold memory of this GPU")
    torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.get_device_properties(device).total_memory, device)
    try:

        def call() -> int:
            peak = Peak(device)
            _called(attend, problem, "training" if planned.training else "forward")
            return peak.bytes()

        return attempt(call)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release(workspaces=True)


def _attend_of(planned: Planned) -> Attend:
    from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
    from dilated_attention.planning.estimate.memory import standard_attention

    if planned.kind == "standard":
        return functools.partial(standard_attention, is_causal=True)
    if planned.kind == "dense":
        return functools.partial(attention, is_causal=True)
    if isinstance(planned.pattern, DilatedPattern):
        lengths, rates = planned.pattern.segment_lengths, planned.pattern.dilation_rates
        return functools.partial(dilated_attention, segment_lengths=lengths, dilation_rates=rates, is_causal=True)
    return functools.partial(block_sparse_attention, pattern=planned.pattern, is_causal=True)


def _models(num_positions: int, work: str, session: Session) -> list[Row]:
    """Measures ``DEPTHS`` layers and extrapolates to all of them; predicts both."""
    device, full = session.device, session.full
    gpu = detected_gpu(device) if device.type == "cuda" else None
    rows = []
    for kind in model_memory.ATTENTION:
        case = {"part": "model", "N": num_positions, "work": work, "full": full}
        found = []
        for layers in model_memory.DEPTHS:
            one = _model_peak(functools.partial(model_memory.measured, kind, work, num_positions, layers, full, device), device)
            if one.value is None:
                rows.append(Row(name=kind, case=case, note=one.note))
                break
            found.append(one.value)
        if len(found) < len(model_memory.DEPTHS):
            continue
        few, some = model_memory.DEPTHS
        each = (found[1] - found[0]) / (some - few)
        values: dict[str, float] = {"few_bytes": found[1], "layer_bytes": each, "all_bytes": found[1] + (model_memory.LAYERS - some) * each}
        # a plan is for the GPU where there is one
        if gpu is not None or not torch.cuda.is_available():
            told = functools.partial(model_memory.planned, kind, work, num_positions, full=full, gpu=gpu)
            predicted = told(layers=some).peak
            values |= {"predicted_few_bytes": predicted, "off": found[1] / predicted - 1}
            # 32 layers of the small model are of no interest
            if full:
                predicted = told(layers=model_memory.LAYERS).peak
                values |= {"predicted_bytes": predicted, "off_all": values["all_bytes"] / predicted - 1}
        rows.append(Row(name=kind, case=case, values=values))
    return rows


def _model_peak(function: Callable[[], int], device: torch.device) -> Attempt[int]:
    if device.type != "cuda":
        why_not = why_no_children()
        return Attempt(None, why_not) if why_not else in_child(function)
    # a plan includes block lists and cuBLAS's workspaces, which could remain from a previous model
    clear_block_lists()
    release(workspaces=True)
    found = attempt(function)
    release(workspaces=True)
    return found


def _models_fit() -> list[Row]:
    """Estimates the longest sequence of the whole model by GPU memory, from formulas and fake tensors."""
    rows = []
    for kind in model_memory.ATTENTION:
        for work, (training, _) in model_memory.WORK.items():
            weights = 0
            for gib in reversed(SIZES_GIB):
                values: dict[str, float] = {"longest": 0}
                # weights alone, and in training their gradients and two moments
                if weights <= USABLE * gib * 2**30:
                    plan = model_memory.planned(kind, work, 4096, full=True, layers=model_memory.LAYERS, gpu="H200", memory=gib * 2**30)
                    values["longest"] = plan.longest
                    weights = plan.parameters * (16 if training else 2)
                rows.append(Row(name=kind, case={"part": "model fits", "GB": gib, "work": work}, values=values))
    return rows
