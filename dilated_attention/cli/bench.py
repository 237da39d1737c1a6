"""``bench``: what is measured on this machine."""

from __future__ import annotations

import argparse

from dilated_attention.cli import tune


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure every usable backend here; what is fastest is preferred from then on")
    tune.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the table's rows as JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if not args.tune:
        args.parser.error("without --tune there is nothing to run: other suites come in a later release; benchmarks/ has scripts")
    return tune.run(args)
