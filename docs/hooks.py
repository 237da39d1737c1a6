"""Hooks of mkdocs: what the bench suites wrote into benchmarks/results/<date>-<machine>/ becomes pages of the site; links of notebooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PAGE, PLACE, SECTION = "results.md", "<!-- results -->", "Performance"
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


def on_config(config: Any) -> Any:
    """One line of the navigation for each run."""
    section = next(entry[SECTION] for entry in config.nav if SECTION in entry)
    for name, files in runs(RESULTS).items():
        section.append({name: [{title(file): address(file, RESULTS)} for file in files if file.suffix == ".md"]})
    return config


def on_files(files: Any, config: Any) -> Any:
    for shown in runs(RESULTS).values():
        for file in shown:
            files.append(File.generated(config, address(file, RESULTS), abs_src_path=str(file)))
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
