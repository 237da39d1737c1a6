"""``bench``: measurement suites on this machine, and the sweep that orders backends (``tune``)."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention import start
from dilated_attention.cli.arguments import device_of
from dilated_attention.cli.choices import DTYPES, SUITES
from dilated_attention.cli.console import put, put_json
from dilated_attention.parsing import UsageError, positive, size

if TYPE_CHECKING:
    from dilated_attention.bench import Outcome, Session, Suite
    from dilated_attention.bench.report.tables import Table

_OUTPUT = Path("bench-results")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure: suites of benchmarks, or which backend is fastest here (tune)")
    suites = parser.add_subparsers(dest="suite", required=True, parser_class=_Parser)
    tuning = suites.add_parser(
        "tune",
        usage="%(prog)s [options]",
        help=("measure every usable backend; what is fastest is preferred from then on (also: bench --tune)"),
    )
    _add_tune(tuning)
    tuning.set_defaults(run=_tune, parser=tuning)
    for name, about in SUITES.items():
        suite = suites.add_parser(name, usage="%(prog)s [options]", help=about, description=f"{about}.")
        suite.complete = functools.partial(_add_suite, suite, name)
    everything = suites.add_parser(
        "all",
        usage="%(prog)s [options]",
        help="every suite above except tune and quality, one after another, each with its defaults",
    )
    _add_common(everything)
    everything.set_defaults(run=lambda args: _ended(_run_all, args), parser=everything)


class _Parser(argparse.ArgumentParser):
    """A parser to which ``complete`` adds what takes time to import, if this parser is the one that is used."""

    complete: Callable[[], None] | None = None

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if self.complete is not None:
            complete, self.complete = self.complete, None
            complete()
        return super().parse_known_args(args, namespace)


def _add_suite(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of a suite, whose choices are the contenders, backends and presets that it can measure."""
    start.load()
    from dilated_attention.bench import suites

    suite = suites.SUITES[name]()
    _add_common(parser)
    suite.add_arguments(parser)
    parser.set_defaults(run=lambda args: _ended(functools.partial(_run_one, suite), args), parser=parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="DIR", help=f"for JSON and Markdown; default ./{_OUTPUT}")
    parser.add_argument("--fresh", action="store_true", help="measure again what DIR already holds")
    parser.add_argument("--size", choices=("small", "full"), help="default: full on a GPU, small on a CPU")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", help="default: bfloat16 on a GPU (float16 before sm_80), float32 on a CPU")
    parser.add_argument("--seconds", type=positive, help="of timing for each contender and pass; default 0.2")
    parser.add_argument("--minutes", type=float, help="start nothing after this time; the same command continues later")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of tables")


