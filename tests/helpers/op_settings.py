"""Settings of a call, for tests that call an op or a function below the public ones; and the calls that a function gets."""

from typing import Any

import pytest

from dilated_attention.engine.ops.settings import CallSettings

PLAIN = CallSettings(0.5, branches=((4, 8), (1, 2), "cyclic", "all", "mask"))


def settings(**changes: Any) -> CallSettings:
    return PLAIN._replace(**changes)


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
    """(name, arguments) of each call of these functions from now on, which run as before."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def watched(name: str, inner: Any) -> Any:
        return lambda *args, **options: calls.append((name, args)) or inner(*args, **options)

    for name in names:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    return calls
