"""``python -m dilated_attention``, or ``dilated-attention``: the command line.

There is one module per command. Its ``add`` function creates the command's parser and sets the function to run. Only that function imports
torch, so that help, version and usage errors come at once: modules import what needs torch inside their functions.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dilated_attention import __version__, start
from dilated_attention.cli import bench, console, evaluate, generate, info, plan, recommend, show
from dilated_attention.cli.arguments import as_flags
from dilated_attention.parsing import UsageError

_COMMANDS = (
    info,
    show,
    plan,
    recommend,
    bench,
    generate,
    evaluate,
)
# exit code that a shell reports for a process ended by SIGINT or SIGPIPE: 128 + the signal's number
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    0: done · 1: the request cannot be carried out, with the reason on stderr · 130: interrupted · 141: the reader of a pipe has exited, as
    ``head`` does. Wrong usage, including invalid values, raises ``SystemExit(2)``, as argparse does.
    """
    console.prepare()
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # buffered output must be written somewhere when the interpreter exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    try:
        args = _parser().parse_args(arguments)
        start.load()
        from dilated_attention.backends import BackendUnavailable
        from dilated_attention.backends.tuning_table import PreferenceError

        try:
            code: int = args.run(args)
        except UsageError as error:
            args.parser.error(as_flags(str(error)))
        except (OSError, ModuleNotFoundError, BackendUnavailable, PreferenceError) as error:
            # the cause is the machine, what is installed, or a previously written file: not the current arguments
            if isinstance(error, BrokenPipeError):
                raise
            print(error, file=sys.stderr)
            return 1
        except ValueError as error:
            args.parser.error(as_flags(str(error)))
        return code
    finally:
        # flushed here, not at exit, where a closed pipe could not be caught; help ends in SystemExit
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name if sys.argv else ""
    program = "dilated-attention" if called.startswith("dilated-attention") else "python -m dilated_attention"
    parser = argparse.ArgumentParser(prog=program, description="Exact long-sequence attention on PyTorch.")
    parser.add_argument("--version", action="version", version=f"dilated-attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser
