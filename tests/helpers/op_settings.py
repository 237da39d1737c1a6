"""Settings of a call, for tests that call an op or a function below the public ones."""

from __future__ import annotations

from typing import Any

from dilated_attention.engine.ops.settings import CallSettings

PLAIN = CallSettings(
    branches=((4, 8), (1, 2), "cyclic", "all", "mask"),
    blocks="",
    window=(),
    is_causal=False,
    detached=False,
    deterministic=False,
    needs_grad=False,
    backend="auto",
    precision="native",
    softcap=0.0,
    has_sinks=False,
    sharding=(),
    scale=0.5,
    dropout_p=0.0,
)


def settings(**changes: Any) -> CallSettings:
    return PLAIN._replace(**changes)
