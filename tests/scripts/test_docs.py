"""README and docs/ as far as a machine can tell: their code runs on a CPU, links and named files exist, command lines parse, the site
builds.

A block of Python that cannot run here stands under a mark, ``<!-- not run: why -->``. Where the reason is that it needs several processes,
the mark names the test that runs it, or the same calls, elsewhere. Blocks have at most 78 columns, which a page shows without scrolling;
output that is shown as it was printed may be wider, under ``<!-- wide: why -->``.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.util
import inspect
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import matplotlib.image as plt_image
import pytest
import torch

import dilated_attention
from benchmarks import __main__ as benchmarks
from benchmarks.case import case_names, family_of
from benchmarks.contenders import contender
from dilated_attention import cli
from dilated_attention.backends import registry
from tests.helpers.scripts import needs_pins

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"(?:^<!-- not run: (?P<reason>(?:(?!-->).)*) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
WIDEST = 78
FENCED = re.compile(r"(?:^<!-- wide: (?P<reason>[^\n]*) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason='needs mkdocs: pip install "dilated-attention[docs]"')
# what a page's code has to print; the rest of the pages assert what they claim, or only run
PRINTED = {"README.md": ["forward: "], "docs/block_sparse.md": ["of the pairs"]}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    reason: str | None


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    return tuple(
        Block(page, text.count("\n", 0, match.start("code")), match["language"], match["code"], match["reason"])
        for match in BLOCK.finditer(text)
    )


@cache
def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a page sets up for logging would write to its test's closed output in later tests; its own backend is not in other tables."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    logger = logging.getLogger("dilated_attention")
    handlers, level = [*logger.handlers], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" and b.reason is None for b in blocks(p))], ids=lambda p: p.name
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A page's blocks one after another in one namespace, as they are read, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    # a page may register a backend and set an order
    for name in ("_backends", "_orders", "cached"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page):
        if block.language == "python" and block.reason is None:
            # so that a traceback shows the page's own line
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
    printed = capsys.readouterr().out
    for text in PRINTED.get(str(page.relative_to(ROOT)), []):
        assert text in printed


def test_marks_have_reasons() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- not run") == sum(block.reason is not None for block in blocks(page)), f"{page}: a mark without a block"
        # a block in a list would be passed over
        assert not re.search(r"^[ \t]+```", text, re.M), f"{page}: an indented block"
        for block in blocks(page):
            if block.reason is not None:
                assert block.language == "python", f"{page}:{block.line}: only Python is run"
                assert len(block.reason.split()) >= 3, f"{page}:{block.line}: no reason: {block.reason!r}"
            if block.language == "python" and re.search(r"torchrun|init_process_group", block.code):
                assert block.reason and "::" in block.reason, f"{page}:{block.line}: several processes, and no test is named that runs them"


def test_code_is_narrow(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- wide") == sum(match["reason"] is not None for match in FENCED.finditer(text)), "a mark without a block"
    for match in FENCED.finditer(text):
        line, wide = text.count("\n", 0, match.start("code")), [x for x in match["code"].splitlines() if len(x) > WIDEST]
        if match["reason"] is None:
            assert not wide, f"{page.name}:{line}: more than {WIDEST} columns: {wide}"
        else:
            assert match["language"] != "python" and wide, f"{page.name}:{line}: a mark that the block does not need"


def test_examples_in_docstrings_are_narrow() -> None:
    """What docs/docstrings.py makes code of: paragraphs that begin with >>>, as the reference shows them."""
    paragraph, found = loaded("docstrings").PARAGRAPH, 0
    for file in sorted((ROOT / "dilated_attention").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for example in paragraph.findall(ast.get_docstring(node) or ""):
                    found += 1
                    wide = [line for line in example.splitlines() if len(line) > WIDEST]
                    assert not wide, f"{file.relative_to(ROOT)}: more than {WIDEST} columns: {wide}"
    assert found > 30


def test_named_tests_exist() -> None:
    for page in PAGES:
        for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name}: {file}::{name}"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site (mkdocs.yml: pymdownx.slugs) make it."""
    text = re.sub(r"`|\*\*|\[([^\]]*)\]\([^)]*\)", lambda match: match[1] or "", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = prose(page)
    return frozenset(slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.M)) | frozenset(re.findall(r'id="([^"]+)"', text))


def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_file(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md" and not api(path):
            assert anchor in anchors(path), f"{page.name} links to {target}; {path.name} has {sorted(anchors(path))}"


def api(path: Path) -> bool:
    """Whether mkdocstrings makes the page's headings: the strict build checks links to those."""
    return path.parent.name == "api"


def test_headings_are_unique(page: Path) -> None:
    found = [slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.M)]
    assert len(found) == len(set(found)), f"{page.name}: two headings of one name, so a link finds the first only"


