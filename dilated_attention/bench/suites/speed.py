"""Time of every pass: dense attention kernel by kernel, this library's modules and functions, and other people's, by length and by case.

python -m dilated_attention bench speed                                     # lengths and shapes, every module
python -m dilated_attention bench speed --cases short --torchscale PATH     # what one call costs, and every option
python -m dilated_attention bench speed --cases "longnet*" --contenders ours floor --backends flash4
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.measure.contest import duration, measure
from dilated_attention.bench.measure.forward_backward import FLOPS, PASSES
from dilated_attention.bench.measure.rank_sync import of_first_process
from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.measure.timing import WAYS
from dilated_attention.bench.report.peaks import explained, gpu_of, utilisation
from dilated_attention.bench.report.plots import Plot, lines_of
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, Value, pivot
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.workloads.cases import DEFAULTS, FAMILIES, NAMES, Case, make_case, names_of
from dilated_attention.bench.workloads.competitors import COMPETITORS, floor, torchscale
from dilated_attention.bench.workloads.contenders import DENSE, FUNCTIONS, MODULES, MULTIHEAD, STANDARD, Contender, of_backend
from dilated_attention.bench.workloads.external import foreign
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import RINGS
from dilated_attention.parsing import UsageError, size

CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES, *MULTIHEAD, *RINGS, *FUNCTIONS, *COMPETITORS)}
# those of the length and grid parts
ALL = (*DENSE, *MODULES, *MULTIHEAD)
# dense kernels that round in the inputs' dtype; 8-bit products are not comparable
KERNELS = tuple(contender.name for contender in DENSE if contender is not STANDARD and "fp8" not in contender.name)
# batch x positions x heads x head dim
GRID = ((1, 32, 4, 16), (1, 128, 8, 32), (4, 256, 8, 64), (8, 512, 16, 64), (16, 512, 32, 64), (32, 1024, 32, 128), (64, 1024, 64, 128))
PARTS = ("length", "grid")
VALUES = (
    Value("ms", "ms"),
    Value("called", "ms as called in a loop"),
    Value("host", "ms until the call returns"),
    Value("kernels", "ms of its kernels"),
    Value("launches", "kernels launched"),
    Value("graph", "ms as a CUDA graph"),
    Value("tokens_per_s", "tokens/s", is_rate=True),
    Value("tflops", "TFLOP/s", is_rate=True),
    Value("peak_bytes", "peak MiB beyond the inputs", scale=2**-20),
)
_PASS_NAMES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for name in NAMES:
            sys.stdout.write(f"{name}: {', '.join(make_case(name, torch.device('cpu'), torch.float32).contenders)}\n")
        parser.exit()


class Speed(Suite):
    """Measures the times that attention libraries usually publish, on this machine."""

    name = "speed"
    about = "time, TFLOP/s and memory of forward, backward and both: every kernel and module by length, named cases, competitors"
    over_processes = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--cases",
            nargs="+",
            default=list(PARTS),
            metavar="NAME",
            help=f"{', '.join(PARTS)} (default), short (what one call costs), names or wildcards; --list shows the names",
        )
        parser.add_argument("--list", nargs=0, action=_List, help="print the named cases and who is compared, measure nothing")
        parser.add_argument("--contenders", nargs="+", metavar="NAME", help="names or wildcards; default: those of each case")
        parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="ours and the floor by these backends too")
        parser.add_argument(
            "--contender",
            type=foreign,
            action="append",
            default=[],
            metavar="NAME=MODULE.PATH:FUNCTION",
            help="another implementation: function(problem) -> callable of q, k, v (B, N, H, D); may be repeated",
        )
        parser.add_argument("--torchscale", metavar="PATH", help="folder of your clone of github.com/microsoft/torchscale")
        parser.add_argument("--kernel", help="backend that stands in for flash-attn in TorchScale; default sdpa_flash, on a CPU sdpa_cpu")
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: all")
        parser.add_argument("--ways", nargs="*", choices=WAYS, help="how a call is seen besides its median; default: called host kernels")
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 512 … 8k at batch 8, then to 1M; on a CPU 512 … 2k")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), help="default: full, and causal at every other length")
        parser.add_argument("--batch", type=size, help="of the lengths; default 8 up to 8k, then 1; on a CPU 1")
        parser.add_argument("--heads", type=size, help="of the lengths; default 32, on a CPU 4")
        parser.add_argument("--head-dim", type=size, help="of the lengths; default 64, on a CPU 32")
        parser.add_argument("--longest", type=float, help="seconds that one call may take; default 0.4 in full size, 1 in small")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        chosen: dict[str, Any] = {"longest": self.longest(session), "contenders": options.contenders or "all"}
        chosen |= {"others": {other.name: other.target for other in options.contender}} if options.contender else {}
        chosen |= {} if options.ways is None else {"ways": options.ways}
        return super().settings(session) | chosen

    def longest(self, session: Session) -> float:
        return float(session.options.longest or (0.4 if session.full else 1.0))

    def cases(self, session: Session) -> Iterator[Case]:
        """Yields the cases; raises UsageError where a name is not one."""
        options = session.options
        named = list(itertools.chain.from_iterable(DEFAULTS if name == "short" else [name] for name in options.cases if name not in PARTS))
        contenders = tuple(contender.name for contender in ALL)
        if session.world_size > 1:
            contenders += tuple(contender.name for contender in RINGS)
        try:
            names = names_of(named)
        except ValueError as unknown:
            raise UsageError(f"--cases: {unknown}") from unknown
        for dtype in session.dtypes:
            place: dict[str, Any] = {"dtype": dtype, "device": session.device}
            if "length" in options.cases:
                for problem in self.lengths(session, place):
                    yield Case(f"length {problem.label}", "length", problem, contenders)
            if "grid" in options.cases:
                for b, n, h, d in GRID if session.full else GRID[:3]:
                    problem = Problem(batch_size=b, num_positions=n, num_heads=h, head_dim=d, **place)
                    yield Case(f"grid {problem.label}", "grid", problem, contenders)
            for name in names:
                yield make_case(name, session.device, dtype, full=session.full)
            if not session.options.dtypes:
                break

    def lengths(self, session: Session, place: dict[str, Any]) -> Iterator[Problem]:
        options = session.options
        lengths = options.lengths or ([2**i for i in range(9, 21)] if session.full else [512, 1024, 2048])
        heads, head_dim, most = (32, 64, 8) if session.full else (4, 32, 1)
        masks = [(n, mask == "causal") for mask in options.masks or ["full"] for n in lengths]
        masks += [] if options.masks is not None else [(n, True) for n in lengths[1::2]]
        for n, is_causal in masks:
            batch = options.batch or (most if n <= 8192 else 1)
            yield Problem(
                num_positions=n,
                num_heads=options.heads or heads,
                head_dim=options.head_dim or head_dim,
                batch_size=batch,
                is_causal=is_causal,
                **place,
            )

    def groups(self, session: Session) -> Sequence[Group]:
        catalogue = self.catalogue(session)
        # twenty contenders with three passes per problem: less than the usual time for each, unless a time was given
        asked = getattr(session.options, "seconds", None)
        seconds = session.seconds / (2 if session.full else 4) if asked is None else session.seconds
        groups = []
        for case in self.cases(session):
            names = [name for name in self.compared(session, case, catalogue) if name in catalogue]
            chosen = [catalogue[name] for name in names]
            label = case.name if case.family in PARTS else f"{case.name} {case.problem.label}"
            groups.append(Group(label, functools.partial(self._measure, session, case, chosen, seconds)))
        return groups

    def catalogue(self, session: Session) -> dict[str, Contender]:
        """Returns every contender by its name, with TorchScale and backends where they were asked for."""
        options, found = session.options, dict(CONTENDERS)
        if options.torchscale is not None:
            kernel = options.kernel or ("sdpa_flash" if session.device.type == "cuda" else "sdpa_cpu")
            try:
                found["torchscale"] = torchscale(options.torchscale, kernel)
            except ValueError as missing:
                raise UsageError(str(missing)) from missing
        for backend in options.backends:
            found |= {each.name: each for each in (*(of_backend(backend, kind) for kind in ("dilated", "dense")), floor(backend))}
        taken = [*found, *(other.name for other in options.contender)]
        for other in options.contender:
            if taken.count(other.name) > 1:
                raise UsageError(f"--contender is named {other.name!r}, which is already taken; choose another name")
        return found

    def compared(self, session: Session, case: Case, catalogue: dict[str, Contender]) -> list[str]:
        """Returns the contenders of a case. Raises UsageError where a name of --contenders is none."""
        asked = session.options.contenders
        if asked is not None:
            found = [(pattern, fnmatch.filter(catalogue, pattern)) for pattern in asked]
            if unknown := [pattern for pattern, names in found if not names]:
                raise UsageError(f"--contenders {' '.join(unknown)}: there is none; expected some of {', '.join(catalogue)}")
            return list(dict.fromkeys(itertools.chain.from_iterable(names for _, names in found)))
        more = [f"{name} {backend}" for name in ("ours", "attention") if name in case.contenders for backend in session.options.backends]
        return [*case.contenders, *more]

    def _measure(self, session: Session, case: Case, contenders: list[Contender], seconds: float) -> list[Row]:
        problem, options = case.problem, session.options
        ways = options.ways if options.ways is not None else () if case.family in PARTS else WAYS[:3]
        extra: dict[str, Any] = {"family": case.family, "at": _column(case)}
        extra |= {"processes": session.world_size} if session.world_size > 1 else {}
        rows: list[Row] = []
        for other in options.contender if case.family in PARTS else ():
            made = attempt(functools.partial(other.contender, problem), foreign=True)
            if made.value is None:
                rows.append(Row(name=other.name, case=problem.case | extra, note=made.note))
            else:
                contenders = [*contenders, made.value]
        agree = functools.partial(of_first_process, device=session.device) if session.world_size > 1 else None
        rows += measure(
            contenders,
            problem,
            passes=options.passes,
            seconds=seconds,
            memory=True,
            longest=self.longest(session),
            agree=agree,
            ways=() if agree else ways,
            extra=extra,
        )
        tokens = 1000 * problem.batch_size * (problem.queries or problem.num_positions)
        return [replace(row, values=row.values | {"tokens_per_s": tokens / row.values["ms"]}) if row.values else row for row in rows]

    def tables(self, results: Results) -> list[Table]:
        tables: list[Table] = []
        for (family, dtype, mask), rows in _parts(results):
            for which in PASSES:
                mine = _of_pass(rows, which)
                if any(row.values for row in mine):
                    tables += _tables(results, mine, f"{_PASS_NAMES[which]}, {family}, {dtype}, {mask}", which)
        compared = {row.name for row in results.rows}
        legend = {name: contender.what for name, contender in CONTENDERS.items()}
        legend |= {name: f"{target}, yours" for name, target in results.settings.get("others", {}).items()}
        lines = [[name, what] for name, what in legend.items() if name in compared]
        return [*(tables or [pivot(results.rows, "ms", across="at", title="time, ms")]), Table("what is compared", ("", "what"), lines)]

    def plots(self, results: Results) -> list[Plot]:
        plots = []
        for (family, dtype, mask), rows in _parts(results):
            for which, value in itertools.product(PASSES, (VALUES[0], *VALUES[-2:])):
                mine = [row for row in _of_pass(rows, which) if isinstance(row.case["at"], int)]
                lines = lines_of(mine, value.key, across="at", scale=value.scale)
                if lines and len({x for line in lines for x in line.x}) > 1:
                    name = f"{value.key.split('_')[0]}-{family}-{dtype}-{mask}-{which}"
                    plots.append(
                        Plot(
                            name=name,
                            title=f"{value.title}: {_PASS_NAMES[which]}, {family}, {dtype}, {mask}",
                            x_label="positions",
                            y_label=value.title,
                            lines=lines,
                            log_x=True,
                            log_y=not value.is_rate,
                            note=_shape(mine),
                        )
                    )
        return plots


def _column(case: Case) -> Any:
    """Returns what a case is called in its family's tables."""
    p = case.problem
    if case.family == "length":
        return p.num_positions
    if case.family == "grid":
        return f"{p.batch_size}x{p.num_positions}x{p.num_heads}x{p.head_dim}"
    rest = case.name.removeprefix(_family(case.family)).strip("-")
    return int(rest) if rest.isdigit() else rest


