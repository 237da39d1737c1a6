"""A plain installation has what the package needs, and the wheel's description leads somewhere."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.package.test_layout import sources

ROOT = Path(__file__).parents[2]
# what the package may import, and which extra or other package has it; of triton, torch for CUDA depends on it
DEPENDENCIES = {"torch", "einops", "safetensors"}
# not imported here: safetensors.torch needs it and does not depend on it
INDIRECT = {"numpy"}
OPTIONAL = {
    "PIL": "plot: matplotlib depends on it",
    "cutlass": "cudnn, flash4: both depend on it",
    "fa3_fwd": "fp8",
    "flash_attn": "flash2, flash4",
    "flash_attn_interface": "flash3, named by its refusal",
    "huggingface_hub": "hf: transformers depends on it",
    "matplotlib": "plot",
    "transformers": "hf",
    "triton": "torch",
    "typing_extensions": "torch depends on it",
    "xformers": "xformers",
}


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]  # type: ignore[no-any-return]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0] for requirement in requirements}


def test_the_dependencies_are_what_is_imported() -> None:
    assert names(project()["dependencies"]) == DEPENDENCIES | INDIRECT
    imported = set()
    for file in sources().values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"dilated_attention"} - DEPENDENCIES - INDIRECT
    assert others <= set(OPTIONAL), (
        f"{others - set(OPTIONAL)} are imported: a dependency, or an optional package with an error that names it"
    )
    assert imported >= DEPENDENCIES


def test_what_examples_train_with_has_an_extra() -> None:
    extras = project()["optional-dependencies"]
    assert names(extras["train"]) == {"matplotlib", "tensorboard", "tqdm", "tomli"}
    assert "train" in extras["dev"][0]


def test_the_wheel_has_every_file_of_the_package_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    # a copy, so that the tree gets no folder build, which would go into other wheels
    source = tmp_path / "source"
    shutil.copytree(ROOT / "dilated_attention", source / "dilated_attention", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), "."]
    result = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("dilated_attention/")}
        archive.extractall(tmp_path / "installed")
    files = {file.relative_to(source).as_posix() for file in (source / "dilated_attention").rglob("*") if file.is_file()}
    assert packed == files
    # with the wheel's files, not those of this tree
    run = [sys.executable, "-m", "dilated_attention", "plan", "dense", "--length", "1k", "--gpu", "H100"]
    result = subprocess.run(
        run, cwd=tmp_path / "installed", env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0 and "H100" in result.stdout, result.stderr


def test_the_description_has_no_link_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "setuptools", types.SimpleNamespace(setup=given.update))
    runpy.run_path(str(ROOT / "setup.py"))
    text, readme = given["long_description"], (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert text.startswith(readme.partition("\n")[0])
    paths = re.findall(r"\]\((?!https:)([^)#\s]+)", readme)
    assert paths and all(path in text and (ROOT / path).is_file() for path in paths)
    # the source distribution holds them
    kept = (ROOT / "MANIFEST.in").read_text()
    assert all(f"graft {path.partition('/')[0]}\n" in kept or f" {path}" in kept for path in paths)
