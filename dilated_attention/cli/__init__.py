"""``python -m dilated_attention``, or ``dilated-attention``: one module a command, each with ``add``, which makes its parser and names its function."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dilated_attention.backends import BackendUnavailable
from dilated_attention.backends.preference import PreferenceError
from dilated_attention.cli import bench, info, plan, recommend, show
from dilated_attention.cli.arguments import UsageError, as_flags

_COMMANDS = (info, show, plan, recommend, bench)
# what a shell reports for a process that SIGINT or SIGPIPE ended: 128 + the signal's number
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code.

    0: done · 1: what was asked cannot be done, with the reason on stderr · 130: interrupted · 141: the reader of a pipe has gone, as ``head`` does.
    Wrong usage, values that cannot be included, raises ``SystemExit(2)``, as argparse does.
    """
    try:
        return _run(_spelled(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # what is still buffered must go somewhere when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    try:
        args = _parser().parse_args(arguments)
        try:
            code: int = args.run(args)
        except UsageError as error:
            args.parser.error(as_flags(str(error)))
        except (OSError, BackendUnavailable, PreferenceError) as error:
            # the machine, or a file that was written before: not what was asked for now
            if isinstance(error, BrokenPipeError):
                raise
            print(error, file=sys.stderr)
            return 1
        except ValueError as error:
            if args.command != "bench":
                args.parser.error(as_flags(str(error)))
            # of what was measured before: a baseline that is not there, a file of another suite
            print(error, file=sys.stderr)
            return 1
        return code
    finally:
        # here, not at exit, where nobody could catch that the reader has gone; help ends in SystemExit
        sys.stdout.flush()


def _spelled(arguments: Sequence[str]) -> list[str]:
    """``bench --tune`` is ``bench tune``, as it was first called."""
    if arguments[:1] == ["bench"] and "--tune" in arguments:
        return ["bench", "tune", *(word for word in arguments[1:] if word != "--tune")]
    return list(arguments)


def _parser() -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name if sys.argv else ""
    program = "dilated-attention" if called.startswith("dilated-attention") else "python -m dilated_attention"
    parser = argparse.ArgumentParser(prog=program, description="Exact long-sequence attention on PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser
