"""Measures attention on sequences that processes share, and how time and memory grow with the length, the batch and the processes.

    python -m dilated_attention bench scaling
    torchrun --nproc-per-node 4 --max-restarts 3 -m dilated_attention bench scaling --cases 'gigapath-*' 'packed-*' --graphs
    torchrun --nproc-per-node 4 -m dilated_attention bench scaling --list --cases '*'

Each number of processes has a separate file, and all files in one folder are reported together. A contender during which a process died or
hung is named and left out when the same command runs again, as torchrun does by ``--max-restarts``.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.report.plots import Plot
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.sharded.cases import BATCHES, CASES, LENGTHS, SHRINK, UNIT, Setting, Way
from dilated_attention.bench.sharded.competitors import competitors
from dilated_attention.bench.sharded.measure import ShardedContender, measure
from dilated_attention.bench.sharded.slide import SlideStep
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.bench.suites import scaling_report as report
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.parsing import size
from dilated_attention.pattern import BlockPattern

DEFAULT = ("dense-*", "longnet-*", "local-*")


class Scaling(Suite):
    """Fits growth laws, and measures efficiency over processes."""

    name = "scaling"
    about = "time and memory per token by length, by batch, and over processes (torchrun)"
    over_processes = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        names = ", ".join(case.name for case in CASES)
        about = f"NAME-TOKENS of a process or NAME-of-TOTAL, names are {names}; default: {' '.join(DEFAULT)}"
        parser.add_argument("--cases", nargs="+", default=DEFAULT, metavar="GLOB", help=about)
        parser.add_argument("--contenders", nargs="+", default=["*"], metavar="GLOB", help="e.g. 'ring*' 'one process'; default: all")
        parser.add_argument("--list", action="store_true", help="print cases and contenders, and measure nothing")
        parser.add_argument("--tokens", type=size, nargs="+", help="of each process; default: the cases' own, a hundredth on a CPU")
        parser.add_argument("--totals", type=size, nargs="+", help="of the whole sequence, likewise")
        parser.add_argument(
            "--heads", type=size, nargs=3, metavar=("H", "HK", "D"), help="query and key/value heads, head dim of all cases"
        )
        parser.add_argument("--masks", nargs="+", choices=("causal", "full"), help="default: the cases' own")
        parser.add_argument("--exchange", nargs="+", default=["auto"], help="of dense and dilated rings; default: auto")
        parser.add_argument("--backends", nargs="+", default=["auto"], help="default: auto")
        parser.add_argument(
            "--ring-flash-attention", metavar="PATH", default="", help="a copy of zhuzilin's ring-flash-attention, run on --backends"
        )
        parser.add_argument("--check-tokens", type=size, default=1024, help="of the sequence that is compared with float64; default 1k")
        parser.add_argument("--graphs", action="store_true", help="also time this library's calls as CUDA graphs")
        parser.add_argument("--timeout", type=float, default=60.0, help="seconds that an exchange may take; default 60")

    def settings(self, session: Session) -> dict[str, Any]:
        kept = {name: getattr(session.options, name) for name in ("heads", "check_tokens", "graphs")}
        return super().settings(session) | kept | {"dtype": str(session.dtype).removeprefix("torch.")}

    def groups(self, session: Session) -> Sequence[Group]:
        options, together = session.options, RankSync(session, session.options.timeout)
        journal = _journal(session)
        last = together.everywhere(lambda: journal.read_text() if journal is not None and journal.exists() else "")[0]
        run = functools.partial(measure, seconds=session.seconds, check_tokens=options.check_tokens, graphs=options.graphs)
        groups = []
        for contender in _contenders(session, together):
            label = f"{contender.case['case']} {contender.case['mask']} W={session.world_size} {contender.name}"
            died = Row(name=contender.name, case=contender.case, note="a process died of it, or it hung")
            measured = functools.partial(_journalled, journal, label, functools.partial(run, contender, together))
            groups.append(Group(label, functools.partial(list, [died]) if label == last else measured))
        if options.list:
            sys.stdout.write("\n".join([*(group.label for group in groups if session.rank == 0), ""]))
            raise SystemExit(0)
        return groups

    def tables(self, results: Results) -> list[Table]:
        return report.tables(results)

    def plots(self, results: Results) -> list[Plot]:
        return report.plots(results)


def _journal(session: Session) -> Path | None:
    """Returns the file in which the first of torchrun's processes writes what is measured; it is left where that ends the process."""
    if session.rank or "MASTER_ADDR" not in os.environ or getattr(session.options, "output", None) is None:
        return None
    path = Path(session.options.output) / f".scaling-{session.world_size}.under-way"
    if session.options.fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        path.unlink(missing_ok=True)
    return path


