"""Runs public functions on a CPU as a GPU runs them: branches in chunks with one merge each, in plain torch."""

from __future__ import annotations

import functools

import pytest

from dilated_attention.engine.branches import merge_triton
from dilated_attention.functional import calls
from dilated_attention.functional.arguments import attend
from tests.helpers import merge_twin


def run_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ``attention`` and ``dilated_attention`` ask for the strategy "fused"."""

    monkeypatch.setattr(calls, "attend", functools.partial(attend, strategy="fused"))
    use_merge_twin(monkeypatch)


def use_merge_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch buffers are merged in plain torch, which takes float64 too."""
    for name in ("merge_buffers", "sum_buffers"):
        monkeypatch.setattr(merge_triton, name, getattr(merge_twin, name))
