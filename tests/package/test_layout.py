"""No file is long, and imports go one way: between modules, between sibling folders, and between the parts of the package."""

import ast
import functools
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import dilated_attention

ROOT = Path(dilated_attention.__file__).parent
MOST_LINES = 500
Edges = dict[str, set[str]]

# Exceptions, each with its reason. A line whose import is gone fails the tests, so that the lists only shrink.
# imports without which there would be no circle
KNOWN_IMPORTS = {
    ("pattern.blocks.base", "pattern.blocks.block_lists"): ("pairs() counts the lists, which are made from a pattern's other methods"),
}
# imports against the order of BELOW
KNOWN_UPWARDS = {
    ("pattern.blocks.content", "validation"): "TopBlocks.choose takes tensors; pattern/checks.py would have to move next to validation.py",
}
# sibling folders with imports both ways
KNOWN_PAIRS = {
    "distributed.comm distributed.sharding",
    "engine.blocks engine.ops",
}

# what each part of the package may import; files, interrupt, parsing and validation are single modules
BELOW: dict[str, set[str]] = {
    "files": set(),
    "parsing": set(),
    "interrupt": set(),
    "pattern": {"files", "parsing"},
    "validation": {"pattern"},
    "backends": {"files", "pattern"},
    "engine": {"pattern", "backends"},
    "distributed": {"pattern", "validation", "backends", "engine"},
    "functional": {"pattern", "validation", "backends", "engine", "distributed"},
    "modules": {"pattern", "validation", "backends", "engine", "distributed", "functional"},
    "models": {"files", "pattern", "validation", "backends", "engine", "distributed", "functional", "modules"},
    "integrations": {"files", "pattern", "validation", "backends", "distributed", "engine", "functional", "modules", "models"},
    "testing": {"pattern", "backends", "engine", "functional"},
    "profiling": {"validation", "engine"},
    "factory": {"pattern", "validation", "backends", "engine", "functional", "modules", "models"},
    "planning": {"pattern", "validation", "backends", "engine", "distributed", "functional", "models", "factory"},
}


def sources() -> dict[str, Path]:
    """Returns the file of each module of the package, by its dotted name; a folder has the name of its ``__init__``."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        parts = (ROOT.name, *file.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Yields the modules that a file imports, wherever in it: inside functions and for type checkers, too.

    ``from a.b import c`` imports a.b.c if that is a module, and else a.b.
    """
    known = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not counted; write out the package's name"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names if name in known or node.module in known)


@functools.cache
def graph() -> Edges:
    """Returns what each module imports; names are without the package's own, which alone stands for its front."""
    files = sources()
    found = {name: imported(ast.parse(file.read_text()), files) for name, file in files.items()}
    return {_short(name): {_short(other) for other in others} for name, others in found.items()}


def _short(name: str) -> str:
    return name.removeprefix(f"{ROOT.name}.")


def siblings(one: Path, two: Path) -> tuple[str, str] | None:
    """Returns the folders of one parent that two files are in; None where that is one folder, or a folder and one inside it."""
    parts = [file.relative_to(ROOT).parent.parts for file in (one, two)]
    for depth, (x, y) in enumerate(zip(*parts, strict=False)):
        if x != y:
            return ".".join(parts[0][: depth + 1]), ".".join(parts[1][: depth + 1])
    return None


def test_no_file_is_long() -> None:
    files = (*ROOT.rglob("*.py"), *(ROOT.parent / "benchmarks").glob("*.py"))
    lines = {str(file.relative_to(ROOT.parent)): file.read_text(encoding="utf-8").count("\n") for file in files}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not long, f"files of more than {MOST_LINES} lines, which one whole operation may have: {long}"


@pytest.mark.slow
def test_modules_import_in_no_circle() -> None:
    """Imports inside functions and for type checkers close a circle, too."""
    edges = {name: set(others) for name, others in graph().items()}
    for name, other in KNOWN_IMPORTS:
        edges[name].remove(other)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        # graphlib lists each module before the one that imports it
        circle = " → ".join(reversed(error.args[1]))
        pytest.fail(f"imports in a circle; move what both sides need into a module below them, or pass it as an argument: {circle}")


def test_imports_point_one_way() -> None:
    """pattern ← backends ← engine ← distributed ← functional ← modules ← models; only the front and ``cli`` are above BELOW."""
    above = {ROOT.name, "__main__", "cli"}
    upwards = set()
    for name, others in graph().items():
        part = name.partition(".")[0]
        assert part in BELOW or part in above, f"{name} is in a part of the package that BELOW does not list; say what it may import"
        for other in others:
            if part in BELOW and other.partition(".")[0] not in BELOW[part] | {part}:
                upwards.add((name, other))
    assert upwards == set(KNOWN_UPWARDS), "\n".join(
        f"{name} imports {other}, {'which BELOW does not allow' if (name, other) in upwards else 'no longer: remove the exception'}"
        for name, other in upwards ^ set(KNOWN_UPWARDS)
    )


def test_sibling_folders_import_one_way() -> None:
    """Of two folders side by side, only one imports from the other."""
    files = {_short(name): file for name, file in sources().items()}
    pairs = {siblings(files[name], files[other]): (name, other) for name, others in graph().items() for other in others}
    both = {" ".join(sorted(pair)): pairs[pair] for pair in pairs if pair is not None and pair[::-1] in pairs}
    new = "\n".join(f"{pair}: {' imports '.join(example)}" for pair, example in both.items() if pair not in KNOWN_PAIRS)
    assert not new, f"folders that import from each other:\n{new}"
    assert not KNOWN_PAIRS - set(both), f"{KNOWN_PAIRS - set(both)} import one way only; remove them from KNOWN_PAIRS"
