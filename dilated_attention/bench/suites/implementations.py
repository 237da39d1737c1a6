"""Compares all public attention modules with PyTorch's and third-party ones.

Measures time, memory and tokens/s of a call and of a training step.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.report.plots import Line, Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import ESTIMATED, Table, figure
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import MODULES, MULTIHEAD, SDPA, Contender, dense
from dilated_attention.bench.workloads.external import foreign
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import RINGS
from dilated_attention.parsing import UsageError, size

ATTENTION = dense("auto", "this library's dense attention, on the backend that it prefers here")
DENSE = (MULTIHEAD[0], SDPA, Contender(name="attention", what=ATTENTION.what, make=ATTENTION.make, pattern=ATTENTION.pattern))
CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES, *MULTIHEAD[1:], *RINGS)}
PROJECTED = tuple(name for name, contender in CONTENDERS.items() if contender.inputs == "x")
# the call used in inference, and the step used in training
PASSES = {"forward": "forward", "both": "forward + backward"}
BASELINE = SDPA.name


class Implementations(Suite):
    """The comparison that attention libraries publish of their modules, for this library and any other."""

    name = "implementations"
    over_processes = True
    about = "all attention modules, and other people's: time, memory, tokens/s"
    over_processes = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 4k 8k 32k 64k 128k; on a CPU 1k 2k")
        parser.add_argument("--batch", type=size, default=2, help="sequences; default 2")
        parser.add_argument("--heads", type=size, help="default 12, on a CPU 4")
        parser.add_argument("--head-dim", type=size, help="default 64, on a CPU 32")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full"], help="default: full")
        parser.add_argument("--modules", nargs="+", choices=list(CONTENDERS), help="default: all")
        parser.add_argument(
            "--contender",
            type=foreign,
            action="append",
            default=[],
            metavar="NAME=MODULE.PATH:FUNCTION",
            help=(
                "another implementation: function(problem) -> callable of q, k, v (B, N, H, D); "
                "compared with dense or dilated attention; may be repeated"
            ),
        )
        parser.add_argument("--longest", type=float, help="seconds that one call may take; default 1.5 in full size, 1 in small")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        compared: dict[str, Any] = {"modules": sorted(options.modules) if options.modules else "all"}
        compared |= {"contenders": {other.name: other.target for other in options.contender}} if options.contender else {}
        return super().settings(session) | compared | {"longest": self.longest(session)}

    def longest(self, session: Session) -> float:
        if session.options.longest is None:
            return 1.5 if session.full else 1.0
        return float(session.options.longest)

    def problems(self, session: Session) -> list[Problem]:
        options = session.options
        heads, head_dim = (12, 64) if session.full else (4, 32)
        return [
            Problem(
                num_positions=n,
                num_heads=options.heads or heads,
                head_dim=options.head_dim or head_dim,
                batch_size=options.batch,
                dtype=dtype,
                device=session.device,
                is_causal=mask == "causal",
            )
            for dtype in session.dtypes
            for mask in options.masks
            for n in options.lengths or ([4096, 8192, 2**15, 2**16, 2**17] if session.full else [1024, 2048])
        ]

    def groups(self, session: Session) -> Sequence[Group]:
        names = [other.name for other in session.options.contender]
        for name in names:
            if name in CONTENDERS or names.count(name) > 1:
                raise UsageError(f"--contender is named {name!r}, which is already taken; choose another name")
        return [Group(problem.label, functools.partial(self._measure, session, problem)) for problem in self.problems(session)]

    def _measure(self, session: Session, problem: Problem) -> list[Row]:
        contenders = [CONTENDERS[name] for name in session.options.modules or CONTENDERS]
        rows = []
        extra = {"processes": session.world_size} if session.world_size > 1 else {}
        for other in session.options.contender:
            made = attempt(functools.partial(other.contender, problem), foreign=True)
            if made.value is None:
                rows.append(Row(name=other.name, case=problem.case | extra, note=made.note))
            else:
                contenders.append(made.value)
        # a dozen contenders share the time of a group
        asked = getattr(session.options, "seconds", None)
        rows += measure(
            contenders,
            problem,
            passes=tuple(PASSES),
            seconds=session.seconds / (1 if session.full else 2) if asked is None else session.seconds,
            memory=True,
            longest=self.longest(session),
            agree=functools.partial(_agreed, session.device) if session.world_size > 1 else None,
            extra=extra,
        )
        shares = {contender.name: _share(contender, problem) for contender in contenders}
        for row in rows:
            share = shares.get(row.name)
            if row.values and share is not None:
                row.values["pairs_share"] = share
        return rows

    def tables(self, results: Results) -> list[Table]:
        cases = dict.fromkeys(_case(row) for row in results.rows if "N" in row.case)
        told = {name: contender.what for name, contender in CONTENDERS.items()}
        told |= {name: f"{target}, yours" for name, target in results.settings.get("contenders", {}).items()}
        names = [name for name in _in_order(results.rows) if name in told]
        legend = Table("what is compared", ["implementation", "what it computes"], [[name, told[name]] for name in names])
        return [legend, *(_table(results, case) for case in cases)]

    def plots(self, results: Results) -> list[Plot]:
        plots = []
        for dtype, causal in dict.fromkeys((row.case["dtype"], row.case["causal"]) for row in results.rows if "N" in row.case):
            rows = [row for row in results.rows if (row.case.get("dtype"), row.case.get("causal")) == (dtype, causal) and row.values]
            several = len({(row.case.get("dtype"), row.case.get("causal")) for row in results.rows if "N" in row.case}) > 1
            suffix = f"-{dtype}-{'causal' if causal else 'full'}" if several else ""
            for which, what in PASSES.items():
                for kind, names in (("attention", None), ("projected", PROJECTED)):
                    mine = [row for row in rows if row.case["pass"] == which and (row.name in PROJECTED) == (names is not None)]
                    about = "with projections" if names else "attention alone"
                    title = f"{what}, {about}, {dtype}{', causal' if causal else ''}"
                    lines = _lines(mine, _tokens_per_second)
                    if lines:
                        plots.append(
                            Plot(name=f"tokens-{kind}-{which}{suffix}", title=f"Tokens per second: {title}", x_label="positions",
                                 y_label="tokens/s", lines=lines, log_x=True, log_y=True, note=_about(mine))
                        )  # fmt: skip
                    lines = _lines([row for row in mine if row.values.get("peak_bytes")], lambda row: row.values["peak_bytes"] / 2**20)
                    if lines and which == "both":
                        plots.append(
                            Plot(name=f"memory-{kind}{suffix}", title=f"Peak memory: {title}", x_label="positions",
                                 y_label="MiB beyond the inputs", lines=lines, log_x=True, log_y=True, note=_about(mine))
                        )  # fmt: skip
        return plots


def _share(contender: Contender, problem: Problem) -> float | None:
    pairs = contender.pairs(problem)
    return None if pairs is None else pairs / problem.dense_pairs


def _agreed(device: torch.device, value: float) -> float:
    """Returns the first process's number."""
    told = torch.tensor([value], dtype=torch.float64, device=device)
    torch.distributed.broadcast(told, 0)
    return float(told.item())


