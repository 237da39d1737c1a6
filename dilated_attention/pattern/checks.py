"""Argument checks that patterns and the functional surface share: got, expected, one way out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def as_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """``value`` as a Python int. bool and float are refused: a float length is nearly always a division gone wrong."""
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected an integer")
    # an int passes untouched: torch.compile's symbolic ones know no hasattr, and operator.index would make a constant of them
    number = value if isinstance(value, int) else operator.index(value)
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} is {number}; expected an integer ≥ {minimum}")
    return number


def as_int_tuple(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        # numpy and torch vectors are no Sequence, but what users compute lengths with
        if isinstance(values, str) or not hasattr(values, "tolist") or getattr(values, "ndim", 1) != 1:
            raise TypeError(f"{name} is {values!r} ({type(values).__name__}); expected a list of integers")
        values = values.tolist()
    return tuple(as_int(f"{name}[{i}]", value) for i, value in enumerate(values))


def one_of(name: str, value: Any, allowed: tuple[str, ...], also: str = "") -> None:
    if not isinstance(value, str):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}); expected one of {', '.join(map(repr, allowed))}{' ' + also if also else ''}"
        )
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}{' ' + also if also else ''}")
