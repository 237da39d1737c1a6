"""Peak memory of attention, predicted and measured, by implementation and length.

A peak is the same on every run. The longest sequence that fits is measured by suite ``extreme`` and estimated by ``plan``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dilated_attention.bench.accuracy import WHOLE
from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.measure.limits import called, planned, within
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, by, compared, failures, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, SDPA, STANDARD, Contender
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import size
from dilated_attention.pattern import BlockPattern, TopBlocks

# "training": forward and backward
PASSES = ("forward", "training")
CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES)}
# bytes beyond which a call is not run on a CPU, whose memory is needed for other things
_MOST_ON_CPU = 2 * 2**30


class Memory(Suite):
    """Measures bytes instead of time."""

    name = "memory"
    about = "peak memory of attention by length, predicted and measured"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 4k … 256k; on a CPU 1k … 4k")
        parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all")
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))

    def settings(self, session: Session) -> dict[str, Any]:
        return super().settings(session) | {"dtype": str(session.dtype).removeprefix("torch.")}

    def groups(self, session: Session) -> Sequence[Group]:
        options = session.options
        lengths = options.lengths or ([2**i for i in range(12, 19)] if session.full else [1024, 2048, 4096])
        heads, head_dim = (16, 128) if session.full else (8, 64)
        make = functools.partial(Problem, num_heads=heads, head_dim=head_dim, dtype=session.dtype, device=session.device, is_causal=True)
        chosen = [CONTENDERS[name] for name in options.contenders or CONTENDERS]
        places = itertools.product((make(num_positions=n) for n in lengths), options.passes)
        return [Group(f"attention {at.label} {which}", functools.partial(_attention, chosen, at, which)) for at, which in places]

    def tables(self, results: Results) -> list[Table]:
        found = list[Table]()
        columns = {"positions": ("N", 1.0), "MiB": ("peak_bytes", 2.0**-20), "×": ("times", 1.0), "off the plan, %": ("off", 100.0)}
        caption = f"Inputs, results and everything in between; causal, one sequence. ×: less than {STANDARD.name}."
        for which, rows in by(results.rows, "pass"):
            rows = compared(rows, "peak_bytes", STANDARD.name, "N")
            found += listing(rows, columns, title=f"peak memory of {which}, measured and against the plan", caption=caption)
        return [*found, *failures(results)]


def _attention(contenders: Iterable[Contender], problem: Problem, which: str) -> list[Row]:
    rows = []
    for contender in contenders:
        if which == "training" and not contender.trains:
            continue
        row = Row(name=contender.name, case=problem.case | {"pass": which})
        note = _wrong(contender, problem.reduced(WHOLE))
        predicted = None if note else predicted_bytes(contender, problem, which)
        if predicted is not None and predicted > _MOST_ON_CPU and problem.device.type == "cpu":
            note = f"not run: it would take {predicted / 2**30:.1f} GiB, on a CPU at most {_MOST_ON_CPU / 2**30:.0f}"
        run = functools.partial(called, contender.make, problem, backward=which == "training")
        found, note = (None, note) if note else within(run, problem.device)
        values: dict[str, float] = {"peak_bytes": found.peak} if found else {}
        if found and predicted is not None:
            values |= {"predicted_bytes": predicted, "off": found.peak / predicted - 1}
        rows.append(replace(row, values=values, note=note))
    return rows


@functools.lru_cache(maxsize=256)
def _wrong(contender: Contender, small: Problem) -> str:
    """Returns a note where a contender does not run or is wrong on a short sequence."""
    return measure([contender], small, passes=())[0].note


def predicted_bytes(contender: Contender, problem: Problem, which: str) -> int | None:
    """Returns the peak that the plan of the same call predicts; None where a plan is not of this contender.

    Plans describe the backends that are chosen by default, so of dense kernels only the two that plans know by name.
    """
    pattern = contender.pattern(problem)
    if contender in DENSE:
        kind, pattern = {STANDARD.name: "standard", SDPA.name: "sdpa"}.get(contender.name), None
    elif pattern is None or contender.bound is not None or isinstance(pattern, TopBlocks):
        kind = None
    else:
        kind = "block_sparse" if isinstance(pattern, BlockPattern) else "dilated"
    # calls of the standard attention share one mask, which is made before them
    shared = problem.num_positions**2 if contender is STANDARD and problem.is_causal else 0
    return None if kind is None else int(planned(kind, problem, pattern, backward=which == "training")["predicted_bytes"]) - shared
