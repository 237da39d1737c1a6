"""Ctrl-C while the command line imports torch: ``dilated_attention`` sets this before its imports, and ``cli.main`` takes it back."""

from __future__ import annotations

import os
import signal
import sys


def _end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def end_at_once() -> None:
    """Makes Ctrl-C end this process if it is the command line: C++ that is being imported swallows KeyboardInterrupt, or aborts. While
    Python imports the package of ``-m dilated_attention``, ``sys.argv`` has "-m" in place of the program; ``sys.orig_argv`` has both."""
    # the program as it was called, and the word before it ("" if there is none); embedded interpreters have neither
    option, name = ["", "", *sys.orig_argv[-len(sys.argv) - 1 :][:2]][-2:]
    is_script = name in sys.argv[:1] and os.path.basename(name) in ("dilated-attention", "dilated-attention.exe")
    # a shell lets what it starts in the background ignore SIGINT
    if (is_script or (option, name) == ("-m", "dilated_attention")) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
