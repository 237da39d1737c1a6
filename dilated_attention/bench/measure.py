"""Attention contenders on one problem: right first, then time of each pass in turns, memory, and rates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench import correct
from dilated_attention.bench.attempt import Refused, attempt, release
from dilated_attention.bench.contenders import Contender, OfEmbedded
from dilated_attention.bench.correct import Attend
from dilated_attention.bench.problem import Problem
from dilated_attention.bench.rows import Row
from dilated_attention.bench.timing import Timing, interleaved, peak_extra

PASSES = ("forward", "backward", "both")
# FLOPs of a pair and head dimension: two matrix products forward, five backward
FLOPS = {"forward": 4, "backward": 10, "both": 14}


def check(contender: Contender, problem: Problem, attend: Attend) -> dict[str, float]:
    """Relative errors against float64: whole at ``correct.WHOLE`` positions, and of sampled rows of ``problem`` itself.

    Blocks chosen by content are those that the pattern chooses for the same q and k. A function of x, and one whose pairs are no one
    pattern's, is compared with itself on plain torch in float64 instead.
    """
    small = problem.reduced(correct.WHOLE)
    small_attend = contender.make(small)
    if contender.chooses is not None:
        q, k, _ = (x.detach() for x in replace(small, batch_size=1).qkv(7))
        picked = contender.chooses(small).choose(q, k, is_causal=small.is_causal)
        return correct.whole_errors(small_attend, picked, replace(small, batch_size=1), gradients=contender.trains)
    pattern = contender.pattern(small)
    if contender.inputs == "x" or pattern is None:
        return _against_itself(contender, small, small_attend)
    errors = correct.whole_errors(small_attend, pattern, small, gradients=contender.trains)
    if problem.num_positions > small.num_positions:
        whole = contender.pattern(problem)
        assert whole is not None
        leaves = problem.qkv(7)
        with torch.no_grad():
            out = attend(*leaves)
        errors["sampled out"] = correct.sampled_error(whole, problem, leaves, out)
    return errors


def _against_itself(contender: Contender, problem: Problem, attend: Attend) -> dict[str, float]:
    """Errors of out and input gradients against the same module in float64, which runs on plain torch."""
    exact = replace(problem, dtype=torch.float64, device=torch.device("cpu"))
    leaves = inputs_of(contender, problem, 7)
    dout = torch.randn_like(leaves[0]).detach()
    copies = [x.detach().cpu().double().requires_grad_() for x in leaves]
    reference = contender.make(exact)
    if isinstance(attend, OfEmbedded) and isinstance(reference, OfEmbedded):
        reference.module.load_state_dict({name: x.detach().cpu().double() for name, x in attend.module.state_dict().items()})
    found = attend(*leaves)
    true = reference(*copies)
    grads = torch.autograd.grad(found, leaves, dout)
    true_grads = torch.autograd.grad(true, copies, dout.cpu().double())
    names = ("out", "dx") if contender.inputs == "x" else ("out", "dq", "dk", "dv")
    return {
        name: float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm())
        for name, a, b in zip(names, (found, *grads), (true, *true_grads), strict=True)
    }


def inputs_of(contender: Contender, problem: Problem, seed: int = 0) -> list[torch.Tensor]:
    return [problem.embedded(seed)] if contender.inputs == "x" else problem.qkv(seed)


def measure(
    contenders: Iterable[Contender],
    problem: Problem,
    *,
    passes: Sequence[str] = PASSES,
    seconds: float = 0.5,
    memory: bool = False,
    extra: dict[str, Any] | None = None,
) -> list[Row]:
    """A row for each contender and pass: ``ms``, its percentiles, ``tflops``, with ``memory`` also ``peak_bytes`` beyond the inputs.

    What refuses, runs out of memory or is wrong has one row without figures, and a note.
    """
    rows: list[Row] = []
    able: dict[str, tuple[Contender, Attend, dict[str, float]]] = {}
    case = problem.case | (extra or {})
    for contender in contenders:
        made = attempt(functools.partial(contender.make, problem))
        if made.value is None:
            rows.append(Row(name=contender.name, case=case, note=made.note))
            continue
        attend = made.value
        checked = attempt(functools.partial(check, contender, problem, attend))
        note = checked.note or correct.wrong(checked.value or {}, contender.allowed(problem))
        if note:
            rows.append(Row(name=contender.name, case=case, errors=checked.value or {}, note=note))
            continue
        able[contender.name] = (contender, attend, checked.value or {})
    release()
    for which in passes:
        rows += _timed(able, problem, which, case, seconds, memory)
        release()
    return rows


def _timed(
    able: dict[str, tuple[Contender, Attend, dict[str, float]]],
    problem: Problem,
    which: str,
    case: dict[str, Any],
    seconds: float,
    memory: bool,
) -> list[Row]:
    rows, calls, peaks = [], {}, {}
    # contenders share the sets of inputs, and each goes through them in its own turns
    shared: dict[str, list[Any]] = {}
    for name, (contender, attend, _) in able.items():
        if which != "forward" and not contender.trains:
            continue
        prepared = attempt(functools.partial(_call, contender, attend, problem, which, shared))
        note = prepared.note
        if prepared.value is not None:
            # a first call by itself: what does not fit is left out before the turns begin
            first = attempt(functools.partial(_first, prepared.value, problem.device, memory))
            note = first.note
            if first.value is not None:
                calls[name], peaks[name] = prepared.value, first.value
                continue
        rows.append(Row(name=name, case=case | {"pass": which}, note=note))
    for name, timing in interleaved(calls, problem.device, seconds=seconds).items():
        contender, _, errors = able[name]
        values = timing.values() | rate(contender.pairs(problem), problem.head_dim, which, timing)
        if memory and problem.device.type == "cuda":
            values["peak_bytes"] = peaks[name]
        rows.append(Row(name=name, case=case | {"pass": which}, values=values, errors=errors))
    return rows


def _first(call: Callable[[], Any], device: torch.device, memory: bool) -> int:
    """Call once; the peak beyond what was allocated where ``memory`` is asked for and counted, else 0."""
    if memory:
        return peak_extra(call, device) or 0
    call()
    return 0


def rate(pairs: int | None, head_dim: int, which: str, timing: Timing) -> dict[str, float]:
    """{"tflops": …} by the pairs that a contender computes; empty where the data decides them."""
    return {} if pairs is None else {"tflops": FLOPS[which] * pairs * head_dim / timing.ms / 1e9}


def _call(contender: Contender, attend: Attend, problem: Problem, which: str, shared: dict[str, list[Any]]) -> Callable[[], Any]:
    """One pass on the next set of inputs; results are given up at once. The backward runs on graphs made beforehand."""
    if contender.inputs not in shared:
        shared[contender.inputs] = [inputs_of(contender, problem, i) for i in range(sets_of(problem))]
        shared["dout"] = shared.get("dout") or [problem.draw(problem.num_heads, 1000)]
    sets = shared[contender.inputs]
    dout = shared["dout"][0] if contender.inputs == "qkv" else shared["dout"][0].flatten(2)
    number = 0

    def following() -> int:
        nonlocal number
        number = (number + 1) % len(sets)
        return number

    if which == "forward":

        def forward() -> None:
            with torch.no_grad():
                attend(*sets[following()])

        return forward
    if which == "both":

        def both() -> None:
            leaves = sets[following()]
            torch.autograd.grad(attend(*leaves), leaves, dout)

        return both
    if which != "backward":
        raise Refused(f"pass {which!r}; expected one of {', '.join(PASSES)}")
    outs = [attend(*leaves) for leaves in sets]

    def backward() -> None:
        at = following()
        torch.autograd.grad(outs[at], sets[at], dout, retain_graph=True)

    return backward


def sets_of(problem: Problem) -> int:
    """Sets of inputs in turns: eight of small ones, two where one exceeds any cache, one where memory is the question (from 4 GiB on)."""
    if problem.bytes >= 4 * 2**30:
        return 1
    return max(2, min(8, 2**28 // max(problem.bytes, 1)))
