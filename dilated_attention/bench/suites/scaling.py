"""Measures attention on sequences that processes share: time, memory, what is sent, and the efficiency against one process.

    python -m dilated_attention bench scaling
    torchrun --nproc-per-node 4 --max-restarts 3 -m dilated_attention bench scaling --cases 'gigapath-*' 'packed-*' --graphs
    torchrun --nproc-per-node 4 -m dilated_attention bench scaling --list --cases '*'

Runs with several numbers of processes into one folder are reported together. A contender during which a process died or
hung is named and left out when the same command runs again, as torchrun does by ``--max-restarts``.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dilated_attention.bench.measure.sharded import Entry, RankSync, measure
from dilated_attention.bench.models.slide_encoder import sharded_step
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, across, failures, labelled, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.bench.workloads.contenders import Contender, Costs, of_backend
from dilated_attention.bench.workloads.problem import BOUNDS, Problem
from dilated_attention.bench.workloads.rings import CASES, SHRINK, UNIT, Case, ring
from dilated_attention.bench.workloads.sharded_contenders import competitors
from dilated_attention.parsing import size

_WHERE = {"W": ("W", 1.0), "positions": ("N", 1.0), "pass": ("pass", 1.0)}
DEFAULT = ("dense-*", "longnet-*", "local-*")
PASSES = {"forward": "forward", "both": "forward + backward"}
# figure → (column, scale, what it is)
_COLUMNS = {
    "ms": ("called, ms", 1.0, "a call of a loop that does not synchronise, of the slowest process"),
    "host_ms": ("host, ms", 1.0, "until the loop's calls return"),
    "graph_ms": ("graph, ms", 1.0, "the same as a CUDA graph, where it can be captured"),
    "tflops": ("TFLOP/s", 1.0, "of one process"),
    "kernel_share": ("of the kernel, %", 100.0, "rate over that of the kernel alone on a process's tokens, all processes at once"),
    "efficiency": ("efficiency, %", 100.0, "time of one process on the whole sequence, the others waiting, over W times this time"),
    "tokens_per_s": ("tokens/s", 1.0, "of all processes"),
    "imbalance": ("imbalance", 1.0, "most pairs of a process over the mean"),
    "received_bytes": ("receives, MiB", 2.0**-20, "by the process with the most"),
    "sent_bytes": ("sends, MiB", 2.0**-20, "likewise"),
    "peak_bytes": ("peak, GiB", 2.0**-30, "beyond the inputs, likewise"),
}


class Scaling(Suite):
    """Measures efficiency over processes."""

    name = "scaling"
    about = "attention over processes (torchrun): time, efficiency, memory, traffic; torch's context_parallel, ring-flash-attention"
    over_processes = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        names = ", ".join(case.name for case in CASES)
        about = f"NAME-TOKENS of a process or NAME-of-TOTAL, names are {names}; default: {' '.join(DEFAULT)}"
        add = parser.add_argument
        add("--cases", nargs="+", default=DEFAULT, metavar="GLOB", help=about)
        add("--contenders", nargs="+", default=["*"], metavar="GLOB", help="e.g. 'ring*' 'one process'; default: all")
        add("--list", action="store_true", help="print cases and contenders, and measure nothing")
        add("--tokens", type=size, nargs="+", help="of each process; default: the cases' own, a hundredth on a CPU")
        add("--heads", type=size, nargs=3, metavar=("H", "HK", "D"), help="query and key/value heads, head dim of all cases")
        add("--masks", nargs="+", choices=("causal", "full"), help="default: the cases' own")
        add("--exchange", nargs="+", default=["auto"], help="of dense and dilated rings; default: auto")
        add("--backends", nargs="+", default=["auto"], help="default: auto")
        add("--ring-flash-attention", metavar="PATH", default="", help="a copy of zhuzilin's ring-flash-attention, run on --backends")
        add("--check-tokens", type=size, default=2**19, help="longer sequences are checked at this length; default 512k")
        add("--graphs", action="store_true", help="also time this library's calls as CUDA graphs")
        add("--timeout", type=float, default=60.0, help="seconds that an exchange may take; default 60")

    def settings(self, session: Session) -> dict[str, Any]:
        kept = {name: getattr(session.options, name) for name in ("heads", "check_tokens", "graphs")}
        return super().settings(session) | kept | {"dtype": str(session.dtype).removeprefix("torch.")}

    def groups(self, session: Session) -> Sequence[Group]:
        options = session.options
        together = RankSync(session.device, session.rank, session.world_size, timeout=options.timeout)
        run = functools.partial(measure, seconds=session.seconds, check_tokens=options.check_tokens, graphs=options.graphs)
        groups = []
        for entry in _entries(session, together):
            label = f"{entry.case['case']} {entry.case['mask']} W={session.world_size} {entry.contender.name}"
            groups.append(Group(label, functools.partial(run, entry, together)))
        if options.list:
            sys.stdout.write("\n".join([*(group.label for group in groups if session.rank == 0), ""]))
            raise SystemExit(0)
        return groups

    def tables(self, results: Results) -> list[Table]:
        rows, found = _compared(results), list[Table]()
        for which, title in PASSES.items():
            rings = [row for row in rows if row.case.get("pass") == which and row.case["kind"] == "ring"]
            if len({row.case["W"] for row in rings}) > 1:
                found += across(rings, "W", "efficiency", title=f"{title}: efficiency by processes, %", scale=100.0)
        for name in dict.fromkeys(_family(row) for row in rows):
            mine = [row for row in rows if _family(row) == name]
            mine.sort(key=lambda row: (row.case.get("pass") != "forward", row.case["N"], row.case["W"]))
            columns = {title: (key, scale) for key, (title, scale, _) in _COLUMNS.items()}
            caption = "; ".join(f"{title}: {what}" for key, (title, _, what) in _COLUMNS.items() if any(key in row.values for row in mine))
            found += listing(mine, _WHERE | columns, title=name, caption=caption)
            errors = {(row.name, row.case["W"]): replace(row, values={}) for row in mine if row.errors}.values()
            kinds = {key: (key, 1.0) for row in errors for key in row.errors}
            found += listing(errors, _WHERE | kinds, title=f"{name}: errors", caption="relative, against float64")
        return [*found, *failures(results)]


def _cases(session: Session) -> Iterator[tuple[str, Case, int, Callable[[int], Problem]]]:
    """Yields (label, case, positions of the whole sequence, N → problem)."""
    options, W, shrink = session.options, session.world_size, 1 if session.full else SHRINK
    for case in CASES:
        # what no process can hold is a hundred times as long as the others
        by = shrink if case.fits else shrink**2
        sizes = {f"{case.name}-{n}": n * W for n in options.tokens or [n // by for n in case.tokens]}
        sizes |= {} if options.tokens else {f"{case.name}-of-{N // by}": N // by for N in case.totals}
        masks = options.masks or ["causal" if case.causal else "full"]
        for (label, N), mask in itertools.product(sizes.items(), masks):
            if _matches(label, options.cases):
                place = {"dtype": session.dtype, "device": session.device, "is_causal": mask == "causal"}
                yield label, case, N, functools.partial(case.problem, unit=UNIT // shrink, heads=options.heads, **place)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _entries(session: Session, together: RankSync) -> Iterator[Entry]:
    options, W = session.options, session.world_size
    for label, case, N, at in _cases(session):
        problem, found = at(N), list[tuple[str, str, Contender]]()
        pattern = "blocks" if problem.blocks is not None else "dilated" if problem.given_branches is not None else "dense"
        # without a causal mask, zigzag balances nothing
        layouts = dict.fromkeys("contiguous" if name == "zigzag" and not problem.is_causal else name for name in case.layouts)
        for backend in options.backends if case.name != "slide" else ():
            suffix = f" ({backend})" if backend != "auto" else ""
            found += [("one process", backend, of_backend(backend, pattern, name=f"one process{suffix}"))] if case.fits else []
            found += [("kernel", backend, of_backend(backend, pattern, name=f"kernel{suffix}"))] if W > 1 else []
            for layout, exchange in itertools.product(layouts, ["auto"] if pattern == "blocks" else options.exchange):
                which = [f"by {exchange}"] * (exchange != "auto") + [layout] * (len(layouts) > 1)
                how = {"backend": backend, "timeout": options.timeout} | ({} if exchange == "auto" else {"exchange": exchange})
                found.append(("ring", backend, ring(of_backend(backend, pattern), " ".join(["ring", *which]) + suffix, layout, **how)))
        if pattern == "dense" and together.group is not None:
            others = competitors(problem, options.ring_flash_attention, options.backends, together.group)
            found += [("foreign", kernel, other) for kernel, other in others]
        if case.name == "slide":
            steps = {kind: functools.partial(_slide_step, kind == "ring") for kind in ("one process", "ring")}
            found = [(kind, "auto", Contender(name=kind, what="", make=step)) for kind, step in steps.items()]
        for kind, kernel, contender in found:
            if _matches(contender.name, options.contenders):
                about = {"case": label, "mask": "causal" if problem.is_causal else "full", "W": W, "kernel": kernel, "kind": kind}
                length, about = N // W if kind == "kernel" else N, problem.case | about
                yield Entry(contender=contender, at=at, num_positions=length, case=about, passes=case.passes, fits=case.fits)


def _slide_step(is_shared: bool, problem: Problem) -> Costs:
    return Costs({"both": sharded_step(is_shared, problem.num_positions, problem.device, BOUNDS[problem.dtype])})


def _compared(results: Results) -> list[Row]:
    """Returns the rows of contenders, with figures that compare them with others of the same run."""
    rows = labelled([row for row in results.rows if "W" in row.case], "{case} {mask} {name}")
    same = ("case", "mask", "W", "H", "Hk", "D", "pass")
    known = {(tuple(row.case.get(key) for key in same), row.case["kind"], row.case["kernel"]): row.values for row in rows if row.values}
    found = []
    for row in rows:
        values, key = dict(row.values), tuple(row.case.get(key) for key in same)
        # third-party code runs on kernels that may not have been timed alone
        kernels = row.case["kernel"], "auto"
        whole, kernel = (next((known[key, x, y] for y in kernels if (key, x, y) in known), None) for x in ("one process", "kernel"))
        if values and row.case["kind"] in ("ring", "foreign"):
            values |= {"efficiency": whole["ms"] / row.case["W"] / values["ms"]} if whole else {}
            values |= {"kernel_share": values["tflops"] / kernel["tflops"]} if kernel and "tflops" in values and "tflops" in kernel else {}
        found.append(replace(row, values=values))
    return found


def _family(row: Row) -> str:
    case = str(row.case["case"])
    return case.rsplit("-of-" if "-of-" in case else "-", 1)[0]
