"""``python -m dilated_attention``, or ``dilated-attention``: the command line. Each module's ``add`` makes the parsers of its commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dilated_attention import __version__, interrupt
from dilated_attention.backends import BackendUnavailable
from dilated_attention.cli import common, info, plan, saved, show, warmup
from dilated_attention.factory.presets import hint_of

# exit code that a shell reports for a process ended by SIGINT or SIGPIPE: 128 + the signal's number
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0: done · 1: the machine, what is installed or a file does not allow it · 130:
    interrupted · 141: the reader of a pipe has exited, as ``head`` does. Wrong usage, invalid values included, raises ``SystemExit(2)``, as
    argparse does."""
    interrupt.raise_again()
    common.prepare_output()
    try:
        try:
            args = _parser().parse_args(arguments)
            code: int = args.run(args)
        except (ValueError, TypeError) as error:
            args.parser.error(str(error))
        finally:
            # flushed here, not at exit, where a closed pipe could not be caught; help ends in SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # buffered output must be written somewhere when the interpreter exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (OSError, ImportError, BackendUnavailable) as error:
        print(error, file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        wrong, choices, _ = message.partition("(choose from")
        super().error(f"{message} {hint_of(wrong)}".strip() if choices else message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        # argparse drops "--", also where it is the value: --length=--
        if arg_strings == ["--"] and action.option_strings:
            raise argparse.ArgumentError(action, "got '--'; expected a value")
        return super()._get_values(action, arg_strings)


def _parser() -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name if sys.argv else ""
    program = "dilated-attention" if called.startswith("dilated-attention") else "python -m dilated_attention"
    parser = _Parser(prog=program, description="Exact long-sequence attention on PyTorch.")
    parser.add_argument("--version", action="version", version=f"dilated-attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (info, show, plan, saved, warmup):
        module.add(commands)
    return parser
