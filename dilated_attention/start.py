"""The start of the command line, whose help, version and usage errors need no torch.

Python imports a package before its ``__main__``, and importing this package imports torch, which takes seconds. For every other importer
that is right: it registers the operators, which exported programs and checkpointing policies look up by name without using any other name
of the package. Only the process that is the command line does without, until a command runs.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import PurePath

_SCRIPTS = ("dilated-attention", "dilated-attention.exe")


def _is_command_line(given: list[str], whole: list[str]) -> bool:
    """``given``: ``sys.argv`` while the package is imported · ``whole``: ``sys.orig_argv``, which a child process does not inherit."""
    first = len(whole) - len(given)
    if not given or first < 1:
        return False
    # Python writes "-m" in place of a path that it does not know before the package is imported
    as_module = given[0] == "-m" and whole[first - 1 : first + 1] == ["-m", "dilated_attention"]
    return as_module or (PurePath(given[0]).name in _SCRIPTS and whole[first] == given[0])


def _end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


_without_torch = _is_command_line(sys.argv, sys.orig_argv)
# until a command runs there is nothing to clean up; imports of C++ swallow KeyboardInterrupt, or abort. One that is ignored stays ignored
_ends_at_once = _without_torch and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _ends_at_once:
    signal.signal(signal.SIGINT, _end)


def is_without_torch() -> bool:
    """Returns whether this process is ``python -m dilated_attention`` or ``dilated-attention``, and ``load`` was not called."""
    return _without_torch


def load() -> None:
    """Imports what the parser did without: from here on the package is what any other program imports."""
    global _without_torch
    if _without_torch:
        _without_torch = False
        importlib.reload(sys.modules["dilated_attention"])
        if _ends_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
