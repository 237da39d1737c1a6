"""Time, rate and memory of one call: named cases, this library beside others, at lengths that change and at one that repeats.

python -m benchmarks speed                                               # the cases of every table
python -m benchmarks speed --lengths-vary --cases gigapath-8192          # each call at a length that was not before
python -m benchmarks speed --cases "longnet*" --contenders ours "ours flash4" floor --torchscale PATH
python -m benchmarks speed --against FOLDER                              # what got slower since the run that wrote FOLDER
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case, case_names, family_of, make_case, new_lengths
from benchmarks.contenders import GPU_ONLY, Attend, Contender, Costs, contender
from benchmarks.report import Row
from benchmarks.session import Group, Session
from benchmarks.timing import WAYS, Call, Refused, attempt, counted, in_turns, new_and_again, release
from benchmarks.truth import wrong
from dilated_attention.parsing import size

ABOUT = "time, TFLOP/s and memory of named cases beside others, also at lengths that change"
PASSES = ("forward", "backward", "both")
# FLOPs per pair and head dimension: two matrix products forward, five backward
FLOPS = {"forward": 4, "backward": 10, "both": 14}
# new lengths of --lengths-vary, of which the first are not counted
WARM, NEW = 3, 24
# FLOP/s of the best kernels on a Hopper GPU, and of a CPU's thread: what takes too long at this rate is not begun
_GPU_RATE, _THREAD_RATE = 6e14, 5e10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", default=[], metavar="NAME", help="FAMILY-LENGTH[-full|-causal][-xBATCH][-dD] or wildcards")
    add("--lengths", type=size, nargs="+", help="of wildcards' families, in place of their own")
    add("--contenders", nargs="+", metavar="NAME", help="default: those of each case")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: all")
    add("--ways", nargs="*", choices=WAYS, default=["called", "host"], help="default: called host")
    add("--lengths-vary", action="store_true", help=f"call each case at {NEW} lengths that were not before")
    add("--torchscale", default="", metavar="PATH", help="folder of your clone of github.com/microsoft/torchscale")
    add("--longest", type=float, default=1.0, help="seconds that one call may take; default 1")
    add("--against", type=Path, metavar="FOLDER", help="of an earlier run on this hardware: exit code 1 where this library got slower")
    add("--threshold", type=float, default=0.2, help="slowdown that --against allows, as a share; default 0.2")


def groups(session: Session) -> list[Group]:
    options, made = session.options, list[Group]()
    for name in case_names(options.cases, options.lengths):
        _, family, _ = family_of(name)
        case = make_case(name, session.device, session.dtype, is_small=session.is_small)
        names = options.contenders or [name for name in family.contenders if session.device.type == "cuda" or name not in GPU_ONLY]
        how: dict[str, Any] = {"passes": options.passes, "seconds": session.seconds, "longest": options.longest}
        if options.lengths_vary:
            run = functools.partial(measure_new, names, case, torchscale=options.torchscale, **how)
        else:
            run = functools.partial(measure, names, case, torchscale=options.torchscale, ways=options.ways, **how)
        made.append((f"{name}{' new lengths' if options.lengths_vary else ''}", run))
    return made


def foreign(session: Session) -> list[str]:
    """Returns the names of other people's contenders."""
    names = {name for case in case_names(session.options.cases) for name in session.options.contenders or family_of(case)[1].contenders}
    return [name for name in names if name == "torchscale" or contender(name).is_foreign]


