"""Time of every pass: dense attention kernel by kernel, this library's modules and functions, and other people's, by length and by case.

python -m dilated_attention bench speed                                     # lengths, every module
python -m dilated_attention bench speed --cases short --torchscale PATH     # what one call costs, and every option
python -m dilated_attention bench speed --cases "longnet*" --contenders ours floor --backends flash4
python -m dilated_attention bench speed --against FOLDER                    # what got slower since the run that wrote FOLDER
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench.measure.contest import FLOPS, PASSES, measure
from dilated_attention.bench.measure.timing import WAYS
from dilated_attention.bench.report.compare import Earlier
from dilated_attention.bench.report.rows import Results, Row, machine
from dilated_attention.bench.report.tables import Table, by, labelled, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.bench.workloads.cases import DEFAULTS, FAMILIES, NAMES, Case, make_case, names_of
from dilated_attention.bench.workloads.competitors import COMPETITORS, floor, torchscale
from dilated_attention.bench.workloads.contenders import DENSE, FUNCTIONS, MODULES, MULTIHEAD, Contender, of_backend
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import UsageError, positive, size
from dilated_attention.planning import find_gpu

CONTENDERS = {contender.name: contender for contender in (*DENSE, *MODULES, *MULTIHEAD, *FUNCTIONS, *COMPETITORS)}
# the cases of every length, who is measured there, and with whom they are compared
LENGTH, ALL, BASELINE = "length", (*DENSE, *MODULES, *MULTIHEAD), "torch sdpa"
# columns of the tables, where there are such figures: heading → (figure, factor)
COLUMNS = {"ms": ("ms", 1.0), "×": ("times", 1.0), "called, ms": ("called", 1.0), "host, ms": ("host", 1.0),
           "kernels, ms": ("kernels", 1.0), "launches": ("launches", 1.0), "graph, ms": ("graph", 1.0), "tokens/s": ("tokens_per_s", 1.0),
           "TFLOP/s": ("tflops", 1.0), "% of peak": ("of_peak", 100.0), "peak, MiB": ("peak_bytes", 2.0**-20)}  # fmt: skip
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
    # of --against, read with the groups
    earlier: Earlier | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        about = f"{LENGTH} (default), short (what one call costs), names or wildcards; --list shows the names"
        parser.add_argument("--cases", nargs="+", default=[LENGTH], metavar="NAME", help=about)
        parser.add_argument("--list", nargs=0, action=_List, help="print the named cases and who is compared, measure nothing")
        parser.add_argument("--contenders", nargs="+", metavar="NAME", help="names or wildcards; default: those of each case")
        parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="ours and the floor by these backends too")
        parser.add_argument("--torchscale", metavar="PATH", help="folder of your clone of github.com/microsoft/torchscale")
        parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: all")
        parser.add_argument("--ways", nargs="*", choices=WAYS, help="how a call is seen besides its median; default: called host kernels")
        parser.add_argument("--lengths", type=size, nargs="+", help="default: 512 … 8k at batch 8, then to 1M; on a CPU 512 … 2k")
        parser.add_argument("--masks", nargs="+", choices=("full", "causal"), help="default: full, and causal at every other length")
        parser.add_argument("--batch", type=size, help="of the lengths; default 8 up to 8k, then 1; on a CPU 1")
        parser.add_argument("--heads", type=size, help="of the lengths; default 32, on a CPU 4")
        parser.add_argument("--head-dim", type=size, help="of the lengths; default 64, on a CPU 32")
        about = "of an earlier run on this hardware with these settings: exit code 1 where this library got slower or has no time any more"
        parser.add_argument("--against", type=Path, metavar="FOLDER", help=about)
        parser.add_argument("--threshold", type=positive, default=0.2, help="slowdown that --against allows, as a share; default: 0.2")
        parser.add_argument("--longest", type=float, help="seconds that one call may take; default 0.4 in full size, 1 in small")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        chosen: dict[str, Any] = {"longest": self.longest(session), "contenders": options.contenders or "all"}
        chosen |= {} if options.ways is None else {"ways": options.ways}
        return super().settings(session) | chosen

    def longest(self, session: Session) -> float:
        return float(session.options.longest or (0.4 if session.full else 1.0))

    def cases(self, session: Session) -> Iterator[Case]:
        """Yields the cases; raises UsageError where a name is not one."""
        options = session.options
        try:
            names = names_of([each for name in options.cases if name != LENGTH for each in (DEFAULTS if name == "short" else [name])])
        except ValueError as unknown:
            raise UsageError(f"--cases: {unknown}") from unknown
        for dtype in session.dtypes if options.dtypes else session.dtypes[:1]:
            for problem in self.lengths(session, dtype) if LENGTH in options.cases else ():
                yield Case(f"{LENGTH} {problem.label}", LENGTH, problem, tuple(contender.name for contender in ALL))
            for name in names:
                yield make_case(name, session.device, dtype, full=session.full)

    def lengths(self, session: Session, dtype: torch.dtype) -> Iterator[Problem]:
        options = session.options
        lengths = options.lengths or ([2**i for i in range(9, 21)] if session.full else [512, 1024, 2048])
        heads, head_dim, most = (32, 64, 8) if session.full else (4, 32, 1)
        shape: dict[str, Any] = {"num_heads": options.heads or heads, "head_dim": options.head_dim or head_dim}
        masks = [(n, mask == "causal") for mask in options.masks or ["full"] for n in lengths]
        masks += [] if options.masks is not None else [(n, True) for n in lengths[1::2]]
        for n, is_causal in masks:
            batch = options.batch or (most if n <= 8192 else 1)
            yield Problem(num_positions=n, batch_size=batch, is_causal=is_causal, dtype=dtype, device=session.device, **shape)

    def groups(self, session: Session) -> Sequence[Group]:
        catalogue, groups, options = self.catalogue(session), list[Group](), session.options
        self.earlier = None
        if options.against is not None:
            now = Results(self.name, machine(session.device), self.settings(session))
            others = {name for name, contender in catalogue.items() if contender.is_external}
            self.earlier = Earlier.open(options.against, now, others=others, passes=options.passes, threshold=options.threshold)
        for case in self.cases(session):
            chosen = [catalogue[name] for name in self.compared(session, case, catalogue) if name in catalogue]
            label = case.name if case.family == LENGTH else f"{case.name} {case.problem.label}"
            run = functools.partial(self._measure, session, case, chosen)
            groups.append(Group(label, run if self.earlier is None else functools.partial(self.earlier.measured, label, run)))
        return groups

    def verdict(self, results: Results) -> tuple[bool, list[Table]]:
        return super().verdict(results) if self.earlier is None else self.earlier.verdict(results)

    def catalogue(self, session: Session) -> dict[str, Contender]:
        """Returns every contender by its name, with TorchScale and backends where they were asked for."""
        options, found = session.options, dict(CONTENDERS)
        if options.torchscale is not None:
            try:
                found["torchscale"] = torchscale(options.torchscale, "sdpa_flash" if session.device.type == "cuda" else "sdpa_cpu")
            except ValueError as missing:
                raise UsageError(str(missing)) from missing
        for backend in options.backends:
            found |= {each.name: each for each in (*(of_backend(backend, kind) for kind in ("dilated", "dense")), floor(backend))}
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

    def _measure(self, session: Session, case: Case, contenders: list[Contender]) -> list[Row]:
        problem, options, by_length = case.problem, session.options, case.family == LENGTH
        extra: dict[str, Any] = {"family": case.family, "at": _column(case)}
        # twenty contenders with three passes per problem: less than the usual time for each, unless a time was given
        how: dict[str, Any] = {"seconds": session.seconds / (1 if options.seconds else 2 if session.full else 4)}
        how |= {"ways": options.ways if options.ways is not None else () if by_length else WAYS[:3], "longest": self.longest(session)}
        rows = measure(contenders, problem, passes=options.passes, memory=True, extra=extra, **how)
        for row in rows if by_length else ():
            if row.values:
                row.values["tokens_per_s"] = 1000 * problem.batch_size * problem.num_positions / row.values["ms"]
        return rows

    def tables(self, results: Results) -> list[Table]:
        tables: list[Table] = []
        placed = [replace(row, case=row.case | {"what": _what(row)}) for row in results.rows if "family" in row.case]
        for (what, rows), which in itertools.product(by(placed, "what"), PASSES):
            # what could not run at all is reported with the forward
            mine = [row for row in rows if row.case.get("pass", "forward") == which]
            tables += _table(results, mine, which, f"{_PASS_NAMES[which]}, {what}")
        compared = {row.name for row in results.rows}
        lines = [[name, contender.what] for name, contender in CONTENDERS.items() if name in compared]
        return [*(tables or listing(results.rows, {}, title="nothing was measured")), Table("what is compared", ("", "what"), lines)]


def _column(case: Case) -> Any:
    """Returns what a case is called in its family's tables."""
    if case.family == LENGTH:
        return case.problem.num_positions
    rest = case.name.removeprefix(_family(case.family)).strip("-")
    return int(rest) if rest.isdigit() else rest


