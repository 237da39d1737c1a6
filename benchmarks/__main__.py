"""``python -m benchmarks SUITE``: speed, extreme, scaling, train-infer. ``--help`` of each says what it measures.

FlashAttention-3 is loaded from the files that FLASH3_LIBRARY, FLASH3_CUDART and FLASH3_FP8_LIBRARY name.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import extreme, scaling, speed, train_infer
from benchmarks.report import Group, Results, Row, machine, slower
from benchmarks.timing import attempt, positive, release
from dilated_attention.backends.flash import flash3, flash3_fp8

SUITES = {"speed": speed, "extreme": extreme, "scaling": scaling, "train-infer": train_infer}


def folder(text: str) -> Path:
    """Reads the path of a folder, which need not exist yet."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; expected a folder")
    return path


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    suites = made.add_subparsers(dest="suite", required=True)
    for name, suite in SUITES.items():
        about = suite.__doc__ or ""
        one = suites.add_parser(name, help=suite.ABOUT, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = one.add_argument
        add("--output", type=folder, default=Path("bench-results"), metavar="DIR", help="for JSON and Markdown; default ./bench-results")
        add("--size", choices=("small", "full"), help="default: full on a GPU, small on a CPU")
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: the GPU if there is one")
        add("--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="default: bfloat16, on a CPU float32")
        add("--seconds", type=positive, default=0.2, help="of timing for each contender and pass; default 0.2")
        suite.add_arguments(one)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    suite = SUITES[options.suite]
    options.rank, options.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.world_size > 1 and suite is not scaling:
        sys.stderr.write(f"{options.world_size} processes were started and suite {options.suite} runs on one; start it without torchrun\n")
        return 2
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        sys.stderr.write(f"error: --device {options.device}: {str(error).splitlines()[0]}\n")
        return 2
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index)
        torch.cuda.set_device(device)
        if library := os.environ.get("FLASH3_LIBRARY"):
            flash3.load_library(library, os.environ.get("FLASH3_CUDART"))
        if library := os.environ.get("FLASH3_FP8_LIBRARY"):
            flash3_fp8.load_library(library)
    options.device, options.is_small = device, options.size == "small" if options.size else not on_gpu
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    # garbage collection between groups then skips all that PyTorch has imported, which would take half a second each time
    gc.freeze()
    try:
        code = run(options, suite.groups(options))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        gc.unfreeze()
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def run(options: argparse.Namespace, groups: Sequence[Group]) -> int:
    """Measures the groups, prints the tables, and returns the exit code. It is 1 where a result is wrong, or, with ``--against``, where
    something of this library got slower."""
    path = None if options.rank else options.output / f"{options.suite}.json"
    results = Results(options.suite, machine(options.device), path=path)
    then = None
    if against := getattr(options, "against", None):
        then = Results.load(against / f"{options.suite}.json")
        there, here = then.machine["hardware"], results.machine["hardware"]
        if there != here:
            raise ValueError(f"{then.path} is of {there}; expected a run on this hardware, {here}")
    if not groups:
        raise ValueError("no case has such a name; --help says how to find the names")
    begun = time.monotonic()
    for i, (label, measure) in enumerate(groups):
        if options.rank == 0:
            print(f"{options.suite} {i + 1}/{len(groups)}, {time.monotonic() - begun:.0f} s: {label}", file=sys.stderr, flush=True)
        # a note where not even the inputs fit
        rows, note = attempt(lambda measure: list(measure()), measure)
        results.add(label, [Row(name="all", case={"group": label}, note=note)] if rows is None else rows)
        release()
    if options.rank:
        return 0
    # results are committed: no path of a machine
    words = ["PATH" if "/" in word else word for word in (sys.argv[1:] if sys.argv[0].endswith("__main__.py") else [options.suite])]
    print(results.report(f"python -m benchmarks {' '.join(words)}"))
    worse = [line for label, _ in groups if then for line in slower(label, results.groups[label], then, options.threshold)]
    print(*worse, sep="\n")
    return int(bool(worse) or any(row.note.startswith("wrong") for label, _ in groups for row in results.groups[label]))


if __name__ == "__main__":
    sys.exit(main())
