"""``bench``: measurement suites on this machine, and the sweep that orders backends (``tune``)."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench import Outcome, Session, Suite, run
from dilated_attention.bench.arguments import UsageError, positive
from dilated_attention.bench.suites import SUITES
from dilated_attention.bench.workloads.problem import DTYPES
from dilated_attention.cli import tune

_OUTPUT = Path("bench-results")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure: suites of benchmarks, or which backend is fastest here (tune)")
    suites = parser.add_subparsers(dest="suite", required=True)
    tuning = suites.add_parser(
        "tune",
        usage="%(prog)s [options]",
        help=("measure every usable backend; what is fastest is preferred from then on (also: bench --tune)"),
    )
    tune.add_arguments(tuning)
    tuning.set_defaults(run=tune.run, parser=tuning)
    for name, suite in SUITES.items():
        _add_suite(suites.add_parser(name, usage="%(prog)s [options]", help=suite.about, description=f"{suite.about}."), suite())
    everything = suites.add_parser(
        "all", usage="%(prog)s [options]", help=("every suite above except tune and regression, one after another, each with its defaults")
    )
    _add_common(everything)
    everything.set_defaults(run=lambda args: _ended(_run_all, args), parser=everything)


def _add_suite(parser: argparse.ArgumentParser, suite: Suite) -> None:
    _add_common(parser)
    suite.add_arguments(parser)
    parser.set_defaults(run=lambda args: _ended(functools.partial(_run_one, suite), args), parser=parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="DIR", help=f"for JSON, Markdown and plots; default ./{_OUTPUT}")
    parser.add_argument("--fresh", action="store_true", help="measure again what DIR already holds")
    parser.add_argument("--size", choices=("small", "full"), help="default: full on a GPU, small on a CPU")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument(
        "--dtypes", choices=list(DTYPES), nargs="+", help="default: bfloat16 on a GPU (float16 before sm_80), float32 on a CPU"
    )
    parser.add_argument("--seconds", type=positive, help="of timing for each contender and pass; default 0.2")
    parser.add_argument("--minutes", type=float, help="start nothing after this time; the same command continues later")
    parser.add_argument("--no-plots", action="store_true", help="JSON and Markdown only")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of tables")


def _ended(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Calls ``run``, then ends the process group that it started; a group whose exchanges failed is left until the process exits."""
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
    codes = []
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    able = [suite() for suite in SUITES.values() if suite.in_all]
    suites = [suite for suite in able if world_size == 1 or suite.over_processes]
    if world_size > 1 and os.environ.get("RANK") == "0":
        others = [suite.name for suite in able if suite not in suites]
        print(f"for one process only, so not measured with {world_size}: {', '.join(others)}", file=sys.stderr)
    for suite in suites:
        own = argparse.ArgumentParser(add_help=False)
        suite.add_arguments(own)
        codes.append(_run_one(suite, argparse.Namespace(**vars(own.parse_args([])) | vars(args))))
    return max(codes, default=0)


def _run_one(suite: Suite, args: argparse.Namespace) -> int:
    session = _session(args)
    progress = _Progress(suite.name, quiet=args.quiet or session.rank > 0)
    outcome = run(
        suite,
        session,
        output=args.output,
        minutes=args.minutes,
        fresh=args.fresh,
        plots=not args.no_plots,
        started=progress,
    )
    if session.rank == 0:
        _tell(suite, outcome, args.json)
    if outcome.broken:
        return 1
    return suite.verdict(outcome.results)


def _session(args: argparse.Namespace) -> Session:
    """Creates the session. Raises UsageError where the device cannot be used."""
    # torchrun's variables: the same command on several processes measures across them
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    named = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(named)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device is {named!r}, which torch cannot use here ({error}); expected cpu, cuda or cuda:<index>") from error
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    half = torch.bfloat16 if on_gpu and torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    dtypes = tuple(DTYPES[name] for name in args.dtypes or ()) or ((half,) if on_gpu else (torch.float32,))
    full = args.size == "full" if args.size else on_gpu
    seconds = args.seconds or 0.2
    return Session(device=device, full=full, dtypes=dtypes, seconds=seconds, options=args, rank=rank, world_size=world_size)


class _Progress:
    """A progress bar on stderr, one step per group; plain lines without a terminal or without tqdm."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self._name = name
        self._quiet = quiet
        self._bar: Any = None
        self._begun = time.monotonic()

    def __call__(self, done: int, total: int, label: str) -> None:
        if self._quiet:
            return
        if not sys.stderr.isatty() or not _has_tqdm():
            if label:
                passed = time.monotonic() - self._begun
                print(f"{self._name} {done + 1}/{total}, {passed:.0f} s: {label}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._name, unit="group", file=sys.stderr)
        self._bar.n = done
        self._bar.set_postfix_str(label)
        if not label:
            self._bar.close()


def _has_tqdm() -> bool:
    try:
        import tqdm  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _tell(suite: Suite, outcome: Outcome, as_json: bool) -> None:
    results = outcome.results
    if as_json:
        rows = [row.as_dict() for row in results.rows]
        whole = {"suite": suite.name, "machine": results.machine, "settings": results.settings, "rows": rows, "left_out": outcome.left_out}
        print(json.dumps(whole | {"written": [str(path) for path in outcome.written]}, indent=1, ensure_ascii=False))
    else:
        for table in suite.tables(outcome.together):
            print(table.text())
        print("written: " + ", ".join(str(path) for path in outcome.written))
    if outcome.broken:
        print(
            f"processes could not continue together ({outcome.broken}); {len(outcome.left_out)} groups are left: "
            "run the same command again to measure them",
            file=sys.stderr,
        )
    elif outcome.left_out:
        print(
            f"--minutes ran out before {len(outcome.left_out)} of {len(results.groups) + len(outcome.left_out)} groups: "
            "run the same command again to measure them",
            file=sys.stderr,
        )