def _family(name: str) -> str:
    """Returns the family whose table a case is in: options share one, and so do densities of blocks and data in 8 bits."""
    return next((start for start in ("option", "blocks", "fp8") if name.startswith(start)), name)


def _what(row: Row) -> str:
    """Returns the title of a row's table. Options differ in mask and dtype, which their names say."""
    family = _family(row.case["family"])
    return family if family == "option" else f"{family}, {row.case['dtype']}, {'causal' if row.case['causal'] else 'full'}"


def _table(results: Results, rows: list[Row], which: str, title: str) -> list[Table]:
    """Returns a table of a pass by case, compared with the first contender of each case, by length with ``BASELINE``, if measured."""
    firsts, bases = {LENGTH: BASELINE} | {name: family.contenders[0] for name, family in FAMILIES.items()}, dict[Any, Row]()
    for row in sorted((row for row in rows if row.values), key=lambda row: row.name != firsts[row.case["family"]]):
        bases.setdefault(row.case["at"], row)
    if not bases:
        return []
    (peaks, explained), shown = _peaks(results, (row.case["dtype"] for row in rows)), []
    for row in rows:
        more = {"times": bases[row.case["at"]].values["ms"] / row.values["ms"]} if row.values else {}
        if "tflops" in row.values and (peak := peaks.get("fp8" if "fp8" in row.name else row.case["dtype"])):
            more["of_peak"] = 1e12 * row.values["tflops"] / peak
        shown.append(replace(row, values=row.values | more))
    shapes = dict.fromkeys(f"{row.case['B']} × {row.case['H']} × {row.case['D']}" for row in rows)
    caption = (
        f"Batch × heads × head dim: {', '.join(shapes)}. ms: median of a call on the device. ×: times as fast as "
        f"{', '.join(dict.fromkeys(row.name for row in bases.values()))}. called: in a loop without synchronising. host: until the call "
        f"returns. TFLOP/s: {FLOPS[which]} D FLOPs per (query, key) pair of the pattern, with multiplicity. {explained} "
        "peak: memory beyond the inputs."
    )
    return listing(labelled(shown, "{name}, {at}"), COLUMNS, title=title, caption=caption)


def _peaks(results: Results, dtypes: Iterable[str]) -> tuple[dict[str, float], str]:
    """Returns the GPU's peak FLOP/s by dtype and for "fp8", and a sentence for a caption: what 100 % means, or why there are no shares.

    There is none for float32, whose products may or may not use TF32 depending on the kernel, nor for a CPU or an unknown GPU.
    """
    hardware = results.machine["hardware"]
    try:
        gpu = find_gpu(hardware["device"]) if "capability" in hardware else None
    except ValueError:
        gpu = None
    if gpu is None:
        return {}, f"No utilisation: the peak rates of {hardware['device']} are not known here."
    found = {name: gpu.peak(name) or 0.0 for name in dict.fromkeys([*dtypes, "fp8"]) if name in ("fp8", "float16", "bfloat16")}
    peaks = ", ".join(f"{peak:.3g} FLOP/s in {name}" for name, peak in found.items())
    return found, f"%: share of {gpu.name}'s peak, {peaks} ({gpu.source})."
