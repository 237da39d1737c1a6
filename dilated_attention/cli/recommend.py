"""``recommend``: from a use case to the attention, its settings and the code that creates it, with a reason for each."""

from __future__ import annotations

import argparse

from dilated_attention import planning
from dilated_attention.cli.arguments import add_json, gib_of
from dilated_attention.cli.console import put, put_json, width
from dilated_attention.parsing import below, size
from dilated_attention.planning.advice import KINDS

# of the command, and of the function
_OPTIONS = ("gpu", "memory", "parameters", "heads", "head_dim", "gpus", "batch", "users", "causal", "attention")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listed = "\n".join(f"  {name:<18}{text}" for name, text in planning.USE_CASES.items())
    parser = commands.add_parser(
        "recommend",
        usage="%(prog)s use-case --length N [options]",
        help="which attention, branches, backend and settings for a use case, with the reason for each",
        description=f"Which attention, branches, backend and settings to take, with the reason for each.\n\nuse cases:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("use_case", choices=list(planning.USE_CASES), metavar="use-case", help=", ".join(planning.USE_CASES))
    parser.add_argument("--length", type=size, required=True, help="positions of a sequence, tiles of a slide: 65536, 64k, 1M")
    parser.add_argument("--gpu", help="H200, A100, …, with every kernel package installed; cpu; default: this machine")
    parser.add_argument("--memory", type=gib_of, metavar="GIB", help="of each device; default: what it has")
    parser.add_argument("--parameters", type=parameters, help="of the model: 125M, 7B; default: one layer, for decoding llama-1b")
    parser.add_argument("--heads", type=size, help="query heads; default: as usual for this number of parameters")
    parser.add_argument("--head-dim", type=size, help="default: as usual for this number of parameters")
    parser.add_argument("--gpus", type=size, help="default: 1")
    parser.add_argument("--batch", type=size, help="sequences of a training step over all GPUs; default: 1")
    parser.add_argument("--users", type=size, help="requests at a time over all GPUs; default: 32")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: causal, except for encoders")
    parser.add_argument("--attention", choices=KINDS, help="which the model has or must have; default: chosen by rules")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def parameters(text: str) -> float:
    """Parses a number of parameters, with suffixes as powers of ten: ``7B`` is 7 · 10⁹."""
    unit = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}.get(text[-1:].lower())
    return below(text[:-1] + unit if unit else text, 1e16, "not a number of parameters; expected e.g. 125M, 7B or 1240000000")


def run(args: argparse.Namespace) -> int:
    answer = planning.recommend(args.use_case, args.length, **{name: getattr(args, name) for name in _OPTIONS})
    if args.json:
        put_json(answer.as_dict())
    else:
        # the code is not wrapped
        put(answer.text(*filter(None, [width()])), wrap=False)
    return 0 if answer.forward is not None else 1
