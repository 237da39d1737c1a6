"""Hooks of mkdocs: what the bench suites wrote into benchmarks/results/<date>-<machine>/ become pages of the site; links of notebooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PAGE, PLACE = "results.md", "<!-- results -->"
# the suites write these; raw lines (.json, .jsonl) stay in the repository
SHOWN = (".md", ".png", ".svg")


def runs(folder: Path) -> dict[str, list[Path]]:
    """The folders of results that hold Markdown, newest first, with the files of each that the site shows."""
    found = {}
    for run in sorted((path for path in folder.iterdir() if path.is_dir()), reverse=True):
        files = sorted(path for path in run.rglob("*") if path.suffix in SHOWN)
        if any(path.suffix == ".md" for path in files):
            found[run.name] = files
    return found


def address(file: Path, folder: Path) -> str:
    return f"results/{file.relative_to(folder).as_posix()}"


def title(file: Path) -> str:
    heading = re.search(r"^# (.+)$", file.read_text(encoding="utf-8"), re.M)
    return heading[1] if heading else file.stem


def on_files(files: Any, config: Any) -> Any:
    for shown in runs(RESULTS).values():
        for file in shown:
            # results.md lists them; the navigation would be longer than the rest of it
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, address(file, RESULTS), abs_src_path=str(file), inclusion=level))
    return files


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links of notebooks to pages: mkdocs-jupyter leaves them as they are, which serves readers in the repository."""
    return re.sub(r'(href="(?!https?:)[^"#]+)\.md([#"])', r"\1.html\2", html) if page.file.src_uri.endswith(".ipynb") else html


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown.replace(PLACE, listed(RESULTS)) if page.file.src_uri == PAGE else markdown


def listed(folder: Path) -> str:
    """Every run with links to its tables."""
    lines = []
    for name, files in runs(folder).items():
        links = " · ".join(f"[{title(file)}]({address(file, folder)})" for file in files if file.suffix == ".md")
        lines.append(f"* **{name}**: {links}")
    return "\n".join(lines) or "There is none yet."