def _case(row: Row) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in row.case.items() if key != "pass")


def _table(results: Results, case: tuple[tuple[str, Any], ...]) -> Table:
    """Builds the table of one length: implementations as rows; time, tokens/s and memory of a call and of a training step as columns."""
    of = dict(case)
    rows = [row for row in results.rows if "N" in row.case and _case(row) == case]
    found = {(row.name, row.case.get("pass")): row for row in rows}
    base = found.get((BASELINE, "both"))
    notes: dict[str, int] = {}
    body = []
    for name in _in_order(rows):
        cells = []
        share = None
        for which in PASSES:
            row = found.get((name, which)) or found.get((name, None))
            if row is not None and row.values:
                share = row.values.get("pairs_share", share)
                peak = row.values.get("peak_bytes")
                cells += [figure(row.values["ms"]), figure(_tokens_per_second(row)), "–" if peak is None else figure(peak / 2**20)]
            else:
                note = "no gradient" if row is None else row.note
                cells += [
                    "≈ " + note.removeprefix(ESTIMATED) if note.startswith(ESTIMATED) else f"[{notes.setdefault(note, len(notes) + 1)}]",
                    "–",
                    "–",
                ]
        mine = found.get((name, "both"))
        faster = f"{figure(base.values['ms'] / mine.values['ms'])} ×" if base and mine and base.values and mine.values else "–"
        body.append([name, "–" if share is None else f"{figure(100 * share)} %", *cells, faster])
    columns = ["implementation", "pairs", "forward ms", "tokens/s", "peak MiB", "training ms", "tokens/s", "peak MiB", f"× {BASELINE}"]
    caption = [
        "pairs: share of dense attention's, with multiplicity. Training: forward + backward; "
        f"its time against {BASELINE}'s in the last column. "
        "Peak: beyond the inputs" + ("." if any("peak_bytes" in row.values for row in rows) else "; not counted on a CPU."),
        *(
            [f"Ring modules: {of['processes']} processes share each sequence; the others run whole on each of them."]
            if "processes" in of
            else []
        ),
        *(["≈: estimated from a shorter length, and not run."] if any(cell.startswith("≈") for row in body for cell in row) else []),
        *(f"[{number}] {note}" for note, number in notes.items()),
    ]
    title = f"{of['N']:,} positions, batch {of['B']}, {of['H']} heads of {of['D']}, {of['dtype']}, {'causal' if of['causal'] else 'full'}"
    return Table(title, columns, body, "\n".join(caption))


def _in_order(rows: Iterable[Row]) -> list[str]:
    """Returns names in the order of the comparison, third-party ones last."""
    present = dict.fromkeys(row.name for row in rows)
    return [*(name for name in CONTENDERS if name in present), *(name for name in present if name not in CONTENDERS)]


def _tokens_per_second(row: Row) -> float:
    return 1000 * row.case["B"] * row.case["N"] / row.values["ms"]


def _lines(rows: Iterable[Row], value: Any) -> list[Line]:
    rows = list(rows)
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: row.case["N"])
        lines.append(Line(name, [row.case["N"] for row in mine], [value(row) for row in mine]))
    return lines


def _about(rows: Sequence[Row]) -> str:
    case = rows[0].case
    shared = f", ring modules on {case['processes']} processes" if "processes" in case else ""
    return f"batch {case['B']}, {case['H']} heads of {case['D']}{shared}"