@cache
def tracked() -> frozenset[str]:
    skipped = {".git", ".venv", "build", "runs", "__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped]
        found += [str((Path(folder) / name).relative_to(ROOT)) for name in (*files, *folders)]
    return frozenset(found)


OURS = re.compile(
    r"^(?:[\w.-]+/)*[\w.*<>-]+\.(?:py|md|sh|jsonl|toml|yml|txt|png)$|^(?:dilated_attention|benchmarks|examples|tests|docs)/[\w/.*-]*$"
)


# what a run of an example writes, and a reader's own
NOT_HERE = {"log.jsonl", "run.toml"}


def test_named_files_exist(page: Path) -> None:
    """``engine/branches/problems.py`` may be said of dilated_attention/engine/branches/problems.py, and ``launches.py`` beside it."""
    for span in spans(page):
        name = span.partition("::")[0].rstrip("/")
        if not OURS.match(name) or "<" in name or name in NOT_HERE:
            continue
        patterns = [
            name,
            *(f"{folder}/{name}" for folder in ("dilated_attention", "docs", "benchmarks/results")),
            *([f"*/{name}"] if "/" not in name else []),
        ]
        assert any(fnmatch.filter(tracked(), pattern) for pattern in patterns), f"{page.name} names {span}"


def test_pages_named_by_the_code_exist() -> None:
    for file in (file for folder in ("dilated_attention", "examples") for file in (ROOT / folder).rglob("*.py")):
        for name in re.findall(r"\bdocs/[\w/]+\.(?:md|png|py)\b", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)} names {name}"


def command_lines(page: Path) -> Iterator[str]:
    yield from spans(page)
    for block in blocks(page):
        if block.language != "python":
            # a command broken by a backslash is one line
            yield from re.sub(r"\\\n\s*", "", block.code).splitlines()
    # blocks by indentation
    yield from re.findall(r"^    (\S.*)$", prose(page), re.M)


def arguments(line: str) -> list[str]:
    """The words of a command line without its comment and environment; empty if the quotes of a line show that it is none."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and re.match(r"^[A-Z_][A-Z_0-9]*=", words[0]):
        words = words[1:]
    return words


def test_commands_of_the_package_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines(page):
        words = arguments(line)
        if words[:3] == ["python", "-m", "dilated_attention"]:
            words = words[3:]
        elif words[:1] == ["dilated-attention"]:
            words = words[1:]
        else:
            continue
        if not words:
            continue
        # a command spoken of, without what it needs
        words = [*words, "--help"] if len(words) == 1 else words
        try:
            cli._parser().parse_args(words)
        except SystemExit as ended:
            assert ended.code == 0, f"{page.name}: {line}: {capsys.readouterr().err}"


def test_commands_of_the_benchmarks_parse(page: Path) -> None:
    for line in command_lines(page):
        words = arguments(line)
        if "benchmarks" not in words or words[0] not in ("python", "torchrun") or "-m" not in words:
            continue
        words = words[words.index("benchmarks") + 1 :]
        options = benchmarks.parser().parse_args(words if len(words) > 1 else [*words, *([] if words else ["speed"])])
        if options.suite == "speed":
            assert [family_of(name) for name in case_names(options.cases)], line
            assert [contender(name) for name in options.contenders or ["ours"]], line


def test_scripts_have_the_options_named(page: Path) -> None:
    """Of the scripts in benchmarks/ and examples/: the file is there, and each --option stands in it or in the modules beside it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in command_lines(page):
        words = arguments(line)
        if words[:1] == ["make"]:
            for target in words[1:]:
                assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"{page.name}: {line}"
        scripts = [word for word in words if re.match(r"^(benchmarks|examples|docs)/\w+\.(py|sh)$", word)]
        if not scripts or words[0] not in ("python", "bash", "torchrun"):
            continue
        script = ROOT / scripts[0]
        assert script.is_file(), f"{page.name}: {line}"
        # genome_h200.sh hands its options on
        shared = (ROOT / "examples" / "recipe").glob("*.py")
        beside = [script, *script.parent.glob("_*.py"), *shared, ROOT / "examples" / "train_genome.py"]
        text = "\n".join(file.read_text(encoding="utf-8") for file in beside)
        for option in (word for word in words[words.index(scripts[0]) + 1 :] if word.startswith("--")):
            assert f'"{option.partition("=")[0]}"' in text, f"{page.name}: {line}: {option}"


def modules() -> list[ModuleType]:
    """The public ones: those that say what is theirs, but for private packages of the engine."""
    public = ["", ".backends", ".distributed", ".factory", ".functional", ".models", ".modules", ".pattern", ".testing"]
    public += [".planning", ".profiling"]
    return [importlib.import_module(f"dilated_attention{name}") for name in public]


