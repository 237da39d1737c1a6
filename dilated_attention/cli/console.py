"""What the commands print: rich's console, whose lines stay whole where the output is no terminal, and JSON."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from typing import Any

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme


class _Marks(RegexHighlighter):
    # a backend that is taken, and one that cannot be used
    highlights = [r"(?m)^ *(?P<taken>→ \S+)", r"(?m)^ *(?P<refused>✗ .*)$"]  # noqa: RUF012


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # the exception being handled; rich would exit with 1
        raise


def prepare() -> None:
    """Makes both streams replace characters that they cannot encode, instead of raising an error, and warnings lines without code."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def console() -> Console:
    # without colours rich would still write bold text
    system: Any = None if os.environ.get("NO_COLOR") else "auto"
    theme = Theme({"taken": "bold green", "refused": "dim"})
    return _Console(color_system=system, theme=theme, highlighter=_Marks(), markup=False, emoji=False)


def width() -> int | None:
    """Returns the characters of a line; None where the output is no terminal and ``COLUMNS`` is not set, and lines stay whole."""
    screen = console()
    return screen.width if screen.is_terminal or os.environ.get("COLUMNS") else None


def put(text: object, *, wrap: bool = True) -> None:
    """Prints ``text``; ``wrap``: in lines of at most ``width()``."""
    console().print(str(text), soft_wrap=not wrap or width() is None)


def put_json(value: Any) -> None:
    """Prints ``value`` as JSON, with escapes for what is not ASCII."""
    print(json.dumps(value, indent=2))
