"""Formats figures of plans as text for people to read: times, FLOPs, the longest length that fits."""

from __future__ import annotations

_TIMES = (("days", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 0.9995), ("ms", 1e-3, 0.9995e-3))


def flops_text(flops: float) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= 0.9995 * size:
            return f"{three_digits(flops / size)} {unit}"
    return f"{three_digits(flops / 1e6)} MFLOP"


def seconds_text(seconds: float) -> str:
    """Formats a time in the usual unit for its magnitude: 35 µs, 12.3 ms, 47 s, 6.2 min, 5.1 h, 3.4 days."""
    for unit, size, least in _TIMES:
        if seconds >= least:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def longest_text(longest: int, what: str = "the longest that does") -> str:
    return f"{what}: {'at least ' if longest >= 2**31 else ''}{longest:,} positions" if longest else f"{what}: none, not one position fits"


def three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
