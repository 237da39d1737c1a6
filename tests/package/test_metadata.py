"""A plain installation has what the package needs, and the wheel's description leads somewhere."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.package.test_layout import sources

ROOT = Path(__file__).parents[2]
# what the package may import, and which extra or other package has it; of triton, torch for CUDA depends on it
DEPENDENCIES = {"torch", "einops", "safetensors", "rich"}
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


def test_commands_and_saving_work_on_a_plain_installation(tmp_path: Path) -> None:
    code = f"""
import sys
# of these, an import fails and find_spec finds nothing
sys.modules.update(dict.fromkeys(("matplotlib", "tensorboard", "tqdm", "transformers")))
from dilated_attention import create_model
from dilated_attention.cli import main
for arguments in (
    ["info"],
    ["show", "longnet-tiny"],
    ["show", "dilated", "--segment-lengths", "8", "32", "--dilation-rates", "1", "4", "--length", "32"],
    ["plan", "dense", "--length", "1k"],
    ["recommend", "encoder", "--length", "64k"],
    ["bench"],
):
    assert main(arguments) == 0, arguments
model = create_model("longnet-tiny")
model.save_pretrained({str(tmp_path / "model")!r})
type(model).from_pretrained({str(tmp_path / "model")!r})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "python -m benchmarks" in result.stdout


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
