"""Converts patterns to strings and back, since they pass through custom ops as strings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import operator
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dilated_attention.files import parse_json
from dilated_attention.pattern.base import Pattern

OBJECT = "object:"
_CLASS = "pattern"
_KINDS: dict[str, type[SpecPattern]] = {}
_living: weakref.WeakValueDictionary[int, SpecPattern] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@dataclass(frozen=True)
class SpecPattern(Pattern):
    """A pattern that can be written as a string and restored: its fields are numbers, strings, tuples and patterns of this kind."""

    # whether it holds a Python function or a tensor, which cannot be serialized: ``spec`` then refers to the live object
    holds_objects: ClassVar[bool] = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_number", "_spec")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy gets a new name, since the original may be freed before it
        self.__dict__.update(state)
        if self.holds_objects:
            name_object(self)

    def spec(self) -> str:
        """Returns the pattern as a string. ``pattern_from_spec`` restores an equal one (the same one, if it holds a function or tensor)."""
        if torch.compiler.is_compiling():
            return _text(_plain(self))
        # computed once, since every call of an op needs it
        if "_spec" not in self.__dict__:
            kind = vars(type(self))
            if "__init__" in kind and "__dataclass_fields__" not in kind:
                raise TypeError(
                    f"{type(self).__name__} has an __init__ of its own and is not a dataclass, so two of them cannot be told apart; "
                    "write its arguments as fields and decorate it with @dataclass(frozen=True)"
                )
            self.__dict__["_spec"] = _text(_plain(self))
        spec: str = self.__dict__["_spec"]
        return spec

    @functools.cached_property
    def lives_here(self) -> bool:
        """Whether the pattern or a part of it holds a function or a tensor, which other processes cannot restore from ``spec``."""
        return OBJECT in self.spec()


def register_kind(kind: type[SpecPattern]) -> None:
    """Registers a pattern class by its name. Defining it again, as notebooks do, replaces it."""
    known = _KINDS.get(kind.__name__)
    if known is not None and known.__module__ != kind.__module__:
        raise TypeError(f"{kind.__module__}.{kind.__name__} has the name of {known.__module__}.{known.__name__}: give it another name")
    _KINDS[kind.__name__] = kind
    if known is not None:
        _read_and_kept.cache_clear()


def kind_named(name: str) -> Any:
    """Returns the pattern class of this name, for a base class that its subclasses import."""
    return _KINDS[name]


def _read(spec: str) -> SpecPattern:
    try:
        pattern = _value(parse_json(spec, "spec"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"spec is {spec[:200]!r}; expected what BlockPattern.spec() returns ({error})") from error
    if not isinstance(pattern, SpecPattern):
        raise ValueError(f"spec is {spec!r}; expected what BlockPattern.spec() returns")
    return pattern


_read_and_kept = functools.lru_cache(maxsize=256)(_read)


def _plain(value: Any) -> Any:
    """Returns plain data that ``_value`` reads. torch.compile traces this code, as a pattern may be made inside a compiled function."""
    if isinstance(value, SpecPattern):
        if value.holds_objects:
            return f"{OBJECT}{_number_of(value)}"
        fields = [
            (field.metadata.get("argument", field.name), getattr(value, field.name)) for field in dataclasses.fields(value) if field.init
        ]
        return {_CLASS: type(value).__name__} | {name: _plain(argument) for name, argument in fields}
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    # makes constants of torch.compile's symbolic numbers
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    return value.__float__() if isinstance(value, float) else value


def _text(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))


# what torch.compiler.assume_constant_result does, without importing the compiler
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def restored(spec: str) -> SpecPattern:
    """Restores a pattern from its ``spec``. See ``pattern_from_spec``."""
    # a cache would keep live objects alive forever
    return _read(spec) if OBJECT in spec else _read_and_kept(spec)


def name_object(pattern: SpecPattern) -> None:
    """Gives a pattern that holds a function or a tensor the number by which its spec refers to it."""
    # not inside a compiled function, where nothing would keep the pattern alive until the graph runs
    if not torch.compiler.is_compiling():
        number = next(_numbers)
        object.__setattr__(pattern, "_number", number)
        _living[number] = pattern


def _number_of(pattern: SpecPattern) -> int:
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
