"""Writes the long description of the wheel: README.md, whose relative links would lead nowhere outside of the repository.

The project has no public address yet. Until it has one, a link to a file becomes the file's path in the source distribution.
"""

import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(?:#[^)\s]*)?\)")


def _path(link: re.Match[str]) -> str:
    label, target = link.groups()
    return target if target.endswith(label) else f"{label} ({target})"


title, text = Path(__file__).with_name("README.md").read_text(encoding="utf-8").split("\n", 1)
setup(
    long_description=f"{title}\n\nPaths such as docs/index.md are those of the source distribution.\n{_LINK.sub(_path, text)}",
    long_description_content_type="text/markdown",
)
