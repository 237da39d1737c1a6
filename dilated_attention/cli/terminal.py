"""Draws a pattern with characters: rows are queries, columns keys, with one panel for the heads that attend alike."""

from __future__ import annotations

import torch

from dilated_attention.pattern import BlockPattern, Pattern
from dilated_attention.pattern.drawing import cell_pairs, cell_size, cell_sizes

# shades for multiplicities 0, 1, 2, … of a pattern whose highest multiplicity is 1, 2, 3; beyond that the last one covers all higher ones
_SHADES = ("·█", "·█", "·▒█", "·░▒█", "·░▒▓█")
# lower limits of a cell's mean multiplicity for each shade but the first
_LEVELS = (1e-30, 1 / 8, 1 / 2, 1.0)
_BETWEEN = "   "
# characters of a line, and of a panel: one of fewer columns shows nothing useful
NARROWEST, _NARROW_PANEL, _WIDE_PANEL = 24, 16, 128


def drawing(
    pattern: Pattern, num_positions: int, num_heads: int, *, is_causal: bool = False, heads: tuple[int, ...], width: int
) -> list[str]:
    """Returns lines of at most ``width`` characters, with a legend at the end.

    A character represents one pair if a row of them fits, else the smallest square of positions for which it does.

    Args:
        heads: those to draw, of ``num_heads``.
        width: of the terminal, in characters; at least ``NARROWEST``, or what a panel needs.
    """
    margin = len(f"{num_positions - 1} ")
    cell = cell_size(pattern, num_positions, min(_WIDE_PANEL, max(_NARROW_PANEL, width - margin)))
    pairs = cell_pairs(pattern, num_positions, num_heads, cell, is_causal=is_causal)
    highest = int(pairs.max()) if pairs.numel() else 0
    shades = _SHADES[-1 if cell > 1 else min(highest, len(_SHADES) - 1)]
    if cell == 1:
        levels = pairs.clamp(max=len(shades) - 1)
    else:
        levels = torch.bucketize(pairs / cell_sizes(num_positions, cell), torch.tensor(_LEVELS), right=True)
    alike: dict[bytes, list[int]] = {}
    for head in heads:
        alike.setdefault(pairs[head].numpy().tobytes(), []).append(head)
    across, last = pairs.shape[-1], str(num_positions - 1)
    room = across - 1 - len(last)
    axis = f"0{'keys'.center(room) if room > 5 else ' ' * room}{last}"[:across]
    panels = [
        [f"head {', '.join(map(str, same))}"[:across].ljust(across), axis]
        + ["".join(shades[level] for level in row) for row in levels[same[0]].tolist()]
        for same in alike.values()
    ]
    # the query's position, on every eighth line
    labels = ["", "", *(f"{i * cell} " if i % 8 == 0 else "" for i in range(across))]
    per_row = max(1, (width - margin + len(_BETWEEN)) // (across + len(_BETWEEN)))
    lines = []
    for start in range(0, len(panels), per_row):
        rows = zip(labels, *panels[start : start + per_row], strict=True)
        lines += [*((label.rjust(margin) + _BETWEEN.join(row)).rstrip() for label, *row in rows), ""]
    return [*lines, *_legend(shades, highest, cell, isinstance(pattern, BlockPattern))]


def _legend(shades: str, highest: int, cell: int, is_kept: bool) -> list[str]:
    """``is_kept``: a pair is either kept or not, so there is no multiplicity to explain."""
    axes = "rows are queries, columns keys;"
    if cell > 1:
        several, most = ("", "all") if is_kept else (", each as often as branches reach it", "1 or more")
        return [
            f"{axes} a character stands for {cell:,} × {cell:,} positions",
            f"part of its pairs{several}: · none  ░ below 1/8  ▒ below 1/2  ▓ below 1  █ {most}",
        ]
    if is_kept:
        return [f"{axes} {shades[0]} dropped  {shades[1]} kept"]
    named = "  ".join(f"{shade} {m}" for m, shade in enumerate(shades)) + (" or more" if highest >= len(shades) else "")
    return [f"{axes} branches that reach the pair: {named}"]
