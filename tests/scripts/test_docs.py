"""README and docs/ as far as a machine can tell: their code runs on a CPU, links and named files exist, command lines parse, the site
builds.

A block of Python that cannot run here stands under a mark, ``<!-- not run: why -->``. Where it needs several processes, the mark names
the test that runs it. Blocks have at most 78 columns, which a page shows without scrolling; output that is shown as it was printed may be
wider, under ``<!-- wide: why -->``.
"""

import importlib
import importlib.util
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import dilated_attention
from benchmarks import __main__ as benchmarks
from benchmarks.case import case_names, family_of
from benchmarks.contenders import contender
from dilated_attention import cli
from dilated_attention.backends import registry
from tests.helpers.scripts import load, needs_pins

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|wide): (?P<reason>[^\n]*) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S
)
# what a page's code has to print; the rest of the pages assert what they claim, or only run
PRINTED = {"README.md": "forward: ", "block_sparse.md": "of the pairs"}
# maps of as many positions as slides have take a quarter of a minute
FEWER = {"attention_maps.md": {"5000": "1500", "4999": "1499"}}


class Block(NamedTuple):
    mark: str | None
    reason: str | None
    language: str
    code: str


@cache
def blocks(page: Path) -> list[Block]:
    return [Block(*match.group("mark", "reason", "language", "code")) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def program(page: Path) -> str:
    """A page's blocks one after another, as they are read."""
    return "\n".join(block.code for block in blocks(page) if block.language == "python" and block.mark is None)


@cache
def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.mark.parametrize("page", [*filter(program, PAGES)], ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    # a page may register a backend, set an order, and set up logging to this test's output
    logger = logging.getLogger("dilated_attention")
    for thing, names in ((registry, ("_backends", "_orders", "cached")), (logger, ("handlers", "level", "_cache"))):
        for name in names:
            monkeypatch.setattr(thing, name, copy(getattr(thing, name)))
    torch.manual_seed(0)
    code = program(page)
    for many, few in FEWER.get(page.name, {}).items():
        code = code.replace(many, few)
    exec(compile(code, str(page), "exec"), {"__name__": "docs"})
    assert PRINTED.get(page.name, "") in capsys.readouterr().out


def test_blocks_are_narrow_and_marks_name_tests(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # a mark without a block, or a block in a list, would be passed over
    assert len(re.findall("<!-- (?:not run|wide)", text)) == sum(block.mark is not None for block in blocks(page))
    assert not re.search(r"^[ \t]+```", text, re.M)
    for block in blocks(page):
        wide = [line for line in block.code.splitlines() if len(line) > 78]
        assert not wide or block.mark == "wide", wide
        if block.language == "python" and re.search(r"torchrun|init_process_group", block.code):
            assert "::" in (block.reason or ""), "several processes, and no test is named that runs them"
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


@cache
def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub and the site (mkdocs.yml: pymdownx.slugs) make them."""
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose(page), re.M)}


def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_file(), target
        # mkdocstrings makes some headings of the reference: the strict build checks links to those
        assert not anchor or path.parent.name == "api" or anchor in anchors(path), (target, anchors(path))


OURS = re.compile(
    r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|jsonl|toml|yml|txt|png)|(?:dilated_attention|benchmarks|examples|tests|docs|engine|backends)/[\w/.-]*"
)


def test_named_files_exist(page: Path) -> None:
    """``engine/plan.py`` may be said of dilated_attention/engine/plan.py, and a name alone of a file anywhere."""
    for span in spans(page):
        name = span.partition("::")[0].rstrip("/")
        # what a run of an example writes, and a reader's own
        if OURS.fullmatch(name) and name not in ("log.jsonl", "run.toml"):
            bases = ["", "dilated_attention", "benchmarks/results"]
            folders = ["dilated_attention", "docs", "benchmarks", "examples", "tests"] if "/" not in name else []
            assert any((ROOT / base / name).exists() for base in bases) or any(any((ROOT / folder).rglob(name)) for folder in folders), span


def test_pages_named_by_the_code_exist() -> None:
    for file in (file for folder in ("dilated_attention", "examples") for file in (ROOT / folder).rglob("*.py")):
        for name in re.findall(r"\bdocs/[\w/]+\.(?:md|png|py)\b", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)} names {name}"


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each line that may be a command, without its comment and environment."""
    # a command broken by a backslash is one line
    code = [block.code for block in blocks(page) if block.language != "python"]
    code += re.findall(r"^    (.*)$", prose(page), re.M)
    for line in [*spans(page), *re.sub(r"\\\n\s*", "", "\n".join(code)).splitlines()]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            # the quotes of a sentence
            continue
        while words and re.match(r"^[A-Z_][A-Z_0-9]*=", words[0]):
            words = words[1:]
        if words:
            yield words


def test_commands_parse(page: Path) -> None:
    """Of the package and the benchmarks by their parsers; of scripts, each --option stands in them or beside them; make has the target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in command_lines(page):
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
        rest = words[words.index(module) + 1 :]
        if module in ("dilated_attention", "dilated-attention") and rest:
            # a command spoken of, without what it needs
            try:
                cli._parser().parse_args(rest if len(rest) > 1 else [*rest, "--help"])
            except SystemExit as ended:
                assert ended.code == 0, words
        elif module == "benchmarks" and "-m" in words:
            options = benchmarks.parser().parse_args(rest or ["speed"])
            if options.suite == "speed":
                assert [family_of(name) for name in case_names(options.cases)], words
                assert [contender(name) for name in options.contenders or ["ours"]], words
        elif words[0] == "make":
            assert all(re.search(rf"^{re.escape(target)}:", makefile, re.M) for target in words[1:]), words
        elif words[0] in ("python", "bash", "torchrun"):
            for script in (ROOT / word for word in words if re.fullmatch(r"(benchmarks|examples|docs)/\w+\.(py|sh)", word)):
                # genome_h200.sh hands its options on
                beside = [script, *script.parent.glob("_*.py"), *(ROOT / "examples/recipe").glob("*.py"), ROOT / "examples/train_genome.py"]
                text = "\n".join(file.read_text(encoding="utf-8") for file in beside)
                missing = [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text]
                assert not [word for word in missing if not word.startswith("--nproc")], words


@cache
def documented() -> set[str]:
    return {name for page in (ROOT / "docs/api").glob("*.md") for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)}


PARTS = ("backends", "distributed", "factory", "functional", "models", "modules", "pattern", "testing", "planning", "profiling")
PUBLIC = {path: importlib.import_module(path).__all__ for path in (f"dilated_attention.{part}" for part in PARTS)}


def test_reference_has_every_public_name() -> None:
    shown = {path.rpartition(".")[2] for path in documented()}
    for path, names in PUBLIC.items():
        # a module named by itself is shown with all that it says is its own
        assert path in documented() or set(names) <= shown, path
    assert {f"dilated_attention.{name}" for name in dilated_attention.__all__} <= documented()


def test_table_of_backends_is_what_they_declare() -> None:
    assert load(ROOT / "docs" / "tables.py").capabilities() in (ROOT / "docs" / "backends.md").read_text(encoding="utf-8"), (
        "python docs/tables.py prints it"
    )


@pytest.mark.slow
def test_pictures_are_drawn_by_the_script_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = load(ROOT / "docs" / "pictures.py")
    shown = set(re.findall(r"!\[[^\]]+\]\((?:docs/)?pictures/(\w+)\.png\)", "".join(map(prose, PAGES))))
    assert shown == {picture.__name__ for picture in pictures.PICTURES} == {file.stem for file in (ROOT / "docs/pictures").iterdir()}
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main(["branches", "offsets", "tail"])
    assert len(list(tmp_path.iterdir())) == 3


@needs_pins
def test_site_builds_and_is_read_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    # tests/scripts/test_notebooks.py runs the notebooks
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NOTEBOOKS": "false"}
    # not --quiet: mkdocs then drops the warnings that --strict counts
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert result.returncode == 0, "\n".join(line for line in result.stderr.splitlines() if not line.startswith("INFO"))
    reference = "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "api").glob("*.html"))
    whole = [f"{path}.{name}" for path, names in PUBLIC.items() if path in documented() for name in names]
    assert not [name for name in (*whole, *documented() - PUBLIC.keys()) if f'id="{name}"' not in reference]
    # a >>> that Markdown takes for quotations
    assert "<blockquote>" not in reference
    for file in tmp_path.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]+)"', file.read_text(encoding="utf-8"))
        assert not [url for url in fetched if "canonical" not in url], f"{file.name} fetches {fetched}"
    # a page that is opened as a file can neither fetch the index of the search nor start its worker
    assert (tmp_path / "search" / "search_index.js").is_file()
    assert '<script src="iframe-worker.js">' in (tmp_path / "index.html").read_text(encoding="utf-8")
    for file in (tmp_path / "notebooks").glob("*.html"):
        links = re.findall(r'<a\b[^>]*\bhref="(?!https?:)([^"#]+)', file.read_text(encoding="utf-8"))
        assert links and all((file.parent / link).is_file() for link in links), links