def _ended(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Calls ``run``, then ends the process group that it started; a group whose exchanges failed is left until the process exits."""
    import torch

    began = not torch.distributed.is_initialized()
    # garbage collection between groups then skips everything that PyTorch has imported, which would take half a second each time
    gc.freeze()
    try:
        code = run(args)
    finally:
        gc.unfreeze()
    if code == 0 and began and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


def _run_all(args: argparse.Namespace) -> int:
    from dilated_attention.bench.suites import SUITES

    codes = []
    # quality needs a model
    for suite in (kind() for name, kind in SUITES.items() if name != "quality"):
        own = argparse.ArgumentParser(add_help=False)
        suite.add_arguments(own)
        codes.append(_run_one(suite, argparse.Namespace(**vars(own.parse_args([])) | vars(args))))
    return max(codes, default=0)


def _run_one(suite: Suite, args: argparse.Namespace) -> int:
    from dilated_attention.bench import run

    session = _session(args)
    begun = time.monotonic()

    def started(done: int, total: int, label: str) -> None:
        if not args.quiet and session.rank == 0:
            print(f"{suite.name} {done + 1}/{total}, {time.monotonic() - begun:.0f} s: {label}", file=sys.stderr, flush=True)

    outcome = run(suite, session, output=args.output, minutes=args.minutes, fresh=args.fresh, started=started)
    failed, compared = suite.verdict(outcome.results)
    if session.rank == 0:
        _tell(suite, outcome, compared, args.json)
    return int(failed or bool(outcome.broken))


def _session(args: argparse.Namespace) -> Session:
    """Creates the session. Raises UsageError where the device cannot be used."""
    import torch

    from dilated_attention.bench import Session
    from dilated_attention.bench.workloads.competitors import load_libraries

    load_libraries()
    # torchrun's variables: the same command on several processes measures across them
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = device_of(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index)
        torch.cuda.set_device(device)
    if world_size > 1:
        from dilated_attention.bench.measure.sharded import start_group

        start_group(device)
    half = torch.bfloat16 if on_gpu and torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    dtypes = tuple(getattr(torch, name) for name in args.dtypes or ()) or ((half,) if on_gpu else (torch.float32,))
    full = args.size == "full" if args.size else on_gpu
    seconds = args.seconds or 0.2
    return Session(device=device, full=full, dtypes=dtypes, seconds=seconds, options=args, rank=rank, world_size=world_size)


def _tell(suite: Suite, outcome: Outcome, compared: Sequence[Table], as_json: bool) -> None:
    results = outcome.results
    if as_json:
        rows = [row.as_dict() for row in results.rows]
        whole = {"suite": suite.name, "machine": results.machine, "settings": results.settings, "rows": rows, "left_out": outcome.left_out}
        put_json(whole | {"written": [str(path) for path in outcome.written]}, indent=1)
        sys.stderr.write("".join(table.text() for table in compared))
    else:
        for table in (*suite.tables(outcome.together), *compared):
            put(table.text())
        put("written: " + ", ".join(str(path) for path in outcome.written))
    left = len(outcome.left_out)
    if outcome.broken:
        why = f"processes could not continue together ({outcome.broken}); {left} groups are left"
    else:
        why = f"--minutes ran out before {left} of {len(results.groups) + left} groups"
    if outcome.broken or left:
        print(f"{why}: run the same command again to measure them", file=sys.stderr)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=positive, help="stop measuring after this long; default 480 on a GPU, 120 on a CPU")
    parser.add_argument("--head-dims", type=size, nargs="+", help="default: 64 128 32 96 48 192 256 on a GPU, 32 64 on a CPU")
    parser.add_argument("--lengths", type=size, nargs="+", help="default: powers of two from 256 to 65536 on a GPU, to 2048 on a CPU")
    parser.add_argument("--dtypes", choices=("half", "float32"), nargs="+", help="default: both")
    parser.add_argument("--backends", nargs="+", help="default: all usable ones; those left out come after those measured")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--output", type=Path, help="file to write instead of the one that this machine reads; replaced if it exists")
    parser.add_argument("--json", action="store_true", help="print the table's rows as JSON")


def _tune(args: argparse.Namespace) -> int:
    """Measures every usable backend on this machine; later calls prefer the fastest."""
    from dilated_attention.backends import tuning_table
    from dilated_attention.factory import detect, list_backends, tune

    hardware = detect(device_of(args.device) if args.device else None)
    unknown = [name for name in args.backends or () if name not in list_backends()]
    if unknown:
        raise UsageError(f"--backends has {', '.join(unknown)}; expected some of {', '.join(list_backends())}")
    path = args.output or tuning_table.cache_path(hardware)
    default = tune.default_sweep(hardware)
    sweep = replace(
        default,
        head_dims=tuple(args.head_dims or default.head_dims),
        lengths=tuple(args.lengths or default.lengths),
        dtypes=tuple(args.dtypes or default.dtypes),
        backends=tuple(args.backends or default.backends),
        seconds=default.seconds if args.seconds is None else args.seconds,
    )
    table = tune.measure(sweep, device=args.device, progress=lambda line: print(line, file=sys.stderr, flush=True))
    tuning_table.save(table, path)
    tuning_table.refresh()
    if args.json:
        rows = [tuning_table.as_dict(row) for row in table.rows]
        put_json({"file": str(path), "source": table.source, "date": table.date, "rows": rows})
        return 0
    put(tune.winners(table))
    put(f"written to {path}")
    if path != tuning_table.cache_path(hardware):
        put(f"to use it: DILATED_ATTENTION_CACHE={path}, or move it to {tuning_table.cache_path(hardware)}")
    return 0
