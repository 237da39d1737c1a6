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

from benchmarks.case import Case, case_names, documents, family_of, make_case, new_lengths
from benchmarks.contenders import Attend, Contender, Costs, contender
from benchmarks.copies import TORCHSCALE, find
from benchmarks.report import Group, Row
from benchmarks.timing import NEW, WARM, Call, Refused, attempt, in_turns, loop, new_and_again, peak_bytes, positive, release
from benchmarks.truth import wrong
from dilated_attention.parsing import size

ABOUT = "time, TFLOP/s and memory of named cases beside others, also at lengths that change"
PASSES = ("forward", "backward", "both")
# FLOPs per pair and head dimension: two matrix products forward, five backward
FLOPS = {"forward": 4, "backward": 10, "both": 14}
# FLOP/s of the best kernels on a Hopper GPU, and of a CPU's thread: what takes too long at this rate is not begun
_GPU_RATE, _THREAD_RATE = 6e14, 5e10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", default=[], metavar="NAME", help="FAMILY-LENGTH[-full|-causal][-xBATCH][-dD] or wildcards")
    add("--lengths", type=size, nargs="+", help="of wildcards' families, in place of their own")
    add("--contenders", nargs="+", metavar="NAME", help="default: those of each case")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: all")
    add("--graphs", action="store_true", help="also time calls as CUDA graphs")
    add("--lengths-vary", action="store_true", help=f"also call each case at {NEW} lengths that were not before")
    add("--torchscale", default="", metavar="PATH", help="folder of your clone of github.com/microsoft/torchscale")
    add("--longest", type=positive, default=1.0, help="seconds that one call may take; default 1")
    add("--against", type=Path, metavar="FOLDER", help="of an earlier run on this hardware: exit code 1 where this library got slower")
    add("--threshold", type=positive, default=0.2, help="slowdown that --against allows, as a share; default 0.2")


def groups(options: argparse.Namespace) -> list[Group]:
    if options.torchscale:
        find(Path(options.torchscale), TORCHSCALE)
    made = list[Group]()
    for name in case_names(options.cases, options.lengths):
        case = make_case(name, options.device, options.dtype, is_small=options.is_small)
        contenders = [contender(each, options.torchscale) for each in options.contenders or family_of(name)[0].contenders]
        how = {each: getattr(options, each) for each in ("passes", "seconds", "longest", "graphs", "lengths_vary")}
        made.append((f"{name}{' new lengths' if options.lengths_vary else ''}", functools.partial(measure, contenders, case, **how)))
    return made


def measure(
    contenders: Sequence[Contender], case: Case, *, passes: Sequence[str] = PASSES, seconds: float = 0.2, longest: float = 1.0,
    graphs: bool = False, lengths_vary: bool = False,
) -> list[Row]:  # fmt: skip
    """Returns a row for each contender and pass: times, ``tflops``, ``peak_bytes`` without the inputs. A contender that refuses, raises,
    runs out of memory, is wrong or would take more than ``longest`` seconds has a note and no figures."""
    rows, able = list[Row](), list[tuple[Contender, Case, Any, dict[str, float]]]()
    for one in contenders:
        at = one.of(case)
        answer, note = attempt(_checked, one, at, passes, longest, foreign=True)
        attend, errors = answer or (None, {})
        if note := note or wrong(errors, one.allowed(case)):
            rows.append(Row(name=one.name, case=case.row() | {"pass": passes[0]}, errors=errors, note=note))
        else:
            able.append((one, at, attend, errors))
    for which in passes:
        release()
        calls, peaks = dict[str, Callable[[], Call]](), dict[str, dict[str, float]]()
        mine = [each for each in able if (which in each[2].calls if isinstance(each[2], Costs) else which == "forward" or each[0].trains)]
        for one, at, attend, _ in mine:
            make = functools.partial(call_of, attend, at, which)

            def first(make: Callable[[], Call] = make) -> dict[str, float]:
                # the first call compiles; bytes of the second, where PyTorch counts them at no cost
                call = make()
                call()
                return {"peak_bytes": peak_bytes(call, case.device)} if case.device.type == "cuda" else {}

            peak, note = attempt(first, foreign=True)
            if peak is None:
                rows.append(Row(name=one.name, case=case.row() | {"pass": which}, note=note))
            else:
                calls[one.name], peaks[one.name] = make, peak
        turns = functools.partial(in_turns, device=case.device, seconds=seconds, graphs=graphs)
        times, note = attempt(turns, calls)
        if times is None:
            # they do not fit together
            times = {name: turns({name: make})[name] for name, make in calls.items()}
        for one, at, attend, errors in mine:
            if one.name not in times:
                continue
            figures, note = times[one.name], ""
            if isinstance(attend, Costs):
                figures = {key: attend.factor * ms for key, ms in figures.items()}
            else:
                figures |= peaks[one.name]
                if lengths_vary:
                    new, note = attempt(_new, one, case, which, foreign=True)
                    figures |= new or {}
            if (count := one.pairs(at)) is not None:
                figures["tflops"] = FLOPS[which] * count * at.head_dim / figures["ms"] / 1e9
            rows.append(Row(name=one.name, case=case.row() | {"pass": which}, values=figures, errors=errors, note=note))
    return rows


def _new(one: Contender, case: Case, which: str) -> dict[str, float]:
    """Returns times of the first and the second call at lengths that were not before."""

    def make(length: int) -> Call:
        at = one.of(replace(case, num_positions=length, queries=None, bounds=documents(length) if case.bounds else None))
        return call_of(one.make(at), at, which)

    return new_and_again(make, list(new_lengths(case, WARM + NEW)), functools.partial(loop, device=case.device))


def _checked(one: Contender, case: Case, passes: Sequence[str], longest: float) -> tuple[Attend | Costs, dict[str, float]]:
    """Returns the function and its errors."""
    attend = one.make(case)
    if isinstance(attend, Costs):
        return attend, {}
    rate = _GPU_RATE if case.device.type == "cuda" else _THREAD_RATE * torch.get_num_threads()
    expected = FLOPS["both" if set(passes) - {"forward"} else "forward"] * (one.pairs(case) or 0) * case.head_dim / rate
    if expected > longest:
        raise Refused(f"longer than {longest:g} s a call")
    return attend, one.errors(case, attend, gradients=one.trains and list(passes) != ["forward"])


def call_of(attend: Attend | Costs, case: Case, which: str) -> Call:
    """Returns a call of one pass on the next of several sets of inputs, so that caches do not hold them; results are dropped at once. There
    are two small sets, and one where it takes 4 GiB or more. The backward runs on graphs that are made here."""
    if isinstance(attend, Costs):
        return attend.calls[which]
    local = getattr(attend, "local", lambda case: case)(case)
    dout, sets = local.dout(), [local.qkv()]
    if sum(x.nbytes for x in sets[0]) < 2**32:
        sets.append(local.qkv(1))
    if which == "backward":
        graphs = itertools.cycle([(attend(*leaves), leaves) for leaves in sets])

        def backward() -> None:
            out, leaves = next(graphs)
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return backward
    following = itertools.cycle(sets)

    def forward() -> None:
        with torch.no_grad():
            attend(*next(following))

    def both() -> None:
        leaves = next(following)
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return forward if which == "forward" else both
