"""Modules of the examples, and their scripts run in this process, which has torch already."""

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_examples import EXAMPLES, write_text


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of examples/, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def here(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a script: (exit code, stdout, stderr)."""
    # run_safely sets how warnings are printed
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def call(script: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            code = part("recipe.main").run_safely(part(script.removesuffix(".py")).main)
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data"))