def _journalled(journal: Path | None, label: str, run: Callable[[], list[Row]]) -> list[Row]:
    if journal is not None:
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text(label)
    rows = run()
    if journal is not None:
        journal.unlink()
    return rows


def _settings(session: Session) -> Iterator[tuple[str, Setting, bool]]:
    """Yields (label, setting, whether it is there for the growth with length or batch alone)."""
    options, W, shrink = session.options, session.world_size, 1 if session.full else SHRINK
    for case in CASES:
        # what no process can hold is a hundred times as long as the others
        by = shrink if case.fits else shrink**2
        tokens = options.tokens or ([] if options.totals else [n // by for n in case.tokens])
        totals = options.totals or ([] if options.tokens else [N // by for N in case.totals])
        sizes: dict[str, tuple[int, int, bool]] = {}
        if W == 1 and case.grows and not (options.tokens or options.totals):
            (n, batches), lengths = BATCHES, [N // shrink for N in LENGTHS]
            sizes |= {f"{case.name}-{N}": (N, 1, True) for N in lengths} | {
                f"{case.name}-{B}x{n // shrink}": (n // shrink, B, True) for B in batches
            }
        sizes |= {f"{case.name}-{n}": (n * W, 1, False) for n in tokens} | {f"{case.name}-of-{N}": (N, 1, False) for N in totals}
        H, Hk, D = options.heads or case.heads
        masks = options.masks or ["causal" if case.causal else "full"]
        for (label, (N, B, grows)), mask in itertools.product(sizes.items(), masks):
            if _matches(label, options.cases):
                problem = Problem(
                    num_positions=N, batch_size=B, num_heads=H, num_kv_heads=Hk, head_dim=D,
                    dtype=session.dtype, device=session.device, is_causal=mask == "causal",
                )  # fmt: skip
                yield label, Setting(case=case, problem=problem, size=W, unit=UNIT // shrink), grows


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _contenders(session: Session, together: RankSync) -> Iterator[ShardedContender]:
    options, W = session.options, session.world_size
    for label, setting, grows in _settings(session):
        problem, case = setting.problem, setting.case
        # without a causal mask, zigzag balances nothing
        layouts = dict.fromkeys("contiguous" if name == "zigzag" and not problem.is_causal else name for name in case.layouts)
        exchanges = ["auto"] if isinstance(setting.pattern, BlockPattern) or case.name == "slide" else options.exchange
        ways: list[tuple[str, str, str, Setting, Callable[[Setting], Way]]] = []
        for backend in options.backends:
            alone: Callable[[Setting], Way] = functools.partial(_alone, backend)
            suffix = f" ({backend})" if backend != "auto" else ""
            ways += [("one process", backend, f"one process{suffix}", setting, alone)] if case.fits else []
            own = setting.of_length(problem.num_positions // W)
            ways += [("kernel", backend, f"kernel{suffix}", own, alone)] if W > 1 and case.name != "slide" else []
            for layout, exchange in itertools.product(layouts, exchanges) if not grows else ():
                which = [f"by {exchange}"] * (exchange != "auto") + [layout] * (len(layouts) > 1)
                ring = functools.partial(_ring, layout, exchange, backend, options.timeout)
                ways.append(("ring", backend, " ".join(["ring", *which]) + suffix, setting, ring))
        others = competitors(setting, options.ring_flash_attention, options.backends, together.group) if not grows else []
        ways += [("foreign", kernel, name, setting, way) for name, kernel, way in others]
        kind_of = SlideStep if case.name == "slide" else ShardedContender
        for kind, kernel, name, own, way in ways:
            if _matches(name, options.contenders):
                mask = "causal" if problem.is_causal else "full"
                about = problem.case | {"case": label, "mask": mask, "W": W, "kernel": kernel, "kind": kind}
                yield kind_of(name=name, setting=own, way=way, case=about, kernel=kernel, kind=kind)


def _alone(backend: str, setting: Setting) -> Way:
    return Way(attend=setting.attend(shared=False, backend=backend), layout=None)


def _ring(layout: str, exchange: str, backend: str, timeout: float, setting: Setting) -> Way:
    held, options = setting.layout(layout), {} if exchange == "auto" else {"exchange": exchange}
    return Way(attend=setting.attend(shared=True, layout=held, backend=backend, timeout=timeout, **options), layout=held)
