"""An extension of griffe, which reads the docstrings: lines that begin with >>> are code, where Markdown would see nested quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAGRAPH = re.compile(r"^>>> .*\n?(?:^[^\n]+\n?)*", re.M)


class ExamplesAreCode(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = PARAGRAPH.sub(_fenced, obj.docstring.value)


def _fenced(paragraph: re.Match[str]) -> str:
    return f"```pycon\n{paragraph[0].rstrip()}\n```\n"
