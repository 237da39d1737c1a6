"""``show``: a model preset: parameters, keys per query, memory, and what fits."""

from __future__ import annotations

import argparse
import json

from dilated_attention.cli.arguments import add_json, size
from dilated_attention.factory import MODEL_PRESETS, create_model


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("show", help="a model preset: parameters, keys per query, memory, and what fits")
    parser.add_argument("preset", choices=sorted(MODEL_PRESETS), metavar="preset", help=", ".join(MODEL_PRESETS))
    parser.add_argument("--positions", type=size, nargs="+", help="sequence lengths to tell of; default: a few orders of magnitude")
    parser.add_argument("--memory", type=float, help="GiB of the device that it has to fit; default: this machine's GPU, or its RAM")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    memory = None if args.memory is None else int(args.memory * 2**30)
    summary = create_model(args.preset, device="meta").summary(tuple(args.positions) if args.positions else None, memory=memory)
    print(json.dumps(summary.as_dict(), indent=2) if args.json else summary)
    return 0
