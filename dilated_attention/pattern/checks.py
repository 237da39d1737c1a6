"""Argument checks shared by patterns and the functional API. Messages name what was given, what is expected, and a way out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from dilated_attention.parsing import MAX_LENGTH as MAX_LENGTH
from dilated_attention.parsing import shown as shown

# the most heads, which patterns count one by one, and branches
MAX_HEADS, MAX_BRANCHES = 2**20, 1024
# the most processes of a layout that is computed without a group
MAX_RANKS = 2**20
# elements of a mask of all pairs
MAX_MASK = 2**32
# the sizes of a block, of queries and of keys
BLOCK_SIZES = (64, 128)


def as_int(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = MAX_LENGTH) -> int:
    """Returns ``value`` as a Python int from ``minimum`` to ``maximum`` (None: no limit). Refuses bool and float: a float length is nearly
    always a mistake."""
    if isinstance(value, bool):
        number = None
    elif isinstance(value, int):
        # unchanged: operator.index would make torch.compile's symbolic ints constants, and they do not support hasattr
        number = value
    else:
        try:
            # a bool tensor has an index, too
            number = None if str(getattr(value, "dtype", "")).endswith("bool") else operator.index(value)
        except (TypeError, RuntimeError):
            # a tensor with several elements or on the meta device
            number = None
    if number is None:
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); expected an integer")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} is {shown(number)}; expected an integer ≥ {minimum}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} is {shown(number)}; expected an integer ≤ {f'{maximum:,}' if maximum < MAX_LENGTH else '2**62'}")
    return number


def differs(value: Any, default: Any) -> bool:
    """Whether an argument of any type is not the default, a plain value: of tensors and arrays ``!=`` is no bool, so all of them do, but a
    number of theirs beside a default that is none, too."""
    if isinstance(default, tuple) and hasattr(value, "ndim"):
        return True
    return bool(getattr(value, "ndim", 0) or value != default)


def check_number(name: str, value: Any, expected: str) -> None:
    """Raises TypeError if a value is no int or float, as a bool is not; ``expected`` says which numbers are."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); expected {expected}")


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); expected True or False")
    return value


def as_int_tuple(name: str, values: Any, *, minimum: int | None = None, maximum: int | None = None) -> tuple[int, ...]:
    # numpy and torch vectors are not a Sequence, but users compute lengths with them. Those that hold no list of numbers are refused below
    is_held = not any(getattr(values, name, False) for name in ("is_sparse", "is_meta", "is_quantized"))
    if is_held and hasattr(values, "tolist") and getattr(values, "ndim", 1) == 1:
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name} is {shown(values)} ({type(values).__name__}); expected a list of integers")
    return tuple(as_int(f"{name}[{i}]", value, minimum=minimum, maximum=maximum) for i, value in enumerate(values))


def one_of(name: str, value: Any, allowed: tuple[str, ...], also: str = "") -> None:
    expected = f"expected one of {', '.join(map(repr, allowed))}{' ' + also if also else ''}"
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); {expected}")
    if value not in allowed:
        raise ValueError(f"{name} is {shown(value)}; {expected}")


def checked_block_size(block_size: Any) -> tuple[int, int]:
    """Returns (q_block, k_block) from an integer or a pair."""
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size is {shown(block_size)}; expected one integer or (query block, key block)")
    sizes = tuple(as_int("block_size", size) for size in sizes)
    if any(size not in BLOCK_SIZES for size in sizes):
        raise ValueError(f"block_size is {shown(block_size)}; expected 64 or 128, or (query block, key block) with each of them 64 or 128")
    return sizes
