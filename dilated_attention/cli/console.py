"""What the commands print: fitted to a terminal's width, coloured there, and in characters that the stream can encode."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import re
import sys
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST = 24
_ASCII = str.maketrans(
    {
        **{"→": "->", "✗": "x", "·": "-", "×": "x", "–": "-", "—": "-", "−": "-", "…": "...", "≤": "<=", "≥": ">=", "µ": "u", "²": "^2"},
        # the shades of show: light to dark
        **{"░": ".", "▒": "+", "▓": "%", "█": "#"},
    }
)
_ERRORS = "dilated_attention.ascii"
# a label, and the text that its continuation lines are aligned with
_LABEL = re.compile(r"\s*(?:(?:→|->|✗|x|·|-) )?\S.*?\s{2,}(?=\S)")
# a backend that is taken, one that cannot be used, and the name before a text
_HIGHLIGHTS = [
    r"(?m)^ *(?P<taken>(?:→|->) \S+)",
    r"\b(?:forward|backward)(?: runs?)? on (?P<taken>\w+)",
    r"(?m)^ *(?P<refused>(?:✗|x) .*)$",
    r"(?m)^ {0,2}(?P<label>[^\W\d](?:\S| (?=\S))*)  +\S",
]


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    if all("\udc80" <= letter <= "\udcff" for letter in found):
        # a file's name that is no text, as Python reads it
        return bytes(ord(letter) - 0xDC00 for letter in found), error.end
    return found.translate(_ASCII).encode("ascii", "replace").decode("ascii"), error.end


codecs.register_error(_ERRORS, _replaced)


def prepare() -> None:
    """Makes both streams replace characters that they cannot encode, instead of raising an error, and warnings lines without code."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def console() -> Console:
    """Returns rich's console: colours on a terminal, unless ``NO_COLOR`` is set or ``TERM`` is ``dumb``."""
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Highlighter(RegexHighlighter):
        highlights = _HIGHLIGHTS

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            # the exception being handled; rich would exit with 1
            raise

    # without colours rich would still write bold text
    system: Any = None if os.environ.get("NO_COLOR") else "auto"
    theme = Theme({"taken": "bold green", "refused": "dim", "label": "bold"})
    return Piped(color_system=system, theme=theme, highlighter=Highlighter(), markup=False, emoji=False, soft_wrap=True)


def width() -> int | None:
    """Returns the characters of a line: ``COLUMNS``, else the terminal's; None where the output is no terminal, and lines stay whole."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(NARROWEST, int(columns))
    try:
        found = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(NARROWEST, found) if found else None


def put(text: object, *, wrap: bool = True) -> None:
    """Prints ``text``; lines longer than ``width()`` continue below their text unless ``wrap`` is False."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = str(text).encode(encoding, _ERRORS).decode(encoding, "surrogateescape")
    columns = width() if wrap else None
    if columns is not None:
        shown = "\n".join(_wrapped(line, columns) for line in shown.split("\n"))
    console().print(shown)


def _wrapped(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    label = _LABEL.match(line)
    indent = label.end() if label and label.end() <= columns // 2 else len(line) - len(line.lstrip()) + 2
    return "\n".join(textwrap.wrap(line, columns, subsequent_indent=" " * min(indent, columns // 2), break_on_hyphens=False))


def put_answer(args: argparse.Namespace, value: Any, text: object) -> None:
    """Prints an answer as its command was asked to: ``value`` as JSON, or else ``text``."""
    if args.json:
        put_json(value)
    else:
        put(text)


def put_json(value: Any, *, indent: int = 2) -> None:
    """Prints ``value`` as JSON, with escapes in place of characters that stdout cannot encode."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent)
    print(text)