@cache
def documented() -> frozenset[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return frozenset(re.findall(r"^::: ([\w.]+)$", text, re.M))


def resolved(path: str) -> object:
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def test_reference_has_every_public_name() -> None:
    classes_and_functions = {id(resolved(path)) for path in documented()}
    missing = []
    for module in modules():
        for name in module.__all__:
            thing = getattr(module, name)
            counts = inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismodule(thing)
            # a module named by itself is shown with all that it says is its own
            if (
                module.__name__ not in documented()
                and f"{module.__name__}.{name}" not in documented()
                and not (counts and id(thing) in classes_and_functions)
            ):
                missing.append(f"{module.__name__}.{name}")
    assert not missing
    assert {f"dilated_attention.{name}" for name in dilated_attention.__all__} <= documented()


def test_table_of_backends_is_what_they_declare() -> None:
    assert loaded("tables").capabilities() in (ROOT / "docs" / "backends.md").read_text(encoding="utf-8"), "python docs/tables.py prints it"


def test_pictures_are_small_drawn_by_the_script_and_shown() -> None:
    drawn = {picture.__name__ for picture in loaded("pictures").PICTURES}
    files = {file.stem: file for file in (ROOT / "docs" / "pictures").iterdir()}
    shown = set(re.findall(r"!\[[^\]]+\]\((?:\.\./)?pictures/(\w+)\.png\)", "".join(prose(page) for page in PAGES)))
    assert drawn == set(files) == shown
    for page, link in ((ROOT / "README.md", "docs/pictures/branches.png"), (ROOT / "docs" / "index.md", "pictures/branches.png")):
        assert re.search(rf"!\[[^\]]{{40,}}\]\({link}\)", prose(page)), f"{page.name}: a picture with a description on the first page"
    for file in files.values():
        assert file.stat().st_size < 150_000, file.name


@needs_pins
@pytest.mark.slow
def test_cheap_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in the repository, to a few pixels of an edge: matplotlib's fonts differ between versions, the patterns do not."""
    pictures = loaded("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main(["branches", "offsets", "tail"])
    for file in tmp_path.iterdir():
        mine, theirs = (plt_image.imread(path)[..., :3] for path in (file, ROOT / "docs" / "pictures" / file.name))
        assert mine.shape == theirs.shape and abs(mine - theirs).mean() < 0.02, file.name
    with pytest.raises(SystemExit, match="no picture cat"):
        pictures.main(["cat"])


@needs_mkdocs
def test_runs_of_the_suites_become_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = loaded("hooks")
    assert hooks.listed(tmp_path) == "There is none yet."
    for name in ("2026-01-02-cpu", "2026-01-03-h200", "of-raw-lines-only"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed.jsonl").write_text("{}")
    (tmp_path / "2026-01-02-cpu" / "speed.md").write_text("# Speed of things\n\n![time](speed.png)\n")
    (tmp_path / "2026-01-02-cpu" / "speed.png").write_bytes(b"")
    (tmp_path / "2026-01-03-h200" / "memory.md").write_text("no heading")
    assert hooks.listed(tmp_path).splitlines() == [
        "* **2026-01-03-h200**: [memory](results/2026-01-03-h200/memory.md)",
        "* **2026-01-02-cpu**: [Speed of things](results/2026-01-02-cpu/speed.md)",
    ]
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    files = hooks.on_files([], SimpleNamespace(site_dir="site", use_directory_urls=False, plugins=SimpleNamespace(_current_plugin=None)))
    assert len(files) == 3 and not any(file.inclusion.is_in_nav() for file in files), "a folder of each day fills the navigation"


def loaded(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_pins
@needs_mkdocs
def test_site_builds_and_is_read_without_a_network(tmp_path: Path) -> None:
    # tests/scripts/test_notebooks.py runs the notebooks
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NOTEBOOKS": "false"}
    # not --quiet: mkdocs then drops the warnings that --strict counts
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert result.returncode == 0, "\n".join(line for line in result.stderr.splitlines() if not line.startswith("INFO"))
    built = list(tmp_path.rglob("*.html"))
    assert len(built) >= len(PAGES)
    reference = "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "api").glob("*.html"))
    assert all(f'id="dilated_attention.{name}"' in reference for name in dilated_attention.__all__)
    whole = [module for module in modules() if module.__name__ in documented()]
    names = [f"{module.__name__}.{name}" for module in whole for name in module.__all__]
    assert not [name for name in names if f'id="{name}"' not in reference], "shown with their docstrings, or by a line of their own"
    # a >>> that Markdown takes for quotations
    assert "<blockquote>" not in reference
    for file in built:
        fetched = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]+)"', file.read_text(encoding="utf-8"))
        assert not [url for url in fetched if "canonical" not in url], f"{file.name} fetches {fetched}"
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    # a page that is opened as a file can neither fetch the index of the search nor start its worker
    assert (tmp_path / "search" / "search_index.js").is_file() and '<script src="iframe-worker.js">' in start
    assert "results.html" in start and not re.search(r"results/20\d\d-", start), "folders of results fill the navigation"
    for file in (tmp_path / "notebooks").glob("*.html"):
        links = re.findall(r'<a\b[^>]*\bhref="(?!https?:)([^"#]+)', file.read_text(encoding="utf-8"))
        dead = [link for link in links if not (file.parent / link).is_file()]
        assert links and not dead, f"{file.name}: no such page: {dead}"
