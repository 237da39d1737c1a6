"""``python -m benchmarks SUITE``: speed, extreme, scaling, train-infer, accuracy. ``--help`` of each says what it measures."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import accuracy, extreme, scaling, speed, train_infer
from benchmarks.contenders import load_libraries
from benchmarks.session import Session, run

SUITES = {"speed": speed, "extreme": extreme, "scaling": scaling, "train-infer": train_infer, "accuracy": accuracy}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    suites = made.add_subparsers(dest="suite", required=True)
    for name, suite in SUITES.items():
        about = suite.__doc__ or ""
        one = suites.add_parser(name, help=suite.ABOUT, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = one.add_argument
        add("--output", type=Path, default=Path("bench-results"), metavar="DIR", help="for JSON and Markdown; default ./bench-results")
        add("--fresh", action="store_true", help="measure again what DIR already holds")
        add("--size", choices=("small", "full"), help="default: full on a GPU, small on a CPU")
        add("--device", help="default: the GPU if there is one")
        add("--dtypes", nargs="+", choices=("float16", "bfloat16", "float32", "float64"), help="default: bfloat16, on a CPU float32")
        add("--seconds", type=float, default=0.2, help="of timing for each contender and pass; default 0.2")
        suite.add_arguments(one)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    suite = SUITES[options.suite]
    load_libraries()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and suite is not scaling:
        sys.stderr.write(f"{world_size} processes were started and suite {options.suite} runs on one; start it without torchrun\n")
        return 2
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index)
        torch.cuda.set_device(device)
    dtypes = tuple(getattr(torch, name) for name in options.dtypes or ("bfloat16" if on_gpu else "float32",))
    is_small = options.size == "small" if options.size else not on_gpu
    session = Session(device=device, dtypes=dtypes, is_small=is_small, seconds=options.seconds, options=options, rank=rank,
                      world_size=world_size)  # fmt: skip
    # garbage collection between groups then skips all that PyTorch has imported, which would take half a second each time
    gc.freeze()
    try:
        others = speed.foreign(session) if suite is speed else []
        code = run(options.suite, session, suite.groups(session), foreign=others)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        gc.unfreeze()
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
