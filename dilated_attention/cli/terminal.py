"""Draws a pattern with characters: rows are queries, columns keys, with one panel for the heads that attend alike."""

from __future__ import annotations

import torch

from dilated_attention.pattern import BlockPattern, Pattern
from dilated_attention.pattern.cells import cell_pairs, cell_size, cell_sizes

# shades for multiplicities 0, 1, 2, … of a pattern whose highest multiplicity is 1, 2, 3; beyond that the last one covers all higher ones
_SHADES = ("·█", "·█", "·▒█", "·░▒█", "·░▒▓█")
# lower limits of a cell's mean multiplicity for each shade but the first
_LEVELS = (1e-30, 1 / 8, 1 / 2, 1.0)
_BETWEEN = "   "
# a panel of fewer columns shows nothing useful
_NARROWEST, _WIDEST = 16, 128


def drawing(
    pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool = False, heads: tuple[int, ...], width: int
) -> list[str]:
    """Returns lines of at most ``width`` characters, with a legend at the end.

    A character represents one pair if a row of them fits, else the smallest square of positions for which it does.

    Args:
        heads: those to draw, of ``num_heads``.
        width: of the terminal, in characters; at least 24.
    """
    margin = len(f"{num_positions - 1} ")
    cell = cell_size(pattern, num_positions, min(_WIDEST, max(_NARROWEST, width - margin)))
    pairs = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal)
    highest = int(pairs.max()) if pairs.numel() else 0
    if cell == 1:
        shades = _SHADES[min(highest, len(_SHADES) - 1)]
        levels = pairs.clamp(max=len(shades) - 1)
    else:
        shades = _SHADES[-1]
        levels = torch.bucketize(pairs / cell_sizes(num_positions, cell), torch.tensor(_LEVELS), right=True)
    panels: dict[bytes, list[int]] = {}
    for head in heads:
        panels.setdefault(pairs[head].numpy().tobytes(), []).append(head)
    across, gap = pairs.shape[-1], " " * margin
    per_row = max(1, (width - margin + len(_BETWEEN)) // (across + len(_BETWEEN)))
    alike = list(panels.values())
    lines = []
    for first in range(0, len(alike), per_row):
        row = alike[first : first + per_row]
        titles = [f"head {', '.join(map(str, found))}"[:across].ljust(across) for found in row]
        lines += [gap + _BETWEEN.join(line).rstrip() for line in (titles, [_axis(across, num_positions)] * len(row))]
        for i in range(across):
            # the query's position, on every eighth line
            label = f"{i * cell} ".rjust(margin) if i % 8 == 0 else gap
            lines.append(label + _BETWEEN.join("".join(shades[m] for m in levels[found[0], i].tolist()) for found in row))
        lines.append("")
    return [*lines, *_legend(shades, highest, cell, isinstance(pattern, BlockPattern))]


def _axis(across: int, num_positions: int) -> str:
    last, name = str(num_positions - 1), "keys"
    if across < len(last) + len(name) + 4:
        return "0".ljust(across - len(last)) + last if across > len(last) + 1 else "0".ljust(across)
    return "0" + name.center(across - 1 - len(last)) + last


def _legend(shades: str, highest: int, cell: int, is_kept: bool) -> list[str]:
    """``is_kept``: a pair is either kept or not, so there is no multiplicity to explain."""
    if cell > 1:
        several = "" if is_kept else ", each as often as branches reach it"
        return [
            f"rows are queries, columns keys; a character stands for {cell:,} × {cell:,} positions",
            f"part of its pairs{several}: · none  ░ below 1/8  ▒ below 1/2  ▓ below 1  █ {'all' if is_kept else '1 or more'}",
        ]
    named = "  ".join(f"{shade} {m}" for m, shade in enumerate(shades)) + (" or more" if highest >= len(shades) else "")
    named = f"{shades[0]} dropped  {shades[1]} kept" if is_kept else f"branches that reach the pair: {named}"
    return [f"rows are queries, columns keys; {named}"]
