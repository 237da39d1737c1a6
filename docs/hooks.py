"""Hooks of mkdocs: links of notebooks."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links of notebooks to pages: mkdocs-jupyter leaves them as they are, which serves readers in the repository."""
    return re.sub(r'(href="(?!https?:)[^"#]+)\.md([#"])', r"\1.html\2", html) if page.file.src_uri.endswith(".ipynb") else html
