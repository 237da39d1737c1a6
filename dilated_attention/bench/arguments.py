"""How sizes and other numbers are written on a command line."""

from __future__ import annotations

import argparse


class UsageError(ValueError):
    """Arguments that cannot be, or do not go together, which argparse cannot tell: exit code 2, as of its own errors."""


_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def size(text: str) -> int:
    """A whole number from 1, or one in powers of two: ``65536``, ``64k``, ``1M``, ``1G`` are 65536, 65536, 1048576, 1073741824."""
    unit = _UNITS.get(text[-1:].lower())
    digits = text[:-1] if unit else text
    if not (digits.isascii() and digits.isdecimal()) or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected a whole number from 1, or one with k, M or G: 64k is 65536")
    return int(digits) * (unit or 1)


def positive(text: str) -> float:
    """A number above 0."""
    return below(text, 1e30, "no number above 0; expected e.g. 2 or 0.5")


def below(text: str, most: float, otherwise: str) -> float:
    """A number above 0 and below ``most``; ``otherwise``: what the text is then."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < most:
        raise argparse.ArgumentTypeError(f"{text!r} is {otherwise}")
    return number
