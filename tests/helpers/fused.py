"""Runs public functions on a CPU as a GPU runs them: branches in chunks with one merge each."""

from __future__ import annotations

from typing import Any

import pytest

from dilated_attention.functional import single
from dilated_attention.functional.arguments import attend


def run_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ``attention`` and ``dilated_attention`` ask for the strategy "fused"."""

    def fused(*arguments: Any) -> Any:
        *others, options = arguments
        return attend(*others, options._replace(strategy="fused"))

    monkeypatch.setattr(single, "attend", fused)
