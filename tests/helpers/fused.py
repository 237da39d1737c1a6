"""Runs public functions on a CPU as a GPU runs them: branches in chunks with one merge each, in plain torch."""

from __future__ import annotations

import pytest

from dilated_attention.backends import registry
from dilated_attention.engine.branches import merge_triton
from dilated_attention.engine.ops import definition, prepare
from tests.helpers import merge_twin


def run_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on calls with branches run with one merge, and what was decided before is not looked up."""
    monkeypatch.setattr(registry, "cached", {})
    for module in (prepare, definition):
        monkeypatch.setattr(module, "fuses", lambda hardware, dtype: True)
    use_merge_twin(monkeypatch)


def use_merge_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch buffers are merged in plain torch, which takes float64 too."""
    for name in ("merge_buffers", "sum_buffers"):
        monkeypatch.setattr(merge_triton, name, getattr(merge_twin, name))
