"""Kernels are launched on the current device, which need not be that of the tensors: every launch of this package says which it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dilated_attention

ROOT = Path(dilated_attention.__file__).parent


def launches(node: ast.AST, guarded: bool = False) -> Iterator[tuple[int, bool]]:
    """(line, whether it lies in a ``with`` that sets the device) of each ``kernel[grid](…)``."""
    if isinstance(node, ast.With):
        guarded = guarded or any(word in ast.unparse(item) for item in node.items for word in ("on_device(", "cuda.device"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value).endswith("kernel"):
        yield node.lineno, guarded
    for child in ast.iter_child_nodes(node):
        yield from launches(child, guarded)


def test_every_kernel_is_launched_on_its_tensors_device() -> None:
    found = [
        (f"{path.relative_to(ROOT)}:{line}", guarded)
        for path in sorted(ROOT.rglob("*.py"))
        for line, guarded in launches(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) >= 11
    assert [place for place, guarded in found if not guarded] == []
