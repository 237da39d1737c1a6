"""Converts patterns to strings and back, since they pass through custom ops as strings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import weakref
from typing import Any

import torch

from dilated_attention.files import parse_json
from dilated_attention.pattern.blocks.base import BlockPattern

OBJECT = "object:"
_CLASS = "pattern"
_KINDS: dict[str, type[BlockPattern]] = {}
_living: weakref.WeakValueDictionary[int, BlockPattern] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register_kind(kind: type[BlockPattern]) -> None:
    """Registers a pattern class by its name. Defining it again, as notebooks do, replaces it."""
    known = _KINDS.get(kind.__name__)
    if known is not None and known.__module__ != kind.__module__:
        raise TypeError(f"{kind.__module__}.{kind.__name__} has the name of {known.__module__}.{known.__name__}: give it another name")
    _KINDS[kind.__name__] = kind
    if known is not None:
        _read_and_kept.cache_clear()


def spec_of(pattern: BlockPattern) -> str:
    return _written(pattern)


def pattern_from_spec(spec: str) -> BlockPattern:
    """Restores the pattern that ``BlockPattern.spec`` wrote.

    Raises:
        RuntimeError: the pattern held a Python function or a tensor, and has been freed or was in another process.
        ValueError: the string is not the spec of a pattern.
    """
    # a cache would keep live objects alive forever
    return _read(spec) if OBJECT in spec else _read_and_kept(spec)


def _read(spec: str) -> BlockPattern:
    try:
        pattern = _value(parse_json(spec, "spec"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"spec is {spec[:200]!r}; expected what BlockPattern.spec() returns ({error})") from error
    if not isinstance(pattern, BlockPattern):
        raise ValueError(f"spec is {spec!r}; expected what BlockPattern.spec() returns")
    return pattern


_read_and_kept = functools.lru_cache(maxsize=256)(_read)


def _written(value: Any) -> str:
    """Writes ``value`` as JSON by hand, with code that torch.compile can trace: a pattern may be made inside a compiled function."""
    if isinstance(value, BlockPattern):
        if value.holds_objects:
            return f'"{OBJECT}{_number_of(value)}"'
        fields = [f'"{_CLASS}":"{type(value).__name__}"']
        for described in dataclasses.fields(value):
            if described.init:
                name = described.metadata.get("argument", described.name)
                fields.append(f'"{name}":{_written(getattr(value, described.name))}')
        return "{" + ",".join(fields) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join([_written(x) for x in value]) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # makes a constant of torch.compile's symbolic ones, as __float__ does below
        return f"{operator.index(value)}"
    if isinstance(value, float):
        return f"{value.__float__()}"
    assert isinstance(value, str), f"{value!r} is nothing that a spec holds"
    return '"' + value + '"'


def name_object(pattern: BlockPattern) -> None:
    """Gives a pattern that holds a function or a tensor the number by which its spec refers to it."""
    # not inside a compiled function, where nothing would keep the pattern alive until the graph runs
    if not torch.compiler.is_compiling():
        number = next(_numbers)
        object.__setattr__(pattern, "_number", number)
        _living[number] = pattern


def _number_of(pattern: BlockPattern) -> int:
    number = getattr(pattern, "_number", None)
    if number is None:
        raise RuntimeError("a pattern that holds a function or a tensor is made inside a compiled function; make it outside")
    return operator.index(number)


def _value(written: Any) -> Any:
    if isinstance(written, dict):
        fields = {name: _value(value) for name, value in written.items() if name != _CLASS}
        kind = _KINDS.get(written.get(_CLASS, ""))
        if kind is None:
            known = ", ".join(sorted(name for name, kind in _KINDS.items() if not inspect.isabstract(kind)))
            raise ValueError(f"no pattern is called {written.get(_CLASS)!r}; known are {known}")
        return kind(**fields)
    if isinstance(written, list):
        return tuple(_value(x) for x in written)
    if isinstance(written, str) and written.startswith(OBJECT):
        pattern = _living.get(int(written.removeprefix(OBJECT)))
        if pattern is None:
            raise RuntimeError(
                f"the pattern {written!r} holds a function or a tensor and has been freed, or was made by another process; "
                "keep a reference to it as long as it is used, until after the backward pass"
            )
        return pattern
    return written
