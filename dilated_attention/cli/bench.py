"""``bench``: says where measuring is. It needs competitors, oracles and results of its own, so it is not installed with the package."""

from __future__ import annotations

import argparse

from dilated_attention.cli.console import put

WHERE = """Measuring is in the source, not in the package: clone it and call there

    python -m benchmarks speed          named cases beside others, at lengths that change and at one that repeats
    python -m benchmarks extreme        the longest sequence that fits
    python -m benchmarks train-infer    generating, training steps of slide encoders, equality with TorchScale
    python -m benchmarks accuracy       errors against float64
    torchrun --nproc-per-node 2 -m benchmarks scaling

What a call or a model will take here, without running it: plan. Which kernel runs and why: info."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="where measuring is")
    parser.add_argument("suite", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_tell, parser=parser)


def _tell(args: argparse.Namespace) -> int:
    put(WHERE)
    return 0