def _family(name: str) -> str:
    """Returns the family whose table a case is in: options share one, and so do densities of blocks and data in 8 bits."""
    return next((start for start in ("option", "blocks", "fp8") if name.startswith(start)), name)


def _parts(results: Results) -> Iterator[tuple[tuple[str, str, str], list[Row]]]:
    parts: dict[tuple[str, str, str], list[Row]] = {}
    for row in results.rows:
        if "family" in row.case:
            family, dtype = _family(row.case["family"]), row.case["dtype"]
            # options differ in mask and dtype, which their names say
            key = (family, "", "") if family == "option" else (family, dtype, "causal" if row.case["causal"] else "full")
            parts.setdefault(key, []).append(row)
    yield from parts.items()


def _of_pass(rows: Iterable[Row], which: str) -> list[Row]:
    """Returns rows of a pass. What could not run at all is reported with the forward, elsewhere only where it leaves a gap in a line."""
    rows = list(rows)
    present = {row.name for row in rows if row.case.get("pass") == which and row.values}
    return [row for row in rows if row.case.get("pass", which if which == "forward" or row.name in present else "") == which]


def _bases(rows: Sequence[Row]) -> dict[Any, Row]:
    """Returns what each column is compared with: the fastest dense kernel, in named cases the first that is measured."""
    best: dict[Any, Row] = {}
    for row in (row for row in rows if row.values):
        at, family = row.case["at"], row.case["family"]
        if family in PARTS:
            if row.name in KERNELS and (at not in best or row.values["ms"] < best[at].values["ms"]):
                best[at] = row
        elif at not in best or row.name == FAMILIES[family].contenders[0]:
            best[at] = row
    return best