def measure(
    names: Sequence[str], case: Case, *, passes: Sequence[str] = PASSES, seconds: float = 0.2, longest: float = 1.0,
    ways: Sequence[str] = ("called", "host"), torchscale: str = "",
) -> list[Row]:  # fmt: skip
    """Returns a row for each contender and pass: times, ``tflops``, ``peak_bytes`` without the inputs.

    A contender that refuses, raises, runs out of memory or is wrong has one row with a note and no figures.

    Args:
        longest: seconds that a call may take, by its FLOPs.
    """
    rows, able = list[Row](), list[tuple[Contender, Case, Any, dict[str, float]]]()
    for name in names:
        ready, note = attempt(_checked, name, case, passes, longest, torchscale, foreign=True)
        errors = ready[-1] if ready else {}
        note = note or wrong(errors, ready[0].allowed(case) if ready else 0.0)
        if ready and not note:
            able.append(ready)
        else:
            rows.append(Row(name=name, case=case.row() | {"pass": passes[0]}, errors=errors, note=note))
    for which in passes:
        release()
        calls, values = dict[str, Callable[[], Call]](), dict[str, dict[str, float]]()
        mine = [each for each in able if _has(each[0], each[2], which)]
        for one, at, attend, _ in mine:
            make = functools.partial(call_of, attend, at, which)
            first, note = attempt(_first, make, at.device, foreign=True)
            if first is None:
                rows.append(Row(name=one.name, case=case.row() | {"pass": which}, note=note))
            else:
                calls[one.name], values[one.name] = make, first
        times, note = attempt(functools.partial(in_turns, seconds=seconds, ways=ways), calls, case.device)
        if times is None:
            # they do not fit together
            times = {name: in_turns({name: make}, case.device, seconds=seconds, ways=ways)[name] for name, make in calls.items()}
        for one, at, attend, errors in mine:
            if one.name in times:
                factor = attend.factor if isinstance(attend, Costs) else 1.0
                figures = {key: value if key == "launches" else factor * value for key, value in times[one.name].items()}
                count = one.pairs(at)
                if count is not None:
                    figures["tflops"] = FLOPS[which] * count * at.head_dim / figures["ms"] / 1e9
                figures |= {} if isinstance(attend, Costs) else values[one.name]
                rows.append(Row(name=one.name, case=case.row() | {"pass": which}, values=figures, errors=errors))
    return rows


def measure_new(
    names: Sequence[str], case: Case, *, passes: Sequence[str] = ("both",), seconds: float = 0.2, longest: float = 1.0, torchscale: str = ""
) -> list[Row]:
    """Returns a row for each contender and pass at lengths that were not before, beside the case's own length as called in a loop.

    ``new_ms`` and ``worst_ms``: median and worst of the first call at a length; ``again_ms``: median of the second.
    """
    rows = measure(names, case, passes=passes, seconds=seconds, longest=longest, torchscale=torchscale)
    lengths = list(new_lengths(case, WARM + NEW))
    for i, row in enumerate(rows):
        one = contender(row.name, torchscale) if row.values else None
        if one is None or isinstance(attempt(one.make, case, foreign=True)[0], Costs):
            continue

        def make(length: int, one: Contender = one, which: str = row.case["pass"]) -> Call:
            at = one.of(replace(case, num_positions=length, queries=None))
            return call_of(one.make(at), at, which)

        figures, note = attempt(new_and_again, make, lengths, case.device, WARM, foreign=True)
        rows[i] = replace(row, values=(figures or {}) | row.values, note=note)
        release()
    return rows


def _checked(
    name: str, case: Case, passes: Sequence[str], longest: float, torchscale: str
) -> tuple[Contender, Case, Attend | Costs, dict[str, float]]:
    one = contender(name, torchscale)
    at = one.of(case)
    attend = one.make(at)
    if isinstance(attend, Costs):
        return one, at, attend, {}
    rate = _GPU_RATE if at.device.type == "cuda" else _THREAD_RATE * torch.get_num_threads()
    expected = FLOPS["both" if set(passes) - {"forward"} else "forward"] * (one.pairs(at) or 0) * at.head_dim / rate
    if expected > longest:
        raise Refused(f"longer than {longest:g} s a call")
    return one, at, attend, one.errors(at, attend, gradients=one.trains and passes != ["forward"])


def _has(one: Contender, attend: Attend | Costs, which: str) -> bool:
    return which in attend.calls if isinstance(attend, Costs) else which == "forward" or one.trains


def _first(make: Callable[[], Call], device: torch.device) -> dict[str, float]:
    """Calls once to compile, then once to count the bytes beyond what was allocated before, where PyTorch counts them at no cost."""
    call = make()
    call()
    if device.type != "cuda":
        return {}
    with counted(device) as peak:
        call()
    return {"peak_bytes": peak.bytes}


def call_of(attend: Attend | Costs, case: Case, which: str) -> Call:
    """Returns a call of one pass on the next of several sets of inputs, so that caches do not hold them; results are dropped at once.

    There are two small sets, and one where it takes 4 GiB or more. The backward runs on graphs that are made here.
    """
    if isinstance(attend, Costs):
        return attend.calls[which]
    local = getattr(attend, "local", lambda case: case)(case)
    dout = local.dout()
    sets = [local.qkv(seed) for seed in range(1 if case.bytes >= 2**32 else 2)]
    if which == "backward":
        graphs = itertools.cycle([(attend(*leaves), leaves) for leaves in sets]).__next__

        def backward() -> None:
            out, leaves = graphs()
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return backward
    following = itertools.cycle(sets).__next__

    def forward() -> None:
        with torch.no_grad():
            attend(*following())

    def both() -> None:
        leaves = following()
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return forward if which == "forward" else both
