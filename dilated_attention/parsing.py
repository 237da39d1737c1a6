"""Parses sizes and other numbers on a command line, and shortens values for error messages. Needs no torch."""

from __future__ import annotations

import argparse
import reprlib


class _Short(reprlib.Repr):
    """Writes Python's own ``repr`` of what fits into a line, and the beginning and end of anything larger."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = self.maxdict = 16
        self.maxstring = self.maxother = 160

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write an integer of more than 4,300 digits
        if x.bit_length() > 2**13:
            return f"about {'-' if x < 0 else ''}2**{x.bit_length() - 1}"
        text = repr(x)
        return text if len(text) <= 40 else f"{text[:20]}… ({len(text.lstrip('-'))} digits)"


shown = _Short().repr

# lengths pass through custom ops as 64-bit integers; this is longer than any sequence
MAX_LENGTH = 2**62


class UsageError(ValueError):
    """Invalid or contradictory arguments that argparse cannot detect; exit code 2, like argparse's own errors."""


_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def size(text: str) -> int:
    """Parses a whole number from 1, or one in powers of two: ``65536``, ``64k``, ``1M``, ``1G`` are 65536, 65536, 1048576, 1073741824."""
    unit = _UNITS.get(text[-1:].lower())
    digits = text[:-1] if unit else text
    number = int(digits) * (unit or 1) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else 0
    if not 1 <= number <= MAX_LENGTH:
        expected = "a whole number from 1 to 2**62, or one with k, M or G: 64k is 65536"
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a size; expected {expected}")
    return number


def below(text: str, most: float, otherwise: str) -> float:
    """Parses a number above 0 and below ``most``; ``otherwise`` describes what the text is if it is not one."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < most:
        raise argparse.ArgumentTypeError(f"{shown(text)} is {otherwise}")
    return number