def _tables(results: Results, rows: list[Row], what: str, which: str) -> list[Table]:
    bases = _bases(rows)
    ordered = sorted(bases.items()) if all(isinstance(at, int) for at in bases) else list(bases.items())
    against = "; ".join(
        f"{name} at {', '.join(f'{at:,}' if isinstance(at, int) else at for at, _ in group)}"
        for name, group in itertools.groupby(ordered, key=lambda item: item[1].name)
    )
    tables = []
    for value in VALUES:
        mine = [row for row in rows if value.key in row.values or not row.values]
        named = any(row.case["family"] not in PARTS for row in rows)
        if not any(row.values for row in mine) or (value.key == "tokens_per_s" and named):
            continue
        caption = [f"{_shape(rows)}."] if value is VALUES[0] else []
        if value is VALUES[0] and "longest" in results.settings:
            caption.append(f"Median of a call; one may take {duration(results.settings['longest'])}.")
        if value.key == "tflops":
            caption.append(f"FLOPs: {FLOPS[which]} D per (query, key) pair of the pattern, with multiplicity. {explained(results, rows)}")
        baseline = {at: row.values[value.key] for at, row in bases.items() if value.key in row.values}
        if baseline:
            times = "rate against" if value.is_rate else "peak against" if value.key == "peak_bytes" else "times as fast as"
            caption.append(f"In brackets, ×: {times} {against}.")
        share = functools.partial(utilisation, gpu_of(results)) if value.key == "tflops" else lambda row: None
        tables.append(
            pivot(
                mine,
                value.key,
                across="at",
                title=f"{value.title}, {re.sub('(, )+$', '', what)}",
                scale=value.scale,
                caption=" ".join(caption),
                baseline=baseline,
                more_is_better=value.is_rate,
                share=share,
            )
        )
    return tables


def _shape(rows: Iterable[Row]) -> str:
    """Describes heads, head dim and batch sizes of rows, where they share the first two."""
    cases = [row.case for row in rows if "H" in row.case]
    shapes = dict.fromkeys((case["H"], case["D"]) for case in cases)
    batches: dict[int, int] = {}
    for case in cases:
        batches[case["B"]] = max(batches.get(case["B"], 0), case["N"])
    ordered = sorted(batches.items(), key=lambda item: item[1])
    sizes = ", then ".join(f"{b} up to N = {n:,}" if i + 1 < len(ordered) else str(b) for i, (b, n) in enumerate(ordered))
    return ", ".join(f"{h} heads of {d}" for h, d in shapes) + f", batch {sizes}" if len(shapes) < 4 else "B x N x H x D"
