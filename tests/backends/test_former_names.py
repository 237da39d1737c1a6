"""Backends written with the former names of the interface still work, and are told the new ones."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch

from dilated_attention import backends
from dilated_attention.backends.torch_ops.math import MathBackend


@pytest.mark.parametrize("old, new", [("Request", "AttentionRequest"), ("NESTED_FACTS", "NESTED_CAPABILITIES")])
def test_a_former_export_is_the_new_object(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now called .*{new}"):
        assert getattr(backends, old) is getattr(backends, new)


def test_a_name_that_never_was_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = backends.no_such_name  # type: ignore[attr-defined]


def test_former_declarations_keep_their_fields() -> None:
    with pytest.warns(DeprecationWarning, match="Capabilities"):
        old: Any = attrgetter("Facts")(backends)
    declared = old(devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16}), capabilities=((8, 0), (9, 0)))
    assert isinstance(declared, backends.Capabilities) and declared.compute_capabilities == declared.capabilities == ((8, 0), (9, 0))
    assert replace(declared, compute_capabilities=None).capabilities is None
    asked = backends.AttentionRequest(hardware=backends.detect("cpu"), dtype=torch.float16, head_dim=64)
    assert backends.reasons_of(declared, asked) == ["runs on cuda, not on cpu"]


def test_a_backend_with_the_former_names_is_asked() -> None:
    declared = replace(MathBackend.capabilities, max_head_dim=8)
    with pytest.warns(DeprecationWarning) as told:
        old = type("Old", (MathBackend,), {"name": "old", "facts": declared, "why_not": lambda self, request: ["never"]})()
    assert {str(x.message).partition(";")[0] for x in told} == {
        "Old.facts is now called capabilities",
        "Old.why_not is now called reasons_against",
    }
    assert old.capabilities is declared
    assert old.reasons_against(None) == ["never"]
    with pytest.warns(DeprecationWarning, match=r"MathBackend\.facts is now called capabilities"):
        assert attrgetter("facts")(MathBackend()) is MathBackend.capabilities
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = MathBackend().no_such_name
