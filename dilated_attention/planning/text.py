"""Formats figures of plans as text for people to read: sizes, times, FLOPs, tables, and what fits."""

from __future__ import annotations

from collections.abc import Sequence

from dilated_attention.models.summary import USABLE, readable

_TIMES = (("days", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 0.9995), ("ms", 1e-3, 0.9995e-3))


def fit_text(fits: bool, peak: int, memory: int, longest: int, reserve: int = 0) -> str:
    """Says whether ``peak`` bytes fit a device's ``memory``. ``reserve``: bytes of them that the allocator cannot use again."""
    part = peak / memory
    share = f"{_three_digits(100 * part)}% of" if part < 10 else f"{_three_digits(part)} times"
    found = f"{'yes' if fits else 'no'}: it takes {share} the memory, of which {USABLE:.0%} can be used"
    found += f", and {readable(reserve)} are in pieces that the allocator cannot use again" if reserve else ""
    return f"{found}; {longest_text(longest)}"


def flops_text(flops: float) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= 0.9995 * size:
            return f"{_three_digits(flops / size)} {unit}"
    return f"{_three_digits(flops / 1e6)} MFLOP"


def seconds_text(seconds: float) -> str:
    """Formats a time in the usual unit for its magnitude: 35 µs, 12.3 ms, 47 s, 6.2 min, 5.1 h, 3.4 days."""
    for unit, size, least in _TIMES:
        if seconds >= least:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def longest_text(longest: int, what: str = "the longest that does") -> str:
    return f"{what}: {'at least ' if longest >= 2**31 else ''}{longest:,} positions" if longest else f"{what}: none, not one position fits"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def table_text(heading: Sequence[str], rows: Sequence[tuple[str, ...]], longest: int, sources: Sequence[str], no_time: str) -> str:
    """Formats rows of cells, right-aligned; below them the longest length that fits, and what the times are based on."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    times = f"times are estimates; in the last row: {'; '.join(dict.fromkeys(sources))}" if sources else f"no times: {no_time}"
    return "\n".join([*heading, "", *lines, "", longest_text(longest, f"the longest that fits in {USABLE:.0%} of the memory"), times])
